"""The tiers below a simulated KV cache, from settings: how many host blocks, what a copy takes, which disk."""

from dataclasses import dataclass, replace

from diptych.control.config import CacheConfig, TierConfig
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_S
from diptych.simulation.costs.cost_choice import CostChoice
from diptych.simulation.fleet.links import Link
from diptych.simulation.fleet.simulated_disk import EXTENT_BLOCKS, DiskModel
from diptych.simulation.settings import Settings

MOST_STAGING_BYTES = 512 << 20  # as a live worker has it
PEER_BYTES_PER_S = 10_000_000_000  # of one thread that copies from memory to memory (assumed)


@dataclass(frozen=True, slots=True)
class SimulatedTiers:
    """The cache with its tiers. swap_block_ns: copying one block between device and host."""

    cache: CacheConfig
    swap_block_ns: int = 0
    disk: DiskModel | None = None


def with_tiers(settings: Settings, choice: CostChoice, cache: CacheConfig, gpu_block_bytes: int) -> SimulatedTiers:
    """Tiers of one worker, a lane of a replica's pipeline. gpu_block_bytes: bytes of one block on each GPU (0: not
    known). Raises ConfigError where the bytes of a block are not known."""
    memory, stages = settings.memory, settings.parallelism.pipeline
    if memory.shares_host and not memory.host_bytes:
        raise ConfigError(
            "memory.shares_host is true and memory.host_bytes is 0; there is nothing to share", param="shares_host"
        )
    if memory.shares_host and settings.parallelism.devices > 1:
        devices = settings.parallelism.devices
        raise ConfigError(
            f"memory.shares_host is true for replicas of {devices} devices; only those of one share",
            param="shares_host",
        )
    if not memory.host_bytes and not memory.disk_bytes:
        return SimulatedTiers(cache)
    if not gpu_block_bytes:
        name = "host_bytes" if memory.host_bytes else "disk_bytes"
        raise ConfigError(
            f"memory.{name} needs a model of the catalogue, whose KV size is known; cost is a calibration", param=name
        )
    block_bytes = gpu_block_bytes * settings.parallelism.tensor * stages
    host_blocks = memory.host_bytes // block_bytes // stages
    longest = cache.layout.peak_pages(settings.max_model_len or choice.max_model_len)
    disk = None
    if memory.disk_bytes:
        disk = DiskModel.named(memory.disk, memory.disk_bytes // stages, block_bytes)
        host_blocks = max(host_blocks, min(longest + EXTENT_BLOCKS, MOST_STAGING_BYTES // block_bytes), 2)
    swap_ns = gpu_block_bytes * NS_PER_S // Link.named(memory.host_link).bandwidth  # each over its own link
    tiers = TierConfig(
        copy_block_ns=swap_ns,
        clean_blocks=min(longest, cache.num_blocks // 2),
        has_disk=disk is not None,
        load_block_ns=disk.read_block_ns if disk else 0,
        shares_host=memory.shares_host,
        peer_block_ns=block_bytes * NS_PER_S // PEER_BYTES_PER_S,
    )
    return SimulatedTiers(replace(cache, num_host_blocks=host_blocks, tiers=tiers), swap_ns, disk)
