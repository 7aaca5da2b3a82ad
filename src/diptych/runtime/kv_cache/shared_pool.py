"""One pool of KV blocks for all CPU workers of a host: a file in memory (memfd) that each of them maps as a whole.

Block ids are global within the pool, so a worker can compute into another worker's blocks and nothing needs to be
copied afterwards. Each worker owns a range of ids; who may write where, and when, is decided in control.

The file comes from the front end (serving/fleet), filled with zeros. Nothing is ever cleared, neither when a
worker starts nor when it starts again: attention reads the slots that were written for a sequence and no others (behind
the last token, native kernels mask the scores and put zeros in place of the values; the torch backend gathers single
slots), so bytes that an earlier owner left, NaN included, have no effect.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from diptych.control.errors import ConfigError
from diptych.runtime.device.memory import map_file, populate
from diptych.runtime.kv_cache.kv_geometry import KVGeometry


@dataclass(frozen=True, slots=True)
class SharedPool:
    """Where a pool is and which part of it is this worker's.

    fd: the inherited descriptor of the file; it may be closed once the pool is mapped. total_blocks: of all workers.
    first_block: the first id of this worker.
    """

    fd: int
    total_blocks: int
    first_block: int


def map_pool(
    pool: SharedPool, geometry: KVGeometry, num_blocks: int, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(K, V) of each place of a block as 1-d tensors over all blocks of the pool. The memory of this worker's
    ``num_blocks`` is taken now, that of the others when it is used.

    Raises ConfigError when the file is smaller than a pool of this geometry, or the range does not lie in it.
    """
    size, needed = os.fstat(pool.fd).st_size, geometry.pool_bytes(pool.total_blocks)
    if size < needed:
        raise ConfigError(
            f"the shared pool has {size} bytes; {pool.total_blocks} blocks of {geometry.block_bytes} bytes each take "
            f"{needed}",
            param="total_blocks",
        )
    last_block = pool.first_block + num_blocks
    if not 0 <= pool.first_block < last_block <= pool.total_blocks:
        raise ConfigError(
            f"first_block is {pool.first_block} and num_blocks is {num_blocks}; the shared pool has "
            f"{pool.total_blocks} blocks",
            param="first_block",
        )
    memory = map_file(pool.fd, needed, is_shared=True)
    block_bytes = geometry.tensor_block_bytes

    def region(place: int, tensor: int) -> torch.Tensor:
        start = geometry.region_offset(place, tensor, pool.total_blocks)
        populate(memory, start + pool.first_block * block_bytes, start + last_block * block_bytes)
        return memory[start : start + pool.total_blocks * block_bytes].view(dtype)

    return ((region(place, 0), region(place, 1)) for place in range(geometry.num_regions))
