"""The guide and the comparison in a real browser: every page, every panel, every control."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from servers import CLI, fake_server, wait_until
from watching import PHONE, chromium, overflow, serious_findings, watched

from diptych.web.chapters import CHAPTERS

PAGES = ("guide", *(f"guide/{one.name}" for one in CHAPTERS), "compare")
LIVE = [one.name for one in CHAPTERS if one.panel]
QUIET = "#results[aria-busy=false]"


@pytest.fixture(scope="module")
def guide() -> Iterator[str]:
    """The address of a running ``diptych guide``."""
    process = subprocess.Popen((*CLI, "guide", "--port", "0"), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://\S+/", line)
    assert found, line
    yield found[0]
    process.terminate()
    process.wait(20)
    process.stdout.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as one:
        yield one


def settle(page: Any) -> None:
    """Until what is shown belongs to what is asked."""
    page.wait_for_selector(QUIET)


def unfold(page: Any) -> None:
    """Show all settings."""
    page.evaluate("for (const one of document.querySelectorAll('#form details')) one.open = true")


def state(page: Any) -> dict[str, str]:
    return dict(page.evaluate("Object.fromEntries(new FormData(document.querySelector('#form')))"))


def query(page: Any) -> str:
    return str(page.evaluate("location.search"))


def test_the_guide_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, diptych.web.guide_app, diptych.web.chapters; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run((sys.executable, "-c", code), check=True)


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_readable_in_light_dark_and_on_a_phone(browser: Any, guide: str, path: str) -> None:
    with watched(browser, guide + path) as page:
        if path.removeprefix("guide/") in LIVE:
            page.wait_for_selector(QUIET)
        assert page.locator("h1").count() == 1
        assert overflow(page) <= 0
        assert serious_findings(page) == []
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert serious_findings(page) == []
        page.set_viewport_size(PHONE)
        page.wait_for_timeout(150)
        assert overflow(page) <= 0


@pytest.mark.parametrize("name", LIVE)
def test_every_control_changes_the_address_and_the_address_brings_it_back(browser: Any, guide: str, name: str) -> None:
    with watched(browser, f"{guide}guide/{name}", _is_refusal) as page:
        page.wait_for_selector(QUIET)
        unfold(page)
        for field in page.locator("#form select[name]").all():
            if field.is_visible():
                other = field.evaluate("one => [...one.options].map(o => o.value).find(v => v !== one.value)")
                field.select_option(other)
                settle(page)
                assert f"{field.get_attribute('name')}=" in query(page)
        page.click("#reset-all")
        for field in page.locator("#form input[type=number][name]").all():
            if field.is_visible():
                slider = page.locator(f"#{field.get_attribute('id')}-range")
                before = field.input_value()
                at_end = slider.evaluate("one => Number(one.value) > Number(one.max) / 2")
                slider.press("ArrowLeft" if at_end else "ArrowRight")
                settle(page)
                assert field.input_value() != before
                assert f"{field.get_attribute('name')}=" in query(page)
        for field in page.locator("#form input[type=radio]").all():
            if field.is_visible() and not field.is_checked():
                field.check()
                settle(page)
        wanted, shown = state(page), page.locator("#results").inner_text()
        page.goto(page.url)
        page.wait_for_selector(QUIET)
        settle(page)
        assert state(page) == wanted
        if page.locator("#problem").is_hidden():
            assert page.locator("#results").inner_text() == shown
        page.click("#reset-all")
        settle(page)
        assert query(page) == ""


def _is_refusal(text: str) -> bool:
    """Combinations that cannot be (a cap above another one) are answered by 400, which the browser notes."""
    return "status of 400" in text


def test_a_wrong_value_is_said_beside_the_panel_and_mended(browser: Any, guide: str) -> None:
    with watched(browser, f"{guide}guide/phases", _is_refusal) as page:
        page.wait_for_selector(QUIET)
        page.fill("#batch", "100000")
        page.locator("#problem", has_text="it must be a number from 1 to 512").wait_for()
        assert page.get_attribute("#batch", "aria-invalid") == "true"
        page.fill("#batch", "64")
        page.wait_for_selector("#problem", state="hidden")
        assert page.get_attribute("#batch", "aria-invalid") is None


def test_the_roofline_moves_with_the_batch(browser: Any, guide: str) -> None:
    with watched(browser, f"{guide}guide/phases?batch=1") as page:
        page.wait_for_selector(QUIET)
        before = page.locator("#roof svg").get_attribute("aria-label")
        page.fill("#batch", "512")
        settle(page)
        assert "ridge at 295" in before
        assert page.locator("#roof svg").get_attribute("aria-label") != before


def test_prompts_are_added_changed_and_removed_and_the_streams_stand_still(browser: Any, guide: str) -> None:
    with watched(browser, f"{guide}guide/interference") as page:
        page.wait_for_selector(QUIET)
        assert "30.9 ×" in page.locator("#tiles").inner_text()
        unfold(page)
        page.click("#add-long")
        page.click("#add-short")
        settle(page)
        assert page.locator("#requests tbody tr").count() == 7
        page.get_by_label("Prompt tokens of prompt 3").fill("500")
        settle(page)
        assert "500" in page.locator("#requests tbody").inner_text()
        page.click("#clear-prompts")
        settle(page)
        assert "No prompt disturbs the streams" in page.locator("#headline").inner_text()
        assert query(page) == "?prompts="


def test_a_run_is_played_paused_stepped_and_searched(browser: Any, guide: str) -> None:
    with watched(browser, f"{guide}guide/interference") as page:
        page.wait_for_selector(QUIET)
        end = page.locator("#clock").inner_text()
        page.click("#to-start")
        assert page.locator("#clock").inner_text() == "0.0 ms"
        page.click("#step-on")
        assert page.locator("#said").inner_text().startswith("Step 1 of worker 1, ")
        page.click("#step-on")
        assert "Step 2" in page.locator("#said").inner_text()
        page.click("#step-back")
        assert "Step 1" in page.locator("#said").inner_text()
        page.select_option("#speed", "0.1")
        page.click("#play")
        wait_until(lambda: float(page.locator("#clock").inner_text().split()[0]) > 20)
        page.click("#play")
        paused = page.locator("#clock").inner_text()
        page.wait_for_timeout(120)
        assert page.locator("#clock").inner_text() == paused != end
        page.locator("#seek").press("End")
        assert page.locator("#clock").inner_text() == end
        page.select_option("#speed", "1")
        page.click("#play")
        wait_until(lambda: page.locator("#clock").inner_text() == end)
        assert "Play" in page.locator("#play").inner_text()


def test_chunks_take_the_stalls_away(browser: Any, guide: str) -> None:
    with watched(browser, f"{guide}guide/chunked") as page:
        page.wait_for_selector(QUIET)
        assert page.locator("#measures tbody tr").first.locator(".better").inner_text() == "16.9 ms"
        assert page.locator("#timeline canvas").count() == 2
        assert page.locator(".run h3").all_inner_texts() == ["As chosen", "Whole prompts"]
        page.locator("details", has_text="Every request").locator("summary").click()
        page.click("#show-other")
        assert page.get_attribute("#show-other", "aria-pressed") == "true"
        page.locator("input[name=mode][value=slo]").check()
        settle(page)
        assert page.locator("#chunk").is_hidden()
        assert page.locator("#tpot_ms").is_visible()
        assert "keep their objective" in page.locator("#notes").inner_text()


def test_a_worker_is_killed_and_another_added(browser: Any, guide: str) -> None:
    with watched(browser, f"{guide}guide/disaggregated") as page:
        page.wait_for_selector(QUIET)
        page.click("[data-kill='decode-1']")
        settle(page)
        assert "kill=decode-1" in query(page)
        assert "32 of 32 answers were completed all the same" in page.locator("#notes").inner_text()
        page.fill("#decode", "2")
        settle(page)
        assert page.locator("#kill-buttons button").count() == 4
        page.fill("#prefill", "2")
        settle(page)
        assert page.get_attribute("[data-kill='decode-1']", "aria-pressed") == "true"
        page.fill("#prefill", "1")
        settle(page)
        page.locator("details", has_text="Every request").locator("summary").click()
        assert page.locator("#requests tbody tr").count() == 32
        page.click("#show-other")
        assert page.get_attribute("#show-chosen", "aria-pressed") == "false"


def test_the_transfer_page_shows_the_right_size_and_warns(browser: Any, guide: str) -> None:
    with watched(browser, f"{guide}guide/transfer") as page:
        page.wait_for_selector(QUIET)
        assert "2.68 GB" in page.locator("#tiles").inner_text()
        assert "2 × 80 × 8 × 128 × 8,192 × 2" in page.locator("#formulas").inner_text()
        left = page.locator("#tiles .tile", has_text="Left after the prefill").locator(".value").inner_text()
        assert page.locator("#ways .chosen-way").all_inner_texts() == [left]
        page.click("a.try:has-text('1 GB/s')")
        settle(page)
        assert query(page) == "?gbytes=1"
        assert page.locator("#more-changed").inner_text() == " (1 changed)"
        assert "The link is the bottleneck" in page.locator("#verdict").inner_text()
        assert page.locator("details.more").get_attribute("open") is None
        unfold(page)
        page.locator("input[name=attention][value=gqa]").check()
        settle(page)
        assert page.locator("input[name=kv_heads]").first.is_visible()


def test_all_three_shapes_are_simulated_and_one_is_recommended(browser: Any, guide: str) -> None:
    address = f"{guide}guide/choose?gpus=2&rate=6&prompt=800&output=60"
    with watched(browser, address) as page:
        page.wait_for_selector(QUIET, timeout=60_000)
        assert page.locator(".shape").count() == 3
        assert page.locator(".shape.chosen").count() == 1
        shown = page.locator("#shapes").inner_text()
        assert "diptych serve" in page.locator("#reasons").inner_text()
        assert serious_findings(page) == []
        page.click("#run")
        page.wait_for_selector(QUIET, timeout=60_000)
        assert page.locator("#shapes").inner_text() == shown


def test_chapter_six_opens_with_an_answer_and_marks_it_when_something_else_is_asked(browser: Any, guide: str) -> None:
    with watched(browser, f"{guide}guide/choose") as page:
        page.locator(".shape.chosen", has_text="Two pools").wait_for()
        assert "Take 2 prefill + 6 decode" in page.locator("#recommendation-title").inner_text()
        assert "computed in advance" in page.locator("#progress-text").inner_text()
        assert serious_findings(page) == []
        page.fill("#rate", "3")
        page.locator("#results.stale").wait_for()
        page.fill("#rate", "12")
        page.locator("#results:not(.stale)").wait_for()


@pytest.mark.parametrize("name", [one.name for one in CHAPTERS if one.panel])
def test_every_suggestion_sets_the_panel_and_gets_an_answer(browser: Any, guide: str, name: str) -> None:
    with watched(browser, f"{guide}guide/{name}") as page:
        page.wait_for_selector(QUIET)
        links = page.locator("a.try").all()
        assert len(links) >= 3
        for link in links:
            link.click()
            settle(page)
            wanted = dict(pair.split("=", 1) for pair in link.get_attribute("href").removeprefix("?").split("&"))
            assert wanted.items() <= state(page).items()
            assert page.locator("#problem").is_hidden()


def test_a_step_is_seen_while_it_is_computed(browser: Any, guide: str) -> None:
    with watched(browser, f"{guide}guide/interference") as page:
        page.wait_for_selector(QUIET)
        page.locator("#seek").evaluate(
            "one => { one.value = '400'; one.dispatchEvent(new Event('input', {bubbles: true})); }"
        )
        page.evaluate("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
        page.locator("#timeline canvas").focus()
        page.keyboard.press("ArrowUp")
        spoken = page.locator("#timeline [aria-live]").inner_text()
        assert "Prefill step on worker 1: for " in spoken and "4 streams wait for it" in spoken


def test_the_answer_is_shown_token_by_token_and_rests_for_those_who_want_less_motion(browser: Any, guide: str) -> None:
    with watched(browser, f"{guide}guide/phases", reduced_motion="reduce") as page:
        assert "8 tokens: one prefill step and 7 decode steps" in page.locator(".flow-said").inner_text()
        page.click("#flow-step")
        assert page.locator(".flow-token.done").count() == 0
        page.click("#flow-step")
        assert page.locator(".flow-token.prefill.done").count() == 6
        assert page.locator(".flow-token.decode.done").count() == 1
        assert page.locator(".flow-cache i.done").count() == 6
        page.click("#flow-step")
        assert page.locator(".flow-cache i.done").count() == 7
        page.click("#flow-play")
        wait_until(lambda: page.locator(".flow-token.decode.done").count() > 2)
        page.click("#flow-play")


def test_the_copied_link_is_the_address(browser: Any, guide: str) -> None:
    address = f"{guide}guide/transfer?tokens=4096"
    with watched(browser, address, permissions=["clipboard-read", "clipboard-write"]) as page:
        page.wait_for_selector(QUIET)
        page.click("#copy-link")
        page.locator("#copy-link", has_text="Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == address


def test_everything_is_reached_with_the_keyboard(browser: Any, guide: str) -> None:
    with watched(browser, f"{guide}guide/interference") as page:
        page.wait_for_selector(QUIET)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip-link"
        reached = set()
        for _ in range(60):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        assert {"theme", "reset-all", "copy-link", "streams-range", "streams", "SUMMARY", "A"} <= reached
        assert {"add-short", "add-long", "clear-prompts", "to-start", "play", "speed", "seek", "CANVAS"} <= reached


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Records of two runs, and the summary of a third."""
    folder = tmp_path_factory.mktemp("runs")
    common = (*CLI, "simulate", "--model", "llama-3.1-8b", "--hardware", "h100", "--rate", "4", "--num-requests", "60")
    common += ("--prompt-tokens", "3000", "--ttft-slo-ms", "500", "--tpot-slo-ms", "20")
    files = (folder / "unified.jsonl", folder / "chunked.jsonl", folder / "summary.json")
    for shape, path in zip(("unified", "chunked"), files, strict=False):
        subprocess.run((*common, "--shape", shape, "--records", str(path)), check=True, capture_output=True)
    files[2].write_bytes(subprocess.run((*common, "--json"), check=True, capture_output=True).stdout)
    return files


