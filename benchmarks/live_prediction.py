"""Calibrate once, then predict what live servers do that the calibration never saw.

    python benchmarks/live_prediction.py [--model DIR] [--calibration FILE] [--seconds 20] [--repeats 2]
                                         [--json live_prediction.json] [--plot live_prediction.svg]

Without --calibration, ``diptych calibrate`` runs first. Each case is a list of requests (arrival, prompt and answer
lengths) that is sent to ``diptych serve`` over HTTP, open loop, with fresh random prompts, --repeats times; the
simulator gets the same list, the calibration, and nothing else. Compared are the percentiles of TTFT and TPOT as the
HTTP client sees them. "repeat" is how much the live percentiles differ between the repeats: no prediction can be
better than that. The worker computes on core 0 with one thread, so that the front end and the client, which share the
machine, have a core that is theirs. Speculation is off: a model with random weights repeats itself, and would decode
several tokens a step. "others' cores": what unrelated processes used meanwhile; it should be next to nothing.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, report
from other_load import OtherLoad
from prediction_plot import plot
from servers import URL, diptych_server

from diptych.bench.conversations import Conversations
from diptych.bench.load import Load, LoadOptions, LoadResult
from diptych.bench.session import BenchConfig, drive, open_session
from diptych.bench.target import TargetConfig
from diptych.control.config import SchedulerConfig, shape_preset
from diptych.control.slo import NS_PER_S, Slo
from diptych.report.statistics import percentile
from diptych.serving.link.engine_options import BUNDLED_MODEL
from diptych.simulation.costs.fitted import Calibration, read_calibration
from diptych.simulation.run import simulate
from diptych.simulation.scenario import Scenario
from diptych.workload.spec import RequestSpec

SHARES = (50, 90, 99)
MACHINE = ("--threads", "1", "--cores", "0")
Lengths = Callable[[random.Random], tuple[int, int]]  # prompt and answer tokens
Latencies = dict[str, list[float]]  # "ttft" and "tpot" of every request, in seconds


@dataclass(frozen=True)
class Case:
    """``load``: share of the machine's time that the requests would take one by one (the rate follows from it and
    from the calibration). burst: requests that come together."""

    name: str
    shape: str
    load: float
    lengths: Lengths
    burst: int = 1
    tpot_slo_ms: float | None = None


def lognormal(prompt: int, answer: int, sigma: float) -> Lengths:
    """Lengths with these medians, cut off at 1/8 and 8 times."""

    def draw(rng: random.Random) -> tuple[int, int]:
        factors = (min(8.0, max(0.125, rng.lognormvariate(0, sigma))) for _ in range(2))
        one, other = (round(median * factor) for median, factor in zip((prompt, answer), factors, strict=True))
        return max(4, one), max(2, other)

    return draw


def bimodal(rng: random.Random) -> tuple[int, int]:
    """Four chats for every long document with a short answer."""
    return (rng.randint(40, 120), rng.randint(60, 180)) if rng.random() < 0.8 else (rng.randint(1200, 2400), 16)


CASES = (
    Case("chat, light", "chunked", 0.5, lognormal(128, 64, 0.6)),
    Case("chat, busy", "chunked", 1.2, lognormal(128, 64, 0.6)),
    Case("chat, busy", "unified", 1.2, lognormal(128, 64, 0.6)),
    Case("bursts of 8", "chunked", 0.8, lognormal(96, 48, 0.3), burst=8),
    Case("bursts of 12", "unified", 0.8, lognormal(96, 48, 0.3), burst=12),
    Case("long prompts", "chunked", 0.6, lognormal(1000, 32, 0.4), tpot_slo_ms=40),
    Case("long prompts", "unified", 0.6, lognormal(1000, 32, 0.4)),
    Case("chats and documents", "chunked", 0.8, bimodal),
)


def requests_of(case: Case, calibration: Calibration, seconds: float, seed: int) -> tuple[RequestSpec, ...]:
    """The requests of a case, arrivals as a Poisson process of bursts."""
    rng = random.Random(seed)
    longest = calibration.max_model_len
    sizes = [case.lengths(rng) for _ in range(4000)]
    alone_s = sum(seconds_alone(calibration, *size) for size in sizes) / len(sizes)
    rate = case.load / alone_s / case.burst
    slo = Slo(tpot_ns=round(case.tpot_slo_ms * 1e6)) if case.tpot_slo_ms else None
    specs: list[RequestSpec] = []
    now = 0.0
    while (now := now + rng.expovariate(rate)) < seconds and len(specs) < len(sizes):
        for prompt, answer in sizes[len(specs) : len(specs) + case.burst]:
            prompt = min(prompt, longest - answer - 1)
            arrival_ns = round(now * NS_PER_S)
            specs.append(RequestSpec(arrival_ns=arrival_ns, prompt_tokens=prompt, output_tokens=answer, slo=slo))
    return tuple(specs)


def seconds_alone(calibration: Calibration, prompt: int, answer: int) -> float:
    """What a request takes on the idle machine."""
    cost, points = calibration.cost, calibration.points[0]
    prefill = cost.features_ns(points.of(0, 0, prompt))
    return (prefill + (answer - 1) * cost.features_ns(points.of(1, prompt + answer // 2, 0))) / NS_PER_S


def predict(calibration: Calibration, scheduler: SchedulerConfig, specs: tuple[RequestSpec, ...]) -> Latencies:
    """What the simulator says."""
    scenario = Scenario(
        engine=calibration.worker(scheduler),
        cost=calibration.cost,
        workload=specs,
        front_end=calibration.front_end,
        warm_up=calibration.warm_up,
    )
    table = simulate(scenario).requests
    rows = range(len(table))
    ttft = [table.ttft_ns(row) / NS_PER_S for row in rows]
    tpot = [value / NS_PER_S for row in rows if (value := table.tpot_ns(row)) is not None]
    return {"ttft": ttft, "tpot": tpot}


def measure(specs: tuple[RequestSpec, ...], target: TargetConfig) -> Latencies:
    """The same requests against the server that is running, by the client of ``diptych bench``."""

    async def run() -> LoadResult:
        async with open_session(BenchConfig(target=target, warm_up=0)) as session:
            talks = Conversations(session.target, session.target.prompt_maker(session.salt), are_kept=False)
            return await Load(session.target, talks, LoadOptions(), session.stop).open_loop(specs, len(specs))

    found: Latencies = {"ttft": [], "tpot": []}
    for record, spec in zip(drive(run()).records, specs, strict=True):
        if record.ttft_ns is None or record.output_tokens != spec.output_tokens:
            raise RuntimeError(record.error or f"{record.output_tokens} instead of {spec.output_tokens} tokens")
        found["ttft"].append(record.ttft_ns / NS_PER_S)
        # tokens that come together share an event, so events are not counted
        found["tpot"].append((record.stamps[-1] - record.stamps[0]) / (spec.output_tokens - 1) / NS_PER_S)
    return found


def compare(case: Case, num_requests: int, live: list[Latencies], predicted: Latencies) -> dict[str, Any]:
    """One row of the report."""
    row: dict[str, Any] = {"case": case.name, "shape": case.shape, "requests": num_requests}
    for metric in ("ttft", "tpot"):
        pooled = [value for run in live for value in run[metric]]
        for share in SHARES:
            measured, expected = percentile(sorted(pooled), share), percentile(sorted(predicted[metric]), share)
            each = [percentile(sorted(run[metric]), share) for run in live]
            row[f"{metric} p{share} ms"] = round(1e3 * measured, 2)
            # tokens that come together in one event take no time: then there is nothing to be a percentage of
            row[f"{metric} p{share} error %"] = percent(expected - measured, measured)
            row[f"{metric} p{share} repeat %"] = percent(max(each) - min(each), measured)
    return row


def percent(part: float, whole: float) -> float | None:
    """None where there is no whole."""
    return round(100 * part / whole, 1) if whole else None


def summary(rows: list[dict[str, Any]], median_goal: int = 5, tail_goal: int = 10) -> list[dict[str, Any]]:
    """Absolute errors over all cases, per figure. The goals are in percent."""
    lines = []
    for metric in ("ttft", "tpot"):
        for share in SHARES:
            key = f"{metric} p{share}"
            told = [row for row in rows if row[f"{key} error %"] is not None]
            if not told:
                continue
            errors = sorted(abs(row[f"{key} error %"]) for row in told)
            repeats = sorted(row[f"{key} repeat %"] for row in told)
            median = statistics.median(errors)
            goal = median_goal if share == 50 else tail_goal
            lines.append(
                {"figure": key, "median error %": round(median, 1), "worst error %": errors[-1],
                 "within goal": f"{sum(error <= goal for error in errors)} of {len(errors)} (<= {goal} %)",
                 "median repeat %": round(statistics.median(repeats), 1)}
            )  # fmt: skip
    return lines


def calibrate(model: Path, path: Path, seconds: float) -> None:
    """Run ``diptych calibrate``."""
    program = str(Path(sys.executable).parent / "diptych")
    command = [program, "calibrate", "--model", str(model), "--output", str(path), "--seconds", str(seconds), *MACHINE]
    subprocess.run(command, check=True)


def main() -> None:
    """Calibrate, run the cases shape by shape, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--calibration-seconds", type=float, default=120.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each case")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json")
    parser.add_argument("--plot")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = options.calibration or Path(directory) / "calibration.json"
        if not options.calibration:
            calibrate(options.model, path, options.calibration_seconds)
        calibration = read_calibration(path)
    vocab_size = json.loads((options.model / "config.json").read_text())["vocab_size"]
    target = TargetConfig(url=URL, token_ids=(vocab_size // 2, vocab_size), send_slo=True)
    workloads = [requests_of(case, calibration, options.seconds, options.seed + i) for i, case in enumerate(CASES)]
    live: list[list[Latencies]] = [[] for _ in CASES]
    others: dict[Case, list[float]] = {}
    for number in range(options.repeats):
        for shape in ("chunked", "unified"):
            with diptych_server(options.model, "--shape", shape, "--speculation", "off", *MACHINE):
                warm = requests_of(CASES[0], calibration, 2.0, 99)
                measure(warm, target)
                for case, specs, runs in zip(CASES, workloads, live, strict=True):
                    if case.shape == shape:
                        load = OtherLoad()
                        runs.append(measure(specs, target))
                        others.setdefault(case, []).append(load.cores())
                        text = f"{number + 1}: {case.name}, {shape}: others used {others[case][-1]:.2f} cores"
                        print(text, file=sys.stderr, flush=True)
    predicted = [
        predict(calibration, shape_preset("unified" if case.shape == "unified" else "chunked"), specs)
        for case, specs in zip(CASES, workloads, strict=True)
    ]
    rows = [
        {**compare(case, len(specs), runs, guess), "others' cores": round(max(others[case]), 2)}
        for case, specs, runs, guess in zip(CASES, workloads, live, predicted, strict=True)
    ]
    name = f"live prediction {options.model.name}"
    settings = {"calibration": {"cost": calibration.cost.name, "errors": calibration.errors}, "seed": options.seed}
    totals = summary(rows)
    report(name, rows, options.json, goals={"p50 error %": 5, "p99 error %": 10}, summary=totals, **settings)
    report(f"{name}: summary", totals)
    if options.plot:
        target = RESULTS / options.plot
        labels = [f"{case.name} ({case.shape})" for case in CASES]
        target.write_text(plot(labels, live, predicted))
        print(f"written to {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
