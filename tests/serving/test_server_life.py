"""The life of a server: many streams, clients that leave, overload, keys, signals, a worker that dies."""

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from fake_worker import CRASH_TOKEN, FAIL_TOKEN
from servers import CLI, KEYS, RunningServer, fake_server, wait_until

pytestmark = pytest.mark.system
BODY = {"prompt": [5] * 40, "max_tokens": 5000, "ignore_eos": True, "stream": True}


def stream(url: str, **fields: Any) -> Any:
    return httpx.stream("POST", f"{url}/v1/completions", json={**BODY, **fields}, timeout=30)


def first_event(reply: httpx.Response) -> tuple[str, Iterator[str]]:
    lines = (line for line in reply.iter_lines() if line and not line.startswith(":"))
    return next(lines), lines


def is_empty(server: RunningServer) -> bool:
    metrics = server.metrics()
    return metrics["vllm:num_requests_running"] == 0 and metrics["vllm:num_requests_waiting"] == 0


def test_fifty_streams_at_once_each_get_their_own_tokens(fake: RunningServer) -> None:
    async def one(client: openai.AsyncOpenAI, length: int) -> None:
        reply = await client.completions.create(
            model="fake", prompt=[7] * length, max_tokens=30, stream=True, logprobs=0, extra_body={"ignore_eos": True}
        )
        tokens = [token async for chunk in reply for token in chunk.choices[0].logprobs.tokens]
        expected = await client.post(
            f"{fake.url}/detokenize", body={"tokens": list(range(length, length + 30))}, cast_to=dict[str, str]
        )
        assert "".join(tokens) == expected["prompt"]

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0) as client:
            await asyncio.gather(*(one(client, 40 + 3 * number) for number in range(50)))

    asyncio.run(main())


def test_a_slow_reader_gets_everything_and_holds_nobody_up(fake: RunningServer) -> None:
    fields = {"prompt": [9] * 100, "max_tokens": 1500, "ignore_eos": True, "return_token_ids": True, "stream": True}
    data = json.dumps({**fields, "logprobs": 5}).encode()  # about a megabyte of events
    head = (
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {len(data)}",
        "Connection: close",
        "",
        "",
    )
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        address = urlsplit(fake.url)
        slow.connect((address.hostname, address.port))
        slow.sendall("\r\n".join(head).encode() + data)
        wait_until(lambda: is_empty(fake) and fake.metrics()["vllm:generation_tokens_total"] >= 1500)
        with stream(fake.url, max_tokens=20) as reply:
            assert list(reply.iter_lines())[-2] == "data: [DONE]"
        said = b"".join(iter(lambda: slow.recv(65536), b""))
    events = [json.loads(line[6:]) for line in said.split(b"\n") if line.startswith(b"data: {")]
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == list(range(100, 1600))


def test_a_client_of_http_1_0_gets_its_stream_to_the_end(fake: RunningServer) -> None:
    data = json.dumps({**BODY, "max_tokens": 20, "return_token_ids": True}).encode()
    head = ("POST /v1/completions HTTP/1.0", f"Content-Length: {len(data)}", "", "")
    address = urlsplit(fake.url)
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall("\r\n".join(head).encode() + data)
        said = b"".join(iter(lambda: client.recv(65536), b""))
    events = [json.loads(line[6:]) for line in said.split(b"\n") if line.startswith(b"data: {")]
    assert sum(len(event["choices"][0]["token_ids"]) for event in events) == 20
    assert b"data: [DONE]" in said


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_frees_its_blocks(fake: RunningServer, streaming: bool) -> None:
    wait_until(lambda: is_empty(fake))
    aborted = fake.metrics()['vllm:request_success_total{finished_reason="abort"}']
    if streaming:
        with stream(fake.url) as reply:
            _, rest = first_event(reply)  # dropping the iterator would close the connection
            wait_until(lambda: fake.metrics()["vllm:num_requests_running"] == 1)
            del rest
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{fake.url}/v1/completions", json={**BODY, "stream": False}, timeout=0.3)
    wait_until(lambda: is_empty(fake))
    wait_until(lambda: fake.metrics()['vllm:request_success_total{finished_reason="abort"}'] > aborted)


