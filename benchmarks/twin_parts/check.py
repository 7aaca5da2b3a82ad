"""Every published measurement that is reproduced, in one table: measured, simulated, goal, and the cause of each miss.

    python benchmarks/twin.py check DATA_FOLDER [--only PART ...] [--records]

Runs the parts that own the reproductions, one after the other, each of which writes its record under results/, and then
reads the records. --records: only reads them. --only: these parts; the others' records are read as they are. Exits with
1 when a goal is missed for which no cause is known.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import HERE, RESULTS, report

Row = dict[str, Any]
PARTS = {  # name: its record, and more options
    "runs": ("reproduce_vllm_runs.json",),
    "served": ("reproduce_served_points.json",),
    "splitwise": ("reproduce_papers-R14.json",),
    "distserve": ("reproduce_papers-R5.json", "--svg", "reproduce_papers_fig8.svg"),
    "tables": ("step_cost_tables.json",),
    "pools": ("reproduce_pools.json",),
    "traces": ("traces.json",),
}
WITHOUT_DATA = ("pools", "traces")
VARIANTS = (  # ends of runs that show what a part matters, beside the run that is like the measured one
    "eager",  # kernels as a profile's artifact ran them
    "fused",  # without the host of the measured engine
    "free transfers",
    "512 a step",
    "R10 RTX4090",  # Diptych's admission; "greedy" is vLLM's
    "R10 RTXPRO6000",  # as if all contexts of a batch were equal; "skew" is as in diptych simulate
)
CAUSES = {  # (beginning of the target, beginning of the metric): why its goal is missed
    ("R9 H100 SM", ""): "the engine of the run is older than the measured kernels, and slower at small batches",
    ("R5 OPT-13B vLLM", ""): "by the published fit a prompt of 1,717 tokens takes the whole objective alone",
    ("R12 prompt of 16383", ""): "in the source this prompt takes 20 % longer whole than in chunks of 2,048",
    ("R12 step, 4D", ""): "the source gives 68.1 ms here and 48.8 ms for the same step in its figure 2",
}


@dataclass(frozen=True)
class Line:
    """One comparison. met: None where the target has no goal or nothing was measured."""

    target: str
    metric: str
    measured: float | str | None
    simulated: float | str | None
    error: float | None
    goal: str
    met: bool | None

    @property
    def cause(self) -> str:
        """Why it is missed, as far as known; of several the one with the longest name."""
        if self.met is not False:
            return ""
        found = [key for key in CAUSES if self.target.startswith(key[0]) and self.metric.startswith(key[1])]
        return CAUSES[max(found, key=lambda key: len("".join(key)))] if found else "unknown"

    def as_row(self) -> Row:
        """For the table and the record."""
        met = {True: "yes", False: "no", None: ""}[self.met]
        return {
            "target": self.target,
            "metric": self.metric,
            "measured": self.measured,
            "simulated": self.simulated,
            "error_%": self.error,
            "goal": self.goal,
            "met": met,
            "cause": self.cause,
        }


def record(name: str) -> dict[str, Any]:
    """What a part wrote. A record that is missing is one of nothing."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {"rows": []}


def within(error: float | None, goal: str) -> bool | None:
    """Whether an error in percent keeps a goal such as "5 %"."""
    if error is None or not goal.endswith("%"):
        return None
    return abs(error) <= float(goal.removesuffix("%"))


def vllm_runs() -> Iterable[Line]:
    """R7 to R10."""
    for row in record("reproduce_vllm_runs")["rows"]:
        goal, error = row.get("goal", ""), row.get("error_%")
        if goal:
            goal = "(variant)" if row["run"].endswith(VARIANTS) else goal
            met = within(error, goal)
            yield Line(row["run"], row["metric"], row.get("measured"), row["simulated"], error, goal, met)


