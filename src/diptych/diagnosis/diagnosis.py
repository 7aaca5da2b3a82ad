"""The diagnosis of an observation: causes in order of what they cost, or why none is named.

A cause is named when requests miss their objectives and it took a share of what they missed them by, or, without
objectives, when it took a large share of a latency; never when its interval reaches zero. Pure: an observation gives
the same diagnosis each time.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Literal

from diptych.control.slo import NS_PER_S, Slo
from diptych.diagnosis.attribution import Waterfall, Z, waterfalls
from diptych.diagnosis.causes import UNAVOIDABLE, Evidence, evidence_of, lost_to, lost_to_of_means
from diptych.diagnosis.diagnosis_table import BY_CAUSE, CauseRow
from diptych.diagnosis.observation import Missing, Observation
from diptych.diagnosis.request_parts import RequestParts

DiagnosisVerdict = Literal["healthy", "limited", "no objective", "too few requests"]
FEWEST = 8  # requests below which nothing is said
MISSES = 0.05  # share of missed objectives from which a server is not healthy
NAMED_SHARE = 0.1  # of the misses (or of a latency): below, a cause is not named
WITHOUT_OBJECTIVE = 0.25  # of a latency: below, a cause is not named without an objective
AVOIDABLE = 0.25  # share of the misses from which avoidable causes come before the model's own time
UNREAD = 0.1  # share of answers that were not read in time

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Cause:
    """A row of the diagnosis table that applies. seconds: lost per request. share_of_misses: of the missed objectives
    (None: there is no objective). excess_s: seconds per missed request. signals: evidence with its values."""

    row: CauseRow
    seconds: float
    seconds_interval: Interval
    share_of_misses: float | None
    share_interval: Interval | None
    ttft_s: float
    decode_s: float
    signals: Mapping[str, float]

    @property
    def name(self) -> str:
        """The cause's name in the table."""
        return self.row.cause


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What limits a server. miss_share: of the requests that have an objective (None: none has). unavoidable_s: what a
    request takes alone."""

    observation: Observation
    verdict: DiagnosisVerdict
    slo: Slo
    waterfalls: tuple[Waterfall, ...]
    causes: tuple[Cause, ...]
    miss_share: float | None
    num_requests: int
    unavoidable_s: float
    missing: tuple[Missing, ...]

    @property
    def sentence(self) -> str:
        """What limits this server now, in one sentence."""
        if self.verdict == "too few requests":
            return f"Only {self.num_requests} requests ended in the window; at least {FEWEST} are needed."
        if self.verdict == "healthy":
            return "Nothing limits this server now: its requests meet their objectives."
        if self.observation.num_unserved and self.verdict == "limited":
            number = self.observation.num_unserved
            total = self.num_requests + number
            return f"{number} of {total} requests got no answer (refused, failed or given up). {self._first_cause}"
        return self._first_cause

    @property
    def _first_cause(self) -> str:
        if not self.causes:
            if self.verdict == "no objective":
                return "No part of the latencies stands out; give an objective (--slo) to judge them."
            if not self.miss_share or self.miss_share <= MISSES:
                return "Those that were served met their objectives; the server's log says why the others were not."
            return "Objectives are missed, and no cause stands out of the noise."
        first = self.causes[0]
        head = f"{_capital(first.row.symptom)}: {first.name.replace('_', ' ')}"
        cost = f"{_duration(first.seconds)} per request"
        if first.share_of_misses is None:
            return f"{head} costs {cost}; give an objective (--slo) to know whether it matters."
        return f"{head} costs {cost} and {first.share_of_misses:.0%} of the missed objectives."


def diagnose(observation: Observation, slo: Slo | None = None) -> Diagnosis:
    """slo: objectives for all requests (None: their own, or the server's)."""
    if slo is not None:
        observation = observation.with_objectives(slo)
    evidence = evidence_of(observation)
    found = _of_requests(observation, evidence) if observation.is_exact else _of_means(observation, evidence)
    causes = _named(observation, found)
    verdict = _verdict(found, causes, observation.num_unserved)
    shown = causes if verdict in ("limited", "no objective") else ()
    return Diagnosis(
        observation,
        verdict,
        observation.slo,
        waterfalls(observation),
        shown,
        found.miss_share,
        found.num_requests,
        found.seconds.get(UNAVOIDABLE, (0.0, 0.0))[0],
        _missing(observation, shown),
    )


@dataclass(slots=True)
class _Found:
    """Sums over the requests. seconds, ttft, decode: cause -> (mean, half of its interval); shares: of the misses."""

    num_requests: int
    miss_share: float | None
    num_misses: int
    seconds: dict[str, Interval]
    ttft_s: dict[str, float]
    decode_s: dict[str, float]
    shares: dict[str, Interval]
    latency_s: tuple[float, float]


def _of_requests(observation: Observation, evidence: Evidence) -> _Found:
    requests = observation.requests
    lost = [lost_to(parts, evidence) for parts in requests]
    names = {cause for before, after in lost for cause in (*before, *after)}
    seconds = {
        cause: _mean_and_half([(before[cause] + after[cause]) / NS_PER_S for before, after in lost]) for cause in names
    }
    count = max(1, len(requests))
    ttft = {cause: sum(before[cause] for before, _ in lost) / NS_PER_S / count for cause in names}
    decode = {cause: sum(after[cause] for _, after in lost) / NS_PER_S / count for cause in names}
    judged = [parts for parts in requests if parts.slo.ttft_ns or parts.slo.tpot_ns]
    missed = [
        blamed
        for parts, (before, after) in zip(requests, lost, strict=True)
        if (blamed := _blame(parts, before, after))
    ]
    totals: defaultdict[str, float] = defaultdict(float)
    for blamed in missed:
        _add(totals, blamed)
    shares = {cause: _share_and_half(value / len(missed), len(missed)) for cause, value in totals.items()}
    latency = (
        sum(parts.ttft_ns for parts in requests) / NS_PER_S / count,
        sum(parts.decode_ns for parts in requests) / NS_PER_S / count,
    )
    miss_share = len(missed) / len(judged) if judged else None
    return _Found(len(requests), miss_share, len(missed), seconds, ttft, decode, shares, latency)


def _blame(parts: RequestParts, before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """The causes of a missed objective, with shares that sum to 1; empty when nothing was missed. What the avoidable
    causes cannot explain is the model's own time."""
    blamed: defaultdict[str, float] = defaultdict(float)
    tpot_ns = parts.tpot_ns
    if parts.slo.ttft_ns and parts.ttft_ns > parts.slo.ttft_ns:
        _add(blamed, _blame_one(before, parts.ttft_ns - parts.slo.ttft_ns))
    if parts.slo.tpot_ns and tpot_ns is not None and tpot_ns > parts.slo.tpot_ns:
        allowed = parts.slo.tpot_ns * (parts.num_output_tokens - 1)
        _add(blamed, _blame_one(after, parts.decode_ns - allowed))
    total = sum(blamed.values())
    return {cause: value / total for cause, value in blamed.items()} if total else {}


def _add(totals: defaultdict[str, float], more: Mapping[str, float]) -> None:
    for cause, value in more.items():
        totals[cause] += value


def _blame_one(lost: Mapping[str, float], excess: float) -> dict[str, float]:
    avoidable = {cause: value for cause, value in lost.items() if cause != UNAVOIDABLE and value > 0}
    total = sum(avoidable.values())
    explained = min(1.0, total / excess) if excess > 0 else 1.0
    blamed = {cause: explained * value / total for cause, value in avoidable.items()} if total else {}
    if explained < 1:
        blamed["slow_model"] = 1 - explained
    return blamed


def _of_means(observation: Observation, evidence: Evidence) -> _Found:
    """Findings on an engine that exports sums: one mean request; misses from the histograms."""
    before, after = lost_to_of_means(observation, evidence)
    count = int(observation.signals.get("requests", 0.0))
    ttft = observation.ttft
    share = ttft.half_s / ttft.measured_s if ttft is not None and ttft.measured_s and count > 1 else 1.0
    seconds = {
        cause: (before[cause] + after[cause], (before[cause] + after[cause]) * share) for cause in {*before, *after}
    }
    misses = _misses_by_latency(observation)
    totals: defaultdict[str, float] = defaultdict(float)
    for latency, lost in (("ttft", before), ("tpot", after)):
        if misses.get(latency):
            _add(totals, _blame_means(observation, latency, lost, misses[latency]))
    total = sum(totals.values())
    miss_share = max(misses.values()) if misses else None
    num_misses = round((miss_share or 0.0) * count)
    shares = {cause: _share_and_half(value / total, max(1, num_misses)) for cause, value in totals.items()}
    latency_s = (sum(before.values()), sum(after.values()))
    return _Found(count, miss_share, num_misses, seconds, dict(before), dict(after), shares, latency_s)


def _misses_by_latency(observation: Observation) -> dict[str, float]:
    """Latency -> share of the requests that missed its objective. Of an engine without buckets: all or none of them,
    as the mean does."""
    limits = (("ttft", observation.slo.ttft_ns, observation.ttft), ("tpot", observation.slo.tpot_ns, observation.itl))
    misses = {}
    for latency, limit_ns, estimate in limits:
        spread = observation.distributions.get(latency)
        if limit_ns and spread is not None:
            misses[latency] = spread.share_above(limit_ns / NS_PER_S)
        elif limit_ns and estimate is not None:
            misses[latency] = float(estimate.measured_s > limit_ns / NS_PER_S)
    return misses


def _blame_means(
    observation: Observation, latency: str, lost: Mapping[str, float], miss_share: float
) -> Mapping[str, float]:
    """Shares of one latency's misses, weighted by how many there were. What the slowest requests lost beyond the
    objective is taken to come from the same causes as the mean."""
    limit_ns = observation.slo.ttft_ns if latency == "ttft" else observation.slo.tpot_ns
    assert limit_ns
    tokens = 1.0 if latency == "ttft" else max(1.0, observation.signals.get("output_mean", 2.0) - 1)
    mean = sum(lost.values())
    spread = observation.distributions.get(latency)
    slow = mean if spread is None else spread.quantile(1 - miss_share / 2) * tokens
    stretched = {
        cause: value if cause == UNAVOIDABLE else value * max(1.0, slow / mean if mean else 1.0)
        for cause, value in lost.items()
    }
    excess = slow - limit_ns / NS_PER_S * tokens
    return {cause: value * miss_share for cause, value in _blame_one(stretched, excess).items()}


def _named(observation: Observation, found: _Found) -> tuple[Cause, ...]:
    """Causes above the noise, in order of what they cost."""
    latency = sum(found.latency_s)
    causes = []
    for name, (seconds, half) in found.seconds.items():
        share, share_half = found.shares.get(name, (0.0, 0.0))
        if name == UNAVOIDABLE or (seconds - half <= 0 and share - share_half <= 0):
            continue
        if found.miss_share is None:
            phase_share = max(
                part[name] / whole if whole > 0 else 0.0
                for part, whole in zip((found.ttft_s, found.decode_s), found.latency_s, strict=True)
            )
            if phase_share < WITHOUT_OBJECTIVE or seconds < 0.02 * latency:
                continue
        elif share < NAMED_SHARE:
            continue
        causes.append(_cause(observation, found, name, (seconds, half), (share, share_half)))
    if "slow_model" in found.shares and found.shares["slow_model"][0] >= NAMED_SHARE:
        causes.append(_cause(observation, found, "slow_model", found.seconds.get(UNAVOIDABLE, (0.0, 0.0)),
                             found.shares["slow_model"]))  # fmt: skip
    if observation.signals.get("unread_share", 0.0) >= UNREAD:
        seconds = fmean(parts.unread_ns / NS_PER_S for parts in observation.requests) if observation.requests else 0.0
        causes.append(_cause(observation, found, "slow_client", (seconds, 0.0), (0.0, 0.0)))
    is_avoidable = any((cause.share_of_misses or 0.0) >= AVOIDABLE for cause in causes if cause.name != "slow_model")

    def place(cause: Cause) -> tuple[bool, float, float, str]:
        is_last = is_avoidable and cause.name == "slow_model"
        return is_last, -(cause.share_of_misses or 0.0), -cause.seconds, cause.name

    return tuple(sorted(causes, key=place))


def _cause(observation: Observation, found: _Found, name: str, seconds: Interval, share: Interval) -> Cause:
    row = BY_CAUSE[name]
    known = {signal: observation.signals[signal] for signal in row.signals if signal in observation.signals}
    has_objective = found.miss_share is not None
    return Cause(
        row,
        seconds[0],
        (max(0.0, seconds[0] - seconds[1]), seconds[0] + seconds[1]),
        share[0] if has_objective else None,
        (max(0.0, share[0] - share[1]), min(1.0, share[0] + share[1])) if has_objective else None,
        found.ttft_s.get(name, 0.0),
        found.decode_s.get(name, 0.0),
        known,
    )


def _verdict(found: _Found, causes: Sequence[Cause], num_unserved: int) -> DiagnosisVerdict:
    total = found.num_requests + num_unserved
    if total >= FEWEST and num_unserved >= 2 and num_unserved > MISSES * total:
        return "limited"
    if found.num_requests < FEWEST:
        return "too few requests"
    if any(cause.name == "slow_client" for cause in causes):
        return "limited"
    if found.miss_share is None:
        return "no objective"
    is_limited = found.miss_share > MISSES and found.num_misses >= 2
    return "limited" if is_limited else "healthy"


def _missing(observation: Observation, causes: Iterable[Cause]) -> tuple[Missing, ...]:
    """What would decide between causes of this diagnosis, and was not seen."""
    needed: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for cause in causes:
        for signal in cause.row.needs:
            if observation.signal(signal) is None:
                needed[cause.name,].append(signal)
    own = tuple(Missing((*choices, "other causes"), " and ".join(names)) for choices, names in needed.items())
    return observation.missing + own


def _mean_and_half(values: Sequence[float]) -> Interval:
    """The mean and half of its 95 % interval."""
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    return fmean(values), Z * stdev(values) / sqrt(len(values))


def _share_and_half(share: float, count: int) -> Interval:
    """A share of ``count`` and half of its 95 % interval (Agresti and Coull)."""
    adjusted = (share * count + Z**2 / 2) / (count + Z**2)
    return share, Z * sqrt(adjusted * (1 - adjusted) / (count + Z**2))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"
