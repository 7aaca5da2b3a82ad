"""The make-believe server in this process, without sockets: what it writes is read by the client's own HttpResponse."""

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from diptych.bench.clock import now_ns
from diptych.bench.http_response import HttpResponse
from diptych.bench.session import BenchConfig, Session, converses, drive
from diptych.bench.target import Target, TargetConfig
from diptych.bench.token_stream import TokenStream
from diptych.workload.description import LengthConfig, LengthsConfig, WorkloadConfig

SHORT = LengthsConfig(prompt=LengthConfig(mean=32), output=LengthConfig(mean=4))
TARGET_FIELDS = ("api", "prompts", "running_usage", "timeout_s", "exact_length", "send_slo", "model")
FAKE = Path(__file__).parent.parent.parent / "benchmarks" / "fake_sse_server.py"


def _fake_server() -> Any:
    spec = importlib.util.spec_from_file_location("fake_sse_server", FAKE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake_sse_server = _fake_server()


class LoopbackClient:
    """Stands for HttpClient. slots: requests that the server works on at once; 0: all. ``kill`` it and it is gone."""

    def __init__(self, slots: int = 0) -> None:
        self._answers = fake_sse_server.Answers(slots)
        self._responses: set[LoopbackTransport] = set()
        self._is_up = True
        self.bodies: list[bytes] = []

    def head(self, method: str, path: str) -> bytes:
        return f"{method} {path} HTTP/1.1\r\n".encode()

    def post(self, head: bytes, body: bytes, stream: TokenStream) -> None:
        stream.sent_ns = now_ns()
        if not self._is_up:
            stream.finish(now_ns(), "cannot connect to loopback: Connection refused")
            return
        self.bodies.append(body)
        connection = fake_sse_server.Connection(self._answers)
        transport = LoopbackTransport(stream)
        self._responses.add(transport)
        stream.done.add_done_callback(lambda _: self._responses.discard(transport))
        stream.hang_up = lambda: connection.connection_lost(None)
        connection.connection_made(transport)
        request = head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        asyncio.get_running_loop().call_soon(connection.data_received, request)

    async def fetch(self, method: str, path: str, body: bytes = b"") -> TokenStream:
        stream = TokenStream(now_ns())
        self.post(self.head(method, path), body, stream)
        await stream.done
        return stream

    def connect_ahead(self, number: int) -> bool:
        return False

    def kill(self) -> None:
        self._is_up = False
        for transport in list(self._responses):
            transport.abort()


class LoopbackTransport:
    """What the server writes goes to the stream."""

    def __init__(self, stream: TokenStream) -> None:
        self._response = HttpResponse(stream)
        self._is_open = True

    def write(self, data: bytes) -> None:
        if self._is_open and not self._response.stream.done.done():
            self._is_open = not self._response.feed(data, now_ns())

    def abort(self) -> None:
        if self._is_open:
            self._is_open = False
            self._response.end(now_ns())


async def loopback_session(config: BenchConfig, slots: int = 0) -> tuple[Session, LoopbackClient]:
    """A session with the make-believe server, not warmed up, and its client."""
    client: Any = LoopbackClient(slots)
    target = await Target.find(config.target, client)
    if converses(config.workload):
        target = await target.with_conversations()
    return Session(config, target, asyncio.Event()), client


def loopback_config(workload: WorkloadConfig | None = None, *, fake: Any = None, **more: Any) -> BenchConfig:
    """A measurement of the make-believe server, whose pace ``fake`` names. more: of BenchConfig or TargetConfig."""
    fields = {name: more.pop(name) for name in TARGET_FIELDS if name in more}
    target = TargetConfig(url="http://loopback", extra={"fake": fake or {}}, **fields)
    workload = workload or WorkloadConfig(num_requests=30, rate=300.0, lengths=SHORT)
    return BenchConfig(
        **{"target": target, "workload": workload, "warm_up": 0, "salt": "test", "settle_s": 0.0, **more}
    )


def measured(
    config: BenchConfig, use: Callable[[Session, LoopbackClient], Awaitable[Any]] | None = None, slots: int = 0
) -> Any:
    """A single run, or what ``use`` does with the session and its client."""

    async def run() -> Any:
        session, client = await loopback_session(config, slots)
        return await (session.run() if use is None else use(session, client))

    return drive(run())
