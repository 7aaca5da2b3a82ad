"""Responses as bench and front read them: both get the same head, body and end, however the bytes are cut."""

import random
from typing import Any

import pytest

from diptych.http1.response_reader import ChunkReader, HeadTooLongError, NotHttpError, ResponseReader
from tests.laws import law

HEAD = b"HTTP/1.1 200 OK\r\nX-Name: value\r\n"


def reader_of(found: list[Any], kind: type[ResponseReader] = ResponseReader, limit: int = 200) -> ResponseReader:
    return kind(lambda status, headers: found.append((status, dict(headers))), found.append, limit)


@law(weight=0.1)
def test_where_the_bytes_are_cut_does_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    body = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 60)))
    head, framed, is_framed = HEAD, body, True
    kind = rng.choice(("length", "chunks", "end"))
    if kind == "length":
        head += b"Content-Length: %d\r\n" % len(body)
    elif kind == "chunks":
        head += b"Transfer-Encoding: chunked\r\n"
        cut = rng.randrange(len(body))
        parts = [part for part in (body[:cut], body[cut:]) if part]
        framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\nTrailer: x\r\n\r\n"
    else:
        is_framed = False
    if rng.random() < 0.3:
        head = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + head
    answer, found = head + b"\r\n" + framed, []
    reader = reader_of(found, rng.choice((ResponseReader, ChunkReader)))
    assert not reader.has_begun
    is_whole, at = False, 0
    while at < len(answer):
        size = rng.choice((1, 5, 1000))
        is_whole = reader.feed(answer[at : at + size])
        at += size
    status, headers = found[0]
    assert status == 200 and headers[b"x-name"] == b"value" and b"trailer" not in headers and b"link" not in headers
    assert b"".join(found[1:]) == body
    assert (is_whole, reader.is_framed, reader.keeps) == (is_framed, is_framed, is_framed)


def test_a_head_has_a_limit_and_the_body_has_none() -> None:
    head = HEAD + b"Content-Length: 5000\r\n\r\n"
    assert not reader_of([], limit=len(head)).feed(head + b"x" * 4000)
    reader = reader_of([], limit=len(head) - 2)
    with pytest.raises(HeadTooLongError):
        for byte in head:
            reader.feed(bytes([byte]))


@pytest.mark.parametrize("more", [b"HTTP/1.1 200 OK\r\n\r\n", b"x"])
def test_what_follows_a_response_leaves_it_whole_and_ends_the_connection(more: bytes) -> None:
    reader = reader_of([])
    assert reader.feed(HEAD + b"Content-Length: 1\r\n\r\na" + more) and not reader.keeps


@pytest.mark.parametrize("more", [b"HTTP/1.1 200 OK\r\n\r\n", b"x"])
def test_what_follows_a_response_that_fills_the_limit_of_a_head_ends_the_connection_too(more: bytes) -> None:
    response = HEAD + b"Content-Length: 1\r\n\r\na"
    reader = reader_of([], limit=len(response))
    assert reader.feed(response + more) and not reader.keeps
    exact = reader_of([], limit=len(response))
    assert exact.feed(response) and exact.keeps


def test_bytes_that_are_no_response_and_defects_of_callbacks_are_told_apart() -> None:
    with pytest.raises(NotHttpError, match="HTTP"):
        reader_of([]).feed(b"SSH-2.0\r\n\r\n")

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ResponseReader(fails, fails, 200).feed(HEAD + b"Content-Length: 1\r\n\r\na")


def test_a_callback_may_close_the_reader() -> None:
    found: list[Any] = []
    reader = ResponseReader(lambda *_: reader.close(), found.append, 200)
    reader.feed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n")


def test_bytes_end_between_two_chunks_or_not() -> None:
    reader = ChunkReader(lambda *_: None, lambda _: None, 200)
    states = []
    for piece in (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na", b"\r\n", b"2\r\n", b"bc\r\n"):
        reader.feed(piece)
        states.append(reader.is_between_chunks)
    assert states == [False, False, True, False, True]
