"""Report pages: one self-contained HTML file each, without scripts and without a request to anywhere.

What a page holds is data; templates/report.html lays it out, and jinja2 escapes every word of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2

from diptych.report.plots import Chart
from diptych.report.text import Table

TEMPLATES = Path(__file__).parent / "templates"
PALETTE = TEMPLATES / "palette.css"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Under one heading: charts in a grid, then tables as wide as the page, then tables side by side."""

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
    return _template().render(report=report)


@cache
def _template() -> jinja2.Template:
    return environment(TEMPLATES).get_template("report.html")
