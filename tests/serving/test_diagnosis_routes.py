"""What a server says of its settings and of what limits it, and ``diptych diagnose`` reading it."""

import json
import socket

import httpx
import msgspec
import pytest
from servers import RunningServer, fake_server, wait_until
from typer.testing import CliRunner

from diptych.cli.main import app
from diptych.control.fleet_settings import FleetSettings

pytestmark = pytest.mark.system


def ask(server: RunningServer, count: int) -> None:
    """Send requests, one after the other."""
    for _ in range(count):
        body = {"prompt": [7] * 40, "max_tokens": 8}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).raise_for_status()


def test_a_live_server_is_diagnosed_from_its_own_telemetry() -> None:
    with fake_server() as server:
        ask(server, 12)
        records = f"{server.url}/timeline/records?limit=2000"
        wait_until(lambda: httpx.get(records).text.count('"what":"finished"') == 12)
        settings = msgspec.json.decode(httpx.get(f"{server.url}/settings").content, type=FleetSettings)
        assert [worker.role for worker in settings.workers] == ["both"]
        assert settings.workers[0].engine.scheduler.max_num_seqs > 0
        found = CliRunner().invoke(app, ["diagnose", server.url, "--json", "--slo", "ttft=60s,tpot=60s"])
        assert found.exit_code == 0, found.output
        data = json.loads(found.stdout)
        assert (data["engine"], data["num_requests"], data["verdict"]) == ("diptych", 12, "healthy")
        text = httpx.get(f"{server.url}/metrics").text
        total = next(line for line in text.splitlines() if line.startswith("vllm:time_to_first_token_seconds_sum"))
        mean_s = data["attribution"]["ttft"]["mean_s"]
        assert mean_s * 12 == pytest.approx(float(total.split()[-1]), abs=1e-6)  # exactly, but for floating point
        reply = httpx.get(f"{server.url}/diagnosis?slo=ttft=60s", timeout=60).json()
        assert reply["num_requests"] == 12
        assert httpx.get(f"{server.url}/diagnosis?slo=x", timeout=60).status_code == 400


def test_settings_and_diagnosis_need_the_key(fake_with_keys: RunningServer) -> None:
    server = fake_with_keys
    for path in ("/settings", "/diagnosis"):
        assert httpx.get(f"{server.url}{path}").status_code == 401
    refused = CliRunner().invoke(app, ["diagnose", server.url])
    assert refused.exit_code == 1 and "401" in refused.stderr
    assert CliRunner().invoke(app, ["diagnose", server.url, "--api-key", "secret"]).exit_code == 0


def test_a_client_that_does_not_read_is_seen() -> None:
    fields = {"prompt": [7] * 40, "max_tokens": 1500, "stream": True, "logprobs": 20, "ignore_eos": True}
    body = json.dumps(fields)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    with fake_server() as server, socket.socket() as slow:
        host, port = server.url.removeprefix("http://").split(":")
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        slow.sendall(f"{head}content-type: application/json\r\n\r\n{body}".encode())

        def answers() -> list[dict[str, int]]:
            records = httpx.get(f"{server.url}/timeline/records?limit=2000").json()["records"]
            return [record for record in records if record["kind"] == "answer"]

        wait_until(lambda: bool(answers()))
        [answer] = answers()
        assert answer.get("unread_ns", 0) > 0 or answer.get("unsent_bytes", 0) > 65_536
