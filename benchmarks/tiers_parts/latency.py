"""What the tiers below the KV cache do: restarts, streams while KV is loaded and stored, load without any reuse, and
host memory that workers read from each other.

    python benchmarks/tiers.py latency MODEL [--tokens 8000] [--turns 3] [--parts restart,gaps] [--cache 256MiB]

restart: the time to first token of a prompt, cold and after the server was killed and started again on its folder.
gaps: the 99th percentile of the gaps of four streams, while prompts that are on disk come, and while new ones come.
no reuse: seconds of a request that shares nothing, of two servers in turns, with and without the disk.
peers: two workers whose caches (--cache each) hold a few prompts, and whose host memories hold all: the time to first
token of a prompt alone and cold, and when six requests for it come at once, so that some go to the worker that has not
got it; how many tokens that worker read from the other; what a block took.
"""

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import names_of, report
from servers import PORT, PROGRAM, URL, Server, metric

DISK_GB = "20"
PARTS = ("restart", "gaps", "no-reuse", "peers")


def start(model: str, disk: Path | None, *options: str, port: int = PORT) -> Server:
    tiers = ["--kv-disk", str(disk), "--kv-disk-gb", DISK_GB, "--kv-host-gb", "1"] if disk else []
    return Server(
        [PROGRAM, "serve", "--model", model, "--served-model-name", "m", "--port", str(port), *tiers, *options],
        ready="/ready",
        url=f"http://127.0.0.1:{port}",
    )


def prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 500) for _ in range(num_tokens)]


