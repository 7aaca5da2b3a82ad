#!/usr/bin/env python3
"""One hostile client against a server with 16 running streams: what do the others feel, and what memory is kept?

    python benchmarks/hostile.py [--seconds 10] [--only NAME ...] [--front] [--share 0.2] [--json hostile.json] [--list]

For each attack a server is started (``diptych serve`` of the bundled model, or of MODEL; with ``--front`` a ``diptych
front`` before a make-believe engine). 16 streams of another API key run all the time, each with a prompt of its own;
they are read for some seconds before, during, and after the attack. The attacker is one process that keeps itself to a
share of a core by its own processor time. Everything is on loopback, and bounded in time and in number.

Of the streams: the median and p99 of the gaps between tokens and of the time to the first token in each phase, how many
failed, and how many differ from those of the calm server. Of the front end: RSS and PSS before, at the most during, and
after. Of the attacker: the replies that are not among the documented ones.
"""

import argparse
import asyncio
import json
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import report
from hostile_attacks import ATTACKS, Attack, Attacker, Target, otherwise
from loopback import http_request, memory_of, raise_descriptor_limit
from servers import free_port

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.serving.servers import CLI, running  # noqa: E402

NUM_STREAMS = 16
STREAM_TOKENS = 48
KEY, HOSTILE_KEY = "key-of-the-streams", "key-of-the-attacker"
SAMPLE_S = 0.2
PHASES = ("before", "during", "after")
ENGINE_PACE = '{"ttft_ms": 20, "itl_ms": 20}'


@dataclass
class Felt:
    """What the streams felt, with the time of each value (seconds of the monotonic clock)."""

    gaps: list[tuple[float, float]] = field(default_factory=list)
    firsts: list[tuple[float, float]] = field(default_factory=list)
    failed: list[tuple[float, str]] = field(default_factory=list)
    wrong: list[tuple[float, str]] = field(default_factory=list)
    num_complete: int = 0


async def read_stream(address: tuple[str, int], request: bytes, felt: Felt) -> str:
    """One stream to its end. Returns its text. Raises OSError, EOFError, or ValueError where it fails."""
    reader, writer = await asyncio.open_connection(*address)
    text, last = "", time.monotonic()
    started, has_begun = last, False
    try:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise ValueError((head.split(b"\r\n")[0] + b" " + await reader.read(300)).decode(errors="replace"))
        while line := await reader.readline():
            if not line.startswith(b"data:"):
                continue
            now = time.monotonic()
            if line.startswith(b"data: [DONE]"):
                return text
            event = json.loads(line[5:])
            if event.get("error"):
                raise ValueError(str(event["error"]))
            text += "".join(choice.get("text", "") for choice in event.get("choices", ()))
            (felt.gaps if has_begun else felt.firsts).append((now, now - (last if has_begun else started)))
            last, has_begun = now, True
        raise ValueError("the stream broke off")
    finally:
        writer.close()


async def stream_on(address: tuple[str, int], request: bytes, over: asyncio.Event, felt: Felt) -> None:
    """One stream after another; each must be the first one again."""
    expected: str | None = None
    while not over.is_set():
        try:
            text = await read_stream(address, request, felt)
        except (OSError, EOFError, ValueError) as error:
            felt.failed.append((time.monotonic(), repr(error)[:300]))
            await asyncio.sleep(0.2)
            continue
        expected = text if expected is None else expected
        felt.num_complete += 1
        if text != expected:
            felt.wrong.append((time.monotonic(), f"{text!r} instead of {expected!r}"[:300]))


def streams_process(pipe: Connection, address: tuple[str, int], model: str) -> None:
    """The running streams, until the pipe says that it is over; then what they felt."""

    async def run() -> Felt:
        felt, over, rng = Felt(), asyncio.Event(), random.Random(1)
        requests = []
        for number in range(NUM_STREAMS):
            words = " ".join(rng.choice(("def", "return", "import", "class", "for")) for _ in range(8))
            fields = {"model": model, "prompt": f"# {number} {words}\n", "max_tokens": STREAM_TOKENS}
            fields |= {"temperature": 0, "ignore_eos": True, "stream": True}
            headers = (f"Authorization: Bearer {KEY}", "Connection: close")
            requests.append(http_request("POST", "/v1/completions", fields, *headers))
        asyncio.get_running_loop().add_reader(pipe.fileno(), over.set)
        async with asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(stream_on(address, request, over, felt))
        return felt

    felt = asyncio.run(run())
    pipe.recv()
    pipe.send(felt)


