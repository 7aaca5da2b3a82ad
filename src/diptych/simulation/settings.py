"""The settings of ``diptych simulate``, as one TOML file or as flags.

Owns the names, types and limits of the settings and how flags override a file. control/config.py defines the policies,
workload/ the workloads.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import msgspec.inspect
import msgspec.structs

from diptych.control.cluster.cluster_config import OnFailure
from diptych.control.config import PresetName, QuantizeName
from diptych.control.errors import ConfigError
from diptych.control.router.routing import Disaggregate, LocalPrefill, RoutingName
from diptych.simulation.fault_places import SCOPES, Scope
from diptych.simulation.faults import (
    Channel,
    Direction,
    FaultKind,
)
from diptych.simulation.fleet.simulated_drafts import SimulatedDrafts
from diptych.simulation.old_names import with_setting_names
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.pool_settings import (
    NETWORK,
    PoolSettings,
    PoolsSettings,
    plain_pools,
    pool_tables,
    pools_from,
    with_pool,
)
from diptych.simulation.scheduler_settings import (
    AtLeastOne,
    AtLeastZero,
    NotNegative,
    Positive,
    SchedulerSettings,
    Share,
)
from diptych.simulation.weight_precision import WeightBits
from diptych.workload.description import SettingsTable, WorkloadConfig

Struct = TypeVar("Struct", bound=msgspec.Struct)


class MemorySettings(SettingsTable, frozen=True, kw_only=True):
    """The KV cache of one replica. kv_cache_tokens or kv_cache_bytes (of each GPU) replace what fits beside the
    weights in ``gpu_memory_utilization`` of the memory. host_bytes: host memory for evicted blocks and preempted
    requests, which travel over ``host_link`` (a link, by its name). disk_bytes: a disk below it, of the
    kind ``disk``. Each replica has its own. shares_host: whether replicas on one host read each other's host blocks, as
    live workers on CPUs do (replicas of one device only)."""

    block_size: AtLeastOne = 32
    kv_cache_tokens: AtLeastOne | None = None
    kv_cache_bytes: AtLeastOne | None = None
    gpu_memory_utilization: Share = 0.9
    host_bytes: AtLeastZero = 0
    host_link: str = "pcie4"
    shares_host: bool = False
    disk_bytes: AtLeastZero = 0
    disk: str = "nvme4"
    prefix_cache: bool = True


class SloSettings(SettingsTable, frozen=True, kw_only=True):
    """Objectives of requests that name none."""

    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None


class WatchSettings(SettingsTable, frozen=True, kw_only=True):
    """How failures are noticed. detection_ms: from the end of a process until the front end knows of it. heartbeat_s: a
    worker that hangs for longer is killed. resume_s: how long the ends of a broken KV connection try to resume it."""

    detection_ms: Positive = 10.0
    heartbeat_s: Positive = 10.0
    resume_s: Positive = 2.0


class FaultSettings(SettingsTable, frozen=True, kw_only=True):
    """One scripted fault of the worker ``replica``, or of all workers of a ``host`` or a ``rack`` (counted from 0).
    crash: its state is gone; it is back, empty, after the duration. hang: it takes no message and ends no step. slow:
    its steps take ``factor`` times as long. link_down: no KV leaves it or comes to it. isolate: its connection to the
    front end is cut; it goes on, is given up after the heartbeat, and comes back with its cache. front_end_crash (of no
    worker): the front end dies, and another begins after the duration; workers come back to it with their caches, and
    clients go on with their streams. Messages between it
    and the front end are, by link_loss, held back until the end; by delay, late by up to ``factor`` milliseconds; by
    reorder, late by random amounts; by duplicate, delivered twice; by repeat, again, later. channel: "kv" for the
    messages with KV between it and its ``peer`` (another replica, host or rack; none: every other), where slow divides
    the bandwidth by ``factor`` and a long link_loss is a partition. direction: what comes to it, what comes from it, or
    both."""

    kind: FaultKind
    at_s: NotNegative
    duration_s: Positive
    replica: AtLeastZero | None = None
    host: AtLeastZero | None = None
    rack: AtLeastZero | None = None
    peer: AtLeastZero | None = None
    channel: Channel = "control"
    direction: Direction = "both"
    factor: float = 1.0

    @property
    def place(self) -> tuple[Scope, int]:
        """What it befalls. Raises ConfigError for several places."""
        named: list[tuple[Scope, int]] = [
            (scope, number) for scope in SCOPES if (number := getattr(self, scope)) is not None
        ]
        if named and self.kind == "front_end_crash":
            raise ConfigError(f"a fault of the front end has no {named[0][0]}", param="faults")
        if len(named) > 1:
            raise ConfigError(f"a fault of {named[0][0]} and {named[1][0]}; name one of them", param="faults")
        return named[0] if named else ("replica", 0)


class RandomFaultSettings(SettingsTable, frozen=True, kw_only=True):
    """``count`` faults at random times of random workers before ``until_s``, from the run's seed."""

    count: AtLeastZero
    until_s: Positive
    mean_duration_s: Positive = 5.0


class SpeculationSettings(SettingsTable, frozen=True, kw_only=True):
    """Draft tokens. coverage: share of the tokens behind which there is a draft (0: nothing is
    drafted). acceptance: probability that a draft token is right when those before it are."""

    coverage: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    acceptance: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None

    def drafts(self) -> SimulatedDrafts | None:
        """The acceptance model. Raises ConfigError for one half of it."""
        if bool(self.coverage) != (self.acceptance is not None):
            words = f"speculation.coverage is {self.coverage:g} and speculation.acceptance is {self.acceptance}"
            raise ConfigError(f"{words}; to guess tokens, set both", param="speculation")
        return SimulatedDrafts(self.coverage, self.acceptance) if self.acceptance is not None else None


