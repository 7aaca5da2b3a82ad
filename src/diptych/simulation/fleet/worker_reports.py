"""What a simulated worker says to the front end, and when: the events that the cluster's decisions need, its load, and
the changes of its prefix cache.

Its load travels at the end of a step in which something happened besides the step itself, so that it does not matter
how many steps were taken at once. Must decide nothing.
"""

from collections.abc import Sequence

from diptych.control.cluster.cluster_events import ClusterEvent, Published, Reported, Snapshot
from diptych.control.events import (
    BlocksEvicted,
    BlocksStored,
    Event,
    FirstToken,
    HandoffDelivered,
    HandoffExpired,
    HandoffReleased,
    HandoffReserved,
    RequestAdmitted,
    RequestFinished,
    RequestQueued,
    StepFinished,
)
from diptych.control.slo import NS_PER_MS
from diptych.simulation.fleet.simulated_worker import SimulatedWorker
from diptych.simulation.scenario import Scenario

REPORT_NS = 100 * NS_PER_MS  # a worker reports its load at most this often
HEARD = frozenset(
    (
        RequestQueued,
        RequestAdmitted,
        FirstToken,
        RequestFinished,
        HandoffReserved,
        HandoffDelivered,
        HandoffReleased,
        HandoffExpired,
    )
)


class Reporter:
    """All workers of a fleet. Where nothing but ends is of interest, nothing but ends is said."""

    def __init__(self, scenario: Scenario, workers: Sequence[SimulatedWorker]) -> None:
        self._workers = workers
        self._has_costs = scenario.routing == "kv_aware"
        needs_all = (
            self._has_costs or scenario.pools or scenario.faults or scenario.cluster_config.max_untouched_per_worker
        )
        self.says_only_ends = not needs_all
        self._sequence = [0] * len(workers)
        self._reported_ns = [-REPORT_NS] * len(workers)

    def reset(self, worker: int) -> None:
        """The worker begins again."""
        self._sequence[worker] = 0
        self._reported_ns[worker] = -REPORT_NS

    def messages(self, worker: int, events: list[Event], now: int, *, is_step_end: bool) -> list[ClusterEvent]:
        """What these events make the worker say."""
        heard = [event for event in events if type(event) in HEARD]
        if not self._has_costs:
            return [Reported(worker, heard)] if heard else []
        messages: list[ClusterEvent] = []
        load = None
        is_news = is_step_end and any(type(event) is not StepFinished for event in events)
        if is_news and now >= self._reported_ns[worker] + REPORT_NS:
            self._reported_ns[worker] = now
            load = self._workers[worker].core.load(now)
        if heard or load is not None:
            messages.append(Reported(worker, heard, load))
        stored = tuple(one for event in events if type(event) is BlocksStored for one in event.hashes)
        evicted = tuple(one for event in events if type(event) is BlocksEvicted for one in event.hashes)
        if stored or evicted:
            self._sequence[worker] += 1
            messages.append(Published(worker, self._sequence[worker], stored, evicted))
        return messages

    def snapshot(self, worker: int) -> Snapshot:
        """All that the worker's prefix cache holds."""
        cache = self._workers[worker].core.kv.pool.prefix_cache
        return Snapshot(worker, self._sequence[worker], tuple(cache))
