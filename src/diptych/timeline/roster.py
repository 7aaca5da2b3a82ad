"""Which requests are in the decode batch of one worker at each of its steps, rebuilt from its events.

Owns the membership as a viewer sees it. Steps hold the number of decodes, not the requests: these would be a record per
token. A
change counts from the first step that begins at its time or later, whatever the order in which records come.
"""

from collections.abc import Iterable
from heapq import heappop, heappush

from diptych.control.events import (
    Event,
    HandoffDelivered,
    HandoffExpired,
    HandoffReleased,
    RequestFinished,
    RequestPreempted,
    RequestRested,
    RequestResumed,
    StepFinished,
)

Changes = tuple[tuple[str, ...], tuple[str, ...]]  # requests that joined, that left
NOBODY: Changes = ((), ())


class Roster:
    """The decode batch of one worker, as of its latest step."""

    __slots__ = ("_number", "_pending", "_recomputed", "members")

    def __init__(self) -> None:
        self.members: dict[str, None] = {}
        self._pending: list[tuple[int, bool, int, str]] = []  # (time, is_leave, number, request): joins before leaves
        self._number = 0
        self._recomputed: dict[str, int] = {}  # preempted without swap -> end of its newest chunk since, or 0

    def note(self, event: Event) -> None:
        """Take in an event of a request. (FirstToken: see ``join``.)"""
        if isinstance(event, HandoffDelivered | RequestResumed):
            self.join(event.request_id, event.time_ns)
        elif isinstance(event, RequestRested):
            self.leave(event.request_id, event.time_ns)
        elif isinstance(event, RequestPreempted):
            self.leave(event.request_id, event.time_ns)
            if event.is_stream and not event.swapped:
                self._recomputed[event.request_id] = 0
        elif isinstance(event, RequestFinished | HandoffReleased | HandoffExpired):
            self.leave(event.request_id, event.time_ns)
            self._recomputed.pop(event.request_id, None)

    def join(self, request_id: str, time_ns: int) -> None:
        """Note that a request decodes here from then on; after its first token only if it is not handed off."""
        self._change(time_ns, False, request_id)

    def leave(self, request_id: str, time_ns: int) -> None:
        """Note that a request does not decode here from then on, if it did."""
        self._change(time_ns, True, request_id)

    def step(self, step: StepFinished) -> Changes:
        """The requests in the batch of this step that were not in that of the step before, and the other way round."""
        if not self._pending and not self._recomputed:
            return NOBODY
        joined: dict[str, None] = {}
        left: dict[str, None] = {}
        pending = self._pending
        while pending and pending[0][0] <= step.start_ns:
            _, is_leave, _, request_id = heappop(pending)
            if is_leave == (request_id in self.members):
                self._move(request_id, joined, left)
        if self._recomputed:
            for request_id in self._recomputed_by(step):
                self._move(request_id, joined, left)
        return tuple(joined), tuple(left)

    def clear(self) -> tuple[str, ...]:
        """The worker is lost, and all its requests leave."""
        left = tuple(self.members)
        self.members.clear()
        self._pending.clear()
        self._recomputed.clear()
        return left

    def _change(self, time_ns: int, is_leave: bool, request_id: str) -> None:
        self._number += 1
        heappush(self._pending, (time_ns, is_leave, self._number, request_id))

    def _move(self, request_id: str, joined: dict[str, None], left: dict[str, None]) -> None:
        is_member = request_id in self.members
        if is_member:
            del self.members[request_id]
        else:
            self.members[request_id] = None
        undone, done = (joined, left) if is_member else (left, joined)
        if request_id in undone:
            del undone[request_id]
        else:
            done[request_id] = None

    def _recomputed_by(self, step: StepFinished) -> Iterable[str]:
        """Requests whose KV was recomputed and that decode again. There is no event for this: they are those with a
        chunk before this step and none in it, as long as the step has more decodes than known members."""
        chunks = {request_id for request_id, _, _ in step.prefills}
        missing = step.num_decodes - len(self.members)
        ended = [
            attempt_id
            for attempt_id, end_ns in self._recomputed.items()
            if 0 < end_ns <= step.start_ns and attempt_id not in chunks
        ]
        back = ended[: max(0, missing)]
        for request_id in back:
            del self._recomputed[request_id]
        for request_id in chunks & self._recomputed.keys():
            self._recomputed[request_id] = step.end_ns
        return back
