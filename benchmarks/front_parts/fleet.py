"""``diptych front`` over two vLLM servers of one core each, beside vllm-router: prefix hits, goodput, and lost engines.

    python benchmarks/front.py fleet MODEL_DIR --vllm VENV [--vllm-router VENV] [--parts prefix,goodput,faults]
                                     [--conversations 24] [--turns 6] [--pause 1] [--rates 0.5,1,2] [--seconds 60]
                                     [--slo ...] [--llamacpp FOLDER --gguf FILE] [--faults 200] [--vllm-faults 10]
                                     [--json FILE]

prefix: conversations with a system prompt that others share; each turn repeats what came before. Cached tokens are
those that the engines report in their usage; the oracle is one cache without limits that holds every prompt that was
asked, in whole blocks of the engine. Each way gets conversations of its own, so that none finds what another has
left. goodput: the load of serving.py goodput, by ``diptych bench``; of each way the share of requests that met --slo,
at each rate. Ways take turns over the same servers. faults: engines are killed and stopped under load (faults.py).

Ways: diptych-events (its index from KV events), diptych-assumed (without), cache_aware and kv_aware (vllm-router's).
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import report
from front_parts.cost import DIPTYCH, process
from front_parts.engines import Engine, running, vllm_engine
from front_parts.faults import faults
from servers import bench, free_port, vllm_version
from serving_parts.goodput import WORKLOAD
from tokenizers import Tokenizer

BLOCK = 128  # tokens of a block of vLLM's CPU build
NUM_SYSTEM_PROMPTS = 3
ANSWER_TOKENS = 16
WORDS = ("time", "river", "stone", "light", "paper", "green", "seven", "quiet", "north", "apple", "metal", "ocean")


class Oracle:
    """One prefix cache without limits. It holds a prompt from the moment at which it was asked: an engine, which has
    to compute it first, cannot find more."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: set[tuple[int, ...]] = set()

    def tokens(self, prompt: str) -> list[int]:
        """The tokens of a prompt, as the engine counts them."""
        return list(self._tokenizer.encode(prompt).ids)

    def cached(self, ids: Sequence[int]) -> int:
        """Tokens that need not be computed; the last one always must be."""
        end = 0
        while end + BLOCK < len(ids) and tuple(ids[: end + BLOCK]) in self._known:
            end += BLOCK
        return end

    def add(self, ids: Sequence[int]) -> None:
        """It was asked."""
        self._known.update(tuple(ids[:end]) for end in range(BLOCK, len(ids) + 1, BLOCK))


