"""The table ``pools`` of the settings: pools by name, and the network between them.

A pool is the fleet with some of its settings changed, and how many replicas there are of that. Three forms say it, in a
file and on the command line alike:

    [pools.decode]                     a table
    replicas = 4
    hardware = "a100-80gb"
    decode = "4xa100-80gb:tp2,pp2"     the same in short: replicas, device, and options
    decode = 4                         replicas of what the fleet has
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from diptych.control.config import DTypeName, PresetName, QuantizeName
from diptych.control.errors import ConfigError
from diptych.control.router.topology import ROLES, Role
from diptych.simulation.scheduler_settings import AtLeastOne, AtLeastZero, NotNegative, SchedulerSettings, Share
from diptych.simulation.weight_precision import WeightBits
from diptych.workload.description import SettingsTable

PARALLEL = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "ep": "expert_parallel", "dp": "data_parallel"}
OF_MEMORY = ("kv_cache_tokens", "kv_cache_bytes", "gpu_memory_utilization")  # of a pool, in the table memory of a fleet


class PoolSettings(SettingsTable, frozen=True, kw_only=True):
    """Equal replicas. role: what their workers do (None: the one that the pool's name begins with, else both).
    price_per_hour: of one device, in USD (None: as the catalogue has it). dtype, cores: for ``diptych serve --fleet``,
    which reads the same file; the simulator leaves them aside. Everything else replaces the setting of that name of the
    fleet, or of its table ``memory``; what is None, or left out of ``scheduler``, is the fleet's own."""

    role: Role | None = None
    replicas: AtLeastZero = 1
    hardware: str | None = None
    tensor_parallel: AtLeastOne | None = None
    pipeline_parallel: AtLeastOne | None = None
    expert_parallel: AtLeastOne | None = None
    data_parallel: AtLeastOne | None = None
    cost: str | None = None
    weight_bits: WeightBits | None = None
    quantize: QuantizeName | None = None
    kv_cache_tokens: AtLeastOne | None = None
    kv_cache_bytes: AtLeastOne | None = None
    gpu_memory_utilization: Share | None = None
    max_model_len: Annotated[int, msgspec.Meta(ge=2)] | None = None
    dtype: DTypeName | None = None
    cores: str | AtLeastOne | None = None
    shape: PresetName | None = None
    scheduler: SchedulerSettings = SchedulerSettings()
    nics: AtLeastOne | None = None
    price_per_hour: NotNegative | None = None

    def changes(self) -> dict[str, Any]:
        """What it changes of the fleet's settings, by name."""
        names = (*PARALLEL.values(), "hardware", "cost", "weight_bits", "quantize", "shape", "max_model_len")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def memory_changes(self) -> dict[str, Any]:
        """What it changes of the fleet's memory, by name."""
        return {name: value for name in OF_MEMORY if (value := getattr(self, name)) is not None}


class PoolsSettings(SettingsTable, frozen=True, kw_only=True):
    """``named``: the pools (none, or none with a replica: all ``replicas`` of the fleet prefill and decode).

    link: between replicas, by its name. nics: how many of them a replica has, each for either direction. hosts:
    replicas are dealt out to this many hosts, and those of one host borrow blocks of each other instead of sending them
    (0: each is on a host of its own); with shares_memory = false they copy the KV, as workers do that have joined.
    racks: hosts are dealt out to this many racks (0: there are none). uplink: the link, by its name, between a rack and
    the others, for each direction ("": no limit). stall_ms: how much longer a step lasts for each request whose KV the
    worker takes over or gives away in it (0: transfers cost the steps nothing).
    """

    link: str = "ib400"
    nics: AtLeastOne = 1
    hosts: AtLeastZero = 0
    shares_memory: bool = True
    racks: AtLeastZero = 0
    uplink: str = ""
    stall_ms: NotNegative = 0.0
    named: dict[str, PoolSettings] = msgspec.field(default_factory=dict)

    def replicas(self, name: str) -> int:
        """Replicas of the pool of this name (0 without one)."""
        pool = self.named.get(name)
        return pool.replicas if pool else 0

    @property
    def in_use(self) -> dict[str, PoolSettings]:
        """The pools with a replica, in the order of their workers: prefill, decode, both; within a role as they are
        named."""
        pools = [(name, pool) for name, pool in self.named.items() if pool.replicas]
        return dict(sorted(pools, key=lambda pool: ROLES.index(self.role(pool[0]))))

    def role(self, name: str) -> Role:
        """What the workers of this pool do."""
        own = self.named[name].role
        if own is not None:
            return own
        return "prefill" if name.startswith("prefill") else "decode" if name.startswith("decode") else "both"


NETWORK = tuple(name for name in PoolsSettings.__struct_fields__ if name != "named")


def pool_tables(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The table ``pools`` with every pool as a table. Raises ConfigError for a short form that is none."""
    tables: dict[str, Any] = {}
    for name, value in raw.items():
        is_pool = name not in NETWORK and not isinstance(value, bool)
        tables[name] = pool_table(name, value) if is_pool and isinstance(value, int | str) else value
    return tables


def pool_table(name: str, value: int | str) -> dict[str, Any]:
    """A pool in short, as a table: ``2``, ``h100``, ``2xh100:tp4,pp2``, ``2:tp4,weight_bits=8``. Raises ConfigError."""
    if isinstance(value, int):
        return {"replicas": value}
    first, _, options = value.partition(":")
    count, times, hardware = first.partition("x")
    table: dict[str, Any] = {}
    if first.isdecimal():
        table["replicas"] = int(first)
    elif times and count.isdecimal():
        table |= {"replicas": int(count), "hardware": hardware}
    elif first:
        table["hardware"] = first
    for option in options.split(",") if options else ():
        parallel = re.fullmatch(r"(tp|pp|ep|dp)(\d+)", option)
        key, equals, text = option.partition("=")
        if parallel:
            table[PARALLEL[parallel[1]]] = int(parallel[2])
        elif equals and key in PoolSettings.__struct_fields__:
            table[key] = _number_or_text(text)
        else:
            raise ConfigError(
                f"pools.{name} is {value!r}; {option!r} is none of tpN, ppN, epN, dpN and SETTING=VALUE, as in "
                "2xh100:tp4,pp2",
                param=f"pools.{name}",
            )
    if not table:
        raise ConfigError(f"pools.{name} is {value!r}; expected such as 2, 2xh100 or 2xh100:tp4", param=f"pools.{name}")
    return table


def _number_or_text(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:  # the next kind, and at the end a text
            continue
    return text


def parse_pool(text: str) -> tuple[str, str]:
    """``NAME=POOL`` of the command line. Raises ConfigError."""
    name, equals, pool = text.partition("=")
    if not equals or not re.fullmatch(r"\w[\w-]*", name) or not pool:
        raise ConfigError(f"pool is {text!r}; expected NAME=POOL, such as decode=4xa100-80gb:tp2", param="pool")
    if name in NETWORK:
        raise ConfigError(f"pool is {text!r}; {name} is a setting of the network between pools, no pool", param="pool")
    return name, pool


def with_pool(raw: Mapping[str, Any], path: str, value: Any) -> tuple[dict[str, Any], Any]:
    """The table ``pools`` with every pool as a table, and the value to set at a path in it: a pool in short changes
    what it says of that pool. Raises ConfigError."""
    tables = pool_tables(raw)
    if path not in NETWORK and "." not in path and isinstance(value, int | str) and not isinstance(value, bool):
        value = {**tables.get(path, {}), **pool_table(path, value)}
    return tables, value


def pools_from(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of PoolsSettings from a table in which every pool is a table."""
    network = {name: value for name, value in tables.items() if name in NETWORK}
    return {**network, "named": {name: value for name, value in tables.items() if name not in NETWORK}}


def plain_pools(data: Mapping[str, Any]) -> dict[str, Any]:
    """A table as ``pool_tables`` reads it, from the fields of PoolsSettings; a count says a pool without settings."""
    named = dict(data.get("named", {}))
    for name, table in named.items():
        if table.keys() <= {"replicas"}:
            named[name] = table.get("replicas", 1)
    return {**{name: value for name, value in data.items() if name != "named"}, **named}


def pool_path(name: str) -> str | None:
    """The dotted path of a setting of a pool, if this is one: ``pools.NAME`` (all of it) or ``pools.NAME.SETTING``."""
    first, _, rest = name.partition(".")
    pool, _, setting = rest.partition(".")
    if name in ROLES:
        return f"pools.{name}"
    if first != "pools" or not pool or pool in NETWORK:
        return None
    top, _, inner = setting.partition(".")
    is_known = not setting or (
        inner in SchedulerSettings.__struct_fields__
        if top == "scheduler"
        else top in PoolSettings.__struct_fields__ and not inner
    )
    return name if is_known else None