def served_points() -> Iterable[Line]:
    """R11: medians over all points, and over those that aiconfigurator predicts too."""
    rows = {row["rows"]: row for row in record("reproduce_served_points")["rows"]}
    for name in ("all, plain", "engine: tested, fitted", "half: tested, fitted"):
        row = rows.get(name)
        if row is None:
            continue
        for metric, theirs in (("TPOT", 11.5), ("TTFT", 43.9)):
            target = f"R11 {name}, {row['points']} points"
            yield Line(target, f"median error of {metric}, %", None, row[f"{metric}_%"], None, "", None)
            ours, aic = row[f"shared_{metric}_%"], row[f"aic_{metric}_%"]
            target = f"R11 {name}, the {row['shared']} that aiconfigurator predicts too (its error: measured)"
            yield Line(target, f"median error of {metric}, %", aic, ours, None, f"{theirs} %", ours <= theirs)


def papers() -> Iterable[Line]:
    """R5, R14."""
    for row in record("reproduce_papers-R5")["rows"]:
        if row.get("requests") == "as run" and "rate at 90 %" in row:
            target = f"R5 {row['model'].upper()} {row['system']} ({row['points off']} points off the curve)"
            goal = "15 % or 5 points"
            rate, published = row["rate at 90 %"], row["published"]
            yield Line(target, "requests/s/GPU at 90 %", published, rate, row["error_%"], goal, row[f"goal ({goal})"])
    for row in record("reproduce_papers-R14")["rows"]:
        if (row["decode times"], row["batching"]) == ("as-simulated", "mixed"):
            limit = f"{row['kept at']} / {row['missed at']}"
            yield Line("R14 Splitwise", "kept / missed at", row["published"], limit, None, "same", row["goal"])


def sarathi() -> Iterable[Line]:
    """R12: steps within 15 %, overhead of chunks within 8 points."""
    for row in record("step_cost_tables").get("sarathi", []):
        goal = 8 if row["unit"] == "points" else 15
        yield Line(
            f"R12 {row['what']}", "", row["measured"], row["predicted"], row["difference"], f"{goal} {row['unit']}",
            abs(row["difference"]) <= goal,
        )  # fmt: skip


def pools() -> Iterable[Line]:
    """R15: TTFT falls and the time between tokens rises with more prefill."""
    rows = record("reproduce_pools")["rows"]
    if rows:
        ttft, tpot = ([row[name] for row in rows] for name in ("TTFT mean s", "TPOT mean ms"))
        shape = ttft == sorted(ttft, reverse=True) and tpot[2:] == sorted(tpot[2:])
        fewest = next(row["prefill:decode"] for row in rows if row["attainment"] >= 0.95)
        metric = "fewest prefill nodes that keep up"
        yield Line("R15 Mooncake, 16 nodes", metric, "near 8:8", fewest, None, "shape", shape)


def traces() -> Iterable[Line]:
    """R3: hits of a block cache, in points."""
    for row in record("traces").get("prefix_cache", []):
        if row["expected"] is not None:
            error = round(row["hit_percent"] - row["expected"], 2)
            target = f"R3 Mooncake, cache of {row['cache_tokens']} tokens"
            met = abs(error) <= 0.5
            yield Line(target, "hits, %", row["expected"], row["hit_percent"], error, "0.5 points", met)


READERS: Sequence[Callable[[], Iterable[Line]]] = (vllm_runs, served_points, papers, sarathi, pools, traces)


def run(name: str, folder: Path) -> None:
    """One part, with its output on the terminal. Raises CalledProcessError."""
    arguments = [*(() if name in WITHOUT_DATA else (str(folder),)), "--json", *PARTS[name]]
    began = time.monotonic()
    print(f"== {name}", flush=True)
    subprocess.run([sys.executable, str(HERE / "twin.py"), name, *arguments], check=True)
    print(f"== {name}: {time.monotonic() - began:.0f} s", flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", choices=PARTS)
    parser.add_argument("--records", action="store_true")


def main(options: argparse.Namespace) -> None:
    """Run, read, print."""
    for name in PARTS if options.only is None else options.only:
        if not options.records:
            run(name, options.folder)
    lines = [line for read in READERS for line in read()]
    report("reproductions", [line.as_row() for line in lines], options.json or "reproduce.json")
    judged = [line for line in lines if line.met is not None]
    unknown = [line for line in judged if line.cause == "unknown"]
    print(f"{sum(bool(line.met) for line in judged)} of {len(judged)} goals met, {len(unknown)} missed without a cause")
    sys.exit(bool(unknown))
