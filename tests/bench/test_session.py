"""Sessions: warm-up, series of rates, the search for goodput, and servers that go away between two runs."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import msgspec
import pytest

from diptych.bench.objectives import LatencyObjectives
from diptych.bench.session import (
    FEW_REQUESTS,
    MIN_REQUESTS,
    BenchConfig,
    Probe,
    Ramp,
    Session,
    at_rate,
    drive,
    open_session,
)
from diptych.bench.target import TargetConfig
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS
from diptych.report.text import goodput_table
from diptych.search.goodput_search import GoodputSearch, SearchConfig
from diptych.workload.build import ArrivalConfig, LengthConfig, LengthsConfig, WorkloadConfig

from .conftest import fake_sse_server
from .loopback import SHORT, LoopbackClient, loopback_config, measured

SLO = LatencyObjectives(ttft_ns=2000 * NS_PER_MS)
QUICK = {"ttft_ms": 1, "itl_ms": 0.1}
TWENTY = WorkloadConfig(num_requests=20, lengths=SHORT)


def prompts(client: LoopbackClient) -> list[Any]:
    """The prompts of all requests so far."""
    return [msgspec.json.decode(body)["prompt"] for body in client.bodies if body]


def test_the_warm_up_sends_requests_like_the_first_ones_and_then_all_of_them_together() -> None:
    async def use(session: Session, client: LoopbackClient) -> list[Any]:
        await session.warm_up()
        return prompts(client)

    sent = measured(loopback_config(warm_up=3, fake=QUICK), use)
    assert [len(prompt) for prompt in sent] == [32] * 6
    assert len({tuple(prompt) for prompt in sent}) == 6


def test_a_server_that_refuses_the_warm_up_is_an_error_in_its_words() -> None:
    with pytest.raises(ConfigError, match="the server refuses a request: HTTP 500: it was asked to fail"):
        measured(loopback_config(warm_up=1, fake={"fail": "status"}), lambda session, _: session.warm_up())


def test_equal_salts_give_equal_prompts_and_each_run_has_its_own() -> None:
    async def use(session: Session, client: LoopbackClient) -> list[Any]:
        await session.run()
        await session.run()
        return prompts(client)

    workload = WorkloadConfig(num_requests=4, rate=500.0, lengths=SHORT)
    first, again, other = (measured(loopback_config(workload, fake=QUICK, salt=salt), use) for salt in ("a", "a", "b"))
    assert first == again and first != other
    assert len({tuple(prompt) for prompt in first}) == 8


@pytest.mark.parametrize(
    ("rate", "seconds", "number"),
    [(1.0, 1.0, FEW_REQUESTS), (10.0, 1.0, 40), (100.0, 0.3, MIN_REQUESTS), (400.0, 0.5, 200), (50.0, None, 20)],
)
def test_a_run_of_a_series_has_enough_requests_to_judge_its_rate(
    rate: float, seconds: float | None, number: int
) -> None:
    workload = at_rate(TWENTY, rate, seconds)
    assert (workload.rate, workload.num_requests) == (rate, number)


def test_a_series_has_a_run_at_each_rate() -> None:
    shown: list[Probe] = []
    config = loopback_config(TWENTY, fake=QUICK, slo=SLO)
    probes = measured(config, lambda session, _: session.series([200.0, 400.0], None, None, shown.append))
    assert probes == shown and [probe.rate for probe in probes] == [200.0, 400.0]
    assert [(probe.met, probe.judged, probe.share) for probe in probes] == [(20, 20, 1.0)] * 2


def test_a_series_that_is_stopped_keeps_the_runs_before() -> None:
    async def use(session: Session, _: LoopbackClient) -> list[Probe]:
        return await session.series([200.0, 400.0, 800.0], None, None, lambda _: session.stop.set())

    assert len(measured(loopback_config(TWENTY, fake=QUICK), use)) == 1


def test_a_server_that_goes_away_ends_a_series_and_what_was_measured_stays() -> None:
    async def use(session: Session, client: LoopbackClient) -> Any:
        return await session.series([200.0, 400.0], None, None, lambda _: client.kill()), session.broken

    probes, broken = measured(loopback_config(TWENTY, fake=QUICK, slo=SLO), use)
    assert len(probes) == 1 and probes[0].met == probes[0].judged == 20
    assert "cannot connect" in str(broken)


def test_the_search_does_not_blame_a_rate_for_a_server_that_went_away() -> None:
    async def use(session: Session, client: LoopbackClient) -> Any:
        search = SearchConfig(repeats=1)
        found = await session.find_goodput(search, start_rate=100.0, seconds=0.2, on_probe=lambda *_: client.kill())
        return found, session.broken

    (found, probes), broken = measured(loopback_config(TWENTY, fake=QUICK, slo=SLO), use)
    assert len(probes) == found.num_probes == 1 and found.rate == 100.0 and not found.is_bracketed
    assert broken is not None
    rows = goodput_table({**asdict(found), "config": asdict(SearchConfig())}).rows
    assert rows[0] == ("goodput, 90.0 % in time", "at least 100.00 requests/s")


def test_goodput_is_what_two_slots_can_do() -> None:
    """Two slots of 20 ms serve 100 requests per second; a bound on waiting leaves some of that."""
    workload = WorkloadConfig(
        arrivals=ArrivalConfig(kind="constant"), lengths=LengthsConfig(output=LengthConfig(mean=2))
    )
    config = loopback_config(
        workload, fake={"ttft_ms": 10, "itl_ms": 10}, slo=LatencyObjectives(ttft_ns=400 * NS_PER_MS)
    )
    shown: list[tuple[Probe, GoodputSearch]] = []

    async def use(session: Session, _: LoopbackClient) -> Any:
        search = SearchConfig(tolerance=1.0, repeats=1)
        on_probe: Callable[[Probe, GoodputSearch], None] = lambda *call: shown.append(call)  # noqa: E731
        return await session.find_goodput(search, start_rate=80.0, seconds=0.7, on_probe=on_probe)

    found, probes = measured(config, use, slots=2)
    assert found.is_bracketed and found.rate is not None
    assert len(probes) == found.num_probes == len(shown)
    assert all(probe.judged >= MIN_REQUESTS for probe in probes)


def test_without_a_rate_the_search_starts_at_that_of_a_single_client() -> None:
    async def use(session: Session, _: LoopbackClient) -> Any:
        return await session.find_goodput(
            SearchConfig(repeats=1, max_probes=2), start_rate=None, seconds=0.1, on_probe=lambda *_: session.stop.set()
        )

    workload = WorkloadConfig(lengths=LengthsConfig(output=LengthConfig(mean=2)))
    _, probes = measured(loopback_config(workload, fake={"ttft_ms": 20, "itl_ms": 5}, slo=SLO), use)
    assert 0 < probes[0].rate < 41  # an answer takes at least 25 ms; timers may end a millisecond early


@pytest.mark.parametrize(
    ("workload", "more", "words"),
    [
        (WorkloadConfig(), {}, "goodput needs objectives"),
        (WorkloadConfig(arrivals=ArrivalConfig(kind="closed")), {"slo": SLO}, "in an open loop of constant rate"),
        (WorkloadConfig(), {"slo": SLO, "ramp": Ramp(start=1.0, end=2.0, over_s=1.0)}, "of constant rate"),
    ],
    ids=["no objectives", "closed loop", "ramp"],
)
def test_a_search_that_cannot_be_is_refused(workload: WorkloadConfig, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        measured(
            loopback_config(workload, **more),
            lambda session, _: session.find_goodput(SearchConfig(), start_rate=1.0, seconds=1.0),
        )


def test_a_closed_loop_has_no_series_of_rates() -> None:
    with pytest.raises(ConfigError, match="a closed loop has no rate"):
        at_rate(WorkloadConfig(arrivals=ArrivalConfig(kind="closed")), 1.0, None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"warm_up": -1}, "warmup is -1"),
        ({"duration_s": 0.0}, "duration is 0.0"),
        (
            {"ramp": Ramp(start=1.0, end=2.0, over_s=1.0), "workload": WorkloadConfig(rate=3.0)},
            "takes the place of rate",
        ),
    ],
    ids=["warm-up", "duration", "ramp"],
)
def test_settings_that_cannot_be_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BenchConfig(target=TargetConfig(url="http://loopback"), **fields)


@pytest.mark.system
def test_a_server_process_that_is_killed_ends_a_series_and_what_was_measured_stays() -> None:
    with fake_sse_server() as server:
        target = TargetConfig(url=server.url, extra={"fake": QUICK})
        config = BenchConfig(target=target, workload=TWENTY, slo=SLO, warm_up=1, settle_s=0.0)

        async def run() -> Any:
            async with open_session(config) as session:
                return await session.series([200.0, 400.0], None, None, lambda _: server.kill()), session.broken

        probes, broken = drive(run())
    assert len(probes) == 1 and probes[0].met == probes[0].judged == 20
    assert "connect" in str(broken)


@pytest.mark.system
def test_goodput_of_a_server_process_is_bracketed(narrow_url: str) -> None:
    target = TargetConfig(url=narrow_url, extra={"fake": {"ttft_ms": 10, "itl_ms": 10}})
    workload = WorkloadConfig(lengths=LengthsConfig(output=LengthConfig(mean=2)))
    config = BenchConfig(target=target, workload=workload, slo=LatencyObjectives(ttft_ns=400 * NS_PER_MS), settle_s=0.0)

    async def run() -> Any:
        async with open_session(config) as session:
            search = SearchConfig(tolerance=1.0, repeats=1)
            return await session.find_goodput(search, start_rate=80.0, seconds=0.7)

    found, probes = drive(run())
    assert found.is_bracketed and len(probes) == found.num_probes