def attacker_process(pipe: Connection, name: str, target: Target, share: float, seconds: float) -> None:
    """Make the attack's input, say so, attack when told, and answer how its calls ended."""
    raise_descriptor_limit()
    attack = next(attack for attack in ATTACKS if attack.name == name)
    Attacker(attack, target, share)  # the input is made here: what that costs is not the server's
    pipe.send("ready")
    pipe.recv()
    attacker = Attacker(attack, target, share)
    used, started = time.process_time(), time.monotonic()
    attacker.run(seconds)
    pipe.send((attacker.fates, (time.process_time() - used) / (time.monotonic() - started)))


@contextmanager
def served(options: argparse.Namespace, attack: Attack) -> Iterator[tuple[int, Target]]:
    """A fresh server: the process id of its front end, and where to attack it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keys = ("--api-key", KEY, "--api-key", HOSTILE_KEY, "--port", "0", "--served-model-name", "m")
        workers = None
        if options.front or attack.of == "front":
            fake = (sys.executable, str(ROOT / "benchmarks/fake_sse_server.py"), "--pace", ENGINE_PACE)
            engine = stack.enter_context(running(fake))
            command = [*CLI, "front", *keys, "--engine", f"openai={engine.url}"]
        else:
            threads = str(max(1, len(os.sched_getaffinity(0)) - 1))
            command = [*CLI, "serve", *keys, "--threads", threads, "--batch-dir", str(folder / "batches")]
            command += ["--model", str(options.model)] if options.model else []
        if attack.of == "workers":
            workers = ("127.0.0.1", free_port())
            key = folder / "key"
            key.touch(0o600)
            key.write_text(os.urandom(32).hex())
            command += ["--listen-workers", f"127.0.0.1:{workers[1]}", "--key-file", str(key)]
        server = stack.enter_context(running(command, folder / "log"))
        yield server.process.pid, Target(server.address, HOSTILE_KEY, "m", workers)


def watch_memory(pid: int, seconds: float) -> list[dict[str, float]]:
    """The front end's memory, several times a second."""
    end, found = time.monotonic() + seconds, []
    while time.monotonic() < end:
        found.append(memory_of(pid))
        time.sleep(SAMPLE_S)
    return found


def measure(attack: Attack, options: argparse.Namespace) -> dict[str, Any]:
    """One attack on a fresh server: a row, with what is not for the table under "detail"."""
    context, seconds = get_context("spawn"), options.seconds
    with served(options, attack) as (pid, target):
        pipes = []
        for function, given in (
            (streams_process, (target.address, "m")),
            (attacker_process, (attack.name, target, options.share, seconds)),
        ):
            ours, theirs = context.Pipe()
            context.Process(target=function, args=(theirs, *given), daemon=True).start()
            pipes.append(ours)
        streams, attacker = pipes
        attacker.recv()
        time.sleep(options.warm_up)
        memory, times = [], [time.monotonic()]
        for phase in PHASES:
            if phase == "during":
                attacker.send("now")
            memory.append(watch_memory(pid, seconds))
            times.append(time.monotonic())
        fates, used = attacker.recv() if attacker.poll(60) else (Counter({"the attacker did not end": 1}), 0.0)
        streams.send("over")
        felt = streams.recv() if streams.poll(120) else Felt(failed=[(times[1], "the streams did not end")])
    return row_of(attack, felt, times, memory, fates, used)