class Settings(SettingsTable, frozen=True, kw_only=True):
    """One simulation. model: a name of the catalogue, or a config.json. hardware: a name of the catalogue, a file in
    its format, or a table (hardware.py). Neither is needed when ``cost`` is a file of ``diptych calibrate``.
    tensor_parallel to data_parallel: see Parallelism. routing to max_queued: as for ``diptych serve`` (None: its
    defaults). weight_bits: of a GPU (None: what the checkpoint has). quantize: on a CPU, as for ``diptych serve``; with
    a calibration it may only agree with what was measured (None: that, or "none"). engine: one of the engines
    whose host prepares the steps and whose front end takes the requests (None: as the cost model has it). shape: None:
    chunked, or the rules of the engine that ``cost`` is a calibration of. force_calibration: use one whose held-out
    error is too large. admit_all: refuse no request, however long it would wait. explain_misses: say what prefills were
    spent on."""

    model: str | None = None
    hardware: str | dict[str, Any] | None = None
    tensor_parallel: AtLeastOne = 1
    pipeline_parallel: AtLeastOne = 1
    expert_parallel: AtLeastOne = 1
    data_parallel: AtLeastOne = 1
    weight_bits: WeightBits | None = None
    quantize: QuantizeName | None = None
    kv_bits: Literal[8, 16] = 16
    cost: str = "auto"
    force_calibration: bool = False
    engine: str | None = None
    shape: PresetName | None = None
    replicas: AtLeastOne = 1
    routing: RoutingName | None = None
    disaggregate: Disaggregate | None = None
    local_prefill: LocalPrefill | None = None
    on_failure: OnFailure | None = None
    max_prefills_in_flight_per_worker: AtLeastZero | None = None
    max_queued: AtLeastOne | None = None
    admit_all: bool = False
    explain_misses: bool = False
    max_model_len: Annotated[int, msgspec.Meta(ge=2)] | None = None
    seed: int = 0
    scheduler: SchedulerSettings = SchedulerSettings()
    memory: MemorySettings = MemorySettings()
    slo: SloSettings = SloSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    workload: WorkloadConfig = WorkloadConfig()
    pools: PoolsSettings = PoolsSettings()
    faults: tuple[FaultSettings, ...] = ()
    random_faults: RandomFaultSettings | None = None
    watch: WatchSettings = WatchSettings()

    @property
    def parallelism(self) -> Parallelism:
        """How the devices of one worker share the model. Raises ConfigError."""
        return Parallelism(self.tensor_parallel, self.pipeline_parallel, self.expert_parallel, self.data_parallel)

    @property
    def num_replicas(self) -> int:
        """Replicas of the whole fleet."""
        return sum(pool.replicas for pool in self.pools.in_use.values()) or self.replicas

    def of_pool(self, pool: PoolSettings) -> "Settings":
        """The settings of a fleet that is this pool alone."""
        details = msgspec.structs.asdict(pool.scheduler).items()
        changed = {name: value for name, value in details if value not in (None, False)}
        return msgspec.structs.replace(
            self,
            **pool.changes(),
            memory=msgspec.structs.replace(self.memory, **pool.memory_changes()),
            scheduler=msgspec.structs.replace(self.scheduler, **changed),
        )


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
    raw = with_setting_names(raw)
    pools = raw.get("pools")
    if isinstance(pools, Mapping):
        tables = pool_tables(pools)
        for name, table in tables.items():
            if name not in NETWORK:
                _converted(table, PoolSettings, f"pools.{name}")
        raw = {**raw, "pools": pools_from(tables)}
    return _converted(raw, Settings)


def _converted(raw: Any, struct: type[Struct], prefix: str = "") -> Struct:
    """A record of this kind; ``prefix``: the path of the data in the settings. Raises ConfigError."""
    try:
        return msgspec.convert(raw, struct)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        path = re.sub(r"\[\.\.\.\]", "", where.rstrip("`").lstrip("."))
        full = ".".join(part for part in (prefix, path) if part)
        words = _in_words(full, _value_at(raw, path), choices(path, struct), message.replace("`", ""))
        raise ConfigError(words, param=full or None) from None


def plain(settings: Settings) -> dict[str, Any]:
    """The settings that differ from their defaults, as plain data that ``settings_from`` reads."""
    data = msgspec.to_builtins(settings)
    assert isinstance(data, dict)
    return {**data, "pools": plain_pools(data["pools"])} if "pools" in data else data


def with_value(raw: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with the value at a dotted path replaced. Raises ConfigError when the path leads through no table.

    A device is both a name and a table: ``hardware = "h100"`` and ``hardware.like = "h100"`` are the same, so that a
    field of it can be set beside its name."""
    name, _, rest = path.partition(".")
    inner = raw.get(name, {})
    if name == "hardware":
        if rest and isinstance(inner, str):
            inner = {"like": inner}
        elif not rest and isinstance(raw.get(name), Mapping) and isinstance(value, str):
            value = {**inner, "like": value}
    if not rest:
        return {**raw, name: value}
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{path}: {name} is {inner!r}, no table", param=path)
    if name == "pools":
        inner, value = with_pool(inner, rest, value)
    return {**raw, name: with_value(inner, rest, value)}


def _in_words(path: str, value: Any, known: tuple[Any, ...], message: str) -> str:
    """What is wrong with the value at a path: msgspec writes "Expected int >= 1, got str"."""
    if message.startswith("Invalid enum value"):
        return f"{path} is {value!r}; one of {', '.join(map(str, known))}"
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
