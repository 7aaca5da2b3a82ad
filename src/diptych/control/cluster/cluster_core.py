"""ClusterCore: a request's whole way across the fleet, failures included.

    commands = core.on_event(event, now)        # the only entry: cluster_events in, commands out

A state machine without a clock, sockets or tokens. The same object decides for the live server (serving.fleet) and for
the simulator (simulation.fleet). It asks the admission queue which request may go next and the router where, keeps one
attempt (attempts.py) per try, and turns every loss into another attempt or into the one end of the request.

Invariants: a request that has arrived ends with exactly one End, or by its Cancelled. A worker's blocks are never
given up while another worker may write into them. Attempts without progress are bounded.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

from diptych.control.admission.admission_queue import AdmissionQueue, QueuedRequest
from diptych.control.cluster.attempts import Attempt, AttemptState, AttemptTable
from diptych.control.cluster.block_reports import BlockReports
from diptych.control.cluster.cluster_audit import ClusterAudit, event_words
from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.cluster.cluster_events import (
    Arrived,
    Cancelled,
    ClusterEvent,
    DrainEnded,
    DrainStarted,
    EvacuationReady,
    PartitionChanged,
    Reported,
    RoleChanged,
    SchedulerChanged,
    Tick,
    WorkerDown,
    WorkerUp,
)
from diptych.control.cluster.expected_blocks import ExpectedBlocks
from diptych.control.cluster.load_book import LoadBook
from diptych.control.cluster.membership import Membership
from diptych.control.cluster.open_request import OpenRequest
from diptych.control.cluster.partition import Partition
from diptych.control.cluster.paths import Paths
from diptych.control.commands import AskKVSnapshot, Command, Drained, End, Evacuate, ForgetPeer, attempt_id_of
from diptych.control.engine.reports import LoadReport
from diptych.control.errors import ConfigError, DiptychError, UnavailableError
from diptych.control.events import (
    FirstToken,
    HandoffDelivered,
    HandoffExpired,
    HandoffReleased,
    HandoffReserved,
    HandoffRevoked,
    KVEvents,
    KVSnapshot,
    PeerForgotten,
    RequestAdmitted,
    RequestFinished,
    RequestQueued,
    Resized,
    TransferFailed,
)
from diptych.control.length_predictor import LengthErrorStats, LengthPredictor
from diptych.control.request import FinishReason
from diptych.control.router.routers import make_router
from diptych.control.router.routing import Route, RoutingRequest

UNLIMITED = 2**62


class ClusterCore:
    """All workers and all requests of one front end. There are no workers until WorkerUp."""

    def __init__(self, config: ClusterConfig | None = None) -> None:
        self.config = config or ClusterConfig()
        self.router = make_router(self.config.routing)
        self.admission = AdmissionQueue(self.config.admission)
        self.members = Membership()
        self.lengths = LengthPredictor()
        self.length_errors = LengthErrorStats()
        self.counts: Counter[str] = Counter()
        self.requests: dict[str, OpenRequest] = {}  # that have not ended
        self.attempts = AttemptTable(self.config.lease_ns)
        self._parked: dict[str, int] = {}  # request id -> until when it waits for a worker
        self.loads = LoadBook(self.members, self.admission if self.config.max_prefills_in_flight_per_worker else None)
        self._num_awaiting_first_token = [0, 0]  # of requests that do not give way, and of those that do
        self.paths = Paths(self.counts)
        self._blocks = ExpectedBlocks(self.members, self.loads, self.lengths, self.attempts, self._current)
        self._partition = Partition(self.members)
        self._audit = ClusterAudit(
            self.requests, self._parked, self.admission, self.attempts, self._num_awaiting_first_token
        )
        blocks = BlockReports(self.members, self.router, self.counts)
        self._handlers: dict[type, Callable[[Any, int], list[Command]]] = {
            Arrived: self._on_arrived,
            Cancelled: self._on_cancelled,
            WorkerUp: self._on_up,
            WorkerDown: self._on_down,
            RoleChanged: self._on_role_changed,
            DrainStarted: self._on_drain_started,
            DrainEnded: self._on_drain_ended,
            SchedulerChanged: self.members.on_scheduler_changed,
            PartitionChanged: self._partition.on_changed,
            EvacuationReady: self._on_evacuation_ready,
            Reported: self._on_reported,
            Tick: self._on_tick,
        }
        self._takers: dict[type, Callable[[int, Any, int], list[Command]]] = {
            RequestQueued: self._take_queued,
            RequestAdmitted: self._take_admitted,
            HandoffReserved: self._take_reserved,
            HandoffRevoked: self._take_revoked,
            FirstToken: self._take_first_token,
            HandoffDelivered: self._take_delivered,
            HandoffReleased: self._take_released,
            HandoffExpired: self._take_expired,
            TransferFailed: self._take_transfer_failed,
            RequestFinished: self._take_finished,
            KVEvents: blocks.take_changes,
            KVSnapshot: blocks.take_snapshot,
            PeerForgotten: self._take_peer_forgotten,
            Resized: self._partition.take_resized,
        }

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self.requests)

    @property
    def reads(self) -> frozenset[type]:
        """The workers' events that change anything here; others may be left out of reports."""
        return frozenset(self._takers)

    def on_event(self, event: ClusterEvent, now: int) -> list[Command]:
        """Take in an event. Returns the commands to carry out."""
        try:
            commands = self._handlers[type(event)](event, now)
            self._audit.after_event()
        except Exception as error:
            error.add_note(f"ClusterCore was given {event_words(event)} at {now} ns")
            raise
        return commands + self._newly_drained() if self.members.draining else commands

    def next_time(self) -> int | None:
        """When a Tick is due, if nothing else happens; None: never."""
        due_ns = self.admission.next_time()
        if self._parked:
            parked_ns = next(iter(self._parked.values()))
            due_ns = parked_ns if due_ns is None else min(due_ns, parked_ns)
        renewal_ns = self.attempts.next_renewal_ns
        return renewal_ns if due_ns is None else due_ns if renewal_ns is None else min(due_ns, renewal_ns)

    def check_idle(self) -> None:
        """Assert that nothing is left of any request (for tests)."""
        assert not self.requests, f"left behind: {list(self.requests)[:5]}"
        self._audit.check_idle()
        self.attempts.check_idle()

    # -- requests -----------------------------------------------------------------------------------------------------

    def room(self, service_class: str) -> int:
        """How many requests of a class would be dispatched or queued now, as far as their number decides."""
        return max(0, self._headroom()[0]) + self.admission.room(service_class)

    def _on_arrived(self, event: Arrived, now: int) -> list[Command]:
        submission = event.submission
        request_id = submission.request_id
        if request_id in self.requests:
            raise ConfigError(f"request id {request_id!r} is in use", param="request_id")
        entry = OpenRequest.arrived(submission, now, self.lengths, event.num_tokens)
        if entry.num_tokens >= submission.max_tokens:  # only its end is missing
            return [End(request_id, entry.complete(FinishReason.LENGTH, now, self.config.slo))]
        queued = QueuedRequest(submission, now, int(self.loads.least_token_ns * submission.num_prompt_tokens))
        passes_by = self.admission.may_pass_by(queued.service_class, *self._headroom())
        refusal = self.admission.pass_by(queued, now) if passes_by else self.admission.offer(queued, now)
        # Not in ``requests`` yet: a refused request ends with this command alone.
        if refusal is not None:
            self.counts[f"refused_{refusal.reason}"] += 1
            return [End(request_id, error=refusal.error)]
        self.requests[request_id] = entry
        return self._place(entry, now) if passes_by else self._dispatch(now)

    def _on_cancelled(self, event: Cancelled, now: int) -> list[Command]:
        entry = self.requests.get(event.request_id)
        if entry is None:
            return []
        attempt = entry.attempt
        commands = self.attempts.close(attempt, event.reason) if attempt else []
        if event.reason is FinishReason.STOP:
            entry.is_stopping = True
            entry.num_tokens = event.num_tokens
            self._touch(entry)
            if attempt is None or attempt.is_gone:
                commands.append(self._end_stopped(entry, now))
        else:
            self._settle(entry, event.num_tokens, event.reason)
        return commands + self._dispatch(now)

    def _dispatch(self, now: int) -> list[Command]:
        """Dispatch as many waiting requests as may go now."""
        commands: list[Command] = []
        while len(self.admission):
            request_id = self.admission.next(now, *self._headroom())
            if request_id is None:
                break
            commands += self._place(self.requests[request_id], now)
        return commands

    def _headroom(self) -> tuple[int, int]:
        """How many more requests the workers should be given: of any class, and of class batch."""
        most = self.config.max_prefills_in_flight_per_worker
        if not most:
            return UNLIMITED, UNLIMITED
        headroom = most * self.members.num_usable - self._num_awaiting_first_token[False]
        return headroom, headroom - self._num_awaiting_first_token[True]

    def _place(self, entry: OpenRequest, now: int) -> list[Command]:
        """Begin the next attempt, or wait for a worker; what an older attempt still gives does not count any more."""
        submission = entry.submission
        request_id = submission.request_id
        num_expected = self.lengths.mean(entry.length_group, entry.num_tokens, submission.max_tokens)
        asked = RoutingRequest(submission, entry.num_tokens, num_expected, entry.avoid, entry.must_stay_whole)
        route = self.paths.route(self.router, asked, now, self.attempts.closes_circle, entry.failed_path)
        if route is None:
            # Parked by an earlier try: its time goes on.
            if request_id in self._parked:
                return []
            self._parked[request_id] = now + self.config.park_ns
            return entry.restarted()
        commands = self._begin(entry, route, now)
        return (
            [*commands, Evacuate(route.decode, request_id)]
            if self._blocks.needs_evacuation(entry, route.decode)
            else commands
        )

    def _begin(self, entry: OpenRequest, route: Route, now: int) -> list[Command]:
        """The next attempt, on these workers."""
        request_id = entry.submission.request_id
        restarted = [] if request_id in self._parked else entry.restarted()
        self._parked.pop(request_id, None)
        self.counts[f"placed_{route.reason}"] += 1
        # A new id per attempt: what an older attempt still reports is told apart by it, and ignored.
        entry.epoch += 1
        domains = [self.members.infos[worker].memory_domain for worker in (route.prefill, route.decode)]
        attempt = Attempt(
            attempt_id_of(request_id, entry.epoch),
            request_id,
            entry.num_tokens,
            route.prefill,
            route.decode,
            domains[0] is not None and domains[0] == domains[1],
            self.config.lease_ns,
            route.prefill_peer,
            route.decode_peer,
        )
        entry.attempt, entry.awaits_first_token, entry.is_computing = attempt, True, False
        self._num_awaiting_first_token[entry.submission.options.is_best_effort] += 1
        return restarted + self.attempts.begin(attempt, now)

    def _end(
        self, entry: OpenRequest, *, finished: RequestFinished | None = None, error: DiptychError | None = None
    ) -> End:
        """The request's one end (the caller closes its attempt)."""
        num_tokens = finished.latency.num_output_tokens if finished else 0
        self._settle(entry, num_tokens or entry.num_tokens, finished.reason if finished else FinishReason.ERROR)
        return End(entry.submission.request_id, finished, error)

    def _end_stopped(self, entry: OpenRequest, now: int) -> End:
        """The client has a complete answer, and no worker reports the end of the request."""
        return self._end(entry, finished=entry.complete(FinishReason.STOP, now, self.config.slo))

    def _settle(self, entry: OpenRequest, num_tokens: int, reason: FinishReason) -> None:
        """Forget the request, of whose answer the client has ``num_tokens``."""
        submission = entry.submission
        self.lengths.observe(entry.length_group, num_tokens, is_cut=reason is not FinishReason.STOP)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.length_errors.observe(entry.num_expected, submission.max_tokens, num_tokens)
        self._touch(entry)
        self.router.on_ended(submission.request_id)
        self._parked.pop(submission.request_id, None)
        self.admission.remove(submission.request_id)
        self.admission.on_service(submission.options.tenant, num_tokens, submission.options.service_class)
        del self.requests[submission.request_id]

    def _touch(self, entry: OpenRequest) -> None:
        """The request got a token of this attempt, or ends."""
        if entry.awaits_first_token:
            entry.awaits_first_token = False
            self._num_awaiting_first_token[entry.submission.options.is_best_effort] -= 1

    # -- attempts -----------------------------------------------------------------------------------------------------

    def _holder(self, attempt: Attempt | None) -> OpenRequest | None:
        """The request whose newest attempt this is, whatever its state."""
        entry = self.requests.get(attempt.request_id) if attempt else None
        return entry if entry is not None and entry.attempt is attempt else None

    def _current(self, attempt: Attempt | None) -> OpenRequest | None:
        """The request that this attempt serves."""
        return None if attempt is None or attempt.state is AttemptState.CLOSING else self._holder(attempt)

    def _forgotten(self, attempt: Attempt, worker: int, now: int) -> list[Command]:
        """The worker holds nothing of the attempt any more; a request that waited only for this ends."""
        commands = self.attempts.forgotten(attempt, worker)
        entry = self._holder(attempt)
        if entry is not None and entry.is_stopping and attempt.is_gone:
            commands.append(self._end_stopped(entry, now))
        return commands

    def _lose(self, entry: OpenRequest, why: str, now: int, *, num_tokens: int | None = None) -> list[Command]:
        """The current attempt is lost. num_tokens: of the answer that the client has, when that is known better."""
        attempt = entry.attempt
        assert attempt is not None
        commands = self.attempts.close(attempt)
        entry.lose_attempt(num_tokens)
        self._touch(entry)
        self.router.on_ended(attempt.request_id)
        self.counts[f"lost_{why}"] += 1
        if error := entry.verdict(why, self.config.on_failure, self.config.max_attempts):
            self.counts["poison"] += entry.is_poison
            return [*commands, self._end(entry, error=error)]
        if entry.num_tokens >= entry.submission.max_tokens:  # its last token came, the event of its end did not
            finished = entry.complete(FinishReason.LENGTH, now, self.config.slo)
            return [*commands, self._end(entry, finished=finished)]
        entry.must_stay_whole |= self.config.on_failure == "local"
        if why != "worker":  # a lost worker is not up anyway; of two that cannot hand over, either may be at fault
            entry.avoid = frozenset((attempt.prefill, attempt.decode))
        entry.avoid |= self.members.of_other_copies(attempt.decode)
        self.counts["retried"] += 1
        return commands + self._place(entry, now)

    # -- workers ------------------------------------------------------------------------------------------------------

    def _on_up(self, event: WorkerUp, now: int) -> list[Command]:
        configure = self.members.on_ready(event.info)
        return configure + self._partition.on_up() + self._admit_workers(now)

    def _admit_workers(self, now: int) -> list[Command]:
        """Use the workers that may be used from now on."""
        newcomers = self.members.take_newcomers()
        for info in newcomers:
            self.router.set_up(info)
            if info.number in self.members.draining:
                self.router.set_down(info.number)
            if load := self.loads.get(info.number):
                self._on_load(info.number, load)
        if not newcomers:
            return []
        return self._place_parked(now) + self._dispatch(now)

    def _place_parked(self, now: int) -> list[Command]:
        """A worker may be used from now on, by those that wait for one."""
        commands: list[Command] = []
        for request_id in list(self._parked):
            if entry := self.requests.get(request_id):
                commands += self._place(entry, now)
        return commands

    def _on_down(self, event: WorkerDown, now: int) -> list[Command]:
        worker = event.worker
        was_up = worker in self.members.up
        peers = self.members.on_lost(worker)
        self.loads.drop(worker)
        self.paths.on_worker_changed(worker)
        commands: list[Command] = []
        if was_up:
            self.router.set_down(worker)
            self.loads.collect_prices()
        for attempt in self.attempts.of_worker(worker):
            entry = self._current(attempt)
            commands += self._forgotten(attempt, worker, now)
            if entry is not None and attempt.needs(worker):
                if event.crashed:
                    entry.blame(worker, event.why)
                num_tokens = event.progress.get(attempt.request_id, entry.num_tokens)
                commands += self._lose(entry, "worker", now, num_tokens=num_tokens)
        commands += [ForgetPeer(peer, worker) for peer in peers]
        commands += self._partition.on_down(worker)
        return commands + self._admit_workers(now)  # a worker may have waited only for the report of this one

    def _on_tick(self, event: Tick, now: int) -> list[Command]:
        commands: list[Command] = []
        for request_id, refusal in self.admission.expired(now):
            self.counts[f"expired_{refusal.reason}"] += 1
            commands.append(self._end(self.requests[request_id], error=refusal.error))
        for request_id in list(takewhile(lambda parked: self._parked[parked] <= now, self._parked)):
            error = UnavailableError("no worker that could take the request came up in time", code="no_worker")
            commands.append(self._end(self.requests[request_id], error=error))
        commands += self.attempts.renew(now)
        return commands + self._dispatch(now)

    # -- requests that leave workers ----------------------------------------------------------------------------------
    #
    # A worker that decodes a stream hands it to another as a prefill worker does a prompt: another attempt begins, with
    # all tokens so far as its prompt, of which the worker has almost everything in its prefix cache. What has no token
    # yet begins anew. A request that no other worker can take, or whose answer no other can continue, stays where it
    # is, and ends there.

    def _on_role_changed(self, event: RoleChanged, now: int) -> list[Command]:
        worker = event.worker
        self.members.change_role(worker, event.role)
        if worker not in self.members.up:
            return []
        self.router.set_role(worker, event.role)
        self.loads.collect_prices()
        moved = self._move_all(worker, event.progress, now) if event.role == "prefill" else []
        return moved + self._dispatch(now)

    def _on_drain_started(self, event: DrainStarted, now: int) -> list[Command]:
        worker = event.worker
        if worker in self.members.draining:
            return []
        self.members.draining[worker] = False
        if worker not in self.members.up:
            return []
        self.router.set_down(worker)
        self.loads.collect_prices()
        return self._move_all(worker, event.progress, now)

    def _on_drain_ended(self, event: DrainEnded, now: int) -> list[Command]:
        worker = event.worker
        if self.members.draining.pop(worker, None) is None or worker not in self.members.up:
            return []
        self.router.set_up(self.members.infos[worker])
        if load := self.loads.get(worker):
            self._on_load(worker, load)
        return [AskKVSnapshot(worker), *self._place_parked(now), *self._dispatch(now)]

    def _newly_drained(self) -> list[Command]:
        """Workers that nothing is left of since the last event."""
        draining = self.members.draining
        done = [worker for worker, is_done in draining.items() if not is_done and not self.attempts.count_of(worker)]
        for worker in done:
            draining[worker] = True
        return [Drained(worker) for worker in done]

    def _on_evacuation_ready(self, event: EvacuationReady, now: int) -> list[Command]:
        """The longest streams go first, so that few have to."""
        worker = event.worker
        entry = self.requests.get(event.request_id)
        if entry is None or entry.attempt is None or entry.attempt.decode != worker:
            return []
        missing, free = self._blocks.missing(entry, worker), self._blocks.free_elsewhere(worker, entry)
        commands: list[Command] = []
        for num_blocks, num_tokens, attempt, stream in self._blocks.streams(worker, event.progress):
            if missing <= 0:
                break
            if num_blocks <= free and (moved := self._move(stream, attempt, num_tokens, now, is_whole=True)):
                commands += moved
                missing, free = missing - num_blocks, free - num_blocks
        return commands

    def _move_all(self, worker: int, progress: Mapping[str, int], now: int) -> list[Command]:
        """Whatever decodes on this worker, or is about to."""
        commands: list[Command] = []
        for attempt in self.attempts.of_worker(worker):
            entry = self._current(attempt)
            if entry is not None and attempt.decode == worker and not entry.is_stopping:
                commands += self._move(entry, attempt, progress.get(attempt.request_id, entry.num_tokens), now)
        return commands

    def _move(
        self, entry: OpenRequest, attempt: Attempt, num_tokens: int, now: int, *, is_whole: bool = False
    ) -> list[Command]:
        """The request goes on elsewhere after ``num_tokens`` of its answer. is_whole: the other worker computes all of
        it anew."""
        submission = entry.submission
        if num_tokens >= submission.max_tokens or not self.members.num_usable:  # its end is on its way, or only here
            return []
        if num_tokens and not submission.is_resumable:
            return []
        source = attempt.decode if attempt.is_decoding and not entry.awaits_first_token else None
        num_expected = self.lengths.mean(entry.length_group, num_tokens, submission.max_tokens)
        must_stay_whole = entry.must_stay_whole or is_whole
        asked = RoutingRequest(submission, num_tokens, num_expected, must_stay_whole=must_stay_whole, leaves=source)
        route = self.router.route(asked, now)
        if route is None:
            return []
        commands = self.attempts.close(attempt)
        entry.withdraw_attempt(num_tokens)
        self._touch(entry)
        self.counts["moved"] += 1
        if self.attempts.closes_circle(route.prefill, route.decode):
            route = replace(route, prefill=route.decode)
        return commands + self._begin(entry, route, now)

    # -- what workers report ------------------------------------------------------------------------------------------

    def _on_reported(self, event: Reported, now: int) -> list[Command]:
        commands: list[Command] = []
        for happened in event.events:
            take = self._takers.get(type(happened))
            if take is not None:
                commands += take(event.worker, happened, now)
        if event.load is not None:  # after the events: it covers what they say
            self.loads.set(event.worker, event.load)
            if self.members.is_usable(event.worker):
                self._on_load(event.worker, event.load)
        return commands

    def _on_load(self, worker: int, load: LoadReport) -> None:
        """A worker that may be used has this load."""
        self.router.on_load(worker, load)
        self.loads.reprice(worker)

    def _take_queued(self, worker: int, event: RequestQueued, now: int) -> list[Command]:
        entry = self._current(self.attempts.get(event.request_id))
        if entry is not None:
            self.router.on_queued(entry.submission.request_id, worker)
        return []

    def _take_admitted(self, worker: int, event: RequestAdmitted, now: int) -> list[Command]:
        entry = self._current(self.attempts.get(event.request_id))
        if entry is not None and event.is_first:
            entry.on_admitted(event.num_cached_tokens, now)
            names = (entry.submission.request_id, worker)
            self.router.on_admitted(*names, event.num_cached_tokens, event.num_tier_tokens)
        return []

    def _take_reserved(self, worker: int, event: HandoffReserved, now: int) -> list[Command]:
        attempt = self.attempts.get(event.request_id)
        entry = self._current(attempt)
        if attempt is None or entry is None:
            return []
        entry.on_reserved(event.num_cached_tokens)
        self.router.on_admitted(attempt.request_id, worker, event.num_cached_tokens, event.num_tier_tokens)
        return attempt.on_reserved(event.num_cached_tokens, event.block_tables)

    def _take_revoked(self, worker: int, event: HandoffRevoked, now: int) -> list[Command]:
        """The decode worker has no blocks for a stream: the prompt gives up its own, and waits again. One that is
        computed is a stream itself, and its KV is on its way."""
        attempt = self.attempts.get(event.request_id)
        entry = self._current(attempt)
        if attempt is None or entry is None or not attempt.awaits_prefill:
            return []
        self.counts["revoked"] += 1
        commands = self.attempts.close(attempt)
        entry.withdraw_attempt()
        self._touch(entry)
        self.router.on_ended(attempt.request_id)
        return commands + self._place(entry, now)

    def _take_first_token(self, worker: int, event: FirstToken, now: int) -> list[Command]:
        attempt = self.attempts.get(event.request_id)
        entry = self._current(attempt)
        if attempt is None or entry is None:
            return []
        self.attempts.computed(attempt)
        return self._got_token(entry, now)

    def _take_delivered(self, worker: int, event: HandoffDelivered, now: int) -> list[Command]:
        attempt = self.attempts.get(event.request_id)
        entry = self._current(attempt)
        if attempt is None or entry is None:
            return []
        self.counts["handoffs"] += 1
        self.paths.on_whole(attempt.prefill, attempt.decode)
        self.router.on_transfer(attempt.prefill, attempt.decode, event.num_bytes, event.wire_ns, now)
        return self.attempts.delivered(attempt) + self._got_token(entry, now)

    def _got_token(self, entry: OpenRequest, now: int) -> list[Command]:
        """The first token of this attempt: there is room for another request."""
        entry.on_first_token(now)
        if not entry.awaits_first_token:
            return []
        self._touch(entry)
        self.router.on_first_token(entry.submission.request_id)
        return self._dispatch(now)

    def _take_released(self, worker: int, event: HandoffReleased, now: int) -> list[Command]:
        attempt = self.attempts.get(event.request_id)
        if attempt is None:
            return []
        entry = self._current(attempt)
        commands = self._forgotten(attempt, worker, now)
        if entry is not None and attempt.needs(worker):  # it holds nothing of what it should be working on
            commands += self._lose(entry, "attempt", now)
        return commands

    def _take_expired(self, worker: int, event: HandoffExpired, now: int) -> list[Command]:
        self.counts["leases_expired"] += 1
        return self._take_released(worker, HandoffReleased(event.time_ns, event.request_id), now)

    def _take_transfer_failed(self, worker: int, event: TransferFailed, now: int) -> list[Command]:
        attempt = self.attempts.get(event.request_id)
        entry = self._current(attempt)
        if attempt is None or entry is None or not attempt.is_under_way:
            return []
        self.paths.on_broken(attempt.prefill, attempt.decode, now)
        entry.failed_path = (attempt.prefill, attempt.decode)
        return self._lose(entry, "transfer", now)

    def _take_finished(self, worker: int, event: RequestFinished, now: int) -> list[Command]:
        attempt = self.attempts.get(event.request_id)
        if attempt is None:
            return []
        holder = self._holder(attempt)
        entry = self._current(attempt)
        commands = self.attempts.forgotten(attempt, worker)
        if holder is not None and holder.is_stopping:
            return [*commands, self._end(holder, finished=holder.account(event, now, self.config.slo))]
        if entry is not None:
            commands += self.attempts.close(attempt)
            commands.append(self._end(entry, finished=entry.account(event, now, self.config.slo)))
            commands += self._dispatch(now)
        return commands

    def _take_peer_forgotten(self, worker: int, event: PeerForgotten, now: int) -> list[Command]:
        self.members.on_forgotten(worker, event.peer)
        return self._admit_workers(now)
