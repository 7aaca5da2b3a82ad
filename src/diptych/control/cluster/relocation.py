"""Workers whose roles change or that are drained, and the streams that leave them.

A worker that decodes a stream hands it to another as a prefill worker does a prompt: another attempt begins, with all
tokens so far as its prompt, of which the worker has almost everything in its prefix cache. What has no token yet begins
anew. A request that no other worker can take, or whose answer no other can continue, stays where it is, and ends there.

Where workers are unequal, streams also make way for a request that only a large worker can hold. These are computed
anew where they go: the worker's cache, which a handoff would read, is what the newcomer takes.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from diptych.control.cluster.attempts import Attempt
from diptych.control.cluster.cluster_events import DrainEnded, DrainStarted, RoleChanged, WayGiven
from diptych.control.cluster.open_request import OpenRequest
from diptych.control.commands import AskKVSnapshot, Command, Drained, GiveWay
from diptych.control.router.routing import RoutingRequest

if TYPE_CHECKING:
    from diptych.control.cluster.cluster_core import ClusterCore


class Relocation:
    """The part of a ClusterCore that moves requests off workers."""

    def __init__(self, core: "ClusterCore") -> None:
        self._core = core

    def on_role_changed(self, event: RoleChanged, now: int) -> list[Command]:
        """Take in RoleChanged: move what the new role must not do to other workers."""
        core, worker = self._core, event.worker
        core.members.change_role(worker, event.role)
        if worker not in core.members.up:
            return []
        core.router.set_role(worker, event.role)
        core.loads.collect_prices()
        moved = self._move_all(worker, event.progress, now) if event.role == "prefill" else []
        return moved + core.dispatch(now)

    def on_drain_started(self, event: DrainStarted, now: int) -> list[Command]:
        """Take in DrainStarted: move the worker's requests to others."""
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
        """Take in DrainEnded: the worker may be used again."""
        core, worker = self._core, event.worker
        if core.members.draining.pop(worker, None) is None or worker not in core.members.up:
            return []
        core.router.set_up(core.members.infos[worker])
        if load := core.loads.get(worker):
            core.on_load(worker, load)
        return [AskKVSnapshot(worker), *core.place_parked(now), *core.dispatch(now)]

    def ask_for_way(self, entry: OpenRequest, worker: int) -> list[Command]:
        """A request that small workers cannot hold begins on this one: whether streams are to leave it."""
        members, submission = self._core.members, entry.submission
        if not members.are_unequal or submission.num_prompt_tokens + submission.max_tokens <= members.shortest:
            return []
        return [GiveWay(worker, submission.request_id)] if self._missing_blocks(entry, worker) > 0 else []

    def on_way_given(self, event: WayGiven, now: int) -> list[Command]:
        """Take in WayGiven: move streams off the worker, the longest first, so that few have to."""
        core, worker = self._core, event.worker
        entry = core.requests.get(event.request_id)
        if entry is None or entry.attempt is None or entry.attempt.decode != worker:
            return []
        missing, free = self._missing_blocks(entry, worker), self._free_elsewhere(worker, entry)
        leaving = []
        for attempt in core.attempts.of_worker(worker):
            stream = core.current(attempt)
            if stream is None or stream.is_stopping or stream.is_untouched or attempt.decode != worker:
                continue
            num_tokens = event.progress.get(attempt.request_id, stream.num_tokens)
            if attempt.is_decoding:
                leaving.append((self._num_blocks(stream, num_tokens, worker), num_tokens, attempt, stream))
        leaving.sort(key=lambda found: -found[0])
        commands: list[Command] = []
        for num_blocks, num_tokens, attempt, stream in leaving:
            if missing <= 0:
                break
            if num_blocks <= free and (moved := self._move(stream, attempt, num_tokens, now, is_whole=True)):
                commands += moved
                missing, free = missing - num_blocks, free - num_blocks
        return commands

    def _missing_blocks(self, entry: OpenRequest, worker: int) -> int:
        """Blocks by which a request exceeds what is free on a worker."""
        return self._num_blocks(entry, entry.num_tokens, worker) - self._free_blocks(worker, entry)

    def _free_blocks(self, worker: int, newcomer: OpenRequest) -> int:
        """Blocks that the worker's last report and the requests that are there leave for the newcomer."""
        core = self._core
        load, used = core.loads.get(worker), 0
        for attempt in core.attempts.of_worker(worker):
            entry = core.current(attempt)
            if entry is not None and entry is not newcomer and attempt.decode == worker:
                used += self._num_blocks(entry, entry.num_tokens, worker)
        return core.members.infos[worker].num_blocks - max(used, load.used_blocks if load else 0)

    def _num_blocks(self, entry: OpenRequest, num_output_tokens: int, worker: int) -> int:
        """Blocks that the prompt and the expected answer need, once ``num_output_tokens`` are computed."""
        core, submission = self._core, entry.submission
        answer = min(num_output_tokens, submission.max_tokens - 1)
        answer += core.lengths.mean(entry.length_group, answer, submission.max_tokens)
        return -(-(submission.num_prompt_tokens + answer) // core.members.infos[worker].block_size)

    def _free_elsewhere(self, worker: int, newcomer: OpenRequest) -> int:
        """Blocks that are free on the worker with the most of them among those that may take its streams over."""
        members = self._core.members
        strangers = members.of_other_copies(worker) | {worker}
        others = [
            other for other in members.usable if other not in strangers and members.infos[other].role != "prefill"
        ]
        return max((self._free_blocks(other, newcomer) for other in others), default=0)

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

    def _move(
        self, entry: OpenRequest, attempt: Attempt, num_tokens: int, now: int, *, is_whole: bool = False
    ) -> list[Command]:
        """The request goes on elsewhere after ``num_tokens`` of its answer. is_whole: the other worker computes all of
        it anew."""
        core, submission = self._core, entry.submission
        if num_tokens >= submission.max_tokens or not core.members.num_usable:  # its end is on its way, or only here
            return []
        if num_tokens and not submission.is_resumable:
            return []
        source = attempt.decode if attempt.is_decoding and not entry.is_untouched else None
        num_expected = core.lengths.mean(entry.length_group, num_tokens, submission.max_tokens)
        must_stay_whole = entry.must_stay_whole or is_whole
        asked = RoutingRequest(submission, num_tokens, num_expected, must_stay_whole=must_stay_whole, leaves=source)
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
