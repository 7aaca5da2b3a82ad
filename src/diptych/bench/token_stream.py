"""One streamed answer as its client sees it: when events came, how many tokens they were, how it ended.

Reads server-sent events and counts tokens. No socket, no clock: every piece of the answer comes with the time at which
it was received.

An event with a choice is a token unless it says otherwise: ``token_ids`` or a running usage give exact numbers, an
event that only names a role is none, and an event without text that ends the answer is a token (or several, of which
no other event told) only if the final usage counts it.
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


class ReportedUsage(msgspec.Struct):
    """Token counts as the server gives them; latency: a Diptych server says where the time went, in milliseconds."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    latency: Any = None  # None, or a dict of numbers: what else a server puts there is dropped


class _Event(msgspec.Struct, gc=False):
    choices: tuple[_Choice, ...] | None = None
    usage: ReportedUsage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode
_decode_any = msgspec.json.Decoder().decode


class TokenStream:
    """One request on its way. Times are nanoseconds of the monotonic clock (clock.py).

    intended_ns: when it should have been sent; sent_ns: when it was handed to the connection; end_ns: when it was over.
    stamps: one per event with tokens. sizes: tokens of each of these, where the server tells; else empty.
    token_ids: of the answer, when they are kept. has_ended: the server has said that the answer is whole.
    is_complete: it came whole, without an error. error: what went wrong; None so far. location: of a redirection.
    body: of a reply that is no stream. hang_up: closes the connection; None unless the answer is on its way.
    done: resolves when the stream is over, with or without an error.
    """

    def __init__(self, intended_ns: int, *, keep_token_ids: bool = False, keep_text: bool = False) -> None:
        self.intended_ns = intended_ns
        self.sent_ns = 0
        self.end_ns = 0
        self.stamps = array("q")
        self.sizes = array("l")
        self.token_ids: list[int] | None = [] if keep_token_ids else None
        self.usage: ReportedUsage | None = None
        self.status = 0
        self.error: str | None = None
        self.finish_reason: str | None = None
        self.location = ""
        self.has_ended = False
        self.is_complete = False
        self.body = bytearray()
        self.hang_up: Callable[[], None] | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._text: list[str] | None = [] if keep_text else None
        self._rest = bytearray()  # of an event whose end has not come
        self._after_cr = False
        self._running_count = 0
        self._may_be_token = 0  # when an event came that is a token only if the final usage counts it

    def feed(self, payload: bytes, now_ns: int) -> None:
        """The next bytes of a body of server-sent events, cut anywhere."""
        if (
            payload.endswith(b"\n\n")
            and payload.startswith(b"data: {")
            and payload.find(b"\n") == len(payload) - 2
            and not (self._rest or self._after_cr)
            and b"\r" not in payload
        ):  # nearly always: a single event of a single line
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
        if self.done.done():
            return
        if error is None and self._rest:  # a last event without an empty line behind it: whole, or the answer is not
            last, self._rest = bytes(self._rest), bytearray()
            self._on_event(last, now_ns)
        self._settle()
        self.end_ns = now_ns
        self.hang_up = None
        if error is None and self.error is None and 200 <= self.status < 300:
            self.is_complete = True
        elif self.error is None:
            self.error = error or error_message(self.status, bytes(self.body), self.location)
        self.done.set_result(None)

    def cancel(self, now_ns: int, why: str) -> None:
        """Give up the answer and close its connection."""
        hang_up = self.hang_up
        self.finish(now_ns, why)
        if hang_up is not None:
            hang_up()

    @property
    def text(self) -> str | None:
        """The answer's text, if it is kept; without what a model says while it reasons. None: there is none."""
        return "".join(self._text or ()) or None

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer by the final usage; without it, by the events."""
        if self.usage is not None and self.usage.completion_tokens:
            return self.usage.completion_tokens
        return sum(self.sizes) if self.sizes else len(self.stamps)

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
            is_plain = choice.finish_reason is None and choice.token_ids is None and event.usage is None
            if choice.text and is_plain and self._text is None:  # nearly always
                self.stamps.append(now_ns)
            else:
                self._on_choice(choice, event.usage, now_ns)
        elif event.usage is None and event.error is None:
            event.error = _hidden_error(data)
        if event.usage is not None:
            self.usage = event.usage
            event.usage.latency = _numbers(event.usage.latency)
        if event.error is not None:
            self.error = self.error or _message_of(event.error)

    def _on_choice(self, choice: _Choice, usage: ReportedUsage | None, now_ns: int) -> None:
        delta = choice.delta
        text = choice.text if delta is None else delta.content
        if text and self._text is not None:
            self._text.append(text)
        if delta is not None:
            text = text or delta.reasoning_content or delta.reasoning
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason
            self.has_ended = True
        if choice.token_ids is not None:
            size = len(choice.token_ids)
            if self.token_ids is not None:
                self.token_ids += choice.token_ids
        elif usage is not None and (self._running_count or not self.stamps):  # a running count, not only a final usage
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

    def _settle(self) -> None:
        """The answer is over: the silent last event counts if the usage says that there was another token; of an answer
        without any other event (servers join the tokens of a busy moment in one), whatever their number."""
        if self._may_be_token and self.usage:
            count = self.usage.completion_tokens
            if count == len(self.stamps) + 1 or (count and not self.stamps):
                self.stamps.append(self._may_be_token)
        self._may_be_token = 0


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
    """The error in an event with neither choices nor usage nor ``error``: some servers send the error as the event
    itself."""
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
