"""Several line charts of the report package as one SVG file."""

from collections.abc import Sequence
from html import escape

from diptych.report.pages import TEMPLATES, colours
from diptych.report.plots import HEIGHT, WIDTH, LineChart


def sheet(charts: Sequence[LineChart], columns: int) -> str:
    """Line charts in rows of ``columns`` as one SVG file in the colours of the reports, with the legend of the first at
    its foot."""
    height = -(-len(charts) // columns) * HEIGHT
    palette = "".join(f"--{name}:{colour};" for name, colour in colours(is_dark=False).items())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns * WIDTH:g} {height + 40:g}">'
        f"<style>:root{{{palette}--sans:sans-serif}}{(TEMPLATES / 'chart.css').read_text()}</style>"
        '<rect width="100%" height="100%" fill="var(--surface)"/>'
    ]
    for number, chart in enumerate(charts):
        place = f'x="{number % columns * WIDTH:g}" y="{number // columns * HEIGHT:g}"'
        parts.append(f'<svg {place} width="{WIDTH:g}" height="{HEIGHT:g}">{chart.svg()}</svg>')
    parts.append('<g class="chart">')
    for number, (name, style) in enumerate(charts[0].legend):
        left, middle = 60 + 240 * number, height + 16
        parts.append(f'<path class="line {style}" d="M{left} {middle:g}h36"/>')
        parts.append(f'<text x="{left + 44}" y="{middle + 4:g}">{escape(name)}</text>')
    return "\n".join([*parts, "</g></svg>", ""])
