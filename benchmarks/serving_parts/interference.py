"""What a long prompt does to running streams, and to a short prompt behind it, over HTTP.

    python benchmarks/serving.py interference MODEL_DIR [--cases unified,chunked:200,1P1D,vllm,vllm:512,llama.cpp,...]
                                      [--vllm VENV] [--llamacpp FOLDER] [--rounds 1] [--repetitions 3]
                                      [--json interference.json]

``diptych bench --interference`` against one server after another, in turns: 4 streams decode; after a few quiet seconds
a 4096-token prompt arrives, 0.1 s later one of 32 tokens; the same without the long prompt; then, on the idle server,
the short prompt alone, the long one alone, and the short one behind one of 8000 tokens. Cases: ``unified``,
``chunked:MS`` (its TPOT objective), ``1P1D`` (every prompt is handed off), ``vllm``, ``vllm:N`` (tokens a step),
``llama.cpp`` (bf16 weights, like all others), ``llama.cpp-q8_0`` (8 bits a weight), each with ``:N`` too. Those of
peers need --vllm and --llamacpp: the environment and the folder that scripts/bench-peers makes.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import report
from servers import URL, Peers, Server, bench, diptych_server, llamacpp_server, vllm_server

from diptych.report.statistics import percentile

CASES = "unified,chunked:100,chunked:200,chunked:400,1P1D,vllm,vllm:512,llama.cpp,llama.cpp:512,llama.cpp-q8_0"
SLOTS, SLOT_TOKENS = 32, 8448  # of the peers


def server(case: str, model: Path, peers: Peers) -> Server:
    """The server of a case, ready."""
    kind, _, value = case.partition(":")
    if kind == "vllm":
        assert peers.vllm is not None
        return vllm_server(peers.vllm, case, model, slots=SLOTS, slot_tokens=SLOT_TOKENS)
    if kind.startswith("llama.cpp"):
        assert peers.llamacpp is not None
        return llamacpp_server(peers.llamacpp, case, model, slots=SLOTS, slot_tokens=SLOT_TOKENS)
    shape = {
        "unified": ("--shape", "unified"),
        "chunked": ("--shape", "chunked", "--tpot-slo-ms", value),
        "1P1D": ("--prefill", "1", "--decode", "1", "--disaggregate", "always"),
    }[kind]
    return diptych_server(model, *shape)


def measure(url: str, repetitions: int, ahead_tokens: int = 8000) -> dict[str, Any]:
    """The scenario against the server that is running."""
    found: dict[str, Any] = bench(
        url, "--interference", "--repetitions", str(repetitions),
        "--ahead-tokens", str(ahead_tokens),
    )["interference"]  # fmt: skip
    return found


def row(label: str, runs: Sequence[dict[str, Any]], objective_ms: float | None = None) -> dict[str, Any]:
    """All runs of one server as one row; milliseconds, and seconds for what takes long."""

    def gaps(name: str, share: float) -> float:
        return percentile(sorted(gap for run in runs for gap in run["gaps_ms"][name]), share)

    def middle(*path: str) -> float:
        values = [run[path[0]] if len(path) == 1 else run[path[0]][path[1]] for run in runs]
        return float(statistics.median(values))

    def each(name: str) -> list[float]:
        return [round(one, 2) for run in runs for one in run[name]]

    return {
        "server": label,
        "before p50 ms": round(gaps("before", 50), 1),
        "before p99 ms": round(gaps("before", 99), 1),
        "during p50 ms": round(gaps("during", 50), 1),
        "during p99 ms": round(gaps("during", 99), 1),
        "p99 / objective": round(gaps("during", 99) / objective_ms, 2) if objective_ms else None,
        "p99 during / before": round(statistics.median(each("factors")), 2),
        "each": each("factors"),
        "without a long prompt": each("control_factors"),
        "tokens/s before": round(middle("stream_tokens_per_s", "before"), 1),
        "tokens/s during": round(middle("stream_tokens_per_s", "during"), 1),
        "TTFT long s": round(middle("ttft_ms", "long") / 1e3, 2),
        "long alone s": round(middle("ttft_ms", "long_alone") / 1e3, 2),
        "TTFT short s": round(middle("ttft_ms", "short_behind_long_among_streams") / 1e3, 3),
        "short alone s": round(middle("ttft_ms", "short_alone") / 1e3, 3),
        "short behind s": round(middle("ttft_ms", "short_behind_long") / 1e3, 3),
        "behind / alone": round(statistics.median(each("ttft_factors")), 2),
    }


def without_gaps(run: dict[str, Any]) -> dict[str, Any]:
    """A run without the thousands of single gaps."""
    return {name: value for name, value in run.items() if name not in ("gaps_ms", "around")}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("model", type=Path)
    parser.add_argument("--cases", default=CASES)
    Peers.add_options(parser)
    parser.add_argument("--rounds", type=int, default=1, help="how often each server has its turn")
    parser.add_argument("--repetitions", type=int, default=3, help="of the scenario in each turn")


def main(options: argparse.Namespace) -> None:
    """Start each server in turn, measure it, and print one table."""
    peers = Peers.of(options)
    cases = [case for case in options.cases.split(",") if peers.have(case)]
    runs: dict[str, list[dict[str, Any]]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for case in cases:
            with server(case, options.model, peers):
                runs[case].append(measure(URL, options.repetitions))
            print({"server": case, **runs[case][-1]["during_ms"]}, file=sys.stderr, flush=True)
    objectives = {case: float(case.partition(":")[2]) for case in cases if case.startswith("chunked:")}
    rows = [row(case, found, objectives.get(case)) for case, found in runs.items()]
    extra: dict[str, Any] = {"runs": {case: [without_gaps(run) for run in found] for case, found in runs.items()}}
    report(f"interference {options.model.name}", rows, options.json, **extra, **peers.versions())
