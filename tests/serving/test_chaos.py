"""Workers die or hang in every phase of a handoff, and clients hang up: each answer is the undisturbed one.

Real worker processes with the bundled model. The blows are not timed: each falls in the moment in which the front end
hears of a certain phase. Afterwards nothing is left: no request, no block, no process, no file, no descriptor.
"""

import asyncio
import contextlib
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_worker import fake_command
from servers import fake_server, process_of, wait_until

from diptych.control.cluster.cluster_config import cluster_config
from diptych.control.config import BudgetConfig, SchedulerConfig
from diptych.control.events import HandoffDelivered, HandoffReserved
from diptych.control.request import RequestOptions, SamplingParams
from diptych.serving.async_llm import AsyncLLM
from diptych.serving.fleet import heartbeat_monitor as watch
from diptych.serving.fleet import supervisor
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.supervisor import LocalLauncher, Supervisor
from diptych.serving.link.engine_options import DeviceOptions, EngineOptions, MemoryOptions
from diptych.serving.link.messages import StepReport, WorkerMessage, unpack_events
from diptych.serving.llm import LLM

pytestmark = pytest.mark.system
OPTIONS = EngineOptions(
    device=DeviceOptions(device="cpu", threads=1),
    memory=MemoryOptions(kv_cache_bytes=32 * 2**20),
    scheduler=SchedulerConfig(order="fcfs", budget=BudgetConfig(kind="fixed", max_batched_tokens=64), max_num_seqs=16),
    warm_up=False,
)
VOCABULARY = 1000
LENGTHS = (5, 64, 300, 700, 900)


@dataclass(frozen=True)
class Blow:
    """What happens to a worker of this role when this phase is heard of for the ``hearing``-th time."""

    phase: str
    role: str
    hearing: int = 1
    with_signal: signal.Signals = signal.SIGKILL


STOP = signal.SIGSTOP
SHARED = (
    Blow("reserved", "prefill"),
    Blow("first token", "prefill", 2),  # after its commit, before its release
    Blow("reserved", "decode"),
    Blow("decoding", "decode", 20, STOP),
    Blow("delivered", "every", 3),
)
SENDING = (
    Blow("reserved", "decode"),
    Blow("first token", "decode", 3),
    Blow("reserved", "prefill", 1, STOP),
    Blow("first token", "prefill", 2),
    Blow("decoding", "decode", 20),
)


class StruckFleet(Fleet):
    """A fleet that is hit once when it hears of a phase."""

    blow: Blow | None = None
    num_heard = 0

    def on_message(self, worker: int, message: WorkerMessage) -> None:
        super().on_message(worker, message)
        if self.blow and self.blow.phase in self._phases(worker, message):
            self.num_heard += 1
            if self.num_heard == self.blow.hearing:
                blow, self.blow, self.num_heard = self.blow, None, 0
                self._strike(blow, worker)

    def _phases(self, worker: int, message: WorkerMessage) -> Iterator[str]:
        match message:
            case StepReport():
                for event in unpack_events(message.events):
                    if isinstance(event, HandoffReserved):
                        yield "reserved"
                    elif isinstance(event, HandoffDelivered):
                        yield "delivered"
                if message.tokens is not None:
                    yield "first token" if self.fleet.roles[worker] == "prefill" else "decoding"

    def _strike(self, blow: Blow, worker: int) -> None:
        victims = [number for number, role in enumerate(self.fleet.roles) if blow.role in (role, "every")]
        if worker in victims and blow.role != "every":
            victims = [worker]
        for victim in victims if blow.role == "every" else victims[:1]:
            os.kill(process_of(self, victim), blow.with_signal)


@dataclass(frozen=True)
class Case:
    """A request and what an undisturbed engine says to it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    answer: tuple[int, ...] = ()


@cache
def cases() -> tuple[Case, ...]:
    """Greedy and sampled; the long prompts share a prefix."""
    rng = random.Random(4)
    shared = tuple(rng.randrange(3, VOCABULARY) for _ in range(256))
    made = []
    for number, length in enumerate(LENGTHS):
        own = tuple(rng.randrange(3, VOCABULARY) for _ in range(length))
        sampling = SamplingParams(max_tokens=60, temperature=0.8 * (number % 2), seed=number, ignore_eos=True)
        made.append(Case((shared + own)[:length] if number > 2 else own, sampling))
    outputs = LLM(options=OPTIONS).generate([list(one.prompt) for one in made], [one.sampling for one in made])
    return tuple(
        replace(one, answer=tuple(output.outputs[0].token_ids)) for one, output in zip(made, outputs, strict=True)
    )


async def ask(llm: AsyncLLM, case: Case, hang_up_after: int | None = None, salt: str | None = None) -> None:
    """Each piece must continue the undisturbed answer. salt: finds nothing in caches that was said with another."""
    said: list[int] = []
    stream = llm.generate(list(case.prompt), case.sampling, options=RequestOptions(cache_salt=salt))
    async for output in stream:
        said = output.outputs[0].token_ids
        assert tuple(said) == case.answer[: len(said)]
        if hang_up_after is not None and len(said) >= hang_up_after:
            await stream.aclose()  # type: ignore[attr-defined]
            return
    assert tuple(said) == case.answer


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    for _ in range(int(timeout_s / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"never: {what}")


def descriptors() -> Counter[str]:
    """Open files of this process by kind: "socket", "pipe", "anon_inode", "/memfd", "private directory"."""
    kinds: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            kind = os.readlink(entry).split(":")[0]
            kinds["private directory" if "/diptych-" in kind else kind] += 1
        except FileNotFoundError:  # the one of iterdir itself
            continue
    return kinds


def worker_processes(directory: Path) -> list[int]:
    """Processes that were given a private directory in this one (other tests' servers may run beside)."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child.pid] * any(str(directory) in part for part in child.cmdline())
    return found


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where private directories are made; restarts come soon."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_S", 0.2)
    with tempfile.TemporaryDirectory(prefix="chaos-") as own:
        monkeypatch.setattr(tempfile, "tempdir", own)
        yield Path(own)