def row_of(
    attack: Attack,
    felt: Felt,
    times: Sequence[float],
    memory: Sequence[Sequence[dict[str, float]]],
    fates: Counter[str],
    used: float,
) -> dict[str, Any]:
    """Of the table. times: the bounds of the three phases. memory: samples of each."""
    row: dict[str, Any] = {"attack": attack.name}
    for name, values in (("gap", felt.gaps), ("TTFT", felt.firsts)):
        for phase, within in zip(PHASES, by_phase(values, times), strict=True):
            for percent in (50, 99):
                row[f"{name} p{percent} {phase} ms"] = in_ms(percentile(within, percent))
        before, during, after = by_phase(values, times)
        row[f"{name} max before ms"] = in_ms(max(before, default=None))
        row[f"{name} max during ms"] = in_ms(max(during + after, default=None))  # a long wait may end later
        row[f"{name} p99 x"] = ratio(row[f"{name} p99 during ms"], row[f"{name} p99 before ms"])
    for kind in ("rss", "pss"):
        row[f"{kind} before MiB"] = round(memory[0][-1][kind])
        row[f"{kind} most MiB"] = round(max(sample[kind] for samples in memory[1:] for sample in samples))
        row[f"{kind} after MiB"] = round(memory[2][-1][kind])
    wrong_replies = otherwise(attack, fates.items())
    row |= {"streams": felt.num_complete, "failed": len(felt.failed), "wrong": len(felt.wrong)}
    row |= {"calls": fates.total(), "otherwise": wrong_replies.total(), "attacker cores": round(used, 2)}
    failures = [said for _, said in (*felt.failed, *felt.wrong)][:5]
    return row | {"detail": {"fates": dict(fates), "otherwise": dict(wrong_replies), "failures": failures}}


def by_phase(values: Sequence[tuple[float, float]], times: Sequence[float]) -> list[list[float]]:
    """Values by the phase that they came in. times: the bounds, one more than phases."""
    return [[value for at, value in values if start <= at < end] for start, end in pairwise(times)]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that so many percent do not exceed; None of none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def in_ms(seconds: float | None) -> float | None:
    """Rounded."""
    return None if seconds is None else round(seconds * 1e3, 1)


def ratio(during: float | None, before: float | None) -> float | None:
    """How many times as long."""
    return None if during is None or not before else round(during / before, 2)


SHOWN = (
    *("attack", "gap p50 before ms", "gap p50 during ms", "gap p99 before ms", "gap p99 during ms", "gap p99 x"),
    *("gap max during ms", "TTFT p99 before ms", "TTFT p99 during ms", "TTFT p99 x", "TTFT max during ms"),
    *("rss before MiB", "rss most MiB", "rss after MiB"),
    *("failed", "wrong", "calls", "otherwise"),
)


def chosen(options: argparse.Namespace) -> list[Attack]:
    """The attacks that were asked for and that this server is open to."""
    asked = [attack for attack in ATTACKS if not options.only or attack.name in options.only]
    unfit = ("engine", "workers") if options.front else () if options.only else ("front",)
    return [attack for attack in asked if attack.of not in unfit]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="instead of the bundled one")
    parser.add_argument("--only", nargs="+", choices=[attack.name for attack in ATTACKS], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="the names of the attacks, and nothing else")
    parser.add_argument("--front", action="store_true", help="attack a front before a make-believe engine")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase: before, during, after")
    parser.add_argument("--warm-up", type=float, default=2.0, help="seconds of streams before the first phase")
    parser.add_argument("--share", type=float, default=0.2, help="of a core that the attacker takes at most")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.list:
        print("\n".join(attack.name for attack in ATTACKS))
        return
    raise_descriptor_limit()
    rows, details, attacks = [], {}, chosen(options)
    for number, attack in enumerate(attacks, start=1):
        print(f"[{number}/{len(attacks)}] {attack.name}", file=sys.stderr, flush=True)
        row = measure(attack, options)
        details[attack.name] = row.pop("detail")
        rows.append(row)
        print("    " + ", ".join(f"{name} {row[name]}" for name in SHOWN[1:]), file=sys.stderr, flush=True)
    shown = [{name: row[name] for name in SHOWN} for row in rows]
    report("hostile", shown, None)
    for name, detail in details.items():
        for kind in ("otherwise", "failures"):
            if detail[kind]:
                print(f"{name}, {kind}: {detail[kind]}")
    if options.json:
        report("hostile, all values", rows, options.json, details=details, seconds=options.seconds, front=options.front)


if __name__ == "__main__":
    main()
