"""The memory that the CPU workers of this host share: one file for the KV blocks of all, one for the weights, and one
for the host blocks of each.

The front end makes the files (memfd: no name in any file system, gone with the last process that holds them) and
keeps them open, so that what a worker wrote outlives it. Workers inherit the descriptors. Never maps them, never
imports torch.
"""

import fcntl
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diptych.base.cgroups import ROOT, available_memory_bytes
from diptych.control.kv_layout import KVLayout
from diptych.runtime.kv_cache.kv_geometry import KVGeometry
from diptych.runtime.weights.weight_bytes import loaded_weight_bytes, memory_beside_weights, scratch_bytes
from diptych.serving.kv_memory import longest_sequence_of
from diptych.serving.link.engine_options import EngineOptions

DEFAULT_KV_BYTES, DEFAULT_FULL_SEQUENCES = 2 * 2**30, 32
MIN_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The files and who owns which blocks: worker w has ``num_blocks[w]`` from ``first_blocks[w]`` on.

    Pass both descriptors to every worker process (``pass_fds``); their numbers stay the same there.
    """

    pool_fd: int
    weights_fd: int
    total_blocks: int
    first_blocks: tuple[int, ...]
    num_blocks: tuple[int, ...]

    @property
    def fds(self) -> tuple[int, int]:
        """What workers inherit."""
        return self.pool_fd, self.weights_fd

    def close(self) -> None:
        """Let go of the files; the memory is freed when the last worker has ended."""
        os.close(self.pool_fd)
        os.close(self.weights_fd)


def create_shared_memory(geometry: KVGeometry, num_blocks: Sequence[int]) -> SharedMemory:
    """Create files for workers with ``num_blocks`` blocks each. They are empty: memory is taken when a worker maps its
    share.

    The pool's size is sealed, so that no process can cut off what others have mapped.
    """
    total = sum(num_blocks)
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    pool_fd = os.memfd_create("diptych-kv", flags)
    os.ftruncate(pool_fd, geometry.pool_bytes(total))
    fcntl.fcntl(pool_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    weights_fd = os.memfd_create("diptych-weights", flags)
    first_blocks = tuple(sum(num_blocks[:worker]) for worker in range(len(num_blocks)))
    return SharedMemory(pool_fd, weights_fd, total, first_blocks, tuple(num_blocks))


def keeps_order() -> bool:
    """Whether processes of this machine see each other's stores in their order, which reading host blocks of others
    needs (runtime/tiers/shared_host.py)."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def host_files(num_workers: int) -> tuple[int, ...]:
    """An empty file for the host blocks of each worker, which that worker lays out when it starts."""
    return tuple(
        os.memfd_create(f"diptych-host-{worker}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        for worker in range(num_workers)
    )


def default_num_blocks(options: EngineOptions, geometry: KVGeometry, num_workers: int, root: Path = ROOT) -> int:
    """Blocks of each worker when no option says how many, on a CPU: a quarter of the memory that is free beside the
    weights, on this machine and in its container, between all of them, at most 2 GiB each and at most what 32 sequences
    at full length use (touching memory for the first time takes long on some machines). root: see
    ``diptych.base.cgroups``. Raises ConfigError for weights that do not fit into memory."""
    layout = KVLayout(geometry.layers.groups)
    num_groups = len(layout.groups)
    longest = longest_sequence_of(options) // geometry.block_size * geometry.block_size
    useful = DEFAULT_FULL_SEQUENCES * (layout.peak_pages(longest) + 2 * num_groups)
    weights = loaded_weight_bytes(options.model, options.device.dtype, options.device.quantize, options.model_impl)
    free_bytes = memory_beside_weights(options.model, weights, available_memory_bytes(root))
    num_tokens = options.scheduler.budget.max_batched_tokens
    free_bytes -= num_workers * scratch_bytes(options.model, options.device.dtype, num_tokens, options.model_impl)
    share = min(free_bytes // (4 * num_workers), DEFAULT_KV_BYTES) // geometry.block_bytes
    return max(min(share, useful), MIN_BLOCKS * num_groups)
