"""One answer of an engine on its way to its client: an AnswerStream whose text stays as the engine wrote it.

Tokens are counted (and kept, where the engine names them, to continue the answer elsewhere); their text is never made
here. Bounded: an exchange stops reading while its client has not taken UNREAD_BYTES_AT_FRONT.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.types import Scope

from diptych.base.whole_lines import with_whole_lines
from diptych.control.errors import CoreFailedError, DiptychError, RequestError
from diptych.control.events import RequestFinished
from diptych.control.request import RequestOptions, SamplingParams
from diptych.serving import edge_limits
from diptych.serving.answers.answer_stream import AnswerStream, Delta, Generation
from diptych.serving.api import responses
from diptych.serving.api.api_flavour import CHAT, COMMENT, ApiFlavour, chat_failure
from diptych.serving.api.direct_body import DIRECT_BODY, DirectBody
from diptych.serving.api.error_format import error_body
from diptych.serving.api.responses import GenerationResponse, MoreHeaders
from diptych.serving.front.relay_request import CHAT_PATH, WHOLE_PATHS, RelayRequest
from diptych.serving.served_fleet import ServedFleet

TEXT_HERE = "\u241f text"  # stands for the text of a chunk
_QUOTED_HERE = msgspec.json.encode(TEXT_HERE)
MAX_RETRY_S = 3600
_HTTP_DATE = re.compile(rb"[A-Z][a-z]{2}, \d{2} [A-Z][a-z]{2} \d{4} \d{2}:\d{2}:\d{2} GMT")
NO_TOKEN = 0  # stands for a token that the engine did not name


class HandoffSlot:
    """Carries the parameters of one attempt from its prefill engine to its decode engine, whichever comes first.
    prefill: the worker that gives them."""

    def __init__(self, attempt_id: str) -> None:
        self.attempt_id = attempt_id
        self.prefill = -1
        self._parameters: Mapping[str, Any] | None = None
        self._on_given: Callable[[Mapping[str, Any]], None] | None = None

    def give(self, parameters: Mapping[str, Any]) -> None:
        """The prefill engine's parameters."""
        self._parameters = parameters
        self._meet()

    def await_parameters(self, on_given: Callable[[Mapping[str, Any]], None]) -> None:
        """The decode engine's port: called once, when they are there."""
        self._on_given = on_given
        self._meet()

    def _meet(self) -> None:
        if self._parameters is not None and self._on_given is not None:
            on_given, self._on_given = self._on_given, None
            on_given(self._parameters)


class RelayDelta(Delta, gc=False):
    """data: what the client gets, as it is: events of a stream, or a whole body."""

    data: bytes = b""


