"""The reply to one generation request: one write per engine step, straight to the connection while it takes more, and
by ASGI's send when it does not.

A stream begins when a worker begins with the request, or when it has waited for OPEN_AFTER_S; what fails before is a
reply with a status, what fails later is an event. It is never silent for longer than SILENCE_S while its client reads.
Notices when the client goes away and aborts the request before the worker's next step. The Writer formats.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diptych.base.limited_log import LimitedLog, kind_of
from diptych.base.whole_lines import with_whole_lines
from diptych.control.errors import DiptychError
from diptych.serving.answers.answer_stream import AnswerStream, Delta, Generation
from diptych.serving.answers.native_panic import is_failure
from diptych.serving.api.api_flavour import CHAT, ApiFlavour
from diptych.serving.api.direct_body import DIRECT_BODY, DirectBody
from diptych.serving.api.error_responses import error_response
from diptych.serving.long_work import LONG
from diptych.serving.served_fleet import ServedFleet

failures = LimitedLog(logging.getLogger(__name__))

OPEN_AFTER_S = 1.0  # clients wait for the head of a reply; what fails sooner has a status
SILENCE_S = 12.0  # proxies, and clients, give up a connection on which nothing comes for long: some after 15 s
HEAD_ALONE_S = 0.4  # without an event behind it: some measuring programs read no comments, and few streams need one
LOGPROB_SIZE = 8  # characters that take as long to encode as a token with its log-probability to write
Result = TypeVar("Result")
MoreHeaders = Callable[[], Iterable[tuple[bytes, bytes]]]
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class ClientGoneError(Exception):
    """The client closed the connection."""


def reply_size(stream: AnswerStream) -> int:
    """What one answer counts as, in the queue of long work, when it is written at once."""
    return stream.num_tokens * (1 + _logprobs_size(stream.sampling.logprobs)) + _prompt_size(stream)


def event_size(stream: AnswerStream) -> int:
    """The same of the longest event of its stream. The first one has what was asked of the prompt."""
    return _logprobs_size(stream.sampling.logprobs) + _prompt_size(stream)


def _prompt_size(stream: AnswerStream) -> int:
    return stream.num_prompt_tokens * _logprobs_size(stream.sampling.prompt_logprobs)


def _logprobs_size(count: int | None) -> int:
    return 0 if count is None else LOGPROB_SIZE * (1 + count)


class Writer(Protocol):
    """Formats one kind of reply."""

    def opening(self) -> bytes:
        """The events with which a stream begins, before anything is known of the answer; called once."""
        ...

    def events(self, deltas: Iterable[Delta]) -> bytes:
        """Server-sent events for what is new."""
        ...

    def pause(self) -> bytes:
        """What is sent when there was no event for a while: nothing that would be taken for a part of the answer."""
        ...

    def last_events(self) -> bytes:
        """What comes after the last delta, without the end that every stream of the flavour has."""
        ...

    def failure(self, error: DiptychError) -> bytes:
        """What comes instead of all that is missing when the request fails in its stream."""
        ...

    def body(self, deltas: Iterable[Delta]) -> bytes:
        """The whole reply as JSON, given all deltas in order."""
        ...


class WholeResponse(Response, ABC):
    """Sends what a generation gave as one JSON reply."""

    def __init__(
        self, llm: ServedFleet, generation: Generation, flavour: ApiFlavour = CHAT, more_headers: MoreHeaders = tuple
    ) -> None:
        super().__init__()
        self._flavour = flavour
        self._llm = llm
        self._generation = generation
        self._more_headers = more_headers  # asked when the reply begins

    async def written(self, work: Callable[[], Result]) -> Result:
        """What ``work`` makes of the answers, off the event loop where they are long."""
        streams = self._generation.streams
        tenant = streams[0].options.tenant if streams else ""
        size = sum(map(reply_size, streams))
        return await self._llm.long_work.run(work, size, tenant, is_reply=True)

    @abstractmethod
    async def content(self, deltas: Sequence[Delta]) -> bytes:
        """The reply as JSON, given all deltas in order."""
        ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run until the generation ends or the client goes away."""
        state = scope.setdefault("state", {})
        state["reply_id"], state["generation"] = self._generation.request_id, self._generation  # for the layers around
        if (meter := state.get("meter")) is not None:
            meter.begin(self._generation)
        watch = asyncio.create_task(self._watch(receive))
        try:
            await self._send(scope, receive, send)
        except ClientGoneError:  # who would read of it is gone
            pass
        finally:
            watch.cancel()
            self._llm.abort(self._generation)
            self._generation.close()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._llm.abort(self._generation)
        self._generation.fail(ClientGoneError())

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        deltas: list[Delta] = []

        def gather() -> bool:
            deltas.extend(generation.take())
            return True

        try:
            while not generation.is_exhausted:
                deltas += await generation.read(gather)
            response = Response(await self.content(deltas), 200, media_type="application/json")
            response.raw_headers.extend(self._more_headers())
        except DiptychError as error:
            response = error_response(error, self._flavour)
        await response(scope, receive, send)


