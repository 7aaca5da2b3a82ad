"""The page of a measurement: one self-contained HTML file without scripts and without a request to anywhere.

Owns the order of the page and the words around the figures. Everything that comes from settings is escaped here.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from diptych.bench import charts, tables
from diptych.bench.interference import tables as interference_tables
from diptych.bench.records import RequestRecord
from diptych.bench.stalls import Stall
from diptych.bench.words import slo
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.simulation.report.elements import chart_grid, heading, html_table
from diptych.simulation.report.html import LOGO
from diptych.simulation.report.plots import patterns
from diptych.simulation.report.style import STYLE
from diptych.simulation.report.text import milliseconds, number, percent


def render(data: Mapping[str, Any], records: Sequence[Sequence[RequestRecord]]) -> str:
    """The whole file as text. data: see outcome.py; records: of each run, in order."""
    body = {"run": _run, "rates": _series, "find_goodput": _series, "interference": _interference}[data["mode"]]
    return "".join([_head(data), "<main>", body(data, records), _how(data), "</main>", _foot()])


def _run(data: Mapping[str, Any], records: Sequence[Sequence[RequestRecord]]) -> str:
    summary = data["summary"]
    parts = [heading("Latency"), chart_grid(charts.latency_figures(records[0], _objectives(data)))]
    shown = [tables.latency_table(summary), tables.service_table(summary), tables.client_table(summary)]
    if data["classes"]:
        shown.insert(1, tables.class_table(data["classes"]))
    parts += [heading("Numbers"), *map(html_table, shown)]
    duration_ns = int(summary["duration_s"] * NS_PER_S)
    parts += [heading("Over time"), chart_grid(charts.time_figures(records[0], duration_ns))]
    if data["stalls"]:
        parts.append(html_table(tables.stall_table([Stall(**stall) for stall in data["stalls"]])))
    return "".join(parts)


def _series(data: Mapping[str, Any], records: Sequence[Sequence[RequestRecord]]) -> str:
    goodput = data.get("goodput")
    target = goodput["config"]["attainment"] if goodput else None
    figures = charts.rate_figures(data["points"], target, goodput["estimate"] if goodput else None)
    return heading("Over the rate") + chart_grid(figures) + html_table(tables.probe_table(data["points"]))


def _interference(data: Mapping[str, Any], records: Sequence[Sequence[RequestRecord]]) -> str:
    return heading("Numbers") + "".join(map(html_table, interference_tables(data["interference"])))


def _objectives(data: Mapping[str, Any]) -> dict[str, float]:
    asked = slo(data["settings"]["slo"])
    pairs = (("ttft", asked.ttft_ns), ("tpot", asked.tpot_ns))
    return {name: value / NS_PER_MS for name, value in pairs if value is not None}


def _head(data: Mapping[str, Any]) -> str:
    title = escape(data["server"]["model"])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{title} - Diptych</title><style>{STYLE}</style></head><body>{patterns()}"
        f'<header><div class="mark">{LOGO}<span>Diptych bench</span></div><h1>{title}</h1>'
        f'<p class="lead">{escape(_lead(data))}</p>{_warning(data)}{_cards(data)}</header>'
    )


def _lead(data: Mapping[str, Any]) -> str:
    where = f"{data['settings']['target']['url']}, measured from {data['machine']['cpu']}, {data['when']}."
    asked = data["settings"]["slo"]
    objectives = f" Objectives: {asked}." if asked else ""
    if data["mode"] == "run":
        summary = data["summary"]
        return f"{summary['num_requests']:,} requests in {number(summary['duration_s'])} s at {where}{objectives}"
    if data["mode"] == "interference":
        config = data["interference"]["config"]
        return f"{config['streams']} streams and a prompt of {config['long_tokens']:,} tokens at {where}"
    return f"{len(data['points'])} runs at {where}{objectives}"


def _problems(data: Mapping[str, Any]) -> list[str]:
    summaries = [point["summary"] for point in data.get("points", ())]
    summaries += [data["summary"]] if "summary" in data else []
    return list(dict.fromkeys(problem for summary in summaries for problem in summary["client"]["problems"]))


def _warning(data: Mapping[str, Any]) -> str:
    problems = _problems(data)
    return f"<p><strong>Not reliable:</strong> {escape('; '.join(problems))}.</p>" if problems else ""


def _cards(data: Mapping[str, Any]) -> str:
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
    drawn = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in cards)
    return f'<dl class="cards">{drawn}</dl>' if cards else ""


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
