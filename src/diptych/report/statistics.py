"""Statistics of latencies as reports give them: percentiles, means, cumulative distributions. Without numpy."""

from collections.abc import Iterable, Mapping, Sequence

from diptych.control.slo import NS_PER_MS

PERCENTILES = (50.0, 90.0, 95.0, 99.0)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks (numpy's default); 0 for an empty sequence."""
    if not ordered:
        return 0.0
    position = percent / 100 * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution_ms(values_ns: Iterable[int]) -> dict[str, float]:
    """mean, p50, p90, p95, p99 and max in milliseconds."""
    ordered = sorted(values_ns)
    spread = {f"p{percent:g}": percentile(ordered, percent) / NS_PER_MS for percent in PERCENTILES}
    mean = sum(ordered) / len(ordered) / NS_PER_MS if ordered else 0.0
    return {"mean": mean, **spread, "max": (ordered[-1] if ordered else 0) / NS_PER_MS}


def cumulative(values: Sequence[float], num_points: int = 160) -> list[tuple[float, float]]:
    """(value, share of the values that are at most that) at equal shares, with the last percent in detail."""
    ordered = sorted(values)
    if not ordered:
        return []
    shares = sorted({index / num_points for index in range(num_points + 1)} | {0.995, 0.999})
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
        if not points or share - points[-1][1] >= 1 / num_points or reached == total:
            points.append((value * scale, share))
    return points
