"""The page of a run: one self-contained HTML file without scripts and without a request to anywhere.

Owns the order of the page and the words around the figures. Everything that comes from settings is escaped here.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from diptych.report.elements import card_list, chart_grid, heading, html_table, page_head
from diptych.report.text import (
    class_table,
    latency_table,
    milliseconds,
    number,
    percent,
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
    cards = [] if page.sweep else _cards(page.point)
    parts = [page_head("Diptych simulation", page.title, page.lead, card_list(cards)), "<main>"]
    if page.sweep:
        figures = charts.sweep_figures(page.sweep_names, page.sweep)
        parts += [heading("Over the sweep"), chart_grid(figures), html_table(sweep_table(page.sweep_names, page.sweep))]
    if page.result is not None:
        parts += [heading("Latency"), chart_grid(charts.latency_figures(page.result, page.slo_ms))]
        parts += [_numbers(page.point)]
        parts += [
            heading("Over time"),
            chart_grid(charts.time_figures(page.result, page.events, page.kv_capacity_tokens)),
        ]
    parts += [_how(page), "</main>", _foot(page)]
    return "".join(parts)


def _cards(point: Mapping[str, Any]) -> list[tuple[str, str]]:
    summary = point["summary"]
    cards = []
    if summary["attainment"] is not None:
        cards.append(("Attainment", percent(summary["attainment"])))
        cards.append(("Goodput, requests/s", number(summary["goodput_rps"], 2)))
    cards += [
        ("TTFT p99, ms", milliseconds(summary["ttft_ms"]["p99"])),
        ("TPOT p99, ms", milliseconds(summary["tpot_ms"]["p99"])),
        ("Output, tokens/s", number(summary["output_tokens_per_s"], 0)),
    ]
    cost = point["economy"]["usd_per_million_output_tokens"]
    if cost is not None:
        cards.append(("Per 1M output tokens", f"${number(cost, 2)}"))
    if len(cards) % 2:
        cards.append(("KV cache, peak", percent(summary["utilization"]["kv_peak"])))
    return cards


def _numbers(point: Mapping[str, Any]) -> str:
    summary = point["summary"]
    tables = [latency_table(summary)]
    if len(point["classes"]) > 1:
        tables.append(class_table(point["classes"]))
    pair = [service_table(summary, point["economy"]), resource_table(summary)]
    wide = "".join(html_table(table) for table in tables)
    narrow = "".join(html_table(table) for table in pair)
    return f'{heading("Numbers")}{wide}<div class="grid2">{narrow}</div>'


def _how(page: Page) -> str:
    settings = escape(json.dumps(page.point["settings"], indent=2))
    command = re.sub(r"(--[a-z-]+)", r'<span class="word">\1</span>', escape(page.command))
    return (
        f"{heading('How this was made')}<p>Step durations: {escape(page.point['cost_model'])}.</p>"
        f"<pre>{command}</pre>"
        f"<details><summary>All settings</summary><pre>{settings}</pre></details>"
    )


def _foot(page: Page) -> str:
    words = [
        "The same scheduler that serves took every decision here, under a virtual clock; step durations and the "
        "workload are models. The same command gives the same numbers."
    ]
    if page.point["economy"]["kwh_per_million_output_tokens"] is not None:
        words.append(
            "Cost counts every GPU from the first arrival to the last token; energy takes the rated board power during "
            "steps and the idle power otherwise."
        )
    return f"<footer><p>{escape(' '.join(words))}</p></footer></body></html>\n"
