"""How well the simulator predicts a vLLM that runs, from nothing but what its plugin reported under another load.

    vllm serve MODEL --port 8101 --scheduler-cls diptych.vllm_plugin.scheduler --no-enable-prefix-caching
    python benchmarks/front_twin.py --engine vllm=http://127.0.0.1:8101,step_events=tcp://127.0.0.1:5559
                                    [--calibration FILE] [--seconds 30] [--repeats 2] [--json front_twin.json]

Without --calibration, ``diptych calibrate --engine`` runs first. Then eight loads that the calibration never saw are
sent to the engine itself, open loop, with random prompts, --repeats times each; the simulator gets the same lists with
the engine's own rules (vLLM's order, token budget and admission), and nothing else. Compared are the percentiles of
TTFT and TPOT as the HTTP client sees them; "repeat" and "others' cores" as in live_prediction.py. Give vLLM cores of
its own (VLLM_CPU_OMP_THREADS_BIND), and the client others.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from common import report
from live_prediction import Case, Latencies, bimodal, compare, lognormal, measure, predict, requests_of, summary
from other_load import OtherLoad

from diptych.bench.target import TargetConfig
from diptych.calibration.engine_streams import FIRST_TOKEN, LAST_TOKEN
from diptych.control.errors import ConfigError
from diptych.serving.front.engine_spec import parse_engine
from diptych.simulation.costs.fitted import Calibration, read_calibration

RULES = "the engine's"
MEDIAN_GOAL, TAIL_GOAL = 8, 15  # percent
CASES = (
    Case("chat, light", RULES, 0.4, lognormal(128, 64, 0.6)),
    Case("chat, busy", RULES, 1.2, lognormal(128, 64, 0.6)),
    Case("short questions", RULES, 0.8, lognormal(32, 24, 0.3)),
    Case("bursts of 8", RULES, 0.8, lognormal(96, 48, 0.3), burst=8),
    Case("long prompts", RULES, 0.6, lognormal(1000, 32, 0.4)),
    Case("long answers", RULES, 1.0, lognormal(64, 250, 0.4)),
    Case("chats and documents", RULES, 0.8, bimodal),
    Case("chats and documents, busy", RULES, 1.4, bimodal),
)


def calibrate(engine: str, path: Path, seconds: float) -> None:
    """Run ``diptych calibrate --engine``."""
    program = str(Path(sys.executable).parent / "diptych")
    command = [program, "calibrate", "--engine", engine, "--output", str(path), "--seconds", str(seconds)]
    subprocess.run(command, check=True)


def run_cases(url: str, calibration: Calibration, seconds: float, repeats: int, seed: int) -> list[dict[str, object]]:
    """A row for each case."""
    if calibration.scheduler is None:
        raise ConfigError("the calibration is not of an engine: diptych calibrate --engine", param="calibration")
    target = TargetConfig(url=url, token_ids=(FIRST_TOKEN, LAST_TOKEN))
    workloads = [requests_of(case, calibration, seconds, seed + number) for number, case in enumerate(CASES)]
    live: list[list[Latencies]] = [[] for _ in CASES]
    others = [0.0 for _ in CASES]
    measure(requests_of(CASES[0], calibration, 2.0, 99), target)
    for number in range(repeats):
        for at, (case, specs) in enumerate(zip(CASES, workloads, strict=True)):
            load = OtherLoad()
            live[at].append(measure(specs, target))
            others[at] = max(others[at], load.cores())
            print(f"{number + 1}: {case.name}: others used {others[at]:.2f} cores", file=sys.stderr, flush=True)
    predicted = [predict(calibration, calibration.scheduler, specs) for specs in workloads]
    return [
        {**compare(case, len(specs), runs, guess), "others' cores": round(used, 2)}
        for case, specs, runs, guess, used in zip(CASES, workloads, live, predicted, others, strict=True)
    ]


def main() -> None:
    """Calibrate, run the cases, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True, help="as for diptych calibrate, with step_events")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--calibration-seconds", type=float, default=180.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each case")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args()
    spec = parse_engine(options.engine)
    with tempfile.TemporaryDirectory() as directory:
        path = options.calibration or Path(directory) / "calibration.json"
        if not options.calibration:
            calibrate(options.engine, path, options.calibration_seconds)
        calibration = read_calibration(path)
    rows = run_cases(spec.url, calibration, options.seconds, options.repeats, options.seed)
    name = f"front twin {calibration.model}, {calibration.settings['engine']}"
    settings = {"calibration": {"cost": calibration.cost.name, "errors": calibration.errors}, "seed": options.seed}
    totals = summary(rows, MEDIAN_GOAL, TAIL_GOAL)
    report(
        name,
        rows,
        options.json,
        goals={"p50 error %": MEDIAN_GOAL, "p99 error %": TAIL_GOAL},
        summary=totals,
        **settings,
    )
    report(f"{name}: summary", totals)


if __name__ == "__main__":
    main()
