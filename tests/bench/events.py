"""Server-sent events of OpenAI-compatible servers, as tests write them."""

from typing import Any

import msgspec


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def text(word: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    """A choice of a completion."""
    return {"choices": [{"index": 0, "text": word, "finish_reason": reason, **more}]}


def delta(content: str | None, reason: str | None = None, **more: Any) -> dict[str, Any]:
    """A choice of a chat completion."""
    return {"choices": [{"index": 0, "delta": {"content": content, **more}, "finish_reason": reason}]}


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
BODY = event(text("a")) + event(text("a", "stop")) + b"data: [DONE]\n\n"
ANSWER = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY  # two tokens
