"""The guide answers under addresses and localhost, and under no name that a foreign page can point at this machine."""

import asyncio

import httpx
import pytest

from diptych.cli.guide import _guarded
from diptych.web.guide_app import guide_app
from diptych.web.panel_host import PanelHost


async def _statuses(host: str) -> list[int]:
    panels = PanelHost()
    try:
        transport = httpx.ASGITransport(_guarded(guide_app(panels)), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            calls = [(method, path) for path in ("/", "/no-such-page") for method in ("GET", "HEAD", "POST", "OPTIONS")]
            return [(await client.request(*call, headers={"host": host})).status_code for call in calls]
    finally:
        panels.close()


@pytest.mark.parametrize("host", ["foreign.example", "foreign.example:8000", "localhost.foreign.example"])
def test_no_path_or_method_of_the_guide_answers_under_a_foreign_name(host: str) -> None:
    assert set(asyncio.run(_statuses(host))) == {403}


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "[::1]:8000"])
def test_the_guide_answers_under_the_names_of_this_machine(host: str) -> None:
    assert 403 not in asyncio.run(_statuses(host))
