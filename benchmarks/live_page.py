"""The pages of a server in a headless browser: frames of the timeline, first paint, weight, and what the guide costs.

    python benchmarks/live_page.py [--seconds 6] [--pictures docs/images] [--json live_page.json]

Needs playwright, pillow and a Chromium. Frames: 64 made-up workers with 10,000 cells in sight, moved before each frame,
at 1360 x 900 pixels without a GPU (``/ui?bench=1``). First paint: in a new context, from a server on loopback that runs
the bundled model on a prefill and a decode worker; the weight is that of all files of the page. Guide: CPU time that
the serving process itself spends on one panel, whatever else the machine does, for its event loop can stand still no
longer than that. Sliders: from the moment in which one moves to the frame in which the picture follows, in each chapter
that answers while it moves, on a server that is idle and on one that four streams keep busy. With ``--pictures`` it
also takes the screenshots of the documentation: the live page while streams run and a long prompt is computed, each
page of the guide, and a comparison.
"""

import argparse
import io
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from common import report
from PIL import Image
from playwright.sync_api import sync_playwright

CHROMIUM = "/usr/bin/chromium"
SHAPE = ("--prefill", "1", "--decode", "1", "--disaggregate", "always", "--kv-cache-memory", "64MiB")
FILES = """() => [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
  .filter((one) => one.name.includes("/static/") || one.entryType === "navigation")
  .map((one) => [one.decodedBodySize, one.encodedBodySize])"""
FIRST_PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"
DESKTOP, PHONE = {"width": 1360, "height": 900}, {"width": 360, "height": 780}
LOOKS = (("light", "light", DESKTOP), ("dark", "dark", DESKTOP), ("phone", "light", PHONE))
CHAPTERS = ("phases", "interference", "chunked", "disaggregated", "transfer", "choose")
CLI = (sys.executable, "-c", "from diptych.cli.main import main; main()")
NUM_PANELS, IDLE_S = 60, 10
NUM_MOVES, STREAMS = 40, 4
# Moves a slider to and fro, a notch each time, and waits for the frame in which what is shown belongs to it.
SLIDE = """async (moves) => {
  const range = document.querySelector("#form input[type=range]");
  const results = document.querySelector("#results");
  const times = [];
  for (let move = 0; move < moves; move++) {
    const begun = performance.now();
    range.value = String(Number(range.value) + (move % 4 < 2 ? 1 : -1));
    range.dispatchEvent(new Event("input", { bubbles: true }));
    do await new Promise(requestAnimationFrame); while (results.getAttribute("aria-busy") !== "false");
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - begun);
    await new Promise((done) => setTimeout(done, 150));
  }
  return times;
}"""


