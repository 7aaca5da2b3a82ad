"""The worker's half of every protocol: what goes out for what comes in, and when the load is reported."""

import pytest

from diptych.control.commands import (
    NOT_RESERVED,
    AskKVSnapshot,
    Drop,
    ForgetPeer,
    Prefill,
    Release,
    Renew,
    Reserve,
    Send,
)
from diptych.control.compute_share import ComputeShare
from diptych.control.config import BudgetConfig, CacheConfig, EngineConfig, SchedulerConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.engine.outgoing import SendChunk
from diptych.control.engine.worker_core import (
    REPORT_INTERVAL_NS,
    CancelTransfer,
    ChunkArrived,
    CommitTransfer,
    ExpectTransfer,
    ForgetTransfer,
    OpenTransfer,
    Outbox,
    TransferBroken,
    TransferCommitted,
    WorkerCore,
)
from diptych.control.events import (
    FirstToken,
    HandoffDelivered,
    HandoffExpired,
    HandoffReleased,
    HandoffReserved,
    KVEvents,
    KVSnapshot,
    PeerForgotten,
    RequestFinished,
    RequestQueued,
    Resized,
    TransferFailed,
)
from diptych.control.request import BlockTables, FinishReason, Request, only_table
from diptych.control.step import StepResult

BLOCK = 16
PROMPT = hash_blocks(list(range(100)), BLOCK)


def worker_of(*, publishes_kv: bool = True, reports_load: bool = True, max_model_len: int = 8192) -> WorkerCore:
    settings = SchedulerConfig("fcfs", BudgetConfig("fixed", 48), max_num_seqs=16)
    engine = EngineCore(EngineConfig(CacheConfig(32, BLOCK), settings, max_model_len=max_model_len))
    return WorkerCore(engine, publishes_kv=publishes_kv, reports_load=reports_load)


def request(request_id: str = "a", max_tokens: int = 8) -> Request:
    return Request(request_id, 100, max_tokens, block_hashes=PROMPT)


def step(worker: WorkerCore, now: int) -> Outbox:
    """Plan a step, run it, and what is to be done after it."""
    output = worker.begin_step(now)
    assert output is not None
    worker.end_step(output, StepResult(output.step_id), now + 10)
    return worker.take_outbox()


def reserved(worker: WorkerCore, attempt_id: str = "a", *, borrowed: bool = False, lease_ns: int = 0) -> Outbox:
    worker.reserve(Reserve(1, "a", attempt_id, 0, lease_ns, borrowed), request(attempt_id), 0)
    worker.begin_step(0)
    return worker.take_outbox()


def prefilling(worker: WorkerCore, *, cached: int = 32, blocks: BlockTables = (), lease_ns: int = 0) -> Outbox:
    worker.prefill(Prefill(0, "a", "a", 0, 7, cached, blocks, lease_ns), request(), 0)
    return worker.take_outbox()


def test_kv_leaves_behind_the_tokens_of_its_step_in_whole_blocks_and_the_commit_is_last() -> None:
    worker = worker_of()
    outbox = prefilling(worker)
    assert outbox.before == [OpenTransfer("a", 7, 32)]
    assert [type(event) for event in outbox.events] == [RequestQueued]
    blocks = (tuple(range(7)),)
    assert step(worker, 0).after == [SendChunk("a", 32, 16, blocks, False)]
    assert step(worker, 20).after == [SendChunk("a", 48, 48, blocks, False)]
    last = step(worker, 40)
    assert last.after == [SendChunk("a", 96, 4, blocks, True), CommitTransfer("a", 0, 50)]
    assert FirstToken(50, "a") in last.events
    worker.handle(Release(0, "a"), 60)
    outbox = worker.take_outbox()
    assert (outbox.before, outbox.events) == ([CancelTransfer("a")], [HandoffReleased(60, "a")])
    worker.begin_step(70)
    assert worker.is_idle


def ahead(worker: WorkerCore, attempt_id: str = "a", max_tokens: int = 8) -> Outbox:
    worker.prefill(Prefill(0, "a", attempt_id, 0, 7, NOT_RESERVED, (), 0), request(attempt_id, max_tokens), 0)
    return worker.take_outbox()


