"""One streamed answer as its client sees it: when events came, how many tokens they were, how it ended.

Owns the reading of server-sent events and the counting of tokens. Must never touch a socket or read a clock: every
piece of the answer comes with the time at which it was received.

An event with a choice is a token unless it says otherwise: ``token_ids`` or a running usage give exact numbers, an
event that only names a role is none, and an event without text that ends the answer is a token only if the final usage
counts it.
"""

import asyncio
from array import array
from typing import Any

import msgspec


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts as the server gives them, and (ours, when asked for) where the time went, in milliseconds."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    latency: dict[str, float] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class TokenStream:
    """One request on its way. Times are nanoseconds of the clock that the connection reads.

    intended_ns: when it should have been sent; sent_ns: when it was handed to the connection.
    stamps: one per event with tokens. sizes: tokens of each of these, where the server tells; else empty.
    error: what went wrong, None so far. done: resolves when the stream is over, one way or the other.
    """

    __slots__ = (
        "_may_be_token",
        "_rest",
        "_running_count",
        "body",
        "connection",
        "done",
        "end_ns",
        "error",
        "finish_reason",
        "intended_ns",
        "is_complete",
        "retry_after_s",
        "sent_ns",
        "sizes",
        "stamps",
        "status",
        "token_ids",
        "usage",
    )

    def __init__(self, intended_ns: int, *, keep_token_ids: bool = False) -> None:
        self.intended_ns = intended_ns
        self.sent_ns = 0
        self.end_ns = 0
        self.stamps = array("q")
        self.sizes = array("l")
        self.token_ids: list[int] | None = [] if keep_token_ids else None
        self.usage: Usage | None = None
        self.status = 0
        self.error: str | None = None
        self.retry_after_s: float | None = None
        self.finish_reason: str | None = None
        self.is_complete = False
        self.body = b""  # of a reply that is no stream
        self.connection: Any = None  # whatever can be told to ``abort``, while the answer is on its way
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rest = b""
        self._running_count = 0
        self._may_be_token = 0

    def feed(self, payload: bytes, now_ns: int) -> None:
        """The next bytes of a body of server-sent events."""
        if self._rest:
            payload = self._rest + payload
        elif payload.startswith(b"data: {") and payload.endswith(b"\n\n") and payload.find(b"\n") == len(payload) - 2:
            # nearly always: one event of one line
            self._on_json(payload[6:], now_ns)
            return
        if b"\r" in payload:
            payload = payload.replace(b"\r\n", b"\n")
        *events, self._rest = payload.split(b"\n\n")
        for event in events:
            self._on_event(event, now_ns)

    def finish(self, now_ns: int, error: str | None = None) -> None:
        """The answer is over: whole, or with an error. Later calls change nothing."""
        if self.done.done():
            return
        self.end_ns = now_ns
        self.connection = None
        if error is None and self.error is None and 200 <= self.status < 300:
            self.is_complete = True
        elif self.error is None:
            self.error = error or error_message(self.status, self.body)
        self.done.set_result(None)

    def cancel(self, now_ns: int, why: str) -> None:
        """Hang up."""
        connection = self.connection
        self.finish(now_ns, why)
        if connection is not None:
            connection.abort()

    @property
    def output_tokens(self) -> int:
        """As the final usage says; without one, as the events say."""
        if self.usage is not None and self.usage.completion_tokens:
            return self.usage.completion_tokens
        return sum(self.sizes) if self.sizes else len(self.stamps)

    @property
    def num_events(self) -> int:
        """Events that carried tokens."""
        return len(self.stamps)

    def _on_event(self, event: bytes, now_ns: int) -> None:
        if not event.startswith(b"data:") or b"\n" in event:
            event = _data_of(event)
            if not event:
                return
        data = event[5:]
        if not data.startswith((b" [DONE]", b"[DONE]")):
            self._on_json(data, now_ns)

    def _on_json(self, data: bytes, now_ns: int) -> None:
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.error = self.error or f"an event is no JSON as expected: {error}: {data[:80]!r}"
            return
        if event.usage is not None:
            self.usage = event.usage
        if event.error is not None:
            self.error = self.error or _message_of(event.error)
        if event.choices:
            choice = event.choices[0]
            if choice.text and choice.finish_reason is None and choice.token_ids is None and event.usage is None:
                self.stamps.append(now_ns)  # nearly always
            else:
                self._on_choice(choice, event.usage, now_ns)

    def _on_choice(self, choice: _Choice, usage: Usage | None, now_ns: int) -> None:
        delta = choice.delta
        text = choice.text if delta is None else (delta.content or delta.reasoning_content)
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason
        if choice.token_ids is not None:
            size = len(choice.token_ids)
            if self.token_ids is not None:
                self.token_ids += choice.token_ids
        elif usage is not None and (self._running_count or not self.stamps):  # a running count, not only a last one
            size = usage.completion_tokens - self._running_count
            self._running_count = usage.completion_tokens
        else:
            size = -1
        if size > 0:
            self.stamps.append(now_ns)
            self.sizes.append(size)
        elif size == 0:
            return
        elif text or (choice.finish_reason is None and (delta is None or delta.role is None)):
            self.stamps.append(now_ns)
        elif choice.finish_reason is not None:
            self._may_be_token = now_ns

    def settle(self) -> None:
        """Once the answer is over: the silent last event counts when the usage says that there was one token more."""
        if self._may_be_token and self.usage and self.usage.completion_tokens == len(self.stamps) + 1:
            self.stamps.append(self._may_be_token)
        self._may_be_token = 0


def error_message(status: int, body: bytes) -> str:
    """What a server says in a reply that is no answer."""
    text = body.decode(errors="replace").strip()
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.DecodeError:
        decoded = None
    if isinstance(decoded, dict):
        text = _message_of(decoded.get("error") or decoded.get("detail") or decoded.get("message") or text)
    return f"HTTP {status}: {text[:500]}" if text else f"HTTP {status}"


def _message_of(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _data_of(event: bytes) -> bytes:
    """The data lines of an event with other lines or with several, as one line."""
    lines = [line[5:].lstrip(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"data:" + b"\n".join(lines) if lines else b""
