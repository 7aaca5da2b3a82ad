"""Counting tokens in server-sent events of several dialects, and HTTP framing cut at every place."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from diptych.bench.client_stream import TokenStream, error_message
from diptych.bench.framing import MOST_ASIDE, AnswerReader
from diptych.bench.http import Address
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
    """The stream after an answer that came in pieces, one nanosecond after another, and the connection's end."""
    return read_answer(answer, cut)[0]


def read_answer(answer: bytes, cut: Callable[[int], int]) -> tuple[TokenStream, bool, AnswerReader]:
    """The same, with whether the answer was over before the connection, and its reader."""

    async def run() -> tuple[TokenStream, bool, AnswerReader]:
        stream = TokenStream(0)
        reader = AnswerReader(stream)
        position = now = 0
        is_over = False
        while position < len(answer) and not is_over:
            size = cut(position)
            now += 1
            is_over = reader.feed(answer[position : position + size], now)
            position += size
        if not is_over:
            reader.end(now)
        return stream, is_over, reader

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ANSWERS)
def test_where_an_answer_is_cut_does_not_matter(kind: str) -> None:
    answer = ANSWERS[kind]
    rng = random.Random(2)
    for cut in (lambda _: 1, lambda _: len(answer), lambda _: rng.randint(1, 40)):
        stream = received(answer, cut)
        assert stream.is_complete, stream.error
        assert len(stream.stamps) == 3


def chunks(pieces: list[bytes], rng: random.Random) -> bytes:
    """Pieces as chunks, with the liberties that a server may take, and trailers."""
    sizes = [rng.choice((b"%x", b"%X", b"00%x", b"%x;name=value", b"%x ")) for _ in pieces]
    lines = [size % len(piece) + b"\r\n" + piece + b"\r\n" for size, piece in zip(sizes, pieces, strict=True)]
    return b"".join(lines) + b"0\r\n" + rng.choice((b"", b"X-Sum: 1\r\n", b"A: b\r\nC: d\r\n")) + b"\r\n"


@pytest.mark.parametrize("seed", range(60))
def test_an_answer_reads_alike_however_it_is_written_and_cut(seed: int) -> None:
    rng = random.Random(seed)
    newline = rng.choice((b"\n", b"\r\n", b"\r"))
    words = ["".join(rng.choices("ab\r\n\u00e9\u2028: {}", k=rng.randint(1, 30))) for _ in range(rng.randint(1, 12))]
    pieces = []
    for place, word in enumerate(words):
        data = msgspec.json.format(
            msgspec.json.encode(text(word, "stop" if word is words[-1] else None, token_ids=[place])),
            indent=rng.choice((-1, 0, 2)),
        )
        lines = [b"data: " + line for line in data.splitlines()]
        extra = rng.choice(([], [b": ping"], [b"event: message", b"id: 7"], [b"", b": alone", b""]))
        pieces.append(newline.join([*extra, *lines, b"", b""]))
    usage = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": len(words)}})
    pieces += [usage.replace(b"\n", newline), b"data: [DONE]" + newline * 2]
    if rng.random() < 0.5:  # several in one chunk, chunks that end anywhere
        body, pieces = b"".join(pieces), []
        while body:
            size = rng.randint(1, 90)
            pieces.append(body[:size])
            body = body[size:]
    body = b"".join(pieces)
    head = HEAD + rng.choice((b"", b"Connection: keep-alive\r\n"))
    if rng.random() < 0.2:
        head = b"HTTP/1.1 100 Continue\r\n\r\n" + head
    framed = rng.choice(
        (
            b"Transfer-Encoding: chunked\r\n\r\n" + chunks(pieces, rng),
            b"Content-Length: %d\r\n\r\n" % len(body) + body,
        )
    )
    longest = rng.choice((1, 3, 20, 200, 10**6))
    stream, is_over, reader = read_answer(head + framed, lambda _: rng.randint(1, longest))
    assert is_over and reader.keeps and stream.is_complete, stream.error
    assert list(stream.sizes) == [1] * len(words) and list(stream.stamps) == sorted(stream.stamps)
    assert stream.usage is not None and stream.usage.completion_tokens == len(words) and stream.has_ended


@pytest.mark.parametrize("seed", range(40))
def test_an_answer_that_is_cut_short_or_damaged_is_never_complete(seed: int) -> None:
    rng = random.Random(seed)
    pieces = [event(text(word, "stop" if word == "c" else None)) for word in "abc"] + [b"data: [DONE]\n\n"]
    answer = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks(pieces, rng)
    if seed % 2:
        short = answer[: rng.randrange(1, len(answer) - 1)]
        stream, is_over, _ = read_answer(short, lambda _: rng.randint(1, 50))
        assert not is_over and not stream.is_complete and stream.error
        return
    start = answer.index(b"\r\n\r\n") + 4
    size_end = answer.index(b"\r\n", start)
    for size in (b"-5", b"", b"0x10", b"1_0", b"g", b"f" * 16):
        damaged = answer[:start] + size + answer[size_end:]
        stream, is_over, reader = read_answer(damaged, lambda _: rng.randint(1, 50))
        assert is_over and not reader.keeps and "no chunk" in (stream.error or "")


