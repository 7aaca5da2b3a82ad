"""POST /v1/messages: formats an answer as Anthropic's message of blocks, whole or as events.

Owns the JSON of blocks. Must never wait or submit.
"""

import base64
import uuid
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from diptych.control.errors import DiptychError
from diptych.serving.answers.answer_stream import Delta
from diptych.serving.answers.response.call_readers import AnswerPart, PartKind
from diptych.serving.api.answer_reader import AnswerReader
from diptych.serving.api.api_flavour import PING, messages_failure
from diptych.serving.api.reply import ReplyContext, arguments_object, encode_json, gather

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "abort": "end_turn"}
_OPEN_BLOCKS: dict[PartKind, dict[str, Any]] = {
    PartKind.CONTENT: {"type": "text", "text": ""},
    PartKind.REASONING: {"type": "thinking", "thinking": "", "signature": ""},
}


class MessagesWriter:
    """The Writer of /v1/messages. applied_edits: of the context (None: the client has named none)."""

    def __init__(
        self, context: ReplyContext, reader: AnswerReader, applied_edits: Sequence[dict[str, Any]] | None = None
    ) -> None:
        self._edits: dict[str, Any] = {}
        if applied_edits is not None:
            self._edits["context_management"] = {"applied_edits": applied_edits}
        self._context = context
        self._reader = reader
        self._has_started = False
        self._num_blocks = 0
        self._open: PartKind | None = None  # of the block that the stream is in
        self._thought = blake2b()  # of the reasoning in it

    def opening(self) -> bytes:
        """The head of the message. What its prompt costs may not be known yet: the end of the message says it again."""
        if self._has_started:
            return b""
        self._has_started = True
        head = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", {"message": {**head, "usage": self._usage(is_final=False)}})

    def events(self, deltas: Iterable[Delta]) -> bytes:
        """Events of what is new; the first are preceded by the opening."""
        events = self.opening()
        for delta in deltas:
            events += b"".join(map(self._part_events, self._reader.parts(delta)))
            if delta.finish_reason is not None:
                if not self._num_blocks:
                    events += self._part_events(AnswerPart(PartKind.CONTENT, ""))
                events += self._close_block() + _event(
                    "message_delta",
                    {"delta": self._ending(delta), "usage": self._usage(is_final=True), **self._edits},
                )
        return events

    def pause(self) -> bytes:
        """Anthropic's ping."""
        return PING

    def failure(self, error: DiptychError) -> bytes:
        """An event with the error, which is the last."""
        return messages_failure(error)

    def last_events(self) -> bytes:
        """The end of the message."""
        return _event("message_stop", {})

    def body(self, deltas: Iterable[Delta]) -> bytes:
        """The whole message."""
        [delta] = gather(deltas, 1)
        answer = self._reader.whole(delta)
        blocks: list[dict[str, Any]] = []
        if answer.reasoning is not None:
            signature = _signature(blake2b(answer.reasoning.encode()))
            blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": signature})
        if answer.content or not answer.calls:
            blocks.append({"type": "text", "text": answer.content or ""})
        for call in answer.calls:
            blocks.append(
                {"type": "tool_use", "id": _call_id(), "name": call.name, "input": arguments_object(call.arguments)}
            )
        usage = self._usage(is_final=True)
        return encode_json({**self._head(), "content": blocks, **self._ending(delta), "usage": usage, **self._edits})

    def _head(self) -> dict[str, Any]:
        return {"id": self._context.id, "type": "message", "role": "assistant", "model": self._context.model}

    def _usage(self, *, is_final: bool) -> dict[str, Any]:
        """input_tokens: those that were computed; the cached ones are beside them."""
        usage = self._context.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"] if is_final else 0,
        }

    def _ending(self, delta: Delta) -> dict[str, Any]:
        stop = self._context.generation.streams[delta.index].stop_reason
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        reason = _STOP_REASONS.get(delta.finish_reason or "stop", "end_turn")
        if reason == "end_turn" and self._reader.has_calls(delta.index):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": None}

    def _part_events(self, part: AnswerPart) -> bytes:
        if part.kind is PartKind.CALL:
            block = {"type": "tool_use", "id": _call_id(), "name": part.text, "input": {}}
            return self._close_block() + self._open_block(PartKind.ARGUMENTS, block)
        events = b""
        if part.kind is not self._open:
            events = self._close_block() + self._open_block(part.kind, _OPEN_BLOCKS[part.kind])
        delta: dict[str, Any] = {"type": "text_delta", "text": part.text}
        if part.kind is PartKind.REASONING:
            self._thought.update(part.text.encode())
            delta = {"type": "thinking_delta", "thinking": part.text}
        elif part.kind is PartKind.ARGUMENTS:
            delta = {"type": "input_json_delta", "partial_json": part.text}
        return events + _event("content_block_delta", {"index": self._num_blocks - 1, "delta": delta})

    def _open_block(self, kind: PartKind, block: dict[str, Any]) -> bytes:
        self._open = kind
        self._num_blocks += 1
        return _event("content_block_start", {"index": self._num_blocks - 1, "content_block": block})

    def _close_block(self) -> bytes:
        if self._open is None:
            return b""
        kind, self._open = self._open, None
        place, events = {"index": self._num_blocks - 1}, b""
        if kind is PartKind.REASONING:
            delta = {"type": "signature_delta", "signature": _signature(self._thought)}
            self._thought = blake2b()
            events = _event("content_block_delta", {**place, "delta": delta})
        return events + _event("content_block_stop", place)


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encode_json({"type": name, **fields}) + b"\n\n"


def _signature(thought: blake2b) -> str:
    """A signature for clients that do not send reasoning back without one. Nothing here asks for it."""
    return base64.b64encode(thought.digest()).decode()


def _call_id() -> str:
    return f"toolu_{uuid.uuid4().hex[:24]}"
