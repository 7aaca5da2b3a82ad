"""The memory of the KV cache: one pair of tensors per place of a block and tier, and block copies between the tiers.

Knows blocks only by number; who holds which block is decided in control.
"""

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from diptych.control.errors import ConfigError
from diptych.runtime.attention.attention_backend import AttentionBackend
from diptych.runtime.device.memory import populate_beside, zero_pages
from diptych.runtime.kv_cache.shared_pool import SharedPool, map_pool
from diptych.runtime.tiers.shared_host import SharedHost

logger = logging.getLogger(__name__)

LayerCache = tuple[torch.Tensor, torch.Tensor]  # k_cache, v_cache: block i is [i] of each, in the backend's layout


class KVTensors:
    """All layers' caches on the device, and the host tier beside them. host_bytes: its blocks as bytes, for a disk.

    regions: by place of a block. layers: of each layer, the region of its place; layers of several groups have the same
    one, and other blocks of it. groups: of each layer, the number of its group.

    The caches are this worker's own, or those of ``pool``: then they hold the blocks of all its workers, of which
    ``num_blocks`` from ``first_block`` on belong to this one. Only own blocks are copied to the host; prefills, copies
    from the host and ``copy_within`` write into others' where those have reserved them for it. host_fd: of a file for
    the host tier, so that other workers may read it (None, or where that cannot be: memory of its own);
    ``shared_host``: with it.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        num_blocks: int,
        num_host_blocks: int = 0,
        pool: SharedPool | None = None,
        host_fd: int | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.first_block = 0 if pool is None else pool.first_block
        if pool is None:
            self.regions: list[LayerCache] = [backend.allocate(num_blocks) for _ in range(backend.geometry.num_regions)]
        else:
            regions = map_pool(pool, backend.geometry, num_blocks, backend.dtype)
            self.regions = [backend.laid_out(k, v) for k, v in regions]
        self._place_of = place_of = backend.geometry.layers.place_of
        self.layers = [self.regions[place] for _, place in place_of]
        self.groups = tuple([group for group, _ in place_of])
        self.may_move = True  # False: somebody else knows where it lies
        self.shared_host: SharedHost | None = None
        self._host, self.host_bytes = self._allocate_host(num_host_blocks, host_fd)

    def shrink(self, num_blocks: int) -> None:
        """Keep the first ``num_blocks`` blocks of this worker's own memory, and give the rest back where it can be: one
        tensor is copied at a time. Memory that others know, and that of a CPU, stays as it is."""
        self.num_blocks = num_blocks
        for cache in [cache for region in self.regions for cache in region]:
            storage = cache.untyped_storage()
            size = num_blocks * cache[0].numel() * cache.element_size()
            if self.may_move and cache.device.type != "cpu" and storage.resizable() and size < storage.nbytes():
                storage.resize_(size)
        self.regions[:] = [(k[:num_blocks], v[:num_blocks]) for k, v in self.regions]
        self.layers[:] = [self.regions[place] for _, place in self._place_of]  # of which others keep the list

    def copy_to_host(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (device block, host block) pairs, no host block twice."""
        if self.shared_host is None:
            self._copy_to_host(pairs)
        else:
            with self.shared_host.writing([pair[1] for pair in pairs]):
                self._copy_to_host(pairs)

    def _copy_to_host(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in zip(self.regions, self._host, strict=True):
            self._copy(source, target, pairs)

    def copy_from_host(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (host block, device block) pairs."""
        for source, target in zip(self._host, self.regions, strict=True):
            self._copy(source, target, pairs)

    def copy_within(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (own block, block of another worker of the pool) pairs."""
        for region in self.regions:
            self._copy(region, region, pairs)

    def _allocate_host(self, num_blocks: int, fd: int | None) -> tuple[list[LayerCache], npt.NDArray[np.uint8]]:
        """The host tier twice: by places, as views shaped like the device's, and as bytes [num_blocks, bytes of a
        block]: K and V of each place in order, so that a block is one piece for the disk."""
        first = self.regions[0][0]
        part = first[0].numel() * first.element_size()
        size = 2 * len(self.regions) * part
        if fd is not None and num_blocks:
            try:
                self.shared_host = SharedHost(fd, num_blocks, size)
            except (ConfigError, OSError) as error:  # an optimisation less, and said in the log
                logger.warning("host blocks are not shared with other workers: %s", error)
        if self.shared_host is not None:
            memory = self.shared_host.memory
            populate_beside(self.shared_host.mapped)
        elif first.device.type == "cpu":
            memory = zero_pages(num_blocks * size)
            populate_beside(memory)
        else:
            memory = torch.zeros(num_blocks * size, dtype=torch.uint8, pin_memory=first.device.type == "cuda")
        blocks = memory.view(num_blocks, size)

        def view(place: int, tensor: int) -> torch.Tensor:
            start = (2 * place + tensor) * part
            shape = self.regions[place][tensor].shape[1:]  # K and V are laid out each in its own way
            return blocks[:, start : start + part].view(first.dtype).view(num_blocks, *shape)

        return [(view(place, 0), view(place, 1)) for place in range(len(self.regions))], blocks.numpy()

    def _copy(self, source: LayerCache, target: LayerCache, pairs: Sequence[tuple[int, int]]) -> None:
        if source[0].device.type == target[0].device.type == "cpu":
            origins, destinations = np.array(pairs, np.intp).reshape(-1, 2).T
            for from_cache, to_cache in zip(source, target, strict=True):
                _rows(to_cache)[destinations] = _rows(from_cache)[origins]
            return
        origin = torch.tensor([pair[0] for pair in pairs], device=source[0].device)
        destination = torch.tensor([pair[1] for pair in pairs], device=target[0].device)
        for from_cache, to_cache in zip(source, target, strict=True):
            to_cache[destination] = from_cache[origin].to(to_cache.device)


def _rows(cache: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The blocks of a cache in CPU memory as bytes, [num_blocks, bytes of a block]: numpy copies such rows
    faster than torch copies blocks."""
    rows: npt.NDArray[np.uint8] = cache.view(torch.uint8).view(len(cache), -1).numpy()
    return rows
