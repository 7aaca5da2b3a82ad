"""A request's way across the fleet, as commands and events: every state of a handoff, and every way to lose one."""

from collections.abc import Sequence
from typing import Any

import pytest

from diptych.base import compiled_modules
from diptych.control.admission.admission_config import AdmissionConfig
from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.cluster.cluster_core import ClusterCore
from diptych.control.cluster.cluster_events import (
    Arrived,
    Cancelled,
    ClusterEvent,
    DrainEnded,
    DrainStarted,
    Reported,
    RoleChanged,
    SchedulerChanged,
    Tick,
    WorkerDown,
    WorkerUp,
)
from diptych.control.commands import (
    NOT_RESERVED,
    AskKVSnapshot,
    Command,
    Configure,
    Drained,
    Drop,
    End,
    ForgetPeer,
    Prefill,
    Release,
    Renew,
    Reserve,
    Restarted,
    Send,
    Serve,
)
from diptych.control.config import shape_preset
from diptych.control.engine.reports import LoadReport
from diptych.control.errors import ConflictError, NotFoundError, WorkerError
from diptych.control.events import (
    Event,
    FirstToken,
    HandoffDelivered,
    HandoffExpired,
    HandoffReleased,
    HandoffReserved,
    HandoffRevoked,
    KVEvents,
    KVSnapshot,
    PeerForgotten,
    RequestAdmitted,
    RequestFinished,
    TransferFailed,
)
from diptych.control.request import FinishReason, RequestOptions, Submission
from diptych.control.router.hit_rate_monitor import MIN_ADMISSIONS
from diptych.control.router.routing import RoutingConfig
from diptych.control.router.topology import Role, WorkerInfo
from diptych.control.slo import NS_PER_S, LatencyBreakdown, Slo

P, D = 0, 1
LEASE = 9 * NS_PER_S


class Fleet:
    """A core with its clock; workers are what the test says they are."""

    def __init__(self, *roles: Role, memory_domain: int | None = None, **config: Any) -> None:
        self.infos = [
            WorkerInfo(number, role, 100, 16, memory_domain=memory_domain) for number, role in enumerate(roles)
        ]
        routing = RoutingConfig(disaggregate="always")
        self.core = ClusterCore(ClusterConfig(routing=routing, lease_ns=LEASE, **config))
        self.now = 0
        for number in range(len(roles)):
            assert self.up(number) == []

    def tell(self, event: ClusterEvent) -> list[Command]:
        self.now += 1
        return self.core.on_event(event, self.now)

    def up(self, worker: int) -> list[Command]:
        return self.tell(WorkerUp(self.infos[worker]))

    def submit(self, request_id: str = "a", num_tokens: int = 100, **options: Any) -> list[Command]:
        return self.tell(Arrived(Submission(request_id, num_tokens, 8, options=RequestOptions(**options))))

    def report(self, worker: int, *events: Event) -> list[Command]:
        return self.tell(Reported(worker, events))

    def reserved(self, attempt: str = "a", blocks: Sequence[int] = (5, 6)) -> list[Command]:
        return self.report(D, HandoffReserved(self.now, attempt, 16, (tuple(blocks),)))

    def prefilled(self, attempt: str = "a") -> list[Command]:
        commands = self.report(P, RequestAdmitted(self.now, attempt, 0, True))
        return commands + self.report(P, FirstToken(self.now, attempt))

    def delivered(self, attempt: str = "a") -> list[Command]:
        return self.report(D, HandoffDelivered(self.now, attempt))

    def finished(self, worker: int, attempt: str = "a", reason: FinishReason = FinishReason.LENGTH) -> list[Command]:
        return self.report(worker, self.end(attempt, reason))

    def end(self, attempt: str, reason: FinishReason = FinishReason.ABORT, num_tokens: int = 8) -> RequestFinished:
        return RequestFinished(self.now, attempt, reason, 100, 0, 0, LatencyBreakdown(0, 0, 0, num_tokens), None)


def the_end(commands: Sequence[Command]) -> End:
    (end,) = [command for command in commands if isinstance(command, End)]
    return end


def test_the_way_of_a_handoff() -> None:
    fleet = Fleet("prefill", "decode")
    ahead = Prefill(P, "a", "a", 0, D, NOT_RESERVED, (), LEASE)
    assert fleet.submit() == [Reserve(D, "a", "a", 0, LEASE, False), ahead]
    assert fleet.reserved() == [Send(P, "a", 16)]
    assert fleet.prefilled() == []
    assert fleet.delivered() == [Release(P, "a")]
    assert fleet.report(P, HandoffReleased(0, "a")) == []
    (end,) = fleet.finished(D)
    assert isinstance(end, End) and end.finished is not None and end.error is None
    fleet.core.check_idle()


