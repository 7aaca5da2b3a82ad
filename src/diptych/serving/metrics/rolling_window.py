"""Percentiles and rates of the server over a sliding window, for the live page.

The window is filled only by ``take``: each call costs a pass over what was observed since the call before. Single
observations are not kept: they are counted in buckets 2 % wide.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from diptych.serving.metrics.histogram import Histogram

WINDOW_S = 30.0
MIN_INTERVAL_S = 0.2  # calls closer than this get the same answer
MAX_SILENCE_S = 5.0  # after a longer pause, observations in between have no known time
CAPACITY = 20_000  # observations between two calls
_SMALLEST_S = 1e-9  # what is shorter counts as nothing
_NOTHING = -(2**31)
_BUCKETS_PER_E = 50  # a bucket spans a factor of e ** (1 / 50)

Counts = Mapping[str, int]


@dataclass(slots=True)
class Slice:
    """What happened between two calls. buckets: per name, how often a value fell into each bucket."""

    start_s: float
    end_s: float
    counts: Counter[str]
    buckets: dict[str, Counter[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of the values in the window, in seconds; exact to 1 %."""

    count: int
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float


class Recent:
    """A sliding window over histograms (followed from here on) and over counters that only grow."""

    def __init__(self, histograms: Mapping[str, Histogram], counters: Callable[[], Counts]) -> None:
        self._observed = {name: histogram.follow(CAPACITY) for name, histogram in histograms.items()}
        self._counters = counters
        self._known: Counts = {}
        self._asked_s = -math.inf
        self._slices: deque[Slice] = deque()

    @property
    def span_s(self) -> float:
        """How much time the window covers by now."""
        return self._slices[-1].end_s - self._slices[0].start_s if self._slices else 0.0

    def take(self, now_s: float) -> None:
        """Count what came since the last call, at ``now_s``."""
        silence_s = now_s - self._asked_s
        if silence_s < MIN_INTERVAL_S:
            return
        counters = self._counters()
        if silence_s <= MAX_SILENCE_S:
            grown = Counter({name: value - self._known.get(name, 0) for name, value in counters.items()})
            part = Slice(self._asked_s, now_s, grown)
            for name, observed in self._observed.items():
                buckets = part.buckets[name] = Counter()
                for value, count in observed:
                    buckets[_bucket(value)] += count
            self._slices.append(part)
        else:
            self._slices.clear()
        for observed in self._observed.values():
            observed.clear()
        self._known, self._asked_s = counters, now_s
        while self._slices and self._slices[0].start_s < now_s - WINDOW_S:
            self._slices.popleft()

    def count(self, name: str) -> int:
        """How much a counter grew within the window."""
        return sum(part.counts[name] for part in self._slices)

    def per_second(self, name: str) -> float | None:
        """The same per second; None before there is a window."""
        return self.count(name) / self.span_s if self.span_s else None

    def percentiles(self, name: str) -> Percentiles | None:
        """Percentiles of a histogram's recent values; None if there were none."""
        buckets: Counter[int] = Counter()
        for part in self._slices:
            buckets.update(part.buckets[name])
        total = buckets.total()
        if not total:
            return None
        ordered = sorted(buckets.items())
        p50_s, p90_s, p99_s = (_quantile(ordered, total, share) for share in (0.5, 0.9, 0.99))
        return Percentiles(total, p50_s, p90_s, p99_s, _middle(ordered[-1][0]))


def _bucket(value_s: float) -> int:
    return math.floor(math.log(value_s) * _BUCKETS_PER_E) if value_s > _SMALLEST_S else _NOTHING


def _middle(bucket: int) -> float:
    return 0.0 if bucket == _NOTHING else math.exp((bucket + 0.5) / _BUCKETS_PER_E)


def _quantile(ordered: list[tuple[int, int]], total: int, share: float) -> float:
    """The smallest bucket that, with all below it, holds this share of the values (nearest rank)."""
    wanted, seen = math.ceil(total * share), 0
    for bucket, count in ordered:
        seen += count
        if seen >= wanted:
            return _middle(bucket)
    return _middle(ordered[-1][0])
