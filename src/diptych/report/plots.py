"""Line, area and lane charts as inline SVG, drawn here with nothing but strings.

Colours and dashes are classes of templates/chart.css. Every chart carries a title and a description for those who do
not see it, and no line is told apart by its colour alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import ClassVar, TypeAlias

WIDTH, HEIGHT = 440.0, 264.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 24.0, 44.0
LETTER_WIDTH = 7.0  # of words, about
UNIT_ROOM = 18.0  # over the words of rules, for the unit of y
LANES_WIDTH, LANES_LEFT = 920.0, 118.0
LANE_HEIGHT, LANE_STEP, SPAN_GAP = 22.0, 27.0, 2.0
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """One named curve. ``style`` is a class of the style sheet (colour and dash). is_joined: points that follow one
    another are joined by a line; otherwise they are dots."""

    name: str
    points: Sequence[Point]
    style: str
    markers: bool = False
    is_joined: bool = True


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
    """A map from values to a unit interval. unit: written once, at the axis. as_percent: ticks are shares of 1. words:
    what ticks 0, 1, 2... are called."""

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


SHARES = Scale(0.0, 1.0, "", as_percent=True, ticks=(0.0, 0.25, 0.5, 0.75, 0.9, 1.0))


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


@dataclass(frozen=True, slots=True)
class LineChart:
    """Curves over a common x axis. facts: what the chart shows, for those who do not see it. rules: vertical marks."""

    title: str
    caption: str
    facts: str
    lines: Sequence[Line]
    x: Scale
    y: Scale
    rules: Sequence[Rule] = ()
    is_stacked: ClassVar[bool] = False

    @property
    def legend(self) -> list[tuple[str, str]]:
        """(name, style) of every line that has a name."""
        return [(line.name, line.style) for line in self.lines if line.name]

    def svg(self) -> str:
        """The drawing, as markup."""
        above = UNIT_ROOM if self.rules and self.y.unit else 0.0
        marks = [_frame(self.x, self.y, above), _rules(self.rules, self.x)]
        for line in self.lines:
            spots = [_at(self.x.place(px), self.y.place(py)) for px, py in line.points]
            if not line.is_joined:
                marks += [f'<circle class="dot {line.style}" cx="{px:.1f}" cy="{py:.1f}" r="2.4"/>' for px, py in spots]
                continue
            path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in spots) if spots else ""
            if self.x.words:  # nothing lies between two words: a stem for each
                ground = _at(0.0, self.y.place(self.y.low))[1]
                path = "".join(f"M{px:.1f} {ground:.1f}L{px:.1f} {py:.1f}" for px, py in spots)
            marks.append(f'<path class="line {line.style}" d="{path}"/>')
            if line.markers:
                for (px, py), (value, height) in zip(spots, line.points, strict=True):
                    tip = f"{line.name}: {self.y.write(height)} at {self.x.unit} {self.x.write(value)}"
                    mark = f'<circle class="dot {line.style}" cx="{px:.1f}" cy="{py:.1f}" r="3.2">'
                    marks.append(f"{mark}<title>{escape(tip)}</title></circle>")
        return _drawing(f"{self.title}, by {self.x.unit}", self.facts, marks, above)


@dataclass(frozen=True, slots=True)
class StackedChart:
    """Bands on top of each other, constant between ``edges`` (one more than values); heights are shares of 1."""

    title: str
    caption: str
    facts: str
    layers: Sequence[Layer]
    edges: Sequence[float]
    unit: str  # of the edges
    is_stacked: ClassVar[bool] = True

    @property
    def legend(self) -> list[tuple[str, str]]:
        """(name, style) of every layer."""
        return [(layer.name, layer.style) for layer in self.layers]

    def svg(self) -> str:
        """The drawing, as markup."""
        x = Scale(self.edges[0], self.edges[-1], self.unit)
        y = Scale(0.0, 1.0, "", as_percent=True, ticks=(0.0, 0.25, 0.5, 0.75, 1.0))
        marks = [_frame(x, y)]
        floor = [0.0] * (len(self.edges) - 1)
        for layer in self.layers:
            top = [min(1.0, low + high) for low, high in zip(floor, layer.values, strict=True)]
            outline = [*_staircase(self.edges, top), *reversed(_staircase(self.edges, floor))]
            path = "L".join(f"{px:.1f} {py:.1f}" for px, py in (_at(x.place(px), y.place(py)) for px, py in outline))
            marks.append(f'<path class="band {layer.style}" d="M{path}Z"/>')
            floor = top
        return _drawing(f"{self.title}, by {x.unit}", self.facts, marks)


@dataclass(frozen=True, slots=True)
class ChartLane:
    """What a request or a worker did over time. spans: (start, end, style), in the unit of the chart's x."""

    name: str
    spans: Sequence[tuple[float, float, str]]