def test_a_prompt_computed_ahead_of_its_place_sends_nothing_and_gives_no_token_before_there_is_one() -> None:
    worker = worker_of(max_model_len=200)
    assert ahead(worker).before == []
    for now in (0, 20, 40):
        outbox = step(worker, now)
        assert outbox.after == [] and not any(isinstance(event, FirstToken) for event in outbox.events)
    assert worker.is_held_back("a")
    worker.handle(Send(0, "a", 32), 60)
    outbox = worker.take_outbox()
    blocks = (tuple(range(7)),)
    assert outbox.before == [OpenTransfer("a", 7, 32)]
    assert outbox.events == [FirstToken(60, "a")]
    assert outbox.after == [SendChunk("a", 32, 68, blocks, True), CommitTransfer("a", 0, 60)]
    assert not worker.is_held_back("a")
    worker.handle(Send(0, "a", 32), 61)  # the message came twice
    assert worker.take_outbox().is_empty
    worker.handle(Release(0, "a"), 70)
    worker.begin_step(80)
    worker.take_outbox()
    assert worker.is_idle


def test_a_place_that_is_found_while_the_prompt_is_computed_lets_the_rest_stream() -> None:
    worker = worker_of(max_model_len=200)
    ahead(worker)
    step(worker, 0)
    worker.handle(Send(0, "a", 0), 15)
    blocks = (tuple(range(7)),)
    assert worker.take_outbox().after == [SendChunk("a", 0, 48, blocks, False)]
    assert step(worker, 20).after == [SendChunk("a", 48, 48, blocks, False)]
    last = step(worker, 40)
    assert last.after == [SendChunk("a", 96, 4, blocks, True), CommitTransfer("a", 0, 50)]
    assert FirstToken(50, "a") in last.events


def test_the_news_of_a_place_may_overtake_the_prompt() -> None:
    worker = worker_of(max_model_len=200)
    worker.handle(Send(0, "a", 32), 0)
    assert worker.take_outbox().is_empty
    assert ahead(worker).before == [OpenTransfer("a", 7, 32)]
    assert not worker.is_held_back("a")


def test_prompts_computed_ahead_leave_room_for_one_whose_place_is_found() -> None:
    worker = worker_of(max_model_len=160)  # 10 blocks of 32, and 4 for growth: two prompts of 7 fit ahead

    def computed(begun_ns: int) -> set[str]:
        for now in range(begun_ns, begun_ns + 200, 20):
            if (output := worker.begin_step(now)) is not None:
                worker.end_step(output, StepResult(output.step_id), now + 10)
        return {name for name, held in worker.engine.requests.items() if held.is_handed_off}

    for name in "abcd":
        worker.prefill(Prefill(0, "a", name, 0, 7, NOT_RESERVED, (), 0), Request(name, 100, 8), 0)
    assert computed(0) == {"a", "b"}
    assert worker.engine.stats().num_waiting == 2
    worker.handle(Send(0, "d", 0), 300)
    assert computed(300) == {"a", "b", "d"}  # before one that came before it
    worker.handle(Send(0, "a", 0), 600)
    worker.handle(Release(0, "a"), 610)
    worker.handle(Drop(0, "b"), 610)
    assert computed(620) == {"c", "d"}


def test_an_answer_that_ends_with_its_first_token_ends_though_it_was_withheld() -> None:
    worker = worker_of(max_model_len=200)
    ahead(worker, max_tokens=1)
    for now in (0, 20):
        step(worker, now)
    (end,) = [event for event in step(worker, 40).events if isinstance(event, RequestFinished)]
    assert (end.latency.num_output_tokens, end.latency.ttft_ns) == (1, 50)


def test_of_borrowed_blocks_nothing_is_sent_but_the_commit() -> None:
    worker = worker_of()
    assert prefilling(worker, blocks=(tuple(range(50, 57)),)).before == [OpenTransfer("a", 7, 100)]
    assert step(worker, 0).after == []  # tokens 32 .. 79: the first 32 are there
    assert step(worker, 20).after == [CommitTransfer("a", 0, 30)]