class GenerationResponse(WholeResponse):
    """Sends a generation as a stream or as one JSON reply."""

    def __init__(
        self,
        llm: ServedFleet,
        generation: Generation,
        writer: Writer,
        *,
        stream: bool,
        flavour: ApiFlavour = CHAT,
        more_headers: MoreHeaders = tuple,
    ) -> None:
        super().__init__(llm, generation, flavour, more_headers)
        self._writer = writer
        self._stream = stream
        self._due_s = 0.0
        self._has_long_events = sum(map(event_size, generation.streams)) >= LONG

    async def content(self, deltas: Sequence[Delta]) -> bytes:
        return await self.written(lambda: self._writer.body(deltas))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._stream:
            await self._send_stream(scope, receive, send)
        else:
            await super()._send(scope, receive, send)

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, writer = self._generation, self._writer
        on_new = self._direct_writes(scope)
        if self._has_long_events:
            on_new = None
        try:
            await generation.begin(OPEN_AFTER_S)
        except DiptychError as error:
            await error_response(error, self._flavour)(scope, receive, send)
            return
        headers = [*_STREAM_HEADERS, *self._more_headers()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._on_sent(HEAD_ALONE_S)
        try:
            tail = await self._send_events(send, on_new)
        except DiptychError as error:
            tail = writer.failure(error)
        except ClientGoneError:
            raise
        except BaseException as error:
            if not is_failure(error):
                raise
            failures.error(kind_of(error), "a stream failed", error=error)
            tail = writer.failure(DiptychError("internal error; the server's log has the details"))
        body = with_whole_lines(tail) + self._flavour.done
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _send_events(self, send: Send, on_new: Callable[[], bool] | None) -> bytes:
        """Send everything but the last events, which are returned. Raises the request's error."""
        generation, writer = self._generation, self._writer
        events = with_whole_lines(writer.opening())
        if deltas := generation.take():
            events += await self._events(deltas)
        while not generation.is_exhausted:
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
                self._on_sent(SILENCE_S)
            deltas = await self._read(on_new)
            events = await self._events(deltas) if deltas else writer.pause()
        return events + await self._last_events()

    async def _events(self, deltas: Sequence[Delta]) -> bytes:
        if not self._has_long_events:
            return with_whole_lines(self._writer.events(deltas))
        return await self.written(lambda: with_whole_lines(self._writer.events(deltas)))

    async def _last_events(self) -> bytes:
        return self._writer.last_events()

    async def _read(self, on_new: Callable[[], bool] | None) -> list[Delta]:
        """Everything new; nothing when nothing was sent for too long, not by ``on_new`` either."""
        time = asyncio.get_running_loop().time
        while (left_s := self._pause_due_s() - time()) > 0:
            if deltas := await self._generation.read(on_new, left_s):
                return deltas
        return []

    def _on_sent(self, silence_s: float) -> None:
        """Note that something was sent. silence_s: how long it may be the last."""
        self._due_s = asyncio.get_running_loop().time() + silence_s

    def _pause_due_s(self) -> float:
        """When silence has to end, by the loop's clock."""
        return self._due_s

    def _direct_writes(self, scope: Scope) -> Callable[[], bool] | None:
        """A function that writes new deltas at once (see Generation.read); None where the server has no DirectBody."""
        generation, writer = self._generation, self._writer
        body: DirectBody | None = scope.get("extensions", {}).get(DIRECT_BODY, {}).get("body")
        if body is None:
            return None

        def take() -> bytes:
            if events := with_whole_lines(writer.events(generation.take())):
                self._on_sent(SILENCE_S)
            return events

        generation.count_unsent = body.count_unsent
        return body.writes(take)
