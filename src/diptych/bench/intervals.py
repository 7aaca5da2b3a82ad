"""Confidence intervals of measured rates. Resampling is seeded: equal measurements have equal intervals."""

from collections.abc import Sequence

from diptych.report.statistics import CONFIDENCE, Interval, percentile
from diptych.workload.distributions import Stream

RESAMPLES = 2000
BINS = 60


def block_bootstrap(counts: Sequence[int], seconds_per_bin: float, confidence: float = CONFIDENCE) -> Interval | None:
    """Confidence interval of a rate per second, from counts in equal neighbouring bins of time: the circular block
    bootstrap of Politis and Romano (1992), which keeps the correlation of neighbouring bins, with blocks of about
    n**(1/3) bins. None below 8 bins."""
    number = len(counts)
    if number < 8 or seconds_per_bin <= 0:
        return None
    width = max(1, round(number ** (1 / 3)))
    doubled = [*counts, *counts[: width - 1]]
    blocks = [sum(doubled[start : start + width]) for start in range(number)]
    uniform = Stream(0, "block bootstrap").uniform
    draws = -(-number // width)
    scale = 1 / (draws * width * seconds_per_bin)
    rates = sorted(sum(blocks[int(uniform() * number)] for _ in range(draws)) * scale for _ in range(RESAMPLES))
    tail = 50 * (1 - confidence)
    return Interval(percentile(rates, tail), percentile(rates, 100 - tail))


def binned(times_ns: Sequence[int], duration_ns: int, num_bins: int = BINS) -> list[int]:
    """Counts of [0, duration) in equal bins."""
    counts = [0] * num_bins
    for time in times_ns:
        counts[min(num_bins - 1, max(0, time * num_bins // max(1, duration_ns)))] += 1
    return counts
