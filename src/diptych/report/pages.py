"""Report pages: one self-contained HTML file each, without scripts and without a request to anywhere; and pictures, the
same charts as one SVG file.

What a page holds is data; templates/report.html lays it out, and jinja2 escapes every word of it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2

from diptych.report.plots import LANES_WIDTH, RIGHT, Chart, LaneChart
from diptych.report.text import Table

TEMPLATES = Path(__file__).parent / "templates"
PALETTE = TEMPLATES / "palette.css"
COLOUR = re.compile(r"--([a-z-]+): (?:light-dark\((#\w+), (#\w+)\)|(#\w+));")
HEADING_HEIGHT, KEY_HEIGHT, KEY_WIDTH = 46.0, 40.0, 240.0  # of pictures


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Part of a page under one heading: charts in a grid, then tables of the page's width, then tables side by side."""

    heading: str
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    narrow: Sequence[Table] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A page. maker: the command that made it, beside the mark. cards: (name, value) of the figures to read first.
    warnings: (word, sentence). notes: sentences above ``command``. details: a summary and the text that it opens."""

    maker: str
    title: str
    lead: str
    sections: Sequence[Section]
    command: str
    details: tuple[str, str]
    foot: str
    cards: Sequence[tuple[str, str]] = ()
    warnings: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()


def environment(folder: Path) -> jinja2.Environment:
    """Templates of a folder: everything that they are given is escaped, and a name that is missing is an error."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def render(report: Report) -> str:
    """The whole file as text; the same report gives the same text."""
    return _template("report.html").render(report=report)


def picture(charts: Sequence[LaneChart], label: str) -> str:
    """Lane charts under one another as an SVG file that needs no page around it, with the legend of the first at its
    foot; light or dark as its reader prefers. label: what it shows, for those who do not see it."""
    top, placed = 0.0, []
    for chart in charts:
        placed.append({"top": top, "height": chart.height, "content": chart})
        top += HEADING_HEIGHT + chart.height + RIGHT
    legend = [(name, style, RIGHT + KEY_WIDTH * index) for index, (name, style) in enumerate(charts[0].legend)]
    light, dark = (colours(is_dark=is_dark) for is_dark in (False, True))
    return _template("picture.svg").render(
        label=label,
        charts=placed,
        legend=legend,
        margin=RIGHT,
        width=LANES_WIDTH,
        height=top + KEY_HEIGHT,
        light=light,
        dark={name: colour for name, colour in dark.items() if colour != light[name]},
    )


def colours(*, is_dark: bool) -> dict[str, str]:
    """The palette of one theme: colours by name."""
    found = COLOUR.findall(PALETTE.read_text())
    return {name: both or (dark if is_dark else light) for name, light, dark, both in found}


@cache
def _template(name: str) -> jinja2.Template:
    return environment(TEMPLATES).get_template(name)
