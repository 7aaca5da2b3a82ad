"""From settings to sizes: KV blocks, the pools of a fleet, the price of a swap.

Owns the arithmetic of memory. Must never read a file or know an option's name beyond the settings' own.
"""

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from diptych.control.config import CacheConfig, EngineConfig, SchedulerConfig, prefill_scheduler
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_S
from diptych.simulation.costs.cost_choice import CostChoice
from diptych.simulation.costs.fitted import Calibration
from diptych.simulation.fleet.links import Link
from diptych.simulation.fleet.pools import Pools
from diptych.simulation.models import ModelSpec, kv_bytes_per_gpu, kv_capacity_tokens
from diptych.workload.build import build
from diptych.workload.spec import ClosedLoop

if TYPE_CHECKING:
    from diptych.simulation.settings import Settings

FIRST_REQUESTS = 1000  # of the workload, whose lengths stand for all


def cache_config(settings: "Settings", scheduler: SchedulerConfig, choice: CostChoice) -> CacheConfig:
    """The KV cache of one worker: as the settings say, as a calibration has it, or what fits beside the weights."""
    memory = settings.memory
    if isinstance(choice.source, Calibration):
        cache = choice.source.cache
        if memory.kv_cache_tokens is not None:
            cache = replace(cache, num_blocks=memory.kv_cache_tokens // cache.block_size)
        return replace(cache, enable_prefix_cache=memory.prefix_cache)
    model, hardware = choice.source
    assert choice.weights is not None, "only a calibration has weights of its own"
    context = mean_context(settings, model)
    token_bytes = kv_bytes_per_gpu(model, settings.parallelism, settings.kv_bits, context)
    holders = settings.parallelism.tensor * settings.parallelism.pipeline  # devices that hold parts of one token
    tokens = memory.kv_cache_tokens
    if tokens is None and memory.kv_cache_bytes is not None:
        tokens = memory.kv_cache_bytes // token_bytes * settings.parallelism.data
    if tokens is None:
        tokens = kv_capacity_tokens(
            model,
            hardware,
            parallelism=settings.parallelism,
            weights=choice.weights,
            kv_bits=settings.kv_bits,
            utilization=memory.gpu_memory_utilization,
            step_tokens=scheduler.budget.max_batched_tokens,
            context=context,
        )
    return CacheConfig(
        num_blocks=tokens // memory.block_size,
        block_size=memory.block_size,
        num_host_blocks=memory.swap_bytes // (memory.block_size * token_bytes * holders),
        enable_prefix_cache=memory.prefix_cache,
    )


def mean_context(settings: "Settings", model: ModelSpec) -> int:
    """Tokens of a running sequence on average over the workload's first requests: the prompt and half of the answer.
    0 where it does not matter, because every layer of the model keeps every token.

    Layers with a window or with linear attention keep as much of a long sequence as of one a little shorter. The cache
    counts tokens, so what such layers keep is spread over the tokens of a sequence of this length.
    """
    if model.window is None and model.linear is None:
        return 0
    workload = build(settings.workload, settings.seed)
    if isinstance(workload, ClosedLoop):
        specs = [spec for _ in range(FIRST_REQUESTS) if (spec := workload.next_request(0, 0)) is not None]
    else:
        specs = list(islice(workload, FIRST_REQUESTS))
    return max(1, sum(2 * spec.prompt_tokens + spec.output_tokens for spec in specs) // (2 * len(specs)))


def fleet_pools(settings: "Settings", choice: CostChoice, worker: EngineConfig) -> Pools | None:
    """Separate prefill and decode workers, if the settings say so. Raises ConfigError."""
    pools = settings.pools
    if not pools.prefill and not pools.decode and not pools.both:
        return None
    for name, count in (("prefill", pools.prefill), ("decode", pools.decode)):
        if not count and not pools.both:
            raise ConfigError(f"pools.{name} is 0; with separate pools there is at least 1 of either", param="pools")
    if settings.replicas != 1:
        raise ConfigError(
            f"replicas is {settings.replicas}, but pools.prefill and pools.decode say how many there are",
            param="replicas",
        )
    if isinstance(choice.source, Calibration):
        raise ConfigError(
            "pools need a model of the catalogue, whose KV size is known; cost is a calibration", param="cost"
        )
    model, _ = choice.source
    kv_bytes = model.kv_bytes_per_token(settings.kv_bits // 8, mean_context(settings, model))
    return Pools(
        num_prefill=pools.prefill,
        num_decode=pools.decode,
        num_both=pools.both,
        num_hosts=pools.hosts,
        kv_bytes_per_token=kv_bytes,
        link=pools.link,
        prefill=worker.with_(scheduler=prefill_scheduler(worker.scheduler, worker.slo)),
    )


def swap_block_ns(settings: "Settings", choice: CostChoice) -> int:
    """Every GPU copies its share of a block over its own link."""
    if not settings.memory.swap_bytes or isinstance(choice.source, Calibration):
        return 0
    model = choice.source[0]
    context = mean_context(settings, model)
    block_bytes = settings.memory.block_size * kv_bytes_per_gpu(model, settings.parallelism, settings.kv_bits, context)
    return block_bytes * NS_PER_S // Link.named(settings.memory.swap_link).bandwidth
