"""Live blows under load: kills, stops, partitions, full disks, lost memory, wrong clocks, dead front ends.

    python benchmarks/blows.py [--fleet local|joined] [--blows 500] [--seed 1] [--only KIND,KIND] [--rows rows.jsonl]
                               [--resume] [--within SECONDS] [--json blows.json]
    python benchmarks/blows.py --sum rows.jsonl,more.jsonl --json blows.json

A prefill worker and a decode worker serve mixed requests (blow_load.py): of this host with one memory pool and all
stores on a small disk of their own (local), or joined over relays, KV included (joined). One blow falls after another;
``--list`` says what each is, and what is right while it lasts. Every answer is compared with that of a quiet run of the
same server. Every 20 blows the load pauses: then no request is open, no block in use, every worker is up, and the front
end has no more files open and not much more memory than at the first such pause.

A row is written for each blow, so that a run that was ended goes on with ``--resume`` (each blow is drawn from the seed
and its number). The disk is a tmpfs in a namespace of its own, filled for as long as the blow lasts: no root is needed.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from blow_load import Allowed, Client, Outcome, Question, questions
from chaos import READY_TIMEOUT_S, ServerProcess
from common import machine, report
from loopback import memory_of
from servers import free_port

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.serving import tool_model  # noqa: E402
from tests.serving.stalling_relay import StallingRelay  # noqa: E402

CHECK_EVERY = 20
NUM_CLIENTS = 5
HEARTBEAT_S = 3.0
DISK_BYTES = 96 * 2**20
GRACE_S = 8.0  # after a blow, in which a request may still end as the blow allows
SPARE_DESCRIPTORS = 6  # of the front end: connections of the check itself, and files that come and go
SETTLE_S = 90.0
DOUBLE = 0.15  # of the blows fall before the last is over
LAUNCH = str(Path(__file__).with_name("blow_launch.py"))
MOUNT = 'mount -t tmpfs -o size="$1",mode=700 tmpfs "$0" && echo mounted && exec sleep infinity'
WORKERS = ("prefill", "decode")


class Disk:
    """A small file system that its servers have for themselves, and that can be full."""

    def __init__(self, at: Path) -> None:
        at.mkdir()
        self.at = at
        command = ["unshare", "-rm", "sh", "-c", MOUNT, str(at), str(DISK_BYTES)]
        self._keeper = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._keeper.stdout is not None and self._keeper.stderr is not None
        if self._keeper.stdout.readline() != "mounted\n":
            raise RuntimeError(f"no file system of its own: {self._keeper.stderr.read()}")
        self.seen = Path(f"/proc/{self._keeper.pid}/root{at}")  # from outside

    @property
    def enter(self) -> list[str]:
        """The words before a command that sees it."""
        return ["nsenter", "-t", str(self._keeper.pid), "-U", "-m", "--preserve-credentials", "--"]

    def fill(self, spare_bytes: int) -> None:
        """Leave so much."""
        with (self.seen / "ballast").open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(2**18))
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            file.truncate(max(0, file.tell() - spare_bytes))

    def free(self) -> None:
        """Give the room back."""
        (self.seen / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        """It is gone."""
        self._keeper.kill()
        self._keeper.communicate()


class Fleet:
    """A front end and two workers, which can be struck. ``port`` stays when the front end is started again."""

    def __init__(self, folder: Path, model: Path, *, is_joined: bool) -> None:
        self.folder, self.model, self.is_joined = folder, model, is_joined
        self.port, self.door = free_port(), free_port()
        self.disk = Disk(folder / "disk")
        self.relays: dict[str, StallingRelay] = {}
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.front: subprocess.Popen[bytes] | None = None
        self.is_struck = False  # the front end, so that its end is no surprise
        self.num_starts = 0
        self._kv_ports = {role: free_port() for role in WORKERS}
        self._clock = folder / "clock"
        self._key = folder / "key"
        self.set_clock(0.0)
        self._key.write_text(secrets.token_hex(32))
        self._key.chmod(0o600)

    async def open(self) -> None:
        """Start everything, and wait until it serves."""
        if self.is_joined:
            for role in WORKERS:
                self.relays[role] = await StallingRelay(self.door).__aenter__()
                self.relays[f"KV to {role}"] = await StallingRelay(self._kv_ports[role]).__aenter__()
            for role in WORKERS:
                self.start_agent(role)
        self.start_front()
        await self.until_it_serves()

    async def close(self) -> list[int]:
        """End everything. Returns the processes that were left over."""
        ours = [process.pid for process in self.workers()]
        for process in filter(None, (self.front, *self.agents.values())):
            process.terminate()
        for process in filter(None, (self.front, *self.agents.values())):
            try:
                await asyncio.to_thread(process.wait, 45)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for relay in self.relays.values():
            await relay.__aexit__()
        await asyncio.sleep(0.5)
        left = [pid for pid in ours if psutil.pid_exists(pid)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.disk.close()
        return left

    def start_front(self) -> None:
        """A front end on the port of the last one, with what that has stored."""
        at, self.is_struck = self.disk.at, False
        for old in self.disk.seen.glob("record-*"):
            old.unlink()
        stores = [
            "--responses", f"{at}/responses.sqlite", "--max-responses", "8MiB", "--survive-restart", f"{at}/streams",
            "--batch-dir", f"{at}/batches", "--batch-gb", "0.01", "--batch-lines-beside", "2",
            "--record", f"{at}/record-{self.num_starts}.jsonl", "--access-log", f"{at}/access-{self.num_starts}.jsonl",
        ]  # fmt: skip
        pools = ["--prefill", "1", "--decode", "1", "--both", "0", "--kv-host-gb", "0.02", "--threads", "1"]
        pools += ["--kv-disk", f"{at}/kv", "--kv-disk-gb", "0.02"]
        if self.is_joined:
            pools = ["--both", "0", "--listen-workers", f"127.0.0.1:{self.door}", "--key-file", str(self._key)]
        serve = ["serve", "--model", str(self.model), "--port", str(self.port), *pools, *stores]
        serve += ["--disaggregate", "always", "--heartbeat-timeout", f"{HEARTBEAT_S:g}", "--kv-cache-memory", "32MiB"]
        self.num_starts += 1
        self.front = self._start("front", [*self.disk.enter, *self._launch(), *serve])

    def start_agent(self, role: str) -> None:
        """One that joins, over its relay."""
        join = ["worker", "--join", f"127.0.0.1:{self.relays[role].port}", "--key-file", str(self._key), "--role", role]
        join += ["--model", str(self.model), "--kv-listen", f"127.0.0.1:{self._kv_ports[role]}", "--threads", "1"]
        self.agents[role] = self._start(role, [*self._launch(), *join, "--kv-cache-memory", "32MiB"])

    def _launch(self) -> list[str]:
        relays = {str(port): self.relays[f"KV to {role}"].port for role, port in self._kv_ports.items() if self.relays}
        return [sys.executable, LAUNCH, str(self._clock), json.dumps(relays)]

    def _start(self, name: str, command: list[str]) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    # -- what it is ---------------------------------------------------------------------------------------------------

    def workers(self) -> list[psutil.Process]:
        """The processes of its workers."""
        parents = self.agents.values() if self.is_joined else [self.front]
        found = []
        for parent in filter(None, parents):
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(parent.pid).children():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        found += [child] * any("diptych.serving.worker" in word for word in child.cmdline())
        return found

    def metrics(self) -> str:
        """The text of /metrics. Raises OSError."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=20) as reply:
            return str(reply.read().decode())

    def roles(self) -> dict[str, list[bool]]:
        """Which workers of each role serve. Raises OSError."""
        return ServerProcess.roles(self)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def set_clock(self, error_s: float) -> None:
        """Set the wall clock of its processes wrong."""
        with self._clock.open("r+b" if self._clock.exists() else "wb") as file:  # it is mapped: never cut it
            file.write(struct.pack("d", error_s))

    async def until_it_serves(self) -> None:
        """Wait until each role has a worker. Raises RuntimeError when that takes too long, or the front end ended."""
        end = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < end:
            if self.front is not None and (status := self.front.poll()) is not None:
                if not self.is_struck:
                    raise RuntimeError(f"the front end ended with status {status}")
                self.start_front()
            with contextlib.suppress(OSError):
                roles = await asyncio.to_thread(self.roles)
                if set(roles) >= set(WORKERS) and all(any(up) for up in roles.values()):
                    return
            await asyncio.sleep(0.1)
        raise RuntimeError("it does not serve again")

    def busy(self) -> dict[str, float]:
        """What is under way; nothing when it is idle. Raises OSError."""
        found: Counter[str] = Counter()
        for line in self.metrics().splitlines():
            name, _, value = line.rpartition(" ")
            name = name.split("{")[0]
            if name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
                found[name] += float(value)
        found["workers that are gone"] = sum(not up for ups in self.roles().values() for up in ups)
        return {name: value for name, value in found.items() if value}

    def descriptors(self) -> int:
        """Files that the front end has open."""
        assert self.front is not None
        return len(os.listdir(f"/proc/{self.front.pid}/fd"))

    def rss_mib(self) -> float:
        """Memory of the front end."""
        assert self.front is not None
        return memory_of(self.front.pid)["rss"]