class EngineRefusal(RequestError):
    """An engine refused the request: its client gets the engine's own reply. retry_after: see ``retry_after_of``."""

    def __init__(self, status: int, body: bytes, message: str, retry_after: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.body = body
        self.retry_after = retry_after


def retry_after_of(status: int, headers: Mapping[bytes, bytes]) -> str:
    """When an engine that is busy says that it can be asked again: whole seconds up to an hour, or a date of HTTP; all
    else is not passed on ("")."""
    said = headers.get(b"retry-after", b"")
    is_seconds = said.isdigit() and len(said) <= 4 and int(said) <= MAX_RETRY_S
    if status not in (429, 503) or not (is_seconds or _HTTP_DATE.fullmatch(said)):
        return ""
    return said.decode("ascii")


class _NoTokenizer:
    """The tokenizer of answers whose text the engine makes."""

    def detokenizer(self, prompt_token_ids: Any, shown: Any = None) -> None:
        """None."""


_NO_TOKENIZER: Any = _NoTokenizer()


class RelayStream(AnswerStream):
    """request: as the client sent it. num_estimated_tokens: of its prompt, in the front's own count; num_said_tokens:
    as the engine counted them (0: it has not yet), of which it found num_said_cached in its cache; num_said_answer: of
    the answer, as the engine counted them. is_with_engine: it was sent to an engine, which has not refused it.
    hashes: of its blocks. prompt_ids: of its prompt, where an engine named them. is_exact: whether all tokens so far
    are known. refusal: an engine's reply to pass on as it is. served_by: the engine that gave the first byte.
    refused_by: workers that did not want the request now. on_read: called when the client has taken what was too much.

    Some last tokens may be a part of a character: an engine keeps their text until it is whole, and one that begins
    after them would lose it, or repeat its prompt. num_textless: how many have given the client no text yet, at least;
    most_textless: at most, for an engine does not say which of the tokens of a chunk its text is of."""

    __slots__ = (
        "_data",
        "_num_unread",
        "first_chunk",
        "frame",
        "hashes",
        "is_exact",
        "is_with_engine",
        "most_textless",
        "num_estimated_tokens",
        "num_said_answer",
        "num_said_cached",
        "num_said_tokens",
        "num_textless",
        "on_read",
        "prompt_ids",
        "refusal",
        "refused_by",
        "request",
        "served_by",
        "slot",
        "write_chunk",
    )

    def __init__(
        self,
        request_id: str,
        request: RelayRequest,
        options: RequestOptions,
        num_estimated_tokens: int,
        hashes: tuple[bytes, ...] = (),
    ) -> None:
        sampling = SamplingParams(max_tokens=request.max_tokens, temperature=0.0)
        super().__init__(request_id, 0, [], sampling, _NO_TOKENIZER, options)
        self.request = request
        self.num_estimated_tokens = num_estimated_tokens
        self.num_said_tokens = self.num_said_cached = 0
        self.num_said_answer: int | None = None
        self.is_with_engine = False
        self.hashes = hashes
        token_ids = request.token_ids
        self.prompt_ids: list[int] | None = None if token_ids is None else list(token_ids)
        self.is_exact = True
        self.refusal: EngineRefusal | None = None
        self.num_textless = self.most_textless = 0
        self.served_by = ""
        self.refused_by: set[int] = set()
        self.first_chunk: tuple[str, int, str] | None = None  # id, created and model, as the client knows them
        self.frame: tuple[bytes, bytes] | None = None  # around the text of a chunk that the front writes
        self.slot: HandoffSlot | None = None  # of its attempt that two engines share
        self.on_read: Callable[[], None] | None = None
        self.write_chunk: Callable[[bytes], bool] | None = None  # of its reply, see DirectBody
        self._data: list[bytes] = []
        self._num_unread = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Counted by an engine or by a tokenizer, else estimated."""
        is_named = self.prompt_ids is not None and self.request.num_prompts == 1
        return self.num_said_tokens or (len(self.prompt_ids or ()) if is_named else self.num_estimated_tokens)

    @property
    def num_answers(self) -> int:
        """Answers of the request: here one stream has them all."""
        return 0 if self.request.path in WHOLE_PATHS else self.request.num_choices

    @property
    def num_used_tokens(self) -> int:
        """Tokens as the engine counted them at the end, since it may send several in a chunk without saying so; until
        then, those that came."""
        return self.num_tokens if self.num_said_answer is None else self.num_said_answer

    def note_prompt(self, num_tokens: int, num_cached: int) -> None:
        """The engine has counted the prompt."""
        self.num_said_tokens, self.num_said_cached = num_tokens, max(0, min(num_cached, num_tokens))

    @property
    def can_resume(self) -> bool:
        """Whether another engine can go on after what the client has."""
        known = self.is_exact and self.prompt_ids is not None
        return not self.num_tokens or (known and self.request.is_stateless)

    @property
    def is_full(self) -> bool:
        """Whether the client has left too much unread."""
        return self._num_unread > edge_limits.UNREAD_BYTES_AT_FRONT

    def note_chunk(self, num_tokens: int, num_new: int, num_left: int, *, has_text: bool) -> None:
        """Count a chunk of ``num_tokens`` tokens. num_new: how many the answer did not have yet. num_left: how many it
        has that have yet to come again (see ``again``)."""
        if has_text:
            self.num_textless = num_left
            self.most_textless = num_left + max(0, num_tokens - 1)
        else:
            self.num_textless += num_new
            self.most_textless += num_new

    def again(self, token_ids: list[int], num_left: int) -> None:
        """Tokens without text came again, from another engine, which may have chosen others. num_left: how many have
        yet to come after them."""
        end = len(self.token_ids) - num_left
        self.token_ids[end - len(token_ids) : end] = token_ids

    def has_text_up_to(self, num_textless: int) -> None:
        """Take in how many of the last tokens have given the client no text."""
        self.num_textless = self.most_textless = num_textless

    def add(self, data: bytes) -> None:
        """What the client gets next. (The tokens in it come by ``push``.)"""
        self._data.append(data)
        self._num_unread += len(data)

    def accept(self) -> None:
        """The engine that gives the answer has begun its reply."""
        if isinstance(self.generation, RelayGeneration):  # its client may have left
            self.generation.accept()

    def start_over(self) -> None:
        """Another engine gives the answer from its beginning: what came of it has no token, and was not sent."""
        self._data.clear()
        self._num_unread = 0
        self.first_chunk = self.frame = None

    def push_all(self, token_ids: list[int]) -> None:
        """These tokens, in what was added, are delivered."""
        self.token_ids += token_ids
        self.mark().deliver()

    def pass_on(self, token_id: int, chunk: bytes) -> bool:
        """A token with text. chunk: of HTTP, with the event. Returns whether it was sent as it is: the client has had
        all before it, and reads what it gets."""
        self.token_ids.append(token_id)
        self.has_text_up_to(0)
        if self.write_chunk is not None and self.generation.on_new is not None and not self._data:
            try:
                if self.write_chunk(chunk):
                    return True
            except Exception as error:  # as if it had happened in the reader's own task
                self.generation.fail(error)
                return True
        self.add(chunk[chunk.index(b"\r\n") + 2 : -2])
        self.mark().deliver()
        return False

    def take(self) -> RelayDelta:
        """What is new since the last call."""
        return RelayDelta(0, "", [], [], self.finish_reason, self.take_data())

    def take_data(self) -> bytes:
        """What is new since the last call, as the client gets it."""
        self.is_dirty = False
        data = self._data[0] if len(self._data) == 1 else b"".join(self._data)
        self._data.clear()
        if self._num_unread > edge_limits.UNREAD_BYTES_AT_FRONT and self.on_read is not None:
            self.on_read()
        self._num_unread = 0
        return data

    def end(self, finished: RequestFinished) -> None:
        self.finished = finished
        self.generation.num_open -= 1
        said = self.num_said_cached if self.num_said_tokens else finished.num_cached_tokens
        self.cached_tokens = max(self.cached_tokens, said)
        self.finish_reason = str(finished.reason)

    def opening(self) -> bytes:
        """The event with which a chat begins."""
        return self._event_with({"role": "assistant", "content": ""}, None)

    def chunk(self, text: str, finish_reason: str | None) -> bytes:
        """An event with this text, in the format of the client's request, where it is not the engine's own."""
        if finish_reason is not None:
            return self._event_with({"content": text} if text else {}, finish_reason, text)
        if self.frame is None:
            head, _, tail = self._event_with({"content": TEXT_HERE}, None, TEXT_HERE).partition(_QUOTED_HERE)
            self.frame = head, tail
        return self.frame[0] + msgspec.json.encode(text) + self.frame[1]

    def _event_with(self, delta: Mapping[str, str], finish_reason: str | None, text: str = "") -> bytes:
        """An event with a chat's delta, or a completion's text."""
        reply_id, created, model = self.first_chunk or (self.request_id, 0, "")
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self.request.path == CHAT_PATH:
            choice["delta"], kind = delta, "chat.completion.chunk"
        else:
            choice["text"], kind = text, "text_completion"
        return event_of({"id": reply_id, "object": kind, "created": created, "model": model, "choices": [choice]})

    def begin_as(self, created: int, model: str) -> None:
        """The front writes all events of the answer itself."""
        if self.first_chunk is None:
            self.first_chunk = (self.request_id, created, model)
            if self.request.is_stream and self.request.path == CHAT_PATH:
                self.add(self.opening())

    def whole_chat(self, text: str, finish_reason: str | None, num_tokens: int, cached_tokens: int | None) -> bytes:
        """The body of a chat that does not stream, where it is not the engine's own."""
        reply_id, created, model = self.first_chunk or (self.request_id, 0, "")
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        head = {"id": reply_id, "object": "chat.completion", "created": created, "model": model}
        usage = _usage_of(self.num_prompt_tokens, num_tokens, cached_tokens)
        return msgspec.json.encode({**head, "choices": [choice], "usage": usage})

    def usage_chunk(self, prompt_tokens: int, cached_tokens: int | None) -> bytes:
        """The usage of an answer whose events are not the engine's own."""
        reply_id, created, model = self.first_chunk or (self.request_id, 0, "")
        kind = "chat.completion.chunk" if self.request.path == CHAT_PATH else "text_completion"
        head = {"id": reply_id, "object": kind, "created": created, "model": model}
        usage = _usage_of(prompt_tokens, self.num_tokens, cached_tokens)
        return event_of({**head, "choices": [], "usage": usage})


class RelayGeneration(Generation):
    """The one stream of a client's request. An engine's refusal is the error that its reader gets."""

    __slots__ = ("relay",)

    def __init__(self, stream: RelayStream) -> None:
        super().__init__(stream.request_id, [stream])
        self.relay = stream

    @property
    def is_begun(self) -> bool:
        """Whether an engine computes the request. It is taken to as soon as it has it: of a reply that is no stream
        nothing is known until it is whole."""
        return self.relay.is_with_engine or super().is_begun

    def admit(self) -> None:
        """Do nothing: ``accept`` admits here, since an engine may have computed the prompt, and another refuse to go
        on."""

    def accept(self) -> None:
        """Count the request as begun: the engine that gives the answer has begun its reply."""
        super().admit()

    def fail(self, error: Exception) -> None:
        """Fail the request. An engine's refusal outranks "there was no other engine", but not a defect here."""
        super().fail(error if isinstance(error, CoreFailedError) else self.relay.refusal or error)

    def close(self) -> None:
        super().close()
        self.relay.write_chunk = None

    def take_data(self) -> bytes:
        """What is new, as ``take`` for a reader that waits: nothing has waited for it."""
        self._dirty.clear()
        return self.relay.take_data()


class RelayWriter:
    """The Writer of replies that engines wrote."""

    def opening(self) -> bytes:
        """Nothing: how the answer begins is the engine's to say."""
        return b""

    def events(self, deltas: Iterable[Delta]) -> bytes:
        """The events as they came."""
        return b"".join([delta.data for delta in deltas if isinstance(delta, RelayDelta)])

    def pause(self) -> bytes:
        """A comment."""
        return COMMENT

    def failure(self, error: DiptychError) -> bytes:
        """An event with the error; with the engine's own, where it refused the request."""
        if isinstance(error, EngineRefusal) and (said := refusal_of(error.body)) is not None:
            return event_of({"error": said})
        return chat_failure(error)

    def last_events(self) -> bytes:
        """Nothing: an engine's usage is among its events."""
        return b""

    def body(self, deltas: Iterable[Delta]) -> bytes:
        """The engine's body."""
        return self.events(deltas)


def _usage_of(prompt_tokens: int, num_tokens: int, cached_tokens: int | None) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens or 0},
    }


