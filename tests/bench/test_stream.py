"""Counting tokens in server-sent events of several dialects, and HTTP framing cut at every place."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from diptych.bench.http import Address, Client, Connection
from diptych.bench.stream import TokenStream, error_message
from diptych.control.errors import ConfigError

USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def text(word: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    """A choice of a completion."""
    return {"choices": [{"index": 0, "text": word, "finish_reason": reason, **more}]}


def delta(content: str | None, reason: str | None = None, **more: Any) -> dict[str, Any]:
    """A choice of a chat completion."""
    return {"choices": [{"index": 0, "delta": {"content": content, **more}, "finish_reason": reason}]}


def read(*events: dict[str, Any]) -> TokenStream:
    """A stream that got these events, one nanosecond after another."""

    async def run() -> TokenStream:
        stream = TokenStream(0)
        stream.status = 200
        for now, one in enumerate(events, start=1):
            stream.feed(event(one), now)
        stream.feed(b"data: [DONE]\n\n", 99)
        stream.finish(100)
        stream.settle()
        return stream

    return asyncio.run(run())


def test_an_event_with_text_is_a_token_and_the_usage_is_none() -> None:
    stream = read(text("a"), text("b"), text("c", "length"), {"choices": [], "usage": USAGE})
    assert list(stream.stamps) == [1, 2, 3]
    assert stream.output_tokens == 3
    assert stream.is_complete and stream.finish_reason == "length"
    assert stream.usage is not None and stream.usage.prompt_tokens_details is not None
    assert stream.usage.prompt_tokens_details.cached_tokens == 2


def test_half_a_character_is_a_token_too() -> None:
    assert list(read(text("a"), text(""), text("b")).stamps) == [1, 2, 3]


def test_a_role_alone_is_no_token() -> None:
    assert list(read(delta("", role="assistant"), delta("a"), delta("b")).stamps) == [2, 3]


def test_a_silent_end_is_a_token_only_when_the_usage_counts_it() -> None:
    counted = read(text("a"), text("b"), text("", "length"), {"choices": [], "usage": USAGE})
    not_counted = read(text("a"), text("b"), text("c"), text("", "stop"), {"choices": [], "usage": USAGE})
    assert list(counted.stamps) == [1, 2, 3]
    assert list(not_counted.stamps) == [1, 2, 3]


def test_token_ids_say_how_many_tokens_an_event_has() -> None:
    stream = read(text("ab", token_ids=[1, 2]), text("", token_ids=[]), text("c", "length", token_ids=[3]))
    assert (list(stream.stamps), list(stream.sizes), stream.output_tokens) == ([1, 3], [2, 1], 3)


def test_a_running_usage_says_so_too() -> None:
    stream = read(
        {**delta("", role="assistant"), "usage": {"completion_tokens": 0}},
        {**delta("a b"), "usage": {"completion_tokens": 2}},
        {**delta("c", "length"), "usage": {"completion_tokens": 3}},
    )
    assert (list(stream.stamps), list(stream.sizes)) == ([2, 3], [2, 1])


def test_a_usage_in_the_last_event_alone_is_no_running_one() -> None:
    stream = read(text("a"), text("b"), {**text("c", "length"), "usage": USAGE})
    assert (list(stream.stamps), list(stream.sizes), stream.output_tokens) == ([1, 2, 3], [], 3)


def test_tokens_that_come_several_at_a_time_are_counted_by_the_usage() -> None:
    assert read(text("a b"), text("c", "length"), {"choices": [], "usage": USAGE}).output_tokens == 3


def test_an_error_in_a_stream_is_its_error() -> None:
    stream = read(text("a"), {"error": {"message": "the worker died"}})
    assert not stream.is_complete and stream.error == "the worker died"


def test_comments_and_event_names_are_not_data() -> None:
    async def run() -> TokenStream:
        stream = TokenStream(0)
        stream.feed(b": ping\r\n\r\nevent: message\r\ndata:" + msgspec.json.encode(text("a")) + b"\r\n\r\n", 1)
        return stream

    assert list(asyncio.run(run()).stamps) == [1]


def test_what_a_server_says_when_it_refuses() -> None:
    assert error_message(429, b'{"error": {"message": "queue full"}}') == "HTTP 429: queue full"
    assert error_message(502, b"Bad Gateway") == "HTTP 502: Bad Gateway"
    assert error_message(500, b"") == "HTTP 500"


class Pipe(asyncio.Transport):
    """A transport to nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False

    def write(self, data: Any) -> None:
        """Nothing."""

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True


BODY = b"".join(event(text(word)) for word in "abc") + b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(body: bytes) -> bytes:
    """Chunks whose borders are not those of events."""
    rng = random.Random(1)
    parts, position = [], 0
    while position < len(body):
        size = rng.randint(1, 60)
        piece = body[position : position + size]
        parts.append(b"%X;x=1\r\n%b\r\n" % (len(piece), piece))
        position += size
    return b"".join(parts) + b"0\r\n\r\n"


ANSWERS = {
    "chunked": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(BODY),
    "by length": HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    "until the end": HEAD.replace(b"1.1", b"1.0") + b"\r\n" + BODY,
}


def received(answer: bytes, cut: Callable[[int], int]) -> TokenStream:
    """The stream after an answer that came in pieces."""

    async def run() -> TokenStream:
        connection = Connection(Client(Address.parse("http://nowhere:1")))
        connection.connection_made(Pipe())
        stream = TokenStream(0)
        connection.send(b"", stream)
        position = 0
        while position < len(answer):
            size = cut(position)
            connection.data_received(answer[position : position + size])
            position += size
        connection.connection_lost(None)
        return stream

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ANSWERS)
def test_where_an_answer_is_cut_does_not_matter(kind: str) -> None:
    answer = ANSWERS[kind]
    rng = random.Random(2)
    for cut in (lambda _: 1, lambda _: len(answer), lambda _: rng.randint(1, 40)):
        stream = received(answer, cut)
        assert stream.is_complete, stream.error
        assert len(stream.stamps) == 3


def test_an_answer_that_breaks_off_is_not_complete() -> None:
    stream = received(ANSWERS["chunked"][:-30], lambda _: 7)
    assert not stream.is_complete and "in the middle" in (stream.error or "")


def test_what_is_no_http_is_an_error_in_words() -> None:
    stream = received(b"SSH-2.0-x\r\n\r\n", lambda _: 100)
    assert "no HTTP" in (stream.error or "")


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "http://x/?q=1"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url is"):
        Address.parse(url)


def test_an_address_may_have_a_path_and_end_in_v1() -> None:
    assert Address.parse("https://h/api/v1/") == Address("h", 443, True, "/api")
    assert Address.parse("127.0.0.1:8000").netloc == "127.0.0.1:8000"
