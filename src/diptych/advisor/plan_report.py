"""A plan as plain data, as tables and as a page: the best layout of each shape, what it gives and costs, and how the
best fares as the rate grows.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from diptych.advisor.plan_search import CapacityPlan, MeasuredLayout, PlanQuestion, TriedLayout
from diptych.report import pages
from diptych.report.charts import rate_charts
from diptych.report.pages import Report, Section
from diptych.report.text import Table, dollars, latency_table, milliseconds, number, percent, pool_table, rate
from diptych.simulation.report.simulation_report import cost_notes, objectives, simulated_table


def render(plan: CapacityPlan, data: Mapping[str, Any], question: PlanQuestion, command: str) -> str:
    """The whole file as text. data: see plain_plan."""
    best, wanted = plan.fleets[0], question.options.search.attainment
    sections = [
        Section(heading="Shapes", tables=plan_tables(data, wanted)),
        Section(
            heading="The best",
            tables=[latency_table(best.point["summary"]), pool_table(best.point["pools"])],
            narrow=[simulated_table(best.point)],
        ),
        *(
            Section(heading=str(fleet.layout), charts=rate_charts(fleet.runs, wanted, fleet.highest_rate_rps))
            for fleet in plan.fleets
        ),
    ]
    points = [best.point]
    report = Report(
        maker="Diptych plan",
        title=f"{question.base.model}: {best.layout}",
        lead=plan_lead(data["best"], question),
        cards=_cards(data["best"]),
        sections=sections,
        notes=[f"{note}." for note in [start_words(data), *plan_notes(data), *cost_notes(points)]],
        command=command,
        details=("Settings of the best", json.dumps(best.point["settings"], indent=2)),
        foot="The scheduler and the router that serve took every decision here, under a virtual clock; step durations "
        "and the workload are models. The same command gives the same numbers. Power is the rated board power.",
    )
    return pages.render(report)


def plan_lead(best: Mapping[str, Any], question: PlanQuestion) -> str:
    """What the best gives. best: of plain_plan."""
    wanted = ", ".join(objectives(question.base)) or "those of the workload"
    share = percent(question.options.search.attainment)
    return (
        f"At {rate(best['rate_rps'])} requests/s {percent(best['attainment'])} of the requests keep their objectives "
        f"({wanted}); {share} do up to {rate(best['highest_rate_rps'])} requests/s."
    )


def _cards(best: Mapping[str, Any]) -> list[tuple[str, str]]:
    cards = [
        ("In time", percent(best["attainment"])),
        ("Goodput, requests/s", rate(best["goodput_rps"])),
        ("Highest rate, requests/s", rate(best["highest_rate_rps"])),
        ("Devices", number(best["devices"], 0)),
    ]
    if best["usd_per_million_tokens"] is not None:
        cards += [
            ("Per hour", dollars(best["usd_per_hour"])),
            ("Per million tokens", dollars(best["usd_per_million_tokens"])),
        ]
    return cards


MOST_TRIED = 12  # rows for layouts of a search that is not over


def plain_plan(plan: CapacityPlan, commands: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """What ``--json`` prints. commands: of each fleet of the plan, under ``command`` and ``simulate_command``."""
    shapes = [{**plain_fleet(fleet), **command} for fleet, command in zip(plan.fleets, commands, strict=True)]
    twice = plan.twice
    return {
        "best": shapes[0],
        "shapes": shapes,
        "twice_the_rate": None
        if twice is None
        else {
            "layout": str(twice),
            "groups": twice.plain(),
            "devices": twice.num_devices,
            "usd_per_hour": twice.usd_per_hour or None,
        },
        "refused": dict(plan.refused),
        "num_layouts": plan.num_layouts,
        "num_runs": plan.num_runs,
    }


def plain_fleet(fleet: MeasuredLayout) -> dict[str, Any]:
    """Plain figures of one fleet; those of money are None where no price is known. All but ``highest_rate_rps`` are
    those of the run at the asked rate."""
    summary, economy = fleet.point["summary"], fleet.point["economy"]
    return {
        "shape": fleet.layout.shape,
        "layout": str(fleet.layout),
        "groups": fleet.layout.plain(),
        "devices": fleet.layout.num_devices,
        "attainment": fleet.attainment,
        "goodput_rps": summary["goodput_rps"],
        "highest_rate_rps": fleet.highest_rate_rps,
        "rate_rps": fleet.point["workload"]["rate_rps"],
        "ttft_p99_ms": summary["ttft_ms"]["p99"],
        "tpot_p99_ms": summary["tpot_ms"]["p99"],
        "usd_per_hour": fleet.layout.usd_per_hour or None,
        "usd_per_million_tokens": economy["usd_per_million_tokens"],
        "usd_per_million_output_tokens": economy["usd_per_million_output_tokens"],
        "rated_kilowatts": fleet.layout.kilowatts,
        "kwh_per_million_tokens": _kwh_per_million(summary, economy),
        "cost_model": fleet.point["cost_model"],
        "assumptions": fleet.point["assumptions"],
    }


def start_words(data: Mapping[str, Any]) -> str:
    """The launch command."""
    return f"Start the best: {data['best']['command']}"


def plan_tables(data: Mapping[str, Any], attainment: float) -> list[Table]:
    """One row for each shape, the best first: what it gives, and what it costs. attainment: the share that the highest
    rate keeps."""
    shapes = data["shapes"]
    given = tuple(
        (
            fleet["layout"],
            percent(fleet["attainment"]),
            rate(fleet["goodput_rps"]),
            rate(fleet["highest_rate_rps"]),
            milliseconds(fleet["ttft_p99_ms"]),
            milliseconds(fleet["tpot_p99_ms"]),
        )
        for fleet in shapes
    )
    spent = tuple(
        (
            fleet["layout"],
            f"{fleet['devices']:,}",
            number(fleet["rated_kilowatts"], 1),
            number(fleet["usd_per_hour"], 2),
            dollars(fleet["usd_per_million_tokens"]),
            dollars(fleet["usd_per_million_output_tokens"]),
            number(fleet["kwh_per_million_tokens"], 3),
        )
        for fleet in shapes
    )
    columns = ("layout", "in time", "goodput", "highest rate", "TTFT p99", "TPOT p99")
    costs = ("layout", "devices", "kW", "$/h", "$/M", "$/M output", "kWh/M")
    title = f"Plan: requests/s, ms; highest rate: {percent(attainment)} in time"
    return [Table(title, columns, given), Table("Cost at the rate: M are millions of tokens", costs, spent)]


def plain_tried(tried: Sequence[TriedLayout]) -> list[dict[str, Any]]:
    """Plain fields of the layouts of a search that is not over."""
    return [
        {
            "layout": str(fleet.layout),
            "devices": fleet.layout.num_devices,
            "usd_per_hour": fleet.layout.usd_per_hour or None,
            "highest_kept_rps": fleet.highest_kept_rps,
        }
        for fleet in tried
    ]


def tried_table(tried: Sequence[Mapping[str, Any]]) -> Table:
    """The first of them."""
    rows = tuple(
        (
            fleet["layout"],
            f"{fleet['devices']:,}",
            number(fleet["usd_per_hour"], 2),
            "-" if fleet["highest_kept_rps"] is None else rate(fleet["highest_kept_rps"]),
        )
        for fleet in tried[:MOST_TRIED]
    )
    return Table("Layouts so far, the most for their cost first", ("layout", "devices", "$/h", "kept requests/s"), rows)


def plan_notes(data: Mapping[str, Any]) -> list[str]:
    """Sentences under the table: twice the rate, what was not possible."""
    notes = []
    twice = data["twice_the_rate"]
    if twice is not None:
        price = "" if twice["usd_per_hour"] is None else f", ${twice['usd_per_hour']:,.2f} an hour"
        notes.append(f"Twice the rate: {twice['layout']} ({twice['devices']:,} devices{price})")
    notes += [f"Not possible: {layout}: {reason}" for layout, reason in data["refused"].items()]
    notes.append(f"{data['num_runs']:,} simulations of {data['num_layouts']:,} layouts")
    return notes


def _kwh_per_million(summary: Mapping[str, Any], economy: Mapping[str, Any]) -> float | None:
    tokens = (summary["prompt_tokens"] + summary["output_tokens"]) / 1e6
    return economy["kwh"] / tokens if economy["kwh"] is not None and tokens else None
