"""What clients ask for, counted when requests arrive: the window of recorded arrivals, and the forecast of their rate.

An arrival is counted at once, with the share of its prompt that caches had lately and with its expected answer; both
are corrected when they are known. A request that has not ended stays, however old it is: it is a part of the load.

The forecast is Holt's of level and trend (1957: double exponential smoothing), for a minute or less.

    level = a * rate + (1 - a) * (level + d * trend)    trend = b * (level - level before) + (1 - b) * d * trend

The trend is damped (Gardner and McKenzie 1985): a rise goes on, each tick by d of the tick before. One that goes on for
ever is expected beyond the peak of every wave, and changes made for a load that never comes are the worst of all.
"""

import math
from collections import deque
from dataclasses import dataclass

from diptych.control.planner.guards import is_closed_loop
from diptych.control.planner.planner_events import (
    AnswerBegun,
    AnswerEnded,
    Demanded,
    DemandSummary,
    PromptBegun,
    ReplayedArrival,
)
from diptych.control.slo import NS_PER_S, Slo

LEVEL_WEIGHT = 0.4
TREND_WEIGHT = 0.15
DAMPING = 0.8
MOST_CHANGE = 2.0  # a forecast over the level is at most this, and at least its inverse


class RateForecast:
    """One rate, observed once a tick."""

    def __init__(self) -> None:
        self.level = 0.0
        self.trend = 0.0  # per tick
        self.num_observed = 0

    def observe(self, rate: float) -> None:
        """The rate of the tick that has ended."""
        if not self.num_observed:
            self.level = rate
        else:
            before = self.level
            self.level = LEVEL_WEIGHT * rate + (1 - LEVEL_WEIGHT) * (before + DAMPING * self.trend)
            self.trend = TREND_WEIGHT * (self.level - before) + (1 - TREND_WEIGHT) * DAMPING * self.trend
        self.level = max(0.0, self.level)
        self.num_observed += 1

    def ahead(self, num_ticks: float) -> float:
        """The rate expected in ``num_ticks`` ticks, within MOST_CHANGE of the level."""
        expected = self.level + self.trend * DAMPING * (1 - math.pow(DAMPING, num_ticks)) / (1 - DAMPING)
        return min(max(expected, self.level / MOST_CHANGE), self.level * MOST_CHANGE)


HIT_WEIGHT = 0.02  # of one prompt in the share that caches had lately
MOST_RECORDED = 100_000
LEAST_LEFT = 0.1  # of an expected answer, that is expected of a stream that is longer already


@dataclass(eq=False, slots=True)
class _Recorded:
    arrival_ns: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    slo: Slo
    is_waiting: bool = True  # it has no token, and has not ended
    begun_ns: int = 0  # when it had its first token


