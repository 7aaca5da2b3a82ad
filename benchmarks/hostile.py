#!/usr/bin/env python3
"""One hostile client against a server with 16 running streams: what do the others feel, and what memory is kept?

    python benchmarks/hostile.py [--front | --guide] [--seconds 10] [--json hostile.json [--resume] [--for 840]]
    python benchmarks/hostile.py --only NAME ...          python benchmarks/hostile.py --list

The server (``diptych serve`` of the bundled model, or of MODEL; with ``--front`` a ``diptych front`` before a
make-believe engine; with ``--guide`` a ``diptych guide``) meets one attack after another; it is replaced when its
memory does not come back, or when the next attack needs other options. 16 streams of another API key run all the time,
each with a prompt of its own (at the guide: 16 readers of its pages and panels). The attacker is one process; it keeps
itself to a share of a core by its own processor time, of the system too: it sleeps as soon as it has used more than
that share of the time since its start. Everything is on loopback, and bounded in time and in number.

A fresh server fills its bounded records (the timeline, the last seconds for a recording) for about a minute: what the
streams feel and what memory there is "before" is taken only when RSS has stood still for SETTLED_S, or after WARM_UP
seconds.

Calm and attack take turns: calm, attack, calm, attack, calm. A wait between two tokens, or for the first one, counts
for the attack if the attack was on in any of its moments, and for the calm if it lies in a calm phase as a whole; the
seconds after an attack count for neither. Of both: the median and p99, and p99 as a multiple of that of the calm. The
attack "nothing" sends nothing: its multiple is the noise. Of the front end: RSS and PSS before, at the most, and until
RSS is back within 10 % of what it was before (at the longest MEMORY_S after the attack). Of the attacker: the calls
that ended otherwise than documented. With --json each row is written when its attack is over; --resume leaves out what
is there, and --for begins no attack when its seconds are over: the same command again goes on.
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
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import RESULTS, report, write_record
from hostile_attacks import ATTACKS, Attack, Attacker, Server, Target
from loopback import http_request, memory_of, raise_descriptor_limit
from servers import free_port

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.serving.servers import CLI, running  # noqa: E402

NUM_STREAMS = 16
STREAM_TOKENS = 48
KEY, HOSTILE_KEY = "key-of-the-streams", "key-of-the-attacker"
SAMPLE_S = 0.2
NUM_ATTACKS = 2  # of a kind, with calm before, between and behind them
WARM_S = 1.0  # of streams at a server that is warm, before the calm counts
REST_S = 3.0  # after an attack, before the calm counts again
MEMORY_S = 60.0
BACK = 1.1
SETTLED_S, SETTLED = 10.0, 1.01  # RSS stands still when it grows by no more than this in such a time
PAGES = ("/guide", "/guide/api/phases", "/guide/api/chunked")
PAGE_PAUSE_S = 0.05
ENGINE_PACE = '{"ttft_ms": 20, "itl_ms": 20}'


@dataclass
class Felt:
    """What the streams felt: of each wait its end (seconds of the monotonic clock) and how long it was."""

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


async def read_pages(address: tuple[str, int], number: int, over: asyncio.Event, felt: Felt) -> None:
    """One page or panel of the guide after another; each must be the same again."""
    expected: dict[str, bytes] = {}
    while not over.is_set():
        path, started = PAGES[number % len(PAGES)], time.monotonic()
        number += 1
        try:
            reader, writer = await asyncio.open_connection(*address)
            try:
                writer.write(http_request("GET", path, None, "Connection: close"))
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.read()
            finally:
                writer.close()
        except (OSError, EOFError) as error:
            felt.failed.append((time.monotonic(), repr(error)[:300]))
            await asyncio.sleep(0.2)
            continue
        felt.firsts.append((time.monotonic(), time.monotonic() - started))
        if not head.startswith(b"HTTP/1.1 200"):
            felt.failed.append((time.monotonic(), (head + body).decode(errors="replace")[:300]))
            continue
        felt.num_complete += 1
        if body != expected.setdefault(path, body):
            felt.wrong.append((time.monotonic(), f"another reply of {path}"))
        await asyncio.sleep(PAGE_PAUSE_S)


def stream_requests(model: str) -> list[bytes]:
    """The requests of the running streams."""
    rng, requests = random.Random(1), []
    for number in range(NUM_STREAMS):
        words = " ".join(rng.choice(("def", "return", "import", "class", "for")) for _ in range(8))
        fields = {"model": model, "prompt": f"# {number} {words}\n", "max_tokens": STREAM_TOKENS}
        fields |= {"temperature": 0, "ignore_eos": True, "stream": True}
        headers = (f"Authorization: Bearer {KEY}", "Connection: close")
        requests.append(http_request("POST", "/v1/completions", fields, *headers))
    return requests


def streams_process(pipe: Connection, address: tuple[str, int], model: str, server: Server) -> None:
    """The running streams, or readers of the guide, until the pipe says that it is over; then what they felt."""

    async def run() -> Felt:
        felt, over = Felt(), asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), over.set)
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(stream_requests(model)):
                reading = server == "guide"
                work = read_pages(address, number, over, felt) if reading else stream_on(address, request, over, felt)
                group.create_task(work)
        return felt

    felt = asyncio.run(run())
    pipe.recv()
    pipe.send(felt)


def attacker_process(pipe: Connection, name: str, target: Target, share: float, seconds: float) -> None:
    """Make the attack's input, say so; attack whenever told, and answer how the calls ended and what it used."""
    raise_descriptor_limit()
    attack = next(attack for attack in ATTACKS if attack.name == name)
    attacker = Attacker(attack, target, share)
    pipe.send("ready")
    while pipe.recv() == "now":
        used, started = time.process_time(), time.monotonic()
        attacker.run(seconds)
        pipe.send((attacker.fates, (time.process_time() - used) / (time.monotonic() - started)))
        attacker.fates = Counter()


