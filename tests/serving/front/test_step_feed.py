"""What a front makes of the steps that an engine reports."""

import asyncio
import logging
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from front_harness import fronted

from diptych.base.engine_steps import EngineAbout, EngineLine, EngineStep, encode_line
from diptych.control.errors import ConfigError
from diptych.control.events import StepFinished
from diptych.control.step import StepFeatures
from diptych.serving.front.engine_load import EngineLoad, LearnedPrices
from diptych.serving.front.engine_spec import EngineSpec
from diptych.serving.front.step_feed import OFFSET_WINDOW_NS, ClockOffset, StepFeed, own_id
from diptych.timeline.records import RequestRecord, StepRecord
from diptych.vllm_plugin.step_publisher import StepPublisher

OWN = "cmpl-" + "0123456789abcdef" * 2


class Received:
    """A feed whose clock stands where it is put."""

    def __init__(self) -> None:
        self.now = 0
        self.steps: list[StepFinished] = []
        self.features: list[StepFeatures] = []
        self.feed = StepFeed(self._on_step, lambda: self.now)

    def take(self, now: int, *lines: EngineLine) -> None:
        self.now = now
        for line in lines:
            self.feed.take(encode_line(line))

    def _on_step(self, step: StepFinished, features: StepFeatures, duration_ns: int) -> None:
        assert duration_ns == step.end_ns - step.start_ns
        self.steps.append(step)
        self.features.append(features)


def test_steps_of_another_host_are_put_into_our_time_by_the_fastest_line() -> None:
    got = Received()
    got.take(1_000_150, EngineStep(1, 50, 100))  # 50 on the way
    got.take(1_000_310, EngineStep(2, 100, 300))  # 10 on the way
    got.take(1_009_400, EngineStep(3, 300, 400))
    assert [(step.start_ns, step.end_ns) for step in got.steps] == [
        (1_000_100, 1_000_150),
        (1_000_150, 1_000_310),
        (1_000_310, 1_000_410),
    ]


def test_an_offset_forgets_what_is_two_windows_old() -> None:
    offset = ClockOffset()
    assert offset.seen(0, 100) == 100
    assert offset.seen(1000, 1300) == 100
    assert offset.seen(OFFSET_WINDOW_NS, OFFSET_WINDOW_NS + 400) == 100
    assert offset.seen(2 * OFFSET_WINDOW_NS, 2 * OFFSET_WINDOW_NS + 900) == 400


def test_missed_steps_are_counted_and_a_restart_is_none() -> None:
    got = Received()
    got.take(100, EngineAbout("vllm", "a"), EngineStep(5, 1, 2), EngineStep(9, 3, 4))
    assert (got.feed.num_seen, got.feed.num_missed) == (2, 3)
    got.take(200, EngineStep(1, 7, 8), EngineAbout("vllm", "b"), EngineStep(2, 8, 9))
    assert (got.feed.num_seen, got.feed.num_missed) == (4, 3)
    assert got.feed.about is not None
    assert got.feed.about.run_id == "b"


def test_features_are_those_of_the_step_time_model() -> None:
    got = Received()
    got.take(100, EngineStep(1, 1, 2, (("a", 10, 4), ("b", 0, 2)), 2, 5, 77))
    assert got.features == [StepFeatures(6, 4 * 10 + 10 + 3, 5, 77)]


@pytest.mark.parametrize(
    ("engine_id", "expected"),
    [
        (f"cmpl-{OWN}-0-8f61b903", OWN),
        (f"chatcmpl-{OWN.replace('cmpl', 'chatcmpl')}~2-8f61b903", OWN.replace("cmpl", "chatcmpl") + "~2"),
        ("chatcmpl-8846aebb81936eb6-1", "chatcmpl-8846aebb81936eb6-1"),
    ],
)
def test_a_request_has_the_name_that_the_front_gave_it(engine_id: str, expected: str) -> None:
    assert own_id(engine_id) == expected


