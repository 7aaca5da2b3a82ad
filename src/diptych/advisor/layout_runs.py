"""Simulations of layouts under one load: every layout at every rate once, many at a time in processes of their own.

All runs have the seed of the load, and so the same requests at another rate. Attainment is that of a load that lasts
(search_runs.lasting_score). The number of processes changes nothing of the result.

Runs that sort out layouts and runs that compare them are short (REQUESTS), but for as many requests as come while
SERVICES of them take one after another, and they end where they cannot reach the wanted share any more. A whole run
goes to its end. A search of highest rates begins with what is known of sorting runs where that is sure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import msgspec

from diptych.advisor.device_layout import FleetLayout
from diptych.advisor.evaluation import Score, carried_out, highest_paces
from diptych.control.errors import DiptychError
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.report.statistics import percentile, wilson
from diptych.search.goodput_search import GoodputResult, SearchConfig
from diptych.simulation.search_runs import OBJECTIVES, PROBE_S, Question, answer, at_rate, lasting_score
from diptych.simulation.settings import Settings, settings_from
from diptych.simulation.sweep import Task, TaskPool, run_here
from diptych.workload.description import ArrivalConfig

Length = Literal["sorting", "comparing", "whole"]
LENGTHS: tuple[Length, ...] = get_args(Length)
REQUESTS = {"sorting": 200, "comparing": 600, "whole": 3000}
# a share of 90 % is known within 4.2, 2.4 and 1.1 points, at 95 % confidence
SERVICES = 5.0
ALONE = 32  # requests that are served one by one, to see what is possible at all
ALONE_RATE = 1e-4  # per second

OnStage = Callable[[str, float], None]  # what is done, and the share of it that is done
Point = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """search: the share of requests that must meet their objectives, and how closely highest rates are searched.
    probe_s: length of every run (None: as the module says, and at most that of search_runs.at_rate)."""

    search: SearchConfig = field(default_factory=SearchConfig)
    probe_s: float | None = None
    num_processes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AloneFigures:
    """Requests that are served one by one on an idle fleet. met, judged: objectives. ttft_ms, tpot_ms: within which the
    wanted share of the requests is (None: no request had any). e2e_s: the mean duration of a request."""

    met: int
    judged: int
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_s: float

    def can_reach(self, attainment: float) -> bool:
        """Whether this share of the requests may meet their objectives, as far as so few of them say."""
        return wilson(self.met, self.judged).high >= attainment


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
        self._service_s = 0.0
        self._only_whole: set[FleetLayout] = set()
        self._pool = TaskPool(options.num_processes)

    def close(self) -> None:
        """End the processes that simulate."""
        self._pool.close()

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

    def _is_known(self, key: tuple[FleetLayout, float], length: Length) -> bool:
        known = self._points.get(key)
        return known is not None and LENGTHS.index(known["length"]) >= LENGTHS.index(length)

    def _is_sure(self, point: Point) -> bool:
        low, high = point["attainment_interval"]
        return point["length"] != "sorting" or not low < self.search.attainment <= high

    def judge_by_whole_runs(self, layouts: Sequence[FleetLayout]) -> None:
        """Forget the short runs of these layouts, and make no more of them."""
        self._only_whole.update(layouts)
        self._points = {
            key: point
            for key, point in self._points.items()
            if key[0] not in self._only_whole or point["length"] == "whole"
        }

    def alone(self, layouts: Sequence[FleetLayout]) -> dict[FleetLayout, AloneFigures]:
        """What each layout gives requests that have it to themselves; refused ones are left out. From then on, runs
        that compare last as long as a few of the slowest."""
        points = [self._alone_settings(layout) for layout in layouts]
        found = self._tasks(_alone_task, points, "what a request alone takes", self.search.attainment)
        figures = {}
        for number, record in found.items():
            if "refused" in record:
                self.refused[layouts[number]] = record["refused"]
            else:
                figures[layouts[number]] = msgspec.convert(record, AloneFigures)
        if len(found) < len(layouts):
            raise KeyboardInterrupt
        self._service_s = min((alone.e2e_s for alone in figures.values()), default=0.0)
        return figures

    def has_run(self, layout: FleetLayout, rate: float) -> bool:
        """Whether there is a run."""
        return (layout, rate) in self._points

    def run(self, asked: Sequence[tuple[FleetLayout, float]], stage: str, length: Length = "comparing") -> None:
        """Simulate what was not, or not at this length, but for layouts that are refused. After an interrupt what is
        done is kept. Whole runs are made to their end."""
        new = [key for key in asked if key[0] not in self.refused and not self._is_known(key, length)]
        wanted = None if length == "whole" else self.search.attainment
        points = [self._settings(*key, "whole" if key[0] in self._only_whole else length) for key in new]
        found = self._tasks(_run_task, points, stage, wanted)
        for number, point in found.items():
            layout, rate = new[number]
            self.num_runs += 1
            if "refused" in point:
                self.refused[layout] = point["refused"]
            else:
                length_of_run = length
                if not point["is_cut"]:  # as good as the longest that has the same requests
                    workload = points[number].workload
                    same = [each for each in LENGTHS if self._settings(layout, rate, each).workload == workload]
                    length_of_run = max([length, *same], key=LENGTHS.index)
                self._points[layout, rate] = {**point, "rate": rate, "length": length_of_run}
        if len(found) < len(new):
            raise KeyboardInterrupt

    def shares(self, layouts: Sequence[FleetLayout], rate: float) -> dict[FleetLayout, float]:
        """Attainment at a rate, of the layouts that can be simulated."""
        shapes = ", ".join(dict.fromkeys(layout.shape for layout in layouts))
        self.run([(layout, rate) for layout in layouts], f"{shapes}: {rate:.3g} requests/s", "sorting")
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
        """The scores of the runs of these layouts that compare, and of sorting ones that are sure, by their rates."""
        return {
            layout: {point["rate"]: _score(point) for point in self.points(layout) if self._is_sure(point)}
            for layout in layouts
        }

    def highest_rates(self, layouts: Sequence[FleetLayout], start: float) -> dict[FleetLayout, GoodputResult]:
        """The highest rates at which enough requests meet their objectives, of the layouts that can be simulated.
        start: the first rate, of a layout that has not run."""
        able = [layout for layout in layouts if layout not in self.refused]
        steps = highest_paces(able, self.search, start=start, known=self.known(able))
        return carried_out(steps, self)

    def smallest(
        self,
        layouts: Sequence[FleetLayout],
        rate: float,
        *,
        most: Sequence[int] | None = None,
        start: int = 1,
        length: Length = "comparing",
    ) -> list[FleetLayout | None]:
        """The smallest fleet that keeps the objectives at a rate, for each layout: of its kinds of workers, in at most
        two groups; None: there is none, or it is refused. most: workers of a group, for each layout. start: workers
        of a group that are tried first."""
        search = asdict(self._options.search)
        questions = [
            asdict(
                Question(
                    asked="devices",
                    search=SearchConfig(**search),
                    probe_s=self._options.probe_s,
                    start=start,
                    cuts_short=True,
                    **({} if most is None else {"most": most[number]}),
                )
            )
            for number in range(len(layouts))
        ]
        points = [self._settings(layout, rate, length) for layout in layouts]
        found = self._tasks(_smallest_task, points, f"smallest fleets: {rate:.3g} requests/s", questions)
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
                self._on_stage(f"{stage}, {done:,} of {len(points):,}", done / total)

        if not points:
            return {}
        on_done(0)
        tasks = [({"task": number}, point) for number, point in enumerate(points)]
        found = self._pool.run(task, tasks, *extras, on_done=on_done, keeps_done=True)
        return {answer.pop("task"): answer for answer in found}

    def _settings(self, layout: FleetLayout, rate: float, length: Length) -> Settings:
        workload = at_rate(self._base.workload, rate, self._options.probe_s)
        if self._options.probe_s is None:
            few = max(REQUESTS[length], round(rate * min(PROBE_S, SERVICES * self._service_s)))
            given = self._base.workload.num_requests or 0
            is_least = length == "whole" or workload.trace is None  # a trace is cut to what is given
            number = max(few, given if is_least else 0)
            workload = msgspec.structs.replace(workload, num_requests=min(number, workload.num_requests or number))
        return layout.settings(msgspec.structs.replace(self._base, workload=workload))

    def _alone_settings(self, layout: FleetLayout) -> Settings:
        """The first requests of the load, each after the end of the one before."""
        workload = at_rate(self._base.workload, ALONE_RATE, self._options.probe_s)
        workload = msgspec.structs.replace(workload, num_requests=ALONE)
        if workload.trace is None:
            workload = msgspec.structs.replace(workload, arrivals=ArrivalConfig(kind="constant"))
        return layout.settings(msgspec.structs.replace(self._base, workload=workload))


def _score(point: Point) -> Score:
    return Score(point["met"], point["judged"])


def _run_task(task: bytes) -> bytes:
    """One run, from JSON to JSON; or why it is impossible. With the values that the task came with, its number."""
    values, raw, attainment = msgspec.json.decode(task)
    try:
        run = run_here(settings_from(raw), attainment=attainment)
    except DiptychError as error:
        return msgspec.json.encode({**values, "refused": error.message})
    met, judged = lasting_score(run.result.requests, is_cut=run.result.is_cut)
    if not judged:
        return msgspec.json.encode({**values, "refused": f"no request has an objective: {OBJECTIVES}"})
    share = {"met": met, "judged": judged, "attainment": met / judged, "attainment_interval": wilson(met, judged)}
    return msgspec.json.encode({**run.point, **share, "is_cut": run.result.is_cut, **values})


def _alone_task(task: bytes) -> bytes:
    """AloneFigures of a run, as ``_run_task`` has it."""
    values, raw, attainment = msgspec.json.decode(task)
    try:
        table = run_here(settings_from(raw)).result.requests
    except DiptychError as error:
        return msgspec.json.encode({**values, "refused": error.message})
    judged = sum(verdict >= 0 for verdict in table.slo_met)
    if not judged:
        return msgspec.json.encode({**values, "refused": f"no request has an objective: {OBJECTIVES}"})
    rows = table.completed_rows()
    ttfts = sorted(table.ttft_ns(row) / NS_PER_MS for row in rows)
    tpots = sorted(tpot / NS_PER_MS for row in rows if (tpot := table.tpot_ns(row)) is not None)
    figures = AloneFigures(
        met=sum(verdict == 1 for verdict in table.slo_met),
        judged=judged,
        ttft_ms=percentile(ttfts, 100 * attainment) if ttfts else None,
        tpot_ms=percentile(tpots, 100 * attainment) if tpots else None,
        e2e_s=sum(table.e2e_ns(row) for row in rows) / NS_PER_S / max(1, len(rows)),
    )
    return msgspec.json.encode({**values, **asdict(figures)})


def _smallest_task(task: bytes) -> bytes:
    """The search for the smallest fleet of a layout, as ``_run_task`` has it. The question is that of its number."""
    values, raw, questions = msgspec.json.decode(task)
    try:
        found = answer(settings_from(raw), msgspec.convert(questions[values["task"]], Question))
    except DiptychError as error:
        return msgspec.json.encode({**values, "refused": error.message})
    return msgspec.json.encode({**values, **{name: found.result[name] for name in ("workers", "num_probes")}})