def test_two_runs_are_compared_and_nothing_leaves_the_browser(
    browser: Any, guide: str, recorded: tuple[Path, Path, Path]
) -> None:
    first, second, summary = recorded
    with watched(browser, f"{guide}compare?ttft_ms=500&tpot_ms=20") as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.set_input_files("#file-a", first)
        page.set_input_files("#file-b", second)
        page.locator("#about-b", has_text="chunked.jsonl: 60 requests").wait_for()
        head = page.locator("#summary thead").inner_text()
        assert "unified" in head and "chunked" in head
        rows = {row.locator("th").inner_text(): row.inner_text() for row in page.locator("#summary tbody tr").all()}
        records = [json.loads(line) for line in first.read_text().splitlines()]
        met = sum(one["ttft_s"] <= 0.5 and one["tpot_s"] <= 0.02 for one in records) / len(records)
        assert f"{round(met * 100)} %" in rows["Meet their objectives"]
        assert page.locator("#cdf-ttft svg").is_visible()
        assert page.locator("#attainment svg").is_visible()
        page.fill("#ttft_ms", "")
        page.fill("#tpot_ms", "")
        assert query(page) == ""
        assert serious_findings(page) == []
        page.set_input_files("#file-b", summary)
        page.locator("#about-b", has_text="summary only").wait_for()
        page.set_viewport_size(PHONE)
        assert overflow(page) <= 0
        assert [one for one in asked if not one.endswith("icon.svg")] == []