@contextmanager
def served(options: argparse.Namespace, has_workers: bool) -> Iterator[tuple[int, Target]]:
    """A fresh server, open to joining workers or not: the process id of its front end, and where to attack it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keys = ("--api-key", KEY, "--api-key", HOSTILE_KEY, "--port", "0", "--served-model-name", "m")
        workers = None
        if options.server == "guide":
            guide = stack.enter_context(running((*CLI, "guide", "--port", "0"), folder / "log"))
            yield guide.process.pid, Target(guide.address, HOSTILE_KEY, "m", page="/guide")
            return
        if options.server == "front":
            fake = (sys.executable, str(ROOT / "benchmarks/fake_sse_server.py"), "--pace", ENGINE_PACE)
            engine = stack.enter_context(running(fake))
            command = [*CLI, "front", *keys, "--engine", f"openai={engine.url}"]
        else:
            threads = str(max(1, len(os.sched_getaffinity(0)) - 1))
            command = [*CLI, "serve", *keys, "--threads", threads, "--batch-dir", str(folder / "batches")]
            command += ["--model", str(options.model)] if options.model else []
        if has_workers:
            workers = ("127.0.0.1", free_port())
            key = folder / "key"
            key.touch(0o600)
            key.write_text(os.urandom(32).hex())
            command += ["--listen-workers", f"127.0.0.1:{workers[1]}", "--key-file", str(key)]
        server = stack.enter_context(running(command, folder / "log"))
        yield server.process.pid, Target(server.address, HOSTILE_KEY, "m", workers)


@dataclass
class Memory:
    """Memory of the front end, with its children where it is a guide: samples by time, in MiB."""

    pid: int
    has_children: bool
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    def watch(self, seconds: float, until_rss: float = 0.0) -> float | None:
        """Take a sample several times a second. until_rss: end early when RSS is no more than that. Returns after how
        long it was, or None."""
        started = time.monotonic()
        while (now := time.monotonic()) < started + seconds:
            self.samples.append((now, self.now()))
            if self.samples[-1][1]["rss"] <= until_rss:
                return now - started
            time.sleep(SAMPLE_S)
        return None

    def settle(self, most_s: float) -> None:
        """Wait until RSS stands still, at most ``most_s`` seconds. The samples of that time are not kept."""
        started, rss = time.monotonic(), 0.0
        while (now := self.now()["rss"]) > rss * SETTLED and time.monotonic() < started + most_s:
            rss = now
            time.sleep(min(SETTLED_S, most_s))

    def now(self) -> dict[str, float]:
        """One sample."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split() if self.has_children else ()
        found = memory_of(self.pid)
        for child in children:
            more = memory_of(int(child))
            found = {kind: found[kind] + more[kind] for kind in found}
        return found


