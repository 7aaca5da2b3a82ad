"""What strangers do to a whole server: they break off, send what is no HTTP, hold connections, take all descriptors.
Nothing else is disturbed, nothing is left behind, and nothing is logged that they could repeat without end."""

import json
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import CLI, RunningServer, fake_server, running, wait_until

pytestmark = pytest.mark.system
LONG = json.dumps({"prompt": [5] * 40, "max_tokens": 5000, "ignore_eos": True, "stream": True}).encode()
SPACES = "x" + " " * 10_100_000 + "x"  # more than a regular expression may go back over


def request(body: bytes, *headers: str, path: str = "/v1/completions", length: int | None = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {length or len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose log is watched."""
    with fake_server(log=tmp_path_factory.mktemp("edge") / "log", step_ms=1) as server:
        yield server


@pytest.fixture
def quiet(edge: RunningServer) -> Iterator[RunningServer]:
    """The same; what is done to it leaves no line in its log and no request running."""
    assert edge.log is not None
    before = edge.log.read_text()
    yield edge
    wait_until(lambda: is_empty(edge))
    assert httpx.post(f"{edge.url}/v1/completions", json={"prompt": [1], "max_tokens": 2}).status_code == 200
    assert edge.log.read_text() == before


def is_empty(server: RunningServer) -> bool:
    metrics = server.metrics()
    return metrics["vllm:num_requests_running"] == 0 and metrics["vllm:num_requests_waiting"] == 0


def hang_up(client: socket.socket) -> None:
    """Without a goodbye (RST)."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def leave(client: socket.socket) -> None:
    """With a goodbye (FIN)."""
    client.close()


def half_close(client: socket.socket) -> None:
    """With an end of what this side says, and no interest in what the other does."""
    with client:
        client.shutdown(socket.SHUT_WR)
        client.settimeout(60)
        while client.recv(65536):
            pass


@pytest.mark.parametrize("end", [hang_up, leave, half_close])
@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"POST /v1/comp",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConte",
        request(b"", length=100),
        request(b'{"prompt": [1', length=100),
        request(b'{"prompt": "' + b"x" * 100_000, length=1_000_000),
        request(b"", "Expect: 100-continue", length=100),
        request(b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"") + b"5\r\nabc",
        request(LONG),
        request(LONG.replace(b"true}", b"false}")),
        request(b'{"prompt": "%b"}' % (b"x " * 200_000), path="/tokenize"),
        b"GET /timeline HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50,
        request(LONG) + request(b"", length=100),
    ],
    ids=[
        *("nothing", "half a line", "half a head", "no body", "half a body", "half a long body", "awaits 100"),
        *("half a chunk", "stream", "whole reply", "long text", "timeline", "pipeline", "stream and half a body"),
    ],
)
def test_a_client_that_breaks_off_leaves_nothing_behind(
    quiet: RunningServer, said: bytes, end: Callable[[socket.socket], None]
) -> None:
    for pause_s in (0.0, 0.05):
        client = socket.create_connection(quiet.address)
        client.sendall(said)
        time.sleep(pause_s)
        end(client)


@pytest.mark.parametrize("end", [hang_up, leave])
def test_a_client_that_breaks_off_in_the_middle_of_its_stream_ends_it(
    quiet: RunningServer, end: Callable[[socket.socket], None]
) -> None:
    before = quiet.metrics()['vllm:request_success_total{finished_reason="abort"}']
    client = socket.create_connection(quiet.address)
    client.sendall(request(LONG))
    received = b""
    while b"data: " not in received:
        received += client.recv(65536)
    end(client)
    wait_until(lambda: is_empty(quiet))
    wait_until(lambda: quiet.metrics()['vllm:request_success_total{finished_reason="abort"}'] == before + 1)


def test_broken_http_and_upgrades_write_nothing_into_the_log(quiet: RunningServer) -> None:
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    body = b'{"prompt": [1, 2], "max_tokens": 1}'
    websocket = b"GET /x HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    for _ in range(20):
        for data, status in (
            (b"garbage\r\n\r\n", b"400"),
            (b"GET /version HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", b"431"),
            (websocket, b"404"),
            (request(body, *upgrade), b"200"),
        ):
            with socket.create_connection(quiet.address) as client:
                client.settimeout(60)
                client.sendall(data)
                reply = b"".join(iter(lambda client=client: client.recv(65536), b""))  # type: ignore[misc]
            assert reply.split(b" ")[1] == status
            assert b"connection: close" in reply