@contextmanager
def serving() -> Iterator[tuple[str, int]]:
    """A server with the bundled model; gives its address and the number of its process."""
    process = subprocess.Popen((*CLI, "serve", "--port", "0", *SHAPE), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = next(match[1] for line in process.stdout if (match := re.search(r"served at (http://[^\s/]+)", line)))
        yield address, process.pid
    finally:
        process.terminate()
        process.wait(30)


def measure_frames(browser: Any, address: str, seconds: float) -> list[dict[str, Any]]:
    """Frames per second and the time between frames, by kind of movement."""
    page = browser.new_page(viewport=DESKTOP)
    page.goto(f"{address}/ui?bench=1&seconds={seconds}")
    page.locator("#bench-result").wait_for(timeout=seconds * 1000 + 30_000)
    result = page.evaluate("window.benchResult")
    page.close()
    rows = []
    for movement in ("whole", "pan", "zoom"):
        found = result[movement]
        rows.append(
            {
                "movement": movement,
                "frames/s": found["fps"],
                "frame p50 ms": found["frameP50"],
                "frame p95 ms": found["frameP95"],
                "draw p50 ms": found["drawP50"],
                "draw p95 ms": found["drawP95"],
            }
        )
    return rows


def measure_paint(browser: Any, address: str, path: str, ready: str, times: int = 7) -> dict[str, Any]:
    """First paint of a browser that has nothing of the page yet, and what it loads. ready: what must be there then."""
    paints, files = [], []
    for _ in range(times):
        context = browser.new_context(viewport=DESKTOP)
        page = context.new_page()
        page.goto(f"{address}{path}")
        page.locator(ready).wait_for(timeout=120_000)
        paints.append(page.evaluate(FIRST_PAINT))
        files = page.evaluate(FILES)
        context.close()
    return {
        "page": path,
        "first paint p50 ms": round(statistics.median(paints)),
        "max ms": round(max(paints)),
        "files": len(files),
        "kB": round(sum(plain for plain, _ in files) / 1000, 1),
        "kB sent": round(sum(sent for _, sent in files) / 1000, 1),
    }


def measure_guide(address: str, pid: int) -> dict[str, Any]:
    """CPU time of the serving process for one panel, the largest there is, less what it spends anyway; and how long the
    panel took to come."""

    def ask(seed: int) -> int:
        asked = urllib.request.Request(f"{address}/guide/api/disaggregated?seed={seed}")
        asked.add_header("accept-encoding", "gzip")
        with urllib.request.urlopen(asked, timeout=120) as reply:
            return len(reply.read())

    def measured(work: Callable[[], Any]) -> tuple[float, float, Any]:
        """Seconds of the processor, seconds, and what came back."""
        before, begun = process.cpu_times(), time.perf_counter()
        result = work()
        after, took = process.cpu_times(), time.perf_counter() - begun
        return after.user + after.system - before.user - before.system, took, result

    ask(NUM_PANELS)
    process = psutil.Process(pid)
    idle, span, _ = measured(lambda: time.sleep(IDLE_S))
    used, took, sizes = measured(lambda: [ask(seed) for seed in range(NUM_PANELS)])
    used -= idle / span * took
    return {
        "panels": NUM_PANELS,
        "kB each": round(statistics.mean(sizes) / 1000, 1),
        "ms each": round(took / NUM_PANELS * 1000),
        "CPU of the serving process, ms each": round(used / NUM_PANELS * 1000, 2),
    }


def measure_sliders(browser: Any, address: str, server: str) -> list[dict[str, Any]]:
    """Measure for each chapter the milliseconds from a slider to the picture. server: what it does meanwhile."""
    rows = []
    for name in CHAPTERS[:-1]:  # the last one computes when it is asked to
        page = browser.new_page(viewport=DESKTOP)
        page.goto(f"{address}/guide/{name}")
        page.locator("#results[aria-busy=false]").wait_for(timeout=120_000)
        times = sorted(page.evaluate(SLIDE, NUM_MOVES))
        page.close()
        p95 = times[round(0.95 * (len(times) - 1))]
        row = {"chapter": name, "server": server, "p50 ms": round(statistics.median(times)), "p95 ms": round(p95)}
        rows.append({**row, "max ms": round(times[-1])})
    return rows


@contextmanager
def streams(address: str) -> Iterator[None]:
    """Some that run until the end of the block, each begun anew when it ends."""
    is_over = threading.Event()

    def read() -> None:
        body = json.dumps({"prompt": "import os\n", "max_tokens": 2000, "ignore_eos": True, "stream": True}).encode()
        asked = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
        while not is_over.is_set():
            with urllib.request.urlopen(asked, timeout=120) as reply:
                while reply.readline() and not is_over.is_set():
                    pass

    threads = [threading.Thread(target=read) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def take_pictures(browser: Any, address: str, folder: Path) -> None:
    """ui-*.png and guide-*.png: light, dark, and on a phone."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        runs = [Path(place) / f"{shape}.jsonl" for shape in ("unified", "chunked")]
        load = ("--rate", "6", "--num-requests", "400", "--prompt-tokens", "1500")
        for path in runs:
            command = (
                *CLI,
                "simulate",
                "--model",
                "llama-3.1-8b",
                "--hardware",
                "h100-sxm",
                "--shape",
                path.stem,
                *load,
            )
            subprocess.run((*command, "--records", str(path)), check=True, stdout=subprocess.DEVNULL)
        for look, scheme, viewport in LOOKS:
            context = browser.new_context(viewport=viewport, color_scheme=scheme)
            page = context.new_page()
            pose_live(page, address)
            save(page, folder / f"ui-{look}.png")
            page.click("#stop")
            for name in ("index", *CHAPTERS, "compare"):
                pose_guide(page, address, name, runs)
                save(page, folder / f"guide-{name}-{look}.png")
            context.close()


def pose_live(page: Any, address: str) -> None:
    """Four streams, a long prompt that is over and selected, a short one."""
    page.goto(f"{address}/ui?long=4096&ttft=4000&gap=80&span=6")
    page.locator("#send-streams:enabled").click()
    page.wait_for_timeout(3500)
    page.click("#send-long")
    page.wait_for_timeout(900)
    page.click("#send-short")
    page.locator("#requests tr", has_text="Long prompt 1").get_by_text("done").wait_for()
    page.wait_for_timeout(1200)
    page.mouse.move(2, 2)
    page.get_by_role("button", name="Long prompt 1", exact=True).first.click()
    page.get_by_role("button", name="Pause").click()
    page.wait_for_timeout(400)


def pose_guide(page: Any, address: str, name: str, runs: list[Path]) -> None:
    """A page of the guide with what its panel shows at first; chapter 6 after its simulations."""
    paths = {"index": "/guide", "compare": "/compare?ttft_ms=500&tpot_ms=12"}
    page.goto(address + paths.get(name, f"/guide/{name}"))
    if name in CHAPTERS:
        page.locator("#results[aria-busy=false]").wait_for(timeout=300_000)
    if name == "compare":
        for side, path in zip("ab", runs, strict=True):
            page.set_input_files(f"#file-{side}", path)
        page.locator("#summary").wait_for()
    page.wait_for_timeout(300)


def save(page: Any, path: Path) -> None:
    """The whole page, in 256 colours."""
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    page.wait_for_timeout(100)
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    picture.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=6.0, help="of movement, all three kinds together")
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    with serving() as (address, pid), sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        if arguments.pictures:
            take_pictures(browser, address, arguments.pictures)
        guide = measure_guide(address, pid)
        paint = [
            measure_paint(browser, address, "/ui", "#send-short:enabled"),
            measure_paint(browser, address, "/guide/disaggregated", "#results[aria-busy=false]"),
        ]
        frames = measure_frames(browser, address, arguments.seconds)
        sliders = measure_sliders(browser, address, "idle")
        with streams(address):
            sliders += measure_sliders(browser, address, f"{STREAMS} streams")
        browser.close()
    report("guide beside a server", [guide])
    report("loading", paint)
    report("from a slider to the picture", sliders)
    title = "live page: 64 workers, 10,000 cells"
    report(title, frames, arguments.json, loading=paint, guide=guide, sliders=sliders)


if __name__ == "__main__":
    main()
