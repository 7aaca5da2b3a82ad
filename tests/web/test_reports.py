"""Reports in a real browser: readable in light and dark, on a phone and for those who do not see them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from watching import PHONE, chromium, overflow, serious_findings, watched

from diptych.cli.main import app

RUN = ("simulate", "--model", "llama-3.1-8b", "--hardware", "h100", "--num-requests", "60", "--rate", "4")
OBJECTIVES = ("--ttft-slo-ms", "300", "--tpot-slo-ms", "20")
REPORTS = {
    "a run on two pools": (*RUN, *OBJECTIVES, "--prefill", "1", "--decode", "1"),
    "a sweep": (*RUN, *OBJECTIVES, "--sweep", "rate=2:8:3", "--sweep", "shape=unified,chunked", "--processes", "1"),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_can_be_read_by_everybody(browser: Any, tmp_path: Path, name: str, scheme: str) -> None:
    path = tmp_path / "report.html"
    written = CliRunner().invoke(app, [*REPORTS[name], "--report", str(path)])
    assert written.exit_code == 0, written.output
    with watched(browser, path.as_uri(), color_scheme=scheme) as page:
        assert serious_findings(page) == []
        assert page.locator("figure svg.chart").count() >= 4
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(245, 246, 249)" if scheme == "light" else "rgb(13, 17, 23)")
        page.set_viewport_size(PHONE)
        assert overflow(page) <= 0
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).color") == "rgb(24, 32, 46)"  # dark ink on paper