def test_garbage_behind_a_request_lets_its_stream_end(quiet: RunningServer) -> None:
    fields = {"prompt": [1], "max_tokens": 300, "ignore_eos": True, "stream": True, "return_token_ids": True}
    body = json.dumps(fields).encode()
    with socket.create_connection(quiet.address) as client:
        client.settimeout(60)
        client.sendall(request(body))
        reply = client.recv(65536)
        client.sendall(b"garbage\r\n\r\n")
        reply += b"".join(iter(lambda: client.recv(65536), b""))
    events = [json.loads(line[6:]) for line in reply.split(b"\n") if line.startswith(b"data: {")]
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == list(range(1, 301))
    assert reply.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": SPACES}),
        ("/v1/completions", {"prompt": ["fine", SPACES], "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SPACES}]}),
        ("/tokenize", {"prompt": SPACES}),
    ],
    ids=["completion", "list of prompts", "chat", "tokenize"],
)
def test_a_text_that_the_tokenizer_panics_on_is_a_400_and_streams_go_on(
    edge: RunningServer, path: str, body: dict[str, Any]
) -> None:
    """Where it is to be generated from, it is refused by its length before it is encoded."""
    gaps: list[float] = []

    def read() -> None:
        fields = {"prompt": [1], "max_tokens": 2000, "ignore_eos": True, "stream": True, "return_token_ids": True}
        with httpx.stream("POST", f"{edge.url}/v1/completions", json=fields, timeout=60) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    gaps.extend(json.loads(line[6:])["choices"][0]["token_ids"])

    reader = threading.Thread(target=read)
    reader.start()
    refused = httpx.post(edge.url + path, json=body, timeout=60)
    assert refused.status_code == 400
    assert ("retry-limit" if path == "/tokenize" else "too long") in refused.json()["error"]["message"]
    reader.join()
    assert gaps == list(range(1, 2001))
    assert edge.log is not None
    assert "Traceback" not in edge.log.read_text()


def test_a_flood_of_wrong_values_is_a_400_at_once(quiet: RunningServer) -> None:
    bodies = [b'{"prompt": [' + b"1," * 3_000_000 + b'"x"]}', b'{"prompt": [' + b"{}," * 3_000_000 + b"0]}"]
    for body in bodies:
        reply = httpx.post(f"{quiet.url}/v1/completions", content=body, timeout=20)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "prompt" or reply.json()["error"]["code"] == "too_many_values"


# -- file descriptors -------------------------------------------------------------------------------------------------

READY = b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n"


def limited(log: Path, *arguments: str) -> Any:
    """``diptych serve`` with at most 64 file descriptors."""
    shell = ("bash", "-c", 'ulimit -n 64; exec "$0" "$@"')
    options = ("serve", "--port", "0", "--kv-cache-memory", "16MiB", "--threads", "1", *arguments)
    return running((*shell, *CLI, *options), log)


def ask(client: socket.socket, data: bytes = READY) -> tuple[int, Any]:
    """The status and the JSON of the reply."""
    client.settimeout(60)
    client.sendall(data)
    with HTTPResponse(client) as reply:
        reply.begin()
        return reply.status, json.loads(reply.read())


def fill(server: RunningServer) -> list[socket.socket]:
    """Open connections with half a request until they are refused."""
    held = []
    for _ in range(64):
        client = socket.create_connection(server.address)
        client.sendall(READY[:10])
        if select.select([client], [], [], 0.1)[0]:
            assert client.recv(65536).startswith(b"HTTP/1.1 503 ")
            client.close()
            return held
        held.append(client)
    raise AssertionError("the limit was never reached")


def workers(server: RunningServer) -> set[int]:
    path = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    return {int(child) for child in path.read_text().split()}


@pytest.mark.parametrize("fleet", [(), ("--prefill", "1", "--decode", "1")], ids=["one worker", "two workers"])
def test_a_server_out_of_descriptors_refuses_restarts_its_worker_and_recovers(
    tmp_path: Path, fleet: tuple[str, ...]
) -> None:
    with limited(tmp_path / "log", *fleet) as server:
        held = fill(server)
        before = workers(server)
        killed = min(before)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: killed not in workers(server) and len(workers(server)) == len(before))
        keeper = held[0]  # a connection that was open before is served on
        ask(keeper, READY[10:])
        wait_until(lambda: ask(keeper)[0] == 200)
        body = b'{"prompt": [1, 2, 3], "max_tokens": 2}'
        assert ask(keeper, request(body))[0] == 200
        reasons = []
        while len(reasons) < 50:  # however many come
            client = socket.create_connection(server.address)
            held.append(client)
            status, reply = ask(client)
            if status == 503:
                reasons.append(reply["error"]["code"])
            assert len(held) < 120
        assert set(reasons) == {"too_many_connections"}
        for client in held:
            client.close()

        def is_served() -> bool:
            with suppress(httpx.TransportError):
                return httpx.get(f"{server.url}/ready").status_code == 200
            return False

        wait_until(is_served)
        assert httpx.post(f"{server.url}/v1/completions", content=body).status_code == 200
        assert server.terminate() == 0
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert log.count("connections are refused") == 1
    assert log.count("starting it again") == 1


def test_a_limit_that_no_server_fits_into_is_said_in_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="ended before it was ready"),
        running(("bash", "-c", 'ulimit -n 32; exec "$0" "$@"', *CLI, "serve", "--port", "0"), tmp_path / "log"),
    ):
        pass
    log = (tmp_path / "log").read_text()
    assert log.startswith("error: this process may open 32 files (ulimit -n); this server needs at least ")
    assert log.count("\n") == 1
