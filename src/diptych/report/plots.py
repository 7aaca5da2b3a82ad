"""Line and area charts as inline SVG, drawn here with nothing but strings.

Owns scales, ticks and marks. Colours and dashes are classes of the page's style sheet; every chart carries a title and
a description for those who do not see it, and no line is told apart by its colour alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 440.0, 264.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 24.0, 44.0
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """One named curve. ``style`` is a class of the style sheet (colour and dash)."""

    name: str
    points: Sequence[Point]
    style: str
    markers: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """One band of a stacked area chart: its height at each x."""

    name: str
    values: Sequence[float]
    style: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A vertical mark with a word, such as an objective."""

    x: float
    label: str
    style: str


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to a unit interval. unit: written once, at the axis. as_percent: ticks are shares of 1. words: what
    ticks 0, 1, 2... are called."""

    low: float
    high: float
    unit: str
    log: bool = False
    as_percent: bool = False
    ticks: tuple[float, ...] = ()
    words: tuple[str, ...] = ()

    def place(self, value: float) -> float:
        """0 at ``low``, 1 at ``high``; values outside are moved to the border."""
        if self.log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))

    def marks(self) -> tuple[float, ...]:
        """Where ticks go."""
        return self.ticks or (log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high))

    def write(self, value: float) -> str:
        """A tick as text."""
        if self.words:
            return self.words[round(value)]
        if self.as_percent:
            return f"{100 * value:g}%"
        if abs(value) >= 1000:
            thousands = value / 1000
            return f"{thousands / 1000:g}M" if abs(thousands) >= 1000 else f"{thousands:g}k"
        return f"{value:.4g}"


def linear_scale(values: Sequence[float], unit: str, *, from_zero: bool = True) -> Scale:
    """A scale that holds all values, with its ends on ticks when it begins at zero."""
    low = 0.0 if from_zero else min(values, default=0.0)
    high = max(values, default=1.0)
    if high <= low:
        high = low + 1.0
    if from_zero:
        step = _step(high)
        high = math.ceil(high / step - 1e-9) * step
    return Scale(low, high, unit)


def log_scale(values: Sequence[float], unit: str) -> Scale:
    """A logarithmic scale from 1, 2 or 5 times a power of ten to another; what is not positive is left out."""
    positive = [value for value in values if value > 0]
    low = _round_log(min(positive, default=1.0), up=False)
    high = _round_log(max(positive, default=10.0), up=True)
    return Scale(low, high if high > low else low * 10, unit, log=True)


def linear_ticks(low: float, high: float) -> tuple[float, ...]:
    """Four to seven round numbers."""
    step = _step(high - low)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return tuple(round(index * step, 10) for index in range(first, last + 1))


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """1, 2, 5 times powers of ten while there is room, then the powers alone."""
    decades = math.log10(high / low)
    steps = (1.0, 2.0, 5.0) if decades <= 2.7 else (1.0,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    candidates = (step * 10.0**power for power in powers for step in steps)
    return tuple(tick for tick in candidates if low * 0.999 <= tick <= high * 1.001)


def line_chart(
    title: str, description: str, lines: Sequence[Line], x: Scale, y: Scale, rules: Sequence[Rule] = ()
) -> str:
    """Curves over a common x axis; ``rules`` are vertical marks, their words side by side or below each other."""
    marks = [_frame(x, y), _rules(rules, x)]
    for line in lines:
        spots = [_at(x.place(px), y.place(py)) for px, py in line.points]
        path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in spots) if spots else ""
        marks.append(f'<path class="line {line.style}" d="{path}"/>')
        if line.markers:
            for (px, py), (value, height) in zip(spots, line.points, strict=True):
                tip = f"{line.name}: {y.write(height)} at {x.unit} {x.write(value)}"
                mark = f'<circle class="dot {line.style}" cx="{px:.1f}" cy="{py:.1f}" r="3.2">'
                marks.append(f"{mark}<title>{escape(tip)}</title></circle>")
    return _figure(title, description, marks)


def stacked_chart(title: str, description: str, edges: Sequence[float], layers: Sequence[Layer], unit: str) -> str:
    """Bands on top of each other, constant between ``edges`` (one more than values); heights are shares of 1."""
    x = Scale(edges[0], edges[-1], unit)
    y = Scale(0.0, 1.0, "", as_percent=True, ticks=(0.0, 0.25, 0.5, 0.75, 1.0))
    marks = []
    floor = [0.0] * (len(edges) - 1)
    for layer in layers:
        top = [min(1.0, low + high) for low, high in zip(floor, layer.values, strict=True)]
        outline = [*_staircase(edges, top), *reversed(_staircase(edges, floor))]
        path = "L".join(f"{px:.1f} {py:.1f}" for px, py in (_at(x.place(px), y.place(py)) for px, py in outline))
        marks.append(f'<path class="band {layer.style}" d="M{path}Z"/>')
        floor = top
    return _figure(title, description, [*marks, _frame(x, y)])


def legend_swatch(style: str, *, band: bool = False) -> str:
    """The little picture beside a name in a legend: the same line or filling as in the chart."""
    if band:
        inner = f'<rect class="band {style}" x="0.5" y="0.5" width="21" height="11" rx="2"/>'
    else:
        inner = f'<path class="line {style}" d="M0 6H22"/>'
    return f'<svg class="swatch" viewBox="0 0 22 12" aria-hidden="true">{inner}</svg>'


def patterns() -> str:
    """The fillings that stacked bands refer to; once per page."""
    hatches = (
        ("prefill", "M-2 2L2 -2M0 8L8 0M6 10L10 6"),
        ("mixed", "M0 4H8M4 0V8"),
        ("down", "M-2 6L2 10M0 0L8 8M6 -2L10 2"),
    )
    drawn = "".join(
        f'<pattern id="fill-{name}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect class="ground-{name}" width="8" height="8"/><path class="hatch" d="{path}"/></pattern>'
        for name, path in hatches
    )
    return f'<svg class="hidden" width="0" height="0" aria-hidden="true"><defs>{drawn}</defs></svg>'


def _figure(title: str, description: str, marks: Sequence[str]) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{''.join(marks)}</svg>"
    )


def _frame(x: Scale, y: Scale) -> str:
    parts = []
    for tick in y.marks():
        _, py = _at(0.0, y.place(tick))
        parts.append(f'<path class="grid" d="M{LEFT:g} {py:.1f}H{WIDTH - RIGHT:g}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 7:g}" y="{py + 4:.1f}">{y.write(tick)}</text>')
    bottom = TOP + PLOT_HEIGHT
    for tick in x.marks():
        px, _ = _at(x.place(tick), 0.0)
        parts.append(f'<path class="grid" d="M{px:.1f} {bottom:g}v4"/>')
        parts.append(f'<text class="tick middle" x="{px:.1f}" y="{bottom + 17:g}">{escape(x.write(tick))}</text>')
    parts.append(f'<path class="axis" d="M{LEFT:g} {bottom:g}H{WIDTH - RIGHT:g}"/>')
    parts.append(f'<text class="unit end" x="{WIDTH - RIGHT:g}" y="{HEIGHT - 7:g}">{escape(x.unit)}</text>')
    if y.unit:
        parts.append(f'<text class="unit" x="4" y="12">{escape(y.unit)}</text>')
    return "".join(parts)


def _rules(rules: Sequence[Rule], x: Scale) -> str:
    """Each mark's word stands above the plot; a second one would be at its other side."""
    parts = []
    for index, rule in enumerate(sorted(rules, key=lambda one: one.x)):
        px, _ = _at(x.place(rule.x), 0.0)
        left = px > LEFT + PLOT_WIDTH / 2 if len(rules) == 1 else index == 0
        anchor, offset = ("end", 4) if left else ("start", -4)
        parts.append(f'<path class="rule {rule.style}" d="M{px:.1f} {TOP - 5:g}V{TOP + PLOT_HEIGHT:g}"/>')
        parts.append(f'<text class="note {anchor}" x="{px + offset:.1f}" y="{TOP - 9:g}">{escape(rule.label)}</text>')
    return "".join(parts)


def _staircase(edges: Sequence[float], heights: Sequence[float]) -> list[Point]:
    corners = []
    for index, height in enumerate(heights):
        corners += [(edges[index], height), (edges[index + 1], height)]
    return corners


def _at(x_share: float, y_share: float) -> Point:
    return LEFT + PLOT_WIDTH * x_share, TOP + PLOT_HEIGHT * (1 - y_share)


def _step(span: float) -> float:
    rough = span / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= rough * 0.999)


def _round_log(value: float, *, up: bool) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    steps = [step * power for step in (1.0, 2.0, 5.0, 10.0)]
    if up:
        return next(step for step in steps if step >= value * 0.999)
    return next(step for step in reversed(steps) if step <= value * 1.001)
