"""The palette: it has every colour that pages and reports name, and what is drawn with it can be seen and read."""

import re
from pathlib import Path

import pytest

from diptych.report.pages import PALETTE, TEMPLATES
from diptych.web.assets import STATIC

Rgb = tuple[int, ...]

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
    found = re.findall(r"--([a-z-]+): (?:light-dark\((#\w+), (#\w+)\)|(#\w+));", PALETTE.read_text())
    return {name: rgb(both or (light if theme == "light" else dark)) for name, light, dark, both in found}


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
    sources = [*STATIC.rglob("*.css"), *STATIC.rglob("*.js"), TEMPLATES / "report.css"]
    assert len(sources) > 20
    for path in sources:
        text = path.read_text()
        own = set(re.findall(r"(--[a-z-]+):", text))
        assert set(re.findall(r"var\((--[a-z-]+)\)", text)) <= defined | own | {"--radius", "--gap"}, path


def test_no_style_sheet_has_a_colour_of_its_own() -> None:
    for path in [*STATIC.rglob("*.css"), TEMPLATES / "report.css"]:
        assert re.findall(r"#[0-9a-f]{3,8}\b(?=[ ;,)])", path.read_text()) == [], path


@pytest.mark.parametrize("theme", THEMES)
def test_words_can_be_read_on_every_ground(theme: str) -> None:
    colours = palette(theme)
    for name in ("text", "muted", "accent", "good", "bad", "warn"):
        for ground in (*GROUNDS, *(f"{name}-soft" for _ in [0] if f"{name}-soft" in colours)):
            assert contrast(colours[name], colours[ground]) >= TEXT, (name, ground)
    for phase in PHASES:
        assert contrast(colours[f"{phase}-ink"], colours[phase]) >= TEXT, phase


@pytest.mark.parametrize("theme", THEMES)
def test_lines_of_reports_and_edges_of_controls_can_be_seen(theme: str) -> None:
    colours = palette(theme)
    assert contrast(colours["control-line"], colours["surface"]) >= MARK
    for phase in set(PHASES) - {"idle"}:
        pairs = zip(colours[phase], colours["text"], strict=True)
        line = tuple(round(LINE_SHARE * tint + (1 - LINE_SHARE) * text) for tint, text in pairs)
        assert contrast(line, colours["surface"]) >= MARK, phase
    assert f"{LINE_SHARE:.0%}" in (TEMPLATES / "report.css").read_text()


def test_the_icon_has_the_colours_of_the_phases() -> None:
    colours = palette("light")
    icon = Path(STATIC / "common" / "icon.svg").read_text()
    assert [rgb(found) for found in re.findall(r'fill="(#\w{6})"', icon)] == [colours["prefill"], colours["decode"]]
