"""simulate(scenario): from a scenario to a result."""

import gc
import time
from collections.abc import Callable

from diptych.simulation.event_log import EventLog
from diptych.simulation.fleet.simulated_cluster import SimulatedCluster
from diptych.simulation.results import SimulationResult
from diptych.simulation.scenario import Scenario

Progress = Callable[[float], None]  # share of the requests that have ended, 0 to 1
REPORT_EVERY = 1000


def simulate(scenario: Scenario, progress: Progress | None = None) -> SimulationResult:
    """Run the scenario to its end. Equal scenarios give equal results."""
    return simulate_with_log(scenario, progress)[0]


def simulate_with_log(scenario: Scenario, progress: Progress | None = None) -> tuple[SimulationResult, EventLog | None]:
    """Like ``simulate``, with the event log (None unless ``record_events``)."""
    begun = time.perf_counter()
    total = max(1, len(scenario.workload))

    def on_end(num_ended: int) -> None:
        if progress is not None and num_ended % REPORT_EVERY == 0:
            progress(min(1.0, num_ended / total))

    cluster = SimulatedCluster(scenario, on_end if progress else None)
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
        num_events=cluster.environment.num_events,
        wall_s=time.perf_counter() - begun,
    )
    if progress is not None:
        progress(1.0)
    return result, cluster.log