def test_a_client_that_leaves_during_its_prefill_frees_it_too() -> None:
    with fake_server(tokens_per_s=500, scheduler={"budget": {"max_batched_tokens": 256}}) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json={"prompt": [5] * 7000, "max_tokens": 5}, timeout=1.5)

        def told() -> list[dict[str, Any]]:
            return list(httpx.get(f"{server.url}/timeline/records").json()["records"])

        wait_until(lambda: any(one.get("what") == "finished" for one in told()), 30)
        assert 0 < sum(tokens for one in told() for _, _, tokens in one.get("prefills", ())) < 7000
        wait_until(lambda: is_empty(server))


def test_more_than_may_wait_gets_429_with_retry_after() -> None:
    async def main(server: RunningServer) -> tuple[list[httpx.Response], list[httpx.Response]]:
        """The replies to those that waited behind a stream, and to those that came after them."""
        url = f"{server.url}/v1/completions"
        async with httpx.AsyncClient(timeout=60) as client:
            body = {**BODY, "max_tokens": 5, "stream": False}
            async with client.stream("POST", url, json=BODY) as running:
                lines = running.aiter_lines()  # (dropping it would close the connection)
                await anext(lines)
                waiting = [asyncio.create_task(client.post(url, json=body)) for _ in range(2)]
                while server.metrics()["vllm:num_requests_waiting"] < 2:
                    await asyncio.sleep(0.02)
                refused = await asyncio.gather(*(client.post(url, json=body) for _ in range(3)))
            return await asyncio.gather(*waiting), refused

    with fake_server(step_ms=5, scheduler={"max_num_seqs": 1, "max_waiting": 2}) as server:
        served, refused = asyncio.run(main(server))
        assert [reply.status_code for reply in served] == [200, 200]
        assert [reply.status_code for reply in refused] == [429, 429, 429]
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
        assert refused[0].json()["error"]["type"] == "rate_limit_error"


def test_the_api_key_guards_everything_but_health(fake_with_keys: RunningServer) -> None:
    server = fake_with_keys
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/ready").status_code == 200
    for path in ("/v1/models", "/metrics", "/openapi.json"):
        assert httpx.get(server.url + path).status_code == 401
        assert httpx.get(server.url + path, headers={"authorization": "Bearer wrong"}).status_code == 401
        assert httpx.get(server.url + path, headers={"authorization": "Bearer secret"}).status_code == 200
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_each_of_several_keys_is_let_in_and_another_is_not(fake_with_keys: RunningServer) -> None:
    for key, status in ((KEYS[0], 200), (KEYS[1], 200), ("third", 401)):
        headers = {"authorization": f"Bearer {key}"}
        body = {"prompt": [1], "max_tokens": 1, "service_class": "interactive"}
        assert httpx.post(f"{fake_with_keys.url}/v1/completions", json=body, headers=headers).status_code == status


def test_a_fleet_behind_http_serves_counts_and_survives_a_killed_worker() -> None:
    fleet = {"prefill": 1, "decode": 1}
    with fake_server(step_ms=3, fleet=fleet, cluster={"disaggregate": "always"}) as server:
        body = {"prompt": list(range(50, 100)), "max_tokens": 400, "ignore_eos": True, "return_token_ids": True}
        with stream(server.url, **body) as reply:
            first, rest = first_event(reply)
            kill_worker(server, "decode")
            events = [json.loads(line.removeprefix("data: ")) for line in (first, *list(rest)[:-1])]
        assert [token for event in events for token in event["choices"][0]["token_ids"]] == list(range(50, 450))
        wait_until(lambda: server.metrics()['diptych:worker_up{role="decode",worker="1"}'] == 1)
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": [1] * 40}).status_code == 200
        metrics = server.metrics()
        assert metrics["diptych:handoffs_total"] >= 1
        assert metrics["diptych:request_retries_total"] >= 1
        assert metrics['diptych:worker_restarts_total{role="decode",worker="1"}'] == 1
        assert metrics['diptych:placements_total{reason="remote"}'] >= 1
        bad = httpx.post(f"{server.url}/v1/completions", json={"prompt": [1], "service_class": "urgent"})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "service_class")


