"""The live page in a headless browser: frames of its timeline, first paint, and weight.

    python benchmarks/live_page.py [--seconds 6] [--pictures docs/images] [--json live_page.json]

Needs playwright, pillow and a Chromium. Frames: 64 made-up workers with 10,000 cells in sight, moved before each frame,
at 1360 x 900 pixels without a GPU (``/ui?bench=1``). First paint: in a new context, from a server on loopback that runs
the bundled model on a prefill and a decode worker. With ``--pictures`` it also poses for screenshots, while streams
run and a long prompt is computed.
"""

import argparse
import io
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


@contextmanager
def serving() -> Iterator[str]:
    """A server with the bundled model; gives its address."""
    command = (sys.executable, "-c", "from diptych.cli import main; main()", "serve", "--port", "0", *SHAPE)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = next(match[1] for line in process.stdout if (match := re.search(r"served at (http://[^\s/]+)", line)))
        yield address
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


def measure_paint(browser: Any, address: str, times: int = 7) -> dict[str, Any]:
    """First paint of a browser that has nothing of the page yet, and what it loads."""
    paints, files = [], []
    for _ in range(times):
        context = browser.new_context(viewport=DESKTOP)
        page = context.new_page()
        page.goto(f"{address}/ui")
        page.locator("#send-short:enabled").wait_for()
        paints.append(page.evaluate(FIRST_PAINT))
        files = page.evaluate(FILES)
        context.close()
    return {
        "first paint p50 ms": round(statistics.median(paints)),
        "max ms": round(max(paints)),
        "files": len(files),
        "kB": round(sum(plain for plain, _ in files) / 1000, 1),
        "kB sent": round(sum(sent for _, sent in files) / 1000, 1),
    }


def take_pictures(browser: Any, address: str, folder: Path) -> None:
    """ui-light.png, ui-dark.png and ui-phone.png."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, scheme, viewport in (("light", "light", DESKTOP), ("dark", "dark", DESKTOP), ("phone", "light", PHONE)):
        context = browser.new_context(viewport=viewport, color_scheme=scheme)
        page = context.new_page()
        page.goto(f"{address}/ui?long=4096&ttft=4000&gap=80&span=6")
        page.locator("#send-streams:enabled").click()
        page.wait_for_timeout(3500)
        page.click("#send-long")
        page.wait_for_timeout(900)
        page.click("#send-short")
        page.wait_for_timeout(1600)
        page.mouse.move(2, 2)
        page.get_by_role("button", name="Long prompt 1", exact=True).first.click()
        page.get_by_role("button", name="Pause").click()
        page.wait_for_timeout(400)
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        page.wait_for_timeout(100)
        picture = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
        small = picture.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        small.save(folder / f"ui-{name}.png", optimize=True)
        page.click("#stop")
        page.wait_for_timeout(300)
        context.close()


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=6.0, help="of movement, all three kinds together")
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    with serving() as address, sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        if arguments.pictures:
            take_pictures(browser, address, arguments.pictures)
        paint = measure_paint(browser, address)
        frames = measure_frames(browser, address, arguments.seconds)
        browser.close()
    report("live page: loading", [paint])
    report("live page: 64 workers, 10,000 cells", frames, arguments.json, loading=paint)


if __name__ == "__main__":
    main()
