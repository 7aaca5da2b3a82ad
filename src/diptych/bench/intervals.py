"""Confidence intervals of measured shares and rates. Resampling is seeded: equal measurements have equal intervals."""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

from diptych.report.statistics import percentile
from diptych.workload.distributions import Stream

CONFIDENCE = 0.95
RESAMPLES = 2000
BINS = 60


class Interval(NamedTuple):
    """low .. high, at a confidence that the caller chose; an array of two numbers in JSON."""

    low: float
    high: float


def wilson(met: int, judged: int, confidence: float = CONFIDENCE) -> Interval:
    """Of a share: the score interval of Wilson, J. Am. Stat. Assoc. 22 (1927). It takes requests as independent; those
    that share a queue are alike, so that the true interval is somewhat wider."""
    if not 0 <= met <= judged:
        raise ValueError(f"{met} of {judged} is no share")
    if judged == 0:
        return Interval(0.0, 1.0)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, square = met / judged, z * z / judged
    centre = (share + square / 2) / (1 + square)
    reach = z / (1 + square) * math.sqrt(share * (1 - share) / judged + square / (4 * judged))
    return Interval(0.0 if met == 0 else centre - reach, 1.0 if met == judged else centre + reach)


def block_bootstrap(counts: Sequence[int], seconds_per_bin: float, confidence: float = CONFIDENCE) -> Interval | None:
    """Of a rate per second, from counts in equal neighbouring bins of time: the circular block bootstrap of Politis and
    Romano (1992), which keeps what neighbours have in common, with blocks of about n**(1/3) bins. None below 8 bins."""
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
