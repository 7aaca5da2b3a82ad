"""The routes of the live timeline: a stream, a page of records, and a file for Perfetto.

Owns the server-sent events: batches, ids, heartbeats. Waits for a client only in the response to that client.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Header, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from diptych.control.errors import InvalidRequestError, OverloadedError
from diptych.control.slo import NS_PER_S
from diptych.serving import edge_limits
from diptych.serving.api.bodies import tenant_in
from diptych.serving.api.direct_body import DIRECT_BODY
from diptych.timeline.records import GapRecord, HeaderRecord, Record
from diptych.timeline.ring import Subscription, Timeline
from diptych.timeline.trace import hold, trace

BATCH_INTERVAL_S, HEARTBEAT_S = 0.1, 10.0
CATCH_UP_REST = 2.0  # times that one event took to encode, before the next event of a reader that catches up
DEFAULT_PAGE = 1000
HEARTBEAT = b": nothing new\n\n"

Since = Annotated[str | None, Query(description="What comes after this record: its number, or the id of an event")]
Workers = Annotated[str | None, Query(description="Only these workers, such as 0,2")]
Limit = Annotated[str | None, Query(description=f"Most records of the reply: 1 to {edge_limits.TIMELINE_PAGE_RECORDS}")]
Last = Annotated[str | None, Query(description="Seconds before now from which records are wanted")]


class TimelinePage(BaseModel):
    """The reply of /timeline/records. next: the ``since`` of the page after this one."""

    header: dict[str, Any]
    records: list[dict[str, Any]]
    next: str


class TraceReply(BaseModel):
    """The reply of /timeline/perfetto: a trace in the JSON Object Format, with its own names."""

    traceEvents: list[dict[str, Any]]
    displayTimeUnit: str
    otherData: dict[str, Any]


def add_timeline_routes(app: FastAPI, timeline: Timeline, errors: dict[int | str, dict[str, Any]]) -> None:
    """Add ``/timeline`` and what belongs to it. errors: the documented replies of 400 and more."""
    drawing, catching_up = asyncio.Lock(), asyncio.Lock()
    readers: Counter[str] = Counter()  # by tenant
    refusals: dict[int | str, dict[str, Any]] = {status: errors[status] for status in (400, 401)}
    stream = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}

    @app.get("/timeline", responses={**refusals, 429: errors[429], 200: stream}, response_class=StreamingResponse)
    async def live(
        request: Request,
        since: Since = None,
        workers: Workers = None,
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> Response:
        """What the workers do, from now on or after a record; each event is a JSON list of records, a header first."""
        chosen, position = _workers(workers), _position(timeline, last_event_id or since)
        tenant = tenant_in(request)
        if tenant and readers[tenant] >= edge_limits.TIMELINE_READERS_OF_TENANT:
            message = f"this key reads the timeline {readers[tenant]} times already, the limit"
            raise OverloadedError(message, code="too_many_readers")
        subscription = timeline.subscribe(position)
        subscription.workers = chosen
        readers[tenant] += 1
        return _Stream(timeline, subscription, catching_up, partial(_leave, readers, tenant))

    @app.get("/timeline/records", responses={**refusals, 200: {"model": TimelinePage}})
    async def records(since: Since = None, workers: Workers = None, limit: Limit = None) -> Response:
        """A page of what is held; without ``since`` from the oldest record on."""
        position = _position(timeline, since)
        reader = Subscription(timeline, timeline.first_sequence - 1 if position is None else position)
        reader.workers = _workers(workers)
        count = DEFAULT_PAGE if limit is None else round(_number("limit", limit, edge_limits.TIMELINE_PAGE_RECORDS))
        return Response(_page(timeline, reader, count), media_type="application/json")

    @app.get("/timeline/perfetto", responses={**refusals, 200: {"model": TraceReply}})
    async def perfetto(last_s: Last = None) -> Response:
        """What is held as a trace for https://ui.perfetto.dev and chrome://tracing."""
        last_ns = None if last_s is None else round(_number("last_s", last_s, edge_limits.TRACE_S) * NS_PER_S)
        async with drawing:  # one at a time: it takes a second of a core when much is held
            holding = hold(timeline, time.monotonic_ns())
            pieces = await asyncio.to_thread(trace, holding, last_ns)
        headers = {"content-disposition": 'attachment; filename="diptych-timeline.json"'}
        return StreamingResponse(iter_pieces(pieces), headers=headers, media_type="application/json")