def test_an_answer_that_breaks_off_is_not_complete() -> None:
    stream = received(ANSWERS["chunked"][:-30], lambda _: 7)
    assert not stream.is_complete and "in the middle" in (stream.error or "")
    until_end = ANSWERS["until the end"]
    for kept in (until_end.index(b"data: [DONE]"), until_end.index(b"data: [DONE]") - 20):
        assert not received(until_end[:kept], lambda _: 7).is_complete
    assert "without an answer" in (received(b"HTTP/1.1 2", lambda _: 7).error or "")


def test_what_follows_an_answer_unasked_ends_the_connection() -> None:
    _, is_over, reader = read_answer(ANSWERS["by length"] + b"HTTP/1.1 200 OK\r\n\r\n", lambda _: 10**6)
    assert is_over and not reader.keeps


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"HTTP/1.1 307 Moved\r\nLocation: https://other/v1\r\nContent-Length: 0\r\n\r\n", "redirected to https://other/v1"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\n", "compressed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "only chunked is known"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", "no proper Content-Length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", "no proper Content-Length"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000, "a line or head of more than"),
        (b"HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: 4\r\n\r\nbusy", "HTTP 503: busy"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)  # fmt: skip
def test_what_cannot_be_read_is_an_error_in_words(head: bytes, words: str) -> None:
    assert words in (received(head, lambda _: 1000).error or "")


def test_the_protocol_and_the_server_say_whether_a_connection_is_kept() -> None:
    for first, option, keeps in ((b"1.1", b"", True), (b"1.1", b"close", False), (b"1.0", b"", False),
                                 (b"1.0", b"Keep-Alive", True), (b"1.1", b"upgrade, Close", False)):  # fmt: skip
        head = b"HTTP/%b 200 OK\r\nConnection: %b\r\nContent-Length: 2\r\n\r\n{}" % (first, option)
        assert read_answer(head, lambda _: 5)[2].keeps is keeps


def test_a_server_may_send_an_error_as_an_event_of_its_own() -> None:
    stream = read(text("a"), {"object": "error", "message": "out of memory", "code": 500})
    assert not stream.is_complete and stream.error == "out of memory"
    assert read(text("a", "stop"), {"choices": [], "usage": {"completion_tokens": 1, "latency": 3.5}}).is_complete


def test_what_is_no_http_is_an_error_in_words() -> None:
    stream = received(b"SSH-2.0-x\r\n\r\n", lambda _: 100)
    assert "no HTTP" in (stream.error or "")


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "http://x/?q=1", "http://me:key@x"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url "):
        Address.parse(url)


def test_an_address_may_have_a_path_and_end_in_v1() -> None:
    assert Address.parse("https://h/api/v1/") == Address("h", 443, True, "/api")
    assert Address.parse("127.0.0.1:8000").netloc == "127.0.0.1:8000"
    assert Address.parse("http://[::1]:80/v1") == Address("::1", 80, False, "")
    assert Address.parse("http://[::1]:80").netloc == "[::1]:80"


def chunk(piece: bytes) -> bytes:
    """One chunk."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


def fed(count: int, *more: bytes) -> tuple[TokenStream, AnswerReader, bool]:
    """``count`` events in chunks of their own, then more; times are 1, 2, 3, ... Whether the last said it is over."""

    async def run() -> tuple[TokenStream, AnswerReader, bool]:
        stream = TokenStream(0)
        reader = AnswerReader(stream)
        reader.feed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(event(text("a"))), 1)
        is_over = False
        for now in range(2, count + 1):
            is_over = reader.feed(chunk(event(text("a"))), now)
        for now, piece in enumerate(more, count + 1):
            is_over = reader.feed(piece, now)
        return stream, reader, is_over

    return asyncio.run(run())


@pytest.mark.parametrize("count", [1, 2, MOST_ASIDE, MOST_ASIDE + 1, MOST_ASIDE + 2, 3 * MOST_ASIDE])
def test_whoever_looks_sees_all_that_has_come_with_its_times(count: int) -> None:
    stream, reader, is_over = fed(count)
    assert not is_over and list(stream.stamps) == list(range(1, count + 1))
    assert reader.feed(chunk(event(text("b", "stop"))), count + 1) is False
    assert reader.feed(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", count + 2)
    assert stream.is_complete and list(stream.stamps) == list(range(1, count + 2)) and stream.end_ns == count + 2


def test_a_broken_chunk_that_was_put_aside_is_found_and_ends_the_answer() -> None:
    stream, reader, _ = fed(3, b'zz\r\ndata: {"a":1}\n\n\r\n', chunk(event(text("late"))))
    assert len(stream.stamps) == 3
    assert stream.error is not None and stream.error.startswith("no chunk")
    assert stream.end_ns == 4
    assert reader.feed(chunk(event(text("later"))), 6) and not reader.keeps


def test_a_connection_that_ends_has_what_came_before_it_read() -> None:
    stream, reader, _ = fed(5)
    reader.end(9)
    assert stream.error == "the connection ended in the middle of the answer"
    assert len(stream.stamps) == 5 and stream.end_ns == 9


def test_a_stream_that_is_hung_up_on_knows_all_that_came() -> None:
    stream, _, _ = fed(5)
    stream.cancel(9, "enough")
    assert stream.error == "enough" and len(stream.stamps) == 5 and stream.end_ns == 9