def kill_worker(server: RunningServer, role: str) -> None:
    """SIGKILL to the worker process of this role."""
    for child in Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split():
        directory = Path(Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[-2].decode())
        if json.loads((directory / "options.json").read_bytes())["place"]["role"] == role:
            os.kill(int(child), signal.SIGKILL)
            return
    raise AssertionError(f"there is no {role} worker")


def test_sigterm_lets_the_running_end_and_refuses_newcomers() -> None:
    with fake_server(step_ms=5) as server:
        with stream(server.url, max_tokens=600, return_token_ids=True) as reply:
            first, rest = first_event(reply)
            server.process.terminate()
            wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
            refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": [1]})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert refused.headers["retry-after"]
            events = list(rest)
        assert events[-1] == "data: [DONE]"
        told = [json.loads(event.removeprefix("data: "))["choices"][0] for event in (first, *events[:-1])]
        assert [token for choice in told for token in choice["token_ids"]] == list(range(40, 640))
        assert server.process.wait(60) == 0


def test_a_second_signal_or_the_timeout_ends_the_drain() -> None:
    with fake_server(step_ms=5, serve={"drain_timeout_s": 0.3}) as server, stream(server.url) as reply:
        _, rest = first_event(reply)
        assert server.terminate(10) == 0
        events = list(rest)
        assert "shutting down" in events[-2]


def test_a_dead_worker_is_an_error_for_whoever_killed_it_and_comes_back() -> None:
    with fake_server(step_ms=2, load_s=0.5, cluster={"on_failure": "fail"}) as server:
        with stream(server.url) as reply:
            _, rest = first_event(reply)
            crash = httpx.post(f"{server.url}/v1/completions", json={"prompt": [CRASH_TOKEN]}, timeout=10)
            assert crash.status_code == 500
            assert crash.json()["error"]["code"] == "worker_failed"
            events = list(rest)
            assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "worker_failed"
        down = httpx.get(f"{server.url}/ready")
        assert (down.status_code, httpx.get(f"{server.url}/health").status_code) == (503, 200)
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": [1]}).status_code == 200
        assert server.metrics()["diptych:worker_losses_total"] == 1


def test_a_request_that_fails_alone_is_a_500_for_it_alone(fake: RunningServer) -> None:
    assert httpx.post(f"{fake.url}/v1/completions", json={"prompt": [FAIL_TOKEN]}).status_code == 500
    assert httpx.post(f"{fake.url}/v1/completions", json={"prompt": [1]}).status_code == 200


def test_while_the_model_loads_it_is_alive_and_not_ready() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}"

    def status(path: str) -> int:
        try:
            return httpx.get(url + path).status_code
        except httpx.ConnectError:
            return 0

    source = ("--port", str(port), "--kv-cache-memory", "16MiB")
    process = subprocess.Popen((*CLI, "serve", *source), stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: status("/health") == 200)
        assert status("/ready") in (503, 200)
        early = httpx.post(f"{url}/v1/completions", json={"prompt": [1], "max_tokens": 1})
        assert early.status_code in (503, 200)
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_a_taken_port_and_a_wrong_model_are_told_in_one_line(tmp_path: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = subprocess.run((*CLI, "serve", "--port", str(port)), capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == (
        f"error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another one with --port\n"
    )
    (tmp_path / "config.json").write_text('{"architectures": ["Unheard"], "model_type": "unheard"}')
    command = (*CLI, "serve", "--port", "0", "--model", str(tmp_path))
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "Unheard" in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
