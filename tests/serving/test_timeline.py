"""The live timeline: bounded, numbered, resumable; who decodes is known at every step; its trace is a valid one."""

import asyncio
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import msgspec
import pytest
from fastapi import FastAPI, Request
from servers import RunningServer, fake_server, wait_until
from worker_peers import attempt, fake_peer

from diptych.control.errors import ConfigError, OverloadedError
from diptych.control.events import (
    Event,
    FirstToken,
    HandoffDelivered,
    HandoffExpired,
    HandoffReleased,
    HandoffReserved,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    RequestQueued,
    RequestResumed,
    StepBegun,
    StepFinished,
)
from diptych.control.request import FinishReason
from diptych.control.slo import LatencyBreakdown
from diptych.control.step import StepFeatures
from diptych.serving import edge_limits
from diptych.serving.api import timeline_routes as routes
from diptych.serving.api.direct_body import DIRECT_BODY
from diptych.timeline.records import (
    GapRecord,
    Milestone,
    Record,
    RequestRecord,
    StepBegunRecord,
    StepRecord,
    TransferRecord,
    WorkerRecord,
    event_of,
    request_record,
    split_attempt_id,
    step_record,
)
from diptych.timeline.ring import Timeline, Transfer
from diptych.timeline.trace import hold, trace

MS = 1_000_000


def step(number: int, decodes: int = 0, *prefills: tuple[str, int, int]) -> StepFinished:
    """Step ``number`` takes the millisecond of that number."""
    return StepFinished(number, number * MS, (number + 1) * MS, prefills, decodes, 10 * decodes, MS)


def finished(request_id: str, time_ns: int, error: str | None = None) -> RequestFinished:
    latency = LatencyBreakdown(1, 2, 3, 4)
    return RequestFinished(time_ns, request_id, FinishReason.LENGTH, 8, 0, 0, latency, None, error)


def begun(request_id: str, number: int) -> list[Event]:
    """Arrives, is prefilled whole in step ``number`` and has its first token at its end."""
    return [
        RequestQueued(number * MS, request_id, 8),
        RequestAdmitted(number * MS, request_id, 0, True),
        FirstToken((number + 1) * MS, request_id),
    ]


