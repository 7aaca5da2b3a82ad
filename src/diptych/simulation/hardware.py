"""Hardware as data: what a device can do on paper, the share of it that kernels were measured to reach, what it costs.

A device is an entry of catalogue/hardware.toml, of a file in the same format, or a table of settings. An entry with
``like`` takes what it leaves out from another one. Durations are computed in costs/; all figures lie in the files,
beside their sources.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from diptych.control.errors import ConfigError

HardwareKind = Literal["gpu", "cpu"]
PEAKS = ("bf16", "fp8", "int8")  # types of arithmetic; bf16 is of every device


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """Links between the devices of one host; costs/collectives.py holds the laws.

    Either the all-reduce was measured, by number of devices: a sum of m bytes takes latency[n] + m / bandwidth[n]; or
    one link is known (seconds of a message, bytes/s of a device in one direction) and joins ``link_devices`` of them.
    """

    kind: str
    all_reduce_latency_s: Mapping[int, float] = field(default_factory=dict)
    all_reduce_bandwidth: Mapping[int, float] = field(default_factory=dict)
    link_latency_s: float = 0.0
    link_bandwidth: float = 0.0
    link_devices: int = 1

    def __post_init__(self) -> None:
        if self.all_reduce_latency_s.keys() != self.all_reduce_bandwidth.keys():
            raise ConfigError(
                f"interconnect {self.kind}: all_reduce_latency_s and all_reduce_bandwidth name different numbers of "
                "devices",
                param="interconnect",
            )
        for devices, value in self.all_reduce_latency_s.items():
            _require(0 <= value < 1, f"all_reduce_latency_s of {devices} devices", value, "in [0, 1) seconds")
        for devices, value in self.all_reduce_bandwidth.items():
            _require(0 < value < math.inf, f"all_reduce_bandwidth of {devices} devices", value, "above 0")
        _require(0 <= self.link_latency_s < 1, "link_latency_s", self.link_latency_s, "in [0, 1) seconds")
        _require(0 <= self.link_bandwidth < math.inf, "link_bandwidth", self.link_bandwidth, "at least 0")
        _require(self.link_devices >= 1, "link_devices", self.link_devices, "at least 1")

    @property
    def max_devices(self) -> int:
        """Devices of one host that it joins."""
        return max(self.all_reduce_latency_s, default=self.link_devices)


@dataclass(frozen=True, kw_only=True)
class HostNetwork:
    """Links between hosts: bandwidth of each device in one direction (bytes/s) when all devices of its host send, and
    the seconds of a message."""

    kind: str
    latency_s: float
    bandwidth: float

    def __post_init__(self) -> None:
        _require(0 <= self.latency_s < 1, "network.latency_s", self.latency_s, "in [0, 1) seconds")
        _require(0 < self.bandwidth < math.inf, "network.bandwidth", self.bandwidth, "above 0")


@dataclass(frozen=True, kw_only=True)
class Achieved:
    """What kernels reach of the figures on paper; the header of catalogue/hardware.toml holds the laws they belong to.

    Shares are of the peak FLOP/s or of the memory bandwidth; times are in seconds.
    """

    gemm_compute: float
    gemm_memory: float
    gemm_launch_s: float
    fp8_compute: float
    fp8_launch_s: float
    attention_compute: float
    attention_io: float
    decode_memory: float
    attention_launch_s: float
    decode_seq_s: float
    elementwise_memory: float
    elementwise_launch_s: float
    step_overhead_s: float

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name.endswith("_s"):
                _require(0 <= value < 1, entry.name, value, "in [0, 1) seconds")
            else:
                _require(0 < value <= 2, entry.name, value, "in (0, 2]")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device. memory in bytes, memory_bandwidth in bytes/s, flops: dense FLOP/s by type (bf16, fp8, int8; what is
    absent is not supported), price in USD per hour of one device, power in watts. A device of kind cpu is all the cores
    of one worker."""

    name: str
    memory_bytes: int
    memory_bandwidth: float
    flops: Mapping[str, float]
    interconnect: Interconnect
    price_per_hour: float
    power_w: float
    idle_power_w: float
    achieved: Achieved
    kind: HardwareKind = "gpu"
    network: HostNetwork | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "memory_bandwidth", "power_w"):
            _require(0 < getattr(self, name) < math.inf, name, getattr(self, name), "above 0")
        for name in ("price_per_hour", "idle_power_w"):
            _require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "at least 0")
        limit = f"at most power_w, {self.power_w}"
        _require(self.idle_power_w <= self.power_w, "idle_power_w", self.idle_power_w, limit)
        _require(self.kind in get_args(HardwareKind), "kind", self.kind, "gpu or cpu")
        _require("bf16" in self.flops, "flops", dict(self.flops), "a table with bf16")
        for name, value in self.flops.items():
            _require(name in PEAKS, "flops", name, f"one of {', '.join(PEAKS)}")
            _require(0 < value < math.inf, f"flops.{name}", value, "above 0")


