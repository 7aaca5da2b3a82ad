"""A request's way across the fleet, as commands and events: every state of a handoff, and every way to lose one."""

from collections.abc import Sequence
from typing import Any

import pytest

from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.cluster.cluster_core import ClusterCore
from diptych.control.cluster.cluster_events import (
    Arrived,
    Cancelled,
    ClusterEvent,
    Reported,
    Submission,
    Tick,
    TransferFailed,
    WorkerDown,
    WorkerUp,
)
from diptych.control.commands import Command, Drop, End, Prefill, Release, Renew, Reserve, Restarted, Serve
from diptych.control.errors import WorkerError
from diptych.control.events import (
    Event,
    FirstToken,
    HandoffDelivered,
    HandoffExpired,
    HandoffReleased,
    HandoffReserved,
    RequestAdmitted,
    RequestFinished,
)
from diptych.control.request import FinishReason
from diptych.control.router.cost_router import PlacementConfig
from diptych.control.router.topology import Role, WorkerInfo
from diptych.control.slo import NS_PER_S, LatencyBreakdown

P, D = 0, 1
LEASE = 9 * NS_PER_S


class Fleet:
    """A core with its clock; workers are what the test says they are."""

    def __init__(self, *roles: Role, pool: int | None = None, **config: Any) -> None:
        workers = [WorkerInfo(number, role, 100, 16, pool=pool) for number, role in enumerate(roles)]
        placement = PlacementConfig(disaggregate="always")
        self.core = ClusterCore(workers, ClusterConfig(placement=placement, lease_ns=LEASE, **config))
        self.now = 0
        for number in range(len(roles)):
            assert self.tell(WorkerUp(number)) == []

    def tell(self, event: ClusterEvent) -> list[Command]:
        self.now += 1
        return self.core.on_event(event, self.now)

    def submit(self, request_id: str = "a", num_tokens: int = 100) -> list[Command]:
        return self.tell(Arrived(Submission(request_id, num_tokens, 8)))

    def report(self, worker: int, *events: Event) -> list[Command]:
        return self.tell(Reported(worker, events))

    def reserved(self, attempt: str = "a", blocks: Sequence[int] = (5, 6)) -> list[Command]:
        return self.report(D, HandoffReserved(self.now, attempt, 16, tuple(blocks)))

    def prefilled(self, attempt: str = "a") -> list[Command]:
        commands = self.report(P, RequestAdmitted(self.now, attempt, 0, True))
        return commands + self.report(P, FirstToken(self.now, attempt))

    def delivered(self, attempt: str = "a") -> list[Command]:
        return self.report(D, HandoffDelivered(self.now, attempt))

    def finished(self, worker: int, attempt: str = "a", reason: FinishReason = FinishReason.LENGTH) -> list[Command]:
        return self.report(worker, self.end(attempt, reason))

    def end(self, attempt: str, reason: FinishReason = FinishReason.ABORT) -> RequestFinished:
        return RequestFinished(self.now, attempt, reason, 100, 0, 0, LatencyBreakdown(0, 0, 0, 8), None)


def test_the_way_of_a_handoff() -> None:
    fleet = Fleet("prefill", "decode")
    assert fleet.submit() == [Reserve(D, "a", "a", LEASE, False)]
    assert fleet.reserved() == [Prefill(P, "a", "a", D, 16, (), LEASE)]
    assert fleet.prefilled() == []
    assert fleet.delivered() == [Release(P, "a")]
    assert fleet.report(P, HandoffReleased(0, "a")) == []
    (end,) = fleet.finished(D)
    assert isinstance(end, End) and end.finished is not None and end.error is None
    fleet.core.check_idle()


def test_blocks_of_one_pool_are_borrowed_and_leases_are_not_needed() -> None:
    fleet = Fleet("prefill", "decode", pool=0)
    assert fleet.submit() == [Reserve(D, "a", "a", 0, True)]
    assert fleet.reserved() == [Prefill(P, "a", "a", D, 16, (5, 6), 0)]


def test_borrowed_blocks_stay_until_the_writer_has_let_go() -> None:
    fleet = Fleet("prefill", "decode", pool=0)
    fleet.submit()
    fleet.reserved()
    assert fleet.tell(Cancelled("a")) == [Drop(P, "a")]  # not the decode worker: the other may be writing
    assert fleet.report(P, fleet.end("a")) == [Drop(D, "a")]
    fleet.report(D, fleet.end("a"))
    fleet.core.check_idle()


def test_borrowed_blocks_are_free_when_the_writer_is_dead() -> None:
    fleet = Fleet("prefill", "decode", pool=0)
    fleet.submit()
    fleet.reserved()
    fleet.tell(Cancelled("a"))
    assert fleet.tell(WorkerDown(P)) == [Drop(D, "a")]


