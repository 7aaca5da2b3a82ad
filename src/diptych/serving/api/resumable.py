"""Streams that a client can go on with: ids on server-sent events, and the request that names the last one seen.

    id: <stream>.<tokens>        on the last event of each step; ``tokens``: of the answer, up to this event
    Last-Event-ID: <that id>     on the same request, sent again: the events after that one

The stream continues with exactly the tokens that would have come. Owns which requests have ids: streams of one answer
without log-probabilities and echo.
"""

import random
from collections.abc import Iterable
from typing import TypeVar

from starlette.requests import Request

from diptych.control.errors import DiptychError, InvalidRequestError, NotFoundError, UnavailableError
from diptych.serving.answers.answer_stream import Delta, Generation
from diptych.serving.answers.stream_journal import StreamHead, StreamJournal, StreamRecord
from diptych.serving.api.api_flavour import COMMENT
from diptych.serving.api.bodies import checked, in_turn, read_body, tenant_in
from diptych.serving.api.protocol import CompletionBody, GenerationBody
from diptych.serving.api.responses import Writer
from diptych.serving.async_llm import AsyncLLM
from diptych.serving.long_work import LONG

Body = TypeVar("Body", bound=GenerationBody)
HEADER = "last-event-id"


class ResumableWriter:
    """A Writer whose events have ids. num_tokens: of the answer, that the client has."""

    def __init__(self, writer: Writer, stream_id: str, num_tokens: int = 0) -> None:
        self._writer = writer
        self._stream_id = stream_id.encode()
        self._num_tokens = num_tokens

    def opening(self) -> bytes:
        """The first event. It has no id: a client that has seen nothing else asks anew."""
        return self._writer.opening()

    def pause(self) -> bytes:
        """A comment, as a line without the empty one that would end it. OpenAI's client for Python takes an empty line
        for an event, without data, once it has seen an id."""
        return COMMENT[:-1]

    def failure(self, error: DiptychError) -> bytes:
        return self._writer.failure(error)

    def events(self, deltas: Iterable[Delta]) -> bytes:
        deltas = list(deltas)
        self._num_tokens += sum(len(delta.token_ids) for delta in deltas)
        events = self._writer.events(deltas)
        if not events:
            return b""
        begin = events.rfind(b"\n\n", 0, len(events) - 2) + 2  # of the last event; -1 + 2 where it is the only one
        begin = 0 if begin == 1 else begin
        return b"%bid: %b.%d\n%b" % (events[:begin], self._stream_id, self._num_tokens, events[begin:])

    def last_events(self) -> bytes:
        return self._writer.last_events()

    def body(self, deltas: Iterable[Delta]) -> bytes:
        return self._writer.body(deltas)


def wanted_record(journal: StreamJournal | None, request: Request, kind: str, tenant: str) -> StreamRecord | None:
    """What the client of this request has seen of a stream; None when it asks for a new one. Raises InvalidRequestError
    where no streams are recorded, NotFoundError when the record is gone."""
    event_id = request.headers.get(HEADER)
    if event_id is None:
        return None
    if journal is None:
        message = "Last-Event-ID: this server does not record streams (--survive-restart)"
        raise InvalidRequestError(message, param="Last-Event-ID", code="not_recorded")
    stream_id, _, seen = event_id.rpartition(".")
    record = journal.load(stream_id, int(seen)) if seen.isdecimal() and len(seen) < 10 else None
    if record is None or record.head.kind != kind or record.head.tenant != tenant:
        message = f"Last-Event-ID is {event_id!r}; there is no such stream, or not any more"
        raise NotFoundError(message, param="Last-Event-ID")
    return record


async def resumable_body(
    request: Request, llm: AsyncLLM, model: type[Body], kind: str
) -> tuple[Body, StreamRecord | None]:
    """The body of a request, and the record of the stream that it wants to go on with: then the body is the recorded
    one, and what still runs of that stream here is ended. Raises as ``read_body`` and ``wanted_record`` do."""
    body = await read_body(request, model)
    if HEADER not in request.headers:
        return body, None
    tenant = tenant_in(request)  # what is recorded may be long
    record = await in_turn(request, lambda: wanted_record(llm.journal, request, kind, tenant), LONG)
    if record is None or llm.journal is None:
        return body, None
    live = llm.journal.live(record.stream_id)
    if live is not None:
        llm.abort(live)
        live.fail(UnavailableError("the stream goes on in another connection", code="resumed"))
    recorded_body = record.head.body
    return await in_turn(request, lambda: checked(recorded_body, model), len(recorded_body)), record


def is_resumable(body: GenerationBody) -> bool:
    """Whether the stream that this asks for can be gone on with."""
    extras = [getattr(body, name, None) for name in ("logprobs", "prompt_logprobs", "echo", "return_token_ids")]
    is_single = (body.n or 1) == 1 and not any(extra is not None and extra is not False for extra in extras)
    prompt = body.prompt if isinstance(body, CompletionBody) else ""
    is_list = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return bool(body.stream) and is_single and not is_list


def with_seed(body: Body) -> Body:
    """The body with a seed: what is drawn now is drawn again when the stream is gone on with."""
    return body if body.seed is not None else body.model_copy(update={"seed": random.getrandbits(63)})


def recorded(
    journal: StreamJournal, generation: Generation, writer: Writer, head: StreamHead, record: StreamRecord | None
) -> Writer:
    """The writer of a stream that is recorded from now on. record: of one that goes on; what the client has seen is
    written to nowhere."""
    if record is None:
        return ResumableWriter(writer, generation.request_id) if journal.begin(generation, head) else writer
    if record.finished is None:
        journal.begin(generation, head)
    if record.seen is not None:
        writer.events([record.seen])
    return ResumableWriter(writer, record.stream_id, record.num_seen)
