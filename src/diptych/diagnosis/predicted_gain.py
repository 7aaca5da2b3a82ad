"""What a change would gain, by simulating the observed requests with and without it.

Both simulations serve the same requests, so that the difference is taken request by request. What the twin gets wrong
of the present server widens the interval: a gain is known no better than the present is reproduced. A change may lead
to steps that this server does not compute now, which two laws of the step times tell in two ways although both fit the
present: both are simulated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, stdev

from diptych.control.slo import NS_PER_S, Slo
from diptych.diagnosis.attribution import Z
from diptych.diagnosis.observation import Observation
from diptych.diagnosis.twin_model import TwinModel
from diptych.simulation.results import RequestTable

MOST_ERROR = 0.5  # of the twin's mean latency; beyond, it does not stand for the server, and predicts nothing

Change = Callable[[TwinModel], TwinModel | None]  # None: it changes nothing here


@dataclass(frozen=True, slots=True)
class Gain:
    """Seconds per request that a change would save (negative: cost) of TTFT, and of the time after it, with 95 %
    intervals; attainment as simulated before and after (None: no objectives). twin_error: relative error of the twin's
    mean latency of the present server."""

    ttft_s: float
    ttft_interval: tuple[float, float]
    decode_s: float
    decode_interval: tuple[float, float]
    attainment_before: float | None
    attainment_after: float | None
    twin_error: float

    @property
    def total_s(self) -> float:
        """Latency of a request from its arrival to its last token."""
        return self.ttft_s + self.decode_s


@dataclass(frozen=True, slots=True)
class Present:
    """The twin of the server as it is, simulated once for all changes: with each of its laws. measured: seconds per
    request, TTFT and after it."""

    model: TwinModel
    twins: tuple["_Twin", ...]
    measured: tuple[float, float]

    @classmethod
    def of(cls, model: TwinModel, observation: Observation) -> "Present | None":
        """Simulate the present server; None where nothing is known of its latencies."""
        if not model.measured and (observation.ttft is None or observation.itl is None):
            return None
        if model.measured:
            ttfts, decodes = zip(*model.measured.values(), strict=True)
            measured = fmean(ttfts), fmean(decodes)
        else:
            assert observation.ttft is not None and observation.itl is not None
            tokens = max(0.0, observation.signals.get("output_mean", 1.0) - 1)
            measured = observation.ttft.measured_s, observation.itl.measured_s * tokens
        return cls(model, tuple(_Twin(law, _latencies(law.run()), measured) for law in model.laws()), measured)

    def gain(self, change: Change) -> Gain | None:
        """The gain of one change; None when it changes nothing here. See ``gain_of``."""
        changed = change(self.model)
        return None if changed is None else self.gain_of(changed)

    def gain_of(self, changed: TwinModel) -> Gain | None:
        """The gain of the changed server: the mean of what the laws say, with an interval that holds all of theirs.
        None when every twin is too far from the server."""
        found = [gain for twin in self.twins if (gain := twin.gain(changed)) is not None]
        if not found:
            return None
        ttfts, decodes = [gain.ttft_interval for gain in found], [gain.decode_interval for gain in found]
        return Gain(
            fmean(gain.ttft_s for gain in found),
            (min(low for low, _ in ttfts), max(high for _, high in ttfts)),
            fmean(gain.decode_s for gain in found),
            (min(low for low, _ in decodes), max(high for _, high in decodes)),
            _mean([gain.attainment_before for gain in found]),
            _mean([gain.attainment_after for gain in found]),
            fmean(gain.twin_error for gain in found),
        )


@dataclass(frozen=True, slots=True)
class _Twin:
    """One law. latencies: of the present server, simulated. measured: see Present."""

    model: TwinModel
    latencies: "Latencies"
    measured: tuple[float, float]

    def simulated(self) -> tuple[float, float]:
        """Simulated latency of the measured requests, like ``measured``; 0 if none finished."""
        numbers = set(self.latencies)
        if self.model.measured:
            numbers &= self.model.measured.keys()
        if not numbers:
            return 0.0, 0.0
        return fmean(self.latencies[at][0] for at in numbers), fmean(self.latencies[at][1] for at in numbers)

    def gain(self, changed: TwinModel) -> Gain | None:
        """The gain by this law; None when the twin is too far from the server."""
        simulated, measured = self.simulated(), self.measured
        error = abs(sum(simulated) - sum(measured)) / max(1e-9, sum(measured))
        if error > MOST_ERROR:
            return None
        before, after = self.latencies, _latencies(replace(changed, cost=self.model.cost).run())
        shared = [number for number in self.model.counted if number in before and number in after]
        if len(shared) < 2:
            return None
        errors = [abs(have - real) / real if real else 0.0 for have, real in zip(simulated, measured, strict=True)]
        intervals, means = [], []
        for part in (0, 1):
            mean, half = _paired([before[number][part] - after[number][part] for number in shared])
            scale = measured[part] / simulated[part] if simulated[part] > 0 else 1.0
            scale = min(4.0, max(0.25, scale))
            half = sqrt(half**2 + (errors[part] * mean) ** 2)
            means.append(mean * scale)
            intervals.append(((mean - half) * scale, (mean + half) * scale))
        attainment = [_attainment(self.model, latencies) for latencies in (before, after)]
        return Gain(means[0], intervals[0], means[1], intervals[1], attainment[0], attainment[1], error)


Latencies = Mapping[int, tuple[float, float]]  # by number of the request: seconds to the first token, and after it


def _latencies(table: RequestTable) -> Latencies:
    """Latencies of the requests that were completed."""
    return {
        table.number[row]: (
            table.ttft_ns(row) / NS_PER_S,
            (table.handoff_ns[row] + table.decode_ns[row]) / NS_PER_S,
        )
        for row in table.completed_rows()
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _paired(differences: Sequence[float]) -> tuple[float, float]:
    return fmean(differences), Z * stdev(differences) / sqrt(len(differences))


def _attainment(model: TwinModel, latencies: Latencies) -> float | None:
    """The share of the requests that met their objectives; None where none has any."""
    met = []
    for number in model.counted:
        slo = model.objectives(number)
        if slo == Slo():
            continue
        ttft_s, decode_s = latencies.get(number, (float("inf"), 0.0))
        tpot_s = decode_s / max(1, model.requests[number].output_tokens - 1)
        is_late = slo.ttft_ns is not None and ttft_s * NS_PER_S > slo.ttft_ns
        met.append(not is_late and not (slo.tpot_ns is not None and tpot_s * NS_PER_S > slo.tpot_ns))
    return fmean(met) if met else None
