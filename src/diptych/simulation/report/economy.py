"""What the simulated time costs: money and energy, in all, by request and by million tokens, from the hardware's entry.

Every GPU of the fleet is paid for from the first arrival to the last token, busy or not. Each price divides the whole
of that: by the requests that were answered, by their prompt tokens, by their output tokens, or by both kinds of tokens
together. Energy: the rated board power while a worker is in a step, the idle power otherwise.
"""

from collections.abc import Mapping
from typing import Any

from diptych.simulation.hardware import Hardware


def economy(summary: Mapping[str, Any], num_gpus: int, hardware: Hardware | None) -> dict[str, float | None]:
    """Plain figures of a fleet of this hardware (None: unknown); None where a price or a power is unknown, or nothing
    was answered."""
    gpu_hours = num_gpus * summary["duration_s"] / 3600
    usd = kwh = None
    if hardware is not None:
        busy = sum(summary["utilization"][phase] or 0.0 for phase in ("prefill", "mixed", "decode"))
        watts = hardware.idle_power_w + (hardware.power_w - hardware.idle_power_w) * busy
        kwh = watts / 1000 * gpu_hours
        usd = hardware.price_per_hour * gpu_hours if hardware.price_per_hour else None
    return {
        "num_gpus": num_gpus,
        "gpu_hours": gpu_hours,
        "usd": usd,
        **prices(usd, summary),
        "kwh": kwh,
        "kwh_per_million_output_tokens": _each(kwh, summary["output_tokens"] / 1e6),
    }


def prices(usd: float | None, summary: Mapping[str, Any]) -> dict[str, float | None]:
    """The whole of what was spent, by answered request and by million tokens of each kind."""
    prompts, outputs = summary["prompt_tokens"] / 1e6, summary["output_tokens"] / 1e6
    return {
        "usd_per_request": _each(usd, summary["num_completed"]),
        "usd_per_million_tokens": _each(usd, prompts + outputs),
        "usd_per_million_prompt_tokens": _each(usd, prompts),
        "usd_per_million_output_tokens": _each(usd, outputs),
    }


def _each(whole: float | None, count: float) -> float | None:
    return whole / count if whole is not None and count else None
