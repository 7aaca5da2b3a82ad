"""Statistics of latencies as reports give them: percentiles, distributions, shares, what happened over time.

Without numpy. A distribution of nothing is None, not 0.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

from diptych.control.slo import NS_PER_MS, NS_PER_S

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """low .. high, at a confidence that the caller chose; an array of two numbers in JSON."""

    low: float
    high: float


def wilson(met: int, judged: int, confidence: float = CONFIDENCE) -> Interval:
    """Confidence interval of a share: the score interval of Wilson, J. Am. Stat. Assoc. 22 (1927). It takes requests as
    independent; those that share a queue are alike, so the true interval is somewhat wider."""
    if not 0 <= met <= judged:
        raise ValueError(f"{met} of {judged} is no share")
    if judged == 0:
        return Interval(0.0, 1.0)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, square = met / judged, z * z / judged
    centre = (share + square / 2) / (1 + square)
    reach = z / (1 + square) * math.sqrt(share * (1 - share) / judged + square / (4 * judged))
    return Interval(0.0 if met == 0 else centre - reach, 1.0 if met == judged else centre + reach)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks (numpy's default); 0 for an empty sequence."""
    if not ordered:
        return 0.0
    position = percent / 100 * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution(values: Iterable[float], unit: float = 1.0) -> dict[str, float | None]:
    """mean, p50, p90, p95, p99 and max, in ``unit``; None of each where there are no values."""
    ordered = sorted(values)
    if not ordered:
        return dict.fromkeys(("mean", *(f"p{percent:g}" for percent in PERCENTILES), "max"))
    spread = {f"p{percent:g}": percentile(ordered, percent) / unit for percent in PERCENTILES}
    return {"mean": sum(ordered) / len(ordered) / unit, **spread, "max": ordered[-1] / unit}


def distribution_ms(values_ns: Iterable[int]) -> dict[str, float | None]:
    """The distribution of nanoseconds, in milliseconds."""
    return distribution(values_ns, NS_PER_MS)


def cumulative(values: Sequence[float], num_points: int = 160) -> list[tuple[float, float]]:
    """(value, share of the values that are at most that) at equal shares, and at those of the last percent."""
    ordered = sorted(values)
    if not ordered:
        return []
    shares = sorted({index / num_points for index in range(num_points + 1)} | {0.99, 0.995, 0.999})
    last = len(ordered) - 1
    return [(ordered[round(share * last)], share) for share in shares]


def weighted_cumulative(weights: Mapping[int, int], scale: float, num_points: int = 240) -> list[tuple[float, float]]:
    """The same for a histogram of value -> count; values are multiplied by ``scale``."""
    total = sum(weights.values())
    points: list[tuple[float, float]] = []
    reached = 0
    for value, count in sorted(weights.items()):
        reached += count
        share = reached / total
        last = points[-1][1] if points else -1.0
        if share - last >= 1 / num_points or last < 0.99 <= share or reached == total:
            points.append((value * scale, share))
    return points


def count_over_time(
    starts: Iterable[int], ends: Iterable[int], duration_ns: int, num_points: int = 240
) -> list[tuple[float, int]]:
    """(seconds, how many have started and not ended) at equal distances from 0 to ``duration_ns``."""
    begun, over = sorted(starts), sorted(ends)
    times = [duration_ns * index // num_points for index in range(num_points + 1)]
    return [(now / NS_PER_S, bisect_right(begun, now) - bisect_right(over, now)) for now in times]


def median_and_longest(
    values: Iterable[tuple[int, int]], duration_ns: int, num_bins: int
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Bin (when, how long) pairs in nanoseconds. Returns (seconds, median in ms) and (seconds, largest in ms) of each
    bin that is not empty, at its middle."""
    width = max(1, -(-duration_ns // num_bins))
    bins: dict[int, list[int]] = {}
    for at, value in values:
        bins.setdefault(at // width, []).append(value)
    middle, longest = [], []
    for index, found in sorted(bins.items()):
        seconds = (index + 0.5) * width / NS_PER_S
        middle.append((seconds, percentile(sorted(found), 50) / NS_PER_MS))
        longest.append((seconds, max(found) / NS_PER_MS))
    return middle, longest
