"""The handoffs that one engine has a part in: prompts that it computes for others, and those that it will continue.

engine_handoff.py has the protocols; here the core's commands are carried out.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from diptych.control.commands import Prefill, Reserve
from diptych.control.errors import ErrorRecord, WorkerError
from diptych.control.events import Event, HandoffReleased, HandoffReserved, RequestAdmitted, RequestFinished
from diptych.control.request import FinishReason
from diptych.control.slo import NS_PER_S, LatencyBreakdown
from diptych.serving.api.error_format import error_body
from diptych.serving.front.capabilities import HandoffKind
from diptych.serving.front.engine_connection import ConnectionPool
from diptych.serving.front.engine_exchange import EngineExchange
from diptych.serving.front.engine_handoff import (
    PrefillLeg,
    PrefillOwner,
    prefill_fields,
    prefill_parameters,
    slot_of,
)
from diptych.serving.front.engine_load import EngineLoad
from diptych.serving.front.engine_request import RequestFields
from diptych.serving.front.engine_spec import EngineSpec
from diptych.serving.front.relay_stream import EngineRefusal, RelayStream
from diptych.serving.front.reply_chunks import EngineUsage, error_message


class HandoffOwner(PrefillOwner, Protocol):
    """The worker of a HandoffAttempts."""

    spec: EngineSpec
    pool: ConnectionPool
    load: EngineLoad
    exchanges: dict[str, EngineExchange]

    @property
    def handoff_kind(self) -> HandoffKind:
        """How its engine hands over ("": not at all)."""
        ...

    def stream_of(self, request_id: str) -> RelayStream | None:
        """The open stream of a request."""
        ...

    def asked(self, stream: RelayStream) -> RequestFields:
        """What its engine is asked for a stream."""
        ...

    def cached_of(self, stream: RelayStream, usage: EngineUsage) -> int:
        """Cached tokens in the front's own count."""
        ...

    def on_prompt_computed(self, stream: RelayStream) -> None:
        """Take in that the engine's cache holds the prompt."""
        ...


class HandoffAttempts:
    """The handoffs that one engine has a part in; carries out the core's commands for them."""

    def __init__(self, worker: HandoffOwner) -> None:
        self.legs: dict[str, PrefillLeg] = {}
        self._worker = worker
        self._computed: dict[str, None] = {}  # attempts whose KV the engine holds for another
        self._reserved: dict[str, None] = {}  # attempts that this engine will continue

    def reserve(self, command: Reserve) -> None:
        """Carry out commands.Reserve: an engine has room unless it says otherwise."""
        worker, attempt_id = self._worker, command.attempt_id
        stream = worker.stream_of(command.request_id)
        if stream is None or not worker.handoff_kind or not stream.can_resume:
            worker.report([HandoffReleased(worker.clock(), attempt_id)])
            return
        self._reserved[attempt_id] = None
        worker.report([HandoffReserved(worker.clock(), attempt_id, 0)])
        slot = slot_of(stream, attempt_id)
        slot.await_parameters(lambda parameters: self._decode(attempt_id, stream, slot.prefill, parameters))

    def prefill(self, command: Prefill) -> None:
        """Carry out commands.Prefill: ask the engine to compute the prompt for another engine."""
        worker, kind = self._worker, self._worker.handoff_kind
        stream = worker.stream_of(command.request_id)
        if stream is None or not kind or not stream.can_resume:
            worker.report([HandoffReleased(worker.clock(), command.attempt_id)])
            return
        slot = slot_of(stream, command.attempt_id)
        slot.prefill = worker.number
        stream.is_with_engine = True
        parameters = prefill_parameters(kind, worker.spec)
        leg = PrefillLeg(worker, command, stream, slot, kind)
        self.legs[command.attempt_id] = leg
        worker.load.on_sent(command.attempt_id, stream.num_estimated_tokens, worker.clock())
        leg.begin(worker.pool, prefill_fields(kind, worker.asked(stream)).question(stream, parameters))
        if kind == "bootstrap":
            slot.give(parameters)

    def _decode(self, attempt_id: str, stream: RelayStream, prefill: int, parameters: Mapping[str, Any]) -> None:
        """The prompt is computed, or is being computed: ask this engine to go on with it."""
        worker = self._worker
        if attempt_id not in self._reserved or stream.attempt_id != attempt_id:
            return
        del self._reserved[attempt_id]
        question = worker.asked(stream).question(stream, parameters)
        exchange = EngineExchange(worker, attempt_id, stream, question, prefill)
        worker.exchanges[attempt_id] = exchange
        worker.load.on_sent(attempt_id, stream.num_estimated_tokens, worker.clock())
        exchange.begin(worker.pool)

    def release(self, attempt_id: str) -> None:
        """The decode engine has taken over."""
        if (leg := self.legs.pop(attempt_id, None)) is not None:
            leg.release()
            self._worker.load.on_over(attempt_id, self._worker.clock())
        self._computed.pop(attempt_id, None)
        self._worker.report([HandoffReleased(self._worker.clock(), attempt_id)])

    def drop(self, attempt_id: str) -> None:
        """The attempt is over, whatever its state."""
        if (leg := self.legs.pop(attempt_id, None)) is not None:
            leg.cancel()
            self._worker.load.on_over(attempt_id, self._worker.clock())
        self._computed.pop(attempt_id, None)
        self._reserved.pop(attempt_id, None)

    def drop_all(self) -> None:
        """The engine is gone."""
        for attempt_id in [*self.legs, *self._computed, *self._reserved]:
            self.drop(attempt_id)

    def break_off_overdue(self, now: int, limit_s: float) -> None:
        """Prompts that take longer than an engine may."""
        for leg in list(self.legs.values()):
            if now - leg.begun_ns > limit_s * NS_PER_S:
                leg.break_off(f"no reply within {limit_s:g} s")

    # -- what legs tell -----------------------------------------------------------------------------------------------

    def on_computed(self, leg: PrefillLeg) -> None:
        """The prompt is computed."""
        worker, now = self._worker, self._worker.clock()
        self.legs.pop(leg.attempt_id, None)
        self._computed[leg.attempt_id] = None
        worker.load.on_first_token(leg.attempt_id, now)
        worker.load.on_over(leg.attempt_id, now)
        worker.on_prompt_computed(leg.stream)
        if leg.usage is not None and leg.usage.cached_tokens is not None:
            cached = worker.cached_of(leg.stream, leg.usage)
            worker.report([RequestAdmitted(now, leg.attempt_id, cached, is_first=True)])

    def on_over(self, leg: PrefillLeg) -> None:
        """The leg ended without a computed prompt."""
        self.legs.pop(leg.attempt_id, None)
        self._worker.load.on_over(leg.attempt_id, self._worker.clock())

    def on_refused(self, leg: PrefillLeg, status: int, body: bytes) -> None:
        """The engine refuses the request itself: its client gets that."""
        self.on_over(leg)
        leg.stream.is_with_engine = False
        message = error_message(body, f"{self._worker.name} answered with status {status}")
        error = WorkerError(message, code="engine_refused")
        if not leg.stream.num_tokens:
            leg.stream.refusal = EngineRefusal(status if status >= 400 else 502, body or error_body(error), message)
        end: Event = RequestFinished(
            self._worker.clock(), leg.attempt_id, FinishReason.ERROR, 0, 0, 0, LatencyBreakdown(0, 0, 0, 0), None,
            ErrorRecord.of(error),
        )  # fmt: skip
        self._worker.report([end])
