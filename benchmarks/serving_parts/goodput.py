"""Chats and long documents at once, on one machine: how many requests per second meet their objectives, by server.

    python benchmarks/serving.py goodput MODEL_DIR [--servers 1P1D,chunked,unified,vllm,llama.cpp,llama.cpp-q8_0]
                                 [--vllm VENV] [--llamacpp FOLDER] [--repetitions 3] [--rates 0.25,0.5,1,2]
                                 [--seconds 60] [--slo ttft=2s,itl=60ms] [--find-goodput] [--json FILE]

Load: open loop, Poisson; of ten requests nine are chats (100 to 300 prompt tokens, 64 out), one is a document (3,000
in, 64 out). A request is good when it met --slo: the default asks for the first token within 2 s of when it should have
been sent, and that the 99th percentile of its own gaps between tokens is at most 60 ms. ``diptych bench`` makes the
load and judges it, beside the server. Servers run one after another on the same cores and take turns: in each
repetition every server is started anew and gets each rate with the arrivals of that repetition. A rate is left out for
a server that had less than half of its requests good at a lower one. With --find-goodput the tool searches the rate
itself, once in each repetition, instead of measuring --rates. Servers: also ``1P1D-always`` (every prompt is handed
off), ``2-both``, and ``vllm:N``, ``llama.cpp:N`` (tokens a step). ``llama.cpp`` has bf16 weights like all others,
``llama.cpp-q8_0`` 8 bits a weight. Peers are left out without --vllm and --llamacpp, the environment and the folder
that scripts/bench-peers makes.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import report
from servers import URL, Peers, Server, bench, diptych_server, llamacpp_server, vllm_server

from diptych.bench import option_grammar as words
from diptych.bench.objectives import LatencyObjectives

WORKLOAD = """
[workload]
classes = [
    { kind = "chat", share = 9, lengths.prompt = { kind = "uniform", min = 100, max = 300 }, lengths.output.mean = 64 },
    { kind = "document", share = 1, lengths = { prompt = { mean = 3000 }, output = { mean = 64 } } },
]
"""
TARGET = 0.9
SERVERS = "1P1D,chunked,unified,vllm,llama.cpp,llama.cpp-q8_0"
SLOTS = 64  # requests at once, of the peers


def server(name: str, model: Path, peers: Peers, objectives: LatencyObjectives) -> Server:
    """The server of a name, told about the objectives where it can use them."""
    kind = name.partition(":")[0]
    if kind == "vllm":
        assert peers.vllm is not None
        return vllm_server(peers.vllm, name, model, slots=SLOTS, slot_tokens=8192)
    if kind.startswith("llama.cpp"):
        assert peers.llamacpp is not None
        return llamacpp_server(peers.llamacpp, name, model, slots=SLOTS, slot_tokens=4096)  # its KV is not paged
    slo: list[str] = []
    if objectives.ttft_ns is not None:
        slo += ["--ttft-slo-ms", f"{objectives.ttft_ns / 1e6:g}"]
    pace = objectives.tpot_ns or (0.8 * objectives.itl_ns if objectives.itl_ns is not None else None)
    if pace is not None:
        slo += ["--tpot-slo-ms", f"{pace / 1e6:g}"]
    options = {
        "1P1D": [*slo, "--prefill", "1", "--decode", "1"],
        "1P1D-always": [*slo, "--prefill", "1", "--decode", "1", "--disaggregate", "always"],
        "2-both": [*slo, "--both", "2"],
        "chunked": [*slo, "--shape", "chunked"],
        "unified": ["--shape", "unified"],
    }
    return diptych_server(model, *options[name])


def load(options: argparse.Namespace, workload: Path, *more: str) -> dict[str, Any]:
    """``diptych bench`` with the workload."""
    return bench(
        URL, "--workload", str(workload), "--slo", options.slo, "--timeout", "120s", *more
    )  # fmt: skip


def turn(name: str, repetition: int, options: argparse.Namespace, workload: Path, rates: Sequence[float]) -> list[Any]:
    """One server's turn: a run per rate, or one search."""
    seed = str(options.seed + repetition)
    with server(name, options.model, Peers.of(options), words.slo(options.slo)):
        load(options, workload, "--rate", "1", "--num-requests", "6", "--seed", str(options.seed + 1000))
        if options.find_goodput:
            found = load(options, workload, "--find-goodput", "--probe", f"{options.seconds}s", "--seed", seed)
            print(name, repetition, found["goodput"], file=sys.stderr, flush=True)
            return [found]
        runs = []
        for rate in rates:
            count = str(max(8, round(rate * options.seconds)))
            found = load(options, workload, "--rate", str(rate), "--num-requests", count, "--seed", seed)
            summary = found["summary"]
            print(name, repetition, rate, summary["attainment"], summary["missed"], file=sys.stderr, flush=True)
            runs.append({"rate": rate, "summary": summary, "classes": found["classes"]})
            if summary["attainment"] < 0.5:
                break
        return runs


