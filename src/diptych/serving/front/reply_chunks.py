"""What the front reads of an engine's reply: events of a stream, the parts of a chunk that decide something, usage.

Unknown fields are passed on unread, and unknown events too. A chunk is changed only where the front had asked the
engine for more than the client did (usage, token ids): that is taken out again.
"""

import re
from typing import Any

import msgspec

from diptych.serving import edge_limits

DONE = b"[DONE]"
_TOKEN_IDS = re.compile(rb',\s*"(?:prompt_)?token_ids"\s*:\s*(?:\[[\d,\s]*\]|null)')
_BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n|\r\r")


class UnreadableReplyError(Exception):
    """An engine's reply is not what its protocol says."""


class EventSplitter:
    """Server-sent events out of bytes that were cut anywhere. rest: what has come of the next event; it grows in place,
    so that an event that comes in many pieces is copied and searched once."""

    def __init__(self) -> None:
        self.rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the events that are whole now; comments and events without data give none. Raises
        UnreadableReplyError for an event that is too long."""
        is_whole = data.startswith(b"data: ") and data.endswith(b"\n\n") and not self.rest
        if is_whole and data.count(b"\n") == 2 and b"\r" not in data:
            return [data[6:-2]]  # one event, as most are
        payloads: list[bytes] = []
        searched = max(0, len(self.rest) - 3)  # a blank line may have been cut
        self.rest += data
        begin = 0
        while found := _BLANK_LINE.search(self.rest, max(begin, searched)):
            start, end = found.span()
            del found  # a match holds the bytes that it was found in, which could not change then
            payload = _payload(bytes(self.rest[begin:start]))
            begin = end
            if payload is not None:
                payloads.append(payload)
        del self.rest[:begin]
        if len(self.rest) > edge_limits.ENGINE_EVENT_BYTES:
            raise UnreadableReplyError(f"an event of the stream is longer than {edge_limits.ENGINE_EVENT_BYTES} bytes")
        return payloads


def _payload(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event and b"\r" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


class TokenDetails(msgspec.Struct):
    """A part of usage."""

    cached_tokens: int | None = None


class EngineUsage(msgspec.Struct):
    """Token usage of a reply. total_tokens: some servers report only this for requests without an answer (rerank)."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: TokenDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the engine found in its prefix cache; None: it does not say."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None

    @property
    def all_prompt_tokens(self) -> int:
        """Tokens of the prompts, in whichever field they are reported (0: in none)."""
        return max(0, self.prompt_tokens or (self.total_tokens or 0) - (self.completion_tokens or 0))

    @property
    def answer_tokens(self) -> int | None:
        """Tokens of all answers; None: not reported."""
        said = self.completion_tokens
        return None if said is None or said < 0 else said


class ChunkDelta(msgspec.Struct):
    """What a chat chunk adds. tool_calls, reasoning: only whether there are any."""

    role: str | None = None
    content: Any = None  # text; of some servers, for what is no text, a list of parts
    tool_calls: msgspec.Raw = msgspec.Raw()
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it adds nothing but text of the answer."""
        has_calls = bytes(self.tool_calls) not in (b"", b"null", b"[]")
        return not (has_calls or self.reasoning_content or self.reasoning)


class ChunkChoice(msgspec.Struct):
    """One choice of a chunk or of a whole reply. message: of a chat's whole reply, unread."""

    index: int = 0
    text: str | None = None
    delta: ChunkDelta | None = None
    message: msgspec.Raw = msgspec.Raw()
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None

    @property
    def has_text(self) -> bool:
        """Whether it adds text to the answer."""
        return bool(self.text or (self.delta is not None and self.delta.content))

    @property
    def num_tokens(self) -> int:
        """Tokens that it brings: counted where the engine names them, else one for a chunk with content, and for one
        with an empty text, which is a part of a character; not for one that only begins the answer, or ends it."""
        if self.token_ids is not None:
            return len(self.token_ids)
        if self.has_text or (self.delta is not None and not self.delta.is_plain):
            return 1
        if self.finish_reason is not None:
            return 0
        is_part = self.text if self.delta is None else self.delta.content
        return int(is_part is not None and (self.delta is None or self.delta.role is None))

    @property
    def num_text_bytes(self) -> int:
        """Bytes of this choice in a whole reply: its text, its reasoning, its tool calls."""
        if not self.message:
            return len((self.text or "").encode())
        try:
            found = _message_decoder.decode(self.message)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return len(self.message)
        texts = (found.content, found.reasoning_content or found.reasoning)
        return len(found.tool_calls) + sum(len(text.encode()) for text in texts if isinstance(text, str))


_message_decoder = msgspec.json.Decoder(ChunkDelta)


class EngineChunk(msgspec.Struct):
    """What is read of a chunk, and of a whole reply."""

    id: Any = ""
    created: Any = 0
    model: Any = ""
    choices: list[ChunkChoice] = []
    usage: EngineUsage | None = None
    error: Any = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(EngineChunk)


def read_chunk(payload: bytes) -> EngineChunk:
    """Raises UnreadableReplyError."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableReplyError(f"the engine sent no chunk that can be read: {error}") from None


def without_token_ids(payload: bytes) -> bytes:
    """A chunk as it is without ``return_token_ids``. (Within a JSON string the quotes of a name would be escaped, so
    that only fields match.)"""
    return _TOKEN_IDS.sub(b"", payload)


def error_message(payload: bytes, fallback: str) -> str:
    """The message of an engine's error, in OpenAI's or another usual form; at most 2,000 characters."""
    try:
        content = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return fallback
    found = content
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    return found[:2000] if isinstance(found, str) and found else fallback