@dataclass(frozen=True, slots=True)
class LaneChart:
    """Lanes under one another over a common x axis, which is not drawn: what counts is what stands over what."""

    title: str
    caption: str
    facts: str
    lanes: Sequence[ChartLane]
    x: Scale
    legend: Sequence[tuple[str, str]] = ()
    is_stacked: ClassVar[bool] = True

    @property
    def height(self) -> float:
        """Height of the drawing, which is LANES_WIDTH wide."""
        return LANE_STEP * len(self.lanes)

    def svg(self) -> str:
        """The drawing, as markup."""
        marks = []
        width = LANES_WIDTH - LANES_LEFT - RIGHT
        for row, lane in enumerate(self.lanes):
            top = LANE_STEP * row
            marks.append(f'<text x="{RIGHT:g}" y="{top + 16:g}">{escape(lane.name)}</text>')
            for start, end, style in lane.spans:
                left, right = (LANES_LEFT + width * self.x.place(at) for at in (start, end))
                inner = max(1.0, right - left - SPAN_GAP)
                size = f'x="{left:.1f}" y="{top:g}" width="{inner:.1f}" height="{LANE_HEIGHT:g}"'
                marks.append(f'<rect class="band {style}" {size} rx="3"/>')
        return _drawing(self.title, self.facts, marks, size=(LANES_WIDTH, self.height))


Chart: TypeAlias = LineChart | StackedChart | LaneChart


def _drawing(
    title: str, facts: str, marks: Sequence[str], above: float = 0.0, size: tuple[float, float] = (WIDTH, HEIGHT)
) -> str:
    width, height = size
    return (
        f'<svg class="chart" viewBox="0 {-above:g} {width:g} {height + above:g}" role="img">'
        f"<title>{escape(title)}</title><desc>{escape(facts)}</desc>{''.join(marks)}</svg>"
    )


def _frame(x: Scale, y: Scale, above: float = 0.0) -> str:
    """Grid, ticks, axis and units. above: by how much the unit of y stands higher, over the words of rules."""
    parts = []
    for tick in y.marks():
        _, py = _at(0.0, y.place(tick))
        parts.append(f'<path class="grid-line" d="M{LEFT:g} {py:.1f}H{WIDTH - RIGHT:g}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 7:g}" y="{py + 4:.1f}">{y.write(tick)}</text>')
    bottom = TOP + PLOT_HEIGHT
    for tick in x.marks():
        px, _ = _at(x.place(tick), 0.0)
        parts.append(f'<path class="grid-line" d="M{px:.1f} {bottom:g}v4"/>')
        parts.append(f'<text class="tick middle" x="{px:.1f}" y="{bottom + 17:g}">{escape(x.write(tick))}</text>')
    parts.append(f'<path class="axis" d="M{LEFT:g} {bottom:g}H{WIDTH - RIGHT:g}"/>')
    parts.append(f'<text class="unit end" x="{WIDTH - RIGHT:g}" y="{HEIGHT - 7:g}">{escape(x.unit)}</text>')
    if y.unit:
        parts.append(f'<text class="unit" x="4" y="{12 - above:g}">{escape(y.unit)}</text>')
    return "".join(parts)


def _rules(rules: Sequence[Rule], x: Scale) -> str:
    """Each mark's words stand above the plot: of one on its inner side, of several the first to the left and the others
    to the right, as far as there is room."""
    ordered = sorted(rules, key=lambda rule: rule.x)
    places = [_at(x.place(rule.x), 0.0)[0] for rule in ordered]
    widths = [LETTER_WIDTH * len(rule.label) for rule in ordered]
    is_left = [index == 0 and (len(rules) > 1 or px > LEFT + PLOT_WIDTH / 2) for index, px in enumerate(places)]
    wanted = [px + 4 - width if left else px - 4 for px, width, left in zip(places, widths, is_left, strict=True)]
    parts = []
    for rule, px, start, width, left in zip(ordered, places, _apart(wanted, widths), widths, is_left, strict=True):
        anchor, at = ("end", start + width) if left else ("start", start)
        parts.append(f'<path class="rule {rule.style}" d="M{px:.1f} {TOP - 5:g}V{TOP + PLOT_HEIGHT:g}"/>')
        parts.append(f'<text class="note {anchor}" x="{at:.1f}" y="{TOP - 9:g}">{escape(rule.label)}</text>')
    return "".join(parts)


def _apart(starts: Sequence[float], widths: Sequence[float]) -> list[float]:
    """Starts of words side by side, moved as little as keeps them inside the picture and a letter apart."""
    moved, free = [], 0.0
    for start, width in zip(starts, widths, strict=True):
        moved.append(max(start, free))
        free = moved[-1] + width + LETTER_WIDTH
    free = WIDTH
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], free - widths[index])
        free = moved[index] - LETTER_WIDTH
    return moved


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
