"""What ``diptych simulate`` shows: pages of a run, a search and a sweep, with tables and sentences that the terminal
prints, too.

Owns titles, captions, columns and the binning over time: tables and charts as data. The figures are those of
outcome.py; report/pages.py lays a page out, and report/plots.py draws. Every row says of what it is: the workload, the
fleet, where the durations come from and what of them was assumed. Shares of a bin are exact: a step that spans two
bins counts in each with the time it was there.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diptych.control.events import FirstToken, RequestAdmitted, RequestFinished, RequestPreempted, StepFinished
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.report import charts, pages
from diptych.report.charts import in_system_chart, rate_charts, time_scale, waits_chart
from diptych.report.pages import Report, Section
from diptych.report.plots import (
    SHARES,
    Chart,
    Layer,
    Line,
    LineChart,
    Rule,
    Scale,
    StackedChart,
    linear_scale,
)
from diptych.report.statistics import count_over_time, cumulative, weighted_cumulative
from diptych.report.text import (
    PRICES,
    Table,
    class_table,
    dollars,
    goodput_table,
    headline,
    latency_table,
    milliseconds,
    number,
    percent,
    pool_table,
    rate,
    resource_table,
    runs_table,
    service_table,
    with_unit,
)
from diptych.simulation.event_log import LoggedEvent
from diptych.simulation.hardware import device_words
from diptych.simulation.prepare import shape_words
from diptych.simulation.results import RequestTable, SimulationResult
from diptych.simulation.settings import Settings
from diptych.simulation.sweep import Run, Sweep
from diptych.timeline.lanes import phase_of, prefill_context


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a page shows. ``point``: settings, cost_model, summary, classes and economy of the run (see sweep.py).

    result and events belong to that point. sweep: every point, under the swept ``names`` (asked: what was searched at
    each, "goodput" or "devices"); a page of a sweep has no result of its own and leaves the charts of a single run out.
    search: what a single search found, as --json prints it; the point is the run at its answer.
    """

    title: str
    lead: str
    command: str
    point: Mapping[str, Any]
    result: SimulationResult | None = None
    events: Sequence[LoggedEvent] = ()
    kv_capacity_tokens: int = 0
    slo_ms: Mapping[str, float] = field(default_factory=dict)  # "ttft", "tpot"
    sweep_names: Sequence[str] = ()
    sweep: Sequence[Mapping[str, Any]] = ()
    asked: str | None = None
    search: Mapping[str, Any] | None = None


def render(page: Page) -> str:
    """The whole file as text."""
    sections: list[Section] = []
    if page.sweep:
        drawn = sweep_charts(page.sweep_names, page.sweep, page.asked)
        tables = sweep_tables(page.sweep_names, page.sweep, page.asked)
        sections.append(Section(heading="Over the sweep", charts=drawn, tables=tables))
    if page.search is not None:
        sections.append(_search(page.search))
    if page.result is not None:
        over_time = time_charts(page.result, page.events, page.kv_capacity_tokens)
        sections += [
            Section(heading="Latency", charts=latency_charts(page.result, page.slo_ms)),
            _numbers(page.point),
            Section(heading="Over time", charts=over_time),
        ]
    report = Report(
        maker="Diptych simulation",
        title=page.title,
        lead=page.lead,
        cards=[] if page.sweep else _cards(page.point) if page.search is None else _search_cards(page),
        sections=sections,
        notes=[f"{note}." for note in cost_notes(page.sweep or [page.point])],
        command=page.command,
        details=("All settings", json.dumps(page.point["settings"], indent=2)),
        foot=_foot(page),
    )
    return pages.render(report)


def _search(search: Mapping[str, Any]) -> Section:
    """The runs of a search."""
    if "goodput" in search:
        found, runs = search["goodput"], search["points"]
        drawn = rate_charts(runs, found["config"]["attainment"], found["estimate"])
        return Section(heading="Search", charts=drawn, tables=[runs_table(runs)], narrow=[goodput_table(found)])
    runs_of_fleets, answer = fleet_search_tables(search["devices"], search["points"])
    return Section(heading="Search", tables=[runs_of_fleets], narrow=[answer])


