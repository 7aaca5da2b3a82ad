"""One growing answer as the front end holds it: tokens come in, whole text that may be sent comes out.

Owns the tokens, the text and the stop strings of one sequence, and the Generation that gathers the streams of one
client request behind one wake-up per step. Must never know sockets or HTTP.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from diptych.control.events import RequestFinished
from diptych.control.misses.prefix_miss import PrefixMiss
from diptych.control.request import DEFAULT_OPTIONS, FinishReason, RequestOptions, SamplingParams
from diptych.control.step import TokenLogprobs
from diptych.serving.answers.detokenizer import StopStrings
from diptych.serving.answers.tokenizer import Tokenizer


class Delta(msgspec.Struct, gc=False):
    """What one sequence got since the last look."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None = None


class AnswerStream:
    """One answer. ``push`` takes a token, ``end`` the terminal record, ``take`` gives what is new."""

    __slots__ = (
        "_detokenizer",
        "_logprobs",
        "_new_ids",
        "_new_texts",
        "_stops",
        "attempt_id",
        "cached_tokens",
        "embedding",
        "finish_reason",
        "finished",
        "first_token_s",
        "generation",
        "index",
        "is_dirty",
        "last_token_s",
        "num_before_attempt",
        "num_resumed",
        "options",
        "prefix_miss",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "sampling",
        "stop_reason",
        "submitted_s",
        "token_ids",
        "worker",
    )

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        options: RequestOptions = DEFAULT_OPTIONS,
        shown: Mapping[int, str] = {},
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.prompt_token_ids = prompt_token_ids
        self.sampling = sampling
        self.options = options
        self.generation: Generation  # set by that generation
        self.token_ids: list[int] = []  # all that the client has or is about to get
        self.attempt_id = request_id  # the attempt that feeds it
        self.num_before_attempt = 0  # tokens when that attempt began
        self.num_resumed = 0  # tokens that an earlier request of its client has computed, with the prompt
        self.worker = -1  # that feeds it now
        self.finished: RequestFinished | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.cached_tokens = 0
        self.prefix_miss: PrefixMiss | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.embedding = b""  # of the prompt, see StepTokens
        self.submitted_s = 0.0
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        self.is_dirty = False
        self._detokenizer = tokenizer.detokenizer(prompt_token_ids, shown)
        self._stops = StopStrings(sampling.stop) if sampling.stop else None
        self._new_ids: list[int] = []
        self._new_texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_answers(self) -> int:
        """Answers whose tokens its client pays for."""
        return 0 if self.sampling.pooling is not None else 1

    @property
    def num_used_tokens(self) -> int:
        """Tokens of the answer that its client pays for."""
        return self.num_tokens - self.num_resumed

    def push(self, token_id: int, *, is_stop_token: bool = False, logprobs: TokenLogprobs | None = None) -> bool:
        """Take one sampled token. Returns True when it completed a stop string: the worker has to stop.

        A stop token belongs to the token ids but not to the text, unless that is asked for. After a stop string, tokens
        are ignored.
        """
        if self.stop_reason is not None:
            return False
        self.token_ids.append(token_id)
        self._new_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        if is_stop_token:
            self.stop_reason = token_id
            if self.sampling.include_stop_str_in_output and self._detokenizer is not None:
                held = self._stops.flush() if self._stops is not None else ""
                self._new_texts += held, self._detokenizer.push(token_id)
        elif self._detokenizer is not None and (text := self._detokenizer.push(token_id)):
            return self._add_text(text)
        return False

    def add_prompt_logprobs(self, first: int, entries: list[TokenLogprobs]) -> None:
        """Log-probabilities of the prompt's tokens from position ``first`` on (the first token has none).

        A later attempt reports them again; its entries for tokens behind the prompt are left out.
        """
        if self.prompt_logprobs is None:
            self.prompt_logprobs = [None] * len(self.prompt_token_ids)
        fitting = entries[: max(0, len(self.prompt_logprobs) - first)]
        self.prompt_logprobs[first : first + len(fitting)] = fitting

    def end(self, finished: RequestFinished) -> None:
        """The answer is over; ``finished``: its end as its client sees it."""
        self.finished = finished
        self.generation.num_open -= 1
        self.cached_tokens = max(self.cached_tokens, finished.num_cached_tokens)
        matched = self._stops is not None and self._stops.matched is not None
        if not matched:
            if self._detokenizer is not None:
                self._add_text(self._detokenizer.flush())
            matched = self._stops is not None and self._stops.matched is not None
            if self._stops is not None:
                self._new_texts.append(self._stops.flush())
        self.finish_reason = str(FinishReason.STOP if matched else finished.reason)

    def mark(self) -> "Generation":
        """Mark this answer in its generation, which is returned, as having something new."""
        self.generation.mark(self)
        return self.generation

    def take(self) -> Delta:
        """What is new since the last call."""
        delta = Delta(self.index, "".join(self._new_texts), self._new_ids, self._logprobs, self.finish_reason)
        self._new_texts, self._new_ids, self._logprobs = [], [], []
        self.is_dirty = False
        return delta

    def _add_text(self, text: str) -> bool:
        if self._stops is None:
            self._new_texts.append(text)
            return False
        if self.num_tokens < self.sampling.min_tokens:  # text before min_tokens is never searched
            self._new_texts += self._stops.flush(), text
            return False
        self._new_texts.append(self._stops.push(text))
        if self._stops.matched is None:
            return False
        self.stop_reason = self._stops.matched
        if self.sampling.include_stop_str_in_output:
            self._new_texts.append(self._stops.matched)
        return True


