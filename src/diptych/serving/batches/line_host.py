"""Ties a batch service to the application that runs its lines."""

from collections.abc import Callable, Collection

from fastapi import FastAPI

from diptych.serving.batches.app_lines import AppLines
from diptych.serving.batches.batch_service import BatchService, LineHost
from diptych.serving.metrics.batch_metrics import batch_families
from diptych.serving.served_fleet import ServedFleet


def serve_lines(
    app: FastAPI,
    service: BatchService | None,
    llm: ServedFleet,
    models: Callable[[], Collection[str]],
    endpoints: tuple[str, ...],
    *,
    workers_give_way: bool,
) -> None:
    """Run lines by the routes of ``app``. Call it before the layers that guard the door are added: lines pass only
    those that are there by then. Sets ``app.state.batches``, which the server starts and stops. workers_give_way: they
    set lines aside for other requests, so that lines can be sent to them at any time."""
    app.state.batches = service
    if service is None:
        return

    def others() -> int | None:
        if not llm.is_routable or llm.ready is None:
            return None
        return 0 if workers_give_way else llm.fleet.streams.num_besides("batch")

    service.connect(LineHost(AppLines(app, app.build_middleware_stack()), others, models, endpoints))
    runner = service.runner
    assert runner is not None
    llm.metrics.more_families.append(lambda model: batch_families(runner, model))
