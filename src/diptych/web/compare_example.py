"""The two runs with which the comparison opens: one load on two workers that do both, and on a pool of each kind.

Computed in advance by scripts/guide_example, and kept beside the page; a server never computes them.
"""

from typing import Any

import msgspec

from diptych.simulation.prepare import prepare
from diptych.simulation.report.outcome import records
from diptych.simulation.run import simulate
from diptych.simulation.settings import settings_from

OBJECTIVES = {"ttft_ms": 1000.0, "tpot_ms": 12.0}
KEPT = ("reason", "arrival_s", "ttft_s", "tpot_s", "e2e_s", "output_tokens", "slo_met")  # what the page reads
LOAD = {
    "rate": 8.0,
    "num_requests": 240,
    "slo": OBJECTIVES,
    "lengths": {
        "prompt": {"kind": "lognormal", "mean": 3000, "sigma": 0.6, "max": 12_000},
        "output": {"kind": "lognormal", "mean": 150, "sigma": 0.6, "max": 600},
    },
}
RUNS: dict[str, dict[str, Any]] = {
    "whole prompts": {"replicas": 2, "shape": "unified"},
    "two pools": {"pools": {"prefill": 1, "decode": 1}},
}


def example() -> dict[str, Any]:
    """What the page reads: the objectives, and for each side the run's name and its records, times in seconds."""
    sides = zip("ab", RUNS.items(), strict=True)
    runs = {side: {"name": name, "records": _records(fleet)} for side, (name, fleet) in sides}
    return {"objectives": OBJECTIVES, "runs": runs}


def _records(fleet: dict[str, Any]) -> list[dict[str, Any]]:
    settings = settings_from({"model": "llama-3.1-8b", "hardware": "h100", "seed": 1, "workload": LOAD, **fleet})
    found = [msgspec.json.decode(line) for line in records(simulate(prepare(settings).scenario).requests)]
    return [{name: _short(record[name]) for name in KEPT} for record in found]


def _short(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) else value