# -- the blows --------------------------------------------------------------------------------------------------------

Strike = Callable[[Fleet, random.Random], Awaitable[str]]
# Of a request that several workers died under, and of one that found no worker.
WORKERS_LOST = frozenset({"poison_request", "answer_lost", "no_worker", "worker_lost"})
FRONT_LOST = WORKERS_LOST | {"core_failed", "loading", "draining"}
NO_MEMORY = FRONT_LOST | {"None"}  # the 500 of a request whose own allocations fail


@dataclass(frozen=True)
class Kind:
    """A blow. right: what must be seen while it lasts. weight: how often it is drawn."""

    name: str
    fleets: tuple[str, ...]
    weight: int
    allowed: Allowed
    right: str
    strike: Strike


def lasting(rng: random.Random, longest_s: float) -> float:
    """Seconds: mostly short, else long enough that the worker is given up."""
    return rng.uniform(0.05, 1.0) if rng.random() < 0.6 else rng.uniform(HEARTBEAT_S, longest_s)


async def kill(fleet: Fleet, rng: random.Random) -> str:
    """A worker process ends."""
    workers = fleet.workers()
    if not workers:
        return "nobody there"
    with contextlib.suppress(psutil.NoSuchProcess):
        rng.choice(workers).kill()
    return "SIGKILL"


