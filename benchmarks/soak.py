#!/usr/bin/env python3
"""An hour of mixed traffic while workers come and go: is every answer right, and does the front end's memory grow?

    python benchmarks/soak.py [--minutes 60] [--warm-up 10] [--clients 6] [--strike-every 20] [--json soak.json]

A server with workers for prompts, for answers, and for both gets streams (greedy, and sampled with a seed), calls of
tools, responses, clients that hang up in the middle, and batches, of which some are cancelled. Meanwhile workers are
killed, stopped for a while, drained, replaced, and given other roles. Each answer that is read to its end, and each
line of a batch, must be the one that the same server gave before, when nothing else ran; what was left in the middle
must have begun so. A refusal is a 429 or 503; any other error, a connection that breaks, and a request without its
reply in COMPLETE_S are wrong. At the end nothing may run or wait, or hold a block.

The memory of the front end is read each second. Stored responses take at most 1 MiB, which they fill during the
warm-up: what the store may hold is no leak. Its slope after the warm-up is that of the least squares through it;
the 95 % interval is from a block bootstrap of the residuals, since neighbouring seconds are alike. With --json all of
it is written once a minute, and at the end.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
from chaos import Case, ServerProcess, ask, change_worker, make_cases, running_workers, undisturbed
from common import RESULTS, report, write_record
from loopback import http_request, memory_of

from diptych.cli.batch_client import BatchClient
from diptych.control.errors import DiptychError
from diptych.diagnosis.adapters.http_get import Site

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.serving import tool_model  # noqa: E402

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
VOCABULARY, LONGEST = 256, 200
BATCH_LINES, BATCH_PAUSE_S = 20, 20.0
CANCELLED_BATCHES = 0.25
STRIKES = ("kill", "kill", "stop", "drain", "role", "role", "replace")
LONGEST_STOP_S = 3.0
REFUSALS = ("429", "503")
WRITE_S = 60.0
MOST_WORKERS = 4
SERVER = ("--prefill", "1", "--decode", "1", "--both", "1", "--disaggregate", "always", "--max-responses", "1MiB")
BLOCK_S = 120  # of the bootstrap: longer than a batch, or a restart, is felt
NUM_DRAWS = 2000
COMPLETE_S = 180.0


@dataclass
class Whole:
    """A request that is answered as a whole, and the calm answer."""

    path: str
    body: dict[str, Any]
    answer: Any = None


@dataclass
class Outcome:
    """Counts of answers by kind, and what was wrong. memory: (seconds since the start, RSS in MiB) each second.
    descriptors: open files of the front end, at the same times. left: metrics that are not 0 at the end."""

    right: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    strikes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)

    def compare(self, kind: str, found: Any, expected: Any) -> None:
        """One answer."""
        if found == expected:
            self.right[kind] += 1
        else:
            self.fail(kind, f"{found!r} instead of {expected!r}")

    def fail(self, kind: str, what: object) -> None:
        """Something wrong."""
        self.wrong.append(f"{kind}: {what}"[:400])

    def refuse(self, kind: str, status: str, said: str) -> None:
        """A reply that is no answer."""
        if status in REFUSALS:
            self.refused[f"{kind} {status} {said}"[:120]] += 1
        else:
            self.fail(kind, f"{status} {said}")

    def row(self, given: argparse.Namespace) -> dict[str, Any]:
        """The row of the table."""
        counted = [(at, value) for at, value in self.memory if at >= given.warm_up * 60]
        slope = slope_interval(*zip(*counted, strict=True)) if len(counted) >= 60 else (None, None, None)
        return {
            "minutes": round(self.memory[-1][0] / 60, 1),
            **dict(sorted(self.right.items())),
            **{kind: self.strikes[kind] for kind in sorted(set(STRIKES))},
            "wrong": len(self.wrong),
            "refused": self.refused.total(),
            "MiB first": round(self.memory[0][1]),
            "MiB last": round(self.memory[-1][1]),
            "files first": self.descriptors[0],
            "files last": self.descriptors[-1],
            **dict(zip(("MiB/h", "low", "high"), slope, strict=True)),
        }

    def extra(self) -> dict[str, Any]:
        """What is not of the table."""
        memory = [round(value, 2) for _, value in self.memory]
        wrong = {"wrong": self.wrong[:50], "refused": dict(self.refused), "left": self.left}
        return {**wrong, "rss_mib_each_second": memory}


def whole_cases() -> list[Whole]:
    """Calls of tools, and responses."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("add", "find")]
    cases = []
    for number in range(6):
        said = [{"role": "user", "content": f"number {number} " * (1 + number)}]
        fields = {"messages": said, "max_tokens": 40, "temperature": 0, "seed": number}
        cases.append(Whole(CHAT, {**fields, "tools": tools, "tool_choice": "required"}))
        cases.append(Whole(RESPONSES, {"input": f"text {number}", "max_output_tokens": 24, "temperature": 0}))
    return cases