@pytest.mark.skipif(not compiled_modules.runs_sources(), reason="calls between compiled modules cannot be watched")
def test_an_idle_fleet_of_one_worker_asks_the_router_once_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, asked = Fleet("both"), []
    route = fleet.core.router.route
    monkeypatch.setattr(fleet.core.router, "route", lambda *given: asked.append(given) or route(*given))
    monkeypatch.setattr(fleet.core.admission, "offer", None)
    monkeypatch.setattr(fleet.core.admission, "next", None)
    (command,) = fleet.submit()
    assert isinstance(command, Serve) and len(asked) == 1


def test_a_stream_that_lost_its_worker_is_computed_when_it_has_a_place() -> None:
    fleet = Fleet("prefill", "decode", "decode")
    (reserve, _) = fleet.submit()
    assert isinstance(reserve, Reserve)
    fleet.report(reserve.worker, HandoffReserved(fleet.now, "a", 0, ((1,),)))
    fleet.prefilled()
    again = fleet.tell(WorkerDown(reserve.worker, {"a": 1}))[-1]
    assert isinstance(again, Reserve) and again.num_output_tokens == 1
    (prefill,) = fleet.report(again.worker, HandoffReserved(fleet.now, "a~1", 16, ((1,),)))
    assert prefill == Prefill(P, "a", "a~1", 1, again.worker, 16, (), LEASE)


def test_blocks_of_one_memory_domain_are_borrowed_and_leases_are_not_needed() -> None:
    fleet = Fleet("prefill", "decode", memory_domain=0)
    assert fleet.submit() == [Reserve(D, "a", "a", 0, 0, True)]
    assert fleet.reserved() == [Prefill(P, "a", "a", 0, D, 16, ((5, 6),), 0)]


def test_borrowed_blocks_stay_until_the_writer_has_let_go() -> None:
    fleet = Fleet("prefill", "decode", memory_domain=0)
    fleet.submit()
    fleet.reserved()
    assert fleet.tell(Cancelled("a")) == [Drop(P, "a")]  # not the decode worker: the other may be writing
    assert fleet.report(P, fleet.end("a")) == [Drop(D, "a")]
    fleet.report(D, fleet.end("a"))
    fleet.core.check_idle()


def test_borrowed_blocks_are_free_when_the_writer_is_dead() -> None:
    fleet = Fleet("prefill", "decode", memory_domain=0)
    fleet.submit()
    fleet.reserved()
    fleet.tell(Cancelled("a"))
    assert fleet.tell(WorkerDown(P)) == [Drop(D, "a"), ForgetPeer(D, P)]


@pytest.mark.parametrize("stage", range(4))
def test_a_cancel_reaches_every_state(stage: int) -> None:
    fleet = Fleet("prefill", "decode")
    fleet.submit()
    for step in (fleet.reserved, fleet.prefilled, fleet.delivered)[:stage]:
        step()
    at = {command.worker for command in fleet.tell(Cancelled("a")) if isinstance(command, Drop)}
    assert at == {P, D}
    for worker in at:
        fleet.report(worker, HandoffReleased(0, "a"))
    fleet.core.check_idle()


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("lost", [P, D])
def test_losing_either_worker_of_a_handoff_under_way_begins_another_attempt_on_the_other(stage: int, lost: int) -> None:
    fleet = Fleet("prefill", "decode")
    fleet.submit()
    for step in (fleet.reserved, fleet.prefilled)[:stage]:
        step()
    commands = fleet.tell(WorkerDown(lost, {"a": 1} if stage == 2 else {}))
    left = D if lost == P else P
    count = int(stage == 2)
    assert commands == [Drop(left, "a"), Restarted("a", "a~1", count), Serve(left, "a", "a~1", count)]


def test_losing_the_prefill_worker_after_the_delivery_changes_nothing() -> None:
    fleet = Fleet("prefill", "decode")
    fleet.submit()
    fleet.reserved()
    fleet.prefilled()
    fleet.delivered()
    assert fleet.tell(WorkerDown(P)) == []
    assert isinstance(fleet.finished(D)[-1], End)
    fleet.core.check_idle()


def test_what_an_old_attempt_reports_is_ignored() -> None:
    fleet = Fleet("prefill", "decode")
    fleet.submit()
    fleet.reserved()
    fleet.tell(WorkerDown(P))
    assert fleet.delivered("a") == []
    assert fleet.finished(D, "a") == []
    assert fleet.core.num_open == 1