async def survive(llm: AsyncLLM, fleet: StruckFleet, blow: Blow, rng: random.Random) -> None:
    """One blow among requests that are read to the end, and requests that nobody waits for."""
    await until(lambda: all(llm.metrics.fleet.view().is_up), "all workers are back")
    losses = sum(llm.metrics.fleet.losses.values())
    fleet.blow = blow
    patient = [ask(llm, case, salt=str(blow)) for case in cases()]
    leaving = [ask(llm, case, rng.randrange(1, 50)) for case in cases()[2:]]
    await asyncio.gather(*patient, *leaving)
    assert fleet.blow is None, "the phase never came"
    await until(lambda: sum(llm.metrics.fleet.losses.values()) > losses, "the worker is lost")


async def check_that_nothing_is_left(llm: AsyncLLM, fleet: StruckFleet, directory: Path) -> None:
    await until(lambda: all(llm.metrics.fleet.view().is_up), "all workers are back")
    core = fleet.core
    await until(lambda: core.num_open == 0 and llm.num_open == 0, "no request is open")

    def is_idle() -> bool:
        workers = llm.metrics.fleet.workers
        busy = ("num_waiting", "num_prefilling", "num_decoding", "num_swapped", "kv_usage")
        return len(workers) == len(fleet.fleet.roles) and not any(
            getattr(stats, name) for stats in workers.values() for name in busy
        )

    def core_is_idle() -> bool:
        try:
            core.check_idle()
        except AssertionError:  # the answer to a Drop is on its way
            return False
        return True

    await until(is_idle, "every block is free")
    await until(core_is_idle, "nothing is left of any attempt")
    count = len(fleet.fleet.roles)
    await until(lambda: len(worker_processes(directory)) == count, "as many processes as workers")
    await until(lambda: len(list(directory.iterdir())) == count, "as many directories as workers")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("prefill", "decode", "transfer", "blows"),
    [(1, 1, "shared_memory", SHARED), (2, 1, "tcp", SENDING)],
    ids=["one pool", "over sockets"],
)
async def test_whoever_dies_whenever_nobody_sees_a_wrong_token_and_nothing_is_left(
    prefill: int, decode: int, transfer: Any, blows: tuple[Blow, ...], directory: Path
) -> None:
    cases()
    before, rng = descriptors(), random.Random(1)
    cluster = cluster_config(disaggregate="always")
    pools = FleetOptions(prefill=prefill, decode=decode, transfer=transfer, cluster=cluster, heartbeat_timeout_s=1.0)
    fleet = StruckFleet(OPTIONS, pools)
    async with AsyncLLM(OPTIONS, fleet) as llm:
        await asyncio.gather(*(ask(llm, case) for case in cases()))
        await until(lambda: all(llm.metrics.fleet.view().is_up), "all workers are there")
        running = descriptors()
        for blow in blows:
            await survive(llm, fleet, blow, rng)
        await check_that_nothing_is_left(llm, fleet, directory)
        await until(lambda: descriptors() == running, f"the descriptors of the start, {running}")
        await asyncio.gather(*(ask(llm, case) for case in cases()))
    assert not worker_processes(directory)
    assert not list(directory.iterdir())
    await until(lambda: descriptors() - before == Counter(), f"the descriptors of before, {before}")


def test_a_front_end_that_is_killed_leaves_no_worker_and_no_directory() -> None:
    """Not even a worker that is stopped, and cannot see the end of its front end until it is continued."""
    with fake_server(fleet={"prefill": 1, "decode": 2, "transfer": "tcp"}) as server:
        workers = psutil.Process(server.process.pid).children()
        directories = [Path(worker.cmdline()[-1]) for worker in workers]
        assert len(workers) == 3 and all(directory.is_dir() for directory in directories)
        workers[1].send_signal(signal.SIGSTOP)
        server.process.kill()
        wait_until(lambda: not any(is_alive(worker) for worker in workers), 60)
        wait_until(lambda: not any(directory.exists() for directory in directories))


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.asyncio
async def test_a_worker_that_is_stopped_while_it_loads_is_started_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LOADING_S", 1.0)
    pools = FleetOptions(prefill=1, decode=1, transfer="tcp", heartbeat_timeout_s=1.0)
    fleet = Fleet(OPTIONS, pools, LocalLauncher(fake_command(load_s=0.5)))
    async with AsyncLLM(OPTIONS, fleet) as llm:
        port = fleet.workers[0]
        assert isinstance(port, Supervisor)
        first = port.worker_pid
        os.kill(first or 0, signal.SIGKILL)
        await until(lambda: port.worker_pid not in (None, first), "it is started again")
        await until(lambda: port.pulse() is not None, "it loads")
        os.kill(port.worker_pid or 0, signal.SIGSTOP)
        await until(lambda: port.num_restarts >= 2 and all(llm.metrics.fleet.view().is_up), "and again")
