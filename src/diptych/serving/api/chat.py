"""POST /v1/chat/completions: formats deltas as OpenAI's chat completions.

Owns the JSON of chat choices. Must never wait or submit.
"""

from collections.abc import Iterable
from typing import Any

from diptych.serving.answers.answer_stream import Delta
from diptych.serving.api.protocol import ChatBody
from diptych.serving.api.reply import ReplyContext, chat_logprobs, encode_json, gather, prompt_logprobs

_PLAIN_CHOICE = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}'


class ChatWriter:
    """The Writer of /v1/chat/completions."""

    def __init__(self, context: ReplyContext, body: ChatBody) -> None:
        self._context = context
        self._top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        self._is_plain = not body.logprobs and not body.return_token_ids
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._prefix = context.event_prefix("chat.completion.chunk")
        self._plain = context.plain_event("chat.completion.chunk", _PLAIN_CHOICE)
        self._started = [False] * len(context.generation.streams)

    def events(self, deltas: Iterable[Delta]) -> bytes:
        """One event per sequence that has something new; the first of each is preceded by its role."""
        suffix = self._context.usage_suffix()
        parts = []
        for delta in deltas:
            if is_first := not self._started[delta.index]:
                self._started[delta.index] = True
                parts.append(self._prefix + self._opening(delta.index) + suffix)
            if self._is_plain and delta.finish_reason is None:
                parts.append(self._plain % (delta.index, encode_json(delta.text), suffix))
            else:
                choice = {**self._choice(delta, is_first=is_first), "delta": {"content": delta.text}}
                parts.append(self._prefix + encode_json(choice) + suffix)
        return b"".join(parts)

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
            "choices": [
                {
                    **self._choice(delta, is_first=True),
                    "message": {"role": "assistant", "content": delta.text, "refusal": None},
                }
                for delta in whole
            ],
            "usage": self._context.usage(),
        }
        if self._wants_prompt_logprobs:
            first = self._context.generation.streams[0]
            reply["prompt_logprobs"] = prompt_logprobs(first.prompt_logprobs, self._context.tokenizer)
        return encode_json(reply)

    def _opening(self, index: int) -> bytes:
        opening = {"role": "assistant", "content": ""}
        return encode_json({"index": index, "delta": opening, "logprobs": None, "finish_reason": None})

    def _choice(self, delta: Delta, *, is_first: bool) -> dict[str, Any]:
        logprobs = None
        if self._top_logprobs is not None and delta.logprobs:
            logprobs = chat_logprobs(delta.logprobs, self._top_logprobs, self._context.tokenizer)
        choice: dict[str, Any] = {"index": delta.index, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        choice.update(self._context.token_ids(delta, is_first=is_first))
        if delta.finish_reason is not None:
            choice["stop_reason"] = self._context.generation.streams[delta.index].stop_reason
        return choice
