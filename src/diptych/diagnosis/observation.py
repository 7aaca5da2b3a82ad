"""What was seen of a server in a window of time, in the same form for every engine.

An adapter makes one of what an engine exports. Signals are named numbers; one that an engine does not export is absent,
and what cannot be decided without it is listed in ``missing``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import exp, factorial
from typing import Final

from diptych.control.fleet_settings import FleetSettings
from diptych.control.slo import Slo
from diptych.control.step import StepFeatures
from diptych.diagnosis.request_parts import RequestParts
from diptych.workload.spec import RequestSpec

MOST_INSIDE: Final = 0.95  # see Distribution: values are never taken to lie all on a bound
ERLANG: Final = 4  # Erlang's distribution of this shape: its standard deviation is half of its mean

# The signals, with their units. Shares are 0 to 1.
SIGNALS: Final[Mapping[str, str]] = {
    "requests": "completed requests in the window",
    "rate": "arrivals per second",
    "rejected": "requests refused in the window",
    "failed": "requests that failed, or whose clients left before the first token",
    "running": "requests in the batch, mean",
    "running_max": "requests in the batch, most",
    "waiting": "requests that wait, mean",
    "max_num_seqs": "places of the batch",
    "kv_usage": "share of the KV cache in use, mean",
    "kv_usage_max": "share of the KV cache in use, most",
    "preemptions": "preemptions per completed request",
    "hit_share": "share of the prompt tokens found in the prefix cache",
    "hit_share_early": "the same, of the first half of the requests",
    "hit_share_late": "the same, of the second half of the requests",
    "reread_share": "share of the computed prompt tokens that had been computed before",
    "reread_evicted": "share of those that were evicted",
    "worker_age_s": "seconds since the youngest worker began to serve",
    "prompt_mean": "prompt tokens, mean",
    "prompt_p50": "prompt tokens, median",
    "prompt_p95": "prompt tokens, 95th percentile",
    "output_mean": "answer tokens, mean",
    "batch_share": "share of the computed prompt tokens that belong to service class batch",
    "long_share": "share of the computed prompt tokens that belong to long prompts",
    "burst": "largest number of arrivals in a tenth of the time in which they came, over the mean",
    "arrived_share": "arrivals in the window over first tokens in it; below 1 a backlog shrinks",
    "busy": "share of the time in steps, mean of the workers",
    "busy_prefill": "share of the time in steps, of workers that only prefill",
    "busy_decode": "share of the time in steps, of workers that only decode",
    "slow_share": "share of the time in steps beyond what the step-time model says",
    "cpu_wait": "share of the time in which a worker's thread was ready and had no core",
    "transfer_s": "seconds from the first KV byte of a handoff to its commit, mean",
    "transfer_bytes": "KV bytes per handoff",
    "unread_share": "share of the answers whose client did not read in time",
    "stall_s": "gaps between tokens beyond a usual step, seconds per request",
    "step_tokens_p95": "tokens per step, 95th percentile",
    "chunks_per_prompt": "steps that computed a part of a prompt, mean over prompt tokens",
}


@dataclass(frozen=True, slots=True)
class Missing:
    """A measurement that is missing: to decide between ``choices``, ``needed`` is needed."""

    choices: tuple[str, ...]
    needed: str

    def sentence(self) -> str:
        """What is missing, in words."""
        return f"to decide between {' and '.join(self.choices)}, {self.needed} is needed"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A latency of an engine that exports sums and counts only. parts_s: seconds by account, per request (TTFT) or per
    token (ITL). measured_s: their sum as measured. half_s: half of the 95 % interval of the mean. misses: share of the
    values above the objective (see ``Observation.distributions``)."""

    measured_s: float
    parts_s: Mapping[str, float]
    half_s: float = 0.0
    count: int = 0


