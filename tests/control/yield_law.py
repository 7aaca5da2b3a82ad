"""The law of requests that give way, checked against every plan of a worker; written from docstrings, not from code."""

from diptych.control.engine.engine_core import EngineCore
from diptych.control.step import SchedulerOutput


def check_yielding(engine: EngineCore, output: SchedulerOutput) -> None:
    """A plan was made. What it computes gives way, or does not, all of it; and while it does, no other request could be
    computed. Those set aside hold their blocks, and are nowhere else."""
    scheduler = engine.scheduler
    computed = [engine.requests[chunk.request_id] for chunk in output.prefills]
    members = list(scheduler.batch)
    assert scheduler.batch.num_best_effort == sum(request.is_best_effort for request in members)
    if output.num_decodes:
        computed += members
    if any(request.is_best_effort for request in computed):
        others = [request for request in computed if not request.is_best_effort]
        assert not others, f"{others} in one step with requests that give way"
        here = [*members, *scheduler.prefilling.values(), *scheduler.swapped.values()]
        assert all(request.is_best_effort for request in here if request.request_id not in scheduler.joining), here
    places = (scheduler.batch, scheduler.prefilling, scheduler.joining, scheduler.swapped, scheduler.waiting)
    for request in scheduler.best_effort:
        assert request.request_id in engine.requests and request.block_tables
        assert not any(request.request_id in place for place in places)
    if any(not request.is_best_effort for request in scheduler.prefilling.values()):
        return
    if not len(scheduler.batch) and output.is_compute is False:
        assert not len(scheduler.best_effort) or output.swap_in, "nothing is computed, and requests are set aside"
