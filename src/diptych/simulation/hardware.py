"""Hardware as data: what a device can do on paper, the share of it that kernels were measured to reach, what it costs.

Owns the reading of catalogue/hardware.toml. Must never compute a duration (that is costs/) and never hold a figure of
its own: all of them lie in the file, beside their sources.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from diptych.control.errors import ConfigError

HardwareKind = Literal["gpu", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """Between the devices of one host; costs/collectives.py holds the laws.

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

    @property
    def max_devices(self) -> int:
        """Devices of one host that it joins."""
        return max(self.all_reduce_latency_s, default=self.link_devices)


@dataclass(frozen=True, kw_only=True)
class HostNetwork:
    """Between hosts: bandwidth of each device in one direction (bytes/s) when all devices of its host send, and the
    seconds of a message."""

    kind: str
    latency_s: float
    bandwidth: float


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
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} of {self.name} is {getattr(self, name)}; it must be above 0", param=name)
        if self.kind not in get_args(HardwareKind):
            raise ConfigError(f"kind of {self.name} is {self.kind!r}; gpu or cpu", param="kind")
        if "bf16" not in self.flops:
            raise ConfigError(f"flops of {self.name} has no bf16", param="flops")


def load_hardware(name: str, *, extra: Path | None = None) -> Hardware:
    """A device of the catalogue by name or alias; case does not matter.

    ``extra``: a file in the format of catalogue/hardware.toml (a measured machine, for example) whose entries come
    first. Raises ConfigError naming the known devices.
    """
    entries = dict(_catalogue())
    if extra is not None:
        entries.update(_parse(extra.read_text(), str(extra)))
    hardware = entries.get(name.lower())
    if hardware is None:
        known = ", ".join(dict.fromkeys(entry.name for entry in entries.values()))
        raise ConfigError(f"hardware {name!r} is not in the catalogue; known: {known}", param="hardware")
    return hardware


def hardware_names(kind: HardwareKind | None = None) -> tuple[str, ...]:
    """Names of the catalogue, without aliases, in its order; of one kind of device or of all."""
    entries = (entry for entry in _catalogue().values() if kind in (None, entry.kind))
    return tuple(dict.fromkeys(entry.name for entry in entries))


@cache
def _catalogue() -> Mapping[str, Hardware]:
    text = (resources.files("diptych.simulation.catalogue") / "hardware.toml").read_text()
    return _parse(text, "hardware.toml")


def _parse(text: str, source: str) -> dict[str, Hardware]:
    """Name and aliases, in lower case, to the device."""
    entries: dict[str, Hardware] = {}
    for name, raw in tomllib.loads(text).items():
        values: dict[str, Any] = dict(raw)
        aliases = values.pop("aliases", [])
        for key in ("interconnect", "achieved"):
            if not isinstance(values.get(key), dict):
                raise ConfigError(f"{source}: {name} has no table {key!r}", param="hardware")
        link = dict(values["interconnect"])
        for key in ("all_reduce_latency_s", "all_reduce_bandwidth"):
            link[key] = {int(size): float(value) for size, value in link.get(key, {}).items()}
        try:
            values["interconnect"] = Interconnect(**link)
            values["achieved"] = Achieved(**values["achieved"])
            if "network" in values:
                values["network"] = HostNetwork(**values["network"])
            hardware = Hardware(name=name, **values)
        except TypeError as error:
            raise ConfigError(f"{source}: {name}: {error}", param="hardware") from error
        _check_shares(hardware, source)
        for key in (name, *aliases):
            entries[key.lower()] = hardware
    return entries


def _check_shares(hardware: Hardware, source: str) -> None:
    for entry in fields(Achieved):
        value = getattr(hardware.achieved, entry.name)
        if value < 0 or (not entry.name.endswith("_s") and not 0 < value <= 2):
            raise ConfigError(
                f"{source}: {entry.name} of {hardware.name} is {value}; it must be in (0, 2]", param="achieved"
            )
