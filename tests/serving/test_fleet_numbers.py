"""A worker of another host as the fleet sees it, and what an operator changes: no process, no socket, no clock."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.control.cluster.cluster_events import DrainEnded, DrainStarted
from diptych.control.config import SchedulerConfig
from diptych.control.errors import ConflictError, CoreFailedError, NotFoundError, WorkerError
from diptych.control.slo import Slo
from diptych.serving.fleet import joined_worker
from diptych.serving.fleet.exit_status import Loss
from diptych.serving.fleet.joined_worker import JoinedWorker
from diptych.serving.fleet.worker_changes import WorkerChanges
from diptych.serving.fleet.worker_handle import WorkerSite, WorkerState
from diptych.serving.join import worker_agent
from diptych.serving.join.framed_link import RELAYED, TOLD
from diptych.serving.join.join_messages import (
    Beat,
    Ended,
    Kill,
    Leave,
    Leaving,
    Registration,
    Vital,
    read_from_agent,
    read_from_door,
    told,
)
from diptych.serving.join.worker_agent import WorkerAgent
from diptych.serving.link.host_clock import clock_identity
from diptych.serving.link.messages import Ready, StepReport, encode
from diptych.serving.worker.load_tiers import measured_copy_ns

pytestmark = pytest.mark.asyncio
S = 10**9


class Link:
    """A FramedLink that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.relayed: list[bytes] = []
        self.closed: list[tuple[str, bool]] = []
        self.on_told = self.on_relayed = self.on_closed = self.on_defect = lambda *_: None

    def tell(self, frame: bytes) -> None:
        assert frame[:1] == TOLD
        self.told.append(read_from_door(frame[1:]))

    def relay(self, data: bytes) -> None:
        self.relayed.append(data)

    def close(self, why: str, *, at_once: bool = True) -> None:
        self.closed.append((why, at_once))


class Listener:
    """A WorkerListener that notes what it hears."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.losses: list[Loss] = []
        self.defects: list[str] = []

    def on_message(self, worker: int, message: Any) -> None:
        self.messages.append(message)

    def on_lost(self, worker: int, loss: Loss) -> None:
        self.losses.append(loss)

    def on_defect(self, what: str, error: BaseException) -> None:
        self.defects.append(what)


class World:
    """Worker 3 of a host, whose agent has dialled; now_s: of the loop's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, clock: str = "another") -> None:
        self.now_s, self.clock = 1000.0, clock
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now_s)
        self.listener = Listener()
        self.worker = JoinedWorker(3, WorkerSite("", "", None), b"")
        self.worker.start(self.listener)
        self.link = self.attach()

    def attach(self, life: int = 1) -> Link:
        link, number = Link(), 3
        registration = Registration(
            protocol=1, version="1", model="m", model_name="m", agent=b"a%d" % life, host="h", rack="r", role="prefill",
            num_cores=1, number=number, clock=self.clock,
        )  # fmt: skip
        self.worker.attach(link, registration, life)  # type: ignore[arg-type]
        return link

    def hear(self, message: Any) -> None:
        self.link.on_told(told(message)[1:])


def ready() -> Ready:
    return Ready(1, 1, 1, 1, 1, [], "")


async def test_a_worker_whose_agent_is_heard_is_killed_and_one_that_is_not_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for silence_s, age_s, busy_s, is_silent in ((5, 6, 0, False), (5, 2, 3, False), (5.1, 2, 3, True), (5, 0, 0, True)):
        world = World(monkeypatch)
        world.hear(Vital(age_ns=int(age_s * S), busy_ns=int(busy_s * S)))
        world.now_s += silence_s
        world.worker.kill("it hangs")
        assert world.link.told == ([] if is_silent else [Kill("it hangs")])
        why = "it hangs (its host is not heard)" if is_silent else "it hangs"
        assert world.link.closed == [(why, False)]
        [loss] = world.listener.losses
        assert loss.is_elsewhere and not loss.crashed and not loss.failed_core and why in loss.error.message
        assert world.worker.state is WorkerState.LOST and world.worker.pulse() is None
        world.worker.kill("again")
        assert len(world.listener.losses) == 1