def test_lines_that_cannot_be_read_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    got = Received()
    with caplog.at_level(logging.WARNING):
        for line in (b"{", b'{"kind":"other"}', b'{"kind":"step","number":0,"start_ns":1,"end_ns":2}', b"\xff", b"[]"):
            got.feed.take(line)
        got.feed.take(b'{"kind":"step","number":1,"start_ns":5,"end_ns":2}')
    assert not got.steps
    assert len(caplog.records) == 1
    got.take(100, EngineStep(1, 1, 2))
    assert len(got.steps) == 1


def test_prices_are_those_of_the_reported_steps() -> None:
    load = EngineLoad(100, 16, 0, 0)
    for number in range(40):
        tokens, seqs = 10 * (number % 7) * (number % 2), number % 5
        features = StepFeatures(tokens, tokens * tokens // 2, seqs, 50 * seqs)
        load.on_step(features, 1_000_000 + 20_000 * tokens + 300_000 * seqs)
    report = load.report(0)
    assert report.token_ns == pytest.approx(20_000, rel=0.1)
    assert report.fixed_ns == pytest.approx(1_000_000, rel=0.1)
    assert report.sequence_ns + 50 * report.context_ns == pytest.approx(300_000, rel=0.1)
    assert load.stats().step_time_coefficients


def test_an_engine_that_has_learned_nothing_is_taken_to_be_like_the_others() -> None:
    shared = LearnedPrices()
    old, new = EngineLoad(100, 16, 0, 0, shared), EngineLoad(100, 16, 0, 0, shared)
    assert new.report(0).token_ns == 100_000
    old.on_sent("a", 1000, 0)
    old.on_first_token("a", 4_000_000)
    old.on_prompt(1000, 0)
    learned = old.report(5_000_000)
    assert learned.token_ns < 90_000
    assert new.report(5_000_000).token_ns == learned.token_ns
    assert new.report(5_000_000).fixed_ns == learned.fixed_ns
    new.on_prompt(1000, 0)
    assert new.report(6_000_000).token_ns != learned.token_ns


@pytest.mark.parametrize(
    ("kind", "address"), [("llamacpp", "tcp://h:1"), ("openai", "tcp://h:1"), ("vllm", "h:1"), ("sglang", "h.0")]
)
def test_step_events_are_for_engines_that_report_them_and_have_an_address(kind: str, address: str) -> None:
    with pytest.raises(ConfigError, match="step_events of http://h"):
        EngineSpec(kind, "http://h", step_events=address)  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_steps_of_an_engine_are_on_the_timeline_and_its_clients_requests_in_them(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/steps"
    publisher = StepPublisher(address, EngineAbout("vllm", "run", "0.32.0", max_batched_tokens=2048))
    engine = FakeEngine("vllm", delay_s=0.05)
    await engine.start()
    try:
        specs = [EngineSpec("vllm", engine.url, step_events=address)]
        async with fronted(specs=specs) as client:
            feed = client.front.external.engines[0].steps.feed
            assert feed is not None
            number, clock = 0, client.front.external.engines[0].clock
            while not feed.num_seen:  # a subscription takes a moment
                number += 1
                publisher.publish(EngineStep(number, clock(), clock()))
                await asyncio.sleep(0.01)
            asked = asyncio.create_task(client.complete([1, 2, 3], 4))
            while not (exchanges := client.front.external.engines[0].exchanges):
                await asyncio.sleep(0.005)
            attempt_id = next(iter(exchanges))
            publisher.publish(EngineStep(number + 1, clock(), clock(), ((f"cmpl-{attempt_id}-0-abcd", 2, 1),)))
            answer = await asked
            assert answer.error is None
            records = client.front.timeline.since(0)
            steps = [record for record in records if isinstance(record, StepRecord)]
            assert steps[-1].prefills == ((attempt_id, 2, 1),)
            admitted = [record for record in records if isinstance(record, RequestRecord) and record.what == "admitted"]
            assert [record.detail["num_cached_tokens"] for record in admitted] == [2]
            shown = (await client.http.get("/engines")).json()["engines"][0]
            assert shown["capabilities"]["step_times"] is True
            assert shown["steps"]["max_batched_tokens"] == 2048
            assert shown["steps"]["num_missed"] == 0
            assert engine.request_ids == [attempt_id]
            await client.idle()
    finally:
        publisher.close()
        await engine.stop()
