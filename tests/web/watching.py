"""Pages in a real browser, watched: console errors, requests to other hosts and failed ones end the test."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlparse

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")  # as scripts/chromium looks for it
DESKTOP, PHONE = {"width": 1360, "height": 900}, {"width": 360, "height": 780}


def browser_path() -> str:
    """A browser of this machine; skips the test when there is none."""
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if found is None:
        pytest.skip("no Chromium on this machine")
    return found


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser. Not for a whole session: while it is open, no event loop can be started in this thread."""
    path = browser_path()
    with playwright.sync_playwright() as tool:
        # Containers often have a small /dev/shm, and a page that finds it full stands still without a word.
        args = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = tool.chromium.launch(executable_path=path, args=args, timeout=60_000)
        yield browser
        browser.close()


@contextmanager
def watched(
    browser: Any, url: str, expected: Callable[[str], bool] = lambda text: False, **context: Any
) -> Iterator[Any]:
    """A page at ``url`` in a context of its own. expected: problems that belong to the test."""
    context.setdefault("viewport", DESKTOP)
    own = browser.new_context(**context)
    own.set_default_timeout(60_000)  # panels beside a server get only what time nobody else wants
    page = own.new_page()
    problems: list[str] = []
    host = urlparse(url).netloc

    def on_request(request: Any) -> None:
        target = urlparse(request.url)
        if target.scheme in ("http", "https", "ws", "wss") and target.netloc != host:
            problems.append(f"request to another host: {request.url}")

    page.on("request", on_request)
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("console", lambda message: message.type in ("error", "warning") and problems.append(message.text))
    try:
        page.goto(url)
        yield page
    finally:
        own.close()
    assert [one for one in problems if not expected(one)] == []


def serious_findings(page: Any) -> list[str]:
    """What axe-core finds on the page as it is, of serious or critical impact."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    results = axe.Axe().run(page)
    return [
        f"{one['id']}: {one['help']} ({', '.join(str(node['target']) for node in one['nodes'][:4])})"
        for one in results.response["violations"]
        if one["impact"] in ("serious", "critical")
    ]


def overflow(page: Any) -> int:
    """How many pixels the page is wider than the window."""
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))
