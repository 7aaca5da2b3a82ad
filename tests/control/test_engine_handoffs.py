"""The engine's side of a handoff: leases, drops that come too early, blocks of another worker, what to send."""

import random

import pytest

from diptych.control.config import CacheConfig, EngineConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.leases import Leases
from diptych.control.engine.outgoing import Outgoing, SendChunk
from diptych.control.events import (
    Event,
    HandoffDelivered,
    HandoffExpired,
    HandoffReleased,
    HandoffReserved,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
)
from diptych.control.kv_layout import KVLayout
from diptych.control.request import BlockTables, Request, only_table
from diptych.control.step import ScheduledPrefill, StepResult
from tests.control.driver import expect_answers
from tests.laws import law

BLOCK = 16
BLOCKS = tuple(range(7))


def core(first_block: int = 0, num_blocks: int = 32) -> EngineCore:
    return EngineCore(EngineConfig(CacheConfig(num_blocks, BLOCK, first_block=first_block)))


def reserve(decode: EngineCore, request_id: str = "a", lease_ns: int = 0, now: int = 0) -> HandoffReserved:
    assert decode.reserve(Request(request_id, 100, 8), now, lease_ns) == []
    output = decode.begin_step(now)
    events = decode.take_events() if output is None else decode.end_step(StepResult(output.step_id), now)
    (event,) = events
    assert isinstance(event, HandoffReserved)
    return event


def borrowing(tables: BlockTables, num_cached: int = 0, request_id: str = "a") -> Request:
    request = Request(request_id, 100, 8)
    request.hands_off = True
    request.remote_block_tables, request.num_remote_tokens = tables, num_cached
    return request


def prefill(worker: EngineCore, request: Request, now: int = 0) -> list[tuple[int, ...]]:
    """Run a prompt to its first token; the block tables that the executor saw."""
    worker.add_request(request, now)
    tables = []
    while request.num_output_tokens == 0:
        output = worker.begin_step(now)
        assert output is not None
        tables += [only_table(chunk.block_tables) for chunk in output.prefills]
        worker.end_step(StepResult(output.step_id), now + 1)
    return tables


def test_a_prompt_is_computed_into_the_blocks_that_the_decode_worker_reserved() -> None:
    decode, writer = core(first_block=1000), core()
    reserved = reserve(decode)
    blocks = only_table(reserved.block_tables)
    assert len(blocks) == 7 and min(blocks) >= 1000
    request = borrowing(reserved.block_tables, 32)
    assert set(prefill(writer, request)) == {blocks}
    assert request.num_computed_tokens == 100
    assert writer.kv.pool.num_used == 0  # nothing of its own
    assert writer.release("a", 2) == [HandoffReleased(2, "a")]
    writer.kv.check()
    assert not writer.requests
    assert decode.deliver("a", 3, first_step_ns=0, first_token_ns=1) == [HandoffDelivered(3, "a")]
    output = decode.begin_step(3)
    assert output is not None and only_table(output.resumed[0].block_tables)[:7] == blocks


@pytest.mark.parametrize(("held", "cached_there"), [(3, 0), (6, 32), (2, 48), (0, 16)])
def test_of_a_prompt_for_another_worker_what_is_cached_here_is_copied_and_the_rest_computed(
    held: int, cached_there: int
) -> None:
    hashes = tuple(bytes([number] * 4) for number in range(6))
    writer = core()
    if held:
        first = Request("first", BLOCK * held + 1, 8, block_hashes=hashes[:held])
        prefill(writer, first)
        own = only_table(first.tables)
        writer.abort("first", 5)
    request = borrowing((tuple(range(1000, 1007)),), cached_there)
    request.block_hashes = list(hashes)
    writer.add_request(request, 6)
    output = writer.begin_step(6)
    assert output is not None
    start = max(held * BLOCK, cached_there)
    (chunk,) = output.prefills
    assert (chunk.start, chunk.num_tokens, chunk.block_tables) == (start, 100 - start, (tuple(range(1000, 1007)),))
    there = cached_there // BLOCK
    assert output.block_copies == tuple((own[at], 1000 + at) for at in range(there, held))
    events = [event for event in writer.end_step(StepResult(output.step_id), 7) if isinstance(event, RequestAdmitted)]
    assert [event.num_cached_tokens for event in events] == [start]
    assert writer.release("a", 8) == [HandoffReleased(8, "a")]
    writer.kv.check()


def test_a_worker_without_memory_prefills_for_others() -> None:
    decode, writer = core(first_block=100), core(num_blocks=5)
    assert prefill(writer, borrowing(reserve(decode).block_tables))


