"""What the explanation of prefix misses costs the front end: per prompt, per token, per eviction, and in memory.

Conversations of several turns with a system prompt in common, explained as the server does it. Times are process CPU of
one core; without --explain-misses none of this runs. ``python benchmarks/overhead.py misses [--json FILE]``.
"""

import argparse
import gc
import random
import secrets
import time
import tracemalloc
from typing import Any

from common import report

from diptych.control.events import KVEvents, RequestAdmitted
from diptych.control.misses.miss_explainer import HISTORY_TOKENS, MissExplainer
from diptych.serving.misses.hashed_prompts import HashedPrompt

BLOCK = 32
SYSTEM, QUESTION, ANSWER = 2048, 200, 300  # tokens


class Traffic:
    """Prompts as a server explains them; counts the CPU time of that alone."""

    def __init__(self, seed: int = 1) -> None:
        self.explainer = MissExplainer(BLOCK)
        self.cpu_s = 0.0
        self.num_requests = 0
        self._key = secrets.token_bytes(32)
        self._rng = random.Random(seed)
        self._sequence = 0

    def text(self, length: int) -> list[int]:
        """Token ids that come nowhere else."""
        return [self._rng.randrange(150_000) for _ in range(length)]

    def send(self, prompt: list[int], answer: list[int], num_cached: int) -> None:
        """One request from its arrival to its end."""
        request_id = f"cmpl-{self.num_requests:032x}"
        self.num_requests += 1
        begin = time.process_time()
        sealed = HashedPrompt(prompt, BLOCK, self._key)
        self.cpu_s += time.process_time() - begin
        admitted = RequestAdmitted(0, request_id, num_cached, True)
        stored = KVEvents(0, self._sequence, sealed.hashes[num_cached // BLOCK :])
        begin = time.process_time()
        self.explainer.on_arrived(request_id, sealed)
        self.explainer.on_events(0, [admitted, stored], 0)
        self.explainer.on_gone(request_id, sealed.followed_by(answer))
        self.cpu_s += time.process_time() - begin


def cost(name: str, requests: list[tuple[list[int], list[int], int]], traffic: Traffic) -> dict[str, Any]:
    """A row: the CPU of these requests."""
    traffic.cpu_s = 0.0
    gc.disable()
    for request in requests:
        traffic.send(*request)
    gc.enable()
    tokens, new = sum(len(prompt) for prompt, _, _ in requests), sum(len(prompt) - hit for prompt, _, hit in requests)
    return {
        "prompts": name,
        "tokens each": tokens // len(requests),
        "not cached": new // len(requests),
        "CPU ms each": round(1000 * traffic.cpu_s / len(requests), 3),
        "us per token not cached": round(1e6 * traffic.cpu_s / max(1, new), 3),
    }


def conversations(traffic: Traffic, count: int, turns: int) -> list[tuple[list[int], list[int], int]]:
    """Turns of conversations, each after the answer to the one before."""
    system, requests = traffic.text(SYSTEM), []
    for _ in range(count):
        history, cached = list(system), SYSTEM
        for _ in range(turns):
            prompt, answer = [*history, *traffic.text(QUESTION)], traffic.text(ANSWER)
            requests.append((prompt, answer, cached // BLOCK * BLOCK))
            history = [*prompt, *answer]
            cached = len(history) - 1
    return requests


def memory_at_the_bound() -> dict[str, Any]:
    """Memory when as much is remembered as ever is."""
    gc.collect()
    tracemalloc.start()
    traffic = Traffic()
    before = tracemalloc.get_traced_memory()[0]
    while traffic.explainer.history.num_forgotten == 0:
        traffic.send(traffic.text(8192), [], 0)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return {"prompts": f"memory of {HISTORY_TOKENS:,} tokens", "MiB": round(used / 2**20, 1)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""


def main(arguments: argparse.Namespace) -> None:
    """All rows."""
    traffic = Traffic()
    rows = [
        cost("8 turns each, a system prompt in common", conversations(traffic, 20, 8), traffic),
        cost("new, 1,000 tokens", [(traffic.text(1000), traffic.text(200), 0) for _ in range(200)], traffic),
        cost("new, 100,000 tokens", [(traffic.text(100_000), traffic.text(200), 0) for _ in range(4)], traffic),
    ]
    long = traffic.text(100_000)
    again = [(long, traffic.text(200), 0), *((long, traffic.text(200), 99_968) for _ in range(10))]
    cost("", again[:1], traffic)
    rows.append(cost("the same 100,000 tokens again", again[1:], traffic))
    report("prefix misses", [*rows, memory_at_the_bound()], arguments.json)
