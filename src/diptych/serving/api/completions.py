"""POST /v1/completions: formats deltas as OpenAI's text completions.

Owns the JSON of completion choices. Must never wait or submit.
"""

from collections.abc import Iterable
from typing import Any

from diptych.control.errors import DiptychError
from diptych.serving.answers.answer_stream import Delta
from diptych.serving.api.api_flavour import COMMENT, chat_failure
from diptych.serving.api.protocol import CompletionBody
from diptych.serving.api.reply import ReplyContext, completion_logprobs, encode_json, gather, prompt_logprobs

_PLAIN_CHOICE = b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}'


class CompletionWriter:
    """The Writer of /v1/completions. ``prompt_texts``: one per prompt, used by echo."""

    def __init__(self, context: ReplyContext, body: CompletionBody, prompt_texts: list[str]) -> None:
        self._context = context
        self._logprobs = body.logprobs
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._echo = prompt_texts if body.echo else None
        extras = (body.logprobs is not None, body.echo, self._wants_prompt_logprobs, body.return_token_ids)
        self._is_plain = not any(extras)
        self._prefix = context.event_prefix("text_completion")
        self._plain = context.plain_event("text_completion", _PLAIN_CHOICE)
        self._started = [False] * len(context.generation.streams)
        self._offsets = [0] * len(context.generation.streams)

    def opening(self) -> bytes:
        """Nothing: every event of a completion has text."""
        return b""

    def events(self, deltas: Iterable[Delta]) -> bytes:
        """One event per sequence that has something new."""
        suffix = self._context.usage_suffix()
        parts = []
        for delta in deltas:
            if self._is_plain and delta.finish_reason is None:
                parts.append(self._plain % (delta.index, encode_json(delta.text), suffix))
            else:
                parts.append(self._prefix + encode_json(self._choice(delta)) + suffix)
        return b"".join(parts)

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
        reply = {**self._context.head("text_completion"), "choices": [], "usage": self._context.usage()}
        return b"data: " + encode_json(reply) + b"\n\n"

    def body(self, deltas: Iterable[Delta]) -> bytes:
        """The whole reply."""
        whole = gather(deltas, len(self._context.generation.streams))
        return encode_json(
            {
                **self._context.head("text_completion"),
                "choices": [self._choice(delta) for delta in whole],
                "usage": self._context.usage(),
            }
        )

    def _choice(self, delta: Delta) -> dict[str, Any]:
        index, context = delta.index, self._context
        stream = context.generation.streams[index]
        is_first, self._started[index] = not self._started[index], True
        text = delta.text
        entries: list[Any] = list(delta.logprobs)
        token_ids = list(delta.token_ids)
        if is_first and self._echo is not None:
            text = self._echo[index // context.n] + text
            entries = [*(stream.prompt_logprobs or [None] * len(stream.prompt_token_ids)), *entries]
            token_ids = [*stream.prompt_token_ids, *token_ids]
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": delta.finish_reason}
        choice.update(context.token_ids(delta, is_first=is_first))
        if self._logprobs is not None:
            offset = self._offsets[index]
            choice["logprobs"] = completion_logprobs(entries, token_ids, offset, self._logprobs, context.tokenizer)
            self._offsets[index] += sum(len(token) for token in choice["logprobs"]["tokens"])
        if delta.finish_reason is not None:
            choice["stop_reason"] = stream.stop_reason
        if is_first and self._wants_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(stream.prompt_logprobs, context.tokenizer)
        return choice