def changes(timeline: Timeline, worker: int = 0) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Who joined and who left, of each step of a worker."""
    return [(one.joined, one.left) for one in timeline.since(0) if isinstance(one, StepRecord) and one.worker == worker]


def drawn(timeline: Timeline, now: int, last_ns: int | None = None) -> dict[str, Any]:
    """The trace of what is held, once it has been checked."""
    data: dict[str, Any] = json.loads(b"".join(trace(hold(timeline, now), last_ns)))
    check_trace(data)
    return data


def members(records: Iterable[Record], batches: dict[int, set[str]]) -> dict[int, set[str]]:
    """What a viewer that reads these records knows of the decode batches."""
    for record in records:
        if isinstance(record, StepRecord):
            batch = batches.setdefault(record.worker, set())
            assert set(record.left) <= batch and not set(record.joined) & batch
            batches[record.worker] = batch - set(record.left) | set(record.joined)
    return batches


def test_a_request_decodes_from_the_step_after_its_first_token_to_that_of_its_end() -> None:
    timeline = Timeline()
    timeline.on_events(0, [*begun("a", 0), step(0, 0, ("a", 0, 8)), step(1, 1)])
    timeline.on_events(0, [step(2, 1), finished("a", 4 * MS), step(3, 1), *begun("b", 4), step(4, 0, ("b", 0, 8))])
    assert changes(timeline) == [((), ()), (("a",), ()), ((), ()), ((), ()), ((), ("a",))]


def test_an_abort_between_two_steps_counts_from_the_next_one() -> None:
    timeline = Timeline()
    timeline.on_events(0, [*begun("a", 0), *begun("b", 0), step(0, 0, ("a", 0, 8), ("b", 0, 8)), step(1, 2)])
    timeline.on_events(0, [finished("a", 2 * MS), step(2, 1)])
    assert changes(timeline)[1:] == [(("a", "b"), ()), ((), ("a",))]


def test_swapped_and_recomputed_requests_are_back_when_they_decode_again() -> None:
    timeline = Timeline()
    timeline.on_events(0, [*begun("a", 0), *begun("b", 0), step(0, 0, ("a", 0, 8), ("b", 0, 8)), step(1, 2)])
    timeline.on_events(0, [RequestPreempted(2 * MS, "a", True, False), step(2, 1)])
    timeline.on_events(0, [RequestResumed(3 * MS, "a"), step(3, 2)])
    timeline.on_events(0, [RequestPreempted(4 * MS, "b", False, False), step(4, 1)])
    back = RequestAdmitted(5 * MS, "b", 0, False)
    timeline.on_events(0, [back, step(5, 1, ("b", 0, 6)), step(6, 1, ("b", 6, 6)), step(7, 2)])
    assert changes(timeline)[2:] == [
        ((), ("a",)),
        (("a",), ()),
        ((), ("b",)),
        ((), ()),
        ((), ()),
        (("b",), ()),
    ]


@pytest.mark.parametrize("is_receiver_late", [False, True])
def test_a_handed_off_request_decodes_on_its_second_worker_only(is_receiver_late: bool) -> None:
    timeline = Timeline()
    prefill = [*begun("a", 0), step(0, 0, ("a", 0, 8)), HandoffReleased(3 * MS, "a")]
    reserved = [HandoffReserved(0, "a", 0, ((1, 2, 3),))]
    for worker, events in ((1, prefill), (2, reserved)) if is_receiver_late else ((2, reserved), (1, prefill)):
        timeline.on_events(worker, events)
    timeline.on_transfer(Transfer("a", 1, 2, 4096, MS // 2, 2 * MS, MS))
    timeline.on_events(2, [HandoffDelivered(2 * MS, "a"), step(2, 1)])
    timeline.on_events(1, [*begun("b", 4), step(4, 0, ("b", 0, 8)), step(5, 1)])
    assert changes(timeline, 2) == [(("a",), ())]
    assert changes(timeline, 1) == [((), ()), ((), ()), (("b",), ())]
    kept = [event_of(one) for one in timeline.since(0) if isinstance(one, RequestRecord)]
    assert HandoffReserved(0, "a", 0, ()) in kept  # blocks are nobody's business
    data = drawn(timeline, 6 * MS)
    slices = {(one["name"], one["pid"]) for one in data["traceEvents"] if one["ph"] == "b" and one.get("id") == "a"}
    assert {("prefill", 2), ("handoff", 2), ("reserved", 3), ("decode", 3), ("transfer", 3)} <= slices


def busy(timeline: Timeline, num_requests: int = 60) -> None:
    """Two workers on which requests of different lengths come and go."""
    for number in range(num_requests):
        for worker in (0, 1):
            name = f"{worker}-{number}"
            timeline.on_events(worker, [*begun(name, number), step(number, min(number, 3), (name, 0, 8))])
            if number >= 3:
                timeline.on_events(worker, [finished(f"{worker}-{number - 3}", (number + 1) * MS)])


def test_the_ring_is_bounded_and_what_is_left_is_contiguous() -> None:
    timeline = Timeline(capacity=50)
    busy(timeline)
    held = timeline.since(0)
    assert sum(1 + len(one.prefills) if isinstance(one, StepRecord) else 1 for one in held) <= 50
    assert [one.sequence for one in held] == list(range(timeline.first_sequence, timeline.next_sequence))
    timeline.on_events(0, [step(99, 0, *((f"r{i}", 0, 1) for i in range(80)))])  # heavier than the whole ring
    assert len(timeline.since(0)) == 1


def test_whoever_begins_anywhere_knows_who_decodes_from_there_on() -> None:
    full, small = Timeline(), Timeline(capacity=50)
    for timeline in (full, small):
        busy(timeline)
    for start in range(full.next_sequence - 1):
        before = {worker: set(attempts) for worker, attempts in full.decoding_after(start).items()}
        after = members(full.since(start), before)
        assert after == {worker: set(attempts) for worker, attempts in full.decoding_after(full.next_sequence).items()}
        if start >= small.first_sequence - 1:
            assert small.decoding_after(start) == full.decoding_after(start)


def test_a_slow_reader_is_told_of_the_gap_and_goes_on_after_it() -> None:
    timeline = Timeline(capacity=50)
    reader = timeline.subscribe()
    busy(timeline)
    gap, *records = reader.take(1000)
    assert isinstance(gap, GapRecord)
    assert (gap.first, gap.last) == (1, timeline.first_sequence - 1)
    assert [one.sequence for one in records if isinstance(one, StepRecord | RequestRecord)] == list(
        range(gap.last + 1, timeline.next_sequence)
    )
    assert gap.decoding == timeline.decoding_after(gap.last)
    assert not reader.is_behind and reader.take(10) == []


def test_a_reader_of_some_workers_passes_the_others() -> None:
    timeline = Timeline()
    reader = timeline.subscribe(0)
    reader.workers = frozenset({1})
    busy(timeline, 4)
    timeline.on_transfer(Transfer("x", 1, 0, 1, 1, 2, 0))
    *taken, last = reader.take(1000)
    assert {getattr(one, "worker", None) for one in taken} == {1} and isinstance(last, TransferRecord)
    assert reader.sequence == timeline.next_sequence - 1


def test_readers_are_counted_and_refused_above_the_limit() -> None:
    timeline = Timeline(max_subscribers=1)
    one = timeline.subscribe()
    with pytest.raises(OverloadedError, match="max_subscribers"):
        timeline.subscribe()
    one.close()
    timeline.subscribe().close()
    with pytest.raises(ConfigError, match="capacity is 0"):
        Timeline(0)


def test_a_lost_worker_takes_its_batch_with_it() -> None:
    timeline = Timeline()
    timeline.on_worker(0, "ready", 0, role="both")
    timeline.on_events(0, [*begun("a", 0), step(0, 0, ("a", 0, 8)), step(1, 1)])
    timeline.on_worker(0, "lost", 3 * MS, detail="killed by signal 9")
    timeline.on_worker(0, "ready", 5 * MS)
    timeline.on_events(0, [*begun("a~1", 5), step(5, 0, ("a~1", 0, 8)), step(6, 1)])
    records = timeline.since(0)
    assert [one.left for one in records if isinstance(one, WorkerRecord)] == [(), ("a",), ()]
    shown = json.loads(msgspec.json.encode(records))
    assert {one.get("epoch", 0) for one in shown if one["kind"] == "request"} == {0, 1}
    assert {one["request_id"] for one in shown if one["kind"] == "request"} == {"a"}
    assert timeline.header(0, 7 * MS).workers == {0: {"state": "ready", "role": "both"}}
    data = drawn(timeline, 7 * MS)
    assert {one["id"] for one in data["traceEvents"] if one["ph"] == "b"} == {"a", "a~1"}
    assert any(one["name"] == "lost" and one["dur"] == 2000.0 for one in data["traceEvents"])
    assert data["traceEvents"][0]["args"] == {"name": "worker 0 (both)"}


def test_ids_of_attempts_are_those_of_their_requests() -> None:
    assert split_attempt_id("cmpl-1-0") == ("cmpl-1-0", 0)
    assert split_attempt_id("cmpl-1-0~12") == ("cmpl-1-0", 12)
    assert split_attempt_id("odd~") == ("odd~", 0)


@pytest.mark.parametrize(
    "event",
    [
        *begun("a~2", 3),
        finished("a", 5),
        RequestPreempted(1, "a", True, False),
        RequestResumed(1, "a~10"),
        HandoffReserved(1, "a", 16),
        HandoffDelivered(1, "a"),
        HandoffReleased(1, "a"),
        HandoffExpired(1, "a", True),
    ],
    ids=lambda event: type(event).__name__,
)
def test_records_say_all_that_their_events_said(event: Milestone) -> None:
    assert event_of(request_record(1, 0, event)) == event


def test_a_step_is_the_same_after_the_way_there_and_back() -> None:
    for one in (step(1, 3), step(2, 0, ("a", 0, 8)), step(3, 1, ("a", 0, 8), ("b~3", 8, 8))):
        record = step_record(1, 0, one, ((), ()))
        assert event_of(record) == one
        assert all("~" not in request_id for request_id, _, _ in record.prefills)


def test_a_trace_of_a_ring_that_has_turned_is_valid_and_knows_who_decoded_before() -> None:
    timeline = Timeline(capacity=50)
    busy(timeline)
    data = drawn(timeline, 70 * MS)
    known = timeline.decoding_after(timeline.first_sequence - 1)
    shown = {one["id"] for one in data["traceEvents"] if one["name"] == "decode" and one["ph"] == "b"}
    assert known[0][-1] in shown and known[1][-1] in shown
    recent = drawn(timeline, 70 * MS, last_ns=12 * MS)
    assert all(one["ts"] >= 58_000 for one in recent["traceEvents"] if one["ph"] != "M")
    assert drawn(Timeline(), 0)["traceEvents"] == []


def test_a_long_step_is_held_from_its_beginning_and_changes_no_batch() -> None:
    timeline = Timeline()
    timeline.on_events(0, [*begun("a", 0), step(0, 0, ("a", 0, 8)), step(1, 1)])
    timeline.on_events(0, [StepBegun(2 * MS, 2, (("b~1", 0, 4096),), 0, 400 * MS)])
    opened = timeline.since(0)[-1]
    assert opened == StepBegunRecord(opened.sequence, 0, 2, 2 * MS, "prefill", 0, 400 * MS, (("b", 0, 4096),), (1,))
    assert json.loads(msgspec.json.encode(opened))["kind"] == "step_begun"
    before = timeline.decoding_after(opened.sequence)
    timeline.on_events(0, [step(2, 0, ("b~1", 0, 4096))])
    assert before == {0: ["a"]} and changes(timeline)[2:] == [((), ())]
    assert sum(one["ph"] == "X" for one in drawn(timeline, 5 * MS)["traceEvents"]) == 3  # the steps that ended


def test_a_worker_reports_a_step_that_should_take_long_before_it_computes_it(tmp_path: Path) -> None:
    peer = fake_peer(tmp_path / "kv")
    try:
        peer.serve(attempt("short", range(8), max_tokens=2))
        peer.wait_end("short")
        assert peer.of_kind(StepBegun) == []
        for tokens in range(16, 65, 16):  # 10 ms a token
            peer.engine.observe(StepFeatures(tokens, tokens * tokens // 2, 0, 0), tokens * 10 * MS)
        peer.serve(attempt("long", range(64), max_tokens=1))
        peer.wait_end("long")
        ended = {one.step_id: one for one in peer.of_kind(StepFinished)}
        long = [one for one in peer.of_kind(StepBegun) if one.prefills]
        assert [one.prefills for one in long] == [(("long", 0, 64),)]
        for one in long:
            end = ended[one.step_id]
            assert (one.time_ns, one.num_decodes, one.predicted_ns) == (end.start_ns, 0, end.predicted_ns)
            assert one.predicted_ns >= 100 * MS
            assert peer.events.index(one) < peer.events.index(end)
    finally:
        peer.close()


def check_trace(data: dict[str, Any]) -> None:
    """In order of time; steps of a worker do not overlap; slices nest; counters are not negative."""
    last_ts = 0.0
    ends: dict[int, float] = {}
    stacks: dict[tuple[str, str], list[str]] = {}
    for event in data["traceEvents"]:
        assert {"ph", "name", "pid", "ts"} <= set(event)
        assert event["ts"] >= last_ts or event["ph"] == "M"
        last_ts = max(last_ts, event["ts"])
        if event["ph"] == "X" and event["tid"] == 1:
            assert event["dur"] > 0 and event["ts"] >= ends.get(event["pid"], 0.0) - 1e-3
            ends[event["pid"]] = event["ts"] + event["dur"]
        elif event["ph"] == "C":
            assert all(value >= 0 for value in event["args"].values())
        elif event["ph"] == "b":
            stacks.setdefault((event["cat"], event["id"]), []).append(event["name"])
        elif event["ph"] == "e":
            assert stacks[event["cat"], event["id"]].pop() == event["name"]
    assert not any(stacks.values())


@pytest.mark.asyncio
async def test_a_quiet_stream_beats_and_ends_when_the_timeline_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "BATCH_INTERVAL_S", 0.001)
    monkeypatch.setattr(routes, "HEARTBEAT_S", 0.002)
    timeline = Timeline()
    stream = routes.events(timeline, timeline.subscribe(), asyncio.Lock())
    first = await anext(stream)
    assert first.startswith(b"id: " + timeline.run_id.encode() + b".0\ndata: [")
    assert await anext(stream) == routes.HEARTBEAT
    timeline.close()
    async with asyncio.timeout(5):
        assert [part async for part in stream if part != routes.HEARTBEAT] == []


@pytest.mark.asyncio
async def test_readers_that_catch_up_take_turns_and_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two events of a crowd, whoever else waits for the loop gets it as often as the crowd."""
    timeline, num_readers = Timeline(), 8
    for record in range(4 * edge_limits.TIMELINE_EVENT_RECORDS):
        timeline.on_worker(0, "ready", record)
    timeline.close()
    encoded, beats, most_between = 0, 0, 0
    encode = routes._next_event

    def counted(*arguments: Any) -> bytes:
        nonlocal encoded
        encoded += 1
        return encode(*arguments)

    monkeypatch.setattr(routes, "_next_event", counted)
    catching_up = asyncio.Lock()

    async def read() -> None:
        async for _ in routes.events(timeline, timeline.subscribe(0), catching_up):
            pass

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        readers = [group.create_task(read()) for _ in range(num_readers)]
        while not all(reader.done() for reader in readers):
            before = encoded
            await asyncio.sleep(0)
            beats += 1
            if any(not reader.done() for reader in readers):
                most_between = max(most_between, encoded - before)
    assert encoded >= 4 * num_readers
    assert most_between <= num_readers  # their last events are short ones, and need no turn
    assert beats > encoded


