"""The settings of ``diptych simulate``, as one TOML file or as flags, and the scenario that they describe.

Owns the names, types and limits of the settings and how flags override a file. control/config.py defines the policies,
workload/ the workloads.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import msgspec.inspect
import msgspec.structs

from diptych.control.cluster.cluster_config import ClusterConfig, OnFailure, cluster_config
from diptych.control.config import (
    BudgetName,
    EngineConfig,
    OrderName,
    PreemptionName,
    SchedulerConfig,
    ShapeName,
    scheduler_config,
)
from diptych.control.errors import ConfigError
from diptych.control.router.routing import Disaggregate, RoutingName
from diptych.control.slo import NS_PER_MS, NS_PER_S, Slo
from diptych.simulation.costs.cost_choice import CostChoice, choose_cost
from diptych.simulation.costs.fitted import Calibration
from diptych.simulation.faults import FAULTS, MESSAGE_FAULTS, WORKER_FAULTS, Fault, FaultKind, Watch, random_faults
from diptych.simulation.front_end import FrontEnd
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.prepare import cache_config, fleet_pools, swap_block_ns
from diptych.simulation.scenario import ADMIT_ALL, Scenario
from diptych.simulation.weight_precision import QuantizeName
from diptych.workload.build import build
from diptych.workload.description import SettingsTable, WorkloadConfig

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
AtLeastZero = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class SchedulerSettings(SettingsTable, frozen=True, kw_only=True):
    """Details on top of the shape's preset; the names of ``diptych serve``. None: as the preset has it."""

    order: OrderName | None = None
    budget: BudgetName | None = None
    max_batched_tokens: int | None = None
    step_target_ms: Positive | None = None
    max_num_seqs: int | None = None
    max_waiting: int | None = None
    max_partial_prefills: int | None = None
    max_long_partial_prefills: int | None = None
    long_prefill_threshold: int | None = None
    preemption: PreemptionName | None = None
    preempt_for_priority: bool = False


class MemorySettings(SettingsTable, frozen=True, kw_only=True):
    """The KV cache of one worker. kv_cache_tokens or kv_cache_bytes (of each GPU) replace what fits beside the
    weights in ``gpu_memory_utilization`` of the memory; swap_bytes: host memory for swapped requests, which
    travel over ``swap_link`` (one of simulation/fleet/links.py)."""

    block_size: AtLeastOne = 32
    kv_cache_tokens: AtLeastOne | None = None
    kv_cache_bytes: AtLeastOne | None = None
    gpu_memory_utilization: Share = 0.9
    swap_bytes: AtLeastZero = 0
    swap_link: str = "pcie4"
    prefix_cache: bool = True


class SloSettings(SettingsTable, frozen=True, kw_only=True):
    """Objectives of requests that name none."""

    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None


class PoolSettings(SettingsTable, frozen=True, kw_only=True):
    """Prefill and decode on separate workers, and workers that do both (0 of all: together, on ``replicas`` of them).
    link: the name of one of fleet/links.py; every worker has one of its own in each direction. hosts: workers
    are dealt out to so many hosts, and those of one host borrow blocks of each other instead of sending them (0: each
    is on a host of its own)."""

    prefill: AtLeastZero = 0
    decode: AtLeastZero = 0
    both: AtLeastZero = 0
    link: str = "ib400"
    hosts: AtLeastZero = 0


class WatchSettings(SettingsTable, frozen=True, kw_only=True):
    """How failures are noticed; see faults.Watch."""

    detection_ms: Positive = 10.0
    heartbeat_s: Positive = 10.0
    resume_s: Positive = 2.0


class FaultSettings(SettingsTable, frozen=True, kw_only=True):
    """One scripted fault; see faults.py."""

    kind: FaultKind
    at_s: NotNegative
    duration_s: Positive
    replica: AtLeastZero = 0
    factor: float = 1.0


class RandomFaultSettings(SettingsTable, frozen=True, kw_only=True):
    """``count`` faults at random times of random workers before ``until_s``, from the run's seed."""

    count: AtLeastZero
    until_s: Positive
    mean_duration_s: Positive = 5.0


