"""What the simulated time costs: money and energy, pool by pool, from the entries of their hardware.

Every GPU of the fleet is paid for from the first arrival to the last token, busy or not. Each price divides the whole
of that: by the requests that were answered, by their prompt tokens, by their output tokens, or by both kinds of tokens
together. Energy: the rated board power while a worker is in a step, the idle power otherwise.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from diptych.simulation.prepare import PreparedPool
from diptych.simulation.results import SimulationResult, utilization


def pool_rows(result: SimulationResult, pools: Sequence[PreparedPool]) -> list[dict[str, Any]]:
    """One row of plain figures for each pool, whose workers are numbered in this order: what it is, what its workers
    did (``utilization``: see results.py; ``busy``: the share of their time in steps), what it cost (None: unknown)."""
    rows = []
    first = 0
    for pool in pools:
        shares = utilization(replace(result, workers=result.workers[first : first + pool.num_workers]))
        first += pool.num_workers
        busy = _sum(shares[phase] for phase in ("prefill", "mixed", "decode"))
        usd, kwh = _spent(pool, result.duration_ns / 3.6e12, busy or 0.0)
        rows.append(
            {
                "name": pool.name,
                "role": pool.role,
                "replicas": pool.replicas,
                "parallelism": str(pool.parallelism),
                "hardware": pool.hardware.name if pool.hardware else None,
                "num_gpus": pool.num_devices,
                "cost_model": pool.choice.words,
                "kv_tokens": pool.num_workers * pool.engine.cache.num_blocks * pool.engine.cache.block_size,
                "utilization": shares,
                "busy": busy,
                "usd": usd,
                "kwh": kwh,
            }
        )
    return rows


def _spent(pool: PreparedPool, hours: float, busy: float) -> tuple[float | None, float | None]:
    """(USD, kWh) of a pool."""
    hardware = pool.hardware
    if hardware is None:
        return None, None
    gpu_hours = pool.num_devices * hours
    watts = hardware.idle_power_w + (hardware.power_w - hardware.idle_power_w) * busy
    price = hardware.price_per_hour if pool.price_per_hour is None else pool.price_per_hour
    return price * gpu_hours if price else None, watts / 1000 * gpu_hours


def economy(summary: Mapping[str, Any], pools: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Plain figures of the fleet, the sums over its ``pool_rows``; None where that of a pool is not known, or nothing
    was answered."""
    num_gpus = sum(pool["num_gpus"] for pool in pools)
    usd, kwh = (_sum(pool[figure] for pool in pools) for figure in ("usd", "kwh"))
    return {
        "num_gpus": num_gpus,
        "gpu_hours": num_gpus * summary["duration_s"] / 3600,
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


def _sum(figures: Iterable[float | None]) -> float | None:
    known = list(figures)
    return None if None in known else sum(figure for figure in known if figure is not None)