async def stop(fleet: Fleet, rng: random.Random) -> str:
    """A worker process stands still."""
    workers, seconds = fleet.workers(), lasting(rng, 5.0)
    if not workers:
        return "nobody there"
    victim = rng.choice(workers)
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.suspend()
        await asyncio.sleep(seconds)
        victim.resume()
    return f"{seconds:.2f} s"


async def kill_agent(fleet: Fleet, rng: random.Random) -> str:
    """A whole host is gone, and comes again."""
    role = rng.choice(WORKERS)
    fleet.agents[role].kill()
    fleet.agents[role].wait()
    await asyncio.sleep(rng.uniform(0.0, 1.0))
    fleet.start_agent(role)
    return role


async def cut(fleet: Fleet, rng: random.Random, *, kv: bool) -> str:
    """Nothing arrives in one direction or both; or all connections end."""
    relay_name = rng.choice([name for name in sorted(fleet.relays) if name.startswith("KV") == kv])
    relay = fleet.relays[relay_name]
    way, seconds = rng.choice(("up", "down", "both", "ended")), lasting(rng, 5.0)
    if way == "ended":
        relay.cut()
        return f"{relay_name}, ended"
    if way in ("up", "both"):
        relay.up.clear()
    if way in ("down", "both"):
        relay.down.clear()
    await asyncio.sleep(seconds)
    relay.heal()
    return f"{relay_name}, {way}, {seconds:.2f} s"


async def partition(fleet: Fleet, rng: random.Random) -> str:
    """Between the front end and a worker."""
    return await cut(fleet, rng, kv=False)


async def kv_partition(fleet: Fleet, rng: random.Random) -> str:
    """Between two workers."""
    return await cut(fleet, rng, kv=True)


async def full_disk(fleet: Fleet, rng: random.Random) -> str:
    """Nothing can be written, or only little."""
    spare, seconds = rng.choice((0, 4096, 65536)), rng.uniform(0.3, 3.0)
    await asyncio.to_thread(fleet.disk.fill, spare)
    await asyncio.sleep(seconds)
    fleet.disk.free()
    return f"{spare} bytes left, {seconds:.2f} s"


