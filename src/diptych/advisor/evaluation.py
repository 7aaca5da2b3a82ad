"""evaluate(load, fleets): what each fleet does under a load, and how much more of it each would carry.

The one evaluation behind ``diptych plan``, ``diptych advise``, the advice of a diagnosis and chapter 6 of the guide.
Each of them says how its load is simulated (``FleetLoad``) and which fleets come into question; what counts as served,
which paces are tried and, by ``choose``, which fleet is taken are the same for all.
"""

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from diptych.advisor.device_layout import LayoutName
from diptych.advisor.layout_preference import LayoutOffer, ranked
from diptych.search.goodput_search import GoodputResult, GoodputSearch, SearchConfig
from diptych.simulation.results import RequestTable
from diptych.simulation.search_runs import lasting_score

TARGET = 0.9  # the share of the requests that must meet their objectives
PACES = SearchConfig(attainment=TARGET, tolerance=0.1, repeats=1, max_probes=10)

Fleet = TypeVar("Fleet", bound=Hashable)
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Score:
    """Requests that met their objectives, as a lasting load would (search_runs.lasting_score), and those that had
    any."""

    met: int
    judged: int

    @classmethod
    def of(cls, table: RequestTable) -> "Score":
        """The score of a simulation."""
        return cls(*lasting_score(table))

    @property
    def attainment(self) -> float | None:
        """The share of the requests that met them (None: there are no objectives)."""
        return self.met / self.judged if self.judged else None


Scores = Mapping[tuple[Fleet, float], Score]


class FleetLoad(Protocol[Fleet]):
    """Requests that come, and how fleets serve them. A pace is a rate in any unit: requests per second, or times as
    fast as they came."""

    def scores(self, asked: Sequence[tuple[Fleet, float]]) -> "Scores[Fleet]":
        """Simulate each fleet at a pace. Fleets that cannot be simulated are left out."""


@dataclass(frozen=True, slots=True)
class EvaluatedFleet(Generic[Fleet]):
    """score: at the asked pace. found: the search for the highest pace (None: there are no objectives). highest: pace
    at which enough requests meet their objectives (None: there is none). headroom: that over the asked pace."""

    fleet: Fleet
    score: Score
    found: GoodputResult | None
    pace: float

    @property
    def highest(self) -> float | None:
        """The highest pace at which enough requests met their objectives; None if there is none."""
        return None if self.found is None else self.found.estimate or self.found.rate

    @property
    def headroom(self) -> float:
        """The highest kept pace divided by the asked one; 0 if no pace was kept."""
        return (self.highest or 0.0) / self.pace


def evaluate(
    load: FleetLoad[Fleet],
    fleets: Sequence[Fleet],
    config: SearchConfig = PACES,
    *,
    pace: float = 1.0,
    known: Mapping[Fleet, Mapping[float, Score]] | None = None,
) -> list[EvaluatedFleet[Fleet]]:
    """Every fleet that can be simulated, in order. known: scores at other paces, with which the search of a fleet
    begins."""
    return carried_out(evaluation(fleets, config, pace=pace, known=known), load)


def carried_out(steps: "Generator[list[tuple[Fleet, float]], Scores[Fleet], Answer]", load: FleetLoad[Fleet]) -> Answer:
    """What these steps find, when the load is asked for every score."""
    try:
        asked = next(steps)
        while True:
            asked = steps.send(load.scores(asked))
    except StopIteration as end:
        answer: Answer = end.value
        return answer


def evaluation(
    fleets: Sequence[Fleet],
    config: SearchConfig = PACES,
    *,
    pace: float = 1.0,
    known: Mapping[Fleet, Mapping[float, Score]] | None = None,
) -> "Generator[list[tuple[Fleet, float]], Scores[Fleet], list[EvaluatedFleet[Fleet]]]":
    """``evaluate``, for those who simulate themselves: yields what is asked, and is sent the scores of it."""
    at_pace = yield [(fleet, pace) for fleet in fleets]
    simulated = [fleet for fleet in fleets if (fleet, pace) in at_pace]
    judged = [fleet for fleet in simulated if at_pace[fleet, pace].judged]
    before = {fleet: {**(known or {}).get(fleet, {}), pace: at_pace[fleet, pace]} for fleet in judged}
    found = yield from highest_paces(judged, config, start=pace, known=before)
    return [EvaluatedFleet(fleet, at_pace[fleet, pace], found.get(fleet), pace) for fleet in simulated]


def highest_paces(
    fleets: Sequence[Fleet],
    config: SearchConfig,
    *,
    start: float,
    known: Mapping[Fleet, Mapping[float, Score]] | None = None,
) -> "Generator[list[tuple[Fleet, float]], Scores[Fleet], dict[Fleet, GoodputResult]]":
    """The highest pace at which enough requests meet their objectives, of each fleet that can be simulated: one search
    for each, all of them a step at a time. start: the first pace, of a fleet of which nothing is known."""
    searches: dict[Fleet, GoodputSearch] = {}
    for fleet in fleets:
        scores = (known or {}).get(fleet, {})
        searches[fleet] = GoodputSearch(config, min(scores, default=start))
        for pace in sorted(scores):
            searches[fleet].add(pace, scores[pace].met, scores[pace].judged)
    while True:
        paces = {fleet: search.next_rate() for fleet, search in searches.items()}
        asked = [(fleet, pace) for fleet, pace in paces.items() if pace is not None]
        if not asked:
            return {fleet: search.found for fleet, search in searches.items()}
        scored = yield asked
        for fleet, pace in asked:
            if (fleet, pace) in scored:
                searches[fleet].add(pace, scored[fleet, pace].met, scored[fleet, pace].judged)
            else:
                del searches[fleet]


def choose(
    evaluated: Sequence[EvaluatedFleet[Fleet]],
    layout_of: Callable[[Fleet], LayoutName],
    *,
    target: float = TARGET,
    cost_of: Callable[[Fleet], float] = lambda fleet: 1.0,
) -> list[int]:
    """Indices of the best fleet of each layout, the one to take first. cost_of: of a fleet, in any unit."""
    offers = [
        LayoutOffer(
            layout_of(each.fleet),
            each.score.attainment or 0.0,
            worth=each.headroom / cost_of(each.fleet),
            cost=cost_of(each.fleet),
            headroom=each.headroom,
        )
        for each in evaluated
    ]
    return ranked(offers, target)