def _search_cards(page: Page) -> list[tuple[str, str]]:
    """The answer, before the latencies and the price of the run at it."""
    assert page.search is not None
    if "goodput" in page.search:
        found = page.search["goodput"]
        answer = [("Highest rate, requests/s", rate(found["estimate"])), ("Surely above", rate(found["low"]))]
    else:
        found = page.search["devices"]
        answer = [("Fewest devices", number(found["devices"], 0)), ("Workers", workers_in_words(found["workers"]))]
    return answer + [card for card in _cards(page.point) if card[0] not in ("Attainment", "Goodput, requests/s")]


def _cards(point: Mapping[str, Any]) -> list[tuple[str, str]]:
    cards = headline(point["summary"], "ttft_ms", "tpot_ms")
    cost = point["economy"]["usd_per_million_output_tokens"]
    if cost is not None:
        cards.append(("Per 1M output tokens", f"${number(cost, 2)}"))
    if len(cards) % 2:
        cards.append(("KV cache, peak", percent(point["summary"]["utilization"]["kv_peak"])))
    return cards


def _numbers(point: Mapping[str, Any]) -> Section:
    summary, classes = point["summary"], point["classes"]
    return Section(
        heading="Numbers",
        tables=[
            latency_table(summary),
            *([class_table(classes)] if classes else []),
            *([pool_table(point["pools"])] if len(point["pools"]) > 1 else []),
        ],
        narrow=[
            service_table(summary, point["economy"]),
            resource_table(summary),
            simulated_table(point),
            *_misses(point),
        ],
    )


def _misses(point: Mapping[str, Any]) -> list[Table]:
    return [misses_table(point["misses"])] if "misses" in point else []


def _foot(page: Page) -> str:
    sentences = [
        "The same scheduler that serves took every decision here, under a virtual clock; step durations and the "
        "workload are models. The same command gives the same numbers."
    ]
    if page.point["economy"]["kwh_per_million_output_tokens"] is not None:
        sentences.append(
            "Cost counts every GPU from the first arrival to the last token; energy takes the rated board power during "
            "steps and the idle power otherwise."
        )
    return " ".join(sentences)


VARIED_FLEET = {"replicas", "tensor_parallel", "pipeline_parallel", "data_parallel"}


def page(run: Run, settings: Settings, command: str) -> Page:
    """The page of one run."""
    given = {"ttft": settings.slo.ttft_ms, "tpot": settings.slo.tpot_ms}
    return Page(
        title=title(settings),
        lead=lead(run, settings),
        command=command,
        point=run.point,
        result=run.result,
        events=list(run.log or ()),
        kv_capacity_tokens=sum(pool["kv_tokens"] for pool in run.point["pools"]),
        slo_ms={name: value for name, value in given.items() if value is not None},
    )


def title(settings: Settings, sweeps: Sequence[Sweep] = ()) -> str:
    """What is served on what; what is swept goes unnamed."""
    swept = {sweep.path.partition(".")[0] for sweep in sweeps}
    if swept & {"model", "hardware"}:
        names = {"model": settings.model, "hardware": settings.hardware and device_words(settings.hardware)}
        return " on ".join(name for key, name in names.items() if name and key not in swept) or "A sweep"
    devices = [_devices(settings.of_pool(pool)) for pool in settings.pools.in_use.values()] or [_devices(settings)]
    if settings.model is None or None in devices:
        return "This machine"
    return f"{settings.model} on {' and '.join(dict.fromkeys(filter(None, devices)))}"


def _devices(settings: Settings) -> str | None:
    """Devices of one replica; None: they are those of a calibration."""
    devices = settings.parallelism.devices
    if settings.hardware is None:
        return None
    return f"{f'{devices} x ' if devices > 1 else ''}{device_words(settings.hardware)}"


def lead(run: Run, settings: Settings) -> str:
    """The run in two sentences."""
    summary = run.point["summary"]
    first = (
        f"{summary['num_requests']:,} requests in {number(summary['duration_s'])} s, {fleet(settings)}, "
        f"{shape_words(settings)}."
    )
    if summary["attainment"] is None:
        return f"{first} No objectives were set."
    asked = objectives(settings)
    wanted = f": {', '.join(asked)}" if asked else ""
    return f"{first} {percent(summary['attainment'])} met their objectives{wanted}."