@dataclass
class Course:
    """When what was: bounds in seconds of the monotonic clock. back_s: after how long RSS was back (None: not)."""

    attacks: list[tuple[float, float]] = field(default_factory=list)
    calms: list[tuple[float, float]] = field(default_factory=list)
    fates: Counter[str] = field(default_factory=Counter)
    cores: float = 0.0
    back_s: float | None = None

    def split(self, waits: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
        """The waits (end, length) of the calm, and those during which an attack was on."""
        calm = [
            length for end, length in waits if any(start <= end - length and end < over for start, over in self.calms)
        ]
        attacked = [
            length for end, length in waits if any(start < end and end - length < over for start, over in self.attacks)
        ]
        return calm, attacked


def follow_course(options: argparse.Namespace, attacker: Connection, memory: Memory) -> Course:
    """Calm, attack, calm, attack, calm."""
    course = Course()

    def calm() -> None:
        started = time.monotonic()
        memory.watch(options.seconds / 2)
        course.calms.append((started, time.monotonic()))

    calm()
    before = memory.samples[-1][1]["rss"]
    for number in range(NUM_ATTACKS):
        attacker.send("now")
        started = time.monotonic()
        memory.watch(options.seconds)
        fates, used = attacker.recv() if attacker.poll(60) else (Counter({"the attacker did not end": 1}), 0.0)
        course.attacks.append((started, time.monotonic()))
        course.fates += fates
        course.cores = max(course.cores, used)
        if number + 1 == NUM_ATTACKS:
            course.back_s = memory.watch(options.memory_seconds, before * BACK)
        memory.watch(REST_S)
        calm()
    return course


class Attacked:
    """The server that meets the attacks, and a fresh one where that is of no more use."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._stack = ExitStack()
        self._kept: tuple[int, Target] | None = None
        self._has_workers = False

    def server(self, attack: Attack) -> tuple[bool, int, Target]:
        """Whether it is a fresh one, the process id of its front end, and where to attack it."""
        is_fresh = self._kept is None or self._has_workers != attack.has_workers
        if is_fresh:
            self.stop()
            self._has_workers = attack.has_workers
            self._kept = self._stack.enter_context(served(self._options, attack.has_workers))
        assert self._kept is not None
        return is_fresh, *self._kept

    def stop(self) -> None:
        """End it, if there is one: the next attack meets a fresh one."""
        self._stack.close()
        self._kept = None

    def measure(self, attack: Attack) -> dict[str, Any]:
        """One attack: a row, with what is not for the table under "detail"."""
        options, context, pipes = self._options, get_context("spawn"), []
        is_fresh, pid, target = self.server(attack)
        for function, given in (
            (streams_process, (target.address, "m", options.server)),
            (attacker_process, (attack.name, target, options.share, options.seconds)),
        ):
            ours, theirs = context.Pipe()
            context.Process(target=function, args=(theirs, *given), daemon=True).start()
            pipes.append(ours)
        streams, attacker = pipes
        attacker.recv()
        memory = Memory(pid, options.server == "guide")
        if is_fresh:
            memory.settle(options.warm_up)
        else:
            time.sleep(WARM_S)
        course = follow_course(options, attacker, memory)
        attacker.send("over")
        streams.send("over")
        felt = streams.recv() if streams.poll(120) else Felt(failed=[(time.monotonic(), "the streams did not end")])
        if course.back_s is None:
            self.stop()
        return row_of(attack, options.server, felt, course, memory.samples)


def row_of(
    attack: Attack, server: Server, felt: Felt, course: Course, memory: Sequence[tuple[float, dict[str, float]]]
) -> dict[str, Any]:
    """A row of the table. memory: samples by time."""
    row: dict[str, Any] = {"attack": attack.name}
    for name, waits in (("gap", felt.gaps), ("TTFT", felt.firsts)):
        calm, attacked = course.split(waits)
        for phase, values in (("calm", calm), ("attack", attacked)):
            row |= {f"{name} p{percent} {phase} ms": in_ms(percentile(values, percent)) for percent in (50, 99)}
            row[f"{name} max {phase} ms"] = in_ms(max(values, default=None))
            row[f"{name}s {phase}"] = len(values)
        row[f"{name} p99 x"] = ratio(row[f"{name} p99 attack ms"], row[f"{name} p99 calm ms"])
    began = course.attacks[0][0]
    for kind in ("rss", "pss"):
        row[f"{kind} before MiB"] = round([sample[kind] for at, sample in memory if at < began][-1])
        row[f"{kind} most MiB"] = round(max(sample[kind] for at, sample in memory if at >= began))
        row[f"{kind} at end MiB"] = round(memory[-1][1][kind])
    row["rss back s"] = None if course.back_s is None else round(course.back_s, 1)
    wrong_ends = attack.wrong_ends(course.fates.items(), server)
    row |= {"streams": felt.num_complete, "failed": len(felt.failed), "wrong": len(felt.wrong)}
    row |= {"calls": course.fates.total(), "otherwise": wrong_ends.total(), "attacker cores": round(course.cores, 2)}
    failures = [said for _, said in (*felt.failed, *felt.wrong)][:5]
    return row | {"detail": {"fates": dict(course.fates), "otherwise": dict(wrong_ends), "failures": failures}}


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that ``percent`` of all do not exceed; None of none."""
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
    *("attack", "gap p99 calm ms", "gap p99 attack ms", "gap p99 x", "gap max attack ms"),
    *("TTFT p99 calm ms", "TTFT p99 attack ms", "TTFT p99 x", "TTFT max attack ms"),
    *("rss before MiB", "rss most MiB", "rss at end MiB", "rss back s"),
    *("failed", "wrong", "calls", "otherwise"),
)


