"""The load generator against a server whose pace is known: what is sent when, and what is said about it."""

from array import array
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest

from diptych.bench.goodput import SearchConfig
from diptych.bench.load import LoadResult, Progress, ramped
from diptych.bench.objectives import Objectives
from diptych.bench.request_records import RequestRecord, lines
from diptych.bench.session import BenchConfig, Session, drive, open_session
from diptych.bench.stalls import longest_gaps
from diptych.bench.summary import classes, summarize
from diptych.bench.target import TargetConfig
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

SHORT = LengthsConfig(prompt=LengthConfig(mean=32), output=LengthConfig(mean=4))


def config(url: str, workload: WorkloadConfig | None = None, *, fake: dict[str, Any] | None = None, **more: Any) -> Any:
    """A measurement of the make-believe server."""
    fields = {name: more.pop(name) for name in ("api", "prompts", "running_usage", "timeout_s") if name in more}
    target = TargetConfig(url=url, extra={"fake": fake or {}}, **fields)
    workload = workload or WorkloadConfig(num_requests=30, rate=300.0, lengths=SHORT)
    return BenchConfig(
        **{"target": target, "workload": workload, "warm_up": 1, "salt": "test", "settle_s": 0.0, **more}
    )


def measured(given: BenchConfig, use: Callable[[Session], Any] | None = None) -> Any:
    """One run, or what ``use`` does with the session."""

    async def run() -> Any:
        async with open_session(given) as session:
            return await (use(session) if use else session.run())

    return drive(run())


def most_at_once(result: LoadResult) -> int:
    """How many requests were under way at the same time."""
    changes = sorted([(one.sent_ns, 1) for one in result.records] + [(one.end_ns, -1) for one in result.records])
    return max(accumulate(change for _, change in changes))


def test_an_open_loop_does_not_wait_for_answers(narrow_url: str) -> None:
    workload = WorkloadConfig(num_requests=20, rate=1000.0, arrivals=ArrivalConfig(kind="constant"), lengths=SHORT)
    result: LoadResult = measured(config(narrow_url, workload, fake={"ttft_ms": 20, "itl_ms": 1}))
    assert result.ended == "done" and len(result.records) == 20
    assert [one.intended_ns for one in result.records] == [number * NS_PER_MS for number in range(20)]
    assert most_at_once(result) > 2  # two are worked on at once
    wait = result.records[-1].ttft_ns
    assert wait is not None and wait > 9 * 20 * NS_PER_MS - 19 * NS_PER_MS  # it counts what nine pairs before it took


def test_a_closed_loop_has_as_many_requests_as_clients(url: str) -> None:
    arrivals = ArrivalConfig(kind="closed", concurrency=3)
    result: LoadResult = measured(config(url, WorkloadConfig(num_requests=12, arrivals=arrivals, lengths=SHORT)))
    assert len(result.records) == 12
    assert most_at_once(result) <= 3


