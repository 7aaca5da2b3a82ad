"""Piecewise-linear functions of measured points: curves, surfaces with rows of their own knots, and dense grids.

Owns the arithmetic of interpolation: additions and multiplications only, so that equal tables give equal answers on
every platform. Knows nothing of steps, layers or units.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from diptych.control.errors import ConfigError

FAR = 64.0  # times the last knot


@dataclass(frozen=True, slots=True)
class Curve:
    """A function of one variable: linear between knots, constant below the first.

    Above the last knot it goes on with the slope of the upper half of the table (from the knot nearest to half the
    last one), which a single noisy point cannot turn around, and never falls.
    """

    knots: tuple[float, ...]
    values: tuple[float, ...]
    slopes: tuple[float, ...] = field(init=False, repr=False)  # slopes[i] holds from knots[i] on

    def __post_init__(self) -> None:
        knots, values = self.knots, self.values
        if not knots or len(knots) != len(values):
            raise ConfigError(f"a curve has {len(knots)} knots and {len(values)} values; as many, at least 1")
        if any(right <= left for left, right in pairwise(knots)):
            raise ConfigError(f"knots of a curve must rise: {knots}")
        slopes = [(values[i + 1] - values[i]) / (knots[i + 1] - knots[i]) for i in range(len(knots) - 1)]
        slopes.append(max(0.0, _upper_slope(knots, values)))
        object.__setattr__(self, "slopes", tuple(slopes))

    def __call__(self, x: float) -> float:
        """The value at ``x``."""
        index = bisect_right(self.knots, x) - 1
        if index < 0:
            return self.values[0]
        return self.values[index] + self.slopes[index] * (x - self.knots[index])

    def rising(self) -> "Curve":
        """The nearest curve that never falls (least squares at the knots: see ``rising_values``)."""
        return Curve(self.knots, rising_values(self.values))

    def segment(self, x: float) -> tuple[float, float, float]:
        """(value at 0, slope, end) of the straight line that the curve follows from ``x`` to ``end`` (exclusive)."""
        index = bisect_right(self.knots, x) - 1
        if index < 0:
            return self.values[0], 0.0, self.knots[0]
        end = self.knots[index + 1] if index + 1 < len(self.knots) else float("inf")
        slope = self.slopes[index]
        return self.values[index] - slope * self.knots[index], slope, end


@dataclass(frozen=True, slots=True)
class Surface:
    """A function of two variables: a curve of the second for each knot of the first, linear between neighbours.

    Rows may have different knots, because large batches are only measured up to the contexts that fit in memory. Below
    the first row it is constant; above the last it grows in proportion to the first variable.
    """

    knots: tuple[float, ...]
    rows: tuple[Curve, ...]
    doubled: Curve = field(init=False, repr=False)  # twice the last row

    def __post_init__(self) -> None:
        if not self.knots or len(self.knots) != len(self.rows):
            raise ConfigError(f"a surface has {len(self.knots)} knots and {len(self.rows)} rows; as many, at least 1")
        last = self.rows[-1]
        object.__setattr__(self, "doubled", Curve(last.knots, tuple([2 * value for value in last.values])))

    def __call__(self, x: float, y: float) -> float:
        """The value at row coordinate ``x`` and column coordinate ``y``."""
        low, high, weight = self.between(x)
        value = low(y)
        return value + weight * (high(y) - value) if weight else value

    def rising(self) -> "Surface":
        """A surface that falls along neither variable: its rows made rising, and each at least the row before it, up to
        a knot far beyond the last."""
        far = FAR * max(row.knots[-1] for row in self.rows)
        rows: list[Curve] = []
        for row in self.rows:
            curve = row.rising()
            lower = rows[-1] if rows else curve
            knots = sorted({*curve.knots, *lower.knots, far})
            rows.append(Curve(tuple(knots), tuple(max(curve(knot), lower(knot)) for knot in knots)))
        return Surface(self.knots, tuple(rows))

    def at_least(self, floor: float) -> "Surface":
        """No value below ``floor``."""
        return Surface(
            self.knots, tuple(Curve(row.knots, tuple(max(floor, v) for v in row.values)) for row in self.rows)
        )

    def between(self, x: float) -> tuple[Curve, Curve, float]:
        """Two rows and the weight of the second: the surface at ``x`` is low + weight * (high - low)."""
        index = bisect_right(self.knots, x) - 1
        if index < 0:
            return self.rows[0], self.rows[0], 0.0
        knot = self.knots[index]
        if index + 1 == len(self.knots):
            return self.rows[index], self.doubled, x / knot - 1.0
        return self.rows[index], self.rows[index + 1], (x - knot) / (self.knots[index + 1] - knot)


def lower_of(first: Surface, second: Surface) -> Surface:
    """The lower of two surfaces at all knots of both."""
    knots = sorted({*first.knots, *second.knots})
    columns = sorted({knot for surface in (first, second) for row in surface.rows for knot in row.knots})
    rows = [Curve(tuple(columns), tuple(min(first(x, y), second(x, y)) for y in columns)) for x in knots]
    return Surface(tuple(knots), tuple(rows))


@dataclass(frozen=True, slots=True)
class Grid:
    """A function of several variables on a full grid: multi-linear inside, constant outside.

    ``values`` is flat; the last axis runs fastest.
    """

    axes: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]
    strides: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        strides, size = [], 1
        for axis in reversed(self.axes):
            strides.append(size)
            size *= len(axis)
        if size != len(self.values):
            raise ConfigError(f"a grid of {size} points has {len(self.values)} values")
        object.__setattr__(self, "strides", tuple(reversed(strides)))

    def nearest(self, point: Sequence[float]) -> tuple[float, ...]:
        """The point of the grid's box that is nearest to ``point``."""
        return tuple([min(max(x, axis[0]), axis[-1]) for axis, x in zip(self.axes, point, strict=True)])

    def rising(self) -> "Grid":
        """The least grid that is nowhere below this one and falls along no axis."""
        values = list(self.values)
        for axis, stride in zip(self.axes, self.strides, strict=True):
            for offset in range(len(values)):
                if offset // stride % len(axis):
                    values[offset] = max(values[offset], values[offset - stride])
        return Grid(self.axes, tuple(values))

    def __call__(self, point: Sequence[float]) -> float:
        """The value at ``point`` (one coordinate an axis)."""
        corners = [(0, 1.0)]  # (offset into values, weight)
        for axis, stride, x in zip(self.axes, self.strides, point, strict=True):
            index = bisect_right(axis, x) - 1
            if index < 0:
                continue
            offset = index * stride
            weight = 0.0
            if index + 1 < len(axis):
                weight = (x - axis[index]) / (axis[index + 1] - axis[index])
            if weight:
                corners = [
                    corner
                    for base, share in corners
                    for corner in (
                        (base + offset, share * (1.0 - weight)),
                        (base + offset + stride, share * weight),
                    )
                ]
            else:
                corners = [(base + offset, share) for base, share in corners]
        values = self.values
        return sum([values[offset] * share for offset, share in corners])


def rising_values(values: Sequence[float]) -> tuple[float, ...]:
    """The never falling numbers with the least sum of squared differences to these: neighbours that fall are replaced
    by their mean (pool adjacent violators: R. Barlow et al., Statistical Inference under Order Restrictions, 1972)."""
    pools: list[tuple[float, int]] = []  # (sum, how many)
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] * count > total * pools[-1][1]:
            before, more = pools.pop()
            total, count = total + before, count + more
        pools.append((total, count))
    return tuple(total / count for total, count in pools for _ in range(count))


def _upper_slope(knots: Sequence[float], values: Sequence[float]) -> float:
    """Slope from the knot (not the last) nearest to half of the last one to the last."""
    if len(knots) < 2:
        return 0.0
    half = knots[-1] / 2
    index = min(range(len(knots) - 1), key=lambda index: abs(knots[index] - half))
    return (values[-1] - values[index]) / (knots[-1] - knots[index])