class Demand:
    """The arrivals of the last ``window_ns``, and those before that still wait. Ticks are ``tick_ns`` apart."""

    def __init__(self, window_ns: int, tick_ns: int) -> None:
        self.rate = RateForecast()  # requests per second
        self._window_ns = window_ns
        self._tick_ns = tick_ns
        self._recorded: deque[_Recorded] = deque()
        self._open: dict[str, _Recorded] = {}
        self._hit_share = 0.0
        self._num_since_tick = 0
        self._last_tick_ns: int | None = None
        self._open_counts: deque[int] = deque(maxlen=256)  # at arrivals, the new request included

    def __len__(self) -> int:
        """Arrivals of the window."""
        return len(self._recorded)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def on_demanded(self, event: Demanded, now: int) -> None:
        """Take in Demanded: a request arrived."""
        cached = int(self._hit_share * event.num_prompt_tokens)
        recorded = _Recorded(now, event.num_prompt_tokens, cached, max(1, event.num_output_tokens), event.slo)
        self._recorded.append(recorded)
        if len(self._recorded) > MOST_RECORDED:
            self._recorded.popleft()
        self._open[event.request_id] = recorded
        self._num_since_tick += 1
        if self._last_tick_ns is None:
            self._last_tick_ns = now
        self._open_counts.append(len(self._open))

    def on_prompt_begun(self, event: PromptBegun) -> None:
        """Take in PromptBegun: a request waits no longer."""
        if (recorded := self._open.get(event.request_id)) is not None:
            recorded.num_cached_tokens = min(event.num_cached_tokens, recorded.num_prompt_tokens - 1)
            share = recorded.num_cached_tokens / max(1, recorded.num_prompt_tokens)
            self._hit_share += HIT_WEIGHT * (share - self._hit_share)

    def on_answer_begun(self, event: AnswerBegun, now: int) -> None:
        """Take in AnswerBegun: a first token came."""
        if (recorded := self._open.get(event.request_id)) is not None and recorded.is_waiting:
            recorded.is_waiting, recorded.begun_ns = False, now

    def on_answer_ended(self, event: AnswerEnded) -> None:
        """Take in AnswerEnded: an answer is complete, or was given up."""
        recorded = self._open.pop(event.request_id, None)
        if recorded is not None and event.num_output_tokens is not None:
            recorded.num_output_tokens = max(1, event.num_output_tokens)

    def on_tick(self, now: int) -> None:
        """A tick has passed."""
        if self._last_tick_ns is not None and now > self._last_tick_ns:
            self.rate.observe(self._num_since_tick * NS_PER_S / (now - self._last_tick_ns))
        self._last_tick_ns, self._num_since_tick = now, 0
        while self._recorded and self._recorded[0].arrival_ns < now - self._window_ns:
            self._recorded.popleft()

    def summary(self, horizon_ns: int) -> DemandSummary:
        """The window as figures; the forecast is for ``horizon_ns`` from now. Of load that follows completions there is
        none: a faster fleet would raise it, and a slower one lower it."""
        count = max(1, len(self._recorded))
        closed = is_closed_loop(self._open_counts)
        return DemandSummary(
            rate=self.rate.level,
            forecast=self.rate.level if closed else self.rate.ahead(horizon_ns / self._tick_ns),
            mean_prompt_tokens=sum(entry.num_prompt_tokens - entry.num_cached_tokens for entry in self._recorded)
            / count,
            mean_output_tokens=sum(entry.num_output_tokens for entry in self._recorded) / count,
            is_closed_loop=closed,
        )

    def running(self, num_generated: int, now: int) -> list[ReplayedArrival]:
        """The streams as they are now, of which the workers report ``num_generated`` tokens in all: each has its share
        by its age. What is left of an answer is what was expected of it less what there is."""
        streams = [recorded for recorded in self._open.values() if not recorded.is_waiting]
        ages_ns = sum(now - recorded.begun_ns for recorded in streams)
        found = []
        for recorded in streams:
            num_tokens = 1 + num_generated * (now - recorded.begun_ns) // max(1, ages_ns)
            expected = recorded.num_output_tokens
            num_left = max(1, expected - num_tokens, int(LEAST_LEFT * expected))
            found.append(ReplayedArrival(0, recorded.num_prompt_tokens + num_tokens, num_left, recorded.slo, True))
        return found

    def replay(self, rate: float, most: int, least_ns: int) -> tuple[tuple[ReplayedArrival, ...], int, int]:
        """The latest arrivals (at most ``most``) come again at this rate, behind all that wait now (likewise); how many
        these are, and the nanoseconds in which the others arrive. Gaps are scaled, lengths and their order stay. What
        was recorded in less than ``least_ns`` comes more than once: a queue needs time to build up."""
        count = min(most, len(self._recorded))
        latest = [self._recorded[index - count] for index in range(count)]
        if not latest or rate <= 0:
            return (), 0, 0
        begun_ns = latest[0].arrival_ns
        lasted_ns = max(1, latest[-1].arrival_ns - begun_ns)
        span_ns = max(1, int(count / rate * NS_PER_S))
        times = max(1, min(most // count, -(-least_ns // span_ns)))
        waiting = [_replayed(recorded, 0) for recorded in self._open.values() if recorded.is_waiting][:most]
        arriving = [
            _replayed(recorded, turn * span_ns + (recorded.arrival_ns - begun_ns) * span_ns // lasted_ns)
            for turn in range(times)
            for recorded in latest
        ]
        return (*waiting, *arriving), len(waiting), times * span_ns

    def num_late(self, now: int) -> int:
        """Requests that have waited for their first token for longer than their objective already."""
        return sum(
            recorded.is_waiting
            and recorded.slo.ttft_ns is not None
            and now - recorded.arrival_ns > recorded.slo.ttft_ns
            for recorded in self._open.values()
        )

    def latest(self, most: int) -> list[ReplayedArrival]:
        """The last arrivals, without their times."""
        count = min(most, len(self._recorded))
        return [_replayed(self._recorded[index - count], 0) for index in range(count)]


def _replayed(recorded: _Recorded, at_ns: int) -> ReplayedArrival:
    uncached = max(1, recorded.num_prompt_tokens - recorded.num_cached_tokens)
    return ReplayedArrival(at_ns, uncached, recorded.num_output_tokens, recorded.slo)
