"""Pieces of report pages that every report is made of."""

from collections.abc import Sequence
from html import escape

from diptych.report.plots import patterns
from diptych.report.style import STYLE
from diptych.report.text import Table

LOGO = (
    '<svg viewBox="0 0 34 24" aria-hidden="true"><rect x="1" y="1" width="15" height="22" rx="2" '
    'fill="var(--prefill)"/><rect x="18" y="1" width="15" height="22" rx="2" fill="var(--decode)"/>'
    '<path d="M5 6h7M5 10h7M5 14h7M5 18h7" stroke="var(--paper)" stroke-width="1.6"/>'
    '<path d="M22 6v12M25.5 6v12M29 6v12" stroke="var(--paper)" stroke-width="1.6" stroke-dasharray="2 2"/></svg>'
)


def page_head(maker: str, title: str, lead: str, below: str = "") -> str:
    """Everything before the body of a page. maker: whose page it is, beside the mark. below: markup under the lead."""
    title = escape(title)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{title} - Diptych</title><style>{STYLE}</style></head><body>{patterns()}"
        f'<header><div class="mark">{LOGO}<span>{escape(maker)}</span></div><h1>{title}</h1>'
        f'<p class="lead">{escape(lead)}</p>{below}</header>'
    )


def card_list(cards: Sequence[tuple[str, str]]) -> str:
    """The figures that are read first, as (name, value); nothing when there are none."""
    drawn = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in cards)
    return f'<dl class="cards">{drawn}</dl>' if drawn else ""


def html_table(table: Table) -> str:
    """A table that scrolls by itself where it is too wide."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    rows = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in table.rows
    )
    title = escape(table.title)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table><caption>{title}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def chart_grid(figures: Sequence[str]) -> str:
    """Figures side by side."""
    return f'<div class="grid2 charts">{"".join(figures)}</div>'


def heading(words: str) -> str:
    """A section's heading."""
    return f"<h2>{escape(words)}</h2>"
