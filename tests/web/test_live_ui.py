"""The live page in a real browser, against a real 1P1D server and against the make-believe model."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from servers import CLI, RunningServer, fake_server, running, shared_fake_server, wait_until
from watching import PHONE, chromium, overflow, serious_findings, watched

SPLIT = {
    "fleet": {"prefill": 1, "decode": 1},
    "cluster": {"disaggregate": "always"},
    "step_ms": 4,
    "tokens_per_s": 20_000,
}
SHAPE = ("--prefill", "1", "--decode", "1", "--disaggregate", "always", "--threads", "1")
REAL = ("serve", "--port", "0", "--kv-cache-memory", "64MiB", *SHAPE)
KEY = "correct horse"
# Requests whose parts on the page are not what the server counted.
UNEQUAL = """() => [...diptych.view.model.requests.values()].filter((one) => one.end && one.detail).map((one) => {
  const { queue_ns: queue, prefill_ns: prefill, handoff_ns: handoff, decode_ns: decode } = one.detail;
  const parts = one.breakdown(one.end);
  const sum = (some) => some.reduce((total, part) => total + part.ns, 0);
  return [sum(parts) - (queue + prefill + handoff + decode), sum(parts.filter((part) => part.ttft)) - one.ttftNs];
}).filter(([total, first]) => total || first)"""
# What the page shows while a long prompt is computed, all at the same time: it takes seconds, and a test asks slowly.
SHOWN_WHILE_COMPUTED = """() => {
  const words = document.querySelector("#verdict-words").innerText;
  const row = [...document.querySelectorAll("#requests tr")].find((one) => one.innerText.includes("Long prompt 2"));
  return words.includes("A long prompt is being computed on Worker 0") && words.includes("4 streams wait for it")
    && words.includes("2,048 tokens of Long prompt 2") && row?.innerText.includes("prefilling")
    && diptych.view.model.lanes.get(0).open?.predicted_ns > 100e6
    && document.querySelectorAll(".reader.still").length === 4;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as one:
        yield one


@pytest.fixture
def split() -> RunningServer:
    """A fast make-believe server with a prefill and a decode worker, shared with other tests."""
    return shared_fake_server(**SPLIT)


def text(page: Any, selector: str) -> str:
    return str(page.locator(selector).inner_text())


def wait_live(page: Any) -> None:
    page.locator("#connection", has_text="live").wait_for()
    page.locator("#send-streams:enabled").wait_for()


def request_rows(page: Any) -> list[str]:
    return list(page.locator("#requests button").all_inner_texts())


def model(page: Any, expression: str) -> Any:
    return page.evaluate(f"(() => {{ const {{ model }} = diptych.view; return {expression}; }})()")


def address(page: Any) -> str:
    return str(page.evaluate("location.search"))


def test_a_real_split_server_is_shown_as_it_works(browser: Any, tmp_path: Path) -> None:
    with running((*CLI, *REAL)) as server, watched(browser, f"{server.url}/ui?long=1024") as page:
        wait_live(page)
        assert "stdlib-python" in text(page, "#model")
        page.click("#send-streams")
        wait_until(lambda: len(request_rows(page)) == 4)
        page.click("#send-long")
        page.click("#send-short")
        wait_until(lambda: {"Long prompt 1", "Short prompt 1", "Stream 1"} <= set(request_rows(page)))
        wait_until(lambda: "done" in text(page, "#requests tr:has-text('Long prompt')"))
        assert model(page, "[...model.lanes.values()].map((lane) => lane.label)") == [
            "Worker 0 · prefill",
            "Worker 1 · decode",
        ]
        wait_until(lambda: model(page, "model.lanes.get(1).length") > 50)
        wait_until(lambda: model(page, "[...model.requests.values()].filter((one) => one.delivered).length") > 0)
        assert page.evaluate(UNEQUAL) == []
        page.get_by_role("button", name="Short prompt 1").click()
        wait_until(lambda: "24 answer tokens" in text(page, "#request-name"))
        wait_until(lambda: "Computing the prompt" in text(page, "#request"))
        wait_until(lambda: page.locator("#request pre").inner_text().strip())
        wait_until(lambda: "tok/s" in text(page, "#tile-tokens"))
        wait_until(lambda: "ready" in text(page, "#workers tr:nth-child(2)"))
        with page.expect_download() as download:
            page.click("#perfetto")
        download.value.save_as(tmp_path / "trace.json")
        assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        page.evaluate("document.getElementById('stop').click()")  # does nothing where the streams have ended
        page.locator("#stop:disabled").wait_for()
        wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 0)


