"""The sliding window behind the live page."""

from diptych.serving.metrics.histogram import Histogram
from diptych.serving.metrics.rolling_window import MAX_SILENCE_S, WINDOW_S, Recent


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
