"""The palette: it has every colour that pages and reports name, and what is drawn with it can be seen and read."""

import re
from pathlib import Path
from xml.dom import minidom

import pytest

from diptych.report.pages import PALETTE, TEMPLATES, colours, picture
from diptych.report.plots import ChartLane, LaneChart, Scale
from diptych.web.assets import STATIC

Rgb = tuple[int, ...]

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "diptych"

PHASES = ("prefill", "decode", "mixed", "transfer", "stalled", "idle")
GROUNDS = ("bg", "surface", "sunken")
THEMES = ("light", "dark")
TEXT, MARK = 4.5, 3.0  # contrast that WCAG 2.2 asks of text (1.4.3) and of marks (1.4.11)
LINE_SHARE = 0.75  # of a phase's colour in a line of a report; the rest is the colour of text


def rgb(colour: str) -> Rgb:
    digits = colour.removeprefix("#")
    whole = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
    return tuple(int(whole[at : at + 2], 16) for at in (0, 2, 4))


def palette(theme: str) -> dict[str, Rgb]:
    return {name: rgb(colour) for name, colour in colours(is_dark=theme == "dark").items()}


def luminance(colour: Rgb) -> float:
    """Relative luminance of sRGB (WCAG 2.2)."""
    parts = [value / 255 for value in colour]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Rgb, other: Rgb) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_every_colour_that_a_style_sheet_or_a_script_names_is_in_the_palette() -> None:
    defined = set(re.findall(r"(--[a-z-]+):", PALETTE.read_text()))
    sources = [*STATIC.rglob("*.css"), *STATIC.rglob("*.js"), TEMPLATES / "report.css", TEMPLATES / "chart.css"]
    assert len(sources) > 20
    for path in sources:
        text = path.read_text()
        own = set(re.findall(r"(--[a-z-]+):", text))
        assert set(re.findall(r"var\((--[a-z-]+)\)", text)) <= defined | own | {"--radius", "--gap"}, path


def test_no_style_sheet_has_a_colour_of_its_own() -> None:
    for path in [*STATIC.rglob("*.css"), TEMPLATES / "report.css", TEMPLATES / "chart.css"]:
        assert re.findall(r"#[0-9a-f]{3,8}\b(?=[ ;,)])", path.read_text()) == [], path


@pytest.mark.parametrize("theme", THEMES)
def test_words_can_be_read_on_every_ground(theme: str) -> None:
    shades = palette(theme)
    for name in ("text", "muted", "accent", "good", "bad", "warn"):
        for ground in (*GROUNDS, *(f"{name}-soft" for _ in [0] if f"{name}-soft" in shades)):
            assert contrast(shades[name], shades[ground]) >= TEXT, (name, ground)
    for phase in PHASES:
        assert contrast(shades[f"{phase}-ink"], shades[phase]) >= TEXT, phase


@pytest.mark.parametrize("theme", THEMES)
def test_lines_of_reports_and_edges_of_controls_can_be_seen(theme: str) -> None:
    shades = palette(theme)
    assert contrast(shades["control-line"], shades["surface"]) >= MARK
    for phase in set(PHASES) - {"idle"}:
        pairs = zip(shades[phase], shades["text"], strict=True)
        line = tuple(round(LINE_SHARE * tint + (1 - LINE_SHARE) * text) for tint, text in pairs)
        assert contrast(line, shades["surface"]) >= MARK, phase
    assert f"{LINE_SHARE:.0%}" in (TEMPLATES / "chart.css").read_text()


def test_the_icon_has_the_colours_of_the_phases() -> None:
    shades = palette("light")
    icon = Path(STATIC / "common" / "icon.svg").read_text()
    assert [rgb(found) for found in re.findall(r'fill="(#\w{6})"', icon)] == [shades["prefill"], shades["decode"]]


def test_a_phase_has_its_colour_and_a_stalled_stream_orange_hatching() -> None:
    """Prefill is blue, decode green; who cannot tell colours apart sees the hatching."""
    for theme in THEMES:
        shades = palette(theme)
        assert max(shades["prefill"]) == shades["prefill"][2] and max(shades["decode"]) == shades["decode"][1]
        red, green, blue = shades["stalled"]
        assert red > green > blue
    sheet = (TEMPLATES / "chart.css").read_text()
    assert (
        ".band.s-prefill { fill: url(#fill-prefill); }" in sheet
        and ".band.s-stall { fill: url(#fill-stalled); }" in sheet
    )


def test_every_style_that_a_chart_has_is_in_the_sheet_of_charts() -> None:
    sheet = (TEMPLATES / "chart.css").read_text()
    defined = {*re.findall(r"\.(s-[a-z-]+)", sheet), "s-whole-solid"}  # which is a plain line in the colour of text
    sources = [path for path in SOURCE.rglob("*.py") if "report" in str(path) or path.parent.name == "bench"]
    used = {style for path in sources for style in re.findall(r'"(s-[a-z-]+)"', path.read_text())}
    assert len(used) > 5 and used <= defined


def test_one_module_draws_charts_and_one_makes_pages() -> None:
    """Charts of the pages that scripts draw in a browser aside."""
    drawing = [path.name for path in SOURCE.rglob("*.py") if "<svg" in path.read_text()]
    making = [path.name for path in SOURCE.rglob("*.py") if "pages.render(" in path.read_text()]
    assert drawing == ["plots.py"]
    assert sorted(making) == ["diagnosis_page.py", "page.py", "plan_report.py", "simulation_report.py"]
    whole = [path for path in SOURCE.rglob("*.py") if re.search(r"<!doctype|<html", path.read_text(), re.I)]
    assert whole == []


def test_the_picture_of_the_readme_is_what_its_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import draw_readme_picture

    text = draw_readme_picture.PICTURE.read_text()
    assert text == draw_readme_picture.draw(), "run: python scripts/draw_readme_picture.py"
    known = {*colours(is_dark=False).values(), *colours(is_dark=True).values()}
    assert set(re.findall(r"#[0-9a-f]{3,6}\b(?=[;\"])", text)) <= known
    assert {f"s-{name}" for name in ("prefill", "decode", "stall")} <= set(re.findall(r'class="band (s-[a-z]+)"', text))
    minidom.parseString(text)


def test_a_picture_holds_what_it_is_given_as_text() -> None:
    hostile = "<b onload='x'>\"&"
    lanes = [ChartLane(hostile, [(0.0, 2.0, "s-prefill"), (2.0, 3.0, "s-stall")])]
    drawn = picture(
        [LaneChart(hostile, hostile, hostile, lanes, Scale(0.0, 3.0, "s"), ((hostile, "s-stall"),))], hostile
    )
    assert "<b" not in drawn
    minidom.parseString(drawn)
    widths = [float(width) for width in re.findall(r'<rect class="band s-\w+" x="\S+" y="0" width="(\S+)"', drawn)]
    assert len(widths) == 2 and abs(widths[0] - 2 * widths[1]) < 3