def test_a_drop_that_comes_first_refuses_what_comes_after_it() -> None:
    worker = core()
    assert worker.drop("a", 1) == [HandoffReleased(1, "a")]
    assert worker.reserve(Request("a", 100, 8), 2) == [HandoffReleased(2, "a")]
    assert worker.add_request(Request("a", 100, 8), 3) == [HandoffReleased(3, "a")]
    assert not worker.requests


@pytest.mark.parametrize("stage", ["waiting", "reserved", "delivered", "decoding"])
def test_a_drop_ends_an_attempt_of_the_decode_worker_wherever_it_is(stage: str) -> None:
    worker = core()
    if stage == "waiting":
        worker.reserve(Request("a", 100, 8), 0)
    else:
        reserve(worker)
    if stage in ("delivered", "decoding"):
        worker.deliver("a", 1, first_step_ns=0, first_token_ns=1)
    if stage == "decoding":
        output = worker.begin_step(2)
        assert output is not None
        worker.end_step(StepResult(output.step_id), 3)
    (event,) = worker.drop("a", 4)
    assert isinstance(event, RequestFinished)
    assert worker.kv.pool.num_used == 0
    worker.kv.check()


def test_an_answer_that_its_first_token_completes_here_ends_with_its_delivery() -> None:
    """The worker that computed the prompt may have a longer context than this one."""
    worker = EngineCore(EngineConfig(CacheConfig(32, BLOCK), max_model_len=101))
    reserve(worker)
    delivered, ended = worker.deliver("a", 1, first_step_ns=0, first_token_ns=1)
    assert isinstance(delivered, HandoffDelivered)
    assert isinstance(ended, RequestFinished) and ended.reason == "length" and ended.latency.num_output_tokens == 1
    assert worker.kv.pool.num_used == 0


def test_an_answer_is_not_cut_by_the_context_of_the_worker_that_computes_its_prompt() -> None:
    """The worker that writes it may have a longer one."""
    worker = EngineCore(EngineConfig(CacheConfig(32, BLOCK), max_model_len=101))
    request = Request("a", 100, 8)
    request.hands_off = True
    prefill(worker, request)
    assert (request.num_output_tokens, request.max_tokens) == (1, 8)
    assert worker.drop("a", 5) == [HandoffReleased(5, "a")]  # it waited for its delivery


def test_a_finished_prefill_that_is_dropped_is_released() -> None:
    worker = core()
    request = Request("a", 100, 8)
    request.hands_off = True
    prefill(worker, request)
    assert worker.kv.pool.num_used == 7
    assert worker.drop("a", 5) == [HandoffReleased(5, "a")]
    assert worker.kv.pool.num_used == 0


def test_a_reservation_expires_unless_it_is_renewed_and_never_after_its_delivery() -> None:
    worker = core()
    reserve(worker, lease_ns=100)
    assert worker.next_expiry_ns == 100
    worker.renew(["a", "unknown"], 60)
    assert worker.expire(100) == [] and worker.next_expiry_ns == 160
    assert worker.expire(160) == [HandoffExpired(160, "a", is_sender=False)]
    assert worker.kv.pool.num_used == 0 and worker.next_expiry_ns is None
    assert worker.deliver("a", 170, first_step_ns=0, first_token_ns=1) == []
    reserve(worker, "b", lease_ns=100, now=200)
    worker.deliver("b", 250, first_step_ns=0, first_token_ns=1)
    assert worker.next_expiry_ns is None and worker.expire(10_000) == []


def test_finished_blocks_that_nobody_takes_expire() -> None:
    worker = core()
    request = Request("a", 100, 8)
    request.hands_off, request.lease_ns = True, 50
    worker_now = 10
    prefill(worker, request, worker_now)
    assert worker.next_expiry_ns == worker_now + 1 + 50
    assert worker.expire(worker_now + 51) == [HandoffExpired(worker_now + 51, "a", is_sender=True)]
    assert worker.kv.pool.num_used == 0


@law(weight=0.2)
def test_leases_expire_exactly_when_nobody_has_renewed_them(seed: int) -> None:
    rng = random.Random(seed)
    leases, expiry = Leases(), dict[str, int]()
    lengths: dict[str, int] = {}
    now = 0
    for number in range(300):
        now += rng.randrange(4)
        name = f"attempt{number}"
        if rng.random() < 0.4:
            lengths[name] = rng.randrange(1, 40)
            expiry[name] = now + lengths[name]
            leases.grant(name, lengths[name], now)
        elif expiry and rng.random() < 0.6:
            chosen = rng.choice(list(expiry))
            leases.renew([chosen], now)
            expiry[chosen] = now + lengths[chosen]
        elif expiry:
            leases.end(chosen := rng.choice(list(expiry)))
            del expiry[chosen]
        due = {name for name, when in expiry.items() if when <= now}
        assert set(leases.take_expired(now)) == due
        for name in due:
            del expiry[name]
        assert leases.next_expiry_ns == min(expiry.values(), default=None)


