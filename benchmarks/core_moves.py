"""What each split of two cores gives a prefill and a decode worker, and how long moving a core between them takes.

    python benchmarks/core_moves.py MODEL_DIR [--streams 4] [--prompt-tokens 4096] [--prompts 5] [--moves 20]
                                    [--json core_moves.json]

One worker that prefills and one that decodes (``--disaggregate always``), on the first two CPUs. Streams run without a
pause while prompts come one after the other. ``prefill 0 / decode 1``: a core each; ``prefill 0-1 / decode 1``: the
prefill worker has a thread on the decode worker's core too; ``prefill 0 / decode 0-1``: the other way around. TTFT is
the client's, of a prompt whose answer has one token; ITL the gaps between tokens of the streams, during prompts.

Then the CPUs of the prefill worker change again and again while prompts and streams run. ``taken ms``: from the request
to ``/admin/workers/0`` until the worker begins to change its threads, which it does between two steps; ``first step
ms``: until its first step on the new CPUs has ended.
"""

import argparse
import http.client
import json
import random
import signal
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from chaos import ServerProcess
from common import report

from diptych.report.statistics import percentile

SPLITS = (("0", "1"), ("0-1", "1"), ("0", "0-1"))
MOVES = ("0-1", "0")
SETTLE_S = 1.5
PATIENCE_S = 60.0


class Load:
    """Streams that run all the time, and prompts one at a time, each on a thread of its own."""

    def __init__(self, port: int, vocab: int, num_prompt_tokens: int) -> None:
        self.gaps: list[tuple[float, float]] = []  # (when, seconds)
        self._port = port
        self._vocab = vocab
        self._num_prompt_tokens = num_prompt_tokens
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, num_streams: int) -> None:
        """Begin the streams."""
        for number in range(num_streams):
            self._threads.append(threading.Thread(target=self._stream, args=(number,)))
            self._threads[-1].start()

    def start_prompts(self) -> None:
        """Begin to send prompts, one after the other."""
        self._threads.append(threading.Thread(target=self._prompts))
        self._threads[-1].start()

    def stop(self) -> None:
        """End all."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def prompt(self, seed: int) -> tuple[float, float]:
        """(start, seconds) of a new prompt's first token."""
        rng = random.Random(seed)
        prompt = [rng.randrange(3, self._vocab) for _ in range(self._num_prompt_tokens)]
        start = time.monotonic()
        for _ in self._tokens({"prompt": prompt, "max_tokens": 1}):
            return start, time.monotonic() - start
        raise RuntimeError("a prompt without a token")

    def _prompts(self) -> None:
        seed = 10**6
        while not self._is_over.is_set():
            self.prompt(seed := seed + 1)

    def _stream(self, number: int) -> None:
        while not self._is_over.is_set():
            last = None
            for now in self._tokens({"prompt": [5 + number] * 64, "max_tokens": 2000}):
                if last is not None:
                    self.gaps.append((now, now - last))
                last = now
                if self._is_over.is_set():
                    return

    def _tokens(self, body: dict[str, Any]) -> Any:
        """When each piece of the answer came."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        body = body | {"stream": True, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise RuntimeError(reply.read().decode())
        for line in reply:
            if line.startswith(b"data: {") and b'"choices":[{' in line:
                yield time.monotonic()
        connection.close()


def set_cores(server: ServerProcess, worker: int, cores: str) -> None:
    """Change the CPUs of a worker, and wait until it computes on them."""
    server.call(f"/admin/workers/{worker}", {"cores": cores})
    end = time.monotonic() + PATIENCE_S
    while server.call("/admin/workers")["workers"][worker]["cores"] != cores:
        if time.monotonic() > end:
            raise RuntimeError(f"worker {worker} does not compute on {cores}")
        time.sleep(0.05)


def measure_split(server: ServerProcess, load: Load, split: tuple[str, str], num_prompts: int) -> dict[str, Any]:
    """TTFT and ITL with these CPUs."""
    for worker, cores in sorted(enumerate(split), key=lambda entry: -len(entry[1])):
        set_cores(server, worker, cores)
    time.sleep(SETTLE_S)
    times, gaps = [], []
    for number in range(num_prompts):
        start, seconds = load.prompt(1000 * SPLITS.index(split) + number)
        times.append(seconds)
        gaps += [gap for at, gap in load.gaps if start <= at <= start + seconds]
        time.sleep(SETTLE_S / 3)
    return {
        "CPUs": f"prefill {split[0]} / decode {split[1]}",
        "TTFT ms p50": round(1000 * statistics.median(times)),
        "TTFT ms max": round(1000 * max(times)),
        "ITL ms p50": round(1000 * statistics.median(gaps), 1),
        "ITL ms p99": round(1000 * percentile(sorted(gaps), 99), 1),
    }


def move(server: ServerProcess, cores: str) -> tuple[float, float]:
    """(milliseconds until the prefill worker has changed its threads, until its next step has ended)."""
    since = server.call("/timeline/records?limit=1")["header"]["next_sequence"] - 1
    start_ns = time.monotonic_ns()
    server.call("/admin/workers/0", {"cores": cores})
    end = time.monotonic() + PATIENCE_S
    changed_ns: int | None = None
    while time.monotonic() < end:
        page = server.call(f"/timeline/records?since={since}&workers=0")
        since = page["next"]
        for record in page["records"]:
            if record["kind"] == "worker" and f"CPUs {cores}," in record.get("computes_on", ""):
                changed_ns = record["time_ns"]
            elif record["kind"] == "step" and changed_ns is not None and record["start_ns"] >= changed_ns:
                return (changed_ns - start_ns) / 1e6, (record["end_ns"] - start_ns) / 1e6
        time.sleep(0.05)
    raise RuntimeError(f"the prefill worker made no step on CPUs {cores}")


def measure_moves(server: ServerProcess, load: Load, count: int) -> dict[str, Any]:
    """Moves while prompts and streams run."""
    load.start_prompts()
    time.sleep(SETTLE_S)
    taken, first = [], []
    for number in range(count):
        times = move(server, MOVES[number % len(MOVES)])
        taken.append(times[0])
        first.append(times[1])
        time.sleep(SETTLE_S / 3)
    return {
        "moves": count,
        "taken ms p50": round(statistics.median(taken), 1),
        "taken ms max": round(max(taken), 1),
        "first step ms p50": round(statistics.median(first), 1),
        "first step ms max": round(max(first), 1),
    }


def main() -> None:
    """Measure, print, write."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server ends with us
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--moves", type=int, default=20)
    parser.add_argument("--json")
    options = parser.parse_args()
    vocab = json.loads((options.model / "config.json").read_text())["vocab_size"]
    arguments = ["--model", str(options.model), "--prefill", "1", "--decode", "1", "--disaggregate", "always"]
    with ServerProcess([*arguments, "--cores-per-worker", "0/1", "--cores", "0-1"]) as server:
        load = Load(server.port, vocab, options.prompt_tokens)
        load.start(options.streams)
        try:
            time.sleep(SETTLE_S)
            splits = [measure_split(server, load, split, options.prompts) for split in SPLITS]
            for worker, cores in enumerate(SPLITS[0]):
                set_cores(server, worker, cores)
            moves = measure_moves(server, load, options.moves)
        finally:
            load.stop()
        server.close()
    report(f"core_moves {options.model.name}", [*splits, moves], options.json)


if __name__ == "__main__":
    main()