def test_a_place_for_kv_is_known_before_its_reservation_is() -> None:
    worker = worker_of()
    outbox = reserved(worker)
    (event,) = outbox.events
    assert isinstance(event, HandoffReserved) and len(only_table(event.block_tables)) == 7
    assert outbox.before == [ExpectTransfer("a", event.block_tables, 0, 100)]
    assert not worker.is_idle


def test_of_a_prompt_whose_beginning_is_cached_only_the_rest_is_expected() -> None:
    worker = worker_of()
    worker.serve(request("before"), 0)
    for now in (0, 20, 40):
        step(worker, now)
    outbox = reserved(worker)
    (event,) = [event for event in outbox.events if isinstance(event, HandoffReserved)]
    assert event.num_cached_tokens == 96
    assert outbox.before == [ExpectTransfer("a", event.block_tables, 96, 4)]


def test_into_borrowed_blocks_only_a_commit_is_expected() -> None:
    worker = worker_of()
    assert reserved(worker, borrowed=True).before == [ExpectTransfer("a", (), 100, 0)]


def test_a_commit_that_comes_in_time_is_taken_over_and_one_that_comes_late_is_not() -> None:
    worker = worker_of()
    reserved(worker)
    assert worker.on_transfer(TransferCommitted("a", 1, 2, 300, 40), 50)
    assert worker.take_outbox().events == [HandoffDelivered(50, "a", 300, 40)]
    assert not worker.on_transfer(TransferCommitted("a", 1, 2), 60)
    assert worker.take_outbox().is_empty
    worker.handle(Drop(1, "a"), 70)
    outbox = worker.take_outbox()
    assert outbox.before == []  # nothing is expected any more
    assert [event.reason for event in outbox.events if isinstance(event, RequestFinished)] == [FinishReason.ABORT]


@pytest.mark.parametrize("borrowed", [False, True])
def test_of_a_reservation_that_is_dropped_nothing_more_is_taken(borrowed: bool) -> None:
    worker = worker_of()
    reserved(worker, borrowed=borrowed)
    worker.handle(Drop(1, "a"), 10)
    assert worker.take_outbox().before == [ForgetTransfer("a")]
    worker.begin_step(20)
    assert worker.is_idle


def test_of_a_prompt_that_is_dropped_nothing_more_is_sent() -> None:
    worker = worker_of()
    prefilling(worker)
    step(worker, 0)
    output = worker.begin_step(20)
    assert output is not None
    worker.handle(Drop(0, "a"), 25)
    assert worker.take_outbox().before == [CancelTransfer("a")]
    worker.end_step(output, StepResult(output.step_id), 30)
    assert worker.take_outbox().after == []


@pytest.mark.parametrize("is_sender", [False, True])
def test_a_broken_transfer_is_reported_and_nothing_more_is_sent_of_it(is_sender: bool) -> None:
    worker = worker_of()
    prefilling(worker)
    worker.on_transfer(TransferBroken("a", is_sender, "the link is gone"), 5)
    assert worker.take_outbox().events == [TransferFailed(5, "a", is_sender, "the link is gone")]
    assert step(worker, 10).after == []


def test_a_peer_is_forgotten_with_all_that_is_computed_into_its_blocks_and_nothing_else() -> None:
    worker = worker_of()
    for attempt_id, target, blocks in (("near", 7, ((1, 2),)), ("other", 8, ((3, 4),)), ("copied", 7, ())):
        worker.prefill(Prefill(0, "a", attempt_id, 0, target, 0, blocks, 0), Request(attempt_id, 20, 8), 0)
    worker.take_outbox()
    worker.handle(ForgetPeer(0, 7), 5)
    outbox = worker.take_outbox()
    assert outbox.before == [CancelTransfer("near")]
    assert isinstance(outbox.events[0], RequestFinished) and outbox.events[0].request_id == "near"
    assert outbox.events[1:] == [PeerForgotten(5, 7)]
    assert set(worker.engine.requests) == {"other", "copied"}