def test_the_comparison_opens_with_an_example_that_makes_place_for_files(
    browser: Any, guide: str, recorded: tuple[Path, Path, Path]
) -> None:
    with watched(browser, f"{guide}compare") as page:
        page.locator("#example").wait_for()
        page.locator("#attainment svg").wait_for()
        assert "two pools: 240 requests" in page.locator("#about-b").inner_text()
        assert page.input_value("#tpot_ms")
        assert serious_findings(page) == [] and overflow(page) <= 0
        page.set_input_files("#file-a", recorded[0])
        page.locator("#about-a", has_text="unified.jsonl: 60 requests").wait_for()
        assert page.locator("#example").is_hidden() and page.input_value("#tpot_ms") == ""
        assert page.locator("#about-b").inner_text() == "Nothing loaded."
        assert page.locator("#summary thead th").count() == 2


def differences(page: Any, first: Path, second: Path) -> dict[str, str]:
    """Figures that both files have and that are not the same."""
    page.set_input_files("#file-a", first)
    page.set_input_files("#file-b", second)
    page.locator("#about-b", has_text=second.name).wait_for()
    rows = [row.locator("th, td").all_inner_texts() for row in page.locator("#summary tbody tr").all()]
    assert len(rows) > 12
    missing = "\N{EN DASH}"
    return {name: change for name, one, other, change in rows if missing not in (one, other) and change != "same"}