def test_without_a_worker_a_request_waits_and_then_fails_with_the_reason() -> None:
    fleet = Fleet("both", park_ns=5 * NS_PER_S, max_prefills_in_flight_per_worker=0)
    fleet.tell(WorkerDown(0))
    assert fleet.submit() == []
    assert fleet.core.next_time() == fleet.now + 5 * NS_PER_S
    assert fleet.up(0) == [Serve(0, "a", "a", 0)]
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
    for number in (1, 2):
        assert fleet.tell(WorkerDown(0)) == [Restarted("a", f"a~{number}", 0)]
        assert fleet.up(0) == [Serve(0, "a", f"a~{number}", 0)]
    (end,) = fleet.tell(WorkerDown(0))
    assert isinstance(end, End) and isinstance(end.error, WorkerError)
    fleet.core.check_idle()


def test_a_request_whose_prompt_kills_two_workers_is_refused() -> None:
    fleet = Fleet("both", "both")
    commands = fleet.submit()
    for attempt in ("a", "a~1"):
        (serve,) = [command for command in commands if isinstance(command, Serve)]
        fleet.report(serve.worker, RequestAdmitted(0, attempt, 0, True))
        commands = fleet.tell(WorkerDown(serve.worker, crashed=True))
    end = commands[-1]
    assert isinstance(end, End) and end.error is not None and end.error.code == "poison_request"
    fleet.core.check_idle()


def recall(fleet: Fleet, attempt: str = "a") -> list[Command]:
    return fleet.report(D, HandoffRevoked(fleet.now, attempt))


def test_a_recalled_prompt_gives_up_its_blocks_and_waits_again() -> None:
    fleet = Fleet("prefill", "decode")
    fleet.submit()
    fleet.reserved()
    ahead = Prefill(P, "a", "a~1", 0, D, NOT_RESERVED, (), LEASE)
    again = [Restarted("a", "a~1", 0), Reserve(D, "a", "a~1", 0, LEASE, False), ahead]
    assert recall(fleet) == [Drop(P, "a"), Drop(D, "a"), *again]
    assert recall(fleet) == [], "a doubled message recalls nothing"
    fleet.report(P, HandoffReleased(0, "a"))
    fleet.report(D, fleet.end("a"))
    fleet.reserved("a~1")
    fleet.prefilled("a~1")
    fleet.delivered("a~1")
    fleet.report(P, HandoffReleased(0, "a~1"))
    assert the_end(fleet.finished(D, "a~1")).error is None
    fleet.core.check_idle()


def test_recalled_blocks_stay_until_the_worker_that_computes_into_them_has_let_go() -> None:
    fleet = Fleet("prefill", "decode", memory_domain=0)
    fleet.submit()
    fleet.reserved()
    assert recall(fleet) == [Drop(P, "a"), Restarted("a", "a~1", 0), Reserve(D, "a", "a~1", 0, 0, True)]
    assert fleet.report(P, fleet.end("a")) == [Drop(D, "a")]


def test_a_prompt_that_is_computed_is_not_recalled() -> None:
    fleet = Fleet("prefill", "decode")
    fleet.submit()
    fleet.reserved()
    fleet.prefilled()
    assert recall(fleet) == []
    assert fleet.delivered() == [Release(P, "a")]


@pytest.mark.parametrize("policy", ["retry", "fail"])
def test_a_recall_is_no_failure_however_often_it_comes(policy: str) -> None:
    fleet = Fleet("prefill", "decode", on_failure=policy, max_attempts=1)
    fleet.submit()
    for epoch in range(9):
        attempt = f"a~{epoch}" if epoch else "a"
        fleet.reserved(attempt)
        assert recall(fleet, attempt)[-2] == Reserve(D, "a", f"a~{epoch + 1}", 0, LEASE, False)
        for worker in (P, D):
            fleet.report(worker, HandoffReleased(0, attempt))
    assert fleet.core.num_open == 1 and not fleet.core.counts["retried"]


def test_requests_that_wait_for_a_worker_go_before_those_that_wait_for_admission() -> None:
    fleet = Fleet("both", max_prefills_in_flight_per_worker=1)
    fleet.submit("a")
    fleet.report(0, FirstToken(0, "a"))
    fleet.submit("b")
    fleet.submit("c")
    fleet.tell(WorkerDown(0, {"a": 1}))
    served = [command.request_id for command in fleet.up(0) if isinstance(command, Serve)]
    assert served == ["a", "b"]


