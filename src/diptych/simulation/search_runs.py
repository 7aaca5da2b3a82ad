"""Searches that run many simulations: the highest rate that keeps the objectives, and the smallest fleet that does.

Every run of a search has the same seed, and so the same requests at another rate or on another fleet; where a search
asks for a rate again, to be sure, the next seed is taken. The searches themselves are in search/.

A fleet that falls behind would miss every objective of time in the end, however short a run is, and however many of its
answers came at the wanted pace once they had begun: see ``sustained_share``.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgspec

from diptych.control.errors import ConfigError
from diptych.report.statistics import wilson
from diptych.report.text import percent, rate
from diptych.search.fewest import Answer, fewest_split, fewest_workers
from diptych.search.goodput_search import GoodputSearch, SearchConfig
from diptych.simulation.results import RequestTable
from diptych.simulation.settings import Settings, settings_from
from diptych.simulation.sweep import Run, Value, errors_at, run_here, run_tasks, setting_path
from diptych.workload.description import WorkloadConfig

Asked = Literal["goodput", "devices"]
OnProbe = Callable[[str, float], None]  # a sentence about the run that ended, and the share of the search that is done

OBJECTIVES = "set --ttft-slo-ms, --tpot-slo-ms or both"
PROBE_S = 60.0
FEW_REQUESTS = 300  # fewer say little about a share of 90 %
START_RATE = 1.0
MOST_WORKERS = 1024
SEARCHED = {  # paths that cannot be swept, as regular expressions
    "goodput": r"workload\.rate|workload\.trace\.scale",
    "devices": r"replicas|pools\.[^.]+(\.replicas)?",
}
USELESS_IDLE = 0.9  # a fleet that idles so much of its time and fails would fail with more workers, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """asked: the highest rate, or the fewest devices. search: the share of the requests that must meet their
    objectives, and how closely the rate is searched. probe_s: how long a run lasts at least (None: 60 s).
    most: the most workers, of each pool if there are several. start: how many are tried first. cuts_short: runs
    are as long as the workload says, and those of too small fleets end when they cannot reach the share any more: their
    attainment is that of the requests until then."""

    asked: Asked
    search: SearchConfig = field(default_factory=SearchConfig)
    probe_s: float | None = None
    most: int = MOST_WORKERS
    start: int = 1
    cuts_short: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """result: plain fields of the answer. probes: of each run. best: the run at the answer, or else at the lowest rate
    or on the largest fleet that was tried. is_complete: False where an interrupt ended the search."""

    result: dict[str, Any]
    probes: list[dict[str, Any]]
    best: Run
    is_complete: bool = True


def answer(
    settings: Settings,
    question: Question,
    *,
    values: Mapping[str, Any] | None = None,
    on_probe: OnProbe | None = None,
    keeps_done: bool = False,
) -> Found:
    """Search by simulating. values: of a sweep, for the record of the run. keeps_done: an interrupt (Ctrl-C) ends the
    search and gives what the runs so far say, if any. Raises ConfigError, also where no request has an objective."""
    workload = settings.workload
    has_slo = settings.slo.ttft_ms or settings.slo.tpot_ms or workload.slo.to_slo()
    if not has_slo and workload.trace is None and not any(kind.slo for kind in workload.classes):
        raise ConfigError(f"{question.asked} cannot be searched without objectives: {OBJECTIVES}", param="slo")
    probes = _Probes(question, values or {}, on_probe, keeps_done)
    return _goodput(settings, question, probes) if question.asked == "goodput" else _devices(settings, question, probes)


def answer_points(
    points: Sequence[tuple[Mapping[str, Value], Settings]],
    question: Question,
    *,
    num_workers: int,
    on_done: Callable[[int], None] | None = None,
    keeps_done: bool = False,
) -> list[dict[str, Any]]:
    """The answer at every point of a sweep: the outcome of the best run, with the fields of the answer under
    ``goodput`` or ``devices`` and the runs of the search under ``runs``. Raises ConfigError."""
    searched = SEARCHED[question.asked]
    for values, _ in points[:1]:
        for path in map(setting_path, values):
            if re.fullmatch(searched, path):
                raise ConfigError(f"{path} is what is searched; it cannot be swept, too", param="sweep")
    return run_tasks(
        _answer_task, points, asdict(question), num_workers=num_workers, on_done=on_done, keeps_done=keeps_done
    )


def _answer_task(task: bytes) -> bytes:
    """One point, from JSON to JSON. Raises ConfigError saying at which values."""
    values, raw, asked = msgspec.json.decode(task)
    question = msgspec.convert(asked, Question)
    with errors_at(values):
        found = answer(settings_from(raw), question, values=values)
    return msgspec.json.encode({**found.best.point, question.asked: found.result, "runs": found.probes})


class _Probes:
    """The runs of a search, in their order. is_cut: the search was interrupted."""

    def __init__(
        self, question: Question, values: Mapping[str, Any], on_probe: OnProbe | None, keeps_done: bool
    ) -> None:
        self.points: list[dict[str, Any]] = []
        self.is_cut = False
        self._keeps_done = keeps_done
        self._question = question
        self._values = values
        self._on_probe = on_probe

    @contextmanager
    def until_interrupt(self) -> Iterator[None]:
        """An interrupt ends what is within, once a run is done."""
        try:
            yield
        except KeyboardInterrupt:
            if not self._keeps_done or not self.points:
                raise
            self.is_cut = True

    def run(self, settings: Settings, **facts: Any) -> tuple[Run, int, int]:
        """(run, requests that met their objectives, as a lasting load would, requests that had any); facts: of what
        differs from the others."""
        question = self._question
        wanted = question.search.attainment if question.cuts_short else None
        run = run_here(settings, values=self._values, attainment=wanted)
        met, judged = lasting_score(run.result.requests, is_cut=run.result.is_cut)
        if not judged:
            raise ConfigError(f"no request of the workload has an objective: {OBJECTIVES}", param="slo")
        self.points.append(
            {
                **facts,
                "devices": run.point["fleet"]["devices"],
                "met": met,
                "judged": judged,
                "attainment": met / judged,
                "attainment_interval": wilson(met, judged),
                "summary": run.point["summary"],
            }
        )
        return run, met, judged

    def say(self) -> None:
        """What the last run has shown."""
        if self._on_probe is None:
            return
        last = self.points[-1]
        what = f"{rate(last['rate'])} requests/s" if "rate" in last else f"{last['devices']:,} devices"
        share = min(0.99, len(self.points) / self._question.search.max_probes)
        self._on_probe(f"{what}: {percent(last['attainment'])} in time", share)


def _goodput(settings: Settings, question: Question, probes: _Probes) -> Found:
    """The highest rate at which enough requests meet their objectives."""
    if settings.workload.arrivals.kind == "closed":
        raise ConfigError("goodput is searched in an open loop; arrivals.kind is 'closed'", param="arrivals")
    search = GoodputSearch(question.search, settings.workload.rate or START_RATE)
    runs: dict[float, tuple[int, Run]] = {}  # how many, and the first
    with probes.until_interrupt():
        while (asked := search.next_rate()) is not None:
            number = runs[asked][0] if asked in runs else 0
            workload = at_rate(settings.workload, asked, question.probe_s)
            changed = msgspec.structs.replace(settings, workload=workload, seed=settings.seed + number)
            run, met, judged = probes.run(changed, rate=asked)
            runs[asked] = (number + 1, runs[asked][1] if asked in runs else run)
            search.add(asked, met, judged)
            probes.say()
    found = search.found
    best = runs[min(runs) if found.rate is None else found.rate][1]
    return Found({**asdict(found), "config": asdict(question.search)}, probes.points, best, not probes.is_cut)


def _devices(settings: Settings, question: Question, probes: _Probes) -> Found:
    """The smallest fleet on which enough requests meet their objectives: its replicas, or those of its pools."""
    workload = settings.workload
    if workload.arrivals.kind != "closed" and not question.cuts_short:
        workload = at_rate(workload, workload.rate, question.probe_s)
    settings = msgspec.structs.replace(settings, workload=workload)
    names = tuple(settings.pools.in_use) or ("replicas",)
    if len(names) > 2:
        message = f"the fewest devices are searched for at most two pools; there are {', '.join(names)}"
        raise ConfigError(message, param="pools")
    runs: dict[tuple[int, ...], Run] = {}
    held: dict[tuple[int, ...], Answer] = {}

    def ask(*counts: int) -> Answer:
        if counts not in held:
            workers = dict(zip(names, counts, strict=True))
            run, met, judged = probes.run(with_workers(settings, workers), workers=workers)
            runs[counts] = run
            idle = run.point["summary"]["utilization"]["idle"]
            if met >= question.search.attainment * judged:
                held[counts] = "holds"
            else:
                held[counts] = "hopeless" if idle is None or idle >= USELESS_IDLE else "fails"
            probes.say()
        return held[counts]

    def devices(counts: tuple[int, ...]) -> int:
        return int(runs[counts].point["fleet"]["devices"])

    counts: tuple[int, ...] | None = None
    with probes.until_interrupt():
        if len(names) == 2:
            first, second = (settings.of_pool(pool).parallelism.devices for pool in settings.pools.in_use.values())
            counts = fewest_split(ask, question.most, (first, second), question.start)
        else:
            fewest = fewest_workers(ask, question.most, question.start)
            counts = None if fewest is None else (fewest,)
    if probes.is_cut:
        counts = min((tried for tried in held if held[tried] == "holds"), key=devices, default=None)
    tried = counts or max(runs, key=sum)
    workers = dict(zip(names, tried, strict=True))
    result = {
        "devices": None if counts is None else devices(tried),
        "workers": None if counts is None else workers,
        "attainment": next(point["attainment"] for point in probes.points if point["workers"] == workers),
        "num_probes": len(probes.points),
        "config": asdict(question.search),
    }
    return Found(result, probes.points, runs[tried], not probes.is_cut)


def with_workers(settings: Settings, workers: Mapping[str, int]) -> Settings:
    """The settings with ``workers`` as their ``replicas``, or as the sizes of the pools of these names."""
    if "replicas" in workers:
        return msgspec.structs.replace(settings, replicas=workers["replicas"])
    named = dict(settings.pools.named)
    for name, count in workers.items():
        named[name] = msgspec.structs.replace(named[name], replicas=count)
    return msgspec.structs.replace(settings, pools=msgspec.structs.replace(settings.pools, named=named))


def lasting_score(table: RequestTable, *, is_cut: bool = False) -> tuple[int, int]:
    """(requests that met their objectives, as a load that lasts would have it; requests that had any). is_cut: the
    run ended before its last request, and is judged by those that had ended."""
    judged = sum(verdict >= 0 for verdict in table.slo_met)
    met = sum(verdict == 1 for verdict in table.slo_met)
    return round(met * (1.0 if is_cut else sustained_share(table))), judged


def sustained_share(table: RequestTable) -> float:
    """The share of the offered rate that is served. It is below 1 where the last requests end later after their
    arrival than any request took without queueing: by that excess the fleet fell behind in the time of the
    arrivals."""
    done = table.completed_rows()
    if not done:
        return 1.0
    first, last = min(table.arrival_ns), max(table.arrival_ns)
    end_ns = max(table.arrival_ns[row] + table.e2e_ns(row) for row in done)
    excess_ns = end_ns - last - max(table.e2e_ns(row) - table.queue_ns[row] for row in done)
    return 1.0 if excess_ns <= 0 else (last - first) / (last - first + excess_ns)


def at_rate(workload: WorkloadConfig, per_second: float | None, seconds: float | None) -> WorkloadConfig:
    """The workload at a rate (None: its own), for as long as a run must last to show whether a fleet keeps up: with
    the requests of its trace, or else with as many as come in ``seconds`` (None: 60), and at least as many as it says
    it has (or 300)."""
    trace, number = workload.trace, workload.num_requests
    if trace is None:
        number = max(number or FEW_REQUESTS, round((per_second or START_RATE) * (seconds or PROBE_S)))
    elif per_second is not None:
        trace = msgspec.structs.replace(trace, scale=1.0)
    return msgspec.structs.replace(workload, rate=per_second, num_requests=number, trace=trace)
