"""One streamed answer as its client sees it: when events came, how many tokens they were, how it ended.

Owns the reading of server-sent events and the counting of tokens. Must never touch a socket or read a clock: every
piece of the answer comes with the time at which it was received. Whoever reads the bytes may be behind: ``catch_up``
makes it read all that has come.

An event with a choice is a token unless it says otherwise: ``token_ids`` or a running usage give exact numbers, an
event that only names a role is none, and an event without text that ends the answer is a token only if the final usage
counts it.
"""

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import msgspec


class _Delta(msgspec.Struct, gc=False):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct, gc=False):
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
    latency: Any = None  # None, or a dict of numbers: what else a server puts there is dropped


class _Event(msgspec.Struct, gc=False):
    choices: tuple[_Choice, ...] | None = None
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode
_decode_any = msgspec.json.Decoder().decode


class TokenStream:
    """One request on its way. Times are nanoseconds of the clock that the connection reads.

    intended_ns: when it should have been sent; sent_ns: when it was handed to the connection.
    stamps: one per event with tokens; looking at them brings all the rest up to date.
    sizes: tokens of each of these, where the server tells; else empty.
    error: what went wrong, None so far. done: resolves when the stream is over, one way or the other.
    """

    __slots__ = (
        "_after_cr",
        "_may_be_token",
        "_rest",
        "_running_count",
        "_stamps",
        "body",
        "catch_up",
        "connection",
        "done",
        "end_ns",
        "error",
        "finish_reason",
        "has_ended",
        "intended_ns",
        "is_complete",
        "location",
        "retry_after_s",
        "sent_ns",
        "sizes",
        "status",
        "token_ids",
        "usage",
    )

    def __init__(self, intended_ns: int, *, keep_token_ids: bool = False) -> None:
        self.intended_ns = intended_ns
        self.sent_ns = 0
        self.end_ns = 0
        self._stamps = array("q")
        self.sizes = array("l")
        self.token_ids: list[int] | None = [] if keep_token_ids else None
        self.usage: Usage | None = None
        self.status = 0
        self.error: str | None = None
        self.retry_after_s: float | None = None
        self.finish_reason: str | None = None
        self.location = ""  # of a redirection
        self.has_ended = False  # the server has said that the answer is whole
        self.is_complete = False
        self.body = bytearray()  # of a reply that is no stream
        self.catch_up: Callable[[], None] = _nothing
        self.connection: Any = None  # whatever can be told to ``abort``, while the answer is on its way
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rest = bytearray()  # of an event whose end has not come
        self._after_cr = False
        self._running_count = 0
        self._may_be_token = 0

    def feed(self, payload: bytes, now_ns: int) -> None:
        """The next bytes of a body of server-sent events, cut anywhere."""
        if (
            payload.endswith(b"\n\n")
            and payload.startswith(b"data: {")
            and payload.find(b"\n") == len(payload) - 2
            and not (self._rest or self._after_cr)
            and b"\r" not in payload
        ):  # nearly always: one event of one line
            self._on_json(payload[6:], now_ns)
            return
        if self._after_cr and payload.startswith(b"\n"):
            payload = payload[1:]
        self._after_cr = payload.endswith(b"\r")
        if b"\r" in payload:
            payload = payload.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        rest = self._rest
        rest += payload
        if rest.find(b"\n\n", max(0, len(rest) - len(payload) - 1)) < 0:
            return
        *events, self._rest = rest.split(b"\n\n")
        for event in events:
            self._on_event(bytes(event), now_ns)

    def finish(self, now_ns: int, error: str | None = None) -> None:
        """The answer is over: whole, or with an error. Later calls change nothing."""
        if not self.done.done():
            self.catch_up()  # which may show that it is over
        if self.done.done():
            return
        if error is None and self._rest:  # a last event without an empty line behind it: whole, or the answer is not
            last, self._rest = bytes(self._rest), bytearray()
            self._on_event(last, now_ns)
        self.end_ns = now_ns
        self.connection = None
        self.catch_up = _nothing  # and lets go of whoever it was
        if error is None and self.error is None and 200 <= self.status < 300:
            self.is_complete = True
        elif self.error is None:
            self.error = error or error_message(self.status, bytes(self.body), self.location)
        self.done.set_result(None)

    def cancel(self, now_ns: int, why: str) -> None:
        """Hang up."""
        connection = self.connection
        self.finish(now_ns, why)
        if connection is not None:
            connection.abort()

    @property
    def stamps(self) -> "array[int]":
        """Of all that has come."""
        self.catch_up()
        return self._stamps

    @property
    def output_tokens(self) -> int:
        """As the final usage says; without one, as the events say."""
        if self.usage is not None and self.usage.completion_tokens:
            return self.usage.completion_tokens
        return sum(self.sizes) if self.sizes else len(self._stamps)

    @property
    def num_events(self) -> int:
        """Events that carried tokens."""
        return len(self._stamps)

    def _on_event(self, event: bytes, now_ns: int) -> None:
        data = event[5:]
        if not event.startswith(b"data:") or b"\n" in event:
            data = _data_of(event)
        if data.strip() == b"[DONE]":
            self.has_ended = True
        elif data.strip():
            self._on_json(data, now_ns)

    def _on_json(self, data: bytes, now_ns: int) -> None:
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.error = self.error or f"an event is no JSON as expected: {error}: {data[:80]!r}"
            return
        if event.choices:
            choice = event.choices[0]
            if choice.text and choice.finish_reason is None and choice.token_ids is None and event.usage is None:
                self._stamps.append(now_ns)  # nearly always
            else:
                self._on_choice(choice, event.usage, now_ns)
        elif event.usage is None and event.error is None:
            event.error = _hidden_error(data)
        if event.usage is not None:
            self.usage = event.usage
            event.usage.latency = _numbers(event.usage.latency)
        if event.error is not None:
            self.error = self.error or _message_of(event.error)

    def _on_choice(self, choice: _Choice, usage: Usage | None, now_ns: int) -> None:
        delta = choice.delta
        text = choice.text if delta is None else (delta.content or delta.reasoning_content or delta.reasoning)
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason
            self.has_ended = True
        if choice.token_ids is not None:
            size = len(choice.token_ids)
            if self.token_ids is not None:
                self.token_ids += choice.token_ids
        elif usage is not None and (self._running_count or not self._stamps):  # a running count, not only a last one
            size = usage.completion_tokens - self._running_count
            self._running_count = usage.completion_tokens
        else:
            size = -1
        if size > 0:
            self._stamps.append(now_ns)
            self.sizes.append(size)
        elif size == 0:
            return
        elif text or (choice.finish_reason is None and (delta is None or delta.role is None)):
            self._stamps.append(now_ns)
        elif choice.finish_reason is not None:
            self._may_be_token = now_ns

    def settle(self) -> None:
        """Once the answer is over: the silent last event counts when the usage says that there was one token more."""
        if self._may_be_token and self.usage and self.usage.completion_tokens == len(self._stamps) + 1:
            self._stamps.append(self._may_be_token)
        self._may_be_token = 0