def test_batch_that_waits_on_the_workers_keeps_no_other_request_in_the_queue() -> None:
    """It gives way there; of itself no more is sent than there is room for."""
    fleet = Fleet("both", max_prefills_in_flight_per_worker=3)
    sent = [fleet.submit(f"batch{number}", service_class="batch") for number in range(4)]
    assert [len(commands) for commands in sent] == [1, 1, 0, 0]
    sent = [fleet.submit(f"other{number}") for number in range(4)]
    assert [len(commands) for commands in sent] == [1, 1, 1, 0]
    assert fleet.submit("urgent batch", service_class="batch", best_effort_ns=0) == []


@pytest.mark.parametrize("policy", ["retry", "local", "fail"])
def test_a_broken_transfer_follows_the_policy(policy: str) -> None:
    fleet = Fleet("prefill", "decode", "prefill", "decode", on_failure=policy)
    fleet.submit()
    fleet.reserved()
    commands = fleet.report(P, TransferFailed(fleet.now, "a", True, "the link is gone"))
    assert {Drop(P, "a"), Drop(D, "a")} <= set(commands)
    last = commands[-1]
    if policy == "retry":
        assert isinstance(last, Prefill) and isinstance(commands[-2], Reserve) and last.worker == 2
    elif policy == "local":
        assert isinstance(last, Serve)
    else:
        assert isinstance(last, End) and last.error is not None


def test_a_request_whose_transfer_failed_does_not_wait_for_the_same_path_again() -> None:
    fleet = Fleet("prefill", "decode")
    fleet.submit()
    fleet.reserved()
    assert isinstance(fleet.report(P, TransferFailed(fleet.now, "a", True, "the link is gone"))[-1], Serve)
    assert isinstance(fleet.submit("b")[-1], Prefill), "another one may try"


@pytest.mark.parametrize("roles", [("both",), ("prefill", "decode")])
def test_a_stream_goes_on_that_another_front_end_has_begun(roles: tuple[Role, ...]) -> None:
    fleet = Fleet(*roles)
    commands = fleet.tell(Arrived(Submission("a", 100, 8), 3))
    if len(roles) == 1:
        assert commands == [Serve(0, "a", "a", 3)]
    else:
        assert [type(command) for command in commands] == [Reserve], "a stream waits for no prompt"
        fleet.reserved()
        fleet.prefilled()
        fleet.delivered()
    finished = the_end(fleet.report(len(roles) - 1, fleet.end("a", FinishReason.LENGTH, 5))).finished
    assert finished is not None and finished.latency.num_output_tokens == 8
    fleet.report(P, HandoffReleased(fleet.now, "a"))
    fleet.core.check_idle()


def test_a_stream_of_which_only_the_end_is_missing_ends_at_once() -> None:
    fleet = Fleet("both")
    finished = the_end(fleet.tell(Arrived(Submission("a", 100, 8), 8))).finished
    assert finished is not None and finished.reason is FinishReason.LENGTH
    assert finished.latency.num_output_tokens == 8
    fleet.core.check_idle()


def test_leases_are_renewed_while_a_handoff_is_under_way_and_their_loss_is_a_loss() -> None:
    fleet = Fleet("prefill", "decode")
    fleet.submit()
    assert fleet.core.next_time() == fleet.now + LEASE // 3
    fleet.reserved()
    fleet.now += LEASE // 3
    assert fleet.tell(Tick()) == [Renew(D, ("a",)), Renew(P, ("a",))]
    commands = fleet.report(D, HandoffExpired(0, "a", False))
    assert Drop(P, "a") in commands and Drop(D, "a") not in commands
    assert [type(command) for command in commands[-2:]] == [Reserve, Prefill]
    assert isinstance(commands[-1], Prefill) and commands[-1].attempt_id == "a~1"


def test_an_answer_that_ends_with_its_first_token_frees_the_place_that_was_reserved() -> None:
    fleet = Fleet("prefill", "decode")
    fleet.submit()
    fleet.reserved()
    commands = fleet.finished(P, reason=FinishReason.STOP)
    assert Drop(D, "a") in commands and isinstance(commands[-1], End)
    fleet.report(D, fleet.end("a"))
    fleet.core.check_idle()


# -- the end of a request, over all its attempts ----------------------------------------------------------------------


