"""The page of a run or a sweep: what it says, in which order. report/pages.py lays it out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diptych.report import pages
from diptych.report.charts import rate_charts
from diptych.report.pages import Report, Section
from diptych.report.text import (
    Table,
    class_table,
    goodput_table,
    headline,
    latency_table,
    number,
    percent,
    pool_table,
    rate,
    resource_table,
    runs_table,
    service_table,
)
from diptych.simulation.report import simulation_charts as charts
from diptych.simulation.report.series import LoggedEvent
from diptych.simulation.report.simulation_tables import (
    cost_notes,
    fleet_search_tables,
    misses_table,
    simulated_table,
    sweep_tables,
    workers_in_words,
)
from diptych.simulation.results import SimulationResult


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
        drawn = charts.sweep_charts(page.sweep_names, page.sweep, page.asked)
        tables = sweep_tables(page.sweep_names, page.sweep, page.asked)
        sections.append(Section(heading="Over the sweep", charts=drawn, tables=tables))
    if page.search is not None:
        sections.append(_search(page.search))
    if page.result is not None:
        over_time = charts.time_charts(page.result, page.events, page.kv_capacity_tokens)
        sections += [
            Section(heading="Latency", charts=charts.latency_charts(page.result, page.slo_ms)),
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