def chosen(options: argparse.Namespace) -> list[Attack]:
    """The attacks that were asked for and that this server is open to."""
    return [
        attack for attack in ATTACKS if options.server in attack.of and attack.name in (options.only or [attack.name])
    ]


def read_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of an earlier run that is gone on with. Raises ValueError where it was run with other options."""
    path = Path(options.json)
    if not (options.resume and path.exists()):
        return []
    record = json.loads(path.read_text())
    for name, value in settings_of(options).items():
        if record.get(name) != value:
            raise ValueError(f"{path} was made with {name} {record.get(name)}, and this is to be {value}")
    rows: list[dict[str, Any]] = record["rows"]
    return rows


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What the rows of one file have in common."""
    model = options.model.name if options.model else "bundled"
    return {"server": options.server, "model": model, "seconds": options.seconds, "share": options.share}


def options_of() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="instead of the bundled one")
    parser.add_argument("--only", nargs="+", choices=[attack.name for attack in ATTACKS], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="the names of the attacks, and nothing else")
    kinds = parser.add_mutually_exclusive_group()
    for kind, said in (("front", "a front before a make-believe engine"), ("guide", "a guide")):
        kinds.add_argument(f"--{kind}", dest="server", action="store_const", const=kind, help=f"attack {said}")
    parser.set_defaults(server="serve")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack; each calm takes half of it")
    parser.add_argument("--warm-up", type=float, default=120.0, help="seconds after which RSS need not stand still")
    parser.add_argument("--memory-seconds", type=float, default=MEMORY_S, help="after which memory must be back")
    parser.add_argument("--share", type=float, default=0.2, help="of a core that the attacker takes at most")
    parser.add_argument("--json", help="the file of the rows")
    parser.add_argument("--resume", action="store_true", help="leave out the attacks that the file has")
    parser.add_argument("--for", dest="for_s", type=float, default=math.inf, help="seconds after which none begins")
    options = parser.parse_args()
    if options.resume and not options.json:
        parser.error("--resume needs --json")
    if options.json and os.sep not in options.json:
        options.json = str(RESULTS / options.json)
    return options


def main() -> None:
    """Measure, print, write."""
    options, started = options_of(), time.monotonic()
    attacks = chosen(options)
    if options.list:
        print("\n".join(attack.name for attack in attacks))
        return
    raise_descriptor_limit()
    rows = read_rows(options) if options.json else []
    done = {row["attack"] for row in rows}
    left = [attack for attack in attacks if attack.name not in done]
    attacked = Attacked(options)
    for number, attack in enumerate(left, start=1):
        if time.monotonic() - started > options.for_s:
            print(f"{len(left) - number + 1} attacks are left: the same command with --resume goes on", file=sys.stderr)
            break
        print(f"[{number}/{len(left)}] {attack.name}", file=sys.stderr, flush=True)
        row = attacked.measure(attack)
        rows.append(row)
        print("    " + ", ".join(f"{name} {row[name]}" for name in SHOWN[1:]), file=sys.stderr, flush=True)
        print(
            "    " + ", ".join(f"{kind}: {row['detail'][kind]}" for kind in row["detail"]), file=sys.stderr, flush=True
        )
        if options.json:
            write_record("hostile", rows, Path(options.json), **settings_of(options))
    attacked.stop()
    report("hostile", [{name: row[name] for name in SHOWN} for row in rows])


if __name__ == "__main__":
    main()