def event_of(content: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def refusal_of(body: bytes) -> dict[str, Any] | None:
    """The ``error`` of an engine's refusal in OpenAI's form; None: it has another form."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    error = content.get("error") if isinstance(content, dict) else None
    return error if isinstance(error, dict) else None


def _refusal_body(error: DiptychError) -> bytes:
    return error.body if isinstance(error, EngineRefusal) else error_body(error)


RELAY = ApiFlavour(_refusal_body, CHAT.done)


class RelayResponse(GenerationResponse):
    """A GenerationResponse whose events are written without records in between."""

    def __init__(
        self, front: ServedFleet, generation: RelayGeneration, *, stream: bool, more_headers: MoreHeaders
    ) -> None:
        super().__init__(front, generation, RelayWriter(), stream=stream, flavour=RELAY, more_headers=more_headers)
        self._relay = generation

    async def content(self, deltas: Sequence[Delta]) -> bytes:
        """The whole reply, which is there already."""
        return self._writer.body(deltas)

    def _pause_due_s(self) -> float:
        last_s = self._relay.relay.last_token_s  # whose chunk may have been written without this reply
        return max(super()._pause_due_s(), last_s + responses.SILENCE_S if last_s else 0.0)

    def _direct_writes(self, scope: Scope) -> Callable[[], bool] | None:
        generation = self._relay
        body: DirectBody | None = scope.get("extensions", {}).get(DIRECT_BODY, {}).get("body")
        if body is None:
            return None
        generation.count_unsent = body.count_unsent
        generation.relay.write_chunk = body.write_chunk
        return body.writes(lambda: with_whole_lines(generation.take_data()))
