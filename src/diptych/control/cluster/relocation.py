"""Workers whose roles change or that are drained, and the streams that leave them.

A worker that decodes a stream hands it to another as a prefill worker does a prompt: another attempt begins, with all
tokens so far as its prompt, of which the worker has almost everything in its prefix cache. What has no token yet begins
anew. A request that no other worker can take stays where it is, and ends there.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from diptych.control.cluster.attempts import Attempt
from diptych.control.cluster.cluster_events import DrainEnded, DrainStarted, RoleChanged
from diptych.control.cluster.open_request import OpenRequest
from diptych.control.commands import AskKVSnapshot, Command, Drained
from diptych.control.router.routing import RoutingRequest

if TYPE_CHECKING:
    from diptych.control.cluster.cluster_core import ClusterCore


class Relocation:
    """The part of a ClusterCore that moves requests off workers."""

    def __init__(self, core: "ClusterCore") -> None:
        self._core = core

    def on_role_changed(self, event: RoleChanged, now: int) -> list[Command]:
        """See RoleChanged."""
        core, worker = self._core, event.worker
        core.members.change_role(worker, event.role)
        if worker not in core.members.up:
            return []
        core.router.set_role(worker, event.role)
        core.loads.collect_prices()
        moved = self._move_all(worker, event.progress, now) if event.role == "prefill" else []
        return moved + core.dispatch(now)

    def on_drain_started(self, event: DrainStarted, now: int) -> list[Command]:
        """See DrainStarted."""
        core, worker = self._core, event.worker
        if worker in core.members.draining:
            return []
        core.members.draining[worker] = False
        if worker not in core.members.up:
            return []
        core.router.set_down(worker)
        core.loads.collect_prices()
        return self._move_all(worker, event.progress, now)

    def on_drain_ended(self, event: DrainEnded, now: int) -> list[Command]:
        """See DrainEnded."""
        core, worker = self._core, event.worker
        if core.members.draining.pop(worker, None) is None or worker not in core.members.up:
            return []
        core.router.set_up(core.members.infos[worker])
        if load := core.loads.get(worker):
            core.on_load(worker, load)
        return [AskKVSnapshot(worker), *core.place_parked(now), *core.dispatch(now)]

    def newly_drained(self) -> list[Command]:
        """Workers that nothing is left of since the last event."""
        draining, attempts = self._core.members.draining, self._core.attempts
        done = [worker for worker, is_done in draining.items() if not is_done and not attempts.count_of(worker)]
        for worker in done:
            draining[worker] = True
        return [Drained(worker) for worker in done]

    def _move_all(self, worker: int, progress: Mapping[str, int], now: int) -> list[Command]:
        """Whatever decodes on this worker, or is about to."""
        core = self._core
        commands: list[Command] = []
        for attempt in core.attempts.of_worker(worker):
            entry = core.current(attempt)
            if entry is not None and attempt.decode == worker and not entry.is_stopping:
                commands += self._move(entry, attempt, progress.get(attempt.request_id, entry.num_tokens), now)
        return commands

    def _move(self, entry: OpenRequest, attempt: Attempt, num_tokens: int, now: int) -> list[Command]:
        """The request goes on elsewhere after ``num_tokens`` of its answer."""
        core, submission = self._core, entry.submission
        if num_tokens >= submission.max_tokens or not core.members.num_usable:  # its end is on its way, or only here
            return []
        source = attempt.decode if attempt.is_decoding and not entry.is_untouched else None
        asked = RoutingRequest(submission, num_tokens, must_stay_whole=entry.must_stay_whole, leaves=source)
        route = core.router.route(asked, now)
        if route is None:
            return []
        commands = core.attempts.close(attempt)
        entry.withdraw_attempt(num_tokens)
        core.touch(entry)
        core.counts["moved"] += 1
        if core.attempts.closes_circle(route.prefill, route.decode):
            route = replace(route, prefill=route.decode)
        return commands + core.begin(entry, route, now)
