"""TTFT and ITL by account: seconds, intervals, the tail, and what of the measured mean is left over.

Exact where every request is split: then the parts sum to the mean and the residual is 0. The intervals are those of the
mean over requests (normal, 95 %).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from diptych.control.slo import NS_PER_S
from diptych.diagnosis.accounts import ITL, TTFT
from diptych.diagnosis.observation import Estimate, Observation
from diptych.diagnosis.request_parts import RequestParts

Z = 1.96  # standard deviations of a 95 % interval
TAIL = 0.95  # the slowest requests: beyond this share

LatencyName = Literal["ttft", "itl"]


@dataclass(frozen=True, slots=True)
class AccountPart:
    """One account. seconds: mean per request (TTFT) or per token (ITL), with its interval. tail_s: mean of the slowest
    5 % of the requests (None: not known)."""

    account: str
    seconds: float
    low_s: float
    high_s: float
    tail_s: float | None = None


@dataclass(frozen=True, slots=True)
class Waterfall:
    """One latency. measured_s: its mean, as measured. residual_s: measured, less the parts. tail_s: mean of the slowest
    5 %."""

    latency: LatencyName
    measured_s: float
    parts: tuple[AccountPart, ...]
    count: int
    is_exact: bool
    tail_s: float | None = None

    @property
    def residual_s(self) -> float:
        """What no account holds."""
        return self.measured_s - sum(part.seconds for part in self.parts)


def waterfalls(observation: Observation) -> tuple[Waterfall, ...]:
    """TTFT and ITL, as far as there is anything to divide."""
    if observation.is_exact:
        found = [_exact("ttft", observation.requests), _exact("itl", observation.requests)]
    else:
        found = [_estimated("ttft", observation.ttft), _estimated("itl", observation.itl)]
    return tuple(waterfall for waterfall in found if waterfall is not None)


def _exact(latency: LatencyName, requests: Sequence[RequestParts]) -> Waterfall | None:
    """TTFT per request; ITL per token, as the ratio of two sums."""
    if latency == "itl":
        requests = [parts for parts in requests if parts.num_output_tokens > 1]
    if not requests:
        return None
    rows = [(parts.ttft if latency == "ttft" else parts.decode) for parts in requests]
    weights = [1 if latency == "ttft" else parts.num_output_tokens - 1 for parts in requests]
    totals = [row.total() for row in rows]
    slowest = _slowest([total / weight for total, weight in zip(totals, weights, strict=True)])
    parts = []
    for account in TTFT if latency == "ttft" else ITL:
        values = [row[account] for row in rows]
        if not any(values):
            continue
        mean = sum(values) / sum(weights)
        half = _half(values, weights, mean)
        tail = sum(values[at] for at in slowest) / sum(weights[at] for at in slowest)
        low, high = (mean - half) / NS_PER_S, (mean + half) / NS_PER_S
        parts.append(AccountPart(account, mean / NS_PER_S, low, high, tail / NS_PER_S))
    tail = sum(totals[at] for at in slowest) / sum(weights[at] for at in slowest)
    return Waterfall(latency, sum(totals) / sum(weights) / NS_PER_S, tuple(parts), len(rows), True, tail / NS_PER_S)


def _slowest(values: Sequence[float]) -> list[int]:
    """The rows of the slowest 5 %, at least one."""
    order = sorted(range(len(values)), key=lambda at: -values[at])
    return order[: max(1, round(len(values) * (1 - TAIL)))]


def _half(values: Sequence[int], weights: Sequence[int], mean: float) -> float:
    """Half of the interval of a ratio of two means (linearised)."""
    count = len(values)
    if count < 2:
        return mean
    residuals = sum((value - mean * weight) ** 2 for value, weight in zip(values, weights, strict=True))
    return Z * sqrt(residuals / (count - 1) / count) * count / sum(weights)


def _estimated(latency: LatencyName, estimate: Estimate | None) -> Waterfall | None:
    if estimate is None or not estimate.count:
        return None
    share = estimate.half_s / estimate.measured_s if estimate.measured_s else 0.0
    parts = tuple(
        AccountPart(account, value, value * (1 - share), value * (1 + share))
        for account, value in estimate.parts_s.items()
    )
    return Waterfall(latency, estimate.measured_s, parts, estimate.count, False)


def as_json(waterfall: Waterfall) -> Mapping[str, object]:
    """The waterfall for ``--json``, in seconds."""
    return {
        "mean_s": waterfall.measured_s,
        "tail_s": waterfall.tail_s,
        "residual_s": waterfall.residual_s,
        "count": waterfall.count,
        "exact": waterfall.is_exact,
        "parts": [
            {
                "account": part.account,
                "seconds": part.seconds,
                "interval": [part.low_s, part.high_s],
                "tail_seconds": part.tail_s,
            }
            for part in waterfall.parts
        ],
    }
