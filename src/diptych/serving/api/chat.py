"""POST /v1/chat/completions: formats answers as OpenAI's chat completions.

Owns the JSON of chat choices. Must never wait or submit.
"""

import uuid
from collections.abc import Iterable
from typing import Any

from diptych.control.errors import DiptychError
from diptych.serving.answers.answer_stream import Delta
from diptych.serving.answers.response.call_readers import AnswerPart, PartKind
from diptych.serving.answers.response.response_parser import ReadAnswer
from diptych.serving.api.answer_reader import AnswerReader
from diptych.serving.api.api_flavour import COMMENT, chat_failure
from diptych.serving.api.protocol import ChatBody
from diptych.serving.api.reply import ReplyContext, chat_logprobs, encode_json, gather, prompt_logprobs

_PLAIN_CHOICE = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}'
PLAIN = AnswerReader()


def new_call_id(length: int = 0) -> str:
    """An id for a tool call. length: where the chat template wants an exact one."""
    return uuid.uuid4().hex[:length] if length else f"call_{uuid.uuid4().hex[:24]}"


class ChatWriter:
    """The Writer of /v1/chat/completions. id_length: see ``new_call_id``."""

    def __init__(self, context: ReplyContext, body: ChatBody, reader: AnswerReader = PLAIN, id_length: int = 0) -> None:
        self._context = context
        self._reader = reader
        self._id_length = id_length
        self._top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        self._is_plain = not body.logprobs and not body.return_token_ids and reader.is_plain
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._prefix = context.event_prefix("chat.completion.chunk")
        self._plain = context.plain_event("chat.completion.chunk", _PLAIN_CHOICE)
        self._num_calls = [0] * len(context.generation.streams)
        self._is_open = False
        self._started = [False] * len(context.generation.streams)

    def opening(self) -> bytes:
        """The role of each sequence."""
        if self._is_open:
            return b""
        self._is_open = True
        suffix = self._context.usage_suffix()
        return b"".join(self._prefix + self._opening(index) + suffix for index in range(len(self._started)))

    def events(self, deltas: Iterable[Delta]) -> bytes:
        """The events of what is new; the first are preceded by the opening."""
        suffix = self._context.usage_suffix()
        pieces = [] if self._is_open else [self.opening()]
        for delta in deltas:
            is_first = not self._started[delta.index]
            self._started[delta.index] = True
            if self._is_plain and delta.finish_reason is None:
                pieces.append(self._plain % (delta.index, encode_json(delta.text), suffix))
            else:
                choices = self._choices(delta, is_first=is_first)
                pieces += [self._prefix + encode_json(choice) + suffix for choice in choices]
        return b"".join(pieces)

    def pause(self) -> bytes:
        """A comment."""
        return COMMENT

    def failure(self, error: DiptychError) -> bytes:
        """An event with the error."""
        return chat_failure(error)

    def last_events(self) -> bytes:
        """The usage, when it was asked for."""
        if not self._context.wants_usage:
            return b""
        reply = {**self._context.head("chat.completion.chunk"), "choices": [], "usage": self._context.usage()}
        return b"data: " + encode_json(reply) + b"\n\n"

    def body(self, deltas: Iterable[Delta]) -> bytes:
        """The whole reply."""
        whole = gather(deltas, len(self._context.generation.streams))
        reply = {
            **self._context.head("chat.completion"),
            "choices": [self._whole_choice(delta) for delta in whole],
            "usage": self._context.usage(),
        }
        if self._wants_prompt_logprobs:
            first = self._context.generation.streams[0]
            reply["prompt_logprobs"] = prompt_logprobs(first.prompt_logprobs, self._context.tokenizer)
        return encode_json(reply)

    def _whole_choice(self, delta: Delta) -> dict[str, Any]:
        answer = self._reader.whole(delta)
        return {**self._choice(delta, is_first=True), "message": self._message(answer)}

    def _message(self, answer: ReadAnswer) -> dict[str, Any]:
        content = answer.content if answer.content is not None or answer.calls else ""
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning is not None:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [
                {
                    "id": new_call_id(self._id_length),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in answer.calls
            ]
        return message

    def _choices(self, delta: Delta, *, is_first: bool) -> list[dict[str, Any]]:
        """A chunk's choice for every part of the answer that is new. Log probabilities, token ids and the end of the
        answer are in the last of them."""
        parts = [self._delta_of(delta.index, part) for part in self._reader.parts(delta)]
        last = self._choice(delta, is_first=is_first)
        carries = delta.finish_reason is not None or last["logprobs"] is not None or "token_ids" in last
        if not parts:
            return [{**last, "delta": {"content": ""}}] if carries else []
        before = [{"index": delta.index, "delta": part, "logprobs": None, "finish_reason": None} for part in parts[:-1]]
        return [*before, {**last, "delta": parts[-1]}]

    def _delta_of(self, index: int, part: AnswerPart) -> dict[str, Any]:
        if part.kind is PartKind.CONTENT:
            return {"content": part.text}
        if part.kind is PartKind.REASONING:
            return {"reasoning_content": part.text}
        call: dict[str, Any] = {"index": self._num_calls[index] - 1, "function": {"arguments": part.text}}
        if part.kind is PartKind.CALL:
            call = {
                "index": self._num_calls[index],
                "id": new_call_id(self._id_length),
                "type": "function",
                "function": {"name": part.text, "arguments": ""},
            }
            self._num_calls[index] += 1
        return {"tool_calls": [call]}

    def _opening(self, index: int) -> bytes:
        opening = {"role": "assistant", "content": ""}
        return encode_json({"index": index, "delta": opening, "logprobs": None, "finish_reason": None})

    def _choice(self, delta: Delta, *, is_first: bool) -> dict[str, Any]:
        logprobs = None
        if self._top_logprobs is not None and delta.logprobs:
            logprobs = chat_logprobs(delta.logprobs, self._top_logprobs, self._context.tokenizer)
        reason = delta.finish_reason
        if reason == "stop" and self._reader.has_calls(delta.index):
            reason = "tool_calls"
        choice: dict[str, Any] = {"index": delta.index, "logprobs": logprobs, "finish_reason": reason}
        choice.update(self._context.token_ids(delta, is_first=is_first))
        if delta.finish_reason is not None:
            choice["stop_reason"] = self._context.generation.streams[delta.index].stop_reason
        return choice