def request(tokens: list[int], max_tokens: int, gaps: list[float] | None = None, url: str = URL) -> tuple[float, int]:
    """Seconds to the first token, and how many prompt tokens were not computed. gaps: gets those between tokens."""
    body = {"model": "m", "prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    headers = {"content-type": "application/json"}
    begun, last, first, cached = time.monotonic(), 0.0, 0.0, 0
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    ) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            now, chunk = time.monotonic(), json.loads(line[6:])
            if chunk.get("choices"):
                if not first:
                    first = now - begun
                elif gaps is not None:
                    gaps.append(now - last)
                last = now
            if chunk.get("usage"):
                cached = (chunk["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return first, cached


def settle(num_blocks: int) -> None:
    """Wait until ``num_blocks`` blocks are on disk."""
    give_up = time.monotonic() + 120
    while metric("diptych:kv_disk_blocks{") < num_blocks and time.monotonic() < give_up:
        time.sleep(0.2)


def restart(model: str, folder: Path, num_tokens: int, turns: int) -> list[dict[str, Any]]:
    rows = []
    for turn in range(turns):
        tokens = prompt(turn, num_tokens)
        with start(model, folder) as server:
            request(prompt(1000 + turn, 64), 2)
            cold, _ = request(tokens, 2)
            settle((turn + 1) * (num_tokens // 32 - 1))
            server.process.kill()
        with start(model, folder):
            request(prompt(2000 + turn, 64), 2)
            warm, cached = request(tokens, 2)
        rows.append(
            {"cold_s": cold, "warm_s": warm, "ratio": warm / cold, "hits": cached / (num_tokens - num_tokens % 32)}
        )
    return rows


KINDS = ("new prompts, no disk", "new prompts", "prompts on disk")


def gaps(model: str, num_tokens: int, turns: int) -> list[dict[str, Any]]:
    """p99 of the gaps, in seconds, of each kind in each turn: beside new prompts without a disk, beside new ones that
    are stored, and beside prompts that are on disk."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(turns):
        prompts = [prompt(5000 + 10 * turn + number, num_tokens // 4) for number in range(6)]
        with tempfile.TemporaryDirectory() as folder:
            for kind in KINDS:
                with start(model, None if kind == KINDS[0] else Path(folder)):
                    found[kind].append(_gap_p99(prompts, turn))
                    if kind == KINDS[1]:
                        settle(6 * (num_tokens // 4 // 32 - 1))
    without = statistics.median(found[KINDS[0]])
    return [
        {"beside": kind, "p99_s": statistics.median(values), "ratio": statistics.median(values) / without,
         "lowest_s": min(values), "highest_s": max(values)}
        for kind, values in found.items()
    ]  # fmt: skip


def _gap_p99(prompts: list[list[int]], turn: int) -> float:
    times: list[float] = []
    streams = [
        threading.Thread(target=request, args=(prompt(7000 + 10 * turn + number, 64), 300, times))
        for number in range(4)
    ]
    for thread in streams:
        thread.start()
    for tokens in prompts:
        request(tokens, 1)
    for thread in streams:
        thread.join()
    return statistics.quantiles(times, n=100)[98]


def no_reuse(model: str, turns: int) -> dict[str, float]:
    """Seconds of a request, with and without the disk: two servers that are up together, asked in turns."""
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    other = PORT + 1
    with tempfile.TemporaryDirectory() as folder, start(model, None), start(model, Path(folder), port=other):
        ways = [("without", URL), ("with", f"http://127.0.0.1:{other}")]
        for number in range(-1, 12 * turns):
            for way, url in ways[:: -1 if number % 2 else 1]:
                begun = time.monotonic()
                request(prompt(100 + number, 512), 16, url=url)
                if number >= 0:
                    seconds[way].append(time.monotonic() - begun)
    means = {way: statistics.fmean(values) for way, values in seconds.items()}
    pairs = [with_it / without for without, with_it in zip(seconds["without"], seconds["with"], strict=True)]
    return {
        "without_s": means["without"],
        "with_s": means["with"],
        "ratio": means["with"] / means["without"],
        "median_of_pairs": statistics.median(pairs),
    }


def burst(tokens: list[int], count: int) -> list[float]:
    """Seconds to the first token of each of ``count`` requests at once."""
    with ThreadPoolExecutor(count) as pool:
        return [first for first, _ in pool.map(lambda _: request(tokens, 32), range(count))]


def peers(model: str, num_tokens: int, cache: str) -> dict[str, float]:
    """Prompts of a quarter of the tokens."""
    prompts = [prompt(9000 + number, num_tokens // 4) for number in range(12)]
    with start(model, None, "--workers", "2", "--kv-cache-memory", cache, "--kv-host-gb", "4"):
        cold = [request(tokens, 2)[0] for tokens in prompts]
        again = [first for tokens in prompts for first in burst(tokens, 6)]
        time.sleep(1)  # for the workers' figures
        return {
            "cold_s": statistics.median(cold),
            "at_once_s": statistics.median(again),
            "at_once_max_s": max(again),
            "peer_tokens": metric("diptych:kv_peer_hit_tokens_total"),
            "peer_missed_blocks": metric("diptych:kv_peer_missed_blocks_total"),
            "peer_block_s": metric("diptych:kv_peer_block_seconds") / 2,
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--parts", type=names_of(PARTS), default=PARTS, help="with commas")
    parser.add_argument("--cache", default="256MiB", help="KV cache of each worker in the part peers")


def main(asked: argparse.Namespace) -> None:
    parts = asked.parts
    rows: list[dict[str, Any]] = []
    if "restart" in parts:
        with tempfile.TemporaryDirectory() as folder:
            restarts = restart(asked.model, Path(folder), asked.tokens, asked.turns)
        rows += [{"what": f"restart {number}", **row} for number, row in enumerate(restarts)]
    if "gaps" in parts:
        rows += [{"what": "gaps of four streams", **row} for row in gaps(asked.model, asked.tokens, asked.turns)]
    if "no-reuse" in parts:
        rows.append({"what": "no reuse", **no_reuse(asked.model, asked.turns)})
    if "peers" in parts:
        rows.append({"what": "peers", **peers(asked.model, asked.tokens, asked.cache)})
    report("tiers", rows, asked.json)
