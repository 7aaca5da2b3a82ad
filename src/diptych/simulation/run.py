"""simulate(scenario): from a scenario to a result."""

import gc
import time
from collections.abc import Callable

from diptych.simulation.event_log import EventLog
from diptych.simulation.fleet.simulated_cluster import SimulatedCluster
from diptych.simulation.results import RequestTable, SimulationResult
from diptych.simulation.scenario import Scenario

Progress = Callable[[float], None]  # share of the requests that have ended, 0 to 1
Enough = Callable[[RequestTable], bool]  # whether a run may end, asked whenever a request has ended
REPORT_EVERY = 1000


class MissLimit:
    """Ends a run in which more than ``most`` requests have missed their objectives."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_rows = self._num_missed = 0

    def __call__(self, table: RequestTable) -> bool:
        """Whether more requests than that have missed."""
        for row in range(self._num_rows, len(table)):
            self._num_missed += table.slo_met[row] == 0
        self._num_rows = len(table)
        return self._num_missed > self._most


def simulate(scenario: Scenario, progress: Progress | None = None) -> SimulationResult:
    """Run the scenario to its end. Equal scenarios give equal results."""
    return simulate_with_log(scenario, progress)[0]


def simulate_with_log(
    scenario: Scenario, progress: Progress | None = None, enough: Enough | None = None
) -> tuple[SimulationResult, EventLog | None]:
    """Like ``simulate``, with the event log (None unless ``record_events``). enough: ends the run early; what was
    decided until then is what a whole run decides."""
    begun = time.perf_counter()
    total = max(1, len(scenario.workload))

    def on_end(num_ended: int) -> None:
        if enough is not None and enough(cluster.collector.requests):
            cluster.environment.stop()
        if progress is not None and num_ended % REPORT_EVERY == 0:
            progress(min(1.0, num_ended / total))

    cluster = SimulatedCluster(scenario, on_end if progress or enough else None)
    collects = gc.isenabled()
    gc.disable()  # nothing here makes cycles that live long; looking for them takes a fifth of the time
    try:
        cluster.run()
    finally:
        if collects:
            gc.enable()
    for worker in cluster.workers:
        worker.count_tiers()
    result = SimulationResult(
        requests=cluster.collector.requests,
        gaps=cluster.collector.gaps,
        workers=[worker.usage for worker in cluster.workers],
        duration_ns=cluster.last_end_ns,
        hit_error=cluster.hit_error,
        misses=cluster.misses.summary if cluster.misses else None,
        is_cut=cluster.environment.is_stopped,
        num_events=cluster.environment.num_events,
        wall_s=time.perf_counter() - begun,
    )
    if progress is not None:
        progress(1.0)
    return result, cluster.log
