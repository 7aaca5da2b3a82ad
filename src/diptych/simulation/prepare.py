"""From settings to a scenario: KV blocks, the pools of a fleet, what prices them, and the faults.

Owns the arithmetic of memory. Must never read a file but that of a calibration, or know an option's name beyond the
settings' own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import msgspec.structs

from diptych.control.cluster.cluster_config import ClusterConfig, cluster_config
from diptych.control.config import (
    DEFAULT_SHAPE,
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
    prefill_scheduler,
    scheduler_config,
)
from diptych.control.errors import ConfigError
from diptych.control.expert_law import ExpertLaw
from diptych.control.page_groups import LayerGroups, deal_windows
from diptych.control.router.topology import Role
from diptych.control.slo import NS_PER_MS, NS_PER_S, Slo
from diptych.simulation.context_skew import context_skew
from diptych.simulation.costs.cost_choice import COSTS, CostChoice, choose_cost
from diptych.simulation.costs.fitted import Calibration, read_calibration
from diptych.simulation.fault_places import Scope, befall, workers_at
from diptych.simulation.faults import FAULTS, MESSAGE_FAULTS, WORKER_FAULTS, Fault, Watch, random_faults
from diptych.simulation.fleet.pools import Pool, Pools
from diptych.simulation.fleet.simulated_disk import DiskModel
from diptych.simulation.hardware import Hardware
from diptych.simulation.models import ModelSpec, kv_bytes_per_gpu, kv_capacity_tokens
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.scenario import ADMIT_ALL, Scenario
from diptych.simulation.settings import Settings, WatchSettings
from diptych.simulation.tier_sizes import with_tiers
from diptych.workload.build import build
from diptych.workload.spec import ClosedLoop

FIRST_REQUESTS = 1000  # of the workload, whose lengths stand for all


@dataclass(frozen=True, slots=True)
class PreparedPool:
    """Equal replicas, and what prices them. engine: of one lane of a replica's pipeline. nics: None: the fleet's.
    price_per_hour: None: the hardware's."""

    name: str
    role: Role
    replicas: int
    parallelism: Parallelism
    engine: EngineConfig
    choice: CostChoice
    swap_block_ns: int = 0
    nics: int | None = None
    price_per_hour: float | None = None
    copy_block_ns: int = 0
    disk: DiskModel | None = None

    @property
    def num_workers(self) -> int:
        """Lanes of all its replicas."""
        return self.replicas * self.parallelism.pipeline

    @property
    def num_devices(self) -> int:
        """Devices of all its replicas."""
        return self.replicas * self.parallelism.devices

    @property
    def hardware(self) -> Hardware | None:
        """The device, if it is one of the catalogue."""
        return self.choice.hardware


@dataclass(frozen=True, slots=True)
class Prepared:
    """A scenario, and its pools with what they are priced with (one where the settings name none)."""

    scenario: Scenario
    pools: tuple[PreparedPool, ...]

    @property
    def cost(self) -> CostChoice:
        """The cost model of the first pool."""
        return self.pools[0].choice

    @property
    def cost_model(self) -> str:
        """What prices the steps, in words."""
        words = {pool.name: pool.choice.words for pool in self.pools}
        if len(set(words.values())) == 1:
            return self.cost.words
        return "; ".join(f"{name}: {text}" for name, text in words.items())

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was not measured, in sentences: of each pool's cost model, and of the handoffs between them."""
        sentences = [sentence for pool in self.pools for sentence in pool.choice.assumptions]
        pools = self.scenario.pools
        if pools is not None and len({pool.layout for pool in pools.pools}) > 1:
            sentences.append("the receiver cuts KV anew at the full memory bandwidth of its devices")
        return tuple(dict.fromkeys(sentences))


def prepare(settings: Settings, *, record_events: bool = False, most_recorded: int | None = None) -> Prepared:
    """The scenario together with the choice of its cost models. Raises ConfigError.

    most_recorded: with more requests than that, events are not kept after all.
    """
    workload = build(settings.workload, settings.seed)
    pools = _prepared_pools(settings, context_skew(workload))
    first = pools[0]
    source = first.choice.source
    fleet = fleet_pools(settings, pools)
    scenario = Scenario(
        engine=first.engine,
        cost=first.choice.cost,
        workload=workload,
        num_workers=settings.num_replicas,
        cluster=_cluster(settings),
        faults=_faults(settings, fleet),
        watch=_watch(settings.watch),
        pools=fleet,
        front_end=first.choice.front_end,
        swap_block_ns=first.swap_block_ns,
        disk=first.disk,
        drafts=settings.speculation.drafts(),
        warm_up=source.warm_up if isinstance(source, Calibration) else (),
        seed=settings.seed,
        explain_misses=settings.explain_misses,
        record_events=record_events and (most_recorded is None or len(workload) <= most_recorded),
    )
    return Prepared(scenario, pools)