def test_an_answer_that_two_attempts_gave_is_accounted_for_once_from_its_arrival() -> None:
    fleet = Fleet("both", "both")
    (serve,) = [command for command in fleet.submit(slo=Slo(ttft_ns=5, tpot_ns=10**9)) if isinstance(command, Serve)]
    fleet.report(serve.worker, RequestAdmitted(0, "a", 32, True))  # now 4
    fleet.report(serve.worker, FirstToken(0, "a"))  # now 5
    fleet.now = 100
    commands = fleet.tell(WorkerDown(serve.worker, {"a": 3}))
    (again,) = [command for command in commands if isinstance(command, Serve)]
    assert (again.attempt_id, again.num_output_tokens) == ("a~1", 3)
    fleet.report(again.worker, RequestAdmitted(0, "a~1", 96, True))
    fleet.report(again.worker, FirstToken(0, "a~1"))
    fleet.now = 200
    finished = the_end(fleet.report(again.worker, fleet.end("a~1", FinishReason.LENGTH, 5))).finished
    assert finished is not None
    assert (finished.request_id, finished.num_prompt_tokens, finished.num_cached_tokens) == ("a", 100, 32)
    latency = finished.latency
    assert (latency.queue_ns, latency.prefill_ns, latency.total_ns) == (1, 1, 198)
    assert latency.num_output_tokens == 8
    fleet.core.check_idle()


def expected_answer(fleet: Fleet) -> int:
    lengths = fleet.core.lengths
    return lengths.mean(lengths.group("standard", 100), 0, 1000)


def test_an_answer_that_two_attempts_gave_teaches_its_whole_length() -> None:
    fleet = Fleet("both", "both")
    for number in range(40):
        name = str(number)
        (serve,) = fleet.tell(Arrived(Submission(name, 100, 1000)))
        assert isinstance(serve, Serve)
        fleet.report(serve.worker, FirstToken(0, name))
        commands = fleet.tell(WorkerDown(serve.worker, {name: 30}))
        (again,) = [command for command in commands if isinstance(command, Serve)]
        fleet.report(again.worker, FirstToken(0, f"{name}~1"))
        fleet.report(again.worker, fleet.end(f"{name}~1", FinishReason.STOP, 10))
        fleet.up(serve.worker)
    assert expected_answer(fleet) == pytest.approx(40, rel=0.15)


@pytest.mark.parametrize(("reason", "expected"), [(FinishReason.ABORT, 240), (FinishReason.STOP, 3)])
def test_an_answer_whose_client_went_away_is_no_short_answer(reason: FinishReason, expected: int) -> None:
    fleet = Fleet("both")
    for number in range(40):
        fleet.submit(str(number))
        fleet.report(0, FirstToken(0, str(number)))
        fleet.tell(Cancelled(str(number), 3, reason))
        fleet.report(0, fleet.end(str(number), reason, 4))
    assert expected_answer(fleet) == pytest.approx(expected, rel=0.1, abs=1)


def test_time_in_the_admission_queue_counts_as_queueing() -> None:
    fleet = Fleet("both", max_prefills_in_flight_per_worker=1)
    fleet.submit("a")
    fleet.now = 1000
    assert fleet.submit("b") == []
    fleet.now = 3000
    assert fleet.report(0, FirstToken(0, "a")) == [Serve(0, "b", "b", 0)]
    fleet.now = 3100
    account = LatencyBreakdown(10, 20, 30, 8)
    finished = RequestFinished(0, "b", FinishReason.LENGTH, 100, 0, 0, account, None)
    end = the_end(fleet.report(0, finished))
    assert end.finished is not None
    assert end.finished.latency.total_ns == fleet.now - 1001
    assert (end.finished.latency.prefill_ns, end.finished.latency.decode_ns) == (20, 30)


def test_a_client_that_has_all_it_wants_gets_the_workers_account() -> None:
    fleet = Fleet("both")
    fleet.submit()
    fleet.report(0, FirstToken(0, "a"))
    assert fleet.tell(Cancelled("a", 3, FinishReason.STOP)) == [Drop(0, "a", FinishReason.STOP)]
    finished = the_end(fleet.report(0, fleet.end("a", FinishReason.STOP, 4))).finished
    assert finished is not None and finished.reason is FinishReason.STOP
    assert finished.latency.num_output_tokens == 3  # one more was sampled, and nobody will see it
    fleet.core.check_idle()


def test_a_client_that_has_all_it_wants_gets_an_end_although_the_worker_dies() -> None:
    fleet = Fleet("both", "both")
    (serve,) = [command for command in fleet.submit() if isinstance(command, Serve)]
    fleet.report(serve.worker, FirstToken(0, "a"))
    fleet.tell(Cancelled("a", 3, FinishReason.STOP))
    finished = the_end(fleet.tell(WorkerDown(serve.worker, {"a": 3}))).finished
    assert finished is not None
    assert (finished.reason, finished.latency.num_output_tokens) == (FinishReason.STOP, 3)
    fleet.core.check_idle()


def test_an_answer_whose_last_token_came_has_ended_although_its_worker_died_before_it_said_so() -> None:
    fleet = Fleet("both", "both")
    (serve,) = [command for command in fleet.submit() if isinstance(command, Serve)]
    fleet.report(serve.worker, FirstToken(0, "a"))
    finished = the_end(fleet.tell(WorkerDown(serve.worker, {"a": 8}))).finished
    assert finished is not None
    assert (finished.reason, finished.latency.num_output_tokens) == (FinishReason.LENGTH, 8)
    fleet.core.check_idle()