def _require(condition: bool, name: str, value: object, limit: str) -> None:
    """Raise ConfigError unless the condition holds."""
    if not condition:
        raise ConfigError(f"{name} is {value!r}; it must be {limit}", param=name)


def load_hardware(device: str | Mapping[str, Any]) -> Hardware:
    """A device by its name or alias in the catalogue (case does not matter), of a file in the catalogue's format
    (``FILE.toml``, or ``FILE.toml:NAME`` where it holds several), or an entry as a table.

    Raises ConfigError naming the known devices, or the field, its value and the limit.
    """
    if not isinstance(device, str):
        entry = dict(device)
        return _hardware(_own_name(entry), entry, "hardware", {})
    if ".toml" not in device:
        return catalogue_hardware(device)
    name, entry, own = _in_file(device)
    return _hardware(name, entry, device.partition(":")[0], own)


def catalogue_hardware(name: str) -> Hardware:
    """A device of the catalogue by its name or alias; no file is read. Raises ConfigError naming the known devices."""
    entries = _catalogue()
    if name.lower() not in entries:
        known = ", ".join(dict.fromkeys(name for name, _ in entries.values()))
        raise ConfigError(f"hardware {name!r} is not in the catalogue; known: {known}", param="hardware")
    return _of_catalogue(name.lower())


def hardware_names(kind: HardwareKind | None = None) -> tuple[str, ...]:
    """Names of the catalogue, without aliases, in its order; of one kind of device or of all."""
    names = dict.fromkeys(name for name, _ in _catalogue().values())
    return tuple(name for name in names if kind in (None, _of_catalogue(name).kind))


def hardware_fields() -> tuple[str, ...]:
    """Dotted paths of the fields of an entry."""
    return ("like", "name", *_field_paths(Hardware))


def device_words(device: str | Mapping[str, Any]) -> str:
    """What people call the device of a setting."""
    return device if isinstance(device, str) else str(device.get("name", device.get("like", "own hardware")))


Entries = Mapping[str, tuple[str, dict[str, Any]]]  # name or alias in lower case -> (name, the entry as it is written)
# No duration depends on these: with ``like`` and other values of them a device is the same, and measurements hold.
PRICES_AND_SIZES = ("price_per_hour", "power_w", "idle_power_w", "memory_bytes")


@cache
def _catalogue() -> Entries:
    text = (resources.files("diptych.simulation.catalogue") / "hardware.toml").read_text()
    return _entries(tomllib.loads(text), "hardware.toml")


@cache
def _of_catalogue(name: str) -> Hardware:
    full_name, entry = _catalogue()[name]
    return _hardware(full_name, entry, "hardware.toml", {})


def _in_file(reference: str) -> tuple[str, dict[str, Any], Entries]:
    """The (name, entry) that ``FILE.toml`` or ``FILE.toml:NAME`` means, and all entries of the file."""
    stem, suffix, name = reference.partition(".toml")
    path, name = Path(stem + suffix), name.removeprefix(":")
    try:
        own = _entries(tomllib.loads(path.read_text()), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="hardware") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}", param="hardware") from None
    names = list(dict.fromkeys(full_name for full_name, _ in own.values()))
    if not names:
        raise ConfigError(f"{path} has no device: expected a table such as [my-device]", param="hardware")
    if not name and len(names) > 1:
        choices = ", ".join(f"{path}:{each}" for each in names)
        raise ConfigError(f"hardware is {path}, which has several devices; one of {choices}", param="hardware")
    found = own.get((name or names[0]).lower())
    if found is None:
        raise ConfigError(f"hardware is {path}:{name}; {path} has {', '.join(names)}", param="hardware")
    return *found, own


def _entries(tables: Mapping[str, Any], source: str) -> Entries:
    """The entries by name and alias, in lower case."""
    entries: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{source}: {name} is {table!r}; expected a table such as [my-device]", param="hardware")
        entry = dict(table)
        for key in (name, *entry.pop("aliases", [])):
            entries[key.lower()] = (name, entry)
    return entries