def _leave(readers: Counter[str], tenant: str) -> None:
    readers[tenant] -= 1
    if not readers[tenant]:
        del readers[tenant]


async def iter_pieces(pieces: list[bytes]) -> AsyncIterator[bytes]:
    """One after the other: StreamingResponse would give a plain list to threads."""
    for piece in pieces:
        yield piece


class _Stream(StreamingResponse):
    """Server-sent events until the client goes or the server stops; frees its subscription whatever happens."""

    def __init__(
        self, timeline: Timeline, subscription: Subscription, catching_up: asyncio.Lock, on_end: Callable[[], None]
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events(timeline, subscription, catching_up), headers=headers, media_type="text/event-stream")
        self._subscription = subscription
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. A client that takes nothing for OBSERVER_SILENCE_S loses its place: ``send`` waits for it."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(edge_limits.OBSERVER_SILENCE_S):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except (TimeoutError, ClientDisconnect):
            if body := scope.get("extensions", {}).get(DIRECT_BODY, {}).get("body"):
                body.abort()  # a connection that is closed waits until its client has read everything
        finally:
            self._subscription.close()
            self._on_end()


async def events(timeline: Timeline, subscription: Subscription, catching_up: asyncio.Lock) -> AsyncIterator[bytes]:
    """The server-sent events of one reader: at most one every 100 ms while it keeps up, a comment every 10 s else.

    Readers that have more than one event to catch up hold ``catching_up`` in turns, and rest between two events: a
    crowd of them, which all begin with the oldest record, takes a third of the loop, and what is served goes on."""
    header = timeline.header(subscription.sequence, time.monotonic_ns())
    yield _event(timeline, subscription.sequence, [header])
    quiet_s = 0.0
    while True:
        if subscription.num_unread > edge_limits.TIMELINE_EVENT_RECORDS:
            async with catching_up:
                started = time.monotonic()
                event = _next_event(timeline, subscription)
                await asyncio.sleep(CATCH_UP_REST * (time.monotonic() - started))
        else:
            event = _next_event(timeline, subscription)
        if event:
            yield event
            quiet_s = 0.0
        elif timeline.is_closed:
            return
        elif quiet_s >= HEARTBEAT_S:
            yield HEARTBEAT
            quiet_s = 0.0
        if not subscription.is_behind:
            await asyncio.sleep(BATCH_INTERVAL_S)
            quiet_s += BATCH_INTERVAL_S


def _next_event(timeline: Timeline, subscription: Subscription) -> bytes:
    """What the reader has not seen, as far as one event holds it; b"" where that is nothing."""
    batch = subscription.take(edge_limits.TIMELINE_EVENT_RECORDS)
    return _event(timeline, subscription.sequence, batch) if batch else b""


def _event(timeline: Timeline, sequence: int, records: Sequence[Record | GapRecord | HeaderRecord]) -> bytes:
    return b"id: %s.%d\ndata: %s\n\n" % (timeline.run_id.encode(), sequence, msgspec.json.encode(records))


def _page(timeline: Timeline, reader: Subscription, limit: int) -> bytes:
    header = timeline.header(max(reader.sequence, timeline.first_sequence - 1), time.monotonic_ns())
    records = reader.take(limit)
    return msgspec.json.encode({"header": header, "records": records, "next": f"{timeline.run_id}.{reader.sequence}"})


def _position(timeline: Timeline, text: str | None) -> int | None:
    """The number in ``since`` or Last-Event-ID. Of another run of the server: 0, which is all that this one holds."""
    if not text:
        return None
    run_id, _, number = text.rpartition(".")
    if not (number.isascii() and number.isdigit() and len(number) <= 18):
        raise InvalidRequestError(
            f"since is {text[:40]!r}; expected the number of a record or the id of an event", param="since"
        )
    return int(number) if run_id in ("", timeline.run_id) else 0


def _workers(text: str | None) -> frozenset[int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
        raise InvalidRequestError(f"workers is {text[:40]!r}; expected numbers such as 0,2", param="workers")
    return frozenset(map(int, parts))


def _number(name: str, text: str, most: float) -> float:
    """A positive number of at most ``most``; whole ones stay exact."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (1 if name == "limit" else 0.001) <= value <= most:
        raise InvalidRequestError(f"{name} is {text[:40]!r}; it must be at most {most:,} and positive", param=name)
    return value
