"""What the server of the guide takes is bounded: heads of requests, and queries of panels."""

import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from starlette.testclient import TestClient

from diptych.serving import edge_limits
from diptych.web.guide_app import NAMES, guide_app
from diptych.web.panel_host import PanelHost


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
