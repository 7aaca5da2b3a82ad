"""Pieces of report pages that every report is made of."""

from collections.abc import Sequence
from html import escape

from diptych.simulation.report.text import Table


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