def _own_name(entry: dict[str, Any]) -> str:
    """Taken out of the entry: its own, or made of the device that it is like and of what is different."""
    given = entry.pop("name", None)
    if given is not None:
        return str(given)
    changed = [f"{name} {value!r}" for name, value in _leaves(entry) if name != "like"]
    return f"{entry.get('like', 'own hardware')} with {', '.join(changed)}"


def _hardware(name: str, entry: Mapping[str, Any], source: str, own: Entries) -> Hardware:
    """The device of an entry. own: entries that it may be like besides those of the catalogue. Raises ConfigError
    naming the source, the device and the field."""
    where = f"{source}: {name}" if source.endswith(".toml") else "hardware"
    name, whole = _resolved(name, dict(entry), where, own)
    _check_fields(Hardware, whole, where)
    try:
        return msgspec.convert({**whole, "name": name}, Hardware, str_keys=True)
    except msgspec.ValidationError as error:
        reason = str(error.__cause__) if isinstance(error.__cause__, ConfigError) else _in_words(error, whole)
        raise ConfigError(f"{where}: {reason}", param="hardware") from None


def _resolved(name: str, entry: dict[str, Any], where: str, own: Entries) -> tuple[str, dict[str, Any]]:
    """The name and the entry with all that it leaves out."""
    like = entry.pop("like", None)
    if like is None:
        return name, entry
    key = str(like).lower()
    own = {other: found for other, found in own.items() if found[0] != name}  # what is like itself means the catalogue
    if ".toml" in key:
        base_name, base, own = _in_file(str(like))
        load_hardware(str(like))  # what is wrong in the file is said of the file
    elif key in own or key in _catalogue():
        base_name, base = own.get(key) or _catalogue()[key]
    else:
        known = ", ".join(dict.fromkeys(full_name for full_name, _ in (*own.values(), *_catalogue().values())))
        raise ConfigError(f"{where}: like is {like!r}; one of {known}", param="hardware")
    base_name, base = _resolved(base_name, dict(base), where, own)
    paths = [path for path, _ in _leaves(entry) if not path.startswith("sources")]
    changed = [path for path in paths if path not in PRICES_AND_SIZES]
    if not changed:
        name = base_name
    else:
        kept = {key: text for key, text in base.get("sources", {}).items() if key.startswith("assumed_")}
        given = entry.pop("sources", {"assumed": f"{', '.join(changed)} as given, the rest as of {base_name}"})
        base = {**base, "sources": {**kept, **given}}
    return name, _merged(base, entry)


def _merged(base: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry on top of the one that it is like, table by table."""
    merged = dict(base)
    for name, value in entry.items():
        below = base.get(name)
        merged[name] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _leaves(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted path, value) of everything that is no table."""
    found: list[tuple[str, Any]] = []
    for name, value in table.items():
        found += _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return found


def _check_fields(kind: type, table: object, where: str, prefix: str = "") -> None:
    """Raise ConfigError for a field that does not exist, or that is missing."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: {prefix.rstrip('.')} is {table!r}; it must be a table", param="hardware")
    hints = get_type_hints(kind)
    known = [name for name in hints if prefix or name != "name"]
    for name, value in table.items():
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"{where}: {prefix}{name} is not a field; {hint}", param="hardware")
        if (record := _record(hints[name])) is not None:
            _check_fields(record, value, where, f"{prefix}{name}.")
    missing = [name for name in _required(kind) if name in known and name not in table]
    if missing:
        message = f"{where} lacks {', '.join(prefix + name for name in missing)}; set them, or like = another device"
        raise ConfigError(message, param="hardware")


def _required(kind: type) -> list[str]:
    return [field.name for field in msgspec.inspect.type_info(kind).fields if field.required]  # type: ignore[attr-defined]


def _record(hint: Any) -> type | None:
    """The dataclass that a field holds, if it holds one."""
    return next((kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)), None)


def _field_paths(kind: type, prefix: str = "") -> list[str]:
    paths: list[str] = []
    for name, hint in get_type_hints(kind).items():
        record = _record(hint)
        if record is not None:
            paths += _field_paths(record, f"{prefix}{name}.")
        elif name == "flops":
            paths += [f"{prefix}{name}.{peak}" for peak in PEAKS]
        elif prefix or name not in ("name", "sources"):
            paths.append(f"{prefix}{name}")
    return paths


def _in_words(error: msgspec.ValidationError, entry: Mapping[str, Any]) -> str:
    """What msgspec writes as "Expected `float`, got `str` - at `$.power_w`"."""
    message, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`").lstrip(".").replace("[...]", "")
    value = dict(_leaves(entry)).get(path)
    return f"{path} is {value!r}; it must be {message.removeprefix('Expected ').partition(',')[0]}".replace("`", "")