async def without_memory(process: psutil.Process, rng: random.Random) -> str:
    """Allocations of a process fail beyond what it has."""
    spare, seconds = rng.choice((0, 2**18, 2**22)), rng.uniform(0.3, 2.0)
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_AS)
        resource.prlimit(process.pid, resource.RLIMIT_AS, (process.memory_info().vms + spare, hard))
        await asyncio.sleep(seconds)
        resource.prlimit(process.pid, resource.RLIMIT_AS, (hard, hard))
    return f"{spare} bytes left, {seconds:.2f} s"


async def worker_memory(fleet: Fleet, rng: random.Random) -> str:
    """Take memory from a worker."""
    workers = fleet.workers()
    return await without_memory(rng.choice(workers), rng) if workers else "nobody there"


async def front_memory(fleet: Fleet, rng: random.Random) -> str:
    """Take memory from the front end."""
    assert fleet.front is not None
    fleet.is_struck = True  # up to the next front end: what failed here may end it later
    said = await without_memory(psutil.Process(fleet.front.pid), rng)
    await asyncio.sleep(0.5)
    return said


async def wrong_clock(fleet: Fleet, rng: random.Random) -> str:
    """The wall clock jumps, and back."""
    error_s = rng.choice((-1, 1)) * rng.choice((1.0, 60.0, 3600.0, 40000.0))
    fleet.set_clock(error_s)
    await asyncio.sleep(rng.uniform(0.2, 2.0))
    fleet.set_clock(0.0)
    return f"{error_s:g} s"


async def kill_front(fleet: Fleet, rng: random.Random) -> str:
    """The front end ends, at once or by a request to, and is started again at its port."""
    assert fleet.front is not None
    fleet.is_struck = True
    by = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
    fleet.front.send_signal(by)
    if by is signal.SIGTERM:
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        fleet.front.send_signal(by)  # at once
    await asyncio.to_thread(fleet.front.wait, 60)
    await asyncio.sleep(rng.uniform(0.0, 0.5))
    fleet.start_front()
    return by.name


BOTH, LOCAL, JOINED = ("local", "joined"), ("local",), ("joined",)
WHOLE = "every request is answered whole, with the quiet run's tokens; poison_request where two workers died under it"
KINDS = (
    Kind("kill", BOTH, 3, Allowed(WORKERS_LOST), WHOLE, kill),
    Kind("stop", BOTH, 4, Allowed(WORKERS_LOST), WHOLE, stop),
    Kind("kill host", JOINED, 2, Allowed(WORKERS_LOST), WHOLE, kill_agent),
    Kind("partition", JOINED, 6, Allowed(WORKERS_LOST), WHOLE, partition),
    Kind("KV partition", JOINED, 5, Allowed(), "every request is answered whole, with the same tokens", kv_partition),
    Kind(
        "full disk", BOTH, 6, Allowed(frozenset({"disk_failed"}), unstored=True),
        "answers are whole; what was not stored is said to be; uploads are 503 disk_failed; batches wait", full_disk,
    ),
    Kind("lost memory", BOTH, 4, Allowed(WORKERS_LOST), WHOLE, worker_memory),
    Kind("wrong clock", BOTH, 4, Allowed(), "nothing is seen of it", wrong_clock),
    Kind(
        "kill front", BOTH, 2, Allowed(FRONT_LOST, broken=True),
        "connections end; recorded streams go on, what was stored is there, batches complete", kill_front,
    ),
    Kind(
        "front's memory", BOTH, 1, Allowed(NO_MEMORY, broken=True, unstored=True),
        "it goes on, or ends loudly (500 core_failed, status 1; SIGABRT in a library), and is started again",
        front_memory,
    ),
)  # fmt: skip
BY_NAME = {kind.name: kind for kind in KINDS}


@dataclass
class Befallen:
    """When something befell the server, and what it allows. over: seconds, inf while it lasts."""

    allowed: Allowed
    over: float = float("inf")


