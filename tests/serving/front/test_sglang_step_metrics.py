"""What a front makes of SGLang's forward-pass metrics."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from fake_engine import FakeEngine
from front_harness import fronted

from diptych.control.events import StepFinished
from diptych.control.slo import Slo
from diptych.control.step import StepFeatures, chunk_attention
from diptych.diagnosis.request_parts import PartsReader
from diptych.serving.front.engine_spec import EngineSpec
from diptych.serving.front.sglang_step_metrics import (
    MOST_PROMPTS,
    SGLangStepFeed,
    UnreadablePassError,
    decode_pass,
    prompts_of,
)
from diptych.timeline.records import StepRecord

MS = 1_000_000
SUMS = (
    "num_prefill_requests", "sum_prefill_tokens", "var_prefill_length", "sum_prefill_kv_tokens", "num_decode_requests",
    "sum_decode_kv_tokens", "var_decode_kv_tokens",
)  # fmt: skip


class Scheduled(msgspec.Struct, frozen=True):
    """Encoded as SGLang's are: a Struct without array_like."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    sum_prefill_kv_tokens: int = 0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class Metrics(msgspec.Struct, frozen=True):
    """One message's fields."""

    version: int = 1
    worker_id: str = "w"
    dp_rank: int = 0
    counter_id: int = 0
    wall_time: float = 0.0
    scheduled_requests: Scheduled = Scheduled()
    queued_requests: dict[str, Any] = {}


def passed(ms: float = 0.0, prefills: Sequence[int] = (0, 0, 0), decodes: Sequence[int] = (0, 0)) -> Metrics:
    """A step that took so long. prefills: prompts, tokens, context; decodes: requests, context."""
    num, tokens, context = prefills
    return Metrics(wall_time=ms / 1000, scheduled_requests=Scheduled(num, tokens, 1.5, context, *decodes, 0.5))


def as_map(metrics: Metrics) -> bytes:
    return msgspec.msgpack.encode(metrics)


def as_array(metrics: Metrics) -> bytes:
    return msgspec.msgpack.encode([*msgspec.structs.astuple(metrics)[:5], list(astuple(metrics)), []])


def as_array_without_version(metrics: Metrics) -> bytes:
    return msgspec.msgpack.encode([*msgspec.structs.astuple(metrics)[1:5], list(astuple(metrics))])


def astuple(metrics: Metrics) -> tuple[Any, ...]:
    return msgspec.structs.astuple(metrics.scheduled_requests)


class Received:
    """A feed whose clock stands where it is put."""

    def __init__(self) -> None:
        self.now = 0
        self.steps: list[StepFinished] = []
        self.features: list[StepFeatures] = []
        self.durations: list[int] = []
        self.feed = SGLangStepFeed(self._on_step, lambda: self.now)

    def take(self, now: int, number: int, metrics: Metrics) -> None:
        self.now = now
        self.feed.take_frames([b"", number.to_bytes(8, "big"), as_map(metrics)])

    def _on_step(self, step: StepFinished, features: StepFeatures, duration_ns: int) -> None:
        self.steps.append(step)
        self.features.append(features)
        self.durations.append(duration_ns)


@pytest.mark.parametrize("encode", [as_map, as_array, as_array_without_version])
def test_fields_are_named_or_in_their_order(encode: Any) -> None:
    found = decode_pass(encode(passed(2.5, (2, 300, 64), (5, 1000))))
    assert (found.duration_ns, found.worker_id, found.dp_rank) == (2_500_000, "w", 0)
    assert (found.num_prefills, found.prefill_tokens, found.prefill_context) == (2, 300, 64)
    assert (found.num_decodes, found.decode_context) == (5, 1000)


def test_a_struct_of_msgspec_is_a_map() -> None:
    content = msgspec.msgpack.decode(as_map(passed()))
    assert list(content["scheduled_requests"]) == list(SUMS)