def rate_row(name: str, rate: float, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All repetitions of one rate."""
    shares = [run["summary"]["attainment"] for run in runs]
    missed = {
        key: sum(run["summary"]["missed"].get(key, 0) for run in runs)
        for key in dict.fromkeys(key for run in runs for key in run["summary"]["missed"])
    }

    def middle(key: str, which: str) -> float:
        return statistics.median(run["summary"][key][which] for run in runs)

    chats = [run["classes"]["chat"]["ttft_ms"]["p50"] for run in runs if "chat" in run["classes"]]
    return {
        "server": name,
        "rate": rate,
        "runs": len(runs),
        "requests": sum(run["summary"]["num_requests"] for run in runs),
        "good, median": round(statistics.median(shares), 3),
        "lowest": round(min(shares), 3),
        "highest": round(max(shares), 3),
        "goodput": round(statistics.median(shares) * rate, 3),
        "missed": " ".join(f"{key}:{count}" for key, count in missed.items()),
        "chat TTFT p50 ms": round(statistics.median(chats)) if chats else None,
        "TTFT p90 ms": round(middle("ttft_ms", "p90")),
        "ITL p50 ms": round(middle("itl_ms", "p50"), 1),
        "ITL p99 ms": round(middle("itl_ms", "p99"), 1),
    }


def summary_of_rates(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per server the highest rate that held, and the most good requests per second at any rate."""
    found = []
    for name in dict.fromkeys(row["server"] for row in rows):
        own = [row for row in rows if row["server"] == name]
        rates = [row["rate"] for row in own if row["good, median"] >= TARGET]
        best = max(own, key=lambda row: row["goodput"])
        found.append({
            "server": name,
            f"highest rate with {TARGET:.0%} good": max(rates, default=0.0),
            "most good a second": best["goodput"],
            "lowest": round(best["lowest"] * best["rate"], 3),
            "highest": round(best["highest"] * best["rate"], 3),
        })  # fmt: skip
    return found


def search_row(name: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All searches of one server; a search that found no rate counts as 0."""
    rates = [one["goodput"]["estimate"] or 0.0 for one in found]
    return {
        "server": name,
        "searches": len(rates),
        "goodput, median": round(statistics.median(rates), 3),
        "lowest": round(min(rates), 3),
        "highest": round(max(rates), 3),
        "surely above": min(one["goodput"]["low"] or 0.0 for one in found),
        "surely below": max((one["goodput"]["high"] for one in found if one["goodput"]["high"]), default=None),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("model", type=Path)
    parser.add_argument("--servers", default=SERVERS)
    Peers.add_options(parser)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rates", type=lambda text: [float(one) for one in text.split(",")], default=[0.25, 0.5, 1, 2])
    parser.add_argument("--seconds", type=float, default=60, help="of one run")
    parser.add_argument("--slo", default="ttft=2s,itl=60ms")
    parser.add_argument("--find-goodput", action="store_true")
    parser.add_argument("--seed", type=int, default=1)


def main(options: argparse.Namespace) -> None:
    """Measure, print, write."""
    peers = Peers.of(options)
    names = [name for name in options.servers.split(",") if peers.have(name)]
    turns: dict[str, list[Any]] = {name: [] for name in names}
    limits = dict.fromkeys(names, max(options.rates))  # the highest rate that is worth measuring
    with tempfile.TemporaryDirectory() as folder:
        workload = Path(folder) / "load.toml"
        workload.write_text(WORKLOAD)
        for repetition in range(options.repetitions):
            for name in names:
                rates = [rate for rate in options.rates if rate <= limits[name]]
                runs = turn(name, repetition, options, workload, rates)
                turns[name] += runs
                if not options.find_goodput:
                    limits[name] = runs[-1]["rate"] if repetition == 0 else limits[name]
    rows: list[dict[str, Any]] = []
    if options.find_goodput:
        rows = [search_row(name, found) for name, found in turns.items()]
        extra: dict[str, Any] = {"searches": {name: [one["goodput"] for one in turns[name]] for name in names}}
    else:
        for name, runs in turns.items():
            for rate in options.rates:
                if own := [run for run in runs if run["rate"] == rate]:
                    rows.append(rate_row(name, rate, own))
        extra = {"summary": summary_of_rates(rows)}
    extra |= peers.versions()
    report(f"goodput {options.model.name}, {options.slo}", rows + extra.get("summary", []), options.json, **extra)