@dataclass
class Run:
    """Blows against one fleet, with their rows."""

    fleet: Fleet
    asked: list[Question]
    kinds: list[Kind]
    seed: int
    write: Callable[[dict[str, Any]], None]
    befallen: list[Befallen] = field(default_factory=list)
    base: dict[str, float] = field(default_factory=dict)
    outcome: Outcome = field(default_factory=Outcome)
    clients: list[Client] = field(default_factory=list)
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    number: int = 0  # of the next blow

    def allows(self, begun: float) -> Allowed:
        """What may become of a request that began then."""
        found = Allowed()
        for each in self.befallen:
            if each.over + GRACE_S >= begun:
                found |= each.allowed
        return found

    def begin_load(self) -> None:
        """Requests of all kinds, until ``end_load``."""
        self.over = asyncio.Event()
        client = Client(self.fleet.port, self.allows)
        client.outcome = self.outcome
        self.clients = [client]
        works = [client.load(self.asked, random.Random(secrets.randbits(32)), self.over) for _ in range(NUM_CLIENTS)]
        self.tasks = [asyncio.create_task(work) for work in (*works, client.batches(self.asked, self.over, 5.0))]

    async def end_load(self) -> None:
        """Let every request end."""
        self.over.set()
        await asyncio.gather(*self.tasks)

    async def blow(self) -> None:
        """The next blow, and its row."""
        number = self.number
        rng = random.Random(f"{self.seed} {number}")
        kind = rng.choices(self.kinds, [kind.weight for kind in self.kinds])[0]
        befallen = Befallen(kind.allowed)
        self.befallen = [each for each in self.befallen if each.over > time.monotonic() - 600] + [befallen]
        begun = time.monotonic()
        detail = await kind.strike(self.fleet, rng)
        if rng.random() >= DOUBLE:
            await self.fleet.until_it_serves()
            await asyncio.sleep(rng.uniform(0.0, 0.5))
        befallen.over = time.monotonic()
        self.number += 1
        self.add_row(
            {"blow": number, "kind": kind.name, "detail": detail, "seconds": round(time.monotonic() - begun, 2)}
        )

    def add_row(self, row: dict[str, Any]) -> None:
        """With what became of requests since the last."""
        found, fresh = self.outcome, Outcome()
        self.outcome = fresh
        for client in self.clients:
            client.outcome = fresh
        seen = {"ends": dict(found.counts), "pause_s": round(found.pause_s, 2), "silence_s": round(found.silence_s, 2)}
        self.write({**row, **seen, "faults": found.faults})

    async def check(self) -> None:
        """The load pauses: nothing is left."""
        await self.end_load()
        await self.fleet.until_it_serves()
        end = time.monotonic() + SETTLE_S
        while (busy := await asyncio.to_thread(self.fleet.busy)) and time.monotonic() < end:
            await asyncio.sleep(0.2)
        found = {"descriptors": self.fleet.descriptors(), "rss_mib": round(self.fleet.rss_mib(), 1)}
        starts = self.fleet.num_starts
        if self.base.get("starts") != starts:
            self.base = {**found, "starts": starts}
        if busy:
            self.outcome.fault(f"left behind: {busy}")
        if found["descriptors"] > self.base["descriptors"] + SPARE_DESCRIPTORS:
            self.outcome.fault(f"{found['descriptors']} files are open, {self.base['descriptors']:.0f} before")
        self.add_row({"check": self.number, **found, "starts": starts})
        self.begin_load()


