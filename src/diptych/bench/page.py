"""The page of a measurement: one self-contained HTML file without scripts and without a request to anywhere.

Owns the order of the page and the words around the figures. Everything that comes from settings is escaped here.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from diptych.bench import bench_charts as charts
from diptych.bench import tables
from diptych.bench.interference import tables as _tables
from diptych.bench.option_grammar import slo
from diptych.bench.request_records import ClientRecord
from diptych.bench.stalls import Stall
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.report.elements import card_list, chart_grid, heading, html_table, page_head
from diptych.report.text import milliseconds, number, percent


def render(data: Mapping[str, Any], records: Sequence[Sequence[ClientRecord]]) -> str:
    """The whole file as text. data: see outcome.py; records: of each run, in order."""
    body = {"run": _run, "rates": _series, "find_goodput": _series, "interference": _interference}[data["mode"]]
    return "".join([_head(data), "<main>", body(data, records), _how(data), "</main>", _foot()])


def _run(data: Mapping[str, Any], records: Sequence[Sequence[ClientRecord]]) -> str:
    summary = data["summary"]
    parts = [heading("Latency"), chart_grid(charts.latency_figures(records[0], _objectives(data)))]
    shown = [tables.latency_table(summary), tables.service_table(summary), tables.client_table(summary)]
    if data["classes"]:
        shown.insert(1, tables.class_table(data["classes"]))
    if summary["errors"]:
        shown.append(tables.error_table(summary["errors"]))
    parts += [heading("Numbers"), *map(html_table, shown)]
    duration_ns = int(summary["duration_s"] * NS_PER_S)
    parts += [heading("Over time"), chart_grid(charts.time_figures(records[0], duration_ns))]
    if data["stalls"]:
        parts.append(html_table(tables.stall_table([Stall(**stall) for stall in data["stalls"]])))
    return "".join(parts)


def _series(data: Mapping[str, Any], records: Sequence[Sequence[ClientRecord]]) -> str:
    goodput = data.get("goodput")
    target = goodput["config"]["attainment"] if goodput else None
    figures = charts.rate_figures(data["points"], target, goodput["estimate"] if goodput else None)
    return (
        heading("Over the rate") + chart_grid(figures) + "".join(map(html_table, tables.probe_tables(data["points"])))
    )


def _interference(data: Mapping[str, Any], records: Sequence[Sequence[ClientRecord]]) -> str:
    found = data["interference"]
    figures = charts.gap_figures(found)
    return heading("Gaps") + chart_grid(figures) + heading("Numbers") + "".join(map(html_table, _tables(found)))


def _objectives(data: Mapping[str, Any]) -> dict[str, float]:
    return {name: value / NS_PER_MS for name, value in slo(data["settings"]["slo"]).items()}


def _head(data: Mapping[str, Any]) -> str:
    below = _warning(data) + card_list(_cards(data))
    return page_head("Diptych bench", data["server"]["model"], _lead(data), below)


def _lead(data: Mapping[str, Any]) -> str:
    where = f"{data['settings']['target']['url']}, measured from {data['machine']['cpu']}, {data['when']}."
    asked = data["settings"]["slo"]
    objectives = f" Objectives: {asked}." if asked else ""
    if data["mode"] == "run":
        summary = data["summary"]
        early = "" if summary["ended"] == "done" else f" The run ended early ({summary['ended']})."
        return (
            f"{summary['num_requests']:,} requests in {number(summary['duration_s'])} s at {where}{objectives}{early}"
        )
    if data["mode"] == "interference":
        config = data["interference"]["config"]
        return f"{config['streams']} streams and a prompt of {config['long_tokens']:,} tokens at {where}"
    count = len(data["points"])
    return f"{count} {'runs' if count != 1 else 'run'} at {where}{objectives}"


def _warning(data: Mapping[str, Any]) -> str:
    problems = tables.problems(data)
    parts = [f"<p><strong>Not reliable:</strong> {escape('; '.join(problems))}.</p>"] if problems else []
    parts += [f"<p><strong>Incomplete:</strong> {escape(data['broken'])}.</p>"] if data.get("broken") else []
    return "".join(parts)


def _cards(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    cards: list[tuple[str, str]] = []
    if data["mode"] == "run":
        summary = data["summary"]
        if summary["attainment"] is not None:
            cards.append(("Attainment", percent(summary["attainment"])))
            cards.append(("Goodput, requests/s", number(summary["goodput_rps"], 2)))
        cards += [
            ("TTFT p99, ms", milliseconds(summary["ttft_ms"]["p99"])),
            ("TPOT p99, ms", milliseconds(summary["tpot_ms"]["p99"])),
            ("ITL p99, ms", milliseconds(summary["itl_ms"]["p99"])),
            ("Output, tokens/s", number(summary["output_tokens_per_s"], 0)),
        ]
    elif data["mode"] == "find_goodput":
        found = data["goodput"]
        cards += [
            ("Goodput, requests/s", number(found["estimate"], 2)),
            ("Surely above", number(found["low"], 2)),
            ("Surely below", number(found["high"], 2)),
            ("Asked for", percent(found["config"]["attainment"])),
        ]
    elif data["mode"] == "interference":
        found = data["interference"]
        cards += [
            ("Gaps p99, during / before", number(found["factor"], 2)),
            ("Without the long prompt", number(found["control_factor"], 2)),
            ("Short TTFT, behind / alone", number(found["ttft_factor"], 2)),
            ("Long TTFT, ms", milliseconds(found["ttft_ms"]["long"])),
        ]
    return cards


def _how(data: Mapping[str, Any]) -> str:
    facts = {name: data[name] for name in ("server", "machine", "settings")}
    return (
        f"{heading('How this was made')}<pre>{escape(data['command'])}</pre>"
        f"<details><summary>Server, machine and settings</summary><pre>{escape(json.dumps(facts, indent=2))}</pre>"
        "</details>"
    )


def _foot() -> str:
    words = (
        "Latencies count from when a request should have been sent. Intervals: Wilson's for shares, the circular block "
        "bootstrap for rates, both 95 %."
    )
    return f"<footer><p>{words}</p></footer></body></html>\n"
