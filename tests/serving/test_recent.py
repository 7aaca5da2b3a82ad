"""The sliding window behind the live page."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.serving.metrics.histogram import Histogram
from diptych.serving.metrics.rolling_window import MAX_SILENCE_S, MIN_INTERVAL_S, WINDOW_S, Recent


class Server:
    """What a window is made over."""

    def __init__(self) -> None:
        self.histogram = Histogram((1.0,))
        self.ended = 0
        self.recent = Recent({"itl": self.histogram}, lambda: {"ended": self.ended})


def test_percentiles_are_those_of_the_values_to_one_percent() -> None:
    server = Server()
    server.recent.take(100.0)
    for value in range(1, 1001):
        server.histogram.observe(value / 1000)
    server.recent.take(101.0)
    found = server.recent.percentiles("itl")
    assert found is not None and found.count == 1000
    for value, wanted in ((found.p50_s, 0.5), (found.p90_s, 0.9), (found.p99_s, 0.99), (found.max_s, 1.0)):
        assert abs(value / wanted - 1) < 0.011


def test_the_window_forgets_what_is_older_than_it() -> None:
    server = Server()
    server.recent.take(0.0)
    server.ended = 50
    server.histogram.observe(1.0, 7)
    second = 1.0
    while second <= WINDOW_S + 3:
        server.recent.take(second)
        if second == 1.0:
            assert (server.recent.count("ended"), server.recent.per_second("ended")) == (50, 50.0)
        second += 1.0
    assert server.recent.count("ended") == 0
    assert server.recent.percentiles("itl") is None


def test_what_happened_while_nobody_asked_has_no_time_and_does_not_count() -> None:
    server = Server()
    server.recent.take(0.0)
    server.recent.take(1.0)
    server.ended = 5
    server.histogram.observe(1.0)
    server.recent.take(2.0 + MAX_SILENCE_S)
    assert server.recent.per_second("ended") is None
    server.ended = 6
    server.recent.take(3.0 + MAX_SILENCE_S)
    assert (server.recent.count("ended"), server.recent.percentiles("itl")) == (1, None)


def test_asking_often_costs_nothing_and_loses_nothing() -> None:
    server = Server()
    server.recent.take(0.0)
    server.ended = 1
    for at in range(1, 11):
        server.recent.take(at / 10)
    assert server.recent.count("ended") == 1


Steps = st.lists(
    st.tuples(st.floats(0.01, MAX_SILENCE_S - 0.1), st.integers(0, 9), st.lists(st.floats(0.001, 10), max_size=5)),
    min_size=1,
    max_size=40,
)


@given(Steps)
def test_the_window_holds_all_that_happened_in_it_and_nothing_older(
    steps: Sequence[tuple[float, int, Sequence[float]]],
) -> None:
    server, now, asked = Server(), 100.0, 100.0
    server.recent.take(now)
    slices: list[tuple[float, float, int, list[float]]] = []  # begin, end, growth, values
    grown, values = 0, []
    for pause_s, growth, observed in steps:
        for value in observed:
            server.histogram.observe(value)
        server.ended += growth
        grown, values, now = grown + growth, [*values, *observed], now + pause_s
        server.recent.take(now)
        if MIN_INTERVAL_S <= now - asked <= MAX_SILENCE_S:
            slices.append((asked, now, grown, values))
            asked, grown, values = now, 0, []
        elif now - asked > MAX_SILENCE_S:
            slices, asked, grown, values = [], now, 0, []
        slices = [part for part in slices if part[0] >= asked - WINDOW_S]
    assert server.recent.count("ended") == sum(part[2] for part in slices)
    assert server.recent.span_s == (slices[-1][1] - slices[0][0] if slices else 0.0)
    ordered = sorted(value for part in slices for value in part[3])
    found = server.recent.percentiles("itl")
    assert (found is None) == (not ordered)
    if found is not None:
        assert found.count == len(ordered)
        for said, share in ((found.p50_s, 0.5), (found.p90_s, 0.9), (found.p99_s, 0.99), (found.max_s, 1.0)):
            assert said == pytest.approx(ordered[math.ceil(len(ordered) * share) - 1], rel=0.0101)


def test_what_takes_no_time_counts_as_nothing() -> None:
    server = Server()
    server.recent.take(0.0)
    server.histogram.observe(0.0, 3)
    server.recent.take(1.0)
    found = server.recent.percentiles("itl")
    assert found is not None and (found.count, found.p50_s, found.max_s) == (3, 0.0, 0.0)