def _prepared_pools(settings: Settings, skew: float) -> tuple[PreparedPool, ...]:
    """The pools that the settings name, or the whole fleet as one. skew: of the contexts of a decode batch."""
    slo = Slo(_nanoseconds(settings.slo.ttft_ms), _nanoseconds(settings.slo.tpot_ms))
    named = settings.pools.in_use
    if not named:
        return (prepare_pool("all", "both", settings.replicas, settings, slo, skew),)
    return tuple(
        prepare_pool(
            name,
            settings.pools.role(name),
            pool.replicas,
            settings.of_pool(pool),
            slo,
            skew,
            nics=pool.nics,
            price_per_hour=pool.price_per_hour,
        )
        for name, pool in named.items()
    )


def _cluster(settings: Settings) -> ClusterConfig:
    """What ``diptych serve`` would make of the same options."""
    config = cluster_config(
        routing=settings.routing,
        disaggregate=settings.disaggregate,
        local_prefill=settings.local_prefill,
        on_failure=settings.on_failure,
        max_prefills_in_flight_per_worker=settings.max_prefills_in_flight_per_worker,
        max_queued=settings.max_queued,
    )
    return replace(config, admission=ADMIT_ALL) if settings.admit_all else config


def _faults(settings: Settings, fleet: Pools | None) -> tuple[Fault, ...]:
    """Faults of replicas, hosts and racks, as faults of their workers."""
    faults: tuple[Fault, ...] = ()
    for index, fault in enumerate(settings.faults):
        scope, number = fault.place
        workers = _workers_at(settings, fleet, scope, number, f"faults[{index}].{scope}")
        peers = None
        if fault.peer is not None:
            peers = _workers_at(settings, fleet, scope, fault.peer, f"faults[{index}].peer")
        at_ns, duration_ns = round(fault.at_s * NS_PER_S), max(1, round(fault.duration_s * NS_PER_S))
        template = Fault(fault.kind, 0, at_ns, duration_ns, fault.factor, fault.channel, fault.direction)
        if peers is not None and fault.channel != "kv":
            raise ConfigError(f"faults[{index}].peer is {fault.peer}; only the channel kv has peers", param="faults")
        faults += befall(template, workers, peers)
    if drawn := settings.random_faults:
        found = random_faults(
            settings.seed,
            num_workers=settings.num_replicas,
            kinds=FAULTS if settings.pools.in_use else WORKER_FAULTS + MESSAGE_FAULTS,
            until_ns=round(drawn.until_s * NS_PER_S),
            count=drawn.count,
            mean_duration_ns=round(drawn.mean_duration_s * NS_PER_S),
        )
        for drawn_fault in found:
            faults += befall(
                drawn_fault, [drawn_fault.worker] if fleet is None else workers_at(fleet, "replica", drawn_fault.worker)
            )
    return faults


def _workers_at(settings: Settings, fleet: Pools | None, scope: Scope, number: int, name: str) -> list[int]:
    """Raises ConfigError for a place that does not exist."""
    if fleet is None and scope != "replica":
        raise ConfigError(f"{name} is {number}; only a fleet with pools has hosts and racks", param="faults")
    if scope == "replica" and number >= settings.num_replicas:
        raise ConfigError(f"{name} is {number}; it must be below replicas ({settings.num_replicas})", param="faults")
    workers = [number] if fleet is None else workers_at(fleet, scope, number)
    if not workers:
        raise ConfigError(f"{name} is {number}; no worker is there", param="faults")
    return workers


def _watch(settings: WatchSettings) -> Watch:
    return Watch(
        detection_ns=max(1, round(settings.detection_ms * NS_PER_MS)),
        heartbeat_ns=max(1, round(settings.heartbeat_s * NS_PER_S)),
        resume_ns=max(1, round(settings.resume_s * NS_PER_S)),
    )


def _nanoseconds(milliseconds: float | None) -> int | None:
    return None if milliseconds is None else int(milliseconds * NS_PER_MS)


