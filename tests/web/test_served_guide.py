"""The guide beside a server: how its panels are computed without disturbing anybody, and how people find it."""

import asyncio
import json
import os
import sys
from contextlib import suppress

import httpx
import psutil
import pytest
from servers import fake_server, shared_fake_server, wait_until
from watching import PHONE, chromium, overflow, serious_findings, watched

from diptych.advisor.evaluation import PACES
from diptych.web.chapters import CHAPTERS
from diptych.web.guide_app import NAMES
from diptych.web.panel_host import PanelHost
from diptych.web.panel_wire import MOST_CALLS, Call

pytestmark = pytest.mark.system
SPLIT = {
    "fleet": {"prefill": 1, "decode": 1},
    "cluster": {"disaggregate": "always"},
    "step_ms": 4,
    "tokens_per_s": 20_000,
}
KEY = "correct horse"


def panel_processes(parent: int) -> list[psutil.Process]:
    """Those that compute panels for this process, without the dead."""
    found = []
    for child in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # also a zombie's error
            found += [child] * any("panel_worker" in part for part in child.cmdline())
    return found


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_the_routes_are_those_of_the_chapters() -> None:
    assert tuple(one.name for one in CHAPTERS) == NAMES


def test_panels_are_computed_where_nobody_is_kept_waiting_and_end_with_the_server() -> None:
    with fake_server(**SPLIT) as server:
        assert panel_processes(server.process.pid) == []  # not before anybody asks
        first = httpx.get(f"{server.url}/guide/api/transfer", timeout=60)
        assert first.json()["size"]["cache_bytes"] == 2_684_354_560
        (process,) = panel_processes(server.process.pid)
        if sys.platform == "linux":
            assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
        process.kill()
        wait_until(lambda: not is_alive(process))
        again = httpx.get(f"{server.url}/guide/api/transfer", timeout=60)
        assert again.content == first.content
        (process,) = panel_processes(server.process.pid)
        server.terminate()
        wait_until(lambda: not is_alive(process))


def test_panels_are_computed_for_those_who_have_the_key_and_words_are_for_everybody() -> None:
    with fake_server(**SPLIT, serve={"api_keys": [KEY]}) as server, chromium() as browser:
        assert httpx.get(f"{server.url}/guide/api/phases").status_code == 401
        for path in ("/ui", "/guide", "/guide/phases", "/compare"):
            reply = httpx.get(f"{server.url}{path}/", params={"a": "b"}, follow_redirects=True, timeout=60)
            assert (reply.status_code, reply.url.path, reply.url.query) == (200, path, b"a=b")
        with watched(browser, f"{server.url}/guide/phases", lambda text: "401" in text) as page:
            page.locator("#problem", has_text="asks for an API key").wait_for()
            page.get_by_role("link", name="Live").click()
            page.fill("#key-input", KEY)
            page.keyboard.press("Enter")
            page.locator("#connection", has_text="live").wait_for()
            page.get_by_role("link", name="Guide", exact=True).click()
            page.locator(".chapter-card").first.click()
            page.wait_for_selector("#results[aria-busy=false]")
            page.locator("#roof svg").wait_for()


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_people_find_the_way_from_the_live_page_to_the_guide_and_back(size: str) -> None:
    context = {"viewport": PHONE} if size == "phone" else {}
    server = shared_fake_server(**SPLIT)
    with (
        chromium() as browser,
        watched(browser, f"{server.url}/ui", **context) as page,
    ):
        page.locator("#connection", has_text="live").wait_for()
        for name, address, shown in (
            ("Guide", "/guide", page.locator(".chapter-card").first),
            ("Compare", "/compare", page.locator("#file-a")),
            ("Live", "/ui", page.locator("#send-streams:enabled")),
        ):
            page.get_by_role("navigation").get_by_role("link", name=name, exact=True).click()
            page.wait_for_url(f"{server.url}{address}")
            shown.wait_for()
            assert overflow(page) <= 0
            assert serious_findings(page) == []


def test_whoever_asks_behind_too_many_is_told_so() -> None:
    async def ask(host: PanelHost) -> list[int]:
        calls = [host.ask(Call(kind="panel", name="phases")) for _ in range(MOST_CALLS + 3)]
        return [reply.status for reply in await asyncio.gather(*calls)]

    host = PanelHost()
    try:
        assert asyncio.run(ask(host)) == [200] * (MOST_CALLS + 1) + [503] * 2
    finally:
        host.close()


def test_a_process_that_dies_at_work_is_an_answer_and_the_next_question_starts_another() -> None:
    async def story(host: PanelHost) -> list[int]:
        await host.ask(Call(kind="panel", name="phases"))
        first = await host.ask(Call(kind="begin", query={"rate": "400", "gpus": "16"}))
        asking = asyncio.create_task(host.ask(Call(kind="next", stream=first.stream)))  # takes a second
        await asyncio.sleep(0.05)
        for process in panel_processes(os.getpid()):
            process.kill()
        return [(await asking).status, (await host.ask(Call(kind="panel", name="phases"))).status]

    host = PanelHost()
    try:
        assert asyncio.run(story(host)) == [503, 200]
    finally:
        host.close()


def test_a_server_that_ends_waits_for_no_panel() -> None:
    async def story(host: PanelHost) -> list[int]:
        await host.ask(Call(kind="panel", name="phases"))
        first = await host.ask(Call(kind="begin", query={"rate": "400", "gpus": "16"}))
        asking = asyncio.create_task(host.ask(Call(kind="next", stream=first.stream)))  # takes a second
        behind = asyncio.create_task(host.ask(Call(kind="panel", name="phases")))
        await asyncio.sleep(0.05)
        host.end()
        later = host.ask(Call(kind="panel", name="phases"))
        return [reply.status for reply in await asyncio.gather(asking, behind, later)]

    host = PanelHost()
    try:
        assert asyncio.run(story(host)) == [503, 503, 503]
    finally:
        host.close()


def test_a_panel_that_nobody_waits_for_is_not_computed_and_a_stream_ends_when_it_is_dropped() -> None:
    async def gone() -> bool:
        return True

    async def story(host: PanelHost) -> None:
        assert (await host.ask(Call(kind="panel", name="disaggregated"), gone)).status == 503
        first = await host.ask(Call(kind="begin", query={"gpus": "2", "rate": "1"}))
        most = 3 * PACES.max_probes  # of chunked, unified, and one worker of each role
        assert json.loads(first.body) == {"kind": "progress", "done": 0, "total": most, "text": "starting"}
        more = await host.ask(Call(kind="next", stream=first.stream))
        assert json.loads(more.body)["done"] == 1
        assert (await host.ask(Call(kind="drop", stream=first.stream))).body == b""
        assert (await host.ask(Call(kind="next", stream=first.stream))).body == b""

    host = PanelHost()
    try:
        asyncio.run(story(host))
    finally:
        host.close()


def test_a_fault_of_a_panel_is_an_answer_and_the_next_one_is_right(capfd: pytest.CaptureFixture[str]) -> None:
    async def story(host: PanelHost) -> list[int]:
        calls = (Call(kind="panel", name="nonsense"), Call(kind="panel", name="phases", query={"batch": "0"}))
        return [(await host.ask(call)).status for call in (*calls, Call(kind="panel", name="phases"))]

    host = PanelHost()
    try:
        assert asyncio.run(story(host)) == [500, 400, 200]
    finally:
        host.close()
    assert "KeyError: 'nonsense'" in capfd.readouterr().err
