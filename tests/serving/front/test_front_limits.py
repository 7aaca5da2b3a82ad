"""What engines send, what waits at a front, and what is open there: at each limit, and one more."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import pytest
from fake_engine import FakeEngine, answer_to
from front_harness import FrontClient, fronted

from diptych.serving import edge_limits
from diptych.serving.front.adapters.openai_parts import post_text
from diptych.serving.front.engine_connection import ConnectionPool, ReplyTooLongError, ask
from diptych.serving.front.relay_request import read_request

pytestmark = pytest.mark.asyncio
PROMPT = "the prompt"
FAILED = (500, "worker_failed")  # after some attempts


@dataclass
class WrittenEngine(FakeEngine):
    """An engine whose answers, but for those to the prompt "other", are these bytes, in pieces of a given size."""

    kind: str = "openai"
    reply: bytes = b""
    piece: int = 1 << 20

    async def _generate(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if body.get("prompt") != PROMPT:
            await super()._generate(path, body, writer)
            return
        self.requests.append(body)
        for begin in range(0, len(self.reply), self.piece):
            writer.write(self.reply[begin : begin + self.piece])
            await writer.drain()


def whole(*, status: int = 200, head: int = 0, body: int = 0, padding: str = "x-padding") -> bytes:
    """A reply whose head has ``head`` bytes and its body ``body`` bytes (0: as many as it needs)."""
    content: dict[str, Any] = {"error": {"message": "as told"}, "padding": ""}
    if status == 200:
        choice = {"index": 0, "text": "good", "finish_reason": "stop"}
        content = {"id": "x", "choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1}, "padding": ""}
    content["padding"] = "x" * max(0, body - len(json.dumps(content)))
    said = json.dumps(content).encode()
    fields = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(said)}\r\n{padding}: "
    return fields.encode() + b"y" * max(0, head - len(fields) - 4) + b"\r\n\r\n" + said


async def answered(client: FrontClient, engine: WrittenEngine, reply: bytes) -> tuple[int, str, Any]:
    """Status, text and error of an answer to which the engine says this, while it gives another answer."""
    engine.reply = reply
    answer, other = await asyncio.gather(
        client.complete(PROMPT, stream=False), client.complete("other", 3, stream=False)
    )
    assert (other.status, other.text) == (200, answer_to("other", 3))
    await client.idle()
    return answer.status, answer.text, answer.error


@pytest.mark.parametrize("piece", [997, 1 << 20])
async def test_the_head_of_an_engine_s_reply_has_its_limit_and_no_byte_more(
    piece: int, caplog: pytest.LogCaptureFixture
) -> None:
    most = edge_limits.ENGINE_HEAD_BYTES
    engine = WrittenEngine(piece=piece)
    async with fronted(engine) as client:
        assert await answered(client, engine, whole(head=most)) == (200, "good", None)
        status, _, error = await answered(client, engine, whole(head=most + 1))
        assert (status, error["code"]) == FAILED and f"longer than {most} bytes" in caplog.text


@pytest.mark.parametrize("piece", [997, 1 << 20])
async def test_trailers_have_the_limit_of_a_head(piece: int, caplog: pytest.LogCaptureFixture) -> None:
    head, _, body = whole().partition(b"\r\n\r\n")
    chunked = head.replace(b"content-length: %d" % len(body), b"transfer-encoding: chunked")
    begin = chunked + b"\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(body), body)
    engine = WrittenEngine(piece=piece)
    async with fronted(engine) as client:
        short = begin + b"x-trailer: " + b"z" * 10_000 + b"\r\n\r\n"
        assert await answered(client, engine, short) == (200, "good", None)
        long = begin + b"x-trailer: " + b"z" * (1 << 20)  # more than one read takes
        status, _, error = await answered(client, engine, long)
        assert (status, error["code"]) == FAILED and "bytes in a row without content" in caplog.text


@pytest.mark.parametrize(("status", "name"), [(200, "ENGINE_REPLY_BYTES"), (400, "ENGINE_REFUSAL_BYTES")])
async def test_a_whole_reply_and_a_refusal_have_their_limits_and_no_byte_more(
    status: int, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(edge_limits, name, most := 50_000)
    engine = WrittenEngine(piece=997)
    async with fronted(engine) as client:
        found, text, error = await answered(client, engine, whole(status=status, body=most))
        assert (found, text) == (status, "good" if status == 200 else "")
        assert status == 200 or error["message"] == "as told"
        found, _, error = await answered(client, engine, whole(status=status, body=most + 1))
        assert (found, error["code"]) == FAILED
        assert f"(status {status}) is longer than {most} bytes" in caplog.text


async def test_a_page_and_a_prompt_of_an_engine_have_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENGINE_PAGE_BYTES", "ENGINE_TOKENS_BYTES"):
        monkeypatch.setattr(edge_limits, name, 5000)
    said = b""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(said), said))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        pool = ConnectionPool(*server.sockets[0].getsockname()[:2], {})
        for size in (5000, 5001):
            said = b'{"prompt":"%b"}' % (b"x" * (size - len('{"prompt":""}')))
            assert len(await post_text(pool, "/detokenize", {}) or "") == (size - 13 if size == 5000 else 0)
        with pytest.raises(ReplyTooLongError, match="more than 5000 bytes"):
            await ask(pool, "GET", "/metrics", timeout_s=60)
        said = said[:-1]
        assert await ask(pool, "GET", "/metrics", timeout_s=60) == (200, said)
        pool.close()


async def test_as_many_requests_are_open_at_a_front_as_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_limits, "OPEN_AT_FRONT", 3)
    async with fronted(FakeEngine(answer_tokens=0, delay_s=0.01)) as client:
        body = b'{"prompt": "abc", "max_tokens": 100000, "stream": true, "temperature": 0}'
        held = [await client.front.submit(read_request("/v1/completions", body), "") for _ in range(3)]
        refused = await client.complete("one more", 3)
        assert refused.error is not None
        assert f"{refused.status} `{refused.error['code']}`" == edge_limits.LIMITS["OPEN_AT_FRONT"].beyond
        assert "at most 3" in refused.error["message"]
        assert refused.headers is not None and int(refused.headers["retry-after"]) > 0
        assert client.front.num_open == 3
        client.front.abort(held.pop())
        answer = await client.complete("there is room", 3)
        assert (answer.status, answer.text) == (200, answer_to("there is room", 3))
        for generation in held:
            client.front.abort(generation)
        await client.idle()


async def test_an_engine_is_read_until_its_client_has_left_so_many_bytes_unread() -> None:
    async with fronted(FakeEngine(answer_tokens=0, delay_s=0.01)) as client:
        body = b'{"prompt": "abc", "max_tokens": 100000, "stream": true, "temperature": 0}'
        generation = await client.front.submit(read_request("/v1/completions", body), "")
        stream = generation.relay
        stream.take()
        stream.add(b"x" * edge_limits.UNREAD_BYTES_AT_FRONT)
        assert not stream.is_full
        stream.add(b"x")
        assert stream.is_full
        stream.take()
        assert not stream.is_full
        client.front.abort(generation)
        await client.idle()
