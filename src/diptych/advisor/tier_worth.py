"""What host memory and disk below the KV caches would be worth to a fleet: its own run, again with each size.

The run without them is the measure: what they save is time of prefill that is not spent again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from diptych.control.errors import ConfigError
from diptych.report.text import Table, milliseconds, number, percent
from diptych.simulation.settings import Settings, settings_from
from diptych.simulation.sweep import Task, run_here, run_tasks

BYTES_PER_GB = 10**9
TITLE = "Below the caches of the best: what more memory would find. GB per worker, ms, devices busy with prefill"
COLUMNS = ("host GB", "disk GB", "found", "of it below", "prefill time", "TTFT mean", "TTFT p99", "in time")


@dataclass(frozen=True, slots=True)
class TierSize:
    """Gigabytes of each worker."""

    host_gb: float
    disk_gb: float


def tier_sizes(host_gb: str | None, disk_gb: str | None) -> list[TierSize]:
    """The sizes to judge, from comma-separated lists: nothing, each of host memory, each of disk. Empty when none is
    asked for. Raises ConfigError."""
    hosts, disks = _sizes(host_gb, "kv_host_gb"), _sizes(disk_gb, "kv_disk_gb")
    if not hosts and not disks:
        return []
    sizes = [TierSize(0, 0), *(TierSize(size, 0) for size in hosts), *(TierSize(0, size) for size in disks)]
    return list(dict.fromkeys(sizes))


def tier_worth(plain_settings: Any, sizes: Sequence[TierSize], num_processes: int) -> list[dict[str, Any]]:
    """Figures of a fleet with each size. plain_settings: of its run, as plain data."""
    base = settings_from(plain_settings)
    tasks: list[tuple[dict[str, str], Settings]] = [({}, _with(base, size)) for size in sizes]
    task: Task = _worth_task
    found = run_tasks(task, tasks, num_workers=num_processes, on_done=lambda _: None)
    return [
        {"host_gb": size.host_gb, "disk_gb": size.disk_gb, **figures}
        for size, figures in zip(sizes, found, strict=True)
    ]


def worth_table(rows: Sequence[dict[str, Any]]) -> Table:
    """One row for each size."""
    cells = tuple(
        (
            number(row["host_gb"], 0),
            number(row["disk_gb"], 0),
            percent(row["found"]),
            percent(row["below"]),
            percent(row["prefill"]),
            milliseconds(row["ttft_mean_ms"]),
            milliseconds(row["ttft_p99_ms"]),
            percent(row["attainment"]),
        )
        for row in rows
    )
    return Table(TITLE, COLUMNS, cells)


def _with(base: Settings, size: TierSize) -> Settings:
    memory = msgspec.structs.replace(
        base.memory, host_bytes=int(size.host_gb * BYTES_PER_GB), disk_bytes=int(size.disk_gb * BYTES_PER_GB)
    )
    return msgspec.structs.replace(base, memory=memory)


def _worth_task(task: bytes) -> bytes:
    """One run, from JSON to JSON. found, below: shares of the prompt tokens, of which the second came from a tier;
    prefill: of the devices' time."""
    _, raw = msgspec.json.decode(task)
    summary = run_here(settings_from(raw)).point["summary"]
    used = summary["utilization"]
    figures = {
        "found": summary["cached_token_share"],
        "below": summary.get("tier_token_share", 0.0),
        "prefill": None if used["prefill"] is None else used["prefill"] + used["mixed"],
        "ttft_mean_ms": summary["ttft_ms"]["mean"],
        "ttft_p99_ms": summary["ttft_ms"]["p99"],
        "attainment": summary["attainment"],
    }
    return msgspec.json.encode(figures)


def _sizes(text: str | None, name: str) -> list[float]:
    try:
        sizes = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        sizes = [-1.0]
    if any(not 0 <= size <= BYTES_PER_GB for size in sizes):
        raise ConfigError(f"{name} is {text!r}; expected gigabytes such as 16,64", param=name)
    return sizes
