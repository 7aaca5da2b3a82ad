"""Calibrate once, then predict what a live server does that the calibration never saw.

    python benchmarks/twin.py live [--model DIR] [--calibration FILE] [--seconds 20] [--repeats 2]
                                   [--json live_prediction.json] [--plot live_prediction.svg]
    vllm serve MODEL --port 8101 --scheduler-cls diptych.vllm_plugin.scheduler --no-enable-prefix-caching
    python benchmarks/twin.py live --engine vllm=http://127.0.0.1:8101,step_events=tcp://127.0.0.1:5559
                                   [--seconds 30] [--json front_twin.json]

Without --calibration, ``diptych calibrate`` runs first. Each case is a list of requests (arrival, prompt and answer
lengths) that is sent over HTTP, open loop, with fresh random prompts, --repeats times; the simulator gets the same
list, the calibration, and nothing else. Compared are the percentiles of TTFT and TPOT as the HTTP client sees them.
"repeat" is how much the live percentiles differ between the repeats: no prediction can be better than that. "others'
cores": what unrelated processes used meanwhile; it should be next to nothing.

The server is ``diptych serve`` with one thread on core 0, so that the front end and the client, which share the
machine, have a core that is theirs; speculation is off, since a model with random weights repeats itself and would
decode several tokens a step. With --engine it is an engine that runs already and reports its steps, and the simulator
has that engine's rules (vLLM's order, token budget and admission). Give it cores of its own (vLLM:
VLLM_CPU_OMP_THREADS_BIND).
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, OtherLoad, report
from servers import PROGRAM, URL, diptych_server
from twin_parts.pictures import sheet

from diptych.bench.conversations import Conversations
from diptych.bench.load import Load, LoadOptions, LoadResult
from diptych.bench.session import BenchConfig, drive, open_session
from diptych.bench.target import TargetConfig
from diptych.calibration.engine_streams import FIRST_TOKEN, LAST_TOKEN
from diptych.control.config import SchedulerConfig, shape_preset
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_S, Slo
from diptych.report.plots import Line, LineChart, Scale, linear_scale
from diptych.report.statistics import cumulative, percentile
from diptych.serving.front.engine_spec import parse_engine
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
RULES = "the engine's"
ENGINE_CASES = (
    Case("chat, light", RULES, 0.4, lognormal(128, 64, 0.6)),
    Case("chat, busy", RULES, 1.2, lognormal(128, 64, 0.6)),
    Case("short questions", RULES, 0.8, lognormal(32, 24, 0.3)),
    Case("bursts of 8", RULES, 0.8, lognormal(96, 48, 0.3), burst=8),
    Case("long prompts", RULES, 0.6, lognormal(1000, 32, 0.4)),
    Case("long answers", RULES, 1.0, lognormal(64, 250, 0.4)),
    Case("chats and documents", RULES, 0.8, bimodal),
    Case("chats and documents, busy", RULES, 1.4, bimodal),
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
        engine=calibration.worker(scheduler), cost=calibration.cost, workload=specs, front_end=calibration.front_end,
        warm_up=calibration.warm_up,
    )  # fmt: skip
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


def compare(case: Case, num_requests: int, live: Sequence[Latencies], predicted: Latencies) -> dict[str, Any]:
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


def summary(rows: Sequence[dict[str, Any]], median_goal: int, tail_goal: int) -> list[dict[str, Any]]:
    """Absolute errors over all cases, per figure. The goals are in percent."""
    lines = []
    for metric in ("ttft", "tpot"):
        for share in SHARES:
            key = f"{metric} p{share}"
            told = [row for row in rows if row[f"{key} error %"] is not None]
            if not told:
                continue
            errors = sorted(abs(row[f"{key} error %"]) for row in told)
            goal = median_goal if share == 50 else tail_goal
            lines.append(
                {"figure": key, "median error %": round(statistics.median(errors), 1), "worst error %": errors[-1],
                 "within goal": f"{sum(error <= goal for error in errors)} of {len(errors)} (<= {goal} %)",
                 "median repeat %": round(statistics.median(row[f"{key} repeat %"] for row in told), 1)}
            )  # fmt: skip
    return lines


def calibrated(options: argparse.Namespace) -> Calibration:
    """The calibration that was given, or one that is made now."""
    if options.calibration:
        return read_calibration(options.calibration)
    given = ["--engine", options.engine] if options.engine else ["--model", str(options.model), *MACHINE]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calibration.json"
        seconds = str(options.calibration_seconds)
        subprocess.run([PROGRAM, "calibrate", *given, "--output", str(path), "--seconds", seconds], check=True)
        return read_calibration(path)


def live_runs(
    options: argparse.Namespace, calibration: Calibration, target: TargetConfig, cases: Sequence[Case],
    workloads: Sequence[tuple[RequestSpec, ...]],
) -> tuple[list[list[Latencies]], list[float]]:  # fmt: skip
    """The latencies of all repeats of each case, and the most cores that others used meanwhile."""

    def server(shape: str) -> AbstractContextManager[Any]:
        if options.engine:
            return nullcontext()
        return diptych_server(options.model, "--shape", shape, "--speculation", "off", *MACHINE)

    live: list[list[Latencies]] = [[] for _ in cases]
    others = [0.0 for _ in cases]
    for number in range(options.repeats):
        for shape in dict.fromkeys(case.shape for case in cases):
            with server(shape):
                measure(requests_of(cases[0], calibration, 2.0, 99), target)  # warms up
                for at, (case, specs) in enumerate(zip(cases, workloads, strict=True)):
                    if case.shape == shape:
                        load = OtherLoad()
                        live[at].append(measure(specs, target))
                        others[at] = max(others[at], load.cores())
                        text = f"{number + 1}: {case.name}, {shape}: others used {others[at]:.2f} cores"
                        print(text, file=sys.stderr, flush=True)
    return live, others


def plot(cases: Sequence[Case], live: Sequence[Sequence[Latencies]], predicted: Sequence[Latencies]) -> str:
    """A row for each case: the share of its requests below a TTFT, and below a TPOT."""
    charts = []
    for case, runs, guess in zip(cases, live, predicted, strict=True):
        for metric in ("ttft", "tpot"):
            curves = [[1e3 * value for value in run[metric]] for run in (*runs, guess)]
            names = [("live, each repeat" if number == 0 else "", "s-whole-solid") for number in range(len(runs))]
            names.append(("predicted", "s-stall"))
            lines = [Line(name, cumulative(values), style) for values, (name, style) in zip(curves, names, strict=True)]
            title = f"{case.name}, {case.shape}: {metric.upper()}"
            y = Scale(0.0, 1.0, title, as_percent=True, ticks=(0.0, 0.5, 0.9, 1.0))
            x = linear_scale([value for values in curves for value in values], "milliseconds")
            charts.append(LineChart(title, "", "Share of requests below a latency.", lines, x, y))
    return sheet(charts, 2)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--engine", help="a running engine instead: as for diptych calibrate, with step_events")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--calibration-seconds", type=float, default=120.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each case")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", metavar="FILE", help="distributions as a picture in benchmarks/results")


def main(options: argparse.Namespace) -> None:
    """Calibrate, run the cases, and print the tables."""
    calibration = calibrated(options)
    if options.engine:
        if calibration.scheduler is None:
            raise ConfigError("the calibration is not of an engine: diptych calibrate --engine", param="calibration")
        cases, goals, name = ENGINE_CASES, (8, 15), f"front twin {calibration.model}, {calibration.settings['engine']}"
        target = TargetConfig(url=parse_engine(options.engine).url, token_ids=(FIRST_TOKEN, LAST_TOKEN))
    else:
        cases, goals, name = CASES, (5, 10), f"live prediction {options.model.name}"
        vocab_size = json.loads((options.model / "config.json").read_text())["vocab_size"]
        target = TargetConfig(url=URL, token_ids=(vocab_size // 2, vocab_size), send_slo=True)
    workloads = [requests_of(case, calibration, options.seconds, options.seed + i) for i, case in enumerate(cases)]
    live, others = live_runs(options, calibration, target, cases, workloads)
    predicted = [
        predict(calibration, calibration.scheduler or shape_preset(case.shape), specs)
        for case, specs in zip(cases, workloads, strict=True)
    ]
    rows = [
        {**compare(case, len(specs), runs, guess), "others' cores": round(used, 2)}
        for case, specs, runs, guess, used in zip(cases, workloads, live, predicted, others, strict=True)
    ]
    totals = summary(rows, *goals)
    report(
        name, rows, options.json, goals={"p50 error %": goals[0], "p99 error %": goals[1]}, summary=totals,
        calibration={"cost": calibration.cost.name, "errors": calibration.errors}, seed=options.seed,
    )  # fmt: skip
    report(f"{name}: summary", totals)
    if options.plot:
        (RESULTS / options.plot).write_text(plot(cases, live, predicted))
        print(f"written to {RESULTS / options.plot}", file=sys.stderr)
