"""POST /v1/responses: formats an answer as a response of items, whole or as events.

Owns the JSON of responses and of their items. Must never wait or submit. ``on_finished`` gets the whole response.
"""

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from diptych.control.errors import DiptychError
from diptych.serving.answers.answer_stream import Delta
from diptych.serving.answers.response.call_readers import AnswerPart, PartKind
from diptych.serving.api.answer_reader import AnswerReader
from diptych.serving.api.chat import new_call_id
from diptych.serving.api.dialect import COMMENT, response_error
from diptych.serving.api.reply import ReplyContext, encode_json
from diptych.serving.api.responses_request import ResponsesBody

PAUSES_AN_EVENT = 5
Reply = dict[str, Any]
_ECHOED = ("instructions", "previous_response_id", "max_output_tokens", "temperature", "top_p", "metadata", "reasoning")


class ResponsesWriter:
    """The Writer of /v1/responses."""

    def __init__(
        self, context: ReplyContext, body: ResponsesBody, reader: AnswerReader, on_finished: Callable[[Reply], None]
    ) -> None:
        self._context = context
        self._body = body
        self._reader = reader
        self._on_finished = on_finished
        self._items: list[Reply] = []  # the last one is open while ``_open`` is not None
        self._open: PartKind | None = None
        self._number = 0  # of the next event
        self._num_pauses = 0

    def opening(self) -> bytes:
        """The response that begins."""
        if self._number:
            return b""
        begun = self._response("in_progress", None)
        return self._event("created", {"response": begun}) + self._event("in_progress", {"response": begun})

    def events(self, deltas: Iterable[Delta]) -> bytes:
        """Events of what is new; the first are preceded by the opening."""
        events = self.opening()
        for delta in deltas:
            for part in self._reader.parts(delta):
                events += self._part_events(part)
            if delta.finish_reason is not None:
                if not self._items:
                    events += self._begin_item(PartKind.CONTENT, "")
                events += self._end_item()
                reply = self._ended(delta)
                events += self._event(reply["status"], {"response": reply})
        return events

    def pause(self) -> bytes:
        """A comment; now and then ``response.in_progress`` once more, for clients that wait for events: Codex hangs up
        when none has come for five minutes, whatever comments there were."""
        self._num_pauses += 1
        if self._num_pauses % PAUSES_AN_EVENT:
            return COMMENT
        return self._event("in_progress", {"response": self._response("in_progress", None)})

    def failure(self, error: DiptychError) -> bytes:
        """The response that failed, which is the last event; what there was of its answer is in it."""
        if self._open is not None:
            self._open = None
            self._items[-1]["status"] = "incomplete"
        reply = {**self._response("failed", None), "error": response_error(error)}
        return self.opening() + self._event("failed", {"response": reply})

    def last_events(self) -> bytes:
        """Nothing: the last event has the whole response."""
        return b""

    def body(self, deltas: Iterable[Delta]) -> bytes:
        """The whole response."""
        ended = None
        for delta in deltas:
            for part in self._reader.parts(delta):
                self._part_events(part)
            ended = delta if delta.finish_reason is not None else ended
        if not self._items:
            self._begin_item(PartKind.CONTENT, "")
        self._end_item()
        assert ended is not None
        return encode_json(self._ended(ended))

    def _ended(self, delta: Delta) -> Reply:
        """The whole response, once its last item has ended."""
        reason = None if delta.finish_reason != "length" else {"reason": "max_output_tokens"}
        if reason is not None:
            self._items[-1]["status"] = "incomplete"
        reply = self._response("completed" if reason is None else "incomplete", reason)
        self._on_finished(reply)
        return reply

    def _response(self, status: str, incomplete: Reply | None) -> Reply:
        body = self._body
        text_format = (body.text or {}).get("format") or {"type": "text"}
        is_over = status != "in_progress"
        return {
            "id": self._context.id,
            "object": "response",
            "created_at": self._context.created,
            "model": self._context.model,
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            **{name: getattr(body, name) for name in _ECHOED},
            "output": list(self._items) if is_over else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "text": {"format": text_format},
            "store": body.store is not False,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
        }

    def _usage(self) -> Reply:
        usage = self._context.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reader.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }

    # -- items --------------------------------------------------------------------------------------------------------

    def _part_events(self, part: AnswerPart) -> bytes:
        if part.kind is PartKind.CALL:
            return self._end_item() + self._begin_item(PartKind.ARGUMENTS, part.text)
        events = b""
        if part.kind is not self._open:
            events = self._end_item() + self._begin_item(part.kind, "")
        item = self._items[-1]
        place: Reply = {"output_index": len(self._items) - 1, "item_id": item["id"]}
        if part.kind is PartKind.ARGUMENTS:
            item["arguments"] += part.text
            return events + self._event("function_call_arguments.delta", {**place, "delta": part.text})
        item["content"][0]["text"] += part.text
        name = "output_text" if part.kind is PartKind.CONTENT else "reasoning_text"
        more: Reply = {"logprobs": []} if part.kind is PartKind.CONTENT else {}
        return events + self._event(f"{name}.delta", {**place, "content_index": 0, "delta": part.text, **more})

    def _begin_item(self, kind: PartKind, name: str) -> bytes:
        self._open = kind
        item = _new_item(kind, name)
        self._items.append(item)
        place = {"output_index": len(self._items) - 1}
        empty = {**item, "content": []} if "content" in item else dict(item)
        events = self._event("output_item.added", {**place, "item": empty})
        if kind is PartKind.ARGUMENTS:
            return events
        part = {"item_id": item["id"], "content_index": 0, "part": dict(item["content"][0])}
        return events + self._event("content_part.added", {**place, **part})

    def _end_item(self) -> bytes:
        if self._open is None:
            return b""
        kind, self._open = self._open, None
        item = self._items[-1]
        item["status"] = "completed"
        place: Reply = {"output_index": len(self._items) - 1, "item_id": item["id"]}
        if kind is PartKind.ARGUMENTS:
            whole = {"name": item["name"], "arguments": item["arguments"]}
            events = self._event("function_call_arguments.done", {**place, **whole})
        else:
            part = item["content"][0]
            name = "output_text" if kind is PartKind.CONTENT else "reasoning_text"
            more: Reply = {"logprobs": []} if kind is PartKind.CONTENT else {}
            place["content_index"] = 0
            events = self._event(f"{name}.done", {**place, "text": part["text"], **more})
            events += self._event("content_part.done", {**place, "part": part})
        return events + self._event("output_item.done", {"output_index": len(self._items) - 1, "item": item})

    def _event(self, name: str, fields: Reply) -> bytes:
        kind = f"response.{name}"
        data = encode_json({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _new_item(kind: PartKind, name: str) -> Reply:
    number = uuid.uuid4().hex[:32]
    if kind is PartKind.ARGUMENTS:
        call: Reply = {"id": f"fc_{number}", "type": "function_call", "call_id": new_call_id(), "name": name}
        return {**call, "arguments": "", "status": "in_progress"}
    if kind is PartKind.REASONING:
        thought: Reply = {"id": f"rs_{number}", "type": "reasoning", "summary": []}
        return {**thought, "content": [{"type": "reasoning_text", "text": ""}], "status": "in_progress"}
    message: Reply = {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "in_progress"}
    return {**message, "content": [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]}
