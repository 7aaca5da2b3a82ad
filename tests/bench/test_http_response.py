"""Responses that are framed in every way and cut at every place."""

import asyncio
import random
from collections.abc import Callable

import msgspec
import pytest

from diptych.bench.http_response import BODY_LIMIT, HttpResponse
from diptych.bench.token_stream import TokenStream
from tests.laws import law

from .events import ANSWER, HEAD, event, text

BODY = b"".join(event(text(word)) for word in "abc") + b"data: [DONE]\n\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def chunk(piece: bytes) -> bytes:
    """A chunk."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


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
    "chunked": CHUNKED + chunked(BODY),
    "by length": HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    "until the end": HEAD.replace(b"1.1", b"1.0") + b"\r\n" + BODY,
}


def read(answer: bytes, cut: Callable[[int], int]) -> tuple[TokenStream, bool, HttpResponse]:
    """(stream, whether the response was over before the connection's end, response) for an answer that came in pieces,
    a nanosecond after another; ``cut`` says how long the piece is that begins at a position."""

    async def run() -> tuple[TokenStream, bool, HttpResponse]:
        stream = TokenStream(0)
        response = HttpResponse(stream)
        position = now = 0
        is_over = False
        while position < len(answer) and not is_over:
            size = cut(position)
            now += 1
            is_over = response.feed(answer[position : position + size], now)
            position += size
        if not is_over:
            response.end(now)
        return stream, is_over, response

    return asyncio.run(run())


def received(answer: bytes, size: int = 7) -> TokenStream:
    """The stream of an answer that came in pieces of that size."""
    return read(answer, lambda _: size)[0]


@pytest.mark.parametrize("kind", ANSWERS)
def test_where_an_answer_is_cut_does_not_matter(kind: str) -> None:
    answer = ANSWERS[kind]
    rng = random.Random(2)
    for cut in (lambda _: 1, lambda _: len(answer), lambda _: rng.randint(1, 40)):
        stream = read(answer, cut)[0]
        assert stream.is_complete, stream.error
        assert len(stream.stamps) == 3


def test_every_token_has_the_time_of_the_bytes_that_ended_it() -> None:
    async def run() -> TokenStream:
        stream = TokenStream(0)
        response = HttpResponse(stream)
        whole = chunk(event(text("a")))
        for now, piece in enumerate((CHUNKED, whole, whole + whole[:20], whole[20:], chunk(b": ping\n\n") + whole), 1):
            assert not response.feed(piece, now)
        assert response.feed(chunk(event(text("b", "stop"))) + b"0\r\n\r\n", 9)
        return stream

    stream = asyncio.run(run())
    assert list(stream.stamps) == [2, 3, 4, 5, 9] and stream.end_ns == 9


def chunks(pieces: list[bytes], rng: random.Random) -> bytes:
    """Pieces as chunks, with the liberties that a server may take, and trailers."""
    sizes = [rng.choice((b"%x", b"%X", b"00%x", b"%x;name=value")) for _ in pieces]
    lines = [size % len(piece) + b"\r\n" + piece + b"\r\n" for size, piece in zip(sizes, pieces, strict=True)]
    return b"".join(lines) + b"0\r\n" + rng.choice((b"", b"X-Sum: 1\r\n", b"A: b\r\nC: d\r\n")) + b"\r\n"


@law(weight=0.3)
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
    if rng.random() < 0.5:  # several in a chunk, chunks that end anywhere
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
    stream, is_over, response = read(head + framed, lambda _: rng.randint(1, longest))
    assert is_over and response.keeps and stream.is_complete, stream.error
    assert list(stream.sizes) == [1] * len(words) and list(stream.stamps) == sorted(stream.stamps)
    assert stream.usage is not None and stream.usage.completion_tokens == len(words) and stream.has_ended


@law(weight=0.2)
def test_an_answer_that_is_cut_short_or_damaged_is_never_complete(seed: int) -> None:
    rng = random.Random(seed)
    pieces = [event(text(word, "stop" if word == "c" else None)) for word in "abc"] + [b"data: [DONE]\n\n"]
    answer = CHUNKED + chunks(pieces, rng)
    if seed % 2:
        short = answer[: rng.randrange(1, len(answer) - 1)]
        stream, is_over, _ = read(short, lambda _: rng.randint(1, 50))
        assert not is_over and not stream.is_complete and stream.error
        return
    start = answer.index(b"\r\n\r\n") + 4
    size_end = answer.index(b"\r\n", start)
    for size in (b"-5", b"", b"0x10", b"1_0", b"g", b"f" * 17):
        damaged = answer[:start] + size + answer[size_end:]
        stream, is_over, response = read(damaged, lambda _: rng.randint(1, 50))
        assert is_over and not response.keeps and "the answer is no HTTP/1.1 (" in (stream.error or "")


def test_a_damaged_chunk_ends_the_answer_after_the_tokens_before_it() -> None:
    answer = CHUNKED + chunk(event(text("a"))) + chunk(event(text("b"))) + b'zz\r\ndata: {"a":1}\n\n\r\n'
    stream, is_over, response = read(answer, lambda _: 10**6)
    assert is_over and not response.keeps and len(stream.stamps) == 2
    assert "chunk size" in (stream.error or "")


def test_an_answer_that_breaks_off_is_not_complete() -> None:
    stream = received(ANSWERS["chunked"][:-30])
    assert not stream.is_complete and "in the middle" in (stream.error or "")
    until_end = ANSWERS["until the end"]
    for kept in (until_end.index(b"data: [DONE]"), until_end.index(b"data: [DONE]") - 20):
        assert not received(until_end[:kept]).is_complete
    assert "without an answer" in (received(b"HTTP/1.1 2").error or "")


@pytest.mark.parametrize("more", [b"HTTP/1.1 200 OK\r\n\r\n", b"x", b"\x00" * 100], ids=["answer", "byte", "zeros"])
def test_what_follows_an_answer_ends_the_connection_and_leaves_the_answer(more: bytes) -> None:
    stream, is_over, response = read(ANSWERS["by length"] + more, lambda _: 10**6)
    assert is_over and not response.keeps and stream.is_complete and len(stream.stamps) == 3


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"HTTP/1.1 307 Moved\r\nLocation: https://other/v1\r\nContent-Length: 0\r\n\r\n", "redirected to https://other/v1"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\n", "compressed (gzip)"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "only chunked is known"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", "Content-Length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", "Content-Length"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000, "head has more than"),
        (b"HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: 4\r\n\r\nbusy", "HTTP 503: busy"),
        (b"HTTP/1.1 101 Switch\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n", "no HTTP/1.1"),
        (b"SSH-2.0-x\r\n\r\n", "no HTTP/1.1 (Expected HTTP/, RTSP/ or ICE/): b'SSH-2.0-x"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)  # fmt: skip
def test_what_cannot_be_read_is_an_error_in_words(head: bytes, words: str) -> None:
    assert words in (received(head, 1000).error or "")


def test_a_reply_that_is_no_stream_of_events_is_kept_up_to_a_limit() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    assert received(head % 2 + b"{}").body == b"{}"
    longer = received(head % (BODY_LIMIT + 1) + b" " * (BODY_LIMIT + 1), 1 << 24)
    assert "longer than" in (longer.error or "")


@pytest.mark.parametrize(
    "first", [b"HTTP/1.1 204 No Content\r\n", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n"]
)
def test_some_answers_have_no_body(first: bytes) -> None:
    _, is_over, response = read(first + b"\r\n", lambda _: 10**6)
    assert is_over and response.keeps


def test_the_protocol_and_the_server_say_whether_a_connection_is_kept() -> None:
    for first, option, keeps in ((b"1.1", b"", True), (b"1.1", b"close", False), (b"1.0", b"", False),
                                 (b"1.0", b"Keep-Alive", True), (b"1.1", b"upgrade, Close", False)):  # fmt: skip
        head = b"HTTP/%b 200 OK\r\nConnection: %b\r\nContent-Length: 2\r\n\r\n{}" % (first, option)
        assert read(head, lambda _: 5)[2].keeps is keeps


def test_a_response_has_begun_with_its_first_byte() -> None:
    async def run() -> list[bool]:
        response = HttpResponse(TokenStream(0))
        before = response.has_begun
        response.feed(ANSWER[:1], 1)
        return [before, response.has_begun]

    assert asyncio.run(run()) == [False, True]


def test_a_defect_of_the_reader_of_events_is_not_taken_for_the_servers_fault() -> None:
    class BrokenStream(TokenStream):
        def feed(self, payload: bytes, now_ns: int) -> None:
            raise ZeroDivisionError

    async def run() -> None:
        HttpResponse(BrokenStream(0)).feed(ANSWER, 1)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(run())
