"""The load generator against a server whose pace is known: what is sent when, and what is recorded."""

import resource
from itertools import accumulate
from typing import Any

import pytest

from diptych.bench.load import LoadProgress, LoadResult, ramped
from diptych.bench.objectives import LatencyObjectives
from diptych.bench.session import Session
from diptych.bench.summary import summarize
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.workload.build import (
    ArrivalConfig,
    ClassConfig,
    LengthConfig,
    LengthsConfig,
    TraceConfig,
    WorkloadConfig,
    build,
)
from diptych.workload.spec import ClosedLoop, RequestSpec

from .loopback import SHORT, LoopbackClient, loopback_config, measured


def most_at_once(result: LoadResult) -> int:
    """How many requests were under way at the same time."""
    changes = [(record.sent_ns, 1) for record in result.records] + [(record.end_ns, -1) for record in result.records]
    return max(accumulate(change for _, change in sorted(changes)))


def test_an_open_loop_does_not_wait_for_answers() -> None:
    workload = WorkloadConfig(num_requests=20, rate=1000.0, arrivals=ArrivalConfig(kind="constant"), lengths=SHORT)
    result: LoadResult = measured(loopback_config(workload, fake={"ttft_ms": 20, "itl_ms": 1}), slots=2)
    assert result.ended == "done" and len(result.records) == 20
    assert [record.intended_ns for record in result.records] == [number * NS_PER_MS for number in range(20)]
    assert most_at_once(result) > 2  # two are worked on at once
    wait = result.records[-1].ttft_ns
    assert wait is not None and wait > 9 * 20 * NS_PER_MS - 19 * NS_PER_MS  # it counts what nine pairs before it took


def test_a_closed_loop_has_as_many_requests_as_clients() -> None:
    arrivals = ArrivalConfig(kind="closed", concurrency=3)
    result: LoadResult = measured(loopback_config(WorkloadConfig(num_requests=12, arrivals=arrivals, lengths=SHORT)))
    assert len(result.records) == 12
    assert most_at_once(result) <= 3