# -- workers ----------------------------------------------------------------------------------------------------------


def test_a_worker_comes_back_into_shared_memory_only_when_its_peers_have_forgotten_it() -> None:
    fleet = Fleet("both", "both", "both", memory_domain=0)
    assert fleet.tell(WorkerDown(0)) == [ForgetPeer(1, 0), ForgetPeer(2, 0)]
    assert fleet.up(0) == [] and 0 not in fleet.core.members.up
    fleet.report(1, PeerForgotten(0, 0))
    assert 0 not in fleet.core.members.up
    fleet.report(2, PeerForgotten(0, 0))
    assert 0 in fleet.core.members.up


def test_a_peer_that_dies_owes_nothing_any_more() -> None:
    fleet = Fleet("both", "both", memory_domain=0)
    fleet.tell(WorkerDown(0))
    fleet.up(0)
    assert fleet.tell(WorkerDown(1)) == [ForgetPeer(0, 1)]
    assert 0 in fleet.core.members.up


def test_memory_of_its_own_needs_no_forgetting() -> None:
    fleet = Fleet("both", "both")
    assert fleet.tell(WorkerDown(0)) == []
    fleet.up(0)
    assert 0 in fleet.core.members.up


def test_a_changed_role_counts_for_the_next_request_and_for_none_before() -> None:
    fleet = Fleet("prefill", "decode", "decode")
    commands = fleet.submit("a")
    assert isinstance(commands[0], Reserve)
    assert fleet.tell(RoleChanged(2, "prefill")) == []
    fleet.tell(RoleChanged(P, "decode"))
    fleet.report(commands[0].worker, HandoffReserved(fleet.now, "a", 0, ((1,),)))
    reserve, prefill = fleet.submit("b")
    assert isinstance(reserve, Reserve) and reserve.worker in (0, 1)
    assert isinstance(prefill, Prefill) and prefill.worker == 2
    assert fleet.report(reserve.worker, HandoffReserved(fleet.now, "b", 0, ((1,),))) == [Send(2, "b", 0)]


def streaming(fleet: Fleet, request_id: str = "a") -> int:
    """A request gets its first token; returns its worker."""
    (serve,) = fleet.submit(request_id)
    assert isinstance(serve, Serve)
    fleet.report(serve.worker, RequestAdmitted(fleet.now, request_id, 0, True))
    fleet.report(serve.worker, FirstToken(fleet.now, request_id))
    return serve.worker


def test_a_worker_that_becomes_a_prefill_worker_hands_its_streams_over_where_they_are() -> None:
    fleet = Fleet("both", "both")
    here = streaming(fleet)
    there = 1 - here
    assert fleet.tell(RoleChanged(here, "prefill", {"a": 3})) == [
        Drop(here, "a"),
        Restarted("a", "a~1", 3),
        Reserve(there, "a", "a~1", 3, LEASE, False),
    ]
    (prefill,) = fleet.report(there, HandoffReserved(fleet.now, "a~1", 0, ((5,),)))
    assert prefill == Prefill(here, "a", "a~1", 3, there, 0, (), LEASE)
    fleet.report(here, fleet.end("a"), FirstToken(fleet.now, "a~1"))
    assert fleet.report(there, HandoffDelivered(fleet.now, "a~1")) == [Release(here, "a~1")]
    fleet.report(here, HandoffReleased(0, "a~1"))
    fleet.finished(there, "a~1")
    assert fleet.core.counts["moved"] == fleet.core.counts["placed_moved"] == 1
    fleet.core.check_idle()


@pytest.mark.parametrize("role", ["decode", "both"])
def test_a_worker_that_may_still_decode_keeps_its_streams(role: Role) -> None:
    fleet = Fleet("both", "both")
    assert fleet.tell(RoleChanged(streaming(fleet), role, {"a": 3})) == []


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_what_has_no_token_yet_or_must_stay_whole_begins_anew_elsewhere(num_tokens: int) -> None:
    fleet = Fleet("both", "both")
    (serve,) = fleet.tell(Arrived(Submission("a", 100, 8, hands_off=not num_tokens)))
    assert isinstance(serve, Serve)
    here, there = serve.worker, 1 - serve.worker
    if num_tokens:
        fleet.report(here, RequestAdmitted(fleet.now, "a", 0, True), FirstToken(fleet.now, "a"))
    moved = fleet.tell(DrainStarted(here, {"a": num_tokens}))
    assert moved == [Drop(here, "a"), Restarted("a", "a~1", num_tokens), Serve(there, "a", "a~1", num_tokens)]


