"""The search for the highest rate at which enough requests meet their objectives.

Sans I/O: results are added, and the next rate is asked for. Attainment falls with the rate, and a measurement of it is
noisy: the search doubles or halves until two rates are on different sides of the target, then halves the distance of
their logarithms, and measures a rate again whose interval holds the target.
"""

import math
from dataclasses import dataclass
from typing import Literal

from diptych.control.errors import ConfigError
from diptych.report.statistics import Interval, wilson

RateVerdict = Literal["above", "below", "unclear"]
MOST = 1e6  # requests per second
HALVINGS = 6  # below the first rate: then the answer is that there is no such rate


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """attainment: share of requests that must meet their objectives; from 50 on in percent. tolerance: the
    search ends when the rates on both sides are closer than this share. repeats: how often a rate is measured at most.
    max_probes: in all."""

    attainment: float = 0.9
    tolerance: float = 0.05
    repeats: int = 3
    max_probes: int = 24
    confidence: float = 0.9

    def __post_init__(self) -> None:
        if not (0 < self.attainment < 1 or 50 <= self.attainment < 100):
            message = f"attainment is {self.attainment}; it must be in (0, 1), or in [50, 100) percent"
            raise ConfigError(message, param="attainment")
        if self.attainment > 1:
            object.__setattr__(self, "attainment", self.attainment / 100)
        if not 0.001 <= self.tolerance <= 1:
            raise ConfigError(f"tolerance is {self.tolerance}; it must be in [0.001, 1]", param="tolerance")
        if self.repeats < 1 or self.max_probes < 2:
            raise ConfigError("repeats must be at least 1, max_probes at least 2", param="max_probes")


@dataclass(frozen=True, slots=True, kw_only=True)
class RateResult:
    """What is known of a rate, from all its runs together."""

    rate: float
    met: int
    judged: int
    runs: int

    @property
    def share(self) -> float:
        """Attainment."""
        return self.met / self.judged if self.judged else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputResult:
    """rate: the highest measured rate at which enough requests met their objectives; None: there is none.

    estimate: where the line between it and the next rate that failed crosses the target, on the logarithm of the rate.
    low, high: rates below ``low`` surely suffice, rates above ``high`` surely do not, at the search's confidence; None:
    no measured rate was that clear. is_bracketed: whether a rate that fails was seen.
    """

    rate: float | None
    estimate: float | None
    low: float | None
    high: float | None
    is_bracketed: bool
    num_probes: int


class GoodputSearch:
    """Measure ``next_rate`` and ``add`` the result, until it is None."""

    def __init__(self, config: SearchConfig, start_rate: float) -> None:
        self._config = config
        self._start = start_rate
        self._known: dict[float, RateResult] = {}
        self._num_probes = 0

    def next_rate(self) -> float | None:
        """The rate to measure now; None when the search is over."""
        config = self._config
        if self._num_probes >= config.max_probes:
            return None
        if not self._known:
            return self._start
        for known in self._near_edge():
            if self.verdict(known) == "unclear" and known.runs < config.repeats:
                return known.rate
        passed, failed = self._best(), self._worst()
        if passed is None:
            lowest = min(self._known)
            return lowest / 2 if lowest > self._start / 2**HALVINGS else None
        if failed is None:
            highest = max(self._known)
            return highest * 2 if highest * 2 <= MOST else None
        if failed.rate / passed.rate <= 1 + config.tolerance:
            return None
        return math.sqrt(passed.rate * failed.rate)

    def add(self, rate: float, met: int, judged: int) -> RateResult:
        """A run at a rate. Returns what is known of the rate now, from all its runs."""
        before = self._known.get(rate, RateResult(rate=rate, met=0, judged=0, runs=0))
        now = RateResult(rate=rate, met=before.met + met, judged=before.judged + judged, runs=before.runs + 1)
        self._known[rate] = now
        self._num_probes += 1
        return now

    def interval(self, known: RateResult) -> Interval:
        """Confidence interval of the attainment at a rate."""
        return wilson(known.met, known.judged, self._config.confidence)

    def verdict(self, known: RateResult) -> RateVerdict:
        """Whether the attainment is surely at least the target, surely below it, or neither."""
        interval = self.interval(known)
        if interval.low >= self._config.attainment:
            return "above"
        return "below" if interval.high < self._config.attainment else "unclear"

    def is_hopeless(self, missed: int, total: int) -> bool:
        """Whether a run of ``total`` requests can be cut short: with ``missed`` of them late the verdict can only be
        "below"."""
        best = wilson(max(0, total - missed), total, self._config.confidence)
        return total > 0 and best.high < self._config.attainment

    @property
    def found(self) -> GoodputResult:
        """The result of the runs so far."""
        passed, failed = self._best(), self._worst()
        sure = [known.rate for known in self._known.values() if self.verdict(known) == "above"]
        hopeless = [known.rate for known in self._known.values() if self.verdict(known) == "below"]
        low = max((rate for rate in sure if failed is None or rate < failed.rate), default=None)
        high = min((rate for rate in hopeless if passed is None or rate > passed.rate), default=None)
        return GoodputResult(
            rate=None if passed is None else passed.rate,
            estimate=self._crossing(passed, failed),
            low=low,
            high=high,
            is_bracketed=passed is not None and failed is not None,
            num_probes=self._num_probes,
        )

    def _passes(self, known: RateResult) -> bool:
        return known.share >= self._config.attainment

    def _worst(self) -> RateResult | None:
        """The lowest rate that failed with nothing but failures above it, or None."""
        edge = None
        for rate in sorted(self._known, reverse=True):
            if self._passes(self._known[rate]):
                break
            edge = self._known[rate]
        return edge

    def _best(self) -> RateResult | None:
        """The highest rate that passed."""
        passed = (known for known in self._known.values() if self._passes(known))
        return max(passed, key=lambda known: known.rate, default=None)

    def _near_edge(self) -> list[RateResult]:
        """The two rates between which the answer lies."""
        return [known for known in (self._best(), self._worst()) if known is not None]

    def _crossing(self, passed: RateResult | None, failed: RateResult | None) -> float | None:
        if passed is None or failed is None or passed.share <= failed.share:
            return None if passed is None else passed.rate
        part = (passed.share - self._config.attainment) / (passed.share - failed.share)
        return math.exp(math.log(passed.rate) + part * (math.log(failed.rate) - math.log(passed.rate)))