def test_the_page_says_why_prompts_were_computed(browser: Any) -> None:
    settings = {"step_ms": 1, "fleet": {"explain_misses": "on"}}
    with fake_server(**settings) as server, watched(browser, f"{server.url}/ui") as page:
        wait_live(page)
        page.click("#send-short")
        wait_until(lambda: "never seen" in text(page, "#misses-recent"))
        wait_until(lambda: "of these were new" in text(page, "#misses-words"))
        wait_until(lambda: "new text" in text(page, "#misses-causes"))
        assert overflow(page) == 0
        assert serious_findings(page) == []


def test_a_stream_that_waits_for_a_prompt_is_shown_as_stalled_with_the_reason(browser: Any) -> None:
    settings = {"step_ms": 4, "tokens_per_s": 5000, "scheduler": {"budget": {"kind": "whole"}}}
    with fake_server(**settings) as server, watched(browser, f"{server.url}/ui?long=2048&span=4") as page:
        wait_live(page)
        page.click("#send-streams")
        wait_until(lambda: len(request_rows(page)) == 4)
        page.click("#send-long")
        wait_until(lambda: "done" in text(page, "#requests tr:has-text('Long prompt')"))
        page.get_by_role("button", name="Pause").click()
        place = page.evaluate(
            """() => {
              const { view, sender } = diptych;
              const row = view.rows.find((one) => one.request && sender.nameOf(one.request) === "Stream 2");
              const { times } = row.request;
              let worst = 1;
              times.forEach((time, at) => at && time - times[at - 1] > times[worst] - times[worst - 1] && (worst = at));
              view.setRange(times[worst - 1] - 1e9, times[worst] + 1e9);
              const middle = (times[worst - 1] + times[worst]) / 2;
              const x = view.gutter + ((middle - view.t0) / view.span) * (view.width - view.gutter);
              return { x, y: row.y + row.height / 2, stalled: row.request.isStalled(worst, 0) };
            }"""
        )
        assert place["stalled"]
        canvas = page.locator(".timeline canvas")

        def tip() -> str:
            """What is said of that place, once the range that was set is drawn."""
            canvas.hover(position={"x": place["x"] - 1, "y": place["y"]})
            canvas.hover(position={"x": place["x"], "y": place["y"]})
            return text(page, ".timeline-tip")

        wait_until(lambda: "stalled" in (words := tip()) and "prompt tokens of Long prompt 1" in words)
        canvas.click(position={"x": place["x"], "y": place["y"]})
        wait_until(lambda: text(page, "#request-name").startswith("Stream 2"))
        wait_until(lambda: "was computing" in text(page, "#request"))
        wait_until(lambda: text(page, "#verdict-value").endswith("×"))


def test_a_long_prompt_is_seen_while_it_is_computed_and_its_cause_is_said(browser: Any) -> None:
    settings = {"step_ms": 4, "tokens_per_s": 700, "scheduler": {"budget": {"kind": "whole"}}}
    with fake_server(**settings) as server, watched(browser, f"{server.url}/ui?long=2048") as page:
        wait_live(page)
        page.click("#send-streams")
        wait_until(lambda: len(request_rows(page)) == 4)
        for number in (1, 2):  # the first one teaches how long such a step takes
            page.click("#send-long")
            if number == 1:
                wait_until(lambda: "done" in text(page, "#requests tr:has-text('Long prompt 1')"))
        wait_until(lambda: page.evaluate(SHOWN_WHILE_COMPUTED))
        wait_until(lambda: "done" in text(page, "#requests tr:has-text('Long prompt 2')"))
        wait_until(lambda: model(page, "model.lanes.get(0).open") is None)
        wait_until(lambda: page.locator(".reader.still").count() == 0)


