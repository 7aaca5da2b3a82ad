"""What the server of the guide takes is bounded: heads of requests, and queries of panels."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from starlette.testclient import TestClient

from diptych.serving import edge_limits
from diptych.web import panel_host, panel_wire
from diptych.web.guide_app import NAMES, guide_app
from diptych.web.panel_host import PanelHost
from diptych.web.panel_wire import Call, send
from diptych.web.panel_worker import PanelWorker
from diptych.web.panels import choose


@pytest.mark.parametrize("name", NAMES)
def test_a_query_that_is_too_long_is_refused_before_it_is_taken_apart(name: str) -> None:
    most = edge_limits.GUIDE_QUERY_BYTES
    host = PanelHost()
    try:
        with TestClient(guide_app(host)) as client:
            reply = client.get(f"/guide/api/{name}?" + "a" * (most + 1))
    finally:
        host.close()
    assert reply.status_code == 400 and f"at most {most}" in reply.text


def test_a_panel_has_its_time_and_the_next_one_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(host: PanelHost) -> list[int]:
        call = Call(kind="panel", name="phases")
        found = [(await host.ask(call)).status]
        with monkeypatch.context() as patch:
            patch.setattr(panel_wire, "ANSWER_S", 0.0)
            patch.setattr(panel_host, "send", lambda pipe, call: (time_is_over(host), send(pipe, call)))
            found.append((await host.ask(call)).status)
        return [*found, (await host.ask(call)).status]

    def time_is_over(host: PanelHost) -> None:
        assert host._process is not None
        host._process.wait(30)  # it is killed by the timer before it is asked: else it may have answered

    host = PanelHost()
    try:
        assert asyncio.run(story(host)) == [200, 503, 200]
    finally:
        host.close()


def test_as_many_streams_are_read_as_the_limit_and_one_more_ends_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "steps", lambda query: iter([{"event": number} for number in range(4)]))
    worker, most = PanelWorker(), edge_limits.GUIDE_STREAMS

    def read(stream: int) -> bytes:
        return worker.answer(Call(kind="next", stream=stream)).body

    streams = [worker.answer(Call(kind="begin")).stream for _ in range(most)]
    assert all(b'"event"' in read(stream) for stream in streams)
    last = worker.answer(Call(kind="begin")).stream
    assert read(streams[0]) == b"" and all(b'"event"' in read(stream) for stream in [*streams[1:], last])


@pytest.fixture(scope="module")
def guide() -> Iterator[str]:
    program = "from diptych.cli.main import main; main()"
    process = subprocess.Popen(
        (sys.executable, "-c", program, "guide", "--port", "0"), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://[^/]+", process.stdout.readline())
        assert found is not None
        yield found[0]
    finally:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.system
def test_the_head_of_a_request_is_bounded(guide: str) -> None:
    assert httpx.get(f"{guide}/guide").status_code == 200
    assert httpx.get(f"{guide}/guide", headers={"x-long": "a" * edge_limits.HEAD_BYTES}).status_code == 431
    assert httpx.get(f"{guide}/guide/api/phases").status_code == 200
