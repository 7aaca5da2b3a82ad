"""A layout: which workers a fleet has, of which devices, and in which roles.

Unified and chunked fleets are equal workers that prefill and decode, and differ in the scheduler's shape alone. A split
fleet has a pool for each phase; a mixed one has workers between them that do both, as Splitwise's mixed pool (Patel et
al., ISCA 2024, section 4).
"""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import msgspec

from diptych.control.router.topology import Role
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.pool_settings import PoolSettings
from diptych.simulation.settings import Settings

LayoutName = Literal["unified", "chunked", "split", "mixed"]


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """A device as a plan counts it. usd_per_hour: None where the catalogue has no price. watts: rated board power."""

    name: str
    usd_per_hour: float | None
    watts: float


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """What one worker is made of."""

    device: PlannedDevice
    parallelism: Parallelism

    @property
    def num_devices(self) -> int:
        """Devices of one worker."""
        return self.parallelism.devices

    @property
    def usd_per_hour(self) -> float:
        """Price of one worker in US dollars per hour; 0 if its device has no price."""
        return (self.device.usd_per_hour or 0.0) * self.num_devices

    @property
    def kilowatts(self) -> float:
        """Rated power of one worker's devices."""
        return self.device.watts * self.num_devices / 1000

    def __str__(self) -> str:
        return f"{Path(self.device.name).name.removesuffix('.toml')}:{self.parallelism}"


@dataclass(frozen=True, slots=True)
class LayoutGroup:
    """Equal workers of one role."""

    role: Role
    count: int
    kind: WorkerKind


@dataclass(frozen=True, slots=True)
class FleetLayout:
    """groups: one of each role that the shape has, in the order prefill, decode, both."""

    shape: LayoutName
    groups: tuple[LayoutGroup, ...]

    @property
    def num_devices(self) -> int:
        """Devices of the whole fleet."""
        return sum(group.count * group.kind.num_devices for group in self.groups)

    @property
    def usd_per_hour(self) -> float:
        """Price of the whole fleet in US dollars per hour; devices without a price count as 0."""
        return sum(group.count * group.kind.usd_per_hour for group in self.groups)

    @property
    def kilowatts(self) -> float:
        """Rated power of the whole fleet."""
        return sum(group.count * group.kind.kilowatts for group in self.groups)

    def __str__(self) -> str:
        """The layout in words, such as ``split: 1 prefill h100:tp2, 2 decode h100:tp1``; groups of one kind together:
        ``split: 1 prefill + 2 decode h100:tp1``."""
        parts = []
        for kind, groups in groupby(self.groups, lambda group: group.kind):
            parts.append(f"{' + '.join(f'{group.count} {group.role}' for group in groups)} {kind}")
        return f"{self.shape}: {', '.join(parts)}"

    @property
    def devices(self) -> frozenset[str]:
        """The names of its devices."""
        return frozenset(group.kind.device.name for group in self.groups)

    def plain(self) -> list[dict[str, Any]]:
        """One record for each group."""
        return [
            {
                "role": group.role,
                "workers": group.count,
                "hardware": group.kind.device.name,
                "tensor_parallel": group.kind.parallelism.tensor,
                "pipeline_parallel": group.kind.parallelism.pipeline,
                "devices": group.count * group.kind.num_devices,
            }
            for group in self.groups
        ]

    def with_counts(self, counts: tuple[int, ...]) -> "FleetLayout":
        """The same kinds of workers, with ``counts`` workers in each group."""
        groups = (LayoutGroup(group.role, count, group.kind) for group, count in zip(self.groups, counts, strict=True))
        return FleetLayout(self.shape, tuple(groups))

    def settings(self, base: Settings) -> Settings:
        """The simulation of this fleet under the base's load. Pools and replicas of the base are replaced."""
        if self.shape in ("unified", "chunked"):
            (group,) = self.groups
            return msgspec.structs.replace(
                base,
                shape=self.shape,
                replicas=group.count,
                hardware=group.kind.device.name,
                tensor_parallel=group.kind.parallelism.tensor,
                pipeline_parallel=group.kind.parallelism.pipeline,
                pools=msgspec.structs.replace(base.pools, named={}),
            )
        named = {
            group.role: PoolSettings(
                replicas=group.count,
                hardware=group.kind.device.name,
                tensor_parallel=group.kind.parallelism.tensor,
                pipeline_parallel=group.kind.parallelism.pipeline,
            )
            for group in self.groups
        }
        pools = msgspec.structs.replace(base.pools, named=named)
        return msgspec.structs.replace(base, replicas=1, pools=pools)

    def can_be_served(self) -> bool:
        """Whether ``diptych serve`` can start it: its workers have one device each, all of one kind."""
        return len({group.kind for group in self.groups}) == 1 and self.groups[0].kind.num_devices == 1