def test_the_texts_of_the_streams_stand_side_by_side_and_say_their_longest_pause(
    browser: Any, split: RunningServer
) -> None:
    with watched(browser, f"{split.url}/ui") as page:
        wait_live(page)
        assert page.locator("#readers").is_hidden()
        page.click("#send-streams")
        wait_until(lambda: page.locator(".reader .pill.good").count() == 4)
        assert page.locator(".reader b").all_inner_texts() == [f"Stream {number}" for number in range(1, 5)]
        wait_until(lambda: all("longest pause" in one for one in page.locator(".reader").all_inner_texts()))
        page.click("#stop")
        wait_until(lambda: page.locator(".reader", has_text="stopped").count() == 4)


def test_the_shape_is_switched_while_the_server_runs(browser: Any) -> None:
    with fake_server(step_ms=2, tokens_per_s=5000, fleet={"both": 2}) as server:
        with watched(browser, f"{server.url}/ui") as page:
            wait_live(page)
            page.locator("[data-shape=chunked][aria-pressed=true]").wait_for()
            for shape, words in (
                ("pools", "answers written on decode workers"),
                ("unified", "One worker computes prompts whole"),
                ("chunked", "in chunks between tokens"),
            ):
                page.click(f"[data-shape={shape}]")
                page.locator(f"[data-shape={shape}][aria-pressed=true]").wait_for()
                wait_until(lambda words=words: words in text(page, "#story"))
                wait_until(lambda: text(page, "#shape-words") == "")
            assert serious_findings(page) == []
        with watched(browser, f"{server.url}/ui") as page:
            wait_live(page)
            page.locator("[data-shape=chunked][aria-pressed=true]").wait_for()


def test_a_server_with_one_worker_offers_no_pools_and_one_with_an_admin_key_no_switch(browser: Any) -> None:
    server = shared_fake_server(step_ms=1)
    with watched(browser, f"{server.url}/ui") as page:
        wait_live(page)
        assert page.locator("[data-shape=pools]").is_disabled()
        assert page.locator("[data-shape=unified]").is_enabled()
    with fake_server(serve={"admin_key": KEY}) as server, watched(browser, f"{server.url}/ui") as page:
        wait_live(page)
        assert page.locator("#shape").is_hidden()


def test_a_text_is_continued_and_a_conversation_goes_on(browser: Any) -> None:
    with running((*CLI, *REAL)) as server, watched(browser, f"{server.url}/ui") as page:
        wait_live(page)
        assert page.input_value("#chat-mode") == "text"  # the bundled model continues texts
        assert "not trained to answer" in text(page, "#chat-about")
        page.click("#chat-send")
        wait_until(lambda: "tokens/s" in text(page, "#chat-log"))
        assert "def get(self" in text(page, ".said-by-model")
        assert serious_findings(page) == []
        page.select_option("#chat-mode", "chat")
        assert text(page, "#chat-log") == ""
        for number in (1, 2):
            page.fill("#chat-input", f"Question {number}")
            page.press("#chat-input", "Enter")
            wait_until(lambda number=number: page.locator(".chat-figures").count() == number)
            wait_until(lambda: page.locator("#chat-send").is_enabled())
        assert page.locator(".said-by-you").all_inner_texts() == ["Question 1", "Question 2"]
        wait_until(lambda: "Chat 3" in request_rows(page))
        page.click("#chat-new")
        assert page.locator(".said-by-you").count() == 0
        page.set_viewport_size(PHONE)
        assert overflow(page) == 0