def words(rng: random.Random, low: int, high: int) -> str:
    """Text of ``low`` to ``high`` words."""
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The reply of a completion. Raises OSError."""
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", data, headers), timeout=300) as reply:
        found: dict[str, Any] = json.loads(reply.read())
        return found


async def converse(url: str, model: str, seed: int, options: argparse.Namespace, oracle: Oracle) -> dict[str, Any]:
    """All conversations at once, each turn after a pause; what was cached, and what could have been."""
    rng = random.Random(seed)
    systems = [words(rng, 200, 300) for _ in range(NUM_SYSTEM_PROMPTS)]
    counts = {"prompt tokens": 0, "cached": 0, "oracle": 0}
    times: list[float] = []

    async def one(number: int, own: random.Random) -> None:
        prompt = systems[number % NUM_SYSTEM_PROMPTS] + f" conversation {number}"
        await asyncio.sleep(own.random() * options.pause * options.turns / 2)
        for _ in range(options.turns):
            prompt += " user " + words(own, 40, 150)
            ids = oracle.tokens(prompt)
            could = oracle.cached(ids)
            oracle.add(ids)
            begin = time.perf_counter()
            body = {"model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
            reply = await asyncio.to_thread(post, url, body)
            times.append(time.perf_counter() - begin)
            usage = reply["usage"]
            if usage["prompt_tokens"] != len(ids):
                raise RuntimeError(f"the engine counts {usage['prompt_tokens']} tokens, the tokenizer {len(ids)}")
            counts["prompt tokens"] += len(ids)
            counts["cached"] += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            counts["oracle"] += could
            prompt += " assistant " + words(own, 30, 60)
            await asyncio.sleep(own.expovariate(1 / options.pause))

    await asyncio.gather(*(one(number, random.Random(f"{seed} {number}")) for number in range(options.conversations)))
    return {
        **counts,
        "reply p50 ms": round(1e3 * statistics.median(times)),
        "reply p90 ms": round(1e3 * sorted(times)[int(0.9 * (len(times) - 1))]),
    }


def ways(options: argparse.Namespace, engines: Sequence[Engine]) -> dict[str, list[str]]:
    """The command of each front, without its port."""
    found = {}
    for name, reads_events in (("diptych-events", True), ("diptych-assumed", False)):
        given = [part for engine in engines for part in ("--engine", engine.option(reads_events=reads_events))]
        found[name] = [*DIPTYCH, "front", *given, "--slo", options.slo, "--port"]
    if options.vllm_router is not None:
        start = [str(options.vllm_router / "bin/python"), "-m", "vllm_router.launch_router"]
        start += ["--worker-urls", *(engine.url for engine in engines), "--prometheus-port", str(free_port())]
        events = ["--kv-event-block-size", str(BLOCK), "--kv-event-model", options.model.name]
        for engine in engines:
            events += ["--kv-event-source", f"{engine.url}={engine.kv_events}"]
            events += ["--kv-event-replay-source", f"{engine.url}={engine.kv_replay}"]
        for policy, more in (("cache_aware", []), ("kv_aware", events)):
            found[policy] = [*start, "--policy", policy, *more, "--host", "127.0.0.1", "--port"]
    return {name: command for name, command in found.items() if name in options.ways.split(",")}


@contextmanager
def front(command: list[str], model: str) -> Iterator[str]:
    """The address of a front that has answered a request."""
    port = free_port()
    with process([*command, str(port)], port, model):
        yield f"http://127.0.0.1:{port}"


def prefix_part(
    options: argparse.Namespace, engines: Sequence[Engine], save: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """A row for each way: all repetitions together. save: gets the rows after each repetition."""
    oracle = Oracle(Tokenizer.from_file(str(options.model / "tokenizer.json")))
    runs: dict[str, list[dict[str, Any]]] = {}
    few = argparse.Namespace(**{**vars(options), "conversations": 3, "pause": 0.2})
    for number, engine in enumerate(engines):  # the first prompts of each length take seconds longer than the next
        asyncio.run(converse(engine.url, options.model.name, options.seed * 1000 + 900 + number, few, oracle))
    for repetition in range(options.repetitions):
        for number, (name, command) in enumerate(ways(options, engines).items()):
            with front(command, options.model.name) as url:
                seed = options.seed * 1000 + repetition * 10 + number
                found = asyncio.run(converse(url, options.model.name, seed, options, oracle))
            runs.setdefault(name, []).append(found)
            print(name, found, file=sys.stderr, flush=True)
        rows = [prefix_row(name, found, options) for name, found in runs.items()]
        save(rows)
    return rows


def prefix_row(name: str, runs: Sequence[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """All repetitions of a way: sums of tokens, medians of the rest."""
    row: dict[str, Any] = {"through": name, "requests": len(runs) * options.conversations * options.turns}
    row["mean pause s"] = options.pause
    row |= {key: sum(run[key] for run in runs) for key in ("prompt tokens", "cached", "oracle")}
    shares = sorted(run["cached"] / max(1, run["oracle"]) for run in runs)
    row["of the oracle's"] = round(statistics.median(shares), 4)
    row["lowest to highest"] = f"{shares[0]:.3f} to {shares[-1]:.3f}"
    return row | {key: round(statistics.median(run[key] for run in runs)) for key in ("reply p50 ms", "reply p90 ms")}


def goodput_part(options: argparse.Namespace, engines: Sequence[Engine]) -> list[dict[str, Any]]:
    """A row for each way and rate."""
    runs: dict[tuple[str, float], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        workload = Path(folder) / "load.toml"
        workload.write_text(WORKLOAD)
        load = ["--workload", str(workload), "--slo", options.slo, "--timeout", "120s", "--model", options.model.name]
        load += ["--send-slo"] if options.sends_slo else []
        for engine in engines:  # the first prompt of each length takes seconds longer than the next
            bench(engine.url, *load, "--rate", "1", "--num-requests", "10", "--seed", str(options.seed + 2000))
        for repetition in range(options.repetitions):
            for name, command in ways(options, engines).items():
                seed = options.seed + repetition  # the arrivals of all; their texts differ in each run
                with front(command, options.model.name) as url:
                    bench(url, *load, "--rate", "1", "--num-requests", "6", "--seed", str(seed + 1000))
                    for rate in options.rates:
                        count = str(max(8, round(rate * options.seconds)))
                        given = ["--rate", str(rate), "--num-requests", count, "--seed", str(seed)]
                        found = bench(url, *load, *given)["summary"]
                        print(name, rate, found["attainment"], found["missed"], file=sys.stderr, flush=True)
                        runs.setdefault((name, rate), []).append(found)
    return [goodput_row(name, rate, found) for (name, rate), found in runs.items()]


def goodput_row(name: str, rate: float, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All repetitions of a way at a rate."""
    share = statistics.median(run["attainment"] for run in runs)
    return {
        "through": name,
        "rate": rate,
        "requests": sum(run["num_requests"] for run in runs),
        "good": round(share, 3),
        "good a second": round(share * rate, 3),
        "TTFT p90 ms": round(statistics.median(run["ttft_ms"]["p90"] for run in runs)),
        "ITL p99 ms": round(statistics.median(run["itl_ms"]["p99"] for run in runs), 1),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("model", type=Path)
    parser.add_argument("--vllm", type=Path, help="vLLM's virtual environment")
    parser.add_argument("--vllm-router", type=Path, help="that of vllm-router")
    parser.add_argument("--parts", default="prefix,goodput,faults")
    parser.add_argument("--ways", default="diptych-events,diptych-assumed,cache_aware,kv_aware")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-len", type=int, default=8192, help="longest sequence of vLLM")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--pause", type=float, default=1.0, help="mean seconds between an answer and the next turn")
    parser.add_argument("--rates", type=lambda text: [float(one) for one in text.split(",")], default=[0.5, 1, 2])
    parser.add_argument("--seconds", type=float, default=60, help="of one run")
    parser.add_argument("--slo", default="ttft=2s,tpot=60ms")
    parser.add_argument("--sends-slo", action="store_true", help="clients of the goodput part name their objectives")
    parser.add_argument("--repetitions", type=int, default=1, help="of the prefix and goodput parts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--llamacpp", type=Path, help="the folder of llama.cpp's server")
    parser.add_argument("--gguf", type=Path, help="its model")
    parser.add_argument("--faults", type=int, default=200, help="at llama.cpp's servers")
    parser.add_argument("--vllm-faults", type=int, default=10)


def main(options: argparse.Namespace) -> None:
    """Measure, print, write."""
    parts, rows = options.parts.split(","), []
    versions = {} if options.vllm is None else {"vllm": vllm_version(options.vllm)}

    def save(found: list[dict[str, Any]]) -> None:
        report("a front over engines of others", found, options.json, versions=versions)

    if options.vllm is not None and {"prefix", "goodput"} & set(parts):
        engines = [
            vllm_engine(options.vllm, options.model, core, dtype=options.dtype, max_len=options.max_len)
            for core in (0, 1)
        ]
        with running(engines):
            rows += prefix_part(options, engines, save) if "prefix" in parts else []
            rows += goodput_part(options, engines) if "goodput" in parts else []
    if "faults" in parts:
        rows += faults(options)
    save(rows)
