"""POST /v1/responses: formats an answer as a response of items, whole or as events.

Owns the JSON of responses and of their items. Must never wait or submit.
"""

import uuid
from collections.abc import Iterable
from typing import Any

import msgspec

from diptych.control.errors import DiptychError
from diptych.serving import sliced_json
from diptych.serving.answers.answer_stream import Delta
from diptych.serving.answers.response.call_readers import AnswerPart, PartKind
from diptych.serving.api.answer_reader import AnswerReader
from diptych.serving.api.api_flavour import COMMENT, response_error
from diptych.serving.api.chat import new_call_id
from diptych.serving.api.reply import ReplyContext, arguments_object, encode_json
from diptych.serving.api.responses_items import sealed_reasoning
from diptych.serving.api.responses_request import ResponsesBody, wants_sealed_reasoning, wants_summary
from diptych.serving.api.responses_tools import ClientTool, ClientTools
from diptych.serving.api.text_argument import TextArgument

PAUSES_AN_EVENT = 5
Reply = dict[str, Any]
_ECHOED = ("instructions", "previous_response_id", "max_output_tokens", "temperature", "top_p", "metadata", "reasoning")


class ResponsesWriter:
    """The Writer of /v1/responses. echo: what ``echoed`` gives for the body, where it is there already."""

    def __init__(
        self,
        context: ReplyContext,
        body: ResponsesBody,
        reader: AnswerReader,
        tools: ClientTools,
        echo: Reply | None = None,
    ) -> None:
        self._context = context
        self._body = body
        self._reader = reader
        self._tools = tools
        self._argument = TextArgument()  # of the call that is open, where its tool is a custom one
        self._seals_reasoning = wants_sealed_reasoning(body)
        self._has_summary = wants_summary(body)
        self._echo = echoed(body) if echo is None else echo
        self._items: list[Reply] = []  # the last one is open while ``_open`` is not None
        self._open: PartKind | None = None
        self._pieces: list[str] = []  # of the text, arguments or input of the open item, which gets them at its end
        self._number = 0  # of the next event
        self._num_pauses = 0
        self.ended: Reply | None = None  # the whole response, from its end on

    def opening(self) -> bytes:
        """The response that begins."""
        if self._number:
            return b""
        begun = encode_json(self._response("in_progress", None))
        return b"".join((*self._whole("created", begun), *self._whole("in_progress", begun)))

    def events(self, deltas: Iterable[Delta]) -> bytes:
        """Events of what is new; the first are preceded by the opening."""
        events = [self.opening()]
        for delta in deltas:
            events += map(self._part_events, self._reader.parts(delta))
            if delta.finish_reason is not None:
                if not self._items:
                    events.append(self._begin_item(PartKind.CONTENT, ""))
                events.append(self._end_item(_item_status(delta)))
                self._end(delta)
        return b"".join(events)

    def pause(self) -> bytes:
        """A comment; now and then ``response.in_progress`` once more, for clients that wait for events: Codex hangs up
        when none has come for five minutes, whatever comments there were."""
        self._num_pauses += 1
        if self._num_pauses % PAUSES_AN_EVENT:
            return COMMENT
        return b"".join(self._whole("in_progress", encode_json(self._response("in_progress", None))))

    def failure(self, error: DiptychError) -> bytes:
        """The response that failed, which is the last event; what there was of its answer is in it."""
        if self._open is not None:
            self._open = None
            self._items[-1]["status"] = "incomplete"
            self._settle(self._items[-1])
        reply = {**self._response("failed", None), "error": response_error(error)}
        return self.opening() + b"".join(self._whole("failed", encode_json(reply)))

    def last_events(self) -> bytes:
        """The whole response."""
        assert self.ended is not None
        return b"".join(self._whole(self.ended["status"], encode_json(self.ended)))

    def body(self, deltas: Iterable[Delta]) -> bytes:
        """The whole response."""
        self.read(deltas)
        return encode_json(self.ended)

    def read(self, deltas: Iterable[Delta]) -> None:
        """Take a whole answer, of which no events are sent."""
        ended = None
        for delta in deltas:
            for part in self._reader.parts(delta):
                self._part_events(part)
            ended = delta if delta.finish_reason is not None else ended
        if not self._items:
            self._begin_item(PartKind.CONTENT, "")
        assert ended is not None
        self._end_item(_item_status(ended))
        self._end(ended)

    def _end(self, delta: Delta) -> None:
        """The last item has ended."""
        reason = None if delta.finish_reason != "length" else {"reason": "max_output_tokens"}
        self.ended = self._response("completed" if reason is None else "incomplete", reason)

    def _response(self, status: str, incomplete: Reply | None) -> Reply:
        body = self._body
        is_over = status != "in_progress"
        return {
            "id": self._context.id,
            "object": "response",
            "created_at": self._context.created,
            "model": self._context.model,
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            **{name: self._echo[name] for name in _ECHOED},
            "output": list(self._items) if is_over else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            **{name: self._echo[name] for name in ("tool_choice", "tools", "text")},
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
        if part.kind is PartKind.ARGUMENTS:
            return events + self._argument_events(item, part.text)
        self._pieces.append(part.text)
        name = "output_text" if part.kind is PartKind.CONTENT else "reasoning_text"
        more: Reply = {"logprobs": []} if part.kind is PartKind.CONTENT else {}
        fields = {**self._place(), "content_index": 0, "delta": part.text, **more}
        events += self._event(f"{name}.delta", fields)
        return events + self._summary_events(item, part.text) if part.kind is PartKind.REASONING else events

    def _summary_events(self, item: Reply, text: str) -> bytes:
        """The reasoning once more, where the client wants a summary: many show nothing else of it."""
        if not self._has_summary:
            return b""
        place, events = {**self._place(), "summary_index": 0}, b""
        if not item["summary"]:
            events = self._event("reasoning_summary_part.added", {**place, "part": _summary("")})
            item["summary"] = [_summary("")]
        return events + self._event("reasoning_summary_text.delta", {**place, "delta": text})

    def _place(self) -> Reply:
        return {"output_index": len(self._items) - 1, "item_id": self._items[-1]["id"]}

    def _argument_events(self, item: Reply, text: str) -> bytes:
        """More of a call's arguments; those of a search are an object, which is there when it is whole."""
        if item["type"] == "custom_tool_call":
            text = self._argument.feed(text)
            return self._custom_input(text)
        self._pieces.append(text)
        if item["type"] != "function_call":
            return b""
        return self._event("function_call_arguments.delta", {**self._place(), "delta": text})

    def _custom_input(self, text: str) -> bytes:
        self._pieces.append(text)
        return self._event("custom_tool_call_input.delta", {**self._place(), "delta": text}) if text else b""

    def _begin_item(self, kind: PartKind, name: str) -> bytes:
        self._open = kind
        item = _new_call(self._tools.called(name)) if kind is PartKind.ARGUMENTS else _new_item(kind)
        self._argument = TextArgument()
        self._items.append(item)
        place = {"output_index": len(self._items) - 1}
        empty = {**item, "content": []} if "content" in item else dict(item)
        if item["type"] == "tool_search_call":
            empty["arguments"] = {}
        events = self._event("output_item.added", {**place, "item": empty})
        if kind is PartKind.ARGUMENTS:
            return events
        part = {"item_id": item["id"], "content_index": 0, "part": dict(item["content"][0])}
        return events + self._event("content_part.added", {**place, **part})

    def _end_item(self, status: str = "completed") -> bytes:
        if self._open is None:
            return b""
        kind, self._open = self._open, None
        item = self._items[-1]
        item["status"] = status
        events = self._end_call(item) if kind is PartKind.ARGUMENTS else self._end_text(item, kind)
        return events + self._event("output_item.done", {"output_index": len(self._items) - 1, "item": item})

    def _settle(self, item: Reply) -> None:
        """What has come of the open item becomes its own. (To add each piece would copy all before it.)"""
        text = "".join(self._pieces)
        self._pieces.clear()
        if "content" in item:
            item["content"][0]["text"] += text
            for summary in item.get("summary") or ():
                summary["text"] += text
        else:
            item["input" if item["type"] == "custom_tool_call" else "arguments"] += text

    def _end_text(self, item: Reply, kind: PartKind) -> bytes:
        self._settle(item)
        part = item["content"][0]
        if kind is PartKind.REASONING and self._seals_reasoning:
            item["encrypted_content"] = sealed_reasoning(part["text"])
        name = "output_text" if kind is PartKind.CONTENT else "reasoning_text"
        more: Reply = {"logprobs": []} if kind is PartKind.CONTENT else {}
        place = {**self._place(), "content_index": 0}
        events = self._event(f"{name}.done", {**place, "text": part["text"], **more})
        events += self._event("content_part.done", {**place, "part": part})
        if kind is PartKind.REASONING and item["summary"]:
            place, [whole] = {**self._place(), "summary_index": 0}, item["summary"]
            events += self._event("reasoning_summary_text.done", {**place, "text": whole["text"]})
            events += self._event("reasoning_summary_part.done", {**place, "part": whole})
        return events

    def _end_call(self, item: Reply) -> bytes:
        if item["type"] == "custom_tool_call":
            events = self._custom_input(self._argument.rest())
            self._settle(item)
            return events + self._event("custom_tool_call_input.done", {**self._place(), "input": item["input"]})
        self._settle(item)
        if item["type"] == "tool_search_call":
            item["arguments"] = arguments_object(item["arguments"])
            return b""
        whole = {"name": item["name"], "arguments": item["arguments"]}
        return self._event("function_call_arguments.done", {**self._place(), **whole})

    def _whole(self, name: str, response: bytes) -> tuple[bytes, bytes, bytes]:
        """The pieces of an event with the whole response, which may be long: it is copied where they are joined."""
        kind, number = b"response." + name.encode(), self._number
        self._number += 1
        head = b'event: %b\ndata: {"type":"%b","sequence_number":%d,"response":' % (kind, kind, number)
        return head, response, b"}\n\n"

    def _event(self, name: str, fields: Reply) -> bytes:
        kind = f"response.{name}"
        data = encode_json({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def echoed(body: ResponsesBody) -> Reply:
    """The fields of a request that each whole response repeats. Texts, lists and objects are JSON already: they may be
    long, and are written once, in steps that let others go on."""
    text_format = (body.text or {}).get("format") or {"type": "text"}
    others = {"tool_choice": body.tool_choice or "auto", "tools": body.tools or [], "text": {"format": text_format}}
    fields = {**{name: getattr(body, name) for name in _ECHOED}, **others}
    return {name: _written(value) for name, value in fields.items()}


def _written(value: Any) -> Any:
    return msgspec.Raw(b"".join(sliced_json.encode(value))) if isinstance(value, str | list | dict) else value


def _summary(text: str) -> Reply:
    return {"type": "summary_text", "text": text}


def _item_status(delta: Delta) -> str:
    """Status of the last item of an answer that ended so."""
    return "incomplete" if delta.finish_reason == "length" else "completed"


def _new_call(tool: ClientTool) -> Reply:
    """An empty call, as an item that the client knows for such a tool."""
    number, call_id = uuid.uuid4().hex[:32], new_call_id()
    if tool.kind == "tool_search":
        search: Reply = {"id": f"tsc_{number}", "type": "tool_search_call", "execution": "client", "call_id": call_id}
        return {**search, "arguments": "", "status": "in_progress"}
    namespace = {} if tool.namespace is None else {"namespace": tool.namespace}
    if tool.kind == "custom":
        custom: Reply = {"id": f"ctc_{number}", "type": "custom_tool_call", "call_id": call_id, "name": tool.name}
        return {**custom, **namespace, "input": "", "status": "in_progress"}
    call: Reply = {"id": f"fc_{number}", "type": "function_call", "call_id": call_id, "name": tool.name}
    return {**call, **namespace, "arguments": "", "status": "in_progress"}


def _new_item(kind: PartKind) -> Reply:
    number = uuid.uuid4().hex[:32]
    if kind is PartKind.REASONING:
        thought: Reply = {"id": f"rs_{number}", "type": "reasoning", "summary": []}
        return {**thought, "content": [{"type": "reasoning_text", "text": ""}], "status": "in_progress"}
    message: Reply = {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "in_progress"}
    return {**message, "content": [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]}