class Settings(SettingsTable, frozen=True, kw_only=True):
    """One simulation. model: a name of the catalogue, or a config.json. hardware: a name of the catalogue, a file in
    its format, or a table (hardware.py). Neither is needed when ``cost`` is a file of ``diptych calibrate``.
    tensor_parallel to data_parallel: see Parallelism. routing to max_queued: as for ``diptych serve`` (None: its
    defaults). weight_bits: of a GPU (None: what the checkpoint has). quantize: on a CPU, as for ``diptych serve``; with
    a calibration it may only agree with what was measured (None: that, or "none"). admit_all: refuse no request,
    however long it would wait."""

    model: str | None = None
    hardware: str | dict[str, Any] | None = None
    tensor_parallel: AtLeastOne = 1
    pipeline_parallel: AtLeastOne = 1
    expert_parallel: AtLeastOne = 1
    data_parallel: AtLeastOne = 1
    weight_bits: Literal[4, 8, 16] | None = None
    quantize: QuantizeName | None = None
    kv_bits: Literal[8, 16] = 16
    cost: str = "auto"
    shape: ShapeName = "chunked"
    replicas: AtLeastOne = 1
    routing: RoutingName | None = None
    disaggregate: Disaggregate | None = None
    on_failure: OnFailure | None = None
    max_untouched_per_worker: AtLeastZero | None = None
    max_queued: AtLeastOne | None = None
    admit_all: bool = False
    max_model_len: Annotated[int, msgspec.Meta(ge=2)] | None = None
    seed: int = 0
    scheduler: SchedulerSettings = SchedulerSettings()
    memory: MemorySettings = MemorySettings()
    slo: SloSettings = SloSettings()
    workload: WorkloadConfig = WorkloadConfig()
    pools: PoolSettings = PoolSettings()
    faults: tuple[FaultSettings, ...] = ()
    random_faults: RandomFaultSettings | None = None
    watch: WatchSettings = WatchSettings()

    @property
    def parallelism(self) -> Parallelism:
        """How the devices of one worker share the model. Raises ConfigError."""
        return Parallelism(self.tensor_parallel, self.pipeline_parallel, self.expert_parallel, self.data_parallel)

    @property
    def num_workers(self) -> int:
        """Of the whole fleet."""
        return self.pools.prefill + self.pools.decode + self.pools.both or self.replicas


@dataclass(frozen=True, slots=True)
class Prepared:
    """A scenario, what it is priced with, and what the workers cost."""

    scenario: Scenario
    cost: CostChoice


def read_settings(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """The settings of a TOML file (None: all defaults), changed by dotted path.

    Raises ConfigError naming the path, the value and the limit of what is wrong.
    """
    raw: dict[str, Any] = {}
    if path is not None:
        try:
            raw = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}", param="config") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not a TOML file: {error}", param="config") from None
    for name, value in (overrides or {}).items():
        raw = with_value(raw, name, value)
    return settings_from(raw)


def settings_from(raw: Mapping[str, Any]) -> Settings:
    """Settings from plain data. Raises ConfigError."""
    try:
        return msgspec.convert(raw, Settings)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        path = where.rstrip("`").lstrip(".")
        path = re.sub(r"\[\.\.\.\]", "", path)
        raise ConfigError(_in_words(raw, path, message.replace("`", "")), param=path or None) from None


def plain(settings: Settings) -> dict[str, Any]:
    """The settings that differ from their defaults, as plain data that ``settings_from`` reads."""
    data = msgspec.to_builtins(settings)
    assert isinstance(data, dict)
    return data


