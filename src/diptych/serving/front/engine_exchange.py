"""One attempt at one engine: its HTTP exchange, told to the fleet as a worker tells it.

    sent ---> first token ---> tokens ---> the last chunk: RequestFinished
      |            |             |
      '------------'-------------'--> refused, broken off, silent, unreadable: the worker says what becomes of it

The bytes go to the client's stream; the fleet gets counts and events. An exchange whose attempt is over (another has
begun, its client has left) writes nothing any more. Ends exactly once.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from diptych.control.errors import DiptychError, ErrorRecord, InvalidRequestError, WorkerError
from diptych.control.events import Event, FirstToken, HandoffDelivered, RequestAdmitted, RequestFinished
from diptych.control.request import FinishReason
from diptych.control.slo import LatencyBreakdown
from diptych.control.step import StepTokens
from diptych.serving import edge_limits
from diptych.serving.api.error_format import error_body
from diptych.serving.front.engine_connection import ConnectionPool, EngineCall
from diptych.serving.front.engine_request import EngineRequest, id_header
from diptych.serving.front.fast_path_chunks import ChunkForms
from diptych.serving.front.relay_request import WHOLE_PATHS
from diptych.serving.front.relay_stream import NO_TOKEN, EngineRefusal, RelayStream, retry_after_of
from diptych.serving.front.reply_chunks import (
    DONE,
    EngineChunk,
    EngineUsage,
    EventSplitter,
    UnreadableReplyError,
    error_message,
    read_chunk,
    without_token_ids,
)

ELSEWHERE = frozenset((408, 409, 425, 429))  # and all from 500 on: another engine may take it
TOLD_S = 0.25  # how often the owner is told of tokens
SPARE_TOKENS = 8  # by which an engine may miscount an answer


class ExchangeOwner(Protocol):
    """The worker that an exchange belongs to. name: of its engine, for people. bytes_per_token: by which texts are
    counted whose tokens the engine does not count."""

    number: int
    name: str

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text that a token is taken for."""
        ...

    def report(self, events: Sequence[Event], tokens: StepTokens | None = None) -> None:
        """Tell the fleet."""
        ...

    def on_gaps(self, attempt_id: str, gaps: Mapping[float, int], num_tokens: int) -> None:
        """Later tokens came, and are passed on. gaps: seconds since those before -> how often."""
        ...

    def report_completed_handoff(self, events: Sequence[Event], attempt_id: str, token_id: int) -> None:
        """Tell the fleet that this engine goes on with what another has computed; its first token."""
        ...

    def on_first_token(self, exchange: "EngineExchange") -> None:
        """The prompt is computed."""
        ...

    def on_prompt_computed(self, stream: RelayStream) -> None:
        """The engine has the prompt in its cache."""
        ...

    def on_usage(self, exchange: "EngineExchange", usage: EngineUsage) -> int:
        """The engine has said what the prompt was. Returns the cached tokens in the front's own count."""
        ...

    def on_over(self, exchange: "EngineExchange") -> None:
        """Take in that an exchange is over, whatever follows."""
        ...

    def on_lost(self, exchange: "EngineExchange", words: str) -> None:
        """Take in that an exchange broke off: the engine may be gone."""
        ...

    def on_defect(self, attempt_id: str, error: BaseException) -> None:
        """Code of this process has failed over this attempt."""
        ...

    def on_refused(self, exchange: "EngineExchange", status: int) -> bool:
        """The engine does not want it now. Returns whether it is tried elsewhere."""
        ...

    def clock(self) -> int:
        """Nanoseconds."""
        ...