def _nothing() -> None:
    """Nobody is behind."""


def error_message(status: int, body: bytes, location: str = "") -> str:
    """What a server says in a reply that is no answer. location: where a redirection points, which is not followed."""
    if 300 <= status < 400:
        return f"HTTP {status}: redirected to {location or 'nowhere'}; redirections are not followed, give that address"
    text = body.decode(errors="replace").strip()
    try:
        decoded = _decode_any(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        decoded = None
    if isinstance(decoded, dict):
        text = _message_of(decoded.get("error") or decoded.get("detail") or decoded.get("message") or text)
    return f"HTTP {status}: {text[:500]}" if text else f"HTTP {status}"


def _message_of(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _hidden_error(data: bytes) -> Any:
    """Of an event with neither choices nor usage nor ``error``: some servers send the error as the event itself."""
    decoded = _decode_any(data)
    is_error = decoded.get("object") == "error" or ("message" in decoded and "choices" not in decoded)
    return decoded if is_error else None


def _numbers(latency: Any) -> dict[str, float] | None:
    if isinstance(latency, dict) and all(isinstance(value, float | int) for value in latency.values()):
        return {name: float(value) for name, value in latency.items()}
    return None


def _data_of(event: bytes) -> bytes:
    """The data of an event with other lines or with several: ``data`` lines without their names and one space."""
    fields = (line.partition(b":") for line in event.split(b"\n"))
    return b"\n".join(value.removeprefix(b" ") for name, _, value in fields if name == b"data")