@pytest.mark.parametrize("tool", ["simulate", "bench"])
def test_figures_of_records_are_those_of_the_tool_that_wrote_them(
    browser: Any, guide: str, tmp_path: Path, tool: str
) -> None:
    records, whole = tmp_path / "records.jsonl", tmp_path / "whole.json"
    load = ("--rate", "20", "--num-requests", "40", "--prompt-tokens", "200", "--output-tokens", "20")
    with fake_server(step_ms=4, tokens_per_s=20_000) if tool == "bench" else nullcontext() as server:
        about = {
            "simulate": ("--model", "llama-3.1-8b", "--hardware", "h100", "--set", "workload.slo.ttft_ms=25"),
            "bench": ("--url", getattr(server, "url", ""), "--slo", "ttft=18ms"),
        }[tool]
        command = (*CLI, tool, *about, *load, "--records", str(records), "--json")
        whole.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    with watched(browser, f"{guide}compare") as page:
        assert differences(page, records, whole) == {}


def test_a_file_that_is_no_run_is_refused_in_words(browser: Any, guide: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"a": 1}\nno json\n')
    with watched(browser, f"{guide}compare") as page:
        page.set_input_files("#file-a", wrong)
        page.locator("#about-a", has_text="wrong.json: line 2 is no JSON").wait_for()
        assert page.locator("#example").is_hidden()
        assert page.locator("#comparison").is_hidden()
