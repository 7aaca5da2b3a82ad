#!/usr/bin/env python3
"""An hour of mixed traffic while workers are killed: is every answer right, and does the front end's memory grow?

    python benchmarks/soak.py [--minutes 60] [--clients 6] [--kill-every 60] [--seed 1] [--json soak.json]

A server with one worker for prompts and one for answers gets streams (greedy, and sampled with a seed), calls of tools,
responses, clients that hang up in the middle, and batches; every so often one of its workers is killed. Each answer
that is read to its end must be the one that the same server gave before, when nothing else ran. The memory of the front
end is read each second. Its slope after the warm-up is that of the least squares through it; the 95 % interval is from
a block bootstrap of the residuals, since neighbouring seconds are alike.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from chaos import Case, ServerProcess, ask, make_cases, undisturbed
from common import report
from loopback import http_request, memory_of

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.serving import tool_model  # noqa: E402

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
VOCABULARY, LONGEST = 256, 200
BATCH_LINES, BATCH_PAUSE_S = 20, 20.0
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
    """Counts of answers by kind, and what was wrong. memory: (seconds since the start, RSS in MiB) each second."""

    right: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_hung_up: int = 0
    num_kills: int = 0
    memory: list[tuple[float, float]] = field(default_factory=list)

    def compare(self, kind: str, found: Any, expected: Any) -> None:
        """One answer."""
        if found == expected:
            self.right[kind] += 1
        else:
            self.wrong.append(f"{kind}: {found!r} instead of {expected!r}"[:400])


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


async def client(
    port: int, streams: list[Case], wholes: list[Whole], rng: random.Random, over: asyncio.Event, outcome: Outcome
) -> None:
    """One request after another, of random kinds."""
    while not over.is_set():
        if rng.random() < 0.4:
            case = rng.choice(wholes)
            status, reply = await post(port, case.path, case.body)
            if status == 200:
                outcome.compare(case.path, essence(case.path, reply), case.answer)
            else:
                outcome.refused[f"{case.path} {status}"] += 1
            continue
        stream = rng.choice(streams)
        hang_up = rng.randrange(stream.body["max_tokens"]) if rng.random() < 0.2 else None
        tokens, _, error = await ask(port, stream.body, hang_up)
        if error == "hung up":
            outcome.num_hung_up += 1
            tokens = tokens[: len(stream.token_ids)]
            if tokens != stream.token_ids[: len(tokens)]:
                outcome.wrong.append(f"a stream that was left: {tokens}"[:400])
        elif error:
            outcome.refused[error[:80]] += 1
        else:
            outcome.compare("stream", tokens, stream.token_ids)


def submit(remote: Any, source: Path) -> dict[str, Any]:
    """Upload a file of lines, and make a batch of it."""
    created: dict[str, Any] = remote.create(remote.upload(source), "/v1/completions", "24h")
    return created


async def send_batches(server: ServerProcess, streams: list[Case], over: asyncio.Event, outcome: Outcome) -> None:
    """One batch after another, with pauses; each line must have the calm answer."""
    from diptych.cli.batch_client import BatchClient
    from diptych.diagnosis.adapters.http_get import Site

    remote = BatchClient(Site(server.url))
    cases = [streams[number % len(streams)] for number in range(BATCH_LINES)]
    lines = [
        json.dumps({"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": case.body})
        for n, case in enumerate(cases)
    ]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "lines.jsonl", Path(folder) / "answers.jsonl"
        source.write_text("\n".join(lines) + "\n")
        while not over.is_set():
            batch = await asyncio.to_thread(submit, remote, source)
            end = time.monotonic() + COMPLETE_S
            while batch["status"] not in ("completed", "failed", "expired", "cancelled") and time.monotonic() < end:
                await asyncio.sleep(0.5)
                batch = await asyncio.to_thread(remote.batch, batch["id"])
            if batch["status"] != "completed" or not batch.get("output_file_id"):
                outcome.wrong.append(f"a batch: {batch}"[:400])
            else:
                await asyncio.to_thread(remote.download, batch["output_file_id"], target)
                for line in map(json.loads, target.read_text().splitlines()):
                    choice = line["response"]["body"]["choices"][0]
                    outcome.compare("line of a batch", choice["token_ids"], cases[int(line["custom_id"])].token_ids)
            await asyncio.sleep(BATCH_PAUSE_S)


async def kill_workers(server: ServerProcess, every_s: float, rng: random.Random, outcome: Outcome) -> None:
    """A worker every so often, until it is cancelled."""
    while every_s:
        await asyncio.sleep(every_s)
        if workers := server.workers():
            try:
                os.kill(rng.choice(workers), signal.SIGKILL)
            except ProcessLookupError:
                continue
            outcome.num_kills += 1


async def watch_memory(pid: int, outcome: Outcome) -> None:
    """Each second, until it is cancelled."""
    started = time.monotonic()
    while True:
        outcome.memory.append((time.monotonic() - started, memory_of(pid)["rss"]))
        minutes, right = outcome.memory[-1][0] / 60, sum(outcome.right.values())
        said = f"\r{minutes:.1f} min, {right} right, {len(outcome.wrong)} wrong, {outcome.memory[-1][1]:.0f} MiB"
        print(said, end="", file=sys.stderr)
        await asyncio.sleep(1.0)


async def soak(server: ServerProcess, given: argparse.Namespace) -> Outcome:
    """All of it for so many minutes."""
    outcome, over = Outcome(), asyncio.Event()
    streams, wholes = make_cases(24, VOCABULARY, LONGEST, given.seed), whole_cases()
    await calm_answers(server.port, streams, wholes)
    working = [
        client(server.port, streams, wholes, random.Random(given.seed * 1000 + n), over, outcome)
        for n in range(given.clients)
    ]
    tasks = [asyncio.create_task(each) for each in (*working, send_batches(server, streams, over, outcome))]
    rng = random.Random(given.seed)
    beside = [
        asyncio.create_task(kill_workers(server, given.kill_every, rng, outcome)),
        asyncio.create_task(watch_memory(server.process.pid, outcome)),
    ]
    done, _ = await asyncio.wait(tasks, timeout=given.minutes * 60, return_when=asyncio.FIRST_EXCEPTION)
    over.set()
    for task in beside:
        task.cancel()
    for task in done:
        task.result()
    await asyncio.wait_for(asyncio.gather(*tasks), COMPLETE_S + BATCH_PAUSE_S)
    print(file=sys.stderr)
    return outcome


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
    parser.add_argument("--kill-every", type=float, default=60.0, help="seconds between two kills (0: none)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server ends with us
    with tempfile.TemporaryDirectory() as folder:
        model = tool_model.tool_model(Path(folder) / "model")
        pools = ["--prefill", "1", "--decode", "1", "--disaggregate", "always", "--batch-dir", f"{folder}/batches"]
        with ServerProcess(["--model", str(model), *pools]) as server:
            outcome = asyncio.run(soak(server, given))
            orphans = server.close()
    counted = [(at, value) for at, value in outcome.memory if at >= given.warm_up * 60]
    slope = slope_interval(*zip(*counted, strict=True)) if len(counted) >= 60 else (None, None, None)
    row = {
        "minutes": given.minutes,
        **dict(sorted(outcome.right.items())),
        "hung up": outcome.num_hung_up,
        "kills": outcome.num_kills,
        "wrong": len(outcome.wrong),
        "refused": sum(outcome.refused.values()),
        "orphans": len(orphans),
        "MiB first": round(outcome.memory[0][1]),
        "MiB last": round(outcome.memory[-1][1]),
        **dict(zip(("MiB/h", "low", "high"), slope, strict=True)),
    }
    for line in outcome.wrong[:5]:
        print(line, file=sys.stderr)
    memory = [value for _, value in outcome.memory]
    report(
        "soak", [row], given.json, wrong=outcome.wrong[:50], refused=dict(outcome.refused), rss_mib_each_second=memory
    )


if __name__ == "__main__":
    main()
