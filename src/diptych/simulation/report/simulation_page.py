"""The page of a run or a sweep: what it says, in which order. report/pages.py lays it out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diptych.report import pages
from diptych.report.pages import Report, Section
from diptych.report.text import (
    class_table,
    headline,
    latency_table,
    number,
    percent,
    pool_table,
    resource_table,
    service_table,
    sweep_table,
)
from diptych.simulation.report import simulation_charts as charts
from diptych.simulation.report.series import LoggedEvent
from diptych.simulation.results import SimulationResult


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a page shows. ``point``: settings, cost_model, summary, classes and economy of the run (see sweep.py).

    result and events belong to that point. sweep: every point, under the swept ``names``; a page of a sweep has no
    result of its own and leaves the charts of a single run out.
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


def render(page: Page) -> str:
    """The whole file as text."""
    sections: list[Section] = []
    if page.sweep:
        drawn, table = charts.sweep_charts(page.sweep_names, page.sweep), sweep_table(page.sweep_names, page.sweep)
        sections.append(Section(heading="Over the sweep", charts=drawn, tables=[table]))
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
        cards=[] if page.sweep else _cards(page.point),
        sections=sections,
        notes=[f"Step durations: {page.point['cost_model']}."],
        command=page.command,
        details=("All settings", json.dumps(page.point["settings"], indent=2)),
        foot=_foot(page),
    )
    return pages.render(report)


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
        narrow=[service_table(summary, point["economy"]), resource_table(summary)],
    )


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