@pytest.mark.parametrize(
    "fake", [{}, {"ids": True, "batch": 2}, {"running": True, "batch": 3}, {"batch": 2}, {"roles": True}], ids=str
)
def test_every_token_is_counted_in_every_dialect(fake: dict[str, Any]) -> None:
    chat = {"api": "chat", "prompts": "text"} if "roles" in fake else {}
    workload = WorkloadConfig(
        num_requests=5, rate=100.0, lengths=LengthsConfig(prompt=LengthConfig(mean=40), output=LengthConfig(mean=7))
    )
    result: LoadResult = measured(loopback_config(workload, fake=fake, **chat))
    batch = fake.get("batch", 1)
    for record in result.records:
        assert record.is_completed, record.error
        assert (record.output_tokens, record.prompt_tokens) == (7, 40)
        assert len(record.stamps) == -(-7 // batch)
        assert list(record.sizes) == ([min(batch, 7 - sent) for sent in range(0, 7, batch)] if len(fake) == 2 else [])
    summary = summarize(result)
    assert summary["tokens_per_event"] == pytest.approx(7 / -(-7 // batch))
    assert summary["num_completed"] == 5 and summary["attainment"] is None


@pytest.mark.parametrize(
    ("fail", "words"), [("status", "HTTP 500: it was asked to fail"), ("break", "in the middle of the answer")]
)
def test_failures_are_counted_and_said(fail: str, words: str) -> None:
    workload = WorkloadConfig(num_requests=6, rate=300.0, lengths=SHORT)
    slo = LatencyObjectives(ttft_ns=NS_PER_S)
    summary = summarize(measured(loopback_config(workload, fake={"itl_ms": 1, "fail": fail}, slo=slo)))
    assert summary["num_failed"] == 6 and summary["attainment"] == 0.0
    assert all(words in error for error in summary["errors"])


def test_a_server_that_is_gone_fails_every_request_and_the_run_goes_on() -> None:
    async def use(session: Session, client: LoopbackClient) -> LoadResult:
        client.kill()
        return await session.run()

    result: LoadResult = measured(loopback_config(), use)
    assert result.ended == "done" and len(result.records) == 30
    assert {record.error for record in result.records} == {"cannot connect to loopback: Connection refused"}


def test_clients_lose_patience_and_slow_answers_time_out() -> None:
    slow = {"ttft_ms": 1, "itl_ms": 400}
    workload = WorkloadConfig(
        num_requests=3, rate=100.0, classes=(ClassConfig(kind="hasty", patience_s=0.05),), lengths=SHORT
    )
    left: LoadResult = measured(loopback_config(workload, fake=slow))
    assert [record.outcome for record in left.records] == ["aborted"] * 3
    late: LoadResult = measured(
        loopback_config(WorkloadConfig(num_requests=2, rate=100.0, lengths=SHORT), fake=slow, timeout_s=0.1)
    )
    assert all("no whole answer in 0.1 s" in (record.error or "") for record in late.records)


def test_a_run_that_is_stopped_keeps_what_was_measured() -> None:
    arrivals = ArrivalConfig(kind="constant")
    workload = WorkloadConfig(num_requests=1000, rate=100.0, lengths=SHORT, arrivals=arrivals)

    async def use(session: Session, _: LoopbackClient) -> LoadResult:
        def watch(now: LoadProgress) -> None:
            if now.completed > 3:
                session.stop.set()

        return await session.run(watch=watch)

    result: LoadResult = measured(loopback_config(workload, fake={"itl_ms": 20}), use)
    assert result.ended == "stopped"
    assert {record.outcome for record in result.records} <= {"completed", "unfinished"}
    assert 3 < sum(record.is_completed for record in result.records) <= len(result.records) < 1000


def test_nothing_is_sent_after_the_duration() -> None:
    workload = WorkloadConfig(num_requests=1000, rate=100.0, lengths=SHORT)
    result: LoadResult = measured(loopback_config(workload, duration_s=0.25))
    assert result.ended == "duration"
    assert max(record.intended_ns for record in result.records) <= 0.25 * NS_PER_S
    assert all(record.is_completed for record in result.records)


def test_a_ramp_has_the_rate_that_it_says() -> None:
    specs = [RequestSpec(arrival_ns=number * NS_PER_S, prompt_tokens=1, output_tokens=1) for number in range(200)]
    times = [spec.arrival_ns / NS_PER_S for spec in ramped(specs, 1.0, 9.0, 20.0)]
    assert sum(time < 20.0 for time in times) == 100  # the mean of 1 and 9 for 20 s
    assert times[-1] == pytest.approx(20 + (199 - 100) / 9)
    assert times[1] - times[0] == pytest.approx(0.86, abs=0.02)
    assert list(ramped(specs, 2.0, 2.0, 5.0))[10].arrival_ns == 5 * NS_PER_S


def test_the_workload_is_that_of_the_simulator() -> None:
    workload = WorkloadConfig(
        num_requests=40, rate=400.0, trace=TraceConfig(path="azure-conv"), lengths=LengthsConfig()
    )
    source = build(workload, 3)
    assert not isinstance(source, ClosedLoop)
    result: LoadResult = measured(loopback_config(workload, seed=3, fake={"itl_ms": 0.1, "ttft_ms": 1}))
    wanted = [(spec.arrival_ns, spec.prompt_tokens, spec.output_tokens) for spec in source]
    assert [(record.intended_ns, record.prompt_tokens, record.output_tokens) for record in result.records] == wanted


def test_a_run_is_given_up_when_that_is_asked_for() -> None:
    workload = WorkloadConfig(num_requests=1000, rate=100.0, lengths=SHORT)
    seen: list[LoadProgress] = []

    async def use(session: Session, _: LoopbackClient) -> LoadResult:
        return await session.run(give_up=lambda now: bool(seen.append(now)) or now.completed > 3)

    result: LoadResult = measured(loopback_config(workload), use)
    assert result.ended == "given up" and result.total == 1000 and len(result.records) < 1000
    assert seen[-1].sent <= len(result.records) and seen[-1].total == 1000 and seen[-1].tokens >= 4 * 4
    assert seen[-1].ttft_p50_ms is not None


def test_a_watcher_that_fails_ends_the_run_with_its_error() -> None:
    def watch(_: LoadProgress) -> None:
        raise ZeroDivisionError

    workload = WorkloadConfig(num_requests=1000, rate=100.0, lengths=SHORT)
    with pytest.raises(ZeroDivisionError):
        measured(loopback_config(workload), lambda session, _: session.run(watch=watch))


def test_requests_that_are_late_already_are_judged_while_they_run() -> None:
    slo = LatencyObjectives(ttft_ns=NS_PER_MS)
    workload = WorkloadConfig(num_requests=4, rate=1000.0, lengths=SHORT)
    seen: list[LoadProgress] = []
    config = loopback_config(workload, fake={"ttft_ms": 600}, slo=slo)
    measured(config, lambda session, _: session.run(watch=seen.append))
    assert (seen[0].judged, seen[0].met, seen[0].running, seen[0].completed) == (4, 0, 4, 0)


def test_more_clients_than_this_process_can_have_connections_are_refused_before_the_start() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    arrivals = ArrivalConfig(kind="closed", concurrency=most)
    with pytest.raises(ConfigError, match=r"concurrency is .* open files"):
        measured(loopback_config(WorkloadConfig(num_requests=most, arrivals=arrivals)))
