"""Cumulative distributions of latencies, live and predicted, as one SVG of small panels. No library is needed."""

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, LEFT, TOP, GAP = 250, 120, 60, 50, 50
LIVE, PREDICTED = "#888888", "#d62728"


def plot(labels: Sequence[str], live: Sequence[Sequence[dict[str, list[float]]]], predicted: Sequence[dict]) -> str:
    """A row per case, a column for TTFT and one for TPOT; grey: each live repeat, red: the simulator."""
    width = LEFT + 2 * (WIDTH + GAP)
    height = TOP + len(labels) * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="13">Share of requests below a latency: '
        f'<tspan fill="{LIVE}">live (each repeat)</tspan>, <tspan fill="{PREDICTED}">predicted</tspan></text>',
    ]
    for row, (label, runs, guess) in enumerate(zip(labels, live, predicted, strict=True)):
        y = TOP + row * (HEIGHT + GAP)
        for column, metric in enumerate(("ttft", "tpot")):
            x = LEFT + column * (WIDTH + GAP)
            parts.append(_panel(x, y, f"{label}: {metric.upper()}, ms", [run[metric] for run in runs], guess[metric]))
    return "\n".join([*parts, "</svg>", ""])


def _panel(x: int, y: int, title: str, live: Sequence[list[float]], predicted: list[float]) -> str:
    longest = 1.05 * max(max(values) for values in (*live, predicted))
    parts = [
        f'<text x="{x}" y="{y - 6}">{escape(title)}</text>',
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#cccccc"/>',
    ]
    for share in (0.5, 0.9):
        level = y + HEIGHT * (1 - share)
        parts.append(f'<line x1="{x}" x2="{x + WIDTH}" y1="{level:.1f}" y2="{level:.1f}" stroke="#eeeeee"/>')
        parts.append(f'<text x="{x - 6}" y="{level + 4:.1f}" text-anchor="end">{share:g}</text>')
    for tick in range(5):
        place = x + WIDTH * tick / 4
        label = f"{1e3 * longest * tick / 4:.3g}"
        parts.append(f'<text x="{place:.1f}" y="{y + HEIGHT + 14}" text-anchor="middle">{label}</text>')
    for values, color in [*((run, LIVE) for run in live), (predicted, PREDICTED)]:
        ordered = sorted(values)
        points = " ".join(
            f"{x + WIDTH * value / longest:.1f},{y + HEIGHT * (1 - (index + 1) / len(ordered)):.1f}"
            for index, value in enumerate(ordered)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.4"/>')
    return "\n".join(parts)
