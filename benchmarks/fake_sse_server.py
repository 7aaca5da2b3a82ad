"""A make-believe OpenAI-compatible server that streams at a pace that the request names; no model, no scheduler.

    python benchmarks/fake_sse_server.py [--port 0] [--slots 0]

It prints its address. A request may hold ``"fake": {...}`` with
    ttft_ms, itl_ms   when the first token comes, and how long after it each later one does (5, 2)
    batch             tokens per event (1)
    ids, running      events carry token_ids (else when the request asks with return_token_ids), or a running usage
    roles             the stream starts with an event that only names a role, and ends with an event without text
    stall_at, stall_ms  a pause before that token
    fail              "status": HTTP 500; "break": the connection ends in the middle
With --slots N at most N requests are worked on at once; others wait in order. The final usage says when the request
was read and the first and last token were written (nanoseconds of the monotonic clock): a client's delay is known then.
"""

import argparse
import asyncio
import json
import time
from collections import deque
from typing import Any

import uvloop

PACE: dict[str, Any] = {"ttft_ms": 5.0, "itl_ms": 2.0, "batch": 1}


class Answers:
    """What all connections share: the slots."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.num_busy = self.num_given = 0
        self.waiting: deque[Answer] = deque()

    def enter(self, answer: "Answer") -> None:
        """Start now, or when somebody leaves."""
        if self.slots and self.num_busy >= self.slots:
            self.waiting.append(answer)
        else:
            self.num_busy += 1
            answer.start()

    def leave(self) -> None:
        """One is over."""
        self.num_given += 1
        self.num_busy -= 1
        while self.waiting and (not self.slots or self.num_busy < self.slots):
            following = self.waiting.popleft()
            if not following.is_over:
                self.num_busy += 1
                following.start()


class Answer:
    """One stream."""

    def __init__(self, shared: Answers, transport: asyncio.Transport, body: dict[str, Any], *, is_chat: bool) -> None:
        self.shared = shared
        self.transport = transport
        self.body = body
        self.pace = {**PACE, **body.get("fake", {})}
        self.is_chat = is_chat
        self.total = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        self.sent = 0
        self.asked_ns = time.perf_counter_ns()
        self.first_ns = self.last_ns = 0
        self.is_over = self.has_started = False
        prompt = body.get("prompt") or " ".join(message["content"] for message in body["messages"])
        template = 3 * len(body.get("messages", "1"))
        self.prompt_tokens = len(prompt) if isinstance(prompt, list) else template + len(prompt.split())
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        self.prefix = b'data: {"id":"fake-1","object":"%b","created":1,"model":"fake","choices":[' % kind.encode()

    def start(self) -> None:
        """Its turn has come."""
        self.has_started = True
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        if self.pace.get("roles"):
            self.write(self.prefix + b'{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}')
        asyncio.get_running_loop().call_later(self.pace["ttft_ms"] / 1e3, self.step)

    def step(self) -> None:
        """The next event."""
        if self.is_over:
            return
        if self.pace.get("fail") == "break" and self.sent >= self.total // 2:
            self.transport.abort()
            return
        count = min(self.pace["batch"], self.total - self.sent)
        self.sent += count
        self.last_ns = time.perf_counter_ns()
        self.first_ns = self.first_ns or self.last_ns
        is_last = self.sent == self.total
        reason = b'"length"' if is_last and not self.pace.get("roles") else b"null"
        text = b'"delta":{"content":" word"}' if self.is_chat else b'"text":" word"'
        wants_ids = self.pace.get("ids", self.body.get("return_token_ids"))
        ids = b',"token_ids":%b' % json.dumps([7] * count).encode() if wants_ids else b""
        usage = b',"usage":%b' % self.usage() if self.pace.get("running") else b""
        event = b'%b{"index":0,%b,"logprobs":null,"finish_reason":%b%b}]%b}' % (self.prefix, text, reason, ids, usage)
        self.write(event)
        if is_last:
            self.finish()
            return
        pause = self.pace["itl_ms"]
        if self.sent == self.pace.get("stall_at"):
            pause += self.pace["stall_ms"]
        asyncio.get_running_loop().call_later(pause / 1e3, self.step)

    def usage(self) -> bytes:
        """Token counts so far."""
        times = {"asked_ns": self.asked_ns, "first_ns": self.first_ns, "last_ns": self.last_ns}
        tokens = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.sent}
        return json.dumps({**tokens, "total_tokens": self.prompt_tokens + self.sent, "latency": times}).encode()

    def finish(self) -> None:
        """Usage and the end."""
        if self.pace.get("roles"):
            self.write(self.prefix + b'{"index":0,"delta":{},"finish_reason":"length"}]}')
        if self.body.get("stream_options", {}).get("include_usage"):
            self.write(self.prefix + b'],"usage":%b}' % self.usage())
        self.write(b"data: [DONE]")
        self.transport.write(b"0\r\n\r\n")
        self.close()

    def write(self, event: bytes) -> None:
        """An event as a chunk."""
        self.transport.write(b"%x\r\n%b\n\n\r\n" % (len(event) + 2, event))

    def close(self) -> None:
        """No more of it."""
        if not self.is_over:
            self.is_over = True
            if self.has_started:
                self.shared.leave()


class Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, shared: Answers) -> None:
        self.shared = shared
        self.buffer = b""
        self.answer: Answer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open."""
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed."""
        if self.answer is not None:
            self.answer.close()

    def data_received(self, data: bytes) -> None:
        """The next bytes of a request."""
        self.buffer += data
        head, mark, rest = self.buffer.partition(b"\r\n\r\n")
        if not mark:
            return
        lines = head.lower().split(b"\r\n")
        path = head.split(b" ", 2)[1].decode()
        if b"transfer-encoding: chunked" in lines:
            if (found := _unchunked(rest)) is not None:
                body, self.buffer = found
                self.on_request(path, body)
            return
        length = next((int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:")), 0)
        if len(rest) >= length:
            self.buffer = rest[length:]
            self.on_request(path, rest[:length])

    def on_request(self, path: str, raw: bytes) -> None:
        """A whole request."""
        if not raw:
            counts = {"answers": self.shared.num_given}
            replies = {"/v1/models": {"data": [{"id": "fake", "max_model_len": 1 << 20}]}, "/version": {"version": "0"}}
            replies |= {"/answers": counts, "/health": {"status": "ok"}}
            self.reply(200 if path in replies else 404, replies.get(path, {"error": {"message": f"no {path}"}}))
            return
        body = json.loads(raw)
        if body.get("fake", {}).get("fail") == "status":
            self.reply(500, {"error": {"message": "it was asked to fail"}})
            return
        if not body.get("stream"):  # a router's question for a sign of life
            choice = {
                "index": 0,
                "finish_reason": "length",
                "text": "",
                "message": {"role": "assistant", "content": ""},
            }
            self.reply(200, {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
            return
        self.answer = Answer(self.shared, self.transport, body, is_chat="chat" in path)
        self.shared.enter(self.answer)

    def reply(self, status: int, data: dict[str, Any]) -> None:
        """A reply that is no stream."""
        raw = json.dumps(data).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
        self.transport.write(head.encode() + raw)


def _unchunked(rest: bytes) -> tuple[bytes, bytes] | None:
    """A body that came in chunks, and what came after it. None: it is not all there."""
    body = b""
    while True:
        size, mark, rest = rest.partition(b"\r\n")
        length = int(size, 16) if mark else 0
        if not mark or len(rest) < length + 2:
            return None
        if length == 0:
            return body, rest[2:]
        body, rest = body + rest[:length], rest[length + 2 :]


async def serve(port: int, slots: int) -> None:
    """Until it is killed."""
    shared = Answers(slots)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(shared), "127.0.0.1", port, backlog=4096)
    print(f"served at http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--pace", type=json.loads, default={}, help="of requests that name none, as JSON")
    options = parser.parse_args()
    PACE.update(options.pace)
    uvloop.run(serve(options.port, options.slots))
