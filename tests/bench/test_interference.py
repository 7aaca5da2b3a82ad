"""Interference: what a long prompt does to streams; and measurements whose server goes away."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from diptych.bench import tables as bench_tables
from diptych.bench.goodput import SearchConfig
from diptych.bench.interference import InterferenceConfig, interference, tables
from diptych.bench.objectives import Objectives
from diptych.bench.session import BenchConfig, Session, drive, open_session
from diptych.bench.target import TargetConfig
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS
from diptych.workload.build import LengthConfig, LengthsConfig, WorkloadConfig

from .conftest import FakeServer

SHORT = LengthsConfig(prompt=LengthConfig(mean=32), output=LengthConfig(mean=4))


def measured(url: str, use: Callable[[Session], Awaitable[Any]], **fake: Any) -> Any:
    """What ``use`` does with a session."""
    workload = WorkloadConfig(num_requests=20, lengths=SHORT)
    target = TargetConfig(url=url, extra={"fake": fake})
    slo = Objectives(ttft_ns=2000 * NS_PER_MS)
    given = BenchConfig(target=target, workload=workload, slo=slo, warm_up=1, salt="test", settle_s=0.0)

    async def run() -> Any:
        async with open_session(given) as session:
            return await use(session)

    return drive(run())


@contextmanager
def doomed() -> Iterator[FakeServer]:
    """A server of its own, to be killed."""
    server = FakeServer()
    try:
        yield server
    finally:
        server.close()


def test_interference_says_what_a_long_prompt_did(url: str) -> None:
    scene = InterferenceConfig(
        streams=2, stream_tokens=16, stream_limit=500, long_tokens=64, short_tokens=8, repetitions=1,
        settle_s=0.05, quiet_s=0.2, behind_s=0.02,
    )  # fmt: skip
    found = measured(url, lambda session: interference(session, scene), ttft_ms=60, itl_ms=5)
    assert found["repetitions"] == 1 and not found["streams_ended"]
    assert found["before_ms"]["p50"] >= 4 and found["during_ms"]["p50"] >= 4
    assert set(found["ttft_ms"]) >= {"long", "long_alone", "short_alone", "short_behind_long"}
    assert found["factor"] > 0 and len(found["factors"]) == 1
    assert found["stream_tokens_per_s"]["before"] > 0 and found["stream_tokens_per_s"]["during"] > 0
    assert len(found["gaps_ms"]["during"]) > 1 and found["around"]["gaps"]


def test_on_the_idle_server_the_long_prompt_may_be_another(url: str) -> None:
    scene = InterferenceConfig(
        streams=1, stream_tokens=16, stream_limit=500, long_tokens=64, short_tokens=8, ahead_tokens=256,
        repetitions=2, settle_s=0.02, quiet_s=0.1, behind_s=0.01,
    )  # fmt: skip
    found = measured(url, lambda session: interference(session, scene), ttft_ms=30, itl_ms=5)
    assert scene.ahead == 256 and len(found["factors"]) == 2
    words = str(tables(found))
    assert "8 tokens behind 256" in words and "64 tokens, alone" in words


def test_streams_that_end_too_early_are_an_error_that_says_what_to_do(url: str) -> None:
    scene = InterferenceConfig(streams=1, stream_limit=4, long_tokens=8, repetitions=1, settle_s=0.1, quiet_s=0.1)
    with pytest.raises(ConfigError, match="higher --stream-limit"):
        measured(url, lambda session: interference(session, scene), itl_ms=1)


@pytest.mark.parametrize("name", ["streams", "repetitions", "stream_limit", "ahead_tokens"])
def test_a_scenario_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        InterferenceConfig(**{name: 0})


def test_a_server_that_goes_away_ends_a_series_and_what_was_measured_stays() -> None:
    with doomed() as server:

        async def use(session: Session) -> Any:
            return await session.series([200.0, 400.0], None, None, lambda _: server.kill()), session.broken

        probes, broken = measured(server.url, use)
    assert len(probes) == 1 and probes[0].met == probes[0].judged == 20
    assert "connect" in str(broken)


def test_the_search_does_not_blame_a_rate_for_a_server_that_went_away() -> None:
    with doomed() as server:

        async def use(session: Session) -> Any:
            search = SearchConfig(repeats=1)
            found = await session.find_goodput(search, start_rate=100.0, seconds=0.2, on_probe=lambda *_: server.kill())
            return found, session.broken

        (found, probes), broken = measured(server.url, use)
    assert len(probes) == found.num_probes == 1 and found.rate == 100.0 and not found.is_bracketed
    assert broken is not None
    assert bench_tables.goodput_table(found, 0.9).rows[0] == ("goodput, 90.0 % in time", "at least 100.00 requests/s")


def test_interference_keeps_the_repetitions_before_the_server_went_away() -> None:
    scene = InterferenceConfig(
        streams=1, stream_tokens=8, stream_limit=500, long_tokens=16, short_tokens=8, repetitions=3,
        settle_s=0.02, quiet_s=0.05, behind_s=0.01,
    )  # fmt: skip
    with doomed() as server:

        async def use(session: Session) -> Any:
            return await interference(session, scene, lambda _: server.kill()), session.broken

        found, broken = measured(server.url, use, ttft_ms=5, itl_ms=5)
    assert found["repetitions"] == 1 and broken is not None