def test_every_control_does_what_it_says_and_the_address_keeps_it(browser: Any, split: RunningServer) -> None:
    with watched(browser, f"{split.url}/ui") as page:
        wait_live(page)
        for selector, value, kept in (("#ttft-objective", "500", "ttft=500"), ("#gap-objective", "40", "gap=40")):
            page.fill(selector, value)
            wait_until(lambda kept=kept: kept in address(page))
        page.select_option("#long-tokens", "512")
        assert "long=512" in address(page)
        page.click("#send-short")
        wait_until(lambda: "Short prompt 1" in request_rows(page))
        wait_until(lambda: "met their objectives" in text(page, "#tile-goodput"))
        page.get_by_role("button", name="Zoom in").click()
        page.get_by_role("button", name="Zoom out").click()
        page.get_by_role("button", name="Zoom out").click()
        wait_until(lambda: "span=12.8" in address(page))
        page.get_by_role("button", name="Show all that is held").click()
        assert not page.evaluate("diptych.view.following")
        page.get_by_role("button", name="Follow what happens").click()
        assert page.evaluate("diptych.view.following")
        page.get_by_role("button", name="Show a row for each request").click()
        assert "requests=0" in address(page)
        page.click("text=As a table")
        wait_until(lambda: "Worker 1 · decode" in text(page, ".timeline table"))
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.reload()
        wait_live(page)
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert page.input_value("#ttft-objective") == "500"
        assert page.input_value("#long-tokens") == "512"
        assert page.evaluate("[diptych.view.showRequests, diptych.view.span]") == [False, 12.8e9]


def test_the_timeline_is_moved_and_read_with_the_keyboard_alone(browser: Any, split: RunningServer) -> None:
    with watched(browser, f"{split.url}/ui") as page:
        wait_live(page)
        page.click("#send-short")
        wait_until(lambda: "Short prompt 1" in request_rows(page))
        wait_until(lambda: "done" in text(page, "#requests tr:has-text('Short prompt 1')"))
        canvas = page.locator(".timeline canvas")
        canvas.focus()
        before = page.evaluate("diptych.view.span")
        page.keyboard.press("+")
        assert page.evaluate("diptych.view.span") < before
        page.keyboard.press("Space")
        assert not page.evaluate("diptych.view.following")
        page.keyboard.press("0")
        page.keyboard.press("ArrowDown")
        spoken = page.locator(".timeline > [aria-live]")
        wait_until(lambda: "Worker 0" in spoken.text_content())
        page.keyboard.press("ArrowDown")
        wait_until(lambda: "Worker 1" in spoken.text_content())
        page.keyboard.press("n")
        wait_until(lambda: "step on Worker 1" in spoken.text_content())
        page.keyboard.press("Enter")
        page.keyboard.press("End")
        assert page.evaluate("diptych.view.following")


def test_the_timeline_is_moved_with_the_mouse_and_with_fingers(browser: Any, split: RunningServer) -> None:
    context = {"viewport": PHONE, "has_touch": True, "is_mobile": True}
    with watched(browser, f"{split.url}/ui", **context) as page:
        wait_live(page)
        page.locator("#send-short").tap()
        wait_until(lambda: "Short prompt 1" in request_rows(page))
        canvas = page.locator(".timeline canvas")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        x, y = box["x"] + 200, box["y"] + 60
        page.mouse.move(x, y)
        page.keyboard.down("Control")
        before = page.evaluate("diptych.view.span")
        page.mouse.wheel(0, -40)
        wait_until(lambda: page.evaluate("diptych.view.span") < before)
        page.keyboard.up("Control")
        page.mouse.down()
        page.mouse.move(x + 60, y, steps=4)
        page.mouse.up()
        wait_until(lambda: not page.evaluate("diptych.view.following"))
        devtools = page.context.new_cdp_session(page)

        def touch(kind: str, *points: float) -> None:
            places = [{"x": at, "y": y, "id": number} for number, at in enumerate(points)]
            devtools.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": places})

        right, span = page.evaluate("[diptych.view.t1, diptych.view.span]")
        touch("touchStart", x - 30)
        for shift in range(10, 80, 10):
            touch("touchMove", x - 30 + shift)
        touch("touchEnd")
        wait_until(lambda: page.evaluate("diptych.view.t1") < right)
        touch("touchStart", x - 40, x + 40)
        for shift in range(8, 48, 8):
            touch("touchMove", x - 40 - shift, x + 40 + shift)
        touch("touchEnd")
        wait_until(lambda: page.evaluate("diptych.view.span") < 0.8 * span)
        page.touchscreen.tap(x, box["y"] + 40)
        wait_until(lambda: "Worker 0" in text(page, ".timeline-tip"))


