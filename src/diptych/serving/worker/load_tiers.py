"""The tiers below a worker's KV cache: how many host blocks, what a copy costs, and the disk if there is one."""

import dataclasses
import logging
import time
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from diptych.base.private_files import make_private_folder, warn_of_visitors
from diptych.control.config import TierConfig
from diptych.control.errors import ConfigError
from diptych.control.kv_layout import KVLayout
from diptych.runtime.kv_cache.kv_geometry import KVGeometry
from diptych.runtime.tiers.disk_store import DiskStore
from diptych.runtime.tiers.extent_format import MAX_BLOCKS
from diptych.runtime.tiers.tier_io import TierDriver, TierEvents, TierMover
from diptych.runtime.tiers.weights_digest import weights_digest
from diptych.runtime.weights.checkpoint import open_checkpoint
from diptych.serving.link.engine_options import EngineOptions, MemoryOptions

if TYPE_CHECKING:
    from diptych.runtime.kv_cache.kv_tensors import KVTensors
    from diptych.runtime.step.model_runner import ModelRunner
    from diptych.runtime.transfer.kv_format import KVFormat

logger = logging.getLogger(__name__)

MOST_STAGING_BYTES = 512 << 20  # host memory for what is on its way to or from the disk, where no option says more
GUESSED_BYTES_PER_S = 500_000_000  # of a disk that was not read yet
MEASURED_BLOCKS = 8


def num_host_blocks(memory: MemoryOptions, geometry: KVGeometry, max_model_len: int) -> int:
    """Host blocks of one worker: what the option gives, and with a disk at least enough to pass a prompt through."""
    blocks = memory.host_bytes // geometry.block_bytes
    if memory.disk is None:
        return blocks
    longest = KVLayout(geometry.layers.groups).peak_pages(max_model_len) + MAX_BLOCKS
    return max(blocks, min(longest, MOST_STAGING_BYTES // geometry.block_bytes), 2)


def tier_config(memory: MemoryOptions, runner: "ModelRunner", geometry: KVGeometry) -> TierConfig:
    """Measured for copies, guessed for the disk and for reading from other workers (as a copy to the device)."""
    if not runner.num_host_blocks:
        return TierConfig()
    longest = KVLayout(geometry.layers.groups).peak_pages(runner.max_model_len)
    copy_ns = measured_copy_ns(runner.kv, min(MEASURED_BLOCKS, runner.num_host_blocks, runner.num_blocks))
    return TierConfig(
        copy_block_ns=copy_ns,
        clean_blocks=min(longest, runner.num_blocks // 2),
        has_disk=memory.disk is not None,
        load_block_ns=geometry.block_bytes * 1_000_000_000 // GUESSED_BYTES_PER_S,
        shares_host=memory.prefix_cache and runner.kv.shared_host is not None,
        peer_block_ns=copy_ns,
    )


def measured_copy_ns(kv: "KVTensors", num_blocks: int) -> int:
    """The time of copying one block between device and host, the slower way; nothing is in the cache yet."""
    first = kv.first_block
    down = [(first + number, number) for number in range(num_blocks)]
    up = [(number, first + number) for number in range(num_blocks)]
    times_ns = []
    for _ in range(3):  # the first takes the memory
        begun_ns = time.perf_counter_ns()
        kv.copy_to_host(down)
        between_ns = time.perf_counter_ns()
        kv.copy_from_host(up)
        times_ns.append(max(between_ns - begun_ns, time.perf_counter_ns() - between_ns))
    return max(1, min(times_ns) // num_blocks)


def open_tiers(options: EngineOptions, runner: "ModelRunner", kv_format: "KVFormat") -> TierDriver | None:
    """What moves blocks between host memory and a disk, or between the host memories of workers; None where there is
    neither. Raises ConfigError for a folder that cannot be used."""
    place, shared = options.place, runner.kv.shared_host
    if options.memory.disk is None and shared is None:
        return None
    events = TierEvents()
    disk = None if options.memory.disk is None else _open_disk(options.memory, runner, kv_format, events)
    peers = None
    if shared is not None and place is not None:
        from diptych.runtime.tiers.tier_io import PeerReader

        host, digest = runner.kv.host_bytes, _memory_digest(runner, kv_format)
        fds = {worker: fd for worker, fd in place.host_fds.items() if worker != place.number}
        peers = PeerReader(shared, fds, digest, lambda block: memoryview(host[block]), events)
    return TierDriver(events, disk, peers)


def _memory_digest(runner: "ModelRunner", kv_format: "KVFormat") -> bytes:
    """Digest of what a block in host memory means: equal for processes that loaded the same files in the same way."""
    files = [path.stat() for path in open_checkpoint(runner.model_config).files]
    identities = [(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns) for status in files]
    words = (sorted(block_contents(runner, kv_format).items()), runner.loaded.instruction_set, identities)
    return blake2b(repr(words).encode(), digest_size=16).digest()


def block_contents(runner: "ModelRunner", kv_format: "KVFormat") -> dict[str, object]:
    """What lies in a block. Of layers in several groups, which of them, and where."""
    contents = kv_format.description
    if runner.groups:
        contents["places"] = [list(place) for place in runner.attention.geometry.layers.place_of]
    return contents


def _open_disk(memory: MemoryOptions, runner: "ModelRunner", kv_format: "KVFormat", events: TierEvents) -> TierMover:
    assert memory.disk is not None
    directory = Path(memory.disk)
    try:
        make_private_folder(directory)
        warn_of_visitors(directory, "kv_disk")
        weights = weights_digest(open_checkpoint(runner.model_config).files, directory)
    except OSError as error:
        raise ConfigError(f"kv_disk is {memory.disk!r}: {error.strerror}", param="kv_disk") from None
    host = runner.kv.host_bytes
    coding, block_bytes = None, int(host.shape[1])
    if memory.disk_codec != "none":
        from diptych.runtime.tiers.block_coding import BlockCoding

        of_block = dataclasses.replace(kv_format, num_layers=len(runner.kv.regions), windows=())
        coder = partial(BlockCoding, memory.disk_codec, of_block, runner.kv.regions)
        coding = coder(), coder()
        block_bytes = coding[0].num_bytes
    description: dict[str, object] = {
        **block_contents(runner, kv_format),
        "name": runner.model_config.path.name,
        "weights": weights,
        "kernels": runner.loaded.instruction_set,
        "block_bytes": block_bytes,
        **({"codec": memory.disk_codec} if coding else {}),
    }
    digest = blake2b(repr(sorted(format_identity(description).items())).encode(), digest_size=16).digest()
    store = DiskStore(directory, memory.disk_bytes, digest, block_bytes, description)
    logger.warning("disk tier in %s: %d blocks of %d tokens are there", directory, len(store), runner.block_size)
    shared = runner.kv.shared_host
    guard = {} if shared is None else {"writing": shared.writing}
    return TierMover(store, lambda block: memoryview(host[block]), coding, events=events, **guard)


def format_identity(description: dict[str, object]) -> dict[str, object]:
    """What makes a format another one: not the name under which the model lies somewhere."""
    return {key: value for key, value in description.items() if key != "name"}