def test_fields_that_are_unknown_or_missing_do_not_matter() -> None:
    payload = {"wall_time": 1, "news": [1], "scheduled_requests": {"num_decode_requests": 3, "sum_of_all": "x"}}
    found = decode_pass(msgspec.msgpack.encode(payload))
    assert (found.duration_ns, found.num_decodes, found.decode_context, found.is_step) == (10**9, 3, 0, True)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        msgspec.msgpack.encode(7),
        msgspec.msgpack.encode({"wall_time": -1.0}),
        msgspec.msgpack.encode({"wall_time": float("nan")}),
        msgspec.msgpack.encode({"wall_time": float("inf")}),
        msgspec.msgpack.encode({"wall_time": "1"}),
        msgspec.msgpack.encode({"dp_rank": -1}),
        msgspec.msgpack.encode({"scheduled_requests": 3}),
        as_map(passed(1, (1, -5, 0))),
        as_map(passed(1, (MOST_PROMPTS + 1, 5, 0))),
        msgspec.msgpack.encode({"scheduled_requests": {"num_decode_requests": True}}),
    ],
)
def test_what_is_no_step_is_refused(payload: bytes) -> None:
    with pytest.raises(UnreadablePassError):
        decode_pass(payload)


def test_messages_that_cannot_be_read_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    got = Received()
    with caplog.at_level(logging.WARNING):
        for frames in ([b""], [b"", b"1", as_map(passed())], [b"", bytes(8), b"\xc1"], []):
            got.feed.take_frames(frames)
    assert (len(caplog.records), got.feed.num_seen, got.feed.num_missed) == (1, 0, 0)
    got.take(10 * MS, 1, passed(1, decodes=(1, 9)))
    assert got.feed.num_seen == 1


def test_a_step_ends_when_its_message_comes() -> None:
    got = Received()
    got.take(100 * MS, 0, passed(20, (1, 512, 128), (3, 90)))
    assert got.steps == [StepFinished(0, 80 * MS, 100 * MS, (("", 128, 512),), 3, 90, 0)]
    assert got.features == [StepFeatures(512, chunk_attention(128, 512), 3, 90)]
    assert got.durations == [20 * MS]
    assert got.feed.described() == {"worker_id": "w", "dp_rank": 0}


