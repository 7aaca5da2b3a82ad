"""What happened over time: requests in the system, phases and held context, from rows and from the event log.

Owns the binning. Shares of a bin are exact: a step that spans two bins counts in each with the time it was there.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from diptych.control.events import Event, FirstToken, RequestAdmitted, RequestFinished, RequestPreempted, StepFinished
from diptych.control.slo import NS_PER_S
from diptych.report.statistics import count_over_time
from diptych.simulation.results import RequestTable
from diptych.timeline.lanes import phase_of, prefill_context

LoggedEvent = tuple[int, Event]  # (worker, what happened there), as EventLog gives them; -1: the front end


@dataclass(frozen=True, slots=True)
class PhaseSeries:
    """Bins of equal width. Shares are of the fleet's time; ``context_tokens`` is a mean over the bin.

    context_tokens: what running requests attend to, a block that several share counted for each.
    """

    edges_s: list[float]
    prefill: list[float]
    mixed: list[float]
    decode: list[float]
    context_tokens: list[float]


@dataclass(slots=True)
class _Bins:
    width_ns: int
    count: int
    sums: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, start_ns: int, end_ns: int, weight: float = 1.0) -> None:
        """Spread [start, end) times ``weight`` over the bins."""
        row = self.sums.setdefault(name, [0.0] * self.count)
        index = min(self.count - 1, start_ns // self.width_ns)
        while start_ns < end_ns:
            border = (index + 1) * self.width_ns if index < self.count - 1 else end_ns
            stop = min(end_ns, border)
            row[index] += (stop - start_ns) * weight
            start_ns, index = stop, index + 1

    def shares(self, name: str, whole: float) -> list[float]:
        """Each bin's sum over ``whole``."""
        return [value / whole for value in self.sums.get(name, [0.0] * self.count)]


def step_context(step: StepFinished) -> float:
    """Tokens that the decodes of a step attend to; for a run of steps, in its middle."""
    return step.decode_context + step.num_decodes * (step.num_steps - 1) / 2


def phase_series(events: Iterable[LoggedEvent], duration_ns: int, num_workers: int, num_bins: int = 120) -> PhaseSeries:
    """Utilisation per phase and the context held, over the whole run."""
    width = max(1, -(-duration_ns // num_bins))
    bins = _Bins(width, num_bins)
    prompts: list[dict[str, int]] = [{} for _ in range(num_workers)]  # being prefilled: request -> tokens so far
    for worker, event in events:
        if worker < 0:  # the front end ends a request that its worker lost
            if isinstance(event, RequestFinished):
                for tokens in prompts:
                    tokens.pop(event.request_id, None)
        elif isinstance(event, StepFinished):
            bins.add(phase_of(event), event.start_ns, event.end_ns)
            held = step_context(event) + prefill_context(event, prompts[worker])
            bins.add("context", event.start_ns, event.end_ns, held)
        elif isinstance(event, FirstToken | RequestFinished | RequestPreempted):
            prompts[worker].pop(event.request_id, None)
        elif isinstance(event, RequestAdmitted) and event.is_first:
            prompts[worker][event.request_id] = event.num_cached_tokens
    whole = float(width * num_workers)
    return PhaseSeries(
        edges_s=[index * width / NS_PER_S for index in range(num_bins + 1)],
        prefill=bins.shares("prefill", whole),
        mixed=bins.shares("mixed", whole),
        decode=bins.shares("decode", whole),
        context_tokens=bins.shares("context", float(width)),
    )


def in_system(table: RequestTable, duration_ns: int) -> list[tuple[float, int]]:
    """(seconds, requests that have arrived and not ended) at equal distances."""
    ends = [table.arrival_ns[row] + table.e2e_ns(row) for row in range(len(table))]
    return count_over_time(table.arrival_ns, ends, duration_ns)