def prepare_pool(
    name: str,
    role: Role,
    replicas: int,
    settings: Settings,
    slo: Slo,
    skew: float = 1.0,
    *,
    nics: int | None = None,
    price_per_hour: float | None = None,
) -> PreparedPool:
    """A fleet of equal replicas with these settings, or the pool of that name in one. skew: longest context of a decode
    batch over its mean. Raises ConfigError."""
    parallelism = settings.parallelism
    choice = choose_cost(
        settings.cost,
        model=settings.model,
        hardware=settings.hardware,
        parallelism=parallelism,
        weight_bits=settings.weight_bits,
        kv_bits=settings.kv_bits,
        quantize=settings.quantize,
        engine=settings.engine,
        skew=skew,
        force_calibration=settings.force_calibration,
    )
    scheduler = scheduler_of(settings)
    cache = cache_config(settings, scheduler, choice)
    cache = replace(cache, num_blocks=cache.num_blocks // parallelism.pipeline)
    tiers = with_tiers(settings, choice, cache, gpu_block_bytes(settings, choice))
    engine = EngineConfig(
        cache=tiers.cache,
        scheduler=prefill_scheduler(scheduler, slo) if role == "prefill" else scheduler,
        slo=slo,
        max_model_len=settings.max_model_len or choice.max_model_len,
        experts=_expert_law(choice),
    )
    copy_ns, swap_ns = copy_block_ns(settings, choice), tiers.swap_block_ns
    found = PreparedPool(name, role, replicas, parallelism, engine, choice, swap_ns, nics, price_per_hour, copy_ns)
    return replace(found, disk=tiers.disk)


def _expert_law(choice: CostChoice) -> ExpertLaw | None:
    """The experts of a mixture whose operators are priced; a calibration has measured whole steps."""
    moe = choice.source[0].moe if isinstance(choice.source, tuple) else None
    return ExpertLaw(moe.experts, moe.experts_per_token) if moe else None


def scheduler_of(settings: Settings) -> SchedulerConfig:
    """What ``diptych serve`` would run with the same options; without a shape and with a calibration of an engine of
    others, that engine's own rules. Raises ConfigError."""
    engine = None if settings.shape else measured_engine(settings)
    rules = None if engine is None else engine.scheduler
    return scheduler_config(rules or settings.shape or DEFAULT_SHAPE, **msgspec.structs.asdict(settings.scheduler))


def shape_words(settings: Settings) -> str:
    """The scheduler of ``scheduler_of``, for people."""
    engine = None if settings.shape else measured_engine(settings)
    return f"shape {settings.shape or DEFAULT_SHAPE}" if engine is None else f"scheduler of {engine.settings['engine']}"


def measured_engine(settings: Settings) -> Calibration | None:
    """The calibration of an engine of others, if that is what prices the steps. Raises ConfigError."""
    if settings.cost in COSTS or not Path(settings.cost).is_file():
        return None
    found = read_calibration(settings.cost)
    return None if found.scheduler is None else found


def fleet_pools(settings: Settings, pools: Sequence[PreparedPool]) -> Pools | None:
    """The pools of the simulated fleet; None for equal workers without a pipeline. Raises ConfigError."""
    network = settings.pools
    if not network.in_use and pools[0].parallelism.pipeline == 1:
        return None
    roles = {pool.role for pool in pools}
    for role in ("prefill", "decode"):
        if not roles & {role, "both"}:
            raise ConfigError(f"pools.{role} is 0; with separate pools there is at least 1 of either", param="pools")
    if network.in_use and settings.replicas != 1:
        raise ConfigError(f"replicas is {settings.replicas}, but the pools say how many there are", param="replicas")
    sources = [pool.choice.source for pool in pools]
    models = [source[0] for source in sources if not isinstance(source, Calibration)]
    if len(models) < len(sources):
        raise ConfigError(
            "pools need a model of the catalogue, whose KV size is known; cost is a calibration", param="cost"
        )
    # With groups of layers, what lies before windows does not travel.
    context = 0 if pools[0].engine.cache.groups else mean_context(settings, models[0])
    return Pools(
        kv_bytes_per_token=models[0].kv_bytes_per_token(settings.kv_bits // 8, context),
        link=network.link,
        num_hosts=network.hosts,
        num_racks=network.racks,
        uplink=network.uplink,
        shares_memory=network.shares_memory,
        stall_ns=round(network.stall_ms * NS_PER_MS),
        named=tuple(_as_pool(pool, network.nics, copy) for pool, copy in zip(pools, _copies(pools), strict=True)),
    )


def _copies(pools: Sequence[PreparedPool]) -> list[int]:
    """Pools with equal weights have one number. Raises ConfigError for weights with which a phase cannot be done."""
    precisions = [pool.choice.weights for pool in pools]
    kinds = [own and (own.layers, own.head, own.experts) for own in precisions]
    for kind in dict.fromkeys(kinds):
        members = [pool for pool, own in zip(pools, kinds, strict=True) if own == kind]
        roles = {pool.role for pool in members}
        for role, missing in (("prefill", "decode"), ("decode", "prefill")):
            if roles == {role}:
                names = ", ".join(pool.name for pool in members)
                raise ConfigError(
                    f"no pool can {missing} with the weights of {names}: KV of other weights is never handed over",
                    param="pools",
                )
    numbers = list(dict.fromkeys(kinds))
    return [numbers.index(kind) for kind in kinds]


def _as_pool(pool: PreparedPool, nics: int, model_copy: int) -> Pool:
    """KV in another cut is read and written once more by the devices that hold it (assumed: at their full memory
    bandwidth, all at once)."""
    assert pool.hardware is not None, "a calibration has no pools"
    holders = pool.parallelism.tensor * pool.parallelism.pipeline
    return Pool(
        name=pool.name,
        role=pool.role,
        replicas=pool.replicas,
        stages=pool.parallelism.pipeline,
        engine=pool.engine,
        cost=pool.choice.cost,
        nics=pool.nics or nics,
        layout=(pool.parallelism.tensor, pool.parallelism.pipeline),
        relayout_bytes_per_s=int(pool.hardware.memory_bandwidth) * holders // 2,
        swap_block_ns=pool.swap_block_ns,
        disk=pool.disk,
        copy_block_ns=pool.copy_block_ns,
        model_copy=model_copy,
    )


def cache_config(settings: Settings, scheduler: SchedulerConfig, choice: CostChoice) -> CacheConfig:
    """The KV cache of one replica: as the settings say, as a calibration has it, or what fits beside the weights."""
    memory = settings.memory
    if isinstance(choice.source, Calibration):
        cache = choice.source.cache
        if memory.kv_cache_tokens is not None:
            cache = replace(cache, num_blocks=memory.kv_cache_tokens // cache.block_size * max(1, len(cache.groups)))
        return replace(cache, enable_prefix_cache=memory.prefix_cache)
    model, hardware = choice.source
    assert choice.weights is not None, "only a calibration has weights of its own"
    layers = layer_groups(settings, choice)
    context = 0 if layers else mean_context(settings, model)
    token_bytes = kv_bytes_per_gpu(model, settings.parallelism, settings.kv_bits, context)
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
    num_blocks, groups = tokens // memory.block_size, layers.groups if layers else ()
    if layers and memory.kv_cache_tokens is not None:
        num_blocks *= len(groups)
    elif layers:  # the memory of so many tokens in all layers, in blocks of some
        num_blocks = tokens * model.attention_layers // (layers.num_places * memory.block_size)
    return CacheConfig(
        num_blocks=num_blocks,
        block_size=memory.block_size,
        enable_prefix_cache=memory.prefix_cache,
        groups=groups,
    )


def layer_groups(settings: Settings, choice: CostChoice) -> LayerGroups | None:
    """How a worker deals the model's layers into groups, to free what lies before windows. None: it keeps all tokens of
    all layers: there is no window, or a sequence has a state beside them. Such a cache counts tokens, and is sized for
    the mean context."""
    memory = settings.memory
    if isinstance(choice.source, Calibration):
        return None
    model = choice.source[0]
    if model.window is None or model.linear is not None:
        return None
    windows = [0] * model.full_layers + [model.window.tokens] * model.window.layers
    longest = settings.max_model_len or choice.max_model_len
    own = [pool.max_model_len for pool in settings.pools.in_use.values()]
    if any(own):  # pools that hand sequences to each other are dealt alike
        longest = max([length or choice.max_model_len for length in own])
    layers = deal_windows(windows, memory.block_size, longest)
    return None if layers.is_dense else layers


def mean_context(settings: Settings, model: ModelSpec) -> int:
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


def copy_block_ns(settings: Settings, choice: CostChoice) -> int:
    """Every device reads its share of a block from its memory and writes it back."""
    if isinstance(choice.source, Calibration):
        return 0
    return round(2 * gpu_block_bytes(settings, choice) * NS_PER_S / choice.source[1].memory_bandwidth)


def gpu_block_bytes(settings: Settings, choice: CostChoice) -> int:
    """The share of one block that each GPU holds; 0 for a calibration, which does not say."""
    if isinstance(choice.source, Calibration):
        return 0
    model, size = choice.source[0], settings.memory.block_size
    if layers := layer_groups(settings, choice):
        whole = kv_bytes_per_gpu(model, settings.parallelism, settings.kv_bits)
        return size * whole * layers.num_places // model.attention_layers
    context = mean_context(settings, model)
    return size * kv_bytes_per_gpu(model, settings.parallelism, settings.kv_bits, context)