@pytest.mark.parametrize(
    "fake", [{}, {"ids": True, "batch": 2}, {"running": True, "batch": 3}, {"batch": 2}, {"roles": True}], ids=str
)
def test_every_token_is_counted_in_every_dialect(url: str, fake: dict[str, Any]) -> None:
    chat = {"api": "chat", "prompts": "text"} if "roles" in fake else {}
    workload = WorkloadConfig(
        num_requests=5, rate=100.0, lengths=LengthsConfig(prompt=LengthConfig(mean=40), output=LengthConfig(mean=7))
    )
    result: LoadResult = measured(config(url, workload, fake=fake, **chat))
    batch = fake.get("batch", 1)
    for one in result.records:
        assert one.is_completed, one.error
        assert (one.output_tokens, one.prompt_tokens) == (7, 40)
        assert len(one.stamps) == -(-7 // batch)
        assert list(one.sizes) == ([min(batch, 7 - sent) for sent in range(0, 7, batch)] if len(fake) == 2 else [])
    summary = summarize(result)
    assert summary["tokens_per_event"] == pytest.approx(7 / -(-7 // batch))
    assert summary["num_completed"] == 5 and summary["attainment"] is None


def test_failures_are_counted_and_said(url: str) -> None:
    def after_warm_up(fail: str) -> Callable[[Session], Any]:
        def use(session: Session) -> Any:
            session.target.config.extra["fake"]["fail"] = fail
            return session.run()

        return use

    workload = WorkloadConfig(num_requests=6, rate=300.0, lengths=SHORT)
    for fail, words in (("status", "HTTP 500: it was asked to fail"), ("break", "in the middle of the answer")):
        given = config(url, workload, fake={"itl_ms": 1}, slo=Objectives(ttft_ns=NS_PER_S))
        summary = summarize(measured(given, after_warm_up(fail)))
        assert summary["num_failed"] == 6 and summary["attainment"] == 0.0
        assert all(words in error for error in summary["errors"])


def test_a_server_that_refuses_the_warm_up_is_an_error_in_its_words(url: str) -> None:
    with pytest.raises(ConfigError, match="it was asked to fail"):
        measured(config(url, fake={"fail": "status"}))
    with pytest.raises(ConfigError, match="cannot connect"):
        measured(config("http://127.0.0.1:9"))


def test_clients_lose_patience_and_slow_answers_time_out(url: str) -> None:
    slow = {"ttft_ms": 1, "itl_ms": 400}
    workload = WorkloadConfig(
        num_requests=3, rate=100.0, classes=(ClassConfig(kind="hasty", patience_s=0.05),), lengths=SHORT
    )
    left: LoadResult = measured(config(url, workload, fake=slow, warm_up=0))
    assert [one.outcome for one in left.records] == ["aborted"] * 3
    late: LoadResult = measured(
        config(url, WorkloadConfig(num_requests=2, rate=100.0, lengths=SHORT), fake=slow, warm_up=0, timeout_s=0.1)
    )
    assert all("no whole answer in 0.1 s" in (one.error or "") for one in late.records)


def test_a_run_that_is_stopped_keeps_what_was_measured(url: str) -> None:
    arrivals = ArrivalConfig(kind="constant")
    workload = WorkloadConfig(num_requests=1000, rate=100.0, lengths=SHORT, arrivals=arrivals)

    async def use(session: Session) -> LoadResult:
        def watch(now: Progress) -> None:
            if now.completed > 3:
                session.stop.set()

        return await session.run(watch=watch)

    result: LoadResult = measured(config(url, workload, fake={"itl_ms": 20}), use)
    assert result.ended == "stopped"
    assert {one.outcome for one in result.records} <= {"completed", "unfinished"}
    assert 3 < sum(one.is_completed for one in result.records) <= len(result.records) < 1000


def test_nothing_is_sent_after_the_duration(url: str) -> None:
    workload = WorkloadConfig(num_requests=1000, rate=100.0, lengths=SHORT)
    result: LoadResult = measured(config(url, workload, duration_s=0.25))
    assert result.ended == "duration"
    assert max(one.intended_ns for one in result.records) <= 0.25 * NS_PER_S
    assert all(one.is_completed for one in result.records)


def test_a_ramp_has_the_rate_that_it_says() -> None:
    specs = [RequestSpec(arrival_ns=number * NS_PER_S, prompt_tokens=1, output_tokens=1) for number in range(200)]
    times = [spec.arrival_ns / NS_PER_S for spec in ramped(specs, 1.0, 9.0, 20.0)]
    assert sum(time < 20.0 for time in times) == 100  # the mean of 1 and 9 for 20 s
    assert times[-1] == pytest.approx(20 + (199 - 100) / 9)
    assert times[1] - times[0] == pytest.approx(0.86, abs=0.02)
    assert list(ramped(specs, 2.0, 2.0, 5.0))[10].arrival_ns == 5 * NS_PER_S


def test_the_workload_is_that_of_the_simulator(url: str) -> None:
    workload = WorkloadConfig(
        num_requests=40, rate=400.0, trace=TraceConfig(path="azure-conv"), lengths=LengthsConfig()
    )
    source = build(workload, 3)
    assert not isinstance(source, ClosedLoop)
    result: LoadResult = measured(config(url, workload, seed=3, fake={"itl_ms": 0.1, "ttft_ms": 1}))
    wanted = [(one.arrival_ns, one.prompt_tokens, one.output_tokens) for one in source]
    assert [(one.intended_ns, one.prompt_tokens, one.output_tokens) for one in result.records] == wanted


def test_goodput_is_what_two_slots_can_do(narrow_url: str) -> None:
    """Two slots of 20 ms serve 100 requests per second; a bound on waiting leaves some of that."""
    arrivals = ArrivalConfig(kind="constant")
    workload = WorkloadConfig(arrivals=arrivals, lengths=LengthsConfig(output=LengthConfig(mean=2)))
    given = config(narrow_url, workload, fake={"ttft_ms": 10, "itl_ms": 10}, slo=Objectives(ttft_ns=400 * NS_PER_MS))
    search = SearchConfig(tolerance=1.0, repeats=1)
    found, probes = measured(given, lambda session: session.find_goodput(search, start_rate=80.0, seconds=0.7))
    assert found.is_bracketed and found.rate is not None
    assert len(probes) == found.num_probes
    assert all(probe.judged >= 60 for probe in probes)


def test_goodput_without_objectives_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="objectives"):
        measured(config(url), lambda session: session.find_goodput(SearchConfig(), start_rate=1.0, seconds=1.0))


def test_a_stall_names_who_was_waiting() -> None:
    def stream(number: int, sent: int, stamps: list[int]) -> RequestRecord:
        times = array("q", (stamp * NS_PER_MS for stamp in stamps))
        return RequestRecord(
            number=number, intended_ns=sent * NS_PER_MS, sent_ns=sent * NS_PER_MS, end_ns=times[-1],
            outcome="completed", prompt_tokens=1000 * number, output_tokens=len(stamps), stamps=times,
        )  # fmt: skip

    records = [stream(1, 0, [10, 20, 30, 230, 240]), stream(2, 5, [15, 25, 228, 238]), stream(3, 28, [229, 231])]
    first, second, _ = longest_gaps(records)
    assert (first.number, first.gap_ms, first.token) == (2, 203.0, 2)
    assert (second.number, second.at_s, second.prefilling, second.decoding) == (1, 0.03, {3: 3000}, 2)


def test_classes_and_records_have_what_the_simulators_have(url: str) -> None:
    kinds = (ClassConfig(kind="chat", share=3), ClassConfig(kind="batch"))
    workload = WorkloadConfig(num_requests=20, rate=500.0, classes=kinds, lengths=SHORT)
    result: LoadResult = measured(config(url, workload, slo=Objectives(ttft_ns=5 * NS_PER_S)))
    found = classes(result.records)
    assert set(found) == {"batch", "chat"} and sum(one["num_requests"] for one in found.values()) == 20
    written = list(lines(result.records, with_gaps=True))
    assert len(written) == 20 and b'"arrival_s"' in written[0] and b'"gaps_ms"' in written[0]
    summary = summarize(result)
    assert summary["attainment"] == 1.0 and summary["attainment_interval"][1] == 1.0
    assert summary["goodput_interval"] is not None
