"""What the simulated time costs: money and energy per million output tokens, from the hardware's entry.

Every GPU of the fleet is paid for from the first arrival to the last token, busy or not. Energy: the rated board power
while a worker is in a step, the idle power otherwise.
"""

from collections.abc import Mapping
from typing import Any

from diptych.simulation.hardware import Hardware


def economy(summary: Mapping[str, Any], num_gpus: int, hardware: Hardware | None) -> dict[str, float | None]:
    """Plain figures of a fleet of this hardware (None: unknown); None where a price or a power is unknown, or nothing
    was answered."""
    gpu_hours = num_gpus * summary["duration_s"] / 3600
    millions = summary["output_tokens_per_s"] * summary["duration_s"] / 1e6
    usd = kwh = None
    if hardware is not None:
        busy = sum(summary["utilization"][phase] for phase in ("prefill", "mixed", "decode"))
        watts = hardware.idle_power_w + (hardware.power_w - hardware.idle_power_w) * busy
        kwh = watts / 1000 * gpu_hours
        usd = hardware.price_per_hour * gpu_hours if hardware.price_per_hour else None
    return {
        "num_gpus": num_gpus,
        "gpu_hours": gpu_hours,
        "usd": usd,
        "usd_per_million_output_tokens": usd / millions if usd is not None and millions else None,
        "kwh": kwh,
        "kwh_per_million_output_tokens": kwh / millions if kwh is not None and millions else None,
    }
