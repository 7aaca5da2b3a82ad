"""Which layout to take of several that were simulated: one rule for ``diptych plan``, ``diptych advise``, the advice of
a diagnosis and chapter 6 of the guide.

A more complex shape must earn its place: where a simpler one holds the asked load at ease, or comes within TIE of the
best, the simpler one is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.advisor.device_layout import LayoutName

TIE = 0.05
ROOM = 1.25  # a fleet that carries this factor times the asked rate holds it at ease
SIMPLER: tuple[LayoutName, ...] = ("chunked", "unified", "split", "mixed")


@dataclass(frozen=True, slots=True)
class LayoutOffer:
    """One fleet. attainment: share of the requests, at the asked rate, that meet their objectives. worth: what is
    compared between fleets that hold the load, such as the highest rate for the cost. cost: of the fleet, in any unit.
    headroom: the highest rate over the asked one (None: not known)."""

    shape: LayoutName
    attainment: float
    worth: float = 1.0
    cost: float = 1.0
    headroom: float | None = None


def preferred(offers: Sequence[LayoutOffer], target: float) -> int:
    """The index of the one to take. target: share of the requests that a fleet must serve well to hold the load;
    where none does, those are compared that come nearest to it. Needs at least one offer."""
    known = range(len(offers))
    holding = [number for number in known if offers[number].attainment >= target]
    near = [number for number in holding if (offers[number].headroom or 0.0) >= ROOM]
    if near:
        least = min(offers[number].cost for number in near)
        near = [number for number in near if offers[number].cost <= least * (1 + TIE)]
    else:
        near = _nearest(_near(holding or _nearest(list(known), offers), offers), offers)
    return min(near, key=lambda number: (SIMPLER.index(offers[number].shape), -offers[number].worth, number))


def _nearest(numbers: list[int], offers: Sequence[LayoutOffer]) -> list[int]:
    """The numbers within TIE of the most requests that meet their objectives."""
    most = max(offers[number].attainment for number in numbers)
    return [number for number in numbers if offers[number].attainment >= most - TIE]


def _near(numbers: list[int], offers: Sequence[LayoutOffer]) -> list[int]:
    """The numbers within TIE of what is worth most."""
    most = max(offers[number].worth for number in numbers)
    return [number for number in numbers if offers[number].worth >= most * (1 - TIE)]


def is_tie(first: LayoutOffer, other: LayoutOffer, target: float) -> bool:
    """Whether neither is better than the other, by more than TIE of what is compared: worth, where both hold the load,
    else the share that meets its objectives."""
    if first.attainment >= target and other.attainment >= target:
        return abs(first.worth - other.worth) <= TIE * max(first.worth, other.worth)
    return max(first.attainment, other.attainment) < target and abs(first.attainment - other.attainment) <= TIE


def ranked(offers: Sequence[LayoutOffer], target: float) -> list[int]:
    """Indices of the best of each layout (which holds the load and is worth most, or comes nearest to holding it), the
    one to take first, the others by what they are worth."""

    def rank(number: int) -> tuple[float, float]:
        return min(offers[number].attainment, target), offers[number].worth

    best: dict[LayoutName, int] = {}
    for number in sorted(range(len(offers)), key=rank, reverse=True):
        best.setdefault(offers[number].shape, number)
    order = list(best.values())
    if order:
        order.insert(0, order.pop(preferred([offers[number] for number in order], target)))
    return order