@pytest.mark.parametrize("stage", range(4))
def test_a_cancel_reaches_every_state(stage: int) -> None:
    fleet = Fleet("prefill", "decode")
    fleet.submit()
    for step in (fleet.reserved, fleet.prefilled, fleet.delivered)[:stage]:
        step()
    at = {command.worker for command in fleet.tell(Cancelled("a")) if isinstance(command, Drop)}
    assert at == ({D} if stage == 0 else {P, D})
    for worker in at:
        fleet.report(worker, HandoffReleased(0, "a"))
    fleet.core.check_idle()


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("lost", [P, D])
def test_losing_either_worker_of_a_handoff_under_way_begins_another_attempt_on_who_is_left(
    stage: int, lost: int
) -> None:
    fleet = Fleet("prefill", "decode")
    fleet.submit()
    for step in (fleet.reserved, fleet.prefilled)[:stage]:
        step()
    commands = fleet.tell(WorkerDown(lost, {"a": 1} if stage == 2 else {}))
    left = D if lost == P else P
    drops: list[Command] = [] if stage == 0 and lost == D else [Drop(left, "a")]
    assert commands == [*drops, Restarted("a", "a~1"), Serve(left, "a", "a~1")]


def test_losing_the_prefill_worker_after_the_delivery_matters_to_nobody() -> None:
    fleet = Fleet("prefill", "decode")
    fleet.submit()
    fleet.reserved()
    fleet.prefilled()
    fleet.delivered()
    assert fleet.tell(WorkerDown(P)) == []
    assert isinstance(fleet.finished(D)[-1], End)
    fleet.core.check_idle()


def test_what_an_old_attempt_says_is_not_heard() -> None:
    fleet = Fleet("prefill", "decode")
    fleet.submit()
    fleet.reserved()
    fleet.tell(WorkerDown(P))
    assert fleet.delivered("a") == []
    assert fleet.finished(D, "a") == []
    assert fleet.core.num_open == 1


def test_without_a_worker_a_request_waits_and_then_fails_with_the_reason() -> None:
    fleet = Fleet("both", park_ns=5 * NS_PER_S)
    fleet.tell(WorkerDown(0))
    assert fleet.submit() == []
    assert fleet.core.next_time() == fleet.now + 5 * NS_PER_S
    assert fleet.tell(WorkerUp(0)) == [Serve(0, "a", "a")]
    fleet.finished(0)
    fleet.tell(WorkerDown(0))
    fleet.submit("b")
    fleet.now += 5 * NS_PER_S
    (end,) = fleet.tell(Tick())
    assert isinstance(end, End) and end.error is not None and end.error.code == "no_worker"
    fleet.core.check_idle()


def test_attempts_without_a_token_are_bounded() -> None:
    fleet = Fleet("both", max_attempts=3)
    fleet.submit()
    for _ in range(2):
        assert fleet.tell(WorkerDown(0)) == []
        assert isinstance(fleet.tell(WorkerUp(0))[0], Restarted)
    (end,) = fleet.tell(WorkerDown(0))
    assert isinstance(end, End) and isinstance(end.error, WorkerError)
    fleet.core.check_idle()


def test_a_request_whose_prompt_kills_two_workers_is_refused() -> None:
    fleet = Fleet("both", "both")
    commands = fleet.submit()
    for attempt in ("a", "a~1"):
        (serve,) = [one for one in commands if isinstance(one, Serve)]
        fleet.report(serve.worker, RequestAdmitted(0, attempt, 0, True))
        commands = fleet.tell(WorkerDown(serve.worker, crashed=True))
    end = commands[-1]
    assert isinstance(end, End) and end.error is not None and end.error.code == "poison_request"
    fleet.core.check_idle()


@pytest.mark.parametrize("policy", ["retry", "local", "fail"])
def test_a_broken_transfer_follows_the_policy(policy: str) -> None:
    fleet = Fleet("prefill", "decode", on_failure=policy)
    fleet.submit()
    fleet.reserved()
    commands = fleet.tell(TransferFailed(P, "a", True, "the link is gone"))
    assert {Drop(P, "a"), Drop(D, "a")} <= set(commands)
    last = commands[-1]
    if policy == "retry":
        assert isinstance(last, Reserve)
    elif policy == "local":
        assert isinstance(last, Serve)
    else:
        assert isinstance(last, End) and last.error is not None


def test_leases_are_renewed_while_a_handoff_is_under_way_and_their_loss_is_a_loss() -> None:
    fleet = Fleet("prefill", "decode")
    fleet.submit()
    assert fleet.core.next_time() == fleet.now + LEASE // 3
    fleet.reserved()
    fleet.now += LEASE // 3
    assert fleet.tell(Tick()) == [Renew(D, ("a",)), Renew(P, ("a",))]
    commands = fleet.report(D, HandoffExpired(0, "a", False))
    assert Drop(P, "a") in commands and Drop(D, "a") not in commands
    assert isinstance(commands[-1], Reserve) and commands[-1].attempt_id == "a~1"


def test_an_answer_that_ends_with_its_first_token_frees_the_place_that_was_reserved() -> None:
    fleet = Fleet("prefill", "decode")
    fleet.submit()
    fleet.reserved()
    commands = fleet.finished(P, reason=FinishReason.STOP)
    assert Drop(D, "a") in commands and isinstance(commands[-1], End)
    fleet.report(D, fleet.end("a"))
    fleet.core.check_idle()