def essence(path: str, reply: dict[str, Any]) -> Any:
    """What of a reply must be the same again: no ids and no times."""
    if path == RESPONSES:
        return [[part.get("text") for part in item.get("content") or ()] for item in reply["output"]]
    choice = reply["choices"][0]
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in choice["message"].get("tool_calls") or ()
    ]
    return choice["finish_reason"], choice["message"].get("content"), calls


async def post(port: int, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status and JSON of a reply. Raises OSError, EOFError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    try:
        writer.write(http_request("POST", path, body, "Connection: close"))
        head = await reader.readuntil(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), json.loads(await reader.read())
    finally:
        writer.close()


async def calm_answers(port: int, streams: list[Case], wholes: list[Whole]) -> None:
    """Fill in what each case is answered while nothing else runs."""
    await undisturbed(port, streams)
    for case in wholes:
        status, reply = await post(port, case.path, case.body)
        if status != 200:
            raise RuntimeError(f"{case.path} was answered {status}: {reply}")
        case.answer = essence(case.path, reply)


async def ask_whole(port: int, case: Whole, outcome: Outcome) -> None:
    """One request that is answered as a whole."""
    status, reply = await post(port, case.path, case.body)
    if status == 200:
        outcome.compare(case.path, essence(case.path, reply), case.answer)
    else:
        outcome.refuse(case.path, str(status), str(reply))


async def ask_stream(port: int, case: Case, hang_up: int | None, outcome: Outcome) -> None:
    """Ask for one stream. hang_up: the number of tokens after which it is left."""
    tokens, _, error = await ask(port, case.body, hang_up)
    begun = case.token_ids[: len(tokens)]
    if error == "hung up":
        outcome.compare("stream that was left", tokens[: len(begun)], begun)
    elif not error:
        outcome.compare("stream", tokens, case.token_ids)
    elif tokens != begun:
        outcome.fail("stream that failed", f"{tokens} instead of {begun}")
    else:
        status = error.partition(" ")[2][:3] if error.startswith("HTTP/1.1 ") else "in the stream"
        outcome.refuse("stream", status, error.rpartition("\n")[2])


async def client(
    port: int, streams: list[Case], wholes: list[Whole], rng: random.Random, over: asyncio.Event, outcome: Outcome
) -> None:
    """One request after another, of random kinds."""
    while not over.is_set():
        stream = rng.choice(streams)
        hang_up = rng.randrange(stream.body["max_tokens"]) if rng.random() < 0.2 else None
        is_whole = rng.random() < 0.4
        asked = ask_whole(port, rng.choice(wholes), outcome) if is_whole else ask_stream(port, stream, hang_up, outcome)
        try:
            async with asyncio.timeout(COMPLETE_S):
                await asked
        except (OSError, EOFError, ValueError) as error:  # TimeoutError is an OSError
            outcome.fail("whole" if is_whole else "stream", repr(error))
            await asyncio.sleep(0.2)


@dataclass
class Batches:
    """One batch after another, with pauses; each line must have the calm answer, also of a batch that is cancelled."""

    remote: Any
    cases: list[Case]
    folder: Path
    rng: random.Random
    outcome: Outcome

    async def run(self, over: asyncio.Event) -> None:
        """Until it is over."""
        lines = [
            json.dumps({"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": case.body})
            for n, case in enumerate(self.cases)
        ]
        source = self.folder / "lines.jsonl"
        source.write_text("\n".join(lines) + "\n")
        while not over.is_set():
            try:
                await self._one(source)
            except (DiptychError, OSError, ValueError, KeyError) as error:
                self.outcome.fail("batch", repr(error))
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), BATCH_PAUSE_S)

    async def _one(self, source: Path) -> None:
        file = await asyncio.to_thread(self.remote.upload, source)
        batch = await asyncio.to_thread(self.remote.create, file, "/v1/completions", "24h")
        is_cancelled, end = self.rng.random() < CANCELLED_BATCHES, time.monotonic() + COMPLETE_S
        if is_cancelled:
            await asyncio.sleep(self.rng.random())
            batch = await asyncio.to_thread(self.remote.cancel, batch["id"])
        while batch["status"] not in ("completed", "failed", "expired", "cancelled") and time.monotonic() < end:
            await asyncio.sleep(0.5)
            batch = await asyncio.to_thread(self.remote.batch, batch["id"])
        counts, answers = batch["request_counts"], batch.get("output_file_id")
        is_right = batch["status"] == "completed" and counts["completed"] == len(self.cases)
        if not is_right and not (is_cancelled and batch["status"] == "cancelled"):
            self.outcome.fail("batch", batch)
        self.outcome.right[f"{batch['status']} batch"] += 1
        if answers:
            await self._compare(answers, counts["completed"])
        for each in filter(None, (file, answers, batch.get("error_file_id"))):
            await asyncio.to_thread(self.remote.delete_file, each)

    async def _compare(self, answers: str, count: int) -> None:
        target = self.folder / "answers.jsonl"
        await asyncio.to_thread(self.remote.download, answers, target)
        lines = [json.loads(line) for line in target.read_text().splitlines()]
        self.outcome.compare("file of a batch", len({line["custom_id"] for line in lines}), count)
        for line in lines:
            found = line["response"]["body"]["choices"][0]["token_ids"]
            self.outcome.compare("line of a batch", found, self.cases[int(line["custom_id"])].token_ids)