async def test_a_pulse_is_what_the_agent_said_as_of_then(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    pulse = world.worker.pulse()
    assert pulse is not None and pulse.age_ns(1000 * S) == 0  # it has just registered
    world.now_s = 1002.0
    world.hear(Vital(age_ns=3, num_turns=7, busy_ns=0, predicted_ns=9))
    pulse = world.worker.pulse()
    assert pulse is not None and pulse.age_ns(1004 * S) == 2 * S + 3
    assert (pulse.num_turns, pulse.overdue_ns(1004 * S)) == (7, 0)
    world.hear(Vital(busy_ns=5 * S, predicted_ns=2 * S))
    pulse = world.worker.pulse()
    assert pulse is not None and pulse.overdue_ns(1004 * S) == 5 * S


async def test_each_connection_is_a_life_and_cuts_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    worker, first = world.worker, world.link
    assert (worker.life, worker.num_restarts, worker.role, worker.site.host) == (1, 0, "prefill", "h")
    world.link = world.attach(2)
    assert first.closed == [("its agent has dialled again", True)] and len(world.listener.losses) == 1
    assert (worker.life, worker.num_restarts, worker.agent) == (2, 1, b"a2") and worker.state is WorkerState.STARTING
    first.on_told(b"")
    first.on_closed("late")  # nobody listens to it any more
    worker.beat()
    worker.send(ready())  # type: ignore[arg-type]
    assert world.link.told == [Beat()] and world.link.relayed == [encode(ready())] and first.told == []
    assert not world.link.closed and len(world.listener.losses) == 1


@pytest.mark.parametrize(("ended", "crashed", "is_defect", "recording"), [
    (Ended("killed", True), True, False, ""), (Ended("exit 0", False), False, False, ""),
    (Ended("a bug", False, True, "/x"), False, True, "/x on h"), (Ended("a bug", True, True), True, True, ""),
])  # fmt: skip
async def test_the_end_of_a_worker_is_told_as_its_agent_says(
    ended: Ended, crashed: bool, is_defect: bool, recording: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch)
    world.hear(ended)
    [loss] = world.listener.losses
    assert (loss.crashed, loss.failed_core, loss.recording, loss.is_elsewhere) == (crashed, is_defect, recording, True)
    assert ended.message in loss.error.message and isinstance(loss.error, CoreFailedError) is is_defect
    world.link = world.attach(2)
    world.hear(Ended("exit 0", False))
    assert world.listener.losses[1].failed_core is False  # the failure was that of the life before


async def test_a_worker_is_ready_once_it_says_so_and_leaves_when_its_agent_is_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, leaving = World(monkeypatch), []
    worker = world.worker
    world.link.on_relayed(encode(ready()))
    assert worker.state is WorkerState.READY and worker.ready is not None and worker.ready.result() == ready()
    worker.on_leaving = lambda: leaving.append(1)
    world.hear(Leaving())
    assert leaving == [1] and not world.link.closed
    world.link.on_defect(ZeroDivisionError())
    assert world.listener.defects == ["the connection of worker 3"]


@pytest.mark.parametrize("data", [b"", b"\xc1", told(Kill("x"))[1:]])
async def test_what_cannot_be_read_ends_the_connection(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for relayed in (False, True):
        world = World(monkeypatch)
        (world.link.on_relayed if relayed else world.link.on_told)(data)
        [(why, _)] = world.link.closed
        assert "unreadable" in why and len(world.listener.losses) == 1
    world = World(monkeypatch)
    world.hear(Registration(protocol=1, version="", model="", model_name="", agent=b"", host="", rack="",
                            role="both", num_cores=1))  # fmt: skip
    assert world.link.closed == [("its agent registered twice", True)]


@pytest.mark.parametrize("is_removed", [False, True])
async def test_only_a_worker_that_was_removed_is_told_to_leave(
    is_removed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch)
    await world.worker.stop(is_removed=is_removed)
    assert world.link.told == [Leave()] * is_removed and world.link.closed == [("the front end ends", False)]
    assert world.worker.state is WorkerState.STOPPED and not world.listener.losses
    assert world.worker.ready is not None and isinstance(world.worker.ready.exception(), WorkerError)
    world.worker.send(ready())  # type: ignore[arg-type]
    world.worker.beat()
    await world.worker.stop()
    assert len(world.link.closed) == 1 and world.link.relayed == []


async def test_times_are_shifted_by_the_shortest_way_of_late_where_the_clocks_are_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, here = World(monkeypatch), [0]
    monkeypatch.setattr(joined_worker.time, "monotonic_ns", lambda: here[0])

    def shifted(now_ns: int, there_ns: int) -> int:
        here[0] = now_ns
        world.hear(Vital(now_ns=there_ns))
        world.link.on_relayed(encode(StepReport([("X", {"time_ns": 100})])))
        return int(world.listener.messages[-1].events[0][1]["time_ns"]) - 100

    assert [shifted(50, 10), shifted(60, 30), shifted(90, 10)] == [40, 30, 30]
    assert [shifted(90, 10) for _ in range(62)][-1] == 30 and shifted(90, 10) == 80  # 64 are remembered
    world.link.on_relayed(encode(StepReport([("X", {})])))
    assert world.link.closed == [("the worker sent an event without a time", True)]
    same = World(monkeypatch, clock=clock_identity())
    same.hear(Vital(now_ns=5))
    same.link.on_relayed(encode(StepReport([("X", {"time_ns": 100}), ("Y", {})])))
    assert same.listener.messages[-1].events == [("X", {"time_ns": 100}), ("Y", {})]


class Fleet:
    """A ChangingFleet that notes what it is told. At least one worker has to stay in use."""

    def __init__(self, num_workers: int) -> None:
        share = SimpleNamespace(num_threads=0, num_sms=0)
        infos = {number: SimpleNamespace(role="both", share=share) for number in range(num_workers)}
        self.members: Any = SimpleNamespace(infos=infos, check_change=self._check)
        self.joined: set[int] = set()
        self.told: list[Any] = []
        self.stopped: list[int] = []

    def _check(self, worker: int, role: Any) -> None:
        if len(self.members.infos) - len(self.stopped) < 2:
            raise ConflictError("no worker would be left", param="role")

    def progress(self) -> dict[str, int]:
        return {}

    def tell(self, *happened: Any) -> None:
        self.told += happened

    def show(self, worker: int) -> None:
        """Nothing."""

    async def start_worker(self, worker: int) -> None:
        self.stopped.remove(worker)

    async def stop_worker(self, worker: int) -> None:
        self.stopped.append(worker)


def changes_of(num_workers: int) -> tuple[Fleet, WorkerChanges]:
    fleet, cores = Fleet(num_workers), SimpleNamespace(divide=lambda *_: {}, split=None, cores=())
    started = [SchedulerConfig()] * num_workers
    return fleet, WorkerChanges(fleet, started, Slo(), cores)  # type: ignore[arg-type]


async def test_a_worker_that_is_being_removed_is_neither_used_again_nor_removed_twice() -> None:
    fleet, changes = changes_of(2)
    removal = asyncio.ensure_future(changes.remove(0))
    await asyncio.sleep(0)
    assert changes.is_draining(0) and isinstance(fleet.told[-1], DrainStarted)
    with pytest.raises(ConflictError, match="is being removed already"):
        await changes.remove(0)
    with pytest.raises(ConflictError, match="is being removed"):
        changes.use_again(0)
    changes.on_drained(1)  # another one
    await asyncio.sleep(0)
    assert not removal.done()
    changes.on_drained(0)
    await removal
    assert fleet.stopped == [0]
    with pytest.raises(NotFoundError, match="worker is 0; there are 1"):
        changes.drain(0)
    with pytest.raises(ConflictError, match="no worker would be left"):
        changes.drain(1)
    assert await changes.add() == 0 and fleet.stopped == [] and not changes.is_draining(0)
    assert fleet.told[-1] == DrainEnded(0)
    with pytest.raises(ConflictError, match="there are 2 workers, and may be no more"):
        await changes.add()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_worker_that_is_not_drained_in_time_is_used_again(is_cancelled: bool) -> None:
    fleet, changes = changes_of(2)
    removal = asyncio.ensure_future(changes.remove(0, 60.0 if is_cancelled else 0.001))
    await asyncio.sleep(0)
    if is_cancelled:
        removal.cancel()
    with pytest.raises(asyncio.CancelledError if is_cancelled else ConflictError):
        await removal
    assert not changes.is_draining(0) and fleet.told[-1] == DrainEnded(0) and fleet.stopped == []
    changes.use_again(0)  # it is in use
    changes.drain(0)
    changes.drain(0)
    assert sum(isinstance(event, DrainStarted) for event in fleet.told) == 2
    changes.use_again(0)
    assert not changes.is_draining(0)


async def test_a_worker_is_pinned_until_it_is_not() -> None:
    _, changes = changes_of(3)
    changes.pin(1, True)
    changes.pin(2, True)
    changes.pin(2, False)
    assert changes.pinned == {1} and changes.divided is None
    with pytest.raises(NotFoundError, match="worker is 3; there are 0, 1, 2"):
        changes.pin(3, True)


async def test_a_copy_of_a_block_takes_as_long_as_the_slower_way_at_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[str, list[tuple[int, int]]]] = []
    kv: Any = SimpleNamespace(
        first_block=5,
        copy_to_host=lambda pairs: copied.append(("down", pairs)),
        copy_from_host=lambda pairs: copied.append(("up", pairs)),
    )
    times = iter([0, 900, 1000, 0, 70, 110, 0, 30, 110])
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(times))
    assert measured_copy_ns(kv, 4) == 70 // 4  # of 900, 70 and 80
    assert copied == [("down", [(5, 0), (6, 1), (7, 2), (8, 3)]), ("up", [(0, 5), (1, 6), (2, 7), (3, 8)])] * 3
    monkeypatch.setattr("time.perf_counter_ns", lambda: 0)
    assert measured_copy_ns(kv, 4) == 1
    assert RELAYED != TOLD


async def test_an_agent_that_fails_says_its_first_failure_once(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, said, cuts = object.__new__(WorkerAgent), list[bytes](), list[str]()
    agent.number, agent._defect, agent._left = 3, None, asyncio.Event()
    agent._link = SimpleNamespace(tell=said.append)  # type: ignore[assignment]
    monkeypatch.setattr(agent, "_cut", lambda why, at_once=True: cuts.append(why))
    monkeypatch.setattr(worker_agent, "leave_alone", lambda folder, core, error: f"recording of {core}")
    first = ZeroDivisionError("first")
    for error in (first, ValueError("second")):
        agent.fail(error)
    assert agent._defect is first and agent._left.is_set() and cuts == ["the agent has failed"]
    [ended] = [read_from_agent(frame[1:]) for frame in said]
    assert ended == Ended(
        "the agent of worker 3 has failed: ZeroDivisionError: first", False, True, "recording of the agent of worker 3"
    )
