"""What the simulated time costs: money and energy per million output tokens, from the hardware's entry.

Every GPU of the fleet is paid for from the first arrival to the last token, busy or not. Energy: the rated board power
while a worker is in a step, the idle power otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPrice:
    """Of one GPU; None: unknown."""

    num_gpus: int
    usd_per_hour: float | None = None
    watts_busy: float | None = None
    watts_idle: float | None = None


def economy(summary: Mapping[str, Any], price: FleetPrice) -> dict[str, float | None]:
    """Plain figures; None where a price or a power is unknown, or nothing was answered."""
    gpu_hours = price.num_gpus * summary["duration_s"] / 3600
    millions = summary["output_tokens_per_s"] * summary["duration_s"] / 1e6
    usd = None if price.usd_per_hour is None else price.usd_per_hour * gpu_hours
    kwh = None
    if price.watts_busy is not None and price.watts_idle is not None:
        busy = sum(summary["utilization"][phase] for phase in ("prefill", "mixed", "decode"))
        kwh = (price.watts_idle + (price.watts_busy - price.watts_idle) * busy) / 1000 * gpu_hours
    return {
        "num_gpus": price.num_gpus,
        "gpu_hours": gpu_hours,
        "usd": usd,
        "usd_per_million_output_tokens": usd / millions if usd is not None and millions else None,
        "kwh": kwh,
        "kwh_per_million_output_tokens": kwh / millions if kwh is not None and millions else None,
    }