def test_the_page_comes_back_by_itself_when_the_server_does(browser: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = SPLIT | {"serve": {"port": port}}

    def is_end(text: str) -> bool:
        """What the browser itself says of connections that break or are refused, and of a server that ends."""
        return "ERR_" in text or "status of 503" in text

    with fake_server(**settings) as server, watched(browser, f"{server.url}/ui", is_end) as page:
        wait_live(page)
        page.click("#send-short")
        wait_until(lambda: "Short prompt 1" in request_rows(page))
        first_run = model(page, "model.header.run_id")
        server.terminate()
        page.locator("#connection", has_text="reconnecting").wait_for()
        with fake_server(**settings):
            wait_live(page)
            wait_until(lambda: model(page, "model.header.run_id") != first_run)
            page.click("#send-short")
            wait_until(lambda: request_rows(page) == ["Short prompt 2"])


def test_a_server_with_a_key_is_watched_with_that_key_only(browser: Any) -> None:
    settings = SPLIT | {"serve": {"api_keys": [KEY]}}
    with fake_server(**settings) as server, watched(browser, f"{server.url}/ui", lambda text: "401" in text) as page:
        page.locator("#key-dialog[open]").wait_for()
        page.fill("#key-input", "wrong")
        page.keyboard.press("Enter")
        page.locator("#connection", has_text="needs an API key").wait_for()
        page.fill("#key-input", KEY)
        page.keyboard.press("Enter")
        wait_live(page)
        page.click("#send-short")
        wait_until(lambda: "Short prompt 1" in request_rows(page))
        assert KEY not in page.url


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_people_who_see_hear_or_type_find_everything(
    browser: Any, split: RunningServer, scheme: str, size: str
) -> None:
    context = {"color_scheme": scheme, **({"viewport": PHONE, "has_touch": True} if size == "phone" else {})}
    with watched(browser, f"{split.url}/ui?ttft=500&gap=40", **context) as page:
        wait_live(page)
        page.click("#send-streams")
        page.click("#send-long")
        wait_until(lambda: len(request_rows(page)) >= 5)
        page.click("text=As a table")
        assert overflow(page) == 0
        assert serious_findings(page) == []
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(245, 246, 249)" if scheme == "light" else "rgb(13, 17, 23)")
        page.evaluate("document.getElementById('stop').click()")  # does nothing where the streams have ended


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_batches_show_their_progress_and_can_be_cancelled(browser: Any, tmp_path: Path, size: str) -> None:
    lines = [{"custom_id": str(number), "method": "POST", "url": "/v1/completions",
              "body": {"prompt": [5, 6], "max_tokens": 2000}} for number in range(40)]  # fmt: skip
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    context = {"viewport": PHONE, "has_touch": True} if size == "phone" else {}
    with (
        fake_server(batch_dir=str(tmp_path), step_ms=20) as server,
        watched(browser, f"{server.url}/ui", **context) as page,
    ):
        wait_live(page)
        assert page.locator("#batches").is_hidden()
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        page.locator("#batches-rows", has_text="in progress").wait_for()
        assert "0 of 40" in text(page, "#batches-rows")
        assert overflow(page) == 0
        assert serious_findings(page) == []
        page.click("#batches-rows button")
        page.locator("#batches-rows", has_text="cancelled").wait_for()
        assert "40 of 40" in text(page, "#batches-rows")


def test_the_whole_page_is_small(browser: Any, split: RunningServer) -> None:
    with watched(browser, f"{split.url}/ui") as page:
        wait_live(page)
        files = page.evaluate(
            """() => [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
              .filter((one) => one.name.includes("/static/") || one.entryType === "navigation")
              .map((one) => one.decodedBodySize)"""
        )
    assert 15 <= len(files) <= 40
    assert sum(files) <= 300_000


def test_the_reference_is_drawn_without_any_other_host(browser: Any, split: RunningServer) -> None:
    with watched(browser, f"{split.url}/docs") as page:
        page.locator("#paths section").first.wait_for()
        assert "/v1/chat/completions" in text(page, "#contents")
        body = page.locator("section", has=page.locator("h2", has_text="/v1/chat/completions"))
        assert "cache_salt" in body.inner_text() and "integer, 1 to 128" in body.inner_text()
        assert overflow(page) == 0
        assert serious_findings(page) == []
