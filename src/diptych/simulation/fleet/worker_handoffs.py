"""A simulated worker's side of handoffs: what it sends after a step, what it waits for, and its leases.

Carries out what the front end commands and what the core's own leases say; decides nothing.
"""

from collections.abc import Callable
from functools import partial

from diptych.control.cluster.commands import Prefill, Reserve
from diptych.control.engine.outgoing import Outgoing
from diptych.control.events import (
    Event,
    HandoffExpired,
    HandoffReleased,
    HandoffReserved,
    RequestFinished,
    StepFinished,
)
from diptych.control.request import Request
from diptych.simulation.environment import MESSAGE, Environment
from diptych.simulation.fleet.kv_transfers import Commit, Receiver, Transfers
from diptych.simulation.fleet.simulated_worker import SimulatedWorker
from diptych.workload.spec import RequestSpec

ReportFailed = Callable[[int, str, bool, str], None]  # (worker, attempt id, is_sender, why)


class WorkerHandoffs:
    """One worker. ``report_failed``: says to the front end that KV of an attempt cannot be moved."""

    def __init__(
        self,
        simulated: SimulatedWorker,
        transfers: Transfers,
        environment: Environment,
        report_failed: ReportFailed,
    ) -> None:
        self._simulated = simulated
        self._worker = simulated.number
        self._transfers = transfers
        self._environment = environment
        self._report_failed = report_failed
        self._expiry_ns: int | None = None  # when the leases are looked at next
        self.reset()

    def reset(self) -> None:
        """The worker's process has died."""
        self._outgoing = Outgoing(self._simulated.config.cache.block_size)
        self._borrowed: dict[str, int] = {}  # attempts that are computed into another worker's blocks -> that worker

    def __len__(self) -> int:
        """AttemptTable that have not been let go of."""
        return len(self._outgoing) + len(self._borrowed)

    def reserve(self, request: Request, spec: RequestSpec, command: Reserve) -> None:
        """Hold blocks for an attempt."""

        def act(now: int) -> list[Event]:
            events = self._simulated.core.reserve(request, now, command.lease_ns)
            self._watch_leases()
            return self._simulated.take_in(request, spec, events)

        self._simulated.hear(act)

    def prefill(self, request: Request, spec: RequestSpec, command: Prefill) -> None:
        """Compute a prompt for another worker."""
        request.hands_off = True
        request.lease_ns = command.lease_ns
        if command.borrowed:
            request.borrowed_block_ids = command.block_ids
            request.num_borrowed_tokens = command.num_cached_tokens

        def act(now: int) -> list[Event]:
            events = self._simulated.take_in(request, spec, self._simulated.core.add_request(request, now))
            attempt_id = command.attempt_id
            if attempt_id in self._simulated.core.requests:
                num_tokens = request.num_prompt_tokens
                self._outgoing.begin(attempt_id, command.num_cached_tokens, num_tokens, is_borrowed=command.borrowed)
                if command.borrowed:
                    self._borrowed[attempt_id] = command.target
                self._transfers.open(self._worker, attempt_id, command.target, partial(self._fail, attempt_id, True))
            return events

        self._simulated.hear(act)

    def renew(self, attempt_ids: tuple[str, ...]) -> None:
        """The front end still wants these."""
        self._simulated.hear(partial(self._renew, attempt_ids))

    def forget_peer(self, peer: int, answer: Callable[[], None]) -> None:
        """That worker has died: write nothing into its memory from now on, then answer."""

        def act(now: int) -> list[Event]:
            attempts = [attempt_id for attempt_id, target in self._borrowed.items() if target == peer]
            events = [
                event
                for attempt_id in attempts
                if attempt_id in self._simulated.core.requests
                for event in self._simulated.core.drop(attempt_id, now)
            ]

            def done() -> None:
                if events:
                    self._simulated.say(events)
                answer()

            self._simulated.when_idle_of(attempts, done)
            return []

        self._simulated.hear(act)

    def on_events(self, events: list[Event]) -> None:
        """What this worker just did, as far as handoffs care."""
        for event in events:
            if isinstance(event, StepFinished):
                if event.prefills and len(self._outgoing):
                    self._send(event)
            elif isinstance(event, HandoffReserved):
                self._expect(event.request_id)
            elif isinstance(event, RequestFinished | HandoffReleased | HandoffExpired):
                self._let_go(event.request_id)
        self._watch_leases()

    def _send(self, step: StepFinished) -> None:
        for chunk in self._outgoing.on_step(step.prefills):
            request = self._simulated.core.requests.get(chunk.attempt_id)
            if request is None:  # dropped while the step ran
                self._transfers.cancel(self._worker, chunk.attempt_id)
                continue
            assert request.first_step_ns is not None
            commit = Commit(request.first_step_ns, step.end_ns) if chunk.is_last else None
            is_near = chunk.attempt_id in self._borrowed
            self._transfers.send(self._worker, chunk.attempt_id, chunk.num_tokens, commit, is_near=is_near)

    def _expect(self, attempt_id: str) -> None:
        receiver = Receiver(
            on_commit=lambda commit: self._simulated.deliver(attempt_id, commit.first_step_ns, commit.first_token_ns),
            on_chunk=lambda: self.renew((attempt_id,)),
            on_failed=partial(self._fail, attempt_id, False),
        )
        self._transfers.expect(self._worker, attempt_id, receiver)

    def _let_go(self, attempt_id: str) -> None:
        self._outgoing.drop(attempt_id)
        self._borrowed.pop(attempt_id, None)
        self._transfers.cancel(self._worker, attempt_id)
        self._transfers.forget(self._worker, attempt_id)

    def _renew(self, attempt_ids: tuple[str, ...], now: int) -> list[Event]:
        self._simulated.core.renew(attempt_ids, now)
        return []

    def _fail(self, attempt_id: str, is_sender: bool, message: str) -> None:
        def act(now: int) -> list[Event]:
            self._report_failed(self._worker, attempt_id, is_sender, message)
            return []

        self._simulated.hear(act)

    def _watch_leases(self) -> None:
        """Have them looked at when the first one may run out."""
        expiry_ns = self._simulated.core.next_expiry_ns
        if expiry_ns is not None and (self._expiry_ns is None or expiry_ns < self._expiry_ns):
            self._expiry_ns = expiry_ns
            self._environment.at(max(expiry_ns, self._environment.now), MESSAGE, partial(self._expire, expiry_ns))

    def _expire(self, expiry_ns: int) -> None:
        if expiry_ns != self._expiry_ns:  # an earlier look was asked for since
            return
        self._expiry_ns = None
        due_ns = self._simulated.core.next_expiry_ns
        if due_ns is not None and due_ns <= self._environment.now:
            self._simulated.hear(self._look)
        else:
            self._watch_leases()

    def _look(self, now: int) -> list[Event]:
        events = self._simulated.core.expire(now)
        self._watch_leases()
        return events
