"""Both ends of the handoffs of one worker: where the core, the executor and the KV connector meet.

As a prefill worker it sends what each step computes, as its layers are done, and the commit behind the last of it. As a
decode worker it expects what its reservations are for, and takes an attempt over when its commit is here. Transfers of
an attempt stop before anybody is told that the attempt has ended. Must never decide where a request runs, and never
wait.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.outgoing import Chunk, Outgoing
from diptych.control.errors import ConfigError
from diptych.control.events import Event, HandoffDelivered, HandoffReserved, StepFinished
from diptych.control.step import SchedulerOutput
from diptych.runtime.transfer.connector import ChunkArrived, Committed, KVConnector, TransferBroken, TransferEvent
from diptych.serving.link.messages import (
    Delivered,
    PrefillAttempt,
    ReserveAttempt,
    TokenLogprobs,
    Tokens,
    TransferLost,
    WorkerMessage,
)
from diptych.serving.worker.request_intake import ATTEMPT_ENDS, RequestIntake

logger = logging.getLogger(__name__)


class Commit(msgspec.Struct, frozen=True, array_like=True):
    """What follows the KV of a prompt: the token behind it, and when it came to be (this host's monotonic clock)."""

    first_token: int
    logprobs: TokenLogprobs | None
    first_step_ns: int
    first_token_ns: int


@dataclass(frozen=True, slots=True)
class _Target:
    """Who gets an attempt that is prefilled here. borrows: it is computed in that worker's blocks."""

    worker: int
    borrows: bool


class Handoffs:
    """The attempts that come to this worker, and those that leave it."""

    def __init__(
        self, core: EngineCore, intake: RequestIntake, connector: KVConnector, send: Callable[[WorkerMessage], None]
    ) -> None:
        self._core = core
        self._intake = intake
        self._connector = connector
        self._send = send
        self._block_size = core.config.cache.block_size
        self._outgoing = Outgoing(self._block_size)
        self._targets: dict[str, _Target] = {}  # of the attempts that are being prefilled, or wait for their release
        self._computing: list[tuple[Chunk, tuple[int, ...]]] = []  # in this step, and the blocks it is computed into
        self._reservations: dict[str, bool] = {}  # attempts to come -> whether our blocks are borrowed for them

    def fileno(self) -> int:
        """Readable when ``poll`` has something."""
        return self._connector.fileno()

    def poll(self) -> Sequence[TransferEvent]:
        """What the connector has to say. To be asked before the clock is read, so that nothing in it is from later."""
        return self._connector.poll()

    def prefill(self, message: PrefillAttempt, now: int) -> list[Event]:
        """Queue a prompt whose KV goes to another worker."""
        attempt_id, borrows = message.request.request_id, bool(message.block_ids)
        events = self._intake.add(message.request, now, message)
        request = self._core.requests.get(attempt_id)
        if request is None:
            return events
        num_tokens = request.num_prompt_tokens
        start = num_tokens if borrows else message.num_cached_tokens
        self._targets[attempt_id] = _Target(message.target, borrows)
        try:
            self._connector.open(attempt_id, message.address, start)
        except ConfigError as error:
            self._send(TransferLost(attempt_id, True, error.message))
        else:
            self._outgoing.begin(attempt_id, start, num_tokens, is_borrowed=borrows)
        return events

    def reserve(self, message: ReserveAttempt, now: int) -> list[Event]:
        """Queue a reservation."""
        self._reservations[message.request.request_id] = message.borrowed
        return self._intake.reserve(message, now)

    def on_events(self, events: Iterable[Event]) -> None:
        """Before anybody is told of these: expect what is reserved now, and stop the transfers of what has ended."""
        for event in events:
            if isinstance(event, HandoffReserved):
                self._expect(event)
            elif isinstance(event, ATTEMPT_ENDS):
                attempt_id = event.request_id
                if self._targets.pop(attempt_id, None) is not None:
                    self._outgoing.drop(attempt_id)
                    self._connector.cancel(attempt_id)
                if self._reservations.pop(attempt_id, None) is not None:
                    self._connector.forget(attempt_id)

    def begin_step(self, output: SchedulerOutput) -> None:
        """This step is computed now: ``on_layer`` may say how far it is. When it is broken off, its attempts are
        ended."""
        self._computing.clear()
        if not len(self._outgoing):
            return
        tables = {chunk.request_id: chunk.block_ids for chunk in output.prefills}
        prefills = ((chunk.request_id, chunk.start, chunk.num_tokens) for chunk in output.prefills)
        self._computing += [(one, tables[one.attempt_id]) for one in self._outgoing.in_step(prefills) if one.num_tokens]

    def on_layer(self, num_layers: int) -> None:
        """Send what the step that is computed has of its chunks so far: the first layers."""
        for chunk, block_ids in self._computing:
            self._connector.send(chunk.attempt_id, chunk.start, chunk.num_tokens, block_ids, num_layers)

    def after_step(self, output: SchedulerOutput, events: Iterable[Event], tokens: Tokens | None) -> None:
        """Send what is left of what this step has computed. ``tokens``: its record, as the front end has got it."""
        if not len(self._outgoing):
            return
        computed = next((event.prefills for event in events if isinstance(event, StepFinished)), ())
        tables = {chunk.request_id: chunk.block_ids for chunk in output.prefills}
        for chunk in self._outgoing.on_step(computed):
            if chunk.num_tokens:
                self._connector.send(chunk.attempt_id, chunk.start, chunk.num_tokens, tables[chunk.attempt_id])
            if chunk.is_last:
                assert tokens is not None, "the last chunk of a prompt gives a token"
                self._connector.commit(chunk.attempt_id, self._payload(chunk, tokens))

    def on_transfers(self, happened: Iterable[TransferEvent], now: int) -> list[Event]:
        """Take over the attempts whose commits are here; the events are for the Stats record."""
        events: list[Event] = []
        for event in happened:
            if isinstance(event, ChunkArrived):
                self._core.renew([event.attempt_id], now)
            elif isinstance(event, Committed):
                events += self._deliver(event, now)
            elif isinstance(event, TransferBroken):
                self._outgoing.drop(event.attempt_id)
                self._send(TransferLost(event.attempt_id, event.is_sender, event.message))
        return events

    def forget_peer(self, worker: int, now: int) -> list[Event]:
        """End the attempts that are computed in that worker's blocks: afterwards nothing here touches them."""
        borrowing = [
            attempt_id for attempt_id, target in self._targets.items() if target.borrows and target.worker == worker
        ]
        return [event for attempt_id in borrowing for event in self._core.drop(attempt_id, now)]

    def close(self) -> None:
        """Stop all transfers."""
        self._connector.close()

    def _expect(self, event: HandoffReserved) -> None:
        attempt_id = event.request_id
        num_tokens = self._core.requests[attempt_id].num_prompt_tokens
        if self._reservations[attempt_id]:
            self._connector.expect(attempt_id, (), num_tokens, 0)
        else:
            start = event.num_cached_tokens
            self._connector.expect(attempt_id, event.block_ids, start, num_tokens - start)

    def _payload(self, chunk: Chunk, tokens: Tokens) -> bytes:
        attempt_id = chunk.attempt_id
        request = self._core.requests[attempt_id]
        assert request.first_step_ns is not None and request.first_token_ns is not None
        first_token = tokens.token_ids[tokens.request_ids.index(attempt_id)]
        commit = Commit(first_token, tokens.logprobs.get(attempt_id), request.first_step_ns, request.first_token_ns)
        return msgspec.msgpack.encode(commit)

    def _deliver(self, event: Committed, now: int) -> list[Event]:
        attempt_id = event.attempt_id
        try:
            commit = msgspec.msgpack.decode(event.payload, type=Commit)
        except msgspec.DecodeError as error:
            self._send(TransferLost(attempt_id, False, f"the commit cannot be read: {error}"))
            return []
        times = {"first_step_ns": commit.first_step_ns, "first_token_ns": commit.first_token_ns}
        events = self._intake.deliver(attempt_id, commit.first_token, now, **times)
        if any(isinstance(one, HandoffDelivered) for one in events):
            self._reservations.pop(attempt_id, None)
            transfer_ns = event.last_byte_ns - event.first_byte_ns
            self._send(Delivered(attempt_id, now, commit.first_token, commit.logprobs, event.num_bytes, transfer_ns))
        return events