def test_leases_that_nothing_renews_end_with_the_turn_in_which_they_run_out() -> None:
    worker = worker_of(reports_load=False)
    reserved(worker, lease_ns=100)
    assert worker.next_wake_ns == 100
    worker.handle(Renew(1, ("a",)), 50)
    worker.on_transfer(ChunkArrived("a", 16), 80)  # a sign of life, too
    worker.end_turn(179)
    assert worker.take_outbox().is_empty
    assert worker.next_wake_ns == 180
    worker.end_turn(180)
    outbox = worker.take_outbox()
    assert outbox.before == [ForgetTransfer("a")]
    assert outbox.events == [HandoffExpired(180, "a", is_sender=False)]
    assert worker.next_wake_ns is None


def test_the_load_is_reported_when_there_is_news_and_not_too_often() -> None:
    worker = worker_of()
    worker.end_turn(5)  # it begins with news: that it is there
    first = worker.take_outbox().load
    assert first is not None and first.time_ns == 5
    assert worker.next_wake_ns is None
    worker.end_turn(10**12)
    assert worker.take_outbox().is_empty
    worker.serve(request(), 20)
    worker.end_turn(20)
    assert worker.take_outbox().load is None
    due_ns = 5 + REPORT_INTERVAL_NS
    assert worker.next_wake_ns == due_ns
    worker.end_turn(due_ns - 1)
    assert worker.take_outbox().load is None
    worker.end_turn(due_ns)
    second = worker.take_outbox().load
    assert second is not None and second.backlog_ns > 0


def test_steps_and_cache_changes_are_no_news_by_themselves_but_commands_are() -> None:
    worker = worker_of()
    worker.serve(request(), 0)
    output = worker.begin_step(0)
    assert output is not None
    worker.end_turn(0)
    assert worker.take_outbox().load is not None
    worker.end_step(output, StepResult(output.step_id), 10)
    worker.end_turn(REPORT_INTERVAL_NS)
    assert worker.take_outbox().load is None
    worker.handle(Renew(0, ()), REPORT_INTERVAL_NS)
    worker.end_turn(REPORT_INTERVAL_NS)
    assert worker.take_outbox().load is not None


def test_a_worker_that_is_not_asked_for_it_reports_no_load_and_no_cache() -> None:
    worker = worker_of(publishes_kv=False, reports_load=False)
    worker.serve(request(), 0)
    events = [event for now in (0, 20, 40) for event in step(worker, now).events]
    worker.handle(AskKVSnapshot(0), 60)
    worker.end_turn(60)
    outbox = worker.take_outbox()
    assert outbox.load is None and worker.next_wake_ns is None
    assert not any(isinstance(event, KVEvents | KVSnapshot) for event in [*events, *outbox.events])


def test_a_snapshot_follows_the_changes_that_it_contains() -> None:
    worker = worker_of()
    worker.serve(request(), 0)
    published = [event for event in step(worker, 0).events if isinstance(event, KVEvents)]
    assert published == [KVEvents(10, 1, PROMPT[:3], ())]
    worker.handle(AskKVSnapshot(0), 15)
    assert worker.take_outbox().events == [KVSnapshot(15, 1, PROMPT[:3])]


def test_a_worker_with_a_quarter_of_its_cores_reports_its_work_as_four_times_as_long() -> None:
    worker = worker_of()
    worker.end_turn(0)
    before = worker.take_outbox().load
    worker.on_resized(ComputeShare((3,), 1), 4.0, 5)
    worker.end_turn(REPORT_INTERVAL_NS)
    outbox = worker.take_outbox()
    assert outbox.events == [Resized(5, ComputeShare((3,), 1))]
    assert before is not None and outbox.load is not None
    assert outbox.load.token_ns == pytest.approx(4 * before.token_ns)
    worker.on_resized(ComputeShare((3,), 1), 1.0, 6, "CPU 9 is gone")
    assert worker.take_outbox().events == [Resized(6, ComputeShare((3,), 1), "CPU 9 is gone")]