async def strike_all(options: argparse.Namespace, first: int, write: Callable[[dict[str, Any]], None]) -> None:
    """Blows from ``first`` on; a fleet that does not come back is a fault, and another is started."""
    kinds = [BY_NAME[name] for name in options.only] if options.only else list(KINDS)
    kinds = [kind for kind in kinds if options.fleet in kind.fleets]
    number, end = first, time.monotonic() + options.within
    while number < options.blows and time.monotonic() < end:
        with tempfile.TemporaryDirectory(prefix="blows-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            model = tool_model.tool_model(folder / "model")
            fleet = Fleet(folder, model, is_joined=options.fleet == "joined")
            run = Run(fleet, questions(options.seed), kinds, options.seed, write, number=number)
            try:
                await _strike_one(run, options.blows, end)
            except RuntimeError as error:
                run.outcome.fault(str(error))
                run.add_row({"blow": run.number, "kind": "fleet"})
                run.number += 1
            finally:
                number = run.number
                left = await fleet.close()
                if left:
                    write({"check": number, "faults": [f"{len(left)} processes were left over"], "ends": {}})
                if options.logs:
                    for log in folder.glob("*.log"):
                        shutil.copy(log, Path(options.logs) / f"{options.fleet}-{options.seed}-{number}-{log.name}")


async def _strike_one(run: Run, num_blows: int, end: float) -> None:
    """Strike one fleet, until ``num_blows`` have fallen or the time ``end`` has come."""
    await run.fleet.open()
    await Client(run.fleet.port, run.allows).learn(run.asked)
    run.begin_load()
    try:
        await run.check()
        while run.number < num_blows and time.monotonic() < end:
            await run.blow()
            if run.number % CHECK_EVERY == 0 or run.number == num_blows or time.monotonic() >= end:
                await run.check()
    finally:
        run.over.set()
        _, late = await asyncio.wait(run.tasks, timeout=30)
        for task in late:
            task.cancel()


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; one that was cut at the end is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def summary(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """By kind of blow, and all together. Ends that fell behind a blow count for it."""
    blows = [row for row in rows if "blow" in row]
    for name in (*sorted({row["kind"] for row in blows}), "all"):
        some = [row for row in blows if name in (row["kind"], "all")]
        some += [row for row in rows if "check" in row and name == "all"]
        ends: Counter[str] = sum((Counter(row["ends"]) for row in some), Counter())
        yield {
            "kind": name,
            "blows": sum("blow" in row for row in some),
            "right": ends["right"],
            "cancelled": ends["cancelled"],
            "resumed": ends["resumed"],
            "broken": ends["broken"],
            "refused": sum(count for end, count in ends.items() if end.startswith("refused")),
            "not stored": ends["not stored"],
            "wrong": ends["wrong"],
            "stuck": ends["stuck"],
            "faults": sum(len(row["faults"]) for row in some),
            "longest pause s": max((row.get("pause_s", 0.0) for row in some), default=0.0),
            "longest silence s": max((row.get("silence_s", 0.0) for row in some), default=0.0),
        }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleet", choices=("local", "joined"), default="local")
    parser.add_argument("--blows", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="kinds of blows, with commas")
    parser.add_argument("--rows", type=Path, default=Path("blows.jsonl"))
    parser.add_argument("--resume", action="store_true", help="go on behind the last blow in --rows")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds, then end with what there is")
    parser.add_argument("--logs", help="a folder for the logs of the fleets")
    parser.add_argument("--sum", default="", help="only report these files of rows, with commas")
    parser.add_argument("--list", action="store_true", help="say what each blow is, and what is right")
    parser.add_argument("--json")
    options = parser.parse_args()
    if unknown := sorted(set(options.only) - set(BY_NAME)):
        parser.error(f"no blow {unknown[0]!r}; one of {', '.join(BY_NAME)}")
    return options


def main() -> None:
    """Strike, print, write."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the fleet ends with us
    options = parse()
    if options.list:
        for kind in KINDS:
            print(f"{kind.name} ({', '.join(kind.fleets)}): {kind.strike.__doc__} Right: {kind.right}.")
        return
    paths = [Path(name) for name in options.sum.split(",")] if options.sum else [options.rows]
    if not options.sum:
        done = rows_of(options.rows) if options.resume else []
        first = max((row["blow"] + 1 for row in done if "blow" in row), default=0)
        with options.rows.open("a" if options.resume else "w") as file:

            def write(row: dict[str, Any]) -> None:
                file.write(json.dumps({"fleet": options.fleet, "seed": options.seed, **row}) + "\n")
                file.flush()
                for fault in row["faults"]:
                    print(f"\n{row.get('kind', 'check')} {row.get('blow', row.get('check'))}: {fault}", file=sys.stderr)
                print(f"\r{row.get('blow', row.get('check'))} of {options.blows} blows", end="", file=sys.stderr)

            asyncio.run(strike_all(options, first, write))
        print(file=sys.stderr)
    rows = [row for path in paths for row in rows_of(path)]
    found = list(summary(rows))
    faults = [fault for row in rows for fault in row["faults"]]
    report("blows", found, options.json, faults=faults[:50], runs=len(paths), processor=machine()["processor"])
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