def test_steps_that_come_at_once_do_not_overlap_and_keep_their_durations() -> None:
    got = Received()
    for number, now in enumerate((100 * MS, 100 * MS, 103 * MS, 99 * MS)):
        got.take(now, number, passed(5, decodes=(1, 9)))
    spans = [(step.start_ns // MS, step.end_ns // MS) for step in got.steps]
    assert spans == [(95, 100), (100, 100), (100, 103), (103, 103)]
    assert got.durations == [5 * MS] * 4


@pytest.mark.parametrize(("num", "tokens", "context"), [(1, 7, 0), (3, 10, 7), (4, 400, 80), (5, 3, 0), (2, 0, 9)])
def test_prompts_share_a_step_equally(num: int, tokens: int, context: int) -> None:
    prompts = prompts_of(decode_pass(as_map(passed(1, (num, tokens, context)))))
    assert len(prompts) == min(num, tokens)
    assert sum(count for _, _, count in prompts) == tokens
    assert sum(start for _, start, _ in prompts) == (context if tokens else 0)
    pairs = sum(chunk_attention(start, count) for _, start, count in prompts)
    if tokens >= num:
        assert pairs == pytest.approx(context * tokens / num + tokens * (tokens / num + 1) / 2, abs=num)
    assert all(name == "" for name, _, _ in prompts)


def test_heartbeats_are_no_steps_and_no_gaps() -> None:
    got = Received()
    got.take(10 * MS, 0, passed())
    got.take(20 * MS, 1, passed(2, decodes=(1, 5)))
    got.take(30 * MS, 2, passed())
    got.take(40 * MS, 3, passed(0, decodes=(1, 5)))  # it does not say how long it took
    got.take(50 * MS, 4, passed(2, (2, 0, 5)))  # nor this what it computed
    assert ([step.step_id for step in got.steps], got.feed.num_seen, got.feed.num_missed) == ([1], 1, 0)


def test_gaps_are_counted_and_a_restart_is_none() -> None:
    got = Received()
    for number in (7, 8, 12, 0, 1, 1, 4):  # 9 to 11 are missed; then it was started again, twice; 2 and 3 are missed
        got.take((number + 1) * MS, number, passed(0.1, decodes=(1, 5)))
    assert (got.feed.num_seen, got.feed.num_missed) == (7, 5)
    ends = [step.end_ns for step in got.steps]
    assert ends == sorted(ends)


def test_unnamed_prompts_are_no_requests() -> None:
    got = Received()
    got.take(100 * MS, 0, passed(20, (2, 5000, 0)))
    step = got.steps[0]
    record = StepRecord(1, 0, 0, step.start_ns, step.end_ns, "prefill", 0, 0, 0, step.prefills)
    times = PartsReader([record], {}, Slo())
    assert (times.long_prompts, times.requests()) == (frozenset(), [])


class FakeMetrics:
    """Publishes as SGLang does: at NAME.RANK, three frames."""

    def __init__(self, name: str, rank: int = 0) -> None:
        self.number = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.bind(f"{name}.{rank}")

    def publish(self, metrics: Metrics) -> None:
        """One message."""
        payload = as_map(msgspec.structs.replace(metrics, counter_id=self.number))
        self._socket.send_multipart([b"", self.number.to_bytes(8, "big"), payload])
        self.number += 1

    def close(self) -> None:
        """End."""
        self._context.destroy(linger=0)


@pytest.mark.asyncio
async def test_steps_of_an_sglang_are_on_the_timeline_and_price_it(tmp_path: Path) -> None:
    name = f"ipc://{tmp_path}/passes"
    publisher = FakeMetrics(name)
    engine = FakeEngine("sglang", more_information={"enable_forward_pass_metrics": True})
    await engine.start()
    try:
        specs = [EngineSpec("sglang", engine.url, step_events=f"{name}.0")]
        async with fronted(specs=specs) as client:
            worker = client.front.external.engines[0]
            feed = worker.steps.feed
            assert feed is not None
            while not feed.described():  # a subscription takes a moment
                publisher.publish(passed())
                await asyncio.sleep(0.01)
            asked = asyncio.create_task(client.complete("abc", 4))
            for number in range(40):
                tokens, seqs = 10 * (number % 7) * (number % 2), number % 5
                took = 1.0 + 0.02 * tokens + 0.3 * seqs
                publisher.publish(passed(took, (1, tokens, 0) if tokens else (0, 0, 0), (seqs, 50 * seqs)))
                await asyncio.sleep(0.002)
            publisher.publish(passed(3.0, (2, 300, 100), (2, 80)))
            publisher.publish(passed())
            assert (await asked).error is None
            async with asyncio.timeout(5):
                while feed.num_seen < 35:
                    await asyncio.sleep(0.01)
                while not any(step.prefills == (("", 50, 150),) * 2 for step in steps_of(client)):
                    await asyncio.sleep(0.01)
            steps = steps_of(client)
            assert (steps[-1].phase, steps[-1].num_decodes, steps[-1].decode_context) == ("mixed", 2, 80)
            assert worker.load.report(worker.clock()).token_ns == pytest.approx(20_000, rel=0.2)
            shown = (await client.http.get("/engines")).json()["engines"][0]
            assert shown["capabilities"]["step_times"] is True
            assert not any("step_times" in words for words in shown["degraded"])
            assert shown["steps"] == {"num_seen": feed.num_seen, "num_missed": 0, "worker_id": "w", "dp_rank": 0}
            page = (await client.http.get("/metrics")).text
            assert f'engine="{worker.name}"' in page
            lines = [line for line in page.splitlines() if line.startswith("diptych:engine_steps_total")]
            assert [float(line.split()[-1]) for line in lines] == [feed.num_seen]
            await client.idle()
    finally:
        publisher.close()
        await engine.stop()


def steps_of(client: Any) -> list[StepRecord]:
    return [record for record in client.front.timeline.since(0) if isinstance(record, StepRecord)]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("information", "has_steps"),
    [
        ({}, True),  # an older version
        ({"enable_forward_pass_metrics": False}, False),
        ({"internal_states": [{"enable_forward_pass_metrics": False}, 3]}, False),
        ({"internal_states": [{"enable_forward_pass_metrics": True}]}, True),
        ({"internal_states": "?"}, True),
    ],
)
async def test_an_sglang_that_publishes_no_steps_is_degraded(information: dict[str, Any], has_steps: bool) -> None:
    engine = FakeEngine("sglang", more_information=information)
    await engine.start()
    try:
        specs = [EngineSpec("sglang", engine.url, step_events="tcp://127.0.0.1:1")]
        async with fronted(specs=specs) as client:
            async with asyncio.timeout(10):
                await client.front.external.first_starts()
            facts = client.front.external.engines[0].facts
            assert facts is not None
            assert facts.capabilities.step_times is has_steps
            assert any("--enable-forward-pass-metrics" in words for words in facts.degraded) is not has_steps
    finally:
        await engine.stop()
