"""The processor of this machine: its name, cores and caches, and which of them this process may use.

A *CPU* is what the operating system schedules on and has a number; a *core* is the one CPU, or the SMT siblings, that
share execution units and the first caches. Read from /sys and /proc, without root. Where a file is missing (containers,
other systems) each CPU counts as a core, and what is not known is left out of the description.
"""

import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from diptych.base.byte_size import size_words
from diptych.base.cgroups import ROOT, cpu_quota, text_of

SYSTEM = "sys/devices/system/cpu"
CORES_OF_ARM = {  # "CPU part" of implementer 0x41; /proc/cpuinfo has no name there
    "0xd03": "Cortex-A53", "0xd08": "Cortex-A72", "0xd0b": "Cortex-A76", "0xd0c": "Neoverse N1",
    "0xd40": "Neoverse V1", "0xd49": "Neoverse N2", "0xd4f": "Neoverse V2", "0xd84": "Neoverse V3",
    "0xd8e": "Neoverse N3",
}  # fmt: skip
_NOISE = re.compile(r"\((?:R|TM)\)|\bCPU\b|\b\d+-Core Processor\b|@.*")  # of names: what says nothing of the kind


@dataclass(frozen=True, slots=True)
class Processor:
    """cores: those of the machine that are online, each as its CPUs, ascending. usable: the CPUs of this process.

    quota: CPUs whose time the control group grants (None: no limit). l2_bytes: of the first core; l3_bytes: of one of
    num_l3 equal parts (0: unknown).
    """

    name: str
    cores: tuple[tuple[int, ...], ...]
    usable: tuple[int, ...]
    quota: float | None = None
    l2_bytes: int = 0
    l3_bytes: int = 0
    num_l3: int = 1

    def cores_of(self, cpus: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """Each core that has some of ``cpus``, as these, in the order of their first."""
        wanted = set(cpus)
        known = [tuple(cpu for cpu in core if cpu in wanted) for core in self.cores]
        unknown = wanted.difference(*self.cores)
        return tuple(sorted([core for core in known if core] + [(cpu,) for cpu in unknown]))

    def spread(self, cpus: Iterable[int]) -> tuple[int, ...]:
        """``cpus`` in the order in which threads should take them: a core's second CPU after the first of all cores."""
        cores = self.cores_of(cpus)
        depth = max(map(len, cores), default=0)
        return tuple(core[at] for at in range(depth) for core in cores if at < len(core))

    @property
    def is_limited_by_quota(self) -> bool:
        """Whether the control group grants less time than the usable cores have."""
        return self.quota is not None and self.quota < len(self.cores_of(self.usable))

    @property
    def num_threads(self) -> int:
        """Compute threads of one process: one for each usable core, and no more than the quota can run at once."""
        count = len(self.cores_of(self.usable))
        return count if self.quota is None else max(1, min(count, int(self.quota)))

    def describe(self, num_cores: int | None = None) -> str:
        """One line: "AMD EPYC 9555 (2 of 64 cores, no SMT, L2 1 MiB, L3 8 x 32 MiB)". num_cores: that are computed on
        (None: all)."""
        count = f"{len(self.cores)} cores" if num_cores is None else f"{num_cores} of {len(self.cores)} cores"
        parts = [count, "SMT" if any(len(core) > 1 for core in self.cores) else "no SMT"]
        if self.quota is not None:
            parts.append(f"quota of {self.quota:g} CPUs")
        if self.l2_bytes:
            parts.append(f"L2 {size_words(self.l2_bytes)}")
        if self.l3_bytes:
            parts.append(f"L3 {f'{self.num_l3} x ' if self.num_l3 > 1 else ''}{size_words(self.l3_bytes)}")
        return f"{self.name} ({', '.join(parts)})"


def read_processor(root: Path = ROOT, usable: Iterable[int] | None = None) -> Processor:
    """This machine's, or what a tree of files under ``root`` describes. usable: CPUs (None: those of this process)."""
    allowed = tuple(sorted(_usable_cpus() if usable is None else usable))
    online = _cpus(root / SYSTEM / "online") or allowed
    cores = {siblings for cpu in online if (siblings := _siblings(root, cpu, online))}
    caches = _caches(root, online[0])
    l2_bytes, _ = caches.get(2, (0, 0))
    l3_bytes, sharers = caches.get(3, (0, 0))
    return Processor(
        name=_name(root),
        cores=tuple(sorted(cores)),
        usable=allowed,
        quota=cpu_quota(root),
        l2_bytes=l2_bytes,
        l3_bytes=l3_bytes,
        num_l3=max(1, round(len(online) / sharers)) if sharers else 1,
    )


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The CPUs of a list such as "0-3,8", each once. Raises ValueError."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    if not numbers:
        raise ValueError(f"no CPU in {text!r}")
    return tuple(dict.fromkeys(numbers))


def _usable_cpus() -> Iterable[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _cpus(path: Path) -> tuple[int, ...]:
    try:
        return parse_cpu_list(text_of(path))
    except ValueError:
        return ()


def _siblings(root: Path, cpu: int, online: Sequence[int]) -> tuple[int, ...]:
    """The online CPUs of the core that has this one. Older kernels know only the second file."""
    topology = root / SYSTEM / f"cpu{cpu}" / "topology"
    found = _cpus(topology / "core_cpus_list") or _cpus(topology / "thread_siblings_list")
    return tuple(sorted({cpu, *found}.intersection(online)))


def _caches(root: Path, cpu: int) -> dict[int, tuple[int, int]]:
    """Level to (bytes, CPUs that share it) of a CPU's caches for data."""
    found = {}
    for index in sorted((root / SYSTEM / f"cpu{cpu}" / "cache").glob("index*")):
        level, kind, size = (text_of(index / name) for name in ("level", "type", "size"))
        number = re.fullmatch(r"(\d+)([KM]?)", size)
        if level.isdigit() and kind != "Instruction" and number:
            unit = {"": 1, "K": 2**10, "M": 2**20}[number[2]]
            found[int(level)] = (int(number[1]) * unit, len(_cpus(index / "shared_cpu_list")))
    return found


def _name(root: Path) -> str:
    """The processor's name for itself; hypervisors cut the number off, so family and model stand for it."""
    first, _, _ = text_of(root / "proc/cpuinfo").partition("\n\n")
    lines = (line.partition(":") for line in first.splitlines())
    info = {key.strip(): value.strip() for key, _, value in lines}
    name = " ".join(_NOISE.sub(" ", info.get("model name", "")).split())
    if not name and info.get("CPU implementer") == "0x41":
        name = CORES_OF_ARM.get(info.get("CPU part", ""), "")
    name = name or platform.processor() or platform.machine() or "unknown processor"
    if not re.search(r"\d", name) and "cpu family" in info and "model" in info:
        name += f" family {info['cpu family']} model {info['model']}"
    return name