def sse(lines: Iterable[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(id, records) of the events of a stream."""
    event_id = ""
    for line in lines:
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            yield event_id, json.loads(line[6:])


def ask(server: RunningServer, **fields: Any) -> dict[str, Any]:
    body = {"prompt": [5, 6, 7], "max_tokens": 8, **fields}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def read_until_finished(server: RunningServer, request_id: str, **arguments: Any) -> tuple[str, list[dict[str, Any]]]:
    """Read the stream until that request has ended: the last event's id, and all records."""
    records: list[dict[str, Any]] = []
    with httpx.stream("GET", f"{server.url}/timeline", timeout=30, **arguments) as reply:
        assert reply.status_code == 200
        for event_id, batch in sse(reply.iter_lines()):
            records += batch
            if any(one.get("what") == "finished" and one["request_id"] == request_id for one in batch):
                return event_id, records
    raise AssertionError("the stream ended before the request did")


def test_a_client_reads_reconnects_and_misses_nothing(fake: RunningServer) -> None:
    first = ask(fake)["id"]
    event_id, records = read_until_finished(fake, first, params={"since": "0"})
    second = ask(fake, max_tokens=20)["id"]
    last_id, more = read_until_finished(fake, second, headers={"Last-Event-ID": event_id})
    assert records[0]["kind"] == more[0]["kind"] == "header"
    run_id, _, last = last_id.partition(".")
    assert run_id == records[0]["run_id"]
    numbers = [one["sequence"] for one in records[1:] + more[1:]]
    assert numbers == list(range(1, int(last) + 1))
    own = [one for one in more if second in (one.get("request_id"), *one.get("joined", ()), *one.get("left", ()))]
    own = [one for one in own if one["kind"] != "answer"]  # it may come with the next event
    assert [one["what"] for one in own if one["kind"] == "request"] == ["queued", "admitted", "first_token", "finished"]
    joined = next(one for one in more if second in one.get("joined", ()))
    assert joined["phase"] == "decode"
    end = own[-1]["detail"]
    total = sum(end[name] for name in ("queue_ns", "prefill_ns", "decode_ns", "handoff_ns"))
    queued = next(one for one in own if one.get("what") == "queued")
    assert own[-1]["time_ns"] - queued["time_ns"] == total
    assert end["num_output_tokens"] == 20


def test_pages_follow_each_other_and_the_trace_of_a_server_is_valid(fake: RunningServer) -> None:
    ask(fake, n=3)
    newest = httpx.get(f"{fake.url}/timeline/records", params={"limit": 2}).json()
    assert [one["sequence"] for one in newest["records"]] == [1, 2]
    after = httpx.get(f"{fake.url}/timeline/records", params={"since": newest["next"], "limit": 2}).json()
    assert [one["sequence"] for one in after["records"]] == [3, 4]
    assert httpx.get(f"{fake.url}/timeline/records", params={"workers": "7"}).json()["records"] == []
    reply = httpx.get(f"{fake.url}/timeline/perfetto")
    assert "attachment" in reply.headers["content-disposition"]
    check_trace(reply.json())

    def has_steps() -> bool:
        events = httpx.get(f"{fake.url}/timeline/perfetto").json()["traceEvents"]
        return any(one["ph"] == "X" for one in events)

    wait_until(has_steps)


@pytest.mark.parametrize("query", ["since=x", "since=-1", "workers=a", "limit=0", "limit=1e9", "limit=nan"])
def test_wrong_questions_are_refused_by_name(fake: RunningServer, query: str) -> None:
    reply = httpx.get(f"{fake.url}/timeline/records?{query}")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == query.partition("=")[0]


@pytest.mark.system
def test_a_live_handoff_is_seen_on_both_workers() -> None:
    with fake_server(fleet={"prefill": 1, "decode": 1}, cluster={"disaggregate": "always"}) as server:
        request_id = ask(server, max_tokens=20)["id"]

        def held() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = httpx.get(f"{server.url}/timeline/records").json()["records"]
            return found

        ends = {(0, "handoff_released"), (1, "finished")}
        wait_until(lambda: ends <= {(one["worker"], one.get("what")) for one in held()})
        records = held()
        own = [one for one in records if one["kind"] == "request"]
        whats = {worker: [one["what"] for one in own if one["worker"] == worker] for worker in (0, 1)}
        assert whats[0] == ["queued", "admitted", "first_token", "handoff_released"]
        assert whats[1] == ["handoff_reserved", "handoff_delivered", "finished"]
        assert {one["request_id"] for one in own} == {request_id}
        transfers = [(one["sender"], one["worker"]) for one in records if one["kind"] == "transfer"]
        assert transfers == [(0, 1)]
        assert [one["worker"] for one in records if request_id in one.get("joined", ())] == [1]
        assert {(one["worker"], one["role"]) for one in records if one["kind"] == "worker"} == {
            (0, "prefill"),
            (1, "decode"),
        }
        data = httpx.get(f"{server.url}/timeline/perfetto").json()
        check_trace(data)
        slices = {(one["name"], one["pid"]) for one in data["traceEvents"] if one["ph"] == "b"}
        assert {("prefill", 1), ("reserved", 2), ("decode", 2)} <= slices
        times = {one["what"]: one["time_ns"] for one in own if one["worker"] == 0}
        took_time = times["handoff_released"] > times["first_token"]  # a worker reads its clock once a turn
        assert (("handoff", 1) in slices) == took_time


@pytest.mark.system
def test_the_timeline_needs_the_key_and_a_reader_does_not_keep_the_server_from_ending() -> None:
    with fake_server(serve={"api_keys": ["secret"]}) as server:
        for path in ("", "/records", "/perfetto"):
            assert httpx.get(f"{server.url}/timeline{path}").status_code == 401
        key = {"Authorization": "Bearer secret"}
        with httpx.stream("GET", f"{server.url}/timeline", headers=key, timeout=30) as reply:
            events = sse(reply.iter_lines())
            assert next(events)[1][0]["kind"] == "header"
            assert server.terminate() == 0
            assert all(record["kind"] == "worker" for _, batch in events for record in batch)


def test_a_reader_that_takes_nothing_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_limits, "OBSERVER_SILENCE_S", 0.01)
    timeline = Timeline(max_subscribers=1)

    async def scenario() -> None:
        async def never(*message: Any) -> Any:
            await asyncio.Event().wait()

        for spec in ("2.3", "2.4"):
            body, ends = Mock(), Mock()
            scope = {"type": "http", "asgi": {"spec_version": spec}, "extensions": {DIRECT_BODY: {"body": body}}}
            stream = routes._Stream(timeline, timeline.subscribe(), asyncio.Lock(), ends)
            await asyncio.wait_for(stream(scope, never, never), 30)
            body.abort.assert_called_once_with()
            ends.assert_called_once_with()
        timeline.subscribe()  # its place is free

    asyncio.run(scenario())


def test_a_key_has_a_part_of_the_places() -> None:
    timeline, app = Timeline(), FastAPI()
    routes.add_timeline_routes(app, timeline, {400: {}, 401: {}, 429: {}})
    endpoint = next(route.endpoint for route in app.routes if getattr(route, "path", "") == "/timeline")

    def request(tenant: str) -> Request:
        return Request({"type": "http", "headers": [], "state": {"tenant": tenant}})

    async def scenario() -> None:
        most = edge_limits.TIMELINE_READERS_OF_TENANT
        streams = [await endpoint(request("a"), None, None, None) for _ in range(most)]
        with pytest.raises(OverloadedError, match="this key reads the timeline"):
            await endpoint(request("a"), None, None, None)
        for _ in range(edge_limits.TIMELINE_READERS - most):
            await endpoint(request("b"), None, None, None)
        streams[0]._on_end()
        streams[0]._subscription.close()
        await endpoint(request("a"), None, None, None)

    asyncio.run(scenario())