def test_a_handoff_on_its_way_to_a_worker_that_drains_goes_to_another() -> None:
    fleet = Fleet("prefill", "decode", "decode")
    reserve, _ = fleet.submit()
    assert isinstance(reserve, Reserve)
    here, there = reserve.worker, 3 - reserve.worker
    fleet.report(here, HandoffReserved(fleet.now, "a", 0, ((5,),)))
    commands = fleet.tell(DrainStarted(here))
    assert commands[:-1] == [
        Drop(P, "a"),
        Drop(here, "a"),
        Restarted("a", "a~1", 0),
        Reserve(there, "a", "a~1", 0, LEASE, False),
    ]
    assert isinstance(commands[-1], Prefill) and commands[-1].worker == P


def test_a_drained_worker_says_so_once_when_nothing_is_left_and_gets_nothing_before_it_is_used_again() -> None:
    fleet = Fleet("both", "both")
    here = streaming(fleet)
    there = 1 - here
    fleet.tell(DrainStarted(here, {"a": 3}))
    fleet.report(there, HandoffReserved(fleet.now, "a~1", 0, ((5,),)))
    fleet.report(here, fleet.end("a"), FirstToken(fleet.now, "a~1"))
    fleet.report(there, HandoffDelivered(fleet.now, "a~1"))
    assert fleet.report(here, HandoffReleased(0, "a~1")) == [Drained(here)]
    assert fleet.tell(DrainStarted(here)) == []
    assert [streaming(fleet, name) for name in "bc"] == [there, there]
    assert fleet.report(here, KVEvents(0, 7, (b"x",))) == []  # of no interest now
    assert fleet.tell(DrainEnded(here)) == [AskKVSnapshot(here)]
    assert streaming(fleet, "d") == here


def test_a_stream_without_another_worker_ends_where_it_is_and_then_the_worker_is_drained() -> None:
    fleet = Fleet("both")
    streaming(fleet)
    assert fleet.tell(DrainStarted(0, {"a": 3})) == []
    assert fleet.submit("b") == []  # it waits for a worker
    end, drained = fleet.finished(0)
    assert isinstance(end, End) and drained == Drained(0)
    snapshot, serve = fleet.tell(DrainEnded(0))
    assert snapshot == AskKVSnapshot(0) and isinstance(serve, Serve)


def test_a_worker_that_dies_while_it_drains_is_drained_and_comes_back_draining() -> None:
    fleet = Fleet("both", "both")
    here = streaming(fleet)
    fleet.tell(DrainStarted(here, {"a": 3}))
    commands = fleet.tell(WorkerDown(here, {"a": 3}))
    assert Drained(here) in commands and any(isinstance(command, Serve) for command in commands)
    fleet.up(here)
    assert streaming(fleet, "b") == 1 - here


def test_a_stream_whose_last_token_is_on_its_way_is_left_alone() -> None:
    fleet = Fleet("both", "both")
    assert fleet.tell(DrainStarted(streaming(fleet), {"a": 8})) == []


def test_some_worker_is_left_for_each_phase() -> None:
    fleet = Fleet("prefill", "decode", "both")
    members = fleet.core.members
    members.check_change(2, None)
    fleet.tell(DrainStarted(2))
    for worker, role in ((P, "decode"), (D, "prefill"), (P, None), (D, None)):
        with pytest.raises(ConflictError, match="no worker that can"):
            members.check_change(worker, role)
    members.check_change(P, "both")
    with pytest.raises(NotFoundError, match="worker is 3; there are 0, 1, 2"):
        members.check_change(3, None)


def test_missed_kv_events_are_asked_for() -> None:
    fleet = Fleet("both")
    assert fleet.report(0, KVEvents(0, 1, (b"x",))) == []
    assert fleet.report(0, KVEvents(0, 3, (b"z",))) == [AskKVSnapshot(0)]
    assert fleet.report(0, KVSnapshot(0, 3, (b"x", b"y", b"z"))) == []
    assert fleet.report(0, KVEvents(0, 4, (b"w",))) == []


def test_changed_settings_reach_a_worker_that_is_up_and_every_later_process_of_it() -> None:
    fleet = Fleet("prefill", "decode")
    settings = shape_preset("unified")
    assert fleet.tell(SchedulerChanged(D, settings)) == [Configure(D, settings)]
    fleet.tell(WorkerDown(D))
    assert fleet.up(D) == [Configure(D, settings)]
    fleet.tell(WorkerDown(P))
    assert fleet.tell(SchedulerChanged(P, settings)) == []
    assert fleet.up(P) == [Configure(P, settings)]


