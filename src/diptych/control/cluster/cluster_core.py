"""ClusterCore: a request's whole way across the fleet, failures included.

    commands = core.on_event(event, now)        # the only entry: cluster_events in, commands out

A state machine without a clock, sockets or tokens. The same object decides for the live server (serving.fleet) and for
the simulator (simulation.cluster). It asks the admission queue (admission.py) who may go next, the placer (router/)
where, keeps one attempt (handoff.py) per attempt, and turns every loss into another attempt or into the one end of the
request.

Invariants: a request that has arrived ends with exactly one End, or by its Cancelled. A worker's blocks are never
given up while another may write into them. Attempts without progress are bounded.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from diptych.control.admission.admission_queue import AdmissionQueue, QueuedRequest
from diptych.control.cluster.attempt import Attempt, AttemptState
from diptych.control.cluster.attempt_table import AttemptTable
from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.cluster.cluster_events import (
    Arrived,
    Cancelled,
    ClusterEvent,
    Published,
    Reported,
    Snapshot,
    Tick,
    TransferFailed,
    WorkerDown,
    WorkerUp,
)
from diptych.control.cluster.commands import AskSnapshot, Command, End, Restarted, attempt_id_of
from diptych.control.cluster.open_request import OpenRequest
from diptych.control.engine.load_report import LoadReport
from diptych.control.errors import ConfigError, DiptychError, UnavailableError
from diptych.control.events import (
    FirstToken,
    HandoffDelivered,
    HandoffExpired,
    HandoffReleased,
    HandoffReserved,
    RequestAdmitted,
    RequestFinished,
    RequestQueued,
)
from diptych.control.router.cost_router import PlacementRequest, Placer
from diptych.control.router.topology import WorkerInfo

UNLIMITED = 2**62


class ClusterCore:
    """All workers and all requests of one front end. Workers are down until WorkerUp."""

    def __init__(self, workers: Sequence[WorkerInfo], config: ClusterConfig | None = None) -> None:
        self.config = config or ClusterConfig()
        self.workers = tuple(workers)
        self.placer = Placer(self.workers, self.config.placement)
        self.admission = AdmissionQueue(self.config.admission)
        self.counts: Counter[str] = Counter()
        self._open: dict[str, OpenRequest] = {}
        self._attempts = AttemptTable(len(self.workers), self.config.lease_ns)
        self._parked: dict[str, int] = {}  # request id -> until when it waits for a worker
        self._is_up = [False] * len(self.workers)
        self._loads: dict[int, LoadReport] = {}  # of workers that prefill
        self._token_ns = 0.0  # the least that any of them asks for a prompt token
        self._num_untouched = 0
        self._handlers: dict[type, Callable[[Any, int], list[Command]]] = {
            Arrived: self._on_arrived,
            Cancelled: self._on_cancelled,
            WorkerUp: self._on_up,
            WorkerDown: self._on_down,
            Reported: self._on_reported,
            Published: self._on_published,
            Snapshot: self._on_snapshot,
            TransferFailed: self._on_transfer_failed,
            Tick: self._on_tick,
        }
        self._takers: dict[type, Callable[[int, Any, int], list[Command]]] = {
            RequestQueued: self._take_queued,
            RequestAdmitted: self._take_admitted,
            HandoffReserved: self._take_reserved,
            FirstToken: self._take_first_token,
            HandoffDelivered: self._take_delivered,
            HandoffReleased: self._take_released,
            HandoffExpired: self._take_expired,
            RequestFinished: self._take_finished,
        }

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def on_event(self, event: ClusterEvent, now: int) -> list[Command]:
        """Something happened: what is to be done."""
        return self._handlers[type(event)](event, now)

    def next_time(self) -> int | None:
        """When a Tick is due, if nothing else happens; None: never."""
        due_ns = self.admission.next_time()
        if self._parked:
            parked_ns = next(iter(self._parked.values()))
            due_ns = parked_ns if due_ns is None else min(due_ns, parked_ns)
        renewal_ns = self._attempts.next_renewal_ns
        return renewal_ns if due_ns is None else due_ns if renewal_ns is None else min(due_ns, renewal_ns)

    def check_idle(self) -> None:
        """Assert that nothing is left of any request (for tests)."""
        assert not self._open and not self._parked, f"left behind: {list(self._open)[:5]}"
        assert self._num_untouched == 0 and len(self.admission) == 0
        self._attempts.check_idle()

    # -- requests ---------------------------------------------------------------------------------------------------

    def _on_arrived(self, event: Arrived, now: int) -> list[Command]:
        one = event.submission
        if one.request_id in self._open:
            raise ConfigError(f"request id {one.request_id!r} is in use", param="request_id")
        entry = QueuedRequest(
            one.request_id,
            one.num_prompt_tokens,
            one.max_tokens,
            tenant=one.tenant,
            service_class=one.service_class,
            priority=one.priority,
            arrival_ns=now,
            deadline_ns=one.deadline_ns,
            ttft_slo_ns=one.slo.ttft_ns if one.slo else None,
            service_ns=int(self._token_ns * one.num_prompt_tokens),
        )
        waits = bool(self.config.max_untouched_per_worker or len(self.admission))  # else nobody does
        refusal = self.admission.offer(entry, now) if waits else self.admission.pass_by(entry, now)
        if refusal is not None:
            self.counts[f"refused_{refusal.reason}"] += 1
            return [End(one.request_id, error=refusal.error)]
        self._open[one.request_id] = OpenRequest(one)
        return self._dispatch(now) if waits else self._place(self._open[one.request_id], now)

    def _on_cancelled(self, event: Cancelled, now: int) -> list[Command]:
        entry = self._open.get(event.request_id)
        if entry is None:
            return []
        self._settle(entry, event.num_tokens)
        self.placer.on_ended(event.request_id, None)
        return [*(self._attempts.close(entry.attempt) if entry.attempt else ()), *self._dispatch(now)]

    def _dispatch(self, now: int) -> list[Command]:
        """Send as many as may go now."""
        commands: list[Command] = []
        while len(self.admission):
            headroom = UNLIMITED
            if self.config.max_untouched_per_worker:
                headroom = self.config.max_untouched_per_worker * sum(self._is_up) - self._num_untouched
            request_id = self.admission.next(now, headroom)
            if request_id is None:
                break
            commands += self._place(self._open[request_id], now)
        return commands

    def _place(self, entry: OpenRequest, now: int) -> list[Command]:
        """Begin the next attempt, or wait for a worker."""
        one = entry.submission
        wanted = PlacementRequest(
            one.request_id,
            one.num_prompt_tokens + entry.num_tokens,
            one.max_tokens - entry.num_tokens,
            one.hashes,
            one.service_class,
            avoid=entry.avoid,
            hands_off=one.hands_off and not entry.must_stay_whole,
        )
        placement = self.placer.place(wanted, now)
        if placement is None:
            self._parked.setdefault(one.request_id, now + self.config.park_ns)
            return []
        self._parked.pop(one.request_id, None)
        self.counts[f"placed_{placement.reason}"] += 1
        entry.epoch += 1
        source, target = self.workers[placement.prefill], self.workers[placement.decode]
        is_borrowed = source.pool is not None and source.pool == target.pool
        attempt_id = attempt_id_of(one.request_id, entry.epoch)
        attempt = Attempt(attempt_id, one.request_id, source.number, target.number, is_borrowed, self.config.lease_ns)
        entry.attempt, entry.is_untouched, entry.is_computing = attempt, True, False
        self._num_untouched += 1
        restarted: list[Command] = [Restarted(one.request_id, attempt_id)] if entry.epoch else []
        return restarted + self._attempts.begin(attempt, now)

    def _end(
        self, entry: OpenRequest, *, finished: RequestFinished | None = None, error: DiptychError | None = None
    ) -> End:
        """The request's one end (whoever calls closes its attempt)."""
        one = entry.submission
        num_tokens = entry.num_tokens + finished.latency.num_output_tokens if finished else None
        self._settle(entry, num_tokens or entry.num_tokens)
        self.placer.on_ended(one.request_id, num_tokens)
        return End(one.request_id, finished, error)

    def _settle(self, entry: OpenRequest, num_tokens: int) -> None:
        """Take the request, which has got so many tokens, out of the books."""
        one = entry.submission
        self._touch(entry)
        self._parked.pop(one.request_id, None)
        self.admission.remove(one.request_id)
        self.admission.on_service(
            one.tenant, 0, num_tokens, one.service_class
        )  # its prompt was charged when it was sent
        del self._open[one.request_id]

    def _touch(self, entry: OpenRequest) -> None:
        """It got a token of this attempt, or left."""
        if entry.is_untouched:
            entry.is_untouched = False
            self._num_untouched -= 1

    # -- attempts ---------------------------------------------------------------------------------------------------

    def _current(self, attempt: Attempt | None) -> OpenRequest | None:
        """The request whose current attempt this attempt is."""
        if attempt is None or attempt.state is AttemptState.CLOSING:
            return None
        entry = self._open.get(attempt.request_id)
        return entry if entry is not None and entry.attempt is attempt else None

    def _lose(self, entry: OpenRequest, why: str, now: int, *, num_tokens: int | None = None) -> list[Command]:
        """The current attempt is lost. num_tokens: of the answer that the client has, when that is known better."""
        attempt = entry.attempt
        assert attempt is not None
        commands = self._attempts.close(attempt)
        entry.lose_attempt(num_tokens)
        self._touch(entry)
        self.placer.on_ended(attempt.request_id, None)
        self.counts[f"lost_{why}"] += 1
        if error := entry.verdict(why, self.config.on_failure, self.config.max_attempts):
            self.counts["poison"] += entry.is_poison
            return [*commands, self._end(entry, error=error)]
        if entry.num_tokens >= entry.submission.max_tokens:
            return [*commands, self._end(entry, finished=entry.complete(now))]
        entry.must_stay_whole |= self.config.on_failure == "local"
        if why != "worker":  # a dead one is out anyway; of two that cannot hand over, nobody knows whose fault it is
            entry.avoid = frozenset((attempt.prefill, attempt.decode))
        self.counts["retried"] += 1
        return commands + self._place(entry, now)

    # -- workers ----------------------------------------------------------------------------------------------------

    def _on_up(self, event: WorkerUp, now: int) -> list[Command]:
        self._is_up[event.worker] = True
        self.placer.set_up(event.worker, True)
        commands = self._dispatch(now)
        for request_id in list(self._parked):
            if entry := self._open.get(request_id):
                commands += self._place(entry, now)
        return commands

    def _on_down(self, event: WorkerDown, now: int) -> list[Command]:
        worker = event.worker
        self._is_up[worker] = False
        self._loads.pop(worker, None)
        self.placer.set_up(worker, False)
        commands: list[Command] = []
        for attempt in self._attempts.of_worker(worker):
            entry = self._current(attempt)
            commands += self._attempts.forgotten(attempt, worker)
            if entry is not None and attempt.needs(worker):
                if event.crashed:
                    entry.blame(worker)
                num_tokens = event.progress.get(attempt.request_id, entry.num_tokens)
                commands += self._lose(entry, "worker", now, num_tokens=num_tokens)
        return commands

    def _on_published(self, event: Published, now: int) -> list[Command]:
        if self.placer.on_blocks(event.worker, event.sequence, event.stored, event.evicted):
            return []
        self.counts["block_gaps"] += 1
        return [AskSnapshot(event.worker)]

    def _on_snapshot(self, event: Snapshot, now: int) -> list[Command]:
        self.placer.on_snapshot(event.worker, event.sequence, event.hashes)
        return []

    def _on_transfer_failed(self, event: TransferFailed, now: int) -> list[Command]:
        attempt = self._attempts.get(event.attempt_id)
        entry = self._current(attempt)
        if attempt is None or entry is None or not attempt.is_under_way:
            return []
        return self._lose(entry, "transfer", now)

    def _on_tick(self, event: Tick, now: int) -> list[Command]:
        commands: list[Command] = []
        for request_id, refusal in self.admission.expired(now):
            self.counts[f"expired_{refusal.reason}"] += 1
            commands.append(self._end(self._open[request_id], error=refusal.error))
        for request_id in list(takewhile(lambda one: self._parked[one] <= now, self._parked)):
            error = UnavailableError("no worker that could take the request came up in time", code="no_worker")
            commands.append(self._end(self._open[request_id], error=error))
        commands += self._attempts.renew(now)
        return commands + self._dispatch(now)

    # -- what workers report ----------------------------------------------------------------------------------------

    def _on_reported(self, event: Reported, now: int) -> list[Command]:
        commands: list[Command] = []
        for happened in event.events:
            take = self._takers.get(type(happened))
            if take is not None:
                commands += take(event.worker, happened, now)
        if event.load is not None:  # after the events: the report covers what they tell
            self.placer.on_report(event.worker, event.load)
            if self.config.max_untouched_per_worker and self.workers[event.worker].role != "decode":
                self._loads[event.worker] = event.load
                self._tell_admission()
        return commands

    def _tell_admission(self) -> None:
        """What a token that waits in the admission queue costs those behind it: all that compute prompts share them.
        The workers' own backlog does not count: there, a short prompt passes the long ones."""
        prices = [load.token_ns for load in self._loads.values()]
        self._token_ns = min(prices)
        self.admission.on_load(0, sum(prices) / len(prices) ** 2)

    def _take_queued(self, worker: int, event: RequestQueued, now: int) -> list[Command]:
        entry = self._current(self._attempts.get(event.request_id))
        if entry is not None:
            self.placer.on_queued(entry.submission.request_id, worker)
        return []

    def _take_admitted(self, worker: int, event: RequestAdmitted, now: int) -> list[Command]:
        entry = self._current(self._attempts.get(event.request_id))
        if entry is not None and event.is_first:
            entry.is_computing = entry.is_untouched
            self.placer.on_admitted(entry.submission.request_id, worker, event.num_cached_tokens)
        return []

    def _take_reserved(self, worker: int, event: HandoffReserved, now: int) -> list[Command]:
        attempt = self._attempts.get(event.request_id)
        if attempt is None or self._current(attempt) is None:
            return []
        self.placer.on_admitted(attempt.request_id, worker, event.num_cached_tokens)
        return attempt.on_reserved(event.num_cached_tokens, event.block_ids)

    def _take_first_token(self, worker: int, event: FirstToken, now: int) -> list[Command]:
        attempt = self._attempts.get(event.request_id)
        entry = self._current(attempt)
        if attempt is None or entry is None:
            return []
        attempt.on_first_token()
        return self._got_token(entry, now)

    def _take_delivered(self, worker: int, event: HandoffDelivered, now: int) -> list[Command]:
        attempt = self._attempts.get(event.request_id)
        entry = self._current(attempt)
        if attempt is None or entry is None:
            return []
        self.counts["handoffs"] += 1
        return self._attempts.delivered(attempt) + self._got_token(entry, now)

    def _got_token(self, entry: OpenRequest, now: int) -> list[Command]:
        """The first token of this attempt: there is room for somebody else."""
        if not entry.is_untouched:
            return []
        self._touch(entry)
        entry.is_computing = False
        self.placer.on_first_token(entry.submission.request_id)
        return self._dispatch(now)

    def _take_released(self, worker: int, event: HandoffReleased, now: int) -> list[Command]:
        attempt = self._attempts.get(event.request_id)
        if attempt is None:
            return []
        entry = self._current(attempt)
        commands = self._attempts.forgotten(attempt, worker)
        if entry is not None and attempt.needs(worker):  # it says that it has nothing of what we believe it works on
            commands += self._lose(entry, "attempt", now)
        return commands

    def _take_expired(self, worker: int, event: HandoffExpired, now: int) -> list[Command]:
        self.counts["leases_expired"] += 1
        return self._take_released(worker, HandoffReleased(event.time_ns, event.request_id), now)

    def _take_finished(self, worker: int, event: RequestFinished, now: int) -> list[Command]:
        attempt = self._attempts.get(event.request_id)
        if attempt is None:
            return []
        entry = self._current(attempt)
        commands = self._attempts.forgotten(attempt, worker)
        if entry is not None:
            commands += self._attempts.close(attempt)
            commands.append(self._end(entry, finished=event))
            commands += self._dispatch(now)
        return commands
