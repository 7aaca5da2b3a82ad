"""The page of a measurement: what it says, in which order. report/pages.py lays it out."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from diptych.bench import bench_charts as charts
from diptych.bench import tables
from diptych.bench.interference import tables as _tables
from diptych.bench.option_grammar import slo
from diptych.bench.request_records import ClientRecord
from diptych.bench.stalls import Stall
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.report import pages
from diptych.report.charts import rate_charts
from diptych.report.pages import Report, Section
from diptych.report.text import headline, latency_table, milliseconds, number, percent

FOOT = (
    "Latencies count from when a request should have been sent. Intervals: Wilson's for shares, the circular block "
    "bootstrap for rates, both 95 %."
)


def render(data: Mapping[str, Any], records: Sequence[Sequence[ClientRecord]]) -> str:
    """The whole file as text. data: see measurement.py; records: of each run, in order."""
    sections = {"run": _run, "rates": _series, "find_goodput": _series, "interference": _interference}[data["mode"]]
    facts = {name: data[name] for name in ("server", "machine", "settings")}
    report = Report(
        maker="Diptych bench",
        title=data["server"]["model"],
        lead=" ".join([*tables.verdict(data), _lead(data)]),
        warnings=_warnings(data),
        cards=_cards(data),
        sections=sections(data, records),
        command=data["command"],
        details=("Server, machine and settings", json.dumps(facts, indent=2)),
        foot=FOOT,
    )
    return pages.render(report)


def _run(data: Mapping[str, Any], records: Sequence[Sequence[ClientRecord]]) -> list[Section]:
    summary = data["summary"]
    shown = [latency_table(summary, tables.STATISTICS), tables.service_table(summary), tables.client_table(summary)]
    if data["classes"]:
        shown.insert(1, tables.class_table(data["classes"]))
    if summary["errors"]:
        shown.append(tables.error_table(summary["errors"]))
    over_time = charts.time_charts(records[0], int(summary["duration_s"] * NS_PER_S))
    stalls = [Stall(**stall) for stall in data["stalls"]]
    return [
        Section(heading="Latency", charts=charts.latency_charts(records[0], _objectives(data))),
        Section(heading="Numbers", tables=shown),
        Section(heading="Over time", charts=over_time, tables=[tables.stall_table(stalls)] if stalls else []),
    ]


def _series(data: Mapping[str, Any], records: Sequence[Sequence[ClientRecord]]) -> list[Section]:
    goodput = data.get("goodput")
    target = goodput["config"]["attainment"] if goodput else None
    drawn = rate_charts(data["points"], target, goodput["estimate"] if goodput else None)
    return [Section(heading="Over the rate", charts=drawn, tables=tables.probe_tables(data["points"]))]


def _interference(data: Mapping[str, Any], records: Sequence[Sequence[ClientRecord]]) -> list[Section]:
    found = data["interference"]
    return [
        Section(heading="Gaps", charts=charts.gap_charts(found)),
        Section(heading="Numbers", tables=_tables(found)),
    ]


def _objectives(data: Mapping[str, Any]) -> dict[str, float]:
    return {name: value / NS_PER_MS for name, value in slo(data["settings"]["slo"]).items()}


def _lead(data: Mapping[str, Any]) -> str:
    """What was measured, where and when."""
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


def _warnings(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    problems = tables.problems(data)
    found = [("Not reliable", f"{'; '.join(problems)}.")] if problems else []
    return [*found, *([("Incomplete", f"{data['broken']}.")] if data.get("broken") else [])]


def _cards(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    if data["mode"] == "run":
        return headline(data["summary"], "ttft_ms", "tpot_ms", "itl_ms")
    if data["mode"] == "find_goodput":
        found = data["goodput"]
        return [
            ("Goodput, requests/s", number(found["estimate"], 2)),
            ("Surely above", number(found["low"], 2)),
            ("Surely below", number(found["high"], 2)),
            ("Asked for", percent(found["config"]["attainment"])),
        ]
    if data["mode"] == "interference":
        found = data["interference"]
        return [
            ("Gaps p99, during / before", number(found["factor"], 2)),
            ("Without the long prompt", number(found["control_factor"], 2)),
            ("Short TTFT, behind / alone", number(found["ttft_factor"], 2)),
            ("Long TTFT, ms", milliseconds(found["ttft_ms"]["long"])),
        ]
    return []