class Generation:
    """All streams of one client request (prompts times n) behind one queue: one delivery per step."""

    __slots__ = (
        "_dirty",
        "_unread_since_ns",
        "_waiter",
        "count_unsent",
        "error",
        "is_admitted",
        "not_enforced",
        "num_open",
        "on_new",
        "request_id",
        "streams",
        "unread_ns",
    )

    def __init__(self, request_id: str, streams: Sequence[AnswerStream]) -> None:
        self.request_id = request_id
        self.streams = list(streams)
        self.num_open = len(self.streams)
        self.not_enforced: Sequence[str] = ()  # paths of keywords in schemas of the request
        self.is_admitted = False  # a worker has begun with one of its prompts
        self._dirty: list[AnswerStream] = []
        self.error: Exception | None = None  # that its reader gets
        self.unread_ns = 0  # how long deltas waited for a reader that was busy (with a client that does not read)
        self.count_unsent: Callable[[], int] | None = None  # bytes that the client has not taken; set by a reply
        self._unread_since_ns = 0
        self._waiter: asyncio.Future[bool] | None = None
        self.on_new: Callable[[], bool] | None = None  # while its reader waits, see ``read``
        for stream in self.streams:
            stream.generation = self

    @property
    def is_begun(self) -> bool:
        """Whether a worker has begun with it, so that its prompt was used."""
        return self.is_admitted or any(stream.num_tokens or stream.finished is not None for stream in self.streams)

    @property
    def has_failed(self) -> bool:
        """Whether its reader gets an error."""
        return self.error is not None

    @property
    def is_exhausted(self) -> bool:
        """Whether every sequence ended and everything was read."""
        return not self.num_open and not self._dirty and self.error is None

    def mark(self, stream: AnswerStream) -> None:
        """This answer has something new, for the next ``deliver`` or ``wake``."""
        if not stream.is_dirty:
            stream.is_dirty = True
            self._dirty.append(stream)

    def deliver(self) -> None:
        """The step is over: new deltas go to the reader's ``on_new``; the last ones, and errors, go to ``read``."""
        try:
            if self._dirty and (self.on_new is None or not self.num_open or not self.on_new()):
                if not self._unread_since_ns:
                    self._unread_since_ns = time.monotonic_ns()
                self.wake()
        except Exception as error:  # as if it had happened in the reader's own task
            self.fail(error)

    def admit(self) -> None:
        """A worker begins with one of its prompts."""
        if not self.is_admitted:
            self.is_admitted = True
            if self.on_new is None:  # its reader waits in ``begin``, or not at all
                self.wake()

    def wake(self) -> None:
        """Let ``begin`` or ``read`` return, if a reader waits there."""
        self.on_new = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def fail(self, error: Exception) -> None:
        """The whole request failed; the reader gets the error instead of more deltas."""
        self.error = self.error or error
        self.wake()

    def close(self) -> None:
        """Take in that no client reads the generation any more: what still comes for its answers is dropped. (A request
        would otherwise hold itself in a circle, with all of its prompt, until the garbage collector stops everything to
        look for it.)"""
        self.count_unsent = None
        if self.error is not None:
            self.error.__traceback__ = None
        for stream in self.streams:
            stream.generation = _NOBODY

    async def begin(self, patience_s: float) -> None:
        """Wait until a worker begins with the request, or there is something to read, but at most ``patience_s``.
        Raises the request's error."""
        if not (self.is_admitted or self._dirty or self.error is not None or not self.num_open):
            await self._wait(None, patience_s)
        if self.error is not None:
            raise self.error

    async def read(self, on_new: Callable[[], bool] | None = None, limit_s: float | None = None) -> list[Delta]:
        """Everything new, at least one delta, or nothing when ``limit_s`` have passed (None: no limit). Raises the
        request's error. One reader at a time.

        While it waits, ``on_new()`` is called as soon as there is something: it may ``take`` it at once, without a turn
        of the reader's task, and return True, or return False and leave it to ``read``.
        """
        while not self._dirty and self.error is None:
            if not await self._wait(on_new, limit_s):
                break
        if self.error is not None:
            raise self.error
        return self.take()

    async def _wait(self, on_new: Callable[[], bool] | None, limit_s: float | None) -> bool:
        """Wait for ``wake``. Returns False when ``limit_s`` have passed without one."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiter = waiter
        self.on_new = on_new
        timer = None if limit_s is None else loop.call_later(limit_s, _give_up, waiter)
        try:
            return await waiter
        finally:
            self._waiter = self.on_new = None
            if timer is not None:
                timer.cancel()

    def take(self) -> list[Delta]:
        """Everything new, without waiting."""
        if self._unread_since_ns:
            self.unread_ns += time.monotonic_ns() - self._unread_since_ns
            self._unread_since_ns = 0
        dirty, self._dirty = self._dirty, []
        return [stream.take() for stream in dirty]


def _give_up(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)


class _Nobody(Generation):
    """Stands for the readers that have gone."""

    __slots__ = ()

    def mark(self, stream: AnswerStream) -> None:
        """Nothing."""

    def admit(self) -> None:
        """Nothing."""

    def fail(self, error: Exception) -> None:
        """Nothing."""


_NOBODY = _Nobody("", ())