def with_value(raw: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with the value at a dotted path replaced. Raises ConfigError when the path leads through no table.

    A device is both a name and a table: ``hardware = "h100"`` and ``hardware.like = "h100"`` are the same, so that a
    field of it can be set beside its name."""
    name, _, rest = path.partition(".")
    inner = raw.get(name, {})
    if name == "hardware":
        if rest and isinstance(inner, str):
            inner = {"like": inner}
        elif not rest and isinstance(inner, Mapping) and isinstance(value, str):
            value = {**inner, "like": value}
    if not rest:
        return {**raw, name: value}
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{path}: {name} is {inner!r}, no table", param=path)
    return {**raw, name: with_value(inner, rest, value)}


def prepare(settings: Settings, *, record_events: bool = False, most_recorded: int | None = None) -> Prepared:
    """The scenario together with the choice of its cost model. Raises ConfigError.

    most_recorded: with more requests than that, events are not kept after all.
    """
    scheduler = scheduler_of(settings)
    choice = choose_cost(
        settings.cost,
        model=settings.model,
        hardware=settings.hardware,
        parallelism=settings.parallelism,
        weight_bits=settings.weight_bits,
        kv_bits=settings.kv_bits,
        quantize=settings.quantize,
    )
    workload = build(settings.workload, settings.seed)
    engine = EngineConfig(
        cache=cache_config(settings, scheduler, choice),
        scheduler=scheduler,
        slo=Slo(_nanoseconds(settings.slo.ttft_ms), _nanoseconds(settings.slo.tpot_ms)),
        max_model_len=settings.max_model_len or choice.max_model_len,
    )
    scenario = Scenario(
        engine=engine,
        cost=choice.cost,
        workload=workload,
        num_workers=settings.num_workers,
        cluster=_cluster(settings),
        faults=_faults(settings),
        watch=_watch(settings.watch),
        pools=fleet_pools(settings, choice, engine),
        front_end=choice.source.front_end if isinstance(choice.source, Calibration) else FrontEnd(),
        swap_block_ns=swap_block_ns(settings, choice),
        warm_up=choice.source.warm_up if isinstance(choice.source, Calibration) else (),
        seed=settings.seed,
        record_events=record_events and (most_recorded is None or len(workload) <= most_recorded),
    )
    return Prepared(scenario, choice)


def scheduler_of(settings: Settings) -> SchedulerConfig:
    """What ``diptych serve`` would run with the same options. Raises ConfigError."""
    return scheduler_config(settings.shape, **msgspec.structs.asdict(settings.scheduler))


def _cluster(settings: Settings) -> ClusterConfig:
    """What ``diptych serve`` would make of the same options."""
    config = cluster_config(
        routing=settings.routing,
        disaggregate=settings.disaggregate,
        on_failure=settings.on_failure,
        max_untouched_per_worker=settings.max_untouched_per_worker,
        max_queued=settings.max_queued,
    )
    return replace(config, admission=ADMIT_ALL) if settings.admit_all else config


def _faults(settings: Settings) -> tuple[Fault, ...]:
    scripted = tuple(
        Fault(
            fault.kind,
            fault.replica,
            round(fault.at_s * NS_PER_S),
            max(1, round(fault.duration_s * NS_PER_S)),
            fault.factor,
        )
        for fault in settings.faults
    )
    for index, fault in enumerate(scripted):
        if fault.worker >= settings.num_workers:
            raise ConfigError(
                f"faults[{index}].replica is {fault.worker}; it must be below replicas ({settings.num_workers})",
                param="faults",
            )
    drawn = settings.random_faults
    if drawn is None:
        return scripted
    return scripted + random_faults(
        settings.seed,
        num_workers=settings.num_workers,
        kinds=FAULTS if settings.num_workers != settings.replicas else WORKER_FAULTS + MESSAGE_FAULTS,
        until_ns=round(drawn.until_s * NS_PER_S),
        count=drawn.count,
        mean_duration_ns=round(drawn.mean_duration_s * NS_PER_S),
    )


def _watch(settings: WatchSettings) -> Watch:
    return Watch(
        detection_ns=max(1, round(settings.detection_ms * NS_PER_MS)),
        heartbeat_ns=max(1, round(settings.heartbeat_s * NS_PER_S)),
        resume_ns=max(1, round(settings.resume_s * NS_PER_S)),
    )


def _nanoseconds(milliseconds: float | None) -> int | None:
    return None if milliseconds is None else int(milliseconds * NS_PER_MS)


def _in_words(raw: Mapping[str, Any], path: str, message: str) -> str:
    """What is wrong with the value at a path: msgspec writes "Expected int >= 1, got str"."""
    value = _value_at(raw, path)
    if message.startswith("Invalid enum value"):
        return f"{path} is {value!r}; one of {', '.join(map(str, choices(path)))}"
    if message.startswith("Expected"):
        return f"{path} is {value!r}; it must be {message.removeprefix('Expected ').partition(',')[0]}"
    where = f"{path}: " if path else ""
    return f"{where}{message[0].lower()}{message[1:]}"


def choices(path: str, struct: type = Settings) -> tuple[Any, ...]:
    """The values that a setting of few values takes, by its dotted path; () for any other."""
    name, _, rest = re.sub(r"\[.*?\]", "", path).partition(".")
    for field in msgspec.structs.fields(struct):
        if field.name == name:
            found = msgspec.inspect.type_info(field.type)
            kinds = _members(found)
            if rest:
                inner = [kind.cls for kind in kinds if isinstance(kind, msgspec.inspect.StructType)]
                return choices(rest, inner[0]) if inner else ()
            return next((kind.values for kind in kinds if isinstance(kind, msgspec.inspect.LiteralType)), ())
    return ()


def _members(kind: msgspec.inspect.Type) -> tuple[msgspec.inspect.Type, ...]:
    """What a union or a list is of."""
    if isinstance(kind, msgspec.inspect.UnionType):
        return kind.types
    return (kind.item_type,) if isinstance(kind, msgspec.inspect.VarTupleType) else (kind,)


def _value_at(raw: Any, path: str) -> Any:
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(raw, Mapping):
            raw = raw.get(part)
        elif isinstance(raw, list | tuple) and part.isdigit() and int(part) < len(raw):
            raw = raw[int(part)]
        else:
            return None
    return raw