class EngineExchange:
    """A ReplyListener. num_tokens: of this attempt, so far. last_ns: when the last token came, or the request went.
    awaits_admission: the fleet is to know when the engine begins with its prompt, and from which token.
    feeder: the worker that the stream belongs to until this engine's first token, when another computed the prompt."""

    def __init__(
        self,
        owner: ExchangeOwner,
        attempt_id: str,
        stream: RelayStream,
        question: EngineRequest,
        feeder: int | None = None,
    ) -> None:
        self.attempt_id = attempt_id
        self.stream = stream
        self.begun_ns = self.last_ns = owner.clock()
        self.first_ns = 0
        self.num_tokens = 0
        self.is_over = False
        self.is_handoff = feeder is not None and feeder != owner.number
        self.awaits_admission = stream.request.token_ids is not None and not (self.is_handoff or question.resumes)
        self._owner = owner
        self._question = question
        self._feeder = owner.number if feeder is None else feeder
        self._num_again = stream.num_textless if question.resumes else 0  # tokens that it gives once more
        self._most_tokens = (stream.request.most_tokens + SPARE_TOKENS) * stream.request.num_choices
        self._call: EngineCall | None = None
        self._status = 0
        self._retry_after = ""
        self._is_events = False
        self._splitter = EventSplitter()
        self._forms = ChunkForms()
        self._gaps: list[float] = []  # seconds between tokens, since the owner was told
        self._num_untold = 0  # tokens since then
        self._told_s = 0.0
        self._body = bytearray()
        self._usage: EngineUsage | None = None
        self._finished: set[int] = set()
        self._reason = FinishReason.STOP

    def begin(self, pool: ConnectionPool) -> None:
        """Send the request."""
        question = self._question
        self.stream.on_read = self._on_read
        self.stream.is_with_engine = True
        if not self.stream.num_tokens:
            self.stream.start_over()
        self._call = pool.send("POST", question.path, question.body, self, headers=id_header(self.attempt_id))

    def cancel(self) -> None:
        """Cancel what is left. Nothing is reported."""
        if not self.is_over:
            self._over()

    def break_off(self, words: str) -> None:
        """The engine is silent for too long, or the connection ended."""
        if self.is_over:
            return
        if self._is_events and len(self._finished) >= self.stream.request.num_choices:
            self._on_done(words)  # nothing but the end of the stream was still to come
            return
        self._over()
        self._owner.on_lost(self, words)

    # -- ReplyListener ------------------------------------------------------------------------------------------------

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self._status = status
        is_events = headers.get(b"content-type", b"").lower().startswith(b"text/event-stream")
        self._is_events = status == 200 and is_events
        if self._is_events and not self.is_over:
            self.stream.accept()
        if status != 200:
            self._retry_after = retry_after_of(status, headers)

    def on_data(self, data: bytes) -> None:
        if self.is_over:
            return
        if self._is_events:
            self._on_events(data)
            return
        self._body += data
        limit = edge_limits.ENGINE_REPLY_BYTES if self._status == 200 else edge_limits.ENGINE_REFUSAL_BYTES
        if len(self._body) > limit:
            self.break_off(f"the reply (status {self._status}) is longer than {limit} bytes")

    def on_end(self) -> None:
        if self.is_over:
            return
        if self._status != 200:
            self._on_refusal()
        elif self._is_events:
            self._on_done("the stream ended before its answer did")
        else:
            self._on_whole(bytes(self._body))

    def on_failure(self, words: str) -> None:
        self.break_off(words)

    def on_defect(self, error: Exception) -> None:
        """Fail the exchange. What the client has of it may not be counted: it is not asked again."""
        self.is_over, self.stream.on_read = True, None
        self._owner.on_defect(self.attempt_id, error)

    @property
    def _is_stale(self) -> bool:
        """Whether its attempt is over."""
        return self.stream.attempt_id != self.attempt_id or self.stream.worker != self._feeder

    # -- streams ------------------------------------------------------------------------------------------------------

    def _on_events(self, data: bytes) -> None:
        """The tokens of all events that came at once are told at once; what ends the answer comes after them."""
        stream = self.stream
        if self._is_stale:
            self.cancel()
            return
        token_ids: list[int] = []
        end: Callable[[], None] | None = None
        try:
            for payload in self._splitter.feed(data):
                end = self._on_event(payload, token_ids)
                if end is not None:
                    break
        except UnreadableReplyError as error:
            end = partial(self.break_off, str(error))
        if token_ids:
            self._count(token_ids)
        if self.is_over:
            return
        if end is not None:
            end()
        elif stream.is_full and self._call is not None:
            self._call.pause()

    def _on_event(self, payload: bytes, token_ids: list[int]) -> Callable[[], None] | None:
        """Relay an event, and add its tokens. Returns what ends the answer, if it does."""
        if payload == DONE:
            return partial(self._on_done, "the stream ended without a finish_reason")
        chunk, stream = read_chunk(payload), self.stream
        if chunk.error is not None:
            message = error_message(payload, "the engine reported an error without a message")
            return partial(self._on_error, chunk.error, message)
        if chunk.usage is not None:
            self._usage = chunk.usage
        found = self._new_tokens_of(chunk)
        if len(stream.token_ids) + len(token_ids) + len(found) > self._most_tokens:
            return self._on_excess
        token_ids += found
        if self._question.is_rewritten:
            self._relay_rewritten(chunk)
        elif chunk.choices or not self._question.adds_usage:
            if stream.first_chunk is None and chunk.id:
                stream.first_chunk = (chunk.id, chunk.created, chunk.model)
            stream.add(self._relayed(payload))
        if len(found) == 1 and not self._num_again and self._call is not None:
            form = self._forms.learn(payload, chunk, self._written)
            self._call.take_chunks(None if form is None else self._on_chunk)
        return None

    def _on_chunk(self, data: bytes) -> bool:
        """Do what ``on_data`` does, for a chunk of the usual form."""
        form, stream = self._forms.form, self.stream
        if form is None or self._splitter.rest or (found := form.read(data)) is None:
            return False
        if self._is_stale or len(stream.token_ids) >= self._most_tokens:
            return False
        self._on_later(1)
        if not stream.pass_on(found[0], found[1]) and stream.is_full and self._call is not None:
            self._call.pause()
        return True

    def _on_later(self, num_tokens: int) -> None:
        """Tokens after the first came now. The owner is told of some at once: it does not look more often."""
        stream, now_s = self.stream, time.monotonic()
        self._gaps.append(now_s - stream.last_token_s)
        stream.last_token_s = now_s
        self.last_ns = self._owner.clock()
        self.num_tokens += num_tokens
        self._num_untold += num_tokens
        if now_s - self._told_s > TOLD_S:
            self._tell_gaps(now_s)

    def _tell_gaps(self, now_s: float) -> None:
        if self._num_untold:
            self._owner.on_gaps(self.attempt_id, Counter(self._gaps), self._num_untold)
            self._gaps.clear()
            self._num_untold = 0
        self._told_s = now_s

    def _written(self, payload: bytes, text: str) -> bytes:
        """What the client gets of a payload with this text."""
        return self.stream.chunk(text, None) if self._question.is_rewritten else self._relayed(payload)

    def _relayed(self, payload: bytes) -> bytes:
        """An event of the engine as the client gets it."""
        if self._question.adds_ids and b"token_ids" in payload:
            payload = without_token_ids(payload)
        if b"\n" in payload:  # it came in several lines
            payload = payload.replace(b"\n", b"\ndata: ")
        return b"data: %b\n\n" % payload

    def _on_error(self, error: Any, message: str) -> None:
        """An error in the middle of a stream: the request's own fault, or the engine's."""
        code = error.get("code") if isinstance(error, dict) else None
        if isinstance(code, int) and 400 <= code < 500 and code not in ELSEWHERE:
            self._fail(InvalidRequestError(message))
        else:
            self.break_off(f"the engine reported in its stream: {message}")

    def _tokens_of(self, chunk: EngineChunk) -> list[int]:
        """The tokens that it brings; NO_TOKEN for those that the engine does not name."""
        stream = self.stream
        found: list[int] = []
        for choice in chunk.choices:
            if choice.finish_reason in ("abort", "error"):
                raise UnreadableReplyError(f"the engine ended the answer with {choice.finish_reason}")
            if choice.finish_reason is not None:
                self._finished.add(choice.index)
                self._reason = FinishReason.LENGTH if choice.finish_reason == "length" else FinishReason.STOP
            if choice.delta is not None and not choice.delta.is_plain:
                stream.is_exact = False
            ids = choice.prompt_token_ids or chunk.prompt_token_ids
            if ids and not self._question.resumes:
                stream.prompt_ids = ids
            if choice.token_ids is None:
                count = choice.num_tokens
                stream.is_exact = stream.is_exact and not count
                found += [NO_TOKEN] * count
            else:
                found += choice.token_ids
        return found

    def _new_tokens_of(self, chunk: EngineChunk) -> list[int]:
        """The same, without those that the answer has already; the stream knows then what text there is of them."""
        stream, found = self.stream, self._tokens_of(chunk)
        num_tokens = len(found)
        if self._num_again and found:
            came, found = found[: self._num_again], found[self._num_again :]
            self._num_again -= len(came)
            stream.again(came, self._num_again)
        has_text = any(choice.has_text for choice in chunk.choices)
        if num_tokens or has_text:
            stream.note_chunk(num_tokens, len(found), self._num_again, has_text=has_text)
        return found

    def _on_excess(self) -> None:
        """The engine goes on after the longest answer that was asked for: it would never end."""
        most = self.stream.request.max_tokens
        self._fail(WorkerError(f"{self._owner.name} gave more than max_tokens ({most}) tokens"))

    def _relay_rewritten(self, chunk: EngineChunk) -> None:
        """A chunk with text, in the format of the client's request."""
        if self._question.writes_as:
            self.stream.begin_as(int(time.time()), self._question.writes_as)
        for choice in chunk.choices:
            if choice.text or choice.finish_reason is not None:
                self.stream.add(self.stream.chunk(choice.text or "", choice.finish_reason))

    def _count(self, token_ids: list[int]) -> None:
        """Tell the fleet of tokens, at least one."""
        owner = self._owner
        if self.first_ns:
            self._on_later(len(token_ids))
            self.stream.push_all(token_ids)
            return
        self.first_ns = self.last_ns = now = owner.clock()
        self.num_tokens += len(token_ids)
        self.stream.served_by, self.stream.refusal = owner.name, None
        owner.on_first_token(self)
        self._begin_answer(token_ids, now)
        owner.on_prompt_computed(self.stream)  # after the client has its token

    def _begin_answer(self, token_ids: list[int], now: int) -> None:
        events: list[Event] = [FirstToken(now, self.attempt_id)]
        if self.is_handoff and self._feeder != self._owner.number:
            self._feeder = self._owner.number
            events.append(HandoffDelivered(now, self.attempt_id, 0, now - self.begun_ns))
            self._owner.report_completed_handoff(events, self.attempt_id, token_ids[0])
            events, token_ids = [], token_ids[1:]
        if events or token_ids:
            self._owner.report(events, StepTokens([self.attempt_id] * len(token_ids), token_ids))

    def _on_done(self, words: str) -> None:
        if len(self._finished) < self.stream.request.num_choices:
            self.break_off(words)
            return
        if self._question.is_rewritten and self.stream.request.wants_usage:
            usage = self._usage
            cached = usage.cached_tokens if usage else None
            self.stream.add(self.stream.usage_chunk(self.stream.num_prompt_tokens, cached))
        self._finish()

    # -- whole replies and refusals -----------------------------------------------------------------------------------

    def _on_whole(self, body: bytes) -> None:
        stream, request = self.stream, self.stream.request
        if request.is_stream:
            self.break_off("a stream was asked for, and the reply is none")
            return
        if self._is_stale:
            self.cancel()
            return
        try:
            chunk = read_chunk(body)
        except UnreadableReplyError as error:
            self.break_off(str(error))
            return
        if request.path not in WHOLE_PATHS:
            if chunk.error is None:
                self._tokens_of(chunk)  # which notes the choices that are complete
            if chunk.error is not None or len(self._finished) < len(chunk.choices) or not chunk.choices:
                self.break_off("the reply has no whole answer")
                return
            said = chunk.usage.answer_tokens if chunk.usage else None
            num_tokens = self._estimated_answer(chunk) if said is None else said
            stream.add(self._rewritten(chunk, num_tokens) if self._question.writes_as else body)
            self._usage = chunk.usage
            self._count([NO_TOKEN] * max(1, min(num_tokens, self._most_tokens)))
        else:
            self._usage = chunk.usage
            stream.served_by, stream.refusal = self._owner.name, None
            stream.add(body)
        self._finish()

    def _estimated_answer(self, chunk: EngineChunk) -> int:
        """Tokens of a whole reply whose engine does not count them."""
        return sum(
            math.ceil(choice.num_text_bytes / self._owner.bytes_per_token)
            if choice.token_ids is None
            else len(choice.token_ids)
            for choice in chunk.choices
        )

    def _rewritten(self, chunk: EngineChunk, num_tokens: int) -> bytes:
        """A whole reply with text, as the answer to a chat."""
        choice, usage, stream = chunk.choices[0], chunk.usage or EngineUsage(), self.stream
        stream.begin_as(int(time.time()), self._question.writes_as)
        stream.num_said_tokens = usage.all_prompt_tokens
        return stream.whole_chat(choice.text or "", choice.finish_reason, num_tokens, usage.cached_tokens)

    def _on_refusal(self) -> None:
        status, body = self._status, bytes(self._body)
        self.stream.is_with_engine = False
        words = f"{self._owner.name} answered with status {status}"
        self._over()
        if status in (401, 403):  # the front's own key is wrong: not the client's fault
            self._owner.report([self._end(FinishReason.ERROR, WorkerError(f"{words} to the key of this server"))])
            return
        message = error_message(body, words)
        refused = WorkerError(message, code="engine_refused")
        if not self.stream.num_tokens:  # also where it is tried elsewhere, and nobody takes it
            status, body = (status, body) if status >= 400 else (502, b"")
            self.stream.refusal = EngineRefusal(status, body or error_body(refused), message, self._retry_after)
        if (status in ELSEWHERE or status >= 500) and self._owner.on_refused(self, status):
            return
        self._owner.report([self._end(FinishReason.ERROR, refused)])

    # -- the end ------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """The answer is complete."""
        events: list[Event] = []
        num_cached = 0
        if self._usage is not None and not self._question.resumes:
            num_cached = self._owner.on_usage(self, self._usage)
            said = self._usage.answer_tokens
            self.stream.num_said_answer = None if said is None else min(said, self._most_tokens)
            is_known = self.stream.request.token_ids is not None and not self.awaits_admission
            if self._usage.cached_tokens is not None and not self.is_handoff and not is_known:
                events.append(RequestAdmitted(self._owner.clock(), self.attempt_id, num_cached, is_first=True))
        self._over(is_whole=True)
        self._owner.report([*events, self._end(self._reason, None, num_cached)])

    def _fail(self, error: DiptychError) -> None:
        self._over()
        self._owner.report([self._end(FinishReason.ERROR, error)])

    def _end(self, reason: FinishReason, error: DiptychError | None, num_cached: int = 0) -> RequestFinished:
        now, options = self._owner.clock(), self.stream.options
        first_ns = self.first_ns or now
        latency = LatencyBreakdown(0, first_ns - self.begun_ns, now - first_ns, self.num_tokens)
        return RequestFinished(
            now,
            self.attempt_id,
            reason,
            self.stream.num_estimated_tokens,
            num_cached,
            0,
            latency,
            None if options.slo is None else error is None,
            None if error is None else ErrorRecord.of(error),
        )

    def _over(self, *, is_whole: bool = False) -> None:
        self.is_over = True
        self._tell_gaps(self._told_s)
        if self.stream.on_read == self._on_read:
            self.stream.on_read = None
        if self._call is not None:
            (self._call.release if is_whole else self._call.abort)()
        self._owner.on_over(self)

    def _on_read(self) -> None:
        if self._call is not None:
            self._call.resume()
