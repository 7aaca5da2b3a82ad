"""What must hold of the open requests of a fleet between two events, whatever has happened before.

A whole look costs as much as there are requests and attempts; one event in N is followed by it, N growing with that
number, so that an event costs a fraction of a request's look. The moment at which nothing is open is looked at each
time. Raises BrokenInvariantError, also under ``python -O``; nothing is changed here.
"""

from collections.abc import Mapping

from diptych.control.admission.admission_queue import AdmissionQueue
from diptych.control.cluster.attempts import AttemptState, AttemptTable
from diptych.control.cluster.cluster_events import Arrived, Cancelled, ClusterEvent, Reported
from diptych.control.cluster.open_request import OpenRequest
from diptych.control.errors import BrokenInvariantError

EVENTS_PER_REQUEST = 8  # from one look at an open request to the next
LEAST_EVENTS = 64


class ClusterAudit:
    """Looks at the requests, the parked ones among them, the queue and the attempts of one ClusterCore.
    num_awaiting_first_token: see there."""

    def __init__(
        self,
        requests: Mapping[str, OpenRequest],
        parked: Mapping[str, int],
        admission: AdmissionQueue,
        attempts: AttemptTable,
        num_awaiting_first_token: list[int],
    ) -> None:
        self._requests = requests
        self._parked = parked
        self._admission = admission
        self._attempts = attempts
        self._num_awaiting_first_token = num_awaiting_first_token
        self._num_left = LEAST_EVENTS  # events until the next look

    def after_event(self) -> None:
        """An event has been handled: look, if it is time."""
        self._num_left -= 1
        if not self._requests:
            self.check_idle()
        elif self._num_left <= 0:
            self._num_left = LEAST_EVENTS + EVENTS_PER_REQUEST * (len(self._requests) + len(self._attempts))
            self.check()

    def check_idle(self) -> None:
        """No request is open: none waits, none is counted, and no lease is renewed. O(1)."""
        if (
            self._parked
            or self._num_awaiting_first_token[0]
            or self._num_awaiting_first_token[1]
            or self._admission.num_held
        ):
            raise BrokenInvariantError(
                f"no request is open, but {len(self._parked)} wait for a worker, {self._admission.num_held} in the "
                f"queue, and {self._num_awaiting_first_token} are counted as without a token"
            )
        if self._attempts.num_leased:
            raise BrokenInvariantError(f"no request is open, but {self._attempts.num_leased} leases are renewed")

    def check(self) -> None:
        """Every request is in one place and every attempt that goes on has one request."""
        num_queued, num_parked, num_awaiting_first_token = 0, 0, [0, 0]
        for request_id, entry in self._requests.items():
            is_queued, is_parked = self._admission.holds(request_id), request_id in self._parked
            num_queued += is_queued
            num_parked += is_parked
            if is_queued + is_parked + (entry.attempt is not None) != 1:
                raise BrokenInvariantError(
                    f"request {request_id} is {_words(is_queued, is_parked, entry.attempt is not None)}"
                )
            if entry.awaits_first_token:
                num_awaiting_first_token[entry.submission.options.is_best_effort] += 1
        if num_queued != self._admission.num_held or num_parked != len(self._parked):
            num_waiting = self._admission.num_held + len(self._parked)
            raise BrokenInvariantError(f"{num_waiting} wait, of which {num_queued + num_parked} are open requests")
        if num_awaiting_first_token != self._num_awaiting_first_token:
            raise BrokenInvariantError(
                f"{num_awaiting_first_token} requests have no token, {self._num_awaiting_first_token} are counted"
            )
        self._check_attempts()

    def _check_attempts(self) -> None:
        for attempt in self._attempts:
            if attempt.state is not AttemptState.CLOSING:
                entry = self._requests.get(attempt.request_id)
                if entry is None or entry.attempt is not attempt:
                    raise BrokenInvariantError(
                        f"attempt {attempt.attempt_id} is {attempt.state}, and serves no request"
                    )


def _words(is_queued: bool, is_parked: bool, has_attempt: bool) -> str:
    places = (("in the queue", is_queued), ("waiting for a worker", is_parked), ("on a worker", has_attempt))
    return " and ".join(words for words, is_there in places if is_there) or "nowhere"


def event_words(event: ClusterEvent) -> str:
    """Which event it is, for a message: its class, and whose it is."""
    name = type(event).__name__
    if isinstance(event, Arrived):
        return f"{name} of request {event.submission.request_id}"
    if isinstance(event, Cancelled):
        return f"{name} of request {event.request_id}"
    worker = getattr(event, "worker", None)
    if isinstance(event, Reported):
        kinds = ", ".join(dict.fromkeys(type(happened).__name__ for happened in event.events))
        return f"{name} by worker {worker} ({kinds or 'its load'})"
    return name if worker is None else f"{name} of worker {worker}"