def sweep_lead(settings: Settings, sweeps: Sequence[Sweep]) -> str:
    """What was varied, and what was not."""
    varied = " and ".join(f"{sweep.name} over {len(sweep.values)} values" for sweep in sweeps)
    paths = {sweep.path for sweep in sweeps}
    varies_fleet = paths & VARIED_FLEET or any(path.startswith("pools.") for path in paths)
    fixed = [] if varies_fleet else [fleet(settings)]
    fixed += [] if "shape" in paths else [shape_words(settings)]
    asked = [] if paths & {"slo.ttft_ms", "slo.tpot_ms"} else objectives(settings)
    sentence = f"{varied}, every point with the same seed".capitalize()
    return f"{'; '.join([sentence, *fixed])}." + (f" Objectives: {', '.join(asked)}." if asked else "")


def search_lead(settings: Settings, asked: str, found: Mapping[str, Any], *, is_complete: bool = True) -> str:
    """What was searched, and what was found. is_complete: see Found."""
    share = percent(found["config"]["attainment"])
    keep = f"{share} of the requests keep their objectives ({', '.join(objectives(settings))})"
    if asked == "goodput":
        answer = f"{rate(found['estimate'] or found['rate'])} requests/s" if found["rate"] else "no rate was found"
        if found["rate"] and not is_complete:
            answer = f"at least {rate(found['rate'])} requests/s"
        return f"The highest rate of {fleet(settings)}, {shape_words(settings)}, at which {keep}: {answer}."
    answer = "no fleet was found"
    if found["devices"]:
        devices, workers = found["devices"], workers_in_words(found["workers"])
        most = "" if is_complete else "at most "
        answer = f"{most}{devices:,} device{'s' if devices != 1 else ''}, workers: {workers}"
    return f"The smallest fleet, {shape_words(settings)}, on which {keep}: {answer}."


def objectives(settings: Settings) -> list[str]:
    """The objectives that requests have unless they name their own, in words."""
    pairs = (("first token", settings.slo.ttft_ms), ("each later one on average", settings.slo.tpot_ms))
    return [f"{words} within {value:g} ms" for words, value in pairs if value is not None]


def fleet(settings: Settings) -> str:
    """How many workers of what size."""
    pools = settings.pools
    if pools.in_use:
        *others, last = [f"{pool.replicas} {name}" for name, pool in pools.in_use.items()]
        workers = f"{' and '.join([*filter(None, [', '.join(others)]), last])} workers ({pools.link})"
    else:
        workers = f"{settings.replicas} worker{'s' if settings.replicas > 1 else ''}"
    sizes = {settings.of_pool(pool).parallelism.devices for pool in pools.in_use.values()} or {
        settings.parallelism.devices
    }
    if sizes == {1}:
        return workers
    return f"{workers} of {' or '.join(map(str, sorted(sizes)))} devices each"


def sweep_tables(names: Sequence[str], points: Sequence[Mapping[str, Any]], asked: str | None = None) -> list[Table]:
    """Tables of the points of a sweep: what came of them (asked: what was searched at each), what they cost, and what
    they were."""
    first = sweep_table(names, points) if asked is None else answer_table(asked, names, points)
    prices = price_table(names, points)
    return [first, *([] if prices is None else [prices]), subject_table(names, points)]


def sweep_table(names: Sequence[str], points: Sequence[Mapping[str, Any]]) -> Table:
    """One row per point of a sweep: the swept values, then what came of them."""
    columns = ("attainment", "goodput", "requests/s", "tokens/s", "TTFT p99", "TPOT p99", "failed", "$/M")
    rows = []
    for point in points:
        summary = point["summary"]
        rows.append(
            (
                *_values(names, point),
                percent(summary["attainment"]),
                number(summary["goodput_rps"], 2),
                number(summary["throughput_rps"], 2),
                number(summary["output_tokens_per_s"], 0),
                *(milliseconds(summary[key]["p99"]) for key in ("ttft_ms", "tpot_ms")),
                f"{summary['num_failed']:,}",
                number(point["economy"]["usd_per_million_output_tokens"], 2),
            )
        )
    title = "Points: ms, $ per million output tokens"
    return Table(title, (*names, *columns), tuple(rows))


