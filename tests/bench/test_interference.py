"""Interference: what a long prompt does to streams; and a server that goes away meanwhile."""

from typing import Any

import pytest

from diptych.bench.interference import InterferenceConfig, interference, tables
from diptych.bench.session import Session
from diptych.control.errors import ConfigError

from .loopback import LoopbackClient, loopback_config, measured


def found_in(scene: InterferenceConfig, **fake: Any) -> Any:
    """The result of the scenario."""
    return measured(loopback_config(fake=fake), lambda session, _: interference(session, scene))


def test_interference_says_what_a_long_prompt_did() -> None:
    scene = InterferenceConfig(
        streams=2, stream_tokens=16, stream_limit=500, long_tokens=64, short_tokens=8, repetitions=1,
        settle_s=0.05, quiet_s=0.2, behind_s=0.02,
    )  # fmt: skip
    found = found_in(scene, ttft_ms=60, itl_ms=5)
    assert found["repetitions"] == 1 and not found["streams_ended"]
    assert found["before_ms"]["p50"] >= 4 and found["during_ms"]["p50"] >= 4
    assert set(found["ttft_ms"]) >= {"long", "long_alone", "short_alone", "short_behind_long"}
    assert found["factor"] > 0 and len(found["factors"]) == 1
    assert found["stream_tokens_per_s"]["before"] > 0 and found["stream_tokens_per_s"]["during"] > 0
    assert len(found["gaps_ms"]["during"]) > 1 and found["around"]["gaps"]


def test_on_the_idle_server_the_long_prompt_may_be_another() -> None:
    scene = InterferenceConfig(
        streams=1, stream_tokens=16, stream_limit=500, long_tokens=64, short_tokens=8, ahead_tokens=256,
        repetitions=2, settle_s=0.02, quiet_s=0.1, behind_s=0.01,
    )  # fmt: skip
    found = found_in(scene, ttft_ms=30, itl_ms=5)
    assert scene.ahead == 256 and len(found["factors"]) == 2
    words = str(tables(found))
    assert "8 tokens behind 256" in words and "64 tokens, alone" in words


def test_streams_that_end_too_early_are_an_error_that_says_what_to_do() -> None:
    scene = InterferenceConfig(streams=1, stream_limit=4, long_tokens=8, repetitions=1, settle_s=0.1, quiet_s=0.1)
    with pytest.raises(ConfigError, match="higher --stream-limit"):
        found_in(scene, itl_ms=1)


@pytest.mark.parametrize("name", ["streams", "repetitions", "stream_limit", "ahead_tokens"])
def test_a_scenario_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        InterferenceConfig(**{name: 0})


def test_interference_keeps_the_repetitions_before_the_server_went_away() -> None:
    scene = InterferenceConfig(
        streams=1, stream_tokens=8, stream_limit=500, long_tokens=16, short_tokens=8, repetitions=3,
        settle_s=0.02, quiet_s=0.05, behind_s=0.01,
    )  # fmt: skip

    async def use(session: Session, client: LoopbackClient) -> Any:
        return await interference(session, scene, lambda _: client.kill()), session.broken

    found, broken = measured(loopback_config(fake={"ttft_ms": 5, "itl_ms": 5}), use)
    assert found["repetitions"] == 1 and broken is not None


def test_a_scenario_that_is_stopped_before_its_first_repetition_is_an_error() -> None:
    async def use(session: Session, _: LoopbackClient) -> Any:
        session.stop.set()
        return await interference(session, InterferenceConfig())

    with pytest.raises(ConfigError, match="stopped before the first repetition"):
        measured(loopback_config(), use)


def test_a_scenario_that_does_not_fit_the_servers_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a context of 2,000,004 tokens; the server has 1,048,576"):
        found_in(InterferenceConfig(long_tokens=2_000_000))
