"""A prompt that one engine computes and another continues, by the engines' own protocols, in the words of a handoff.

nixl (vLLM): the prefill engine answers one token's worth with the parameters of a transfer; the decode engine gets them
with the request, and reads the KV itself.

    Reserve -> HandoffReserved     Prefill -> (prefill request) -> parameters -> (decode request) -> first token:
                                                                              HandoffDelivered -> Release

bootstrap (SGLang): both engines get the request at once, with an address and a number under which they meet.

What a worker of ours says with blocks, an engine says with the parameters: a HandoffSlot on the client's stream carries
them from one port to the other. Every failure of a leg is told to the core as what it is (a refusal, a transfer that
cannot be made, a leg that holds nothing any more); the core closes the other leg.
"""

import secrets
from collections.abc import Mapping
from typing import Any, Protocol

from diptych.control.commands import Prefill
from diptych.control.events import TransferFailed
from diptych.serving import edge_limits
from diptych.serving.front.capabilities import HandoffKind
from diptych.serving.front.engine_connection import ConnectionPool, EngineCall
from diptych.serving.front.engine_exchange import ELSEWHERE, ExchangeOwner
from diptych.serving.front.engine_request import EngineRequest, RequestFields, id_header
from diptych.serving.front.engine_spec import EngineSpec
from diptych.serving.front.relay_stream import HandoffSlot, RelayStream
from diptych.serving.front.reply_chunks import EngineUsage, UnreadableReplyError, read_chunk

BOOTSTRAP_PORT = 8998
ROOMS = 1 << 63
NIXL_REQUEST: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
NOT_FOR_ONE_TOKEN = frozenset(("stream_options", "min_tokens", "return_token_ids"))


def slot_of(stream: RelayStream, attempt_id: str) -> HandoffSlot:
    """The slot of this attempt; one of an older attempt is gone."""
    if stream.slot is None or stream.slot.attempt_id != attempt_id:
        stream.slot = HandoffSlot(attempt_id)
    return stream.slot


class PrefillOwner(ExchangeOwner, Protocol):
    """The worker that a prefill leg belongs to."""

    def on_leg_computed(self, leg: "PrefillLeg") -> None:
        """The prompt is computed."""
        ...

    def on_leg_lost(self, leg: "PrefillLeg", words: str) -> None:
        """The leg broke off: the engine may be gone."""
        ...

    def on_defect(self, attempt_id: str, error: BaseException) -> None:
        """Code of this process has failed over this attempt."""
        ...

    def on_leg_refused(self, leg: "PrefillLeg", status: int, body: bytes) -> None:
        """The engine does not want it, and no other would."""
        ...


class PrefillLeg:
    """The request to the engine that computes the prompt: a ReplyListener. Ends exactly once."""

    def __init__(
        self, owner: PrefillOwner, command: Prefill, stream: RelayStream, slot: HandoffSlot, kind: HandoffKind
    ) -> None:
        self.attempt_id = command.attempt_id
        self.stream = stream
        self.is_over = False
        self.begun_ns = owner.clock()
        self.usage: EngineUsage | None = None
        self._owner = owner
        self._slot = slot
        self._kind = kind
        self._call: EngineCall | None = None
        self._status = 0
        self._body = bytearray()

    def begin(self, pool: ConnectionPool, question: EngineRequest) -> None:
        """Send the request."""
        self._call = pool.send("POST", question.path, question.body, self, headers=id_header(self.attempt_id))

    def cancel(self) -> None:
        """Cancel a prefill that is not wanted any more."""
        self._end(is_whole=False)

    def release(self) -> None:
        """The decode engine has what it needs."""
        self._end(is_whole=True)

    def break_off(self, words: str) -> None:
        """Break off: it takes too long, or the connection ended."""
        if not self.is_over:
            self._end(is_whole=False)
            self._owner.on_leg_lost(self, words)

    # -- ReplyListener ------------------------------------------------------------------------------------------------

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self._status = status

    def on_data(self, data: bytes) -> None:
        """Drop the engine's own answer, which is read to its end and not needed."""
        if self._kind == "nixl" or self._status != 200:
            self._body += data
            limit = edge_limits.ENGINE_REPLY_BYTES if self._status == 200 else edge_limits.ENGINE_REFUSAL_BYTES
            if len(self._body) > limit:
                self.break_off(f"the reply (status {self._status}) is longer than {limit} bytes")

    def on_end(self) -> None:
        if self.is_over:
            return
        if self._status != 200:
            self._on_refusal()
            return
        if self._kind == "bootstrap":
            self._computed()
            return
        try:
            reply = read_chunk(bytes(self._body))
        except UnreadableReplyError as error:
            self.break_off(str(error))
            return
        if not reply.kv_transfer_params:
            self._end(is_whole=True)
            words = f"{self._owner.name} computed the prompt and gave no kv_transfer_params"
            self._owner.report([TransferFailed(self._owner.clock(), self.attempt_id, True, words)])
            return
        self.usage = reply.usage
        self._computed()
        self._slot.give({"kv_transfer_params": reply.kv_transfer_params})

    def on_failure(self, words: str) -> None:
        self.break_off(words)

    def on_defect(self, error: Exception) -> None:
        self.is_over = True
        self._owner.on_defect(self.attempt_id, error)

    def _on_refusal(self) -> None:
        status, body = self._status, bytes(self._body)
        if (status in ELSEWHERE or status >= 500) or status in (401, 403):
            self.break_off(f"status {status}")
            return
        self._end(is_whole=True)
        self._owner.on_leg_refused(self, status, body)

    def _computed(self) -> None:
        self._end(is_whole=True)
        self._owner.on_leg_computed(self)

    def _end(self, *, is_whole: bool) -> None:
        if not self.is_over:
            self.is_over = True
            if self._call is not None:
                (self._call.release if is_whole else self._call.abort)()


def prefill_parameters(kind: HandoffKind, spec: EngineSpec) -> dict[str, Any]:
    """What the prefill engine gets with the request; for bootstrap, the decode engine gets the same."""
    if kind == "nixl":
        return {"kv_transfer_params": NIXL_REQUEST}
    host, _, port = spec.bootstrap.rpartition(":") if spec.bootstrap else (spec.address[0], "", str(BOOTSTRAP_PORT))
    return {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": secrets.randbelow(ROOMS)}


def prefill_fields(kind: HandoffKind, asked: RequestFields) -> RequestFields:
    """What the prefill engine is asked: one token and no stream (nixl), or the same as the decode engine."""
    if kind == "bootstrap":
        return asked
    fields = {name: value for name, value in asked.fields.items() if name not in NOT_FOR_ONE_TOKEN}
    fields |= {"stream": False, "max_tokens": 1}
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    return RequestFields(asked.path, fields, asked.resumes)