def answer_table(asked: str, names: Sequence[str], points: Sequence[Mapping[str, Any]]) -> Table:
    """The answer of a search at every point of a sweep, and what came of the run there."""
    columns = {"goodput": ("goodput", "per device", "held"), "devices": ("fewest devices", "workers")}[asked]
    rows = []
    for point in points:
        found, summary = point[asked], point["summary"]
        if asked == "goodput":
            most = found["estimate"] or found["rate"]
            each = None if most is None else most / point["fleet"]["devices"]
            at_least = ">= " if most is not None and not found["is_bracketed"] else ""
            answers = [at_least + rate(most), rate(each), rate(found["rate"])]
        else:
            answers = [number(found["devices"], 0), workers_in_words(found["workers"])]
        rows.append(
            (
                *_values(names, point),
                *answers,
                percent(summary["attainment"]),
                *(milliseconds(summary[key]["p99"]) for key in ("ttft_ms", "tpot_ms")),
                number(summary["output_tokens_per_s"], 0),
                number(point["economy"]["usd_per_million_output_tokens"], 2),
                f"{found['num_probes']:,}",
            )
        )
    share = percent(points[0][asked]["config"]["attainment"])
    title = f"Answers: {share} in time; ms, $ per million output tokens, tokens/s of the run at the answer"
    return Table(title, (*names, *columns, "in time", "TTFT p99", "TPOT p99", "tokens/s", "$/M", "runs"), tuple(rows))


