"""Kill, stop, change and disconnect at random under load, and compare every answer with that of an undisturbed server.

    python benchmarks/chaos.py MODEL_DIR [--prefill 1 --decode 1 --both 0] [--transfer auto] [--faults 200]
                               [--kinds kill,kill,stop] [--seed 1] [--json chaos.json]

First an undisturbed run writes down the answers of a set of prompts, greedy and sampled with seeds. Then the same
prompts are asked again and again of a disaggregated server while its workers are killed (SIGKILL), stopped for a while
(SIGSTOP, SIGCONT; longer than the heartbeat timeout now and then), and clients hang up in the middle of answers. With
``role`` and ``drain`` among the kinds, workers get other roles, or are drained and used again after a while. Every
answer that is read to its end must be, token for token, the undisturbed one. At the end: no request open, no KV block
in use, every worker ready, and after the server's exit no process left.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import report

READY_TIMEOUT_S = 120.0
# A server with shorter pauses between restarts: at the pace of these faults it would else be down most of the time.
LAUNCH = """
from diptych.cli.main import main
from diptych.serving.fleet import supervisor
supervisor.LONGEST_PAUSE_S = 1.0
main()
"""


@dataclass(frozen=True)
class Plan:
    """What to do to whom. stop_s: how long a SIGSTOP lasts at most. double: share of the faults that follow at once;
    the others wait until each role has a worker again."""

    num_faults: int
    num_clients: int = 6
    mean_pause_s: float = 1.0
    double: float = 0.2
    stop_s: float = 4.0
    seed: int = 1
    kinds: tuple[str, ...] = ("kill", "kill", "stop")


@dataclass
class Outcome:
    """What happened to the answers."""

    num_complete: int = 0
    num_hung_up: int = 0
    num_wrong: int = 0
    num_refused: int = 0
    wrong: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    pauses: list[float] = field(default_factory=list)  # longest gap of each complete answer, seconds


@dataclass
class Case:
    """One request body and its undisturbed answer."""

    body: dict[str, Any]
    token_ids: list[int] = field(default_factory=list)


class ServerProcess:
    """A `diptych serve` on a port of its own choosing. As a context it ends with its block, however that ends."""

    def __init__(self, arguments: list[str]) -> None:
        command = [sys.executable, "-c", LAUNCH, "serve", "--port", "0", *arguments]
        self.log = Path(os.environ.get("TMPDIR", "/tmp")) / f"chaos-{os.getpid()}-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            self.port = self._find_port()
            self.wait_ready()
        except BaseException:
            self.process.kill()
            raise

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _find_port(self) -> int:
        inodes: set[str] = set()
        end = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended: {self.log.read_text()[-2000:]}")
            for entry in Path(f"/proc/{self.process.pid}/fd").glob("*"):
                try:
                    target = os.readlink(entry)
                except OSError:
                    continue
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
            for line in Path(f"/proc/{self.process.pid}/net/tcp").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    return int(fields[1].split(":")[1], 16)
            time.sleep(0.05)
        raise RuntimeError("the server does not listen")

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Until every worker is ready."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended: {self.log.read_text()[-2000:]}")
            try:
                urllib.request.urlopen(self.url + "/ready", timeout=2).close()
                return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError("the server is not ready")

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON of a GET, or of a POST of ``body``; None when the server refuses it with 409."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            if error.code != 409:
                raise
            return None

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics; those of one name are added up."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as reply:
            text = reply.read().decode()
        values: Counter[str] = Counter()
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                values[name.split("{")[0]] += float(value)
        return dict(values)

    def roles(self) -> dict[str, list[bool]]:
        """Which workers of each role serve."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as reply:
            text = reply.read().decode()
        roles: dict[str, list[bool]] = {}
        for role, value in re.findall(r'^diptych:worker_up\{.*role="(\w+)".*\} (\S+)$', text, re.MULTILINE):
            roles.setdefault(role, []).append(float(value) > 0)
        return roles

    def workers(self) -> list[int]:
        """Process ids of the workers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(child) for child in children]

    def close(self) -> list[int]:
        """Stop it; returns the worker processes that outlived it (there must be none)."""
        workers = self.workers()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        time.sleep(0.3)
        return [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def make_cases(count: int, vocab: int, longest: int, seed: int) -> list[Case]:
    """Prompts of many lengths, some sharing prefixes; half greedy, half sampled with a seed."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, vocab) for _ in range(longest)]
    cases = []
    for number in range(count):
        length = rng.choice((5, 40, longest // 4, longest // 2, longest))
        start = rng.randrange(length + 1) if rng.random() < 0.5 else 0
        prompt = shared[:start] + [rng.randrange(3, vocab) for _ in range(length - start)]
        body = {"prompt": prompt, "max_tokens": rng.randrange(8, 64), "ignore_eos": True, "return_token_ids": True}
        body |= {"temperature": 0} if number % 2 else {"temperature": 0.8, "top_p": 0.9, "seed": number}
        cases.append(Case(body))
    return cases


async def ask(port: int, body: dict[str, Any], hang_up_after: int | None = None) -> tuple[list[int], float, str]:
    """Stream one answer: (token ids, longest gap between two tokens in seconds, error or "")."""
    payload = json.dumps({**body, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    tokens: list[int] = []
    gap, last = 0.0, time.monotonic()
    try:
        writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        status = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status.split(b"\r\n")[0]:
            return tokens, gap, (status.split(b"\r\n")[0] + await reader.read(500)).decode(errors="replace")
        while line := await reader.readline():
            if not line.startswith(b"data:"):
                continue
            now = time.monotonic()
            gap, last = max(gap, now - last) if tokens else 0.0, now
            data = line[5:].strip()
            if data == b"[DONE]":
                return tokens, gap, ""
            event = json.loads(data)
            if event.get("error"):
                return tokens, gap, str(event["error"])
            for choice in event.get("choices", ()):
                tokens += choice.get("token_ids") or []
            if hang_up_after is not None and len(tokens) >= hang_up_after:
                return tokens, gap, "hung up"
        return tokens, gap, "the stream broke off"
    finally:
        writer.close()


async def undisturbed(port: int, cases: list[Case]) -> None:
    """Fill in the answers."""
    for case in cases:
        case.token_ids, _, error = await ask(port, case.body)
        if error or len(case.token_ids) != case.body["max_tokens"]:
            raise RuntimeError(f"the undisturbed run failed: {error or len(case.token_ids)}")


async def client(
    port: int,
    cases: list[Case],
    rng: random.Random,
    over: asyncio.Event,
    outcome: Outcome,
    *,
    hangs_up: bool = True,
) -> None:
    """Ask random cases until it is over."""
    while not over.is_set():
        case = rng.choice(cases)
        hang_up = rng.randrange(0, case.body["max_tokens"]) if hangs_up and rng.random() < 0.2 else None
        tokens, gap, error = await ask(port, case.body, hang_up)
        expected = case.token_ids[: len(tokens)]
        if tokens != expected:
            outcome.num_wrong += 1
            outcome.wrong.append(f"{tokens} instead of {expected}"[:300])
        elif error == "hung up":
            outcome.num_hung_up += 1
        elif error:
            outcome.num_refused += 1
            outcome.wrong.append(error[:300])
        elif len(tokens) != len(case.token_ids):
            outcome.num_wrong += 1
            outcome.wrong.append(f"{len(tokens)} tokens of {len(case.token_ids)}")
        else:
            outcome.num_complete += 1
            outcome.pauses.append(gap)


async def until_every_role_is_there(server: ServerProcess) -> None:
    """Return when a request can be handed off."""
    end = time.monotonic() + READY_TIMEOUT_S
    while not all(any(up) for up in (await asyncio.to_thread(server.roles)).values()):
        if time.monotonic() > end:
            raise RuntimeError("the workers did not come back")
        await asyncio.sleep(0.1)


async def strike(server: ServerProcess, plan: Plan, rng: random.Random, outcome: Outcome) -> None:
    """One fault after another."""
    for number in range(plan.num_faults):
        if rng.random() >= plan.double:
            await until_every_role_is_there(server)
            await asyncio.sleep(rng.expovariate(1 / plan.mean_pause_s))
        kind = rng.choice(plan.kinds)
        if kind in ("role", "drain"):
            outcome.faults[kind] += await change_worker(server, kind, rng)
            _say(number, plan, outcome)
            continue
        workers = server.workers()
        if not workers:
            continue
        victim = rng.choice(workers)
        outcome.faults[kind] += 1
        try:
            if kind == "kill":
                os.kill(victim, signal.SIGKILL)
            else:
                os.kill(victim, signal.SIGSTOP)
                await asyncio.sleep(rng.uniform(0.05, plan.stop_s))
                os.kill(victim, signal.SIGCONT)
        except ProcessLookupError:
            pass
        _say(number, plan, outcome)
    print(file=sys.stderr)


def _say(number: int, plan: Plan, outcome: Outcome) -> None:
    print(f"\r{number + 1}/{plan.num_faults} faults, {outcome.num_complete} answers", end="", file=sys.stderr)


async def running_workers(server: ServerProcess) -> list[dict[str, Any]]:
    """The workers of a server, without those that were stopped for good, which it remembers."""
    workers = (await asyncio.to_thread(server.call, "/admin/workers"))["workers"]
    return [worker for worker in workers if worker["state"] != "stopped"]


async def change_worker(server: ServerProcess, kind: str, rng: random.Random) -> int:
    """Give a worker another role, or drain it for a while. Returns how many changes the server made: it refuses one
    that would leave no worker for a phase."""
    chosen = rng.choice(await running_workers(server))
    path = f"/admin/workers/{chosen['worker']}"
    if kind == "role":
        role = rng.choice([role for role in ("prefill", "decode", "both") if role != chosen["role"]])
        return int(await asyncio.to_thread(server.call, path, {"role": role}) is not None)
    if await asyncio.to_thread(server.call, path, {"drain": True}) is None:
        return 0
    await asyncio.sleep(rng.uniform(0.0, 0.5))
    await asyncio.to_thread(server.call, path, {"drain": False})
    return 1


async def chaos(server: ServerProcess, cases: list[Case], plan: Plan) -> Outcome:
    """The disturbed run."""
    outcome, over = Outcome(), asyncio.Event()
    clients = [
        asyncio.create_task(client(server.port, cases, random.Random(plan.seed * 1000 + n), over, outcome))
        for n in range(plan.num_clients)
    ]
    await strike(server, plan, random.Random(plan.seed), outcome)
    over.set()
    await asyncio.wait_for(asyncio.gather(*clients), 180)
    return outcome


def settle(server: ServerProcess, timeout_s: float = 60.0) -> dict[str, float]:
    """Wait until all workers are back and idle; the KV use that is left is a leak."""
    server.wait_ready(timeout_s)
    end = time.monotonic() + timeout_s
    while True:
        metrics = server.metrics()
        busy = {
            name: metrics.get(name, 0.0)
            for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        }
        busy["workers that are gone"] = sum(not up for ups in server.roles().values() for up in ups)
        if not any(busy.values()) or time.monotonic() > end:
            return busy
        time.sleep(0.2)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--both", type=int, default=0)
    parser.add_argument("--transfer", default="auto")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--kinds", default="kill,kill,stop", help="of kill, stop, role, drain; drawn at random")
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers end with us
    options = parse()
    vocab = json.loads((options.model / "config.json").read_text())["vocab_size"]
    cases = make_cases(options.cases, vocab, options.longest, options.seed)
    with ServerProcess(["--model", str(options.model)]) as quiet:
        asyncio.run(undisturbed(quiet.port, cases))
        quiet.close()
    pools = [part for name in ("prefill", "decode", "both") for part in (f"--{name}", str(getattr(options, name)))]
    arguments = ["--model", str(options.model), *pools, "--transfer", options.transfer, "--heartbeat-timeout", "3"]
    started = time.monotonic()
    with ServerProcess([*arguments, "--disaggregate", "always"]) as server:
        plan = Plan(options.faults, seed=options.seed, kinds=tuple(options.kinds.split(",")))
        outcome = asyncio.run(chaos(server, cases, plan))
        left, metrics = settle(server), server.metrics()
        orphans = server.close()
    row = {
        "fleet": f"{options.prefill}P{options.decode}D+{options.both}",
        "transfer": options.transfer,
        "faults": sum(outcome.faults.values()),
        "kills": outcome.faults["kill"],
        "stops": outcome.faults["stop"],
        "roles": outcome.faults["role"],
        "drains": outcome.faults["drain"],
        "hung up": outcome.num_hung_up,
        "complete": outcome.num_complete,
        "wrong": outcome.num_wrong,
        "refused": outcome.num_refused,
        "handoffs": int(metrics["diptych:handoffs_total"]),
        "retries": int(metrics["diptych:request_retries_total"]),
        "moved": int(metrics["diptych:streams_moved_total"]),
        "longest pause p50 s": round(statistics.median(outcome.pauses or [0.0]), 2),
        "longest pause max s": round(max(outcome.pauses, default=0.0), 2),
        "busy after": sum(left.values()),
        "orphans": len(orphans),
        "minutes": round((time.monotonic() - started) / 60, 1),
    }
    counts = {name: value for name, value in sorted(metrics.items()) if name.startswith("diptych:")}
    for line in outcome.wrong[:5]:
        print(line, file=sys.stderr)
    report(f"chaos {options.model.name}", [row], options.json, counters=counts)
    sys.exit(bool(outcome.num_wrong or outcome.num_refused or orphans or any(left.values())))


if __name__ == "__main__":
    main()
