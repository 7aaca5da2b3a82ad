"""Counts per bucket, cheap to add to, turned into Prometheus families on demand."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily


class Histogram:
    """Counts per bucket; ``observe`` takes a value and how often it occurred."""

    __slots__ = ("_bounds", "_counts", "_newest", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._newest: deque[tuple[float, int]] | None = None

    def follow(self, capacity: int) -> deque[tuple[float, int]]:
        """A queue that gets every observation from now on, as (value, count): at most ``capacity``, for one reader."""
        self._newest = deque(maxlen=capacity)
        return self._newest

    def observe(self, value: float, count: int = 1) -> None:
        """Add ``count`` observations of ``value``."""
        if self._newest is not None:
            self._newest.append((value, count))
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def family(self, name: str, text: str, model: str) -> HistogramMetricFamily:
        """The cumulative buckets as Prometheus wants them."""
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        total, buckets = 0, []
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric([model], buckets, self._sum)
        return family