def fleet_search_tables(found: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> list[Table]:
    """The runs of a search for the fewest devices, and its answer."""
    rows = [
        (
            f"{run['devices']:,}",
            workers_in_words(run["workers"]),
            f"{run['judged']:,}",
            percent(run["attainment"]),
            *(milliseconds(run["summary"][key]["p99"]) for key in ("ttft_ms", "tpot_ms")),
            percent(run["summary"]["utilization"]["idle"]),
        )
        for run in runs
    ]
    columns = ("devices", "workers", "requests", "in time", "TTFT p99", "TPOT p99", "idle")
    share = percent(found["config"]["attainment"])
    answers = (
        (f"fewest devices, {share} in time", number(found["devices"], 0) if found["devices"] else "no fleet was found"),
        ("workers", workers_in_words(found["workers"])),
        ("in time", percent(found["attainment"])),
        ("runs", f"{found['num_probes']:,}"),
    )
    return [Table("Runs, ms", columns, tuple(rows)), Table("Fewest devices", ("", "value"), answers)]


def workers_in_words(workers: Mapping[str, int] | None) -> str:
    """``3``, or ``2 prefill, 4 decode`` of pools; a dash where there are none."""
    if workers is None:
        return "-"
    if "replicas" in workers:
        return f"{workers['replicas']:,}"
    return ", ".join(f"{count:,} {role}" for role, count in workers.items())


def price_table(names: Sequence[str], points: Sequence[Mapping[str, Any]]) -> Table | None:
    """What every point of a sweep costs; None where no price is known."""
    if all(point["economy"]["usd"] is None for point in points):
        return None
    columns = ("devices", "device hours", "per request", "per M tokens", "per M prompt", "per M output")
    rows = [
        (
            *_values(names, point),
            f"{point['fleet']['devices']:,}",
            number(point["economy"]["gpu_hours"], 3),
            *(dollars(point["economy"][key]) for key, _ in PRICES),
        )
        for point in points
    ]
    return Table("Price: M are millions of tokens", (*names, *columns), tuple(rows))


def subject_table(names: Sequence[str], points: Sequence[Mapping[str, Any]]) -> Table:
    """What every point of a sweep simulated. The last column is the number of its cost model (``cost_notes``)."""
    columns = ("devices", "KV tokens", "rate/s", "gaps cv", "prompt", "output", "shared", "durations")
    models = _cost_models(points)
    rows = []
    for point in points:
        fleet, workload = point["fleet"], point["workload"]
        rows.append(
            (
                *_values(names, point),
                f"{fleet['devices']:,}",
                number(fleet["kv_cache_tokens"], 0),
                rate(workload["rate_rps"]),
                number(workload["gap_cv"], 2),
                *(lengths(workload[f"{kind}_tokens"]) for kind in ("prompt", "output")),
                percent(workload["shared_token_share"]),
                f"[{models.index(_cost_model(point)) + 1}]",
            )
        )
    title = "Simulated: KV tokens of all devices; lengths mean/p50/p99; share of prompt tokens that came before"
    return Table(title, (*names, *columns), tuple(rows))


def simulated_table(point: Mapping[str, Any]) -> Table:
    """What a single run simulated: the workload and the fleet."""
    workload, fleet = point["workload"], point["fleet"]
    replicas = fleet["replicas"]
    device = f" x {' and '.join(fleet['hardware'])}" if fleet["hardware"] else ""
    rows = [
        ("arrivals", with_unit(workload["rate_rps"], 2, "requests/s")),
        ("variation of the gaps between them", number(workload["gap_cv"], 2)),
        ("prompt tokens, mean/p50/p99", lengths(workload["prompt_tokens"])),
        ("output tokens, mean/p50/p99", lengths(workload["output_tokens"])),
        ("prompt tokens that came before", percent(workload["shared_token_share"])),
        ("devices", f"{fleet['devices']:,}{device} ({replicas:,} replica{'s' if replicas != 1 else ''})"),
        ("KV cache", with_unit(fleet["kv_cache_tokens"], 0, "tokens")),
    ]
    return Table("Simulated", ("", "value"), tuple(rows))


MISS_CAUSES = {
    "new": "text that was not sent before",
    "differs": "text behind a change, sent before",
    "repeated": "text of other prompts",
    "block_rounding": "rest of a block, or the last token",
    "evicted": "was cached, and evicted",
    "worker_lost": "was cached on a worker that was lost",
    "routed_elsewhere": "is cached on another worker",
    "other_salt": "was sent under another salt",
    "being_computed": "was being computed by another request",
    "not_kept": "was sent before, and not cached",
    "cache_not_read": "is cached, and was not read",
}


def misses_table(misses: Mapping[str, Any]) -> Table:
    """What the prefills of a run were spent on."""
    computed = misses["computed"]
    total = sum(computed.values())
    rows = [("found in a cache", f"{misses['cached_tokens']:,}", "")]
    rows += [(MISS_CAUSES[cause], f"{tokens:,}", percent(tokens / total)) for cause, tokens in computed.items()]
    return Table("What prefills were spent on", ("", "tokens", "share"), tuple(rows))


def cost_notes(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences: what the durations of steps come from, and what of it was assumed; numbered for the points of a
    sweep."""
    models = _cost_models(points)
    if len(points) == 1:
        words, assumptions = models[0]
        return [f"Step durations: {words}", *(f"Assumed: {sentence}" for sentence in assumptions)]
    notes = [f"Step durations [{index}]: {words}" for index, (words, _) in enumerate(models, 1)]
    for sentence in dict.fromkeys(sentence for _, assumptions in models for sentence in assumptions):
        numbers = [str(index) for index, (_, assumptions) in enumerate(models, 1) if sentence in assumptions]
        notes.append(f"Assumed [{', '.join(numbers)}]: {sentence}")
    return notes


def lengths(tokens: Mapping[str, float | None]) -> str:
    """Mean, median and 99th percentile of a distribution of tokens."""
    return "/".join(number(tokens[name], 0) for name in ("mean", "p50", "p99"))


def _values(names: Sequence[str], point: Mapping[str, Any]) -> list[str]:
    return [str(point["values"][name]) for name in names]


def _cost_model(point: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    return point["cost_model"], tuple(point["assumptions"])


def _cost_models(points: Sequence[Mapping[str, Any]]) -> list[tuple[str, tuple[str, ...]]]:
    """Different ones, in the order in which they come."""
    return list(dict.fromkeys(map(_cost_model, points)))


STYLES = ("s-prefill", "s-decode", "s-mixed", "s-target", "s-whole", "s-stall")


def latency_charts(result: SimulationResult, slo_ms: Mapping[str, float]) -> list[Chart]:
    """Two charts of cumulative distributions: per token, and per request."""
    table = result.requests
    done = table.completed_rows()
    ttft = [table.ttft_ns(row) / NS_PER_MS for row in done]
    tpot = [value / NS_PER_MS for row in done if (value := table.tpot_ns(row)) is not None]
    e2e = [table.e2e_ns(row) / NS_PER_MS for row in done]
    lines = {
        "TTFT": cumulative(ttft),
        "E2E": cumulative(e2e),
        "TPOT": cumulative(tpot),
        "ITL": weighted_cumulative(result.gaps.weights, 1e-3),
    }
    captions = (
        "Share of requests that had their first token (TTFT) and their whole answer (E2E) within a time.",
        "Share of requests by their mean time per token (TPOT), and of all tokens by the gap before them (ITL).",
    )
    return charts.latency_charts(
        captions, lines, (_objective(slo_ms, "ttft", "s-prefill"), _objective(slo_ms, "tpot", "s-decode"))
    )


def _objective(slo_ms: Mapping[str, float], name: str, style: str) -> list[Rule]:
    return [Rule(slo_ms[name], f"{name.upper()} objective {slo_ms[name]:g} ms", style)] if name in slo_ms else []


def time_charts(result: SimulationResult, events: Sequence[LoggedEvent], kv_capacity_tokens: int) -> list[Chart]:
    """Requests in the system; with an event log also phases and the context held."""
    table, duration_ns = result.requests, result.duration_ns
    waits = ((table.arrival_ns[row], table.ttft_ns(row)) for row in table.completed_rows())
    drawn: list[Chart] = [
        in_system_chart(
            "Arrived and not yet ended: waiting, in prefill or in decode.", in_system(table, duration_ns), duration_ns
        ),
        waits_chart(
            "Time to first token",
            "By time of arrival: the median and the longest wait in each sixtieth of the run.",
            waits,
            duration_ns,
            num_bins=60,
        ),
    ]
    if not events:
        return drawn
    series = phase_series(events, duration_ns, len(result.workers))
    layers = [
        Layer("prefill", series.prefill, "s-prefill"),
        Layer("mixed", series.mixed, "s-mixed"),
        Layer("decode", series.decode, "s-decode"),
    ]
    spent = ", ".join(f"{layer.name} {percent(sum(layer.values) / len(layer.values))}" for layer in layers)
    phases = StackedChart(
        "Phases",
        "Share of the fleet's time in steps of prompts alone, of both, of decodes alone; the rest is idle or down.",
        f"On average {spent}.",
        layers,
        series.edges_s,
        "seconds",
    )
    return [*drawn, phases, _held(series.edges_s, series.context_tokens, kv_capacity_tokens, time_scale(duration_ns))]


def sweep_charts(names: Sequence[str], points: Sequence[Mapping[str, Any]], asked: str | None = None) -> list[Chart]:
    """Curves over the first swept value, one per value of the second. asked: what was searched at each point."""
    if asked is not None:
        chart = {
            "goodput": ("Goodput", "Highest rate that keeps the objectives, requests per second.", "estimate"),
            "devices": ("Fewest devices", "Devices of the smallest fleet that keeps the objectives.", "devices"),
        }[asked]
        caption = "$ per million output tokens, at the answer."
        return [
            _swept(chart[0], chart[1], names, points, (asked, chart[2])),
            _swept("Price", caption, names, points, ("economy", "usd_per_million_output_tokens")),
        ]
    if any(point["summary"]["attainment"] is not None for point in points):
        met = "that met their objectives."
        drawn = [
            _swept("Attainment", f"Share of requests {met}", names, points, ("summary", "attainment"), SHARES),
            _swept("Goodput", f"Requests per second {met}", names, points, ("summary", "goodput_rps")),
        ]
    else:
        drawn = [_swept("Throughput", "Requests answered per second.", names, points, ("summary", "throughput_rps"))]
    return [
        *drawn,
        _swept("TTFT p99, ms", "One in a hundred waits longer.", names, points, ("summary", "ttft_ms", "p99")),
        _swept("TPOT p99, ms", "One in a hundred is slower.", names, points, ("summary", "tpot_ms", "p99")),
    ]


def _held(edges: Sequence[float], tokens: Sequence[float], capacity: int, x: Scale) -> LineChart:
    most = max(tokens)
    note = f" The cache holds {capacity:,} tokens." if capacity else ""
    return LineChart(
        "KV use",
        f"Tokens that running requests attend to; a shared beginning counts for each of them.{note}",
        f"At most {number(most, 0)} tokens on average over a bin.",
        [Line("tokens", list(zip(edges, [*tokens, tokens[-1]], strict=True)), "s-decode-solid")],
        x,
        linear_scale([most], "tokens"),
    )


def _swept(
    title: str,
    caption: str,
    names: Sequence[str],
    points: Sequence[Mapping[str, Any]],
    key: tuple[str, ...],
    y: Scale | None = None,
) -> LineChart:
    x = _swept_scale(names[0], [point["values"][names[0]] for point in points])
    groups: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        value: Any = point
        for part in key:
            value = value[part]
        if value is None:
            continue
        others = ", ".join(f"{name} {point['values'][name]}" for name in names[1:])
        where = point["values"][names[0]]
        at = float(x.words.index(str(where))) if x.words else float(where)
        groups.setdefault(others or title, []).append((at, float(value)))
    lines = [
        Line(name, sorted(spots), style, markers=True)
        for (name, spots), style in zip(groups.items(), STYLES, strict=False)
    ]
    if len(groups) > len(lines):
        caption += f" The first {len(lines)} of {len(groups)} curves are drawn; all are in the table."
    y = y or linear_scale([height for line in lines for _, height in line.points], "")
    facts = "; ".join(f"{names[0]} {x.write(px)}: {py:.3g}" for px, py in (lines[0].points if lines else ()))
    return LineChart(title, caption, facts, lines, x, y)


def _swept_scale(name: str, values: Sequence[Any]) -> Scale:
    """Numbers by size; anything else side by side in the order of the sweep."""
    if all(isinstance(value, int | float) for value in values):
        return linear_scale(values, name, from_zero=min(values) < 0.35 * max(values))
    words = tuple(dict.fromkeys(map(str, values)))
    return Scale(-0.5, len(words) - 0.5, name, ticks=tuple(map(float, range(len(words)))), words=words)


@dataclass(frozen=True, slots=True)
class PhaseSeries:
    """Bins of equal width. Shares are of the fleet's time; ``context_tokens`` is a mean over the bin.

    context_tokens: what running requests attend to, a block that several share counted for each.
    """

    edges_s: list[float]
    prefill: list[float]
    mixed: list[float]
    decode: list[float]
    context_tokens: list[float]


@dataclass(slots=True)
class _Bins:
    width_ns: int
    count: int
    sums: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, start_ns: int, end_ns: int, weight: float = 1.0) -> None:
        """Spread [start, end) times ``weight`` over the bins."""
        row = self.sums.setdefault(name, [0.0] * self.count)
        index = min(self.count - 1, start_ns // self.width_ns)
        while start_ns < end_ns:
            border = (index + 1) * self.width_ns if index < self.count - 1 else end_ns
            stop = min(end_ns, border)
            row[index] += (stop - start_ns) * weight
            start_ns, index = stop, index + 1

    def shares(self, name: str, whole: float) -> list[float]:
        """Each bin's sum over ``whole``."""
        return [value / whole for value in self.sums.get(name, [0.0] * self.count)]


def step_context(step: StepFinished) -> float:
    """Tokens that the decodes of a step attend to; for a run of steps, in its middle."""
    return step.decode_context + step.num_decodes * (step.num_steps - 1) / 2


def phase_series(events: Iterable[LoggedEvent], duration_ns: int, num_workers: int, num_bins: int = 120) -> PhaseSeries:
    """Utilisation per phase and the context held, over the whole run."""
    width = max(1, -(-duration_ns // num_bins))
    bins = _Bins(width, num_bins)
    prompts: list[dict[str, int]] = [{} for _ in range(num_workers)]  # being prefilled: request -> tokens so far
    for worker, event in events:
        if worker < 0:  # the front end ends a request that its worker lost
            if isinstance(event, RequestFinished):
                for tokens in prompts:
                    tokens.pop(event.request_id, None)
        elif isinstance(event, StepFinished):
            bins.add(phase_of(event), event.start_ns, event.end_ns)
            held = step_context(event) + prefill_context(event, prompts[worker])
            bins.add("context", event.start_ns, event.end_ns, held)
        elif isinstance(event, FirstToken | RequestFinished | RequestPreempted):
            prompts[worker].pop(event.request_id, None)
        elif isinstance(event, RequestAdmitted) and event.is_first:
            prompts[worker][event.request_id] = event.num_cached_tokens
    whole = float(width * num_workers)
    return PhaseSeries(
        edges_s=[index * width / NS_PER_S for index in range(num_bins + 1)],
        prefill=bins.shares("prefill", whole),
        mixed=bins.shares("mixed", whole),
        decode=bins.shares("decode", whole),
        context_tokens=bins.shares("context", float(width)),
    )


def in_system(table: RequestTable, duration_ns: int) -> list[tuple[float, int]]:
    """(seconds, requests that have arrived and not ended) at equal distances."""
    ends = [table.arrival_ns[row] + table.e2e_ns(row) for row in range(len(table))]
    return count_over_time(table.arrival_ns, ends, duration_ns)