async def strike(server: ServerProcess, every_s: float, rng: random.Random, outcome: Outcome) -> None:
    """Something happens to a worker every so often, until this is cancelled."""
    while every_s:
        await asyncio.sleep(every_s)
        kind = rng.choice(STRIKES)
        try:
            outcome.strikes[kind] += await struck(server, kind, rng)
        except OSError as error:
            outcome.fail(kind, repr(error))


async def struck(server: ServerProcess, kind: str, rng: random.Random) -> int:
    """How often it was done: not where no worker can be spared, or it has just ended."""
    if kind in ("role", "drain"):
        return await change_worker(server, kind, rng)
    if kind == "replace":
        return await replace_worker(server, rng)
    workers = server.workers()
    if not workers:
        return 0
    victim = rng.choice(workers)
    with suppress(ProcessLookupError):
        if kind == "kill":
            os.kill(victim, signal.SIGKILL)
            return 1
        os.kill(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(rng.uniform(0.05, LONGEST_STOP_S))
        finally:
            os.kill(victim, signal.SIGCONT)
        return 1
    return 0


async def replace_worker(server: ServerProcess, rng: random.Random) -> int:
    """Start one more, and stop one of the others."""

    def call(method: str, path: str) -> Any:
        try:
            with urlopen(Request(server.url + path, method=method), timeout=COMPLETE_S) as reply:
                return json.load(reply)
        except HTTPError as error:
            if error.code not in (404, 409):  # it is gone, or cannot be spared
                raise
            return None

    workers = await running_workers(server)
    old = rng.choice(workers)
    if len(workers) < MOST_WORKERS and await asyncio.to_thread(call, "POST", "/admin/workers") is None:
        return 0
    return int(await asyncio.to_thread(call, "DELETE", f"/admin/workers/{old['worker']}") is not None)


async def watch(server: ServerProcess, outcome: Outcome, given: argparse.Namespace) -> None:
    """Memory and descriptors each second, and the record each minute, until this is cancelled."""
    pid, started, written = server.process.pid, time.monotonic(), 0.0
    while True:
        at = time.monotonic() - started
        outcome.memory.append((at, memory_of(pid)["rss"]))
        outcome.descriptors.append(len(os.listdir(f"/proc/{pid}/fd")))
        said = f"\r{at / 60:.1f} min, {sum(outcome.right.values())} right, {len(outcome.wrong)} wrong, "
        print(f"{said}{outcome.memory[-1][1]:.0f} MiB", end="", file=sys.stderr)
        if given.json and at - written >= WRITE_S:
            written = at
            write_record("soak", [outcome.row(given)], path_of(given), **outcome.extra())
        await asyncio.sleep(1.0)


def path_of(given: argparse.Namespace) -> Path:
    """The path of the record."""
    return Path(given.json) if os.sep in given.json else RESULTS / given.json


async def soak(server: ServerProcess, given: argparse.Namespace, outcome: Outcome, folder: Path) -> None:
    """Run all of it for the minutes that are given."""
    over = asyncio.Event()
    streams, wholes = make_cases(24, VOCABULARY, LONGEST, given.seed), whole_cases()
    await calm_answers(server.port, streams, wholes)
    cases = [streams[number % len(streams)] for number in range(BATCH_LINES)]
    batches = Batches(BatchClient(Site(server.url)), cases, folder, random.Random(given.seed), outcome)
    rngs = [random.Random(given.seed * 1000 + number) for number in range(given.clients)]
    async with asyncio.TaskGroup() as group:  # what none of them expects ends them all
        beside = [
            group.create_task(strike(server, given.strike_every, random.Random(given.seed), outcome)),
            group.create_task(watch(server, outcome, given)),
        ]
        working = [group.create_task(client(server.port, streams, wholes, rng, over, outcome)) for rng in rngs]
        working.append(group.create_task(batches.run(over)))
        await asyncio.sleep(given.minutes * 60)
        over.set()
        beside[0].cancel()
        await asyncio.wait(working)
        beside[1].cancel()
    print(file=sys.stderr)


def what_is_left(server: ServerProcess) -> dict[str, float]:
    """Requests and blocks that the server still knows of: there must be none."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    end = time.monotonic() + 30
    while True:
        metrics = server.metrics()
        left = {name: metrics[name] for name in names if metrics.get(name)}
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.5)


def slope_interval(
    times_s: Sequence[float],
    values: Sequence[float],
    block_s: float = BLOCK_S,
    num_draws: int = NUM_DRAWS,
    seed: int = 1,
) -> tuple[float, float, float]:
    """The slope per hour of values over time by least squares, and its 95 % interval from a moving-block bootstrap of
    the residuals (Kuensch 1989): blocks keep what neighbours have in common. times_s: in steps of about a second."""
    at, found = np.asarray(times_s) / 3600, np.asarray(values)
    centred = at - at.mean()
    slope = float(centred @ found / (centred @ centred))
    residuals = found - found.mean() - slope * centred
    count = len(found)
    length = max(1, min(int(block_s), count // 4))
    draws = np.random.default_rng(seed)
    slopes = []
    for _ in range(num_draws):
        starts = draws.integers(0, count - length + 1, -(-count // length))
        drawn = np.concatenate([residuals[start : start + length] for start in starts])[:count]
        slopes.append(slope + float(centred @ drawn / (centred @ centred)))
    low, high = np.percentile(slopes, [2.5, 97.5])
    return slope, float(low), float(high)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm-up", type=float, default=10.0, help="minutes that do not count for the slope")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--strike-every", type=float, default=20.0, help="seconds between two strikes (0: none)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server ends with us
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tool_model.tool_model(folder / "model")
        with ServerProcess(
            ["--model", str(model), *SERVER, "--max-workers", str(MOST_WORKERS), "--batch-dir", str(folder / "batches")]
        ) as server:
            asyncio.run(soak(server, given, outcome, folder))
            outcome.left = what_is_left(server)
            orphans = server.close()
    row = outcome.row(given) | {"left": len(outcome.left), "orphans": len(orphans)}
    for line in outcome.wrong[:5]:
        print(line, file=sys.stderr)
    report("soak", [row], given.json, **outcome.extra())


if __name__ == "__main__":
    main()
