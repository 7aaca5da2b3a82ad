"""A fleet at one moment, for metrics."""

from typing import TYPE_CHECKING

from diptych.serving.metrics.fleet_metrics import FleetView

if TYPE_CHECKING:
    from diptych.serving.fleet.fleet import Fleet


def view_of(fleet: "Fleet", now: int) -> FleetView:
    """What there is of it at ``now``."""
    core, numbers = fleet.core, range(max(len(fleet.fleet.roles), len(fleet.workers)))
    return FleetView(
        [fleet.role(number) for number in numbers],
        [number in core.members.up for number in numbers],
        [worker.num_restarts for worker in fleet.workers] or [0] * len(numbers),
        core.counts,
        len(core.admission),
        core.router.alarm,
        core.length_watch.errors,
        fleet.planner.num_decisions if fleet.planner is not None else {},
        core.paths.broken_at(now),
        fleet.door.refused if fleet.door is not None else {},
        fleet.joint_ready,
        fleet.failures.counts,
    )
