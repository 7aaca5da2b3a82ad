"""What a change would gain, by simulating the observed requests with and without it.

Both simulations serve the same requests, so that the difference is taken request by request. What the twin gets wrong
of the present server widens the interval: a gain is known no better than the present is reproduced.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from diptych.control.slo import NS_PER_S
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
        """Of a request from its arrival to its last token."""
        return self.ttft_s + self.decode_s


@dataclass(frozen=True, slots=True)
class Present:
    """The twin of the server as it is, simulated once for all changes."""

    model: TwinModel
    table: RequestTable
    measured: tuple[float, float]  # seconds per request: TTFT, and after it

    @classmethod
    def of(cls, model: TwinModel, observation: Observation) -> "Present":
        """Simulate the present server."""
        if observation.is_exact:
            requests = observation.requests[-len(model.requests) :]
            measured = (
                fmean(parts.ttft_ns for parts in requests) / NS_PER_S,
                fmean(parts.decode_ns for parts in requests) / NS_PER_S,
            )
        else:
            assert observation.ttft is not None and observation.itl is not None
            tokens = max(0.0, observation.signals.get("output_mean", 1.0) - 1)
            measured = observation.ttft.measured_s, observation.itl.measured_s * tokens
        return cls(model, model.run(), measured)

    @property
    def error(self) -> float:
        """Relative error of the twin's mean latency, from arrival to the last token."""
        simulated = [sum(latency) for latency in _latencies(self.table).values()]
        return abs(fmean(simulated) - sum(self.measured)) / max(1e-9, sum(self.measured)) if simulated else 1.0

    def gain(self, change: Change) -> Gain | None:
        """Of one change; None when it changes nothing here, or when the twin is too far from the server."""
        changed = change(self.model)
        if changed is None or self.error > MOST_ERROR:
            return None
        table = changed.run()
        before, after = _latencies(self.table), _latencies(table)
        shared = sorted(before.keys() & after.keys())
        if len(shared) < 2:
            return None
        simulated = [fmean(before[number][part] for number in shared) for part in (0, 1)]
        errors = [abs(have - real) / real if real else 0.0 for have, real in zip(simulated, self.measured, strict=True)]
        intervals, means = [], []
        for part in (0, 1):
            mean, half = _paired([before[number][part] - after[number][part] for number in shared])
            scale = self.measured[part] / simulated[part] if simulated[part] > 0 else 1.0
            scale = min(4.0, max(0.25, scale))
            half = sqrt(half**2 + (errors[part] * mean) ** 2)
            means.append(mean * scale)
            intervals.append(((mean - half) * scale, (mean + half) * scale))
        attainment = (_attainment(self.table), _attainment(table))
        return Gain(means[0], intervals[0], means[1], intervals[1], *attainment, self.error)


def _latencies(table: RequestTable) -> dict[int, tuple[float, float]]:
    """Request number -> (TTFT, time after it), seconds."""
    return {
        table.number[row]: (
            table.ttft_ns(row) / NS_PER_S,
            (table.handoff_ns[row] + table.decode_ns[row]) / NS_PER_S,
        )
        for row in table.completed_rows()
    }


def _paired(differences: Sequence[float]) -> tuple[float, float]:
    return fmean(differences), Z * stdev(differences) / sqrt(len(differences))


def _attainment(table: RequestTable) -> float | None:
    judged = [met for met in table.slo_met if met >= 0]
    return sum(judged) / len(judged) if judged else None