def test_workers_never_await_one_another_in_a_circle() -> None:
    """Each would hold the blocks for which the other's prompt waits, for ever."""
    fleet = Fleet("prefill", "decode")
    fleet.submit("a")
    fleet.tell(RoleChanged(P, "decode"))
    fleet.tell(RoleChanged(D, "both"))
    (whole,) = fleet.submit("b")
    assert isinstance(whole, Serve)
    fleet.reserved("a")
    fleet.prefilled("a")
    fleet.delivered("a")
    fleet.finished(D, "a")
    fleet.tell(RoleChanged(D, "prefill"))
    reserve, _ = fleet.submit("c")
    assert isinstance(reserve, Reserve) and reserve.worker == P


# -- what is counted --------------------------------------------------------------------------------------------------


def test_every_placement_loss_and_retry_is_counted_once_by_its_reason() -> None:
    fleet = Fleet("prefill", "decode")
    fleet.submit()
    fleet.reserved()
    fleet.report(D, HandoffExpired(0, "a", False))
    fleet.reserved("a~1")
    fleet.prefilled("a~1")
    fleet.delivered("a~1")
    fleet.submit("b")
    fleet.reserved("b")
    fleet.report(P, TransferFailed(fleet.now, "b", True, "the link is gone"))
    fleet.tell(Cancelled("b"))
    fleet.tell(WorkerDown(D, {"a": 3}))
    assert dict(fleet.core.counts) == {
        "placed_remote": 3,
        "placed_whole": 1,
        "placed_only_worker": 1,
        "handoffs": 1,
        "leases_expired": 1,
        "lost_transfer": 1,
        "lost_attempt": 1,
        "lost_worker": 1,
        "retried": 3,
    }


def test_what_is_refused_is_counted_by_its_reason_and_is_not_open() -> None:
    fleet = Fleet("both", max_prefills_in_flight_per_worker=1, admission=AdmissionConfig(max_queued_per_tenant=1))
    fleet.submit("a", tenant="t")
    assert fleet.submit("b", tenant="t") == []
    (end,) = fleet.submit("c", tenant="t")
    assert isinstance(end, End) and end.error is not None and end.error.code == "tenant_queue_full"
    assert dict(fleet.core.counts) == {"placed_both": 1, "refused_tenant_queue_full": 1}
    assert fleet.core.num_open == 2
    fleet.now += 300 * NS_PER_S
    end = the_end(fleet.tell(Tick()))
    assert end.request_id == "b" and end.error is not None and end.error.code == "queue_timeout"
    assert fleet.core.counts["expired_queue_timeout"] == 1


def test_an_end_that_no_worker_gives_an_account_of_says_what_the_cluster_knows() -> None:
    fleet = Fleet("both", "both", slo=Slo(tpot_ns=10))
    (serve,) = [command for command in fleet.submit(slo=Slo(ttft_ns=2)) if isinstance(command, Serve)]
    arrived_ns = fleet.now
    fleet.report(serve.worker, RequestAdmitted(0, "a", 32, True))
    fleet.report(serve.worker, FirstToken(0, "a"))
    fleet.now = arrived_ns + 71
    finished = the_end(fleet.tell(WorkerDown(serve.worker, {"a": 8}))).finished
    assert finished == RequestFinished(
        arrived_ns + 72, "a", FinishReason.LENGTH, 100, 32, 0, LatencyBreakdown(1, 1, 70, 8), True
    )


def test_what_a_reservation_finds_in_a_cache_is_compared_with_what_was_expected_there() -> None:
    fleet = Fleet("prefill", "decode")
    for number in range(MIN_ADMISSIONS):
        assert not fleet.core.router.alarm
        fleet.submit(str(number))
        fleet.report(D, HandoffReserved(fleet.now, str(number), 64, ((1,),)))
    assert f"of the last {MIN_ADMISSIONS} prompts" in fleet.core.router.alarm


def test_a_waiting_token_is_priced_by_the_workers_that_compute_prompts_now() -> None:
    fleet = Fleet("prefill", "prefill", max_prefills_in_flight_per_worker=1)
    for worker, token_ns in ((0, 10.0), (1, 50.0)):
        fleet.tell(Reported(worker, (), LoadReport(0, 0, 100, 0, token_ns, 0.0)))
    for name in "abc":  # the third waits
        fleet.submit(name)
    assert fleet.core.admission.queue_ns("standard") == 100 * 60 // 4
    fleet.tell(RoleChanged(1, "decode"))
    assert fleet.core.admission.queue_ns("standard") == 100 * 10