def prefilled(request_id: str, start: int, num_tokens: int) -> ScheduledPrefill:
    return ScheduledPrefill(request_id, start, num_tokens, (BLOCKS,), is_last=False)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 100, 1000])
@pytest.mark.parametrize("cached", [0, 32, 96])
def test_whatever_the_chunks_each_token_is_sent_once_in_whole_blocks(chunk: int, cached: int) -> None:
    outgoing, sent = Outgoing(KVLayout.dense(BLOCK)), list[SendChunk]()
    outgoing.begin("a", cached, 107)
    for start in range(0, 107, chunk):
        count = min(chunk, 107 - start)
        step = [prefilled("a", start, count), prefilled("stranger", 0, 5)]
        in_step = outgoing.in_step(step)
        assert in_step == outgoing.in_step(step), "a step that is not over changes nothing"
        sent += outgoing.on_step(step)
        assert sent[len(sent) - len(in_step) :] == in_step
    position = cached
    for piece in sent:
        assert piece.start == position and piece.is_last == (piece is sent[-1])
        assert piece.num_tokens % BLOCK == 0 or piece.is_last
        position += piece.num_tokens
    assert position == 107 and sent[-1].is_last and len(outgoing) == 0


def test_of_borrowed_blocks_only_the_commit_is_sent() -> None:
    outgoing = Outgoing(KVLayout.dense(BLOCK))
    outgoing.begin("a", 0, 100, is_borrowed=True)
    assert outgoing.in_step([prefilled("a", 0, 64)]) == outgoing.on_step([prefilled("a", 0, 64)]) == []
    assert outgoing.on_step([prefilled("a", 64, 36)]) == [SendChunk("a", 100, 0, (BLOCKS,), True)]


def test_a_step_that_was_broken_off_teaches_nothing_and_leaves_nothing() -> None:
    worker = core()
    worker.add_request(Request("a", 100, 8), 0)
    output = worker.begin_step(0)
    assert output is not None and output.prefills
    worker.drop("a", 5)
    events = worker.end_step(StepResult(output.step_id), 6, num_steps=0)
    assert [type(event).__name__ for event in events if not isinstance(event, HandoffReleased)][-1] == "StepFinished"
    assert worker.model.coefficients == core().model.coefficients
    assert worker.kv.pool.num_used == 0
    worker.kv.check()


def test_a_preempted_stream_gets_blocks_before_a_prompt_that_another_worker_prefills() -> None:
    worker = core(num_blocks=24)
    expect_answers(worker, 1)
    now = 0

    def step() -> list[Event]:
        nonlocal now
        now += 1
        output = worker.begin_step(now)
        return worker.take_events() if output is None else worker.end_step(StepResult(output.step_id), now)

    for name in ("first", "second"):
        worker.add_request(Request(name, 140, 100), now)
    assert any(isinstance(event, RequestPreempted) for _ in range(99) for event in step())
    worker.reserve(Request("newcomer", 16, 8), now)
    seen: list[str] = []
    while worker.requests and "newcomer" not in seen:
        seen += [e.request_id for e in step() if isinstance(e, RequestAdmitted | HandoffReserved | RequestFinished)]
    assert seen == ["first", "second", "newcomer"]


def test_a_stream_that_loses_its_blocks_in_the_plan_in_which_it_is_taken_over_was_never_in_the_batch() -> None:
    """The executor applies ``paused`` before ``resumed``: it would decode a request that has no blocks."""
    worker = core(num_blocks=16)
    expect_answers(worker, 1)
    assert worker.reserve(Request("a", 6 * BLOCK, 20), 0) == []
    assert worker.begin_step(0) is None
    blocks = worker.kv.pool.allocate(worker.kv.pool.num_available)
    worker.deliver("a", 1, first_step_ns=0, first_token_ns=1)
    output = worker.begin_step(2)
    assert output is None or not (output.resumed or output.paused or output.num_decodes)
    (preempted,) = [event for event in worker.take_events() if isinstance(event, RequestPreempted)]
    assert preempted.request_id == "a"
    if output is not None:
        worker.end_step(StepResult(output.step_id), 3)
    worker.kv.pool.release(blocks)
    output = worker.begin_step(4)
    assert output is not None
    assert [(chunk.start, chunk.num_tokens, chunk.is_last) for chunk in output.prefills] == [(0, 97, True)]
