"""What the traffic of a server is like: the answers that a designer needs before choosing a fleet.

Reads requests as a workload has them (a trace, a recording, or what was observed), or what an engine exports of them.
Shares are 0 to 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import fmean, pstdev

from diptych.control.slo import NS_PER_S
from diptych.workload.spec import RequestSpec

SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens: the mean, and the quantiles at SHARES."""

    mean: float
    quantiles: tuple[int, ...]

    @classmethod
    def of(cls, values: Sequence[int]) -> "Lengths":
        """values: at least one."""
        ordered = sorted(values)
        return cls(fmean(ordered), tuple(ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in SHARES))

    def words(self) -> str:
        """Lengths in words, such as "mean 800, p50 500, p90 1,900, p99 4,000"."""
        parts = [f"p{share * 100:g} {value:,}" for share, value in zip(SHARES, self.quantiles, strict=True)]
        return ", ".join((f"mean {self.mean:,.0f}", *parts))


@dataclass(frozen=True, slots=True)
class Traffic:
    """prompts, outputs: their lengths. variation: of the times between arrivals, as standard deviation over mean (1:
    Poisson). reusable: share of the prompt tokens that an earlier prompt began with (None: the traffic does not say).
    turns: share of the requests that continue a conversation (None: it does not say). long_share: share of the prompt
    tokens in the longest tenth of the prompts. found_share: of the prompt tokens, what the server's cache held (None:
    there was no server)."""

    num_requests: int
    rate: float
    variation: float
    prompts: Lengths
    outputs: Lengths
    reusable: float | None
    turns: float | None
    long_share: float
    found_share: float | None = None

    @property
    def ratio(self) -> float:
        """Prompt tokens for each answer token."""
        return self.prompts.mean / self.outputs.mean

    def sentences(self) -> list[str]:
        """What it is like, in words."""
        said = [
            f"{self.num_requests:,} requests, {self.rate:.3g} a second; times between arrivals vary by "
            f"{self.variation:.2g} times their mean (1: random)",
            f"prompts: {self.prompts.words()} tokens; the longest tenth holds {self.long_share:.0%} of the tokens",
            f"answers: {self.outputs.words()} tokens",
            _kind(self.ratio),
        ]
        if self.turns is not None:
            said.append(f"{self.turns:.0%} of the requests continue a conversation")
        if self.reusable is not None:
            said.append(f"{self.reusable:.0%} of the prompt tokens repeat the beginning of an earlier prompt")
        if self.found_share is not None:
            said.append(_found(self.found_share))
        return said


@dataclass(frozen=True, slots=True)
class ExportedTraffic:
    """What an engine exports of its requests, none of which was seen: means, and quantiles from its histograms. None:
    not exported."""

    num_requests: int
    rate: float | None
    prompt_mean: float | None
    prompt_p50: float | None
    prompt_p95: float | None
    output_mean: float | None
    found_share: float | None
    is_estimated: bool = True

    @classmethod
    def of(cls, signals: Mapping[str, float]) -> "ExportedTraffic":
        """signals: of an observation."""
        known = signals.get
        return cls(
            round(known("requests", 0.0)), known("rate"), known("prompt_mean"), known("prompt_p50"),
            known("prompt_p95"), known("output_mean"), known("hit_share"),
        )  # fmt: skip

    def sentences(self) -> list[str]:
        """What it is like, in words."""
        rate = "" if self.rate is None else f", {self.rate:.3g} a second"
        said = [f"{self.num_requests:,} requests{rate}; estimated from what the engine exports, no request was seen"]
        prompts = (("mean", self.prompt_mean), ("p50 about", self.prompt_p50), ("p95 about", self.prompt_p95))
        if words := [f"{name} {value:,.0f}" for name, value in prompts if value is not None]:
            said.append(f"prompts: {', '.join(words)} tokens")
        if self.output_mean is not None:
            said.append(f"answers: mean {self.output_mean:,.0f} tokens")
        if self.prompt_mean and self.output_mean:
            said.append(_kind(self.prompt_mean / self.output_mean))
        if self.found_share is not None:
            said.append(_found(self.found_share))
        return said


def _kind(ratio: float) -> str:
    kind = "long prompts with short answers" if ratio >= 8 else "short prompts with long answers"
    if 1 < ratio < 8:
        kind = "prompts and answers of comparable length"
    return f"{kind}: {ratio:.3g} prompt tokens for each answer token"


def _found(share: float) -> str:
    return f"{share:.0%} of the prompt tokens were found in the prefix cache"


def traffic_of(requests: Sequence[RequestSpec], *, found_share: float | None = None) -> Traffic:
    """The figures of at least one request, in order of arrival. found_share: see Traffic."""
    prompts = [spec.prompt_tokens for spec in requests]
    gaps = [later.arrival_ns - early.arrival_ns for early, later in pairwise(requests)]
    span_s = (requests[-1].arrival_ns - requests[0].arrival_ns) / NS_PER_S
    mean_gap = fmean(gaps) if gaps else 0.0
    longest = sorted(prompts)[-max(1, len(prompts) // 10) :]
    has_hashes = any(spec.hash_ids for spec in requests)
    sessions = [spec.session for spec in requests if spec.session >= 0]
    return Traffic(
        len(requests),
        (len(requests) - 1) / span_s if span_s > 0 else 0.0,
        pstdev(gaps) / mean_gap if mean_gap else 0.0,
        Lengths.of(prompts),
        Lengths.of([spec.output_tokens for spec in requests]),
        _reusable(requests) if has_hashes else None,
        1 - len(set(sessions)) / len(sessions) if sessions else None,
        sum(longest) / sum(prompts),
        found_share,
    )


def _reusable(requests: Sequence[RequestSpec]) -> float:
    """The share of prompt tokens that lie in leading blocks of an earlier request (each id stands for its prefix)."""
    seen: set[int] = set()
    repeated = total = 0
    for spec in requests:
        leading = 0
        for block in spec.hash_ids:
            if block not in seen:
                break
            leading += spec.hash_block_tokens
        seen.update(spec.hash_ids)
        repeated += min(leading, spec.prompt_tokens)
        total += spec.prompt_tokens
    return repeated / total if total else 0.0


def burstiness(variation: float) -> str:
    """The coefficient of variation in words."""
    return "even" if variation < 0.7 else "random" if variation < sqrt(2) else "bursty"
