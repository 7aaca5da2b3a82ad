"""A live fleet that plans itself on this machine, beside every configuration that stays as it is.

    python benchmarks/planner_live.py MODEL_DIR [--loads sinusoid,shift] [--seconds 240] [--period 120] [--peak 6]
                                      [--json planner_live-MODEL.json]

Two workers on the cores of this machine: both do both, or one prefills and one decodes, or one of them does only one of
these beside one that does both; and ``planned``, which begins with both and has ``--plan auto``. Each is started anew
and gets the same arrivals. Loads (``diptych bench`` makes them, from a trace that is written here):

    sinusoid    from --peak / 12 to --peak requests/s and back, each --period seconds; PROMPT and ANSWER tokens
    shift       long prompts with short answers at half the peak for half of the time, then chat at the whole

Shares are of requests that met --slo. ``oracle``: of the configurations that stay, the best in each 30 s of arrivals.
``changes`` and ``tick`` (the longest, of the front end) are what ``/ui/state`` says; ``twin`` is its processor time as
a share of one core.
"""

import argparse
import json
import math
import os
import random
import tempfile
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import report
from servers import URL, Server, bench, diptych_server

from diptych.bench import option_grammar as words

CONFIGURATIONS = {
    "2 both": ["--both", "2"],
    "1P1D": ["--prefill", "1", "--decode", "1"],
    "1P + 1 both": ["--prefill", "1", "--both", "1"],
    "1D + 1 both": ["--decode", "1", "--both", "1"],
}
PROMPT, ANSWER = 1000, 64
LONG = (2000, 8)
CHAT = (128, 96)
SPAN_S = 30.0


def arrivals(load: str, options: argparse.Namespace) -> list[tuple[float, int, int]]:
    """(seconds, prompt tokens, answer tokens) of each request: Poisson arrivals of a changing rate (thinning)."""
    rng, now, found = random.Random(options.seed), 0.0, []
    while (now := now + rng.expovariate(options.peak)) < options.seconds:
        is_first_half = now < options.seconds / 2
        rate = options.peak * (0.5 if is_first_half else 1.0)
        prompt, answer = LONG if is_first_half else CHAT
        if load == "sinusoid":
            low = options.peak / 12
            rate = low + (options.peak - low) * (1 - math.cos(2 * math.pi * now / options.period)) / 2
            prompt, answer = PROMPT, ANSWER
        if rng.random() * options.peak < rate:
            found.append((now, prompt, answer))
    return found


def processor_s(pid: int) -> float:
    """Processor time of the twin of this server so far."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(stat[1]) == pid and b"twin_process" in (folder / "cmdline").read_bytes():
                return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            continue
    return 0.0


def turn(load: str, name: str, more: list[str], options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One server under one load: how many requests of each 30 s met the objectives."""
    trace, records = folder / "trace.csv", folder / "records.jsonl"
    lines = [f"{at},{prompt},{answer}" for at, prompt, answer in arrivals(load, options)]
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(lines) + "\n")
    objectives = words.slo(options.slo)
    assert objectives.ttft_ns is not None and objectives.tpot_ns is not None
    told = ["--ttft-slo-ms", f"{objectives.ttft_ns / 1e6:g}", "--tpot-slo-ms", f"{objectives.tpot_ns / 1e6:g}"]
    with diptych_server(options.model, *told, *more) as server:
        bench(
            URL, "--workload", str(trace), "--num-requests", str(len(lines)), "--slo", options.slo, "--timeout", "300s",
            "--warmup", "4", "--records", str(records),
        )  # fmt: skip
        with urllib.request.urlopen(URL + "/ui/state") as answer:
            state = json.load(answer)
        twin_s = processor_s(_pid(server))
    met: dict[int, int] = defaultdict(int)
    for line in records.read_text().splitlines():
        row = json.loads(line)
        met[int(row["arrival_s"] // SPAN_S)] += bool(row["slo_met"])
    decisions = (state.get("plan") or {}).get("decisions", [])
    changes = [entry["chosen"] for entry in reversed(decisions) if entry["verdict"] == "change"]
    return {
        "load": load, "configuration": name, "requests": len(lines), "met": sum(met.values()) / len(lines),
        "by_span": dict(met), "changes": changes, "tick_ms": (state.get("plan") or {}).get("longest_tick_ms"),
        "twin_share": twin_s / options.seconds,
    }  # fmt: skip


def _pid(server: Server) -> int:
    return server.process.pid


def main() -> None:
    """All turns, and the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--loads", default="sinusoid,shift")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--period", type=float, default=120.0)
    parser.add_argument("--peak", type=float, default=6.0)
    parser.add_argument("--slo", default="ttft=2s,tpot=60ms")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json")
    options = parser.parse_args()
    rows, turns = [], []
    with tempfile.TemporaryDirectory() as folder:
        for load in options.loads.split(","):
            static = [
                turn(load, name, [*more, "--plan", "off"], options, Path(folder))
                for name, more in CONFIGURATIONS.items()
            ]
            planned = turn(load, "planned", ["--both", "2", "--plan", "auto"], options, Path(folder))
            turns += [*static, planned]
            spans = {span for entry in static for span in entry["by_span"]}
            best = sum(max(entry["by_span"].get(span, 0) for entry in static) for span in spans)
            for entry in (*static, planned):
                print(json.dumps({key: value for key, value in entry.items() if key != "by_span"}), flush=True)
            rows.append(
                {
                    "load": load,
                    **{entry["configuration"]: entry["met"] for entry in (*static, planned)},
                    "oracle": best / planned["requests"],
                    "changes": len(planned["changes"]),
                    "tick ms": planned["tick_ms"],
                    "twin, share of a core": planned["twin_share"],
                }
            )
    report("planner_live", rows, options.json, turns=turns)


if __name__ == "__main__":
    main()
