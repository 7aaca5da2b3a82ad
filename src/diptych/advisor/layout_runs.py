"""Simulations of layouts under one load: every layout at every rate once, many at a time in processes of their own.

All runs have the seed of the load, and so the same requests at another rate. Attainment is that of a load that lasts
(search_runs.lasting_score). The number of processes changes nothing of the result.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from diptych.advisor.device_layout import FleetLayout
from diptych.advisor.evaluation import Score, carried_out, highest_paces
from diptych.control.errors import DiptychError
from diptych.report.statistics import wilson
from diptych.search.goodput_search import GoodputResult, SearchConfig
from diptych.simulation.search_runs import OBJECTIVES, Question, answer, at_rate, lasting_score
from diptych.simulation.settings import Settings, settings_from
from diptych.simulation.sweep import Task, run_here, run_tasks

OnStage = Callable[[str, float], None]  # what is done, and the share of it that is done
Point = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """search: the share of requests that must meet their objectives, and how closely highest rates are searched.
    probe_s: length of a run (None: see search_runs.at_rate)."""

    search: SearchConfig = field(default_factory=SearchConfig)
    probe_s: float | None = None
    num_processes: int = 1


class LayoutRuns:
    """The runs so far. refused: layouts that cannot be simulated, with the reason. sized: fleets that ``smallest``
    found, with the rate at which they keep the objectives. search: how closely highest rates are searched."""

    def __init__(self, base: Settings, options: RunOptions, on_stage: OnStage | None = None) -> None:
        self.refused: dict[FleetLayout, str] = {}
        self.sized: dict[FleetLayout, float] = {}
        self.num_runs = 0
        self._base = base
        self._options = options
        self.search = replace(options.search, repeats=1)  # a run again would give the same
        self._on_stage = on_stage
        self._points: dict[tuple[FleetLayout, float], Point] = {}

    @property
    def layouts(self) -> set[FleetLayout]:
        """The layouts that were tried."""
        return {layout for layout, _ in self._points} | self.refused.keys()

    def point(self, layout: FleetLayout, rate: float) -> Point:
        """The outcome of a run that was made (report/outcome.py), with ``rate``, ``met``, ``judged``, ``attainment``
        and ``attainment_interval``."""
        return self._points[layout, rate]

    def points(self, layout: FleetLayout) -> list[Point]:
        """All runs of a layout, by their rates."""
        return [self._points[key] for key in sorted(self._points, key=lambda key: key[1]) if key[0] == layout]

    def keeps(self, layout: FleetLayout, rate: float) -> bool:
        """Whether enough requests of a run that was made met their objectives."""
        return bool(self.point(layout, rate)["attainment"] >= self.search.attainment)

    def highest_kept(self) -> dict[FleetLayout, float | None]:
        """The highest rate so far that kept the objectives, for every layout that was simulated (None: none did)."""
        highest: dict[FleetLayout, float | None] = dict.fromkeys((layout for layout, _ in self._points), None)
        highest |= self.sized
        for layout, rate in self._points:
            if self.keeps(layout, rate):
                highest[layout] = max(rate, highest[layout] or 0.0)
        return highest

    def run(self, asked: Sequence[tuple[FleetLayout, float]], stage: str) -> None:
        """Simulate what was not, but for layouts that are refused. After an interrupt what is done is kept."""
        new = [key for key in asked if key not in self._points and key[0] not in self.refused]
        found = self._tasks(_run_task, [self._settings(*key) for key in new], stage)
        for number, point in found.items():
            layout, rate = new[number]
            self.num_runs += 1
            if "refused" in point:
                self.refused[layout] = point["refused"]
            else:
                self._points[layout, rate] = {**point, "rate": rate}
        if len(found) < len(new):
            raise KeyboardInterrupt

    def shares(self, layouts: Sequence[FleetLayout], rate: float) -> dict[FleetLayout, float]:
        """Attainment at a rate, of the layouts that can be simulated."""
        shapes = ", ".join(dict.fromkeys(layout.shape for layout in layouts))
        self.run([(layout, rate) for layout in layouts], f"{shapes}: {rate:.3g} requests/s")
        return {
            layout: float(self._points[layout, rate]["attainment"])
            for layout in layouts
            if (layout, rate) in self._points
        }

    def scores(self, asked: Sequence[tuple[FleetLayout, float]]) -> dict[tuple[FleetLayout, float], Score]:
        """Score each layout at its rate; the pace of advisor.evaluation.FleetLoad is a rate in requests per second."""
        self.run(asked, "highest rates")
        return {key: _score(self._points[key]) for key in asked if key in self._points}

    def known(self, layouts: Sequence[FleetLayout]) -> dict[FleetLayout, dict[float, Score]]:
        """The scores of all runs of these layouts, by their rates."""
        return {layout: {point["rate"]: _score(point) for point in self.points(layout)} for layout in layouts}

    def highest_rates(self, layouts: Sequence[FleetLayout], start: float) -> dict[FleetLayout, GoodputResult]:
        """The highest rates at which enough requests meet their objectives, of the layouts that can be simulated.
        start: the first rate, of a layout that has not run."""
        able = [layout for layout in layouts if layout not in self.refused]
        steps = highest_paces(able, self.search, start=start, known=self.known(able))
        return carried_out(steps, self)

    def smallest(self, layouts: Sequence[FleetLayout], rate: float) -> list[FleetLayout | None]:
        """The smallest fleet that keeps the objectives at a rate, for each layout: of its kinds of workers, in at most
        two groups; None: there is none, or it is refused."""
        options = self._options
        question = {"asked": "devices", "search": asdict(options.search), "probe_s": options.probe_s}
        points = [self._settings(layout, rate) for layout in layouts]
        found = self._tasks(_smallest_task, points, f"smallest fleets: {rate:.3g} requests/s", question)
        sized: list[FleetLayout | None] = [None] * len(layouts)
        for number, size in found.items():
            self.num_runs += size.get("num_probes", 1)
            if "refused" in size:
                self.refused[layouts[number]] = size["refused"]
            if workers := size.get("workers"):
                fleet = layouts[number].with_counts(tuple(workers.values()))
                sized[number], self.sized[fleet] = fleet, rate
        if len(found) < len(layouts):
            raise KeyboardInterrupt
        return sized

    def _tasks(self, task: Task, points: Sequence[Settings], stage: str, *extras: Any) -> dict[int, dict[str, Any]]:
        """What is done of the points, by their number; all of them, but after an interrupt."""
        total = max(1, len(points))

        def on_done(done: int) -> None:
            if self._on_stage is not None:
                self._on_stage(stage, done / total)

        on_done(0)
        tasks = [({"task": number}, point) for number, point in enumerate(points)]
        workers = self._options.num_processes
        found = run_tasks(task, tasks, *extras, num_workers=workers, on_done=on_done, keeps_done=True)
        return {answer.pop("task"): answer for answer in found}

    def _settings(self, layout: FleetLayout, rate: float) -> Settings:
        workload = at_rate(self._base.workload, rate, self._options.probe_s)
        return layout.settings(msgspec.structs.replace(self._base, workload=workload))


def _score(point: Point) -> Score:
    return Score(point["met"], point["judged"])


def _run_task(task: bytes) -> bytes:
    """One run, from JSON to JSON; or why it is impossible. With the values that the task came with, its number."""
    values, raw = msgspec.json.decode(task)
    try:
        run = run_here(settings_from(raw))
    except DiptychError as error:
        return msgspec.json.encode({**values, "refused": error.message})
    met, judged = lasting_score(run.result.requests)
    if not judged:
        return msgspec.json.encode({**values, "refused": f"no request has an objective: {OBJECTIVES}"})
    share = {"met": met, "judged": judged, "attainment": met / judged, "attainment_interval": wilson(met, judged)}
    return msgspec.json.encode({**run.point, **share, **values})


def _smallest_task(task: bytes) -> bytes:
    """The search for the smallest fleet of a layout, as ``_run_task`` has it."""
    values, raw, asked = msgspec.json.decode(task)
    try:
        found = answer(settings_from(raw), msgspec.convert(asked, Question))
    except DiptychError as error:
        return msgspec.json.encode({**values, "refused": error.message})
    return msgspec.json.encode({**values, **{name: found.result[name] for name in ("workers", "num_probes")}})