@dataclass(frozen=True, slots=True)
class Distribution:
    """Values by upper bound: (bound, how many were at most that), cumulative, the last bound infinite. Seconds.

    inside: where the values of a bucket lie on average, from 0 (its lower bound) to 1; the same for all buckets, chosen
    so that their sum is the one that was exported. At ``u`` of a bucket's width lie ``u ** (inside / (1 - inside))`` of
    its values, which is linear for one half. Not so in a bucket that begins at 0 and is mostly empty, such as the first
    10 ms of tokens that take 2: no latency is near 0, and few are several times the mean, so the values there are taken
    to have the distribution that ERLANG names, about that mean."""

    buckets: tuple[tuple[float, float], ...] = ()
    inside: float = 0.5

    @classmethod
    def with_sum(cls, buckets: tuple[tuple[float, float], ...], total: float) -> "Distribution":
        """The distribution of values that sum to ``total``. If some lie beyond the last finite bound it says nothing of
        the others."""
        even = cls(buckets)
        lows = widths = 0.0
        for low, width, count in even._buckets():
            lows, widths = lows + low * count, widths + width * count
            if width == 0:
                return even
        inside = (total - lows) / widths if widths else 0.5
        return cls(buckets, min(MOST_INSIDE, max(1 - MOST_INSIDE, inside)))

    @property
    def count(self) -> float:
        """How many values."""
        return self.buckets[-1][1] if self.buckets else 0.0

    def means(self) -> Iterator[tuple[float, float]]:
        """(mean, how many) of the values of each bucket that has some; its lower bound for the infinite one."""
        return ((low + self.inside * width, count) for low, width, count in self._buckets())

    def share_above(self, limit: float) -> float:
        """Share of the values above a limit. 0 without values."""
        if not self.count:
            return 0.0
        above = 0.0
        for low, width, count in self._buckets():
            if low >= limit:
                above += count
            elif width and low + width > limit:
                above += count * self._beyond(low, (limit - low) / width)
        return above / self.count

    def quantile(self, share: float) -> float:
        """The value below which this share lies; the last finite bound where it lies above. 0 without values."""
        wanted, below, last = share * self.count, 0.0, 0.0
        for low, width, count in self._buckets():
            if below + count >= wanted:
                return low + width * self._place(low, max(0.0, wanted - below) / count)
            below, last = below + count, low + width
        return last

    def _beyond(self, low: float, place: float) -> float:
        """Share of a bucket's values above a place in it, from 0 to 1. low: the bucket's lower bound."""
        if low == 0 and self.inside < 0.5:
            end = _erlang_beyond(1 / self.inside)
            return (_erlang_beyond(place / self.inside) - end) / (1 - end)
        return float(1 - place ** (self.inside / (1 - self.inside)))

    def _place(self, low: float, share: float) -> float:
        """The place in a bucket below which this share of its values lies."""
        least, most = 0.0, 1.0
        while most - least > 1e-9:
            middle = (least + most) / 2
            least, most = (middle, most) if 1 - self._beyond(low, middle) < share else (least, middle)
        return most

    def _buckets(self) -> Iterator[tuple[float, float, float]]:
        """(lower bound, width, how many values) of each bucket that has some; width 0: the infinite one."""
        low = below = 0.0
        for bound, upto in self.buckets:
            if upto > below:
                yield low, (bound - low if bound != float("inf") else 0.0), upto - below
            low, below = (low if bound == float("inf") else bound), upto


def _erlang_beyond(ratio: float) -> float:
    """Share of the values above ``ratio`` times their mean (Erlang's distribution, of shape ERLANG)."""
    at = ERLANG * ratio
    return exp(-at) * sum(at**number / factorial(number) for number in range(ERLANG))


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that came, whatever became of it. spec: its time is the server's clock; output_tokens of one that has
    not ended are expected (see observed_arrivals.py); slo: what the server was told of it. judged: its objectives now.
    is_early: it ended before the window, and counts only as work of the server."""

    request_id: str
    spec: RequestSpec
    judged: Slo
    is_early: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A server in a window. engine: diptych, vllm, sglang, llamacpp, dynamo. source: where it was read. is_exact: every
    request that ended is split (``requests``); else ttft and itl are estimates. arrivals, steps: of an exact one all
    requests that came, in order, and all steps with their nanoseconds. slo: the server's own objectives. unknown: names
    of exported values that the adapter does not know."""

    engine: str
    source: str
    window_s: float
    version: str = ""
    is_exact: bool = False
    requests: tuple[RequestParts, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    steps: tuple[tuple[StepFeatures, int], ...] = ()
    ttft: Estimate | None = None
    itl: Estimate | None = None
    distributions: Mapping[str, Distribution] = field(default_factory=dict)
    signals: Mapping[str, float] = field(default_factory=dict)
    slo: Slo = field(default_factory=Slo)
    fleet: FleetSettings | None = None
    missing: tuple[Missing, ...] = ()
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_unserved(self) -> int:
        """Requests in the window that got no answer."""
        return round(self.signals.get("failed", 0.0) + self.signals.get("rejected", 0.0))

    def signal(self, name: str) -> float | None:
        """One of SIGNALS; None: not known."""
        assert name in SIGNALS, name
        return self.signals.get(name)

    def with_objectives(self, slo: Slo) -> "Observation":
        """The same, with these objectives instead of those that the server and its requests have. Requests of class
        batch keep theirs, if any: they let all others go first."""
        requests = tuple(
            parts if parts.service_class == "batch" else replace(parts, slo=slo) for parts in self.requests
        )
        arrivals = tuple(replace(arrival, judged=slo) for arrival in self.arrivals)
        return replace(self, slo=slo, requests=requests, arrivals=arrivals)
