"""A plan as plain data, as tables and as a page: the best layout of each shape, what it gives and costs, and how the
best fares as the rate grows.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diptych.advisor.device_layout import FleetLayout
from diptych.advisor.layout_preference import TIE
from diptych.advisor.plan_search import CapacityPlan, MeasuredLayout, PlanQuestion, TriedLayout
from diptych.report import pages
from diptych.report.charts import rate_charts
from diptych.report.pages import Report, Section
from diptych.report.statistics import CONFIDENCE, wilson
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
        lead=plan_lead(data, question),
        cards=_cards(data["best"]),
        sections=sections,
        notes=[
            f"{note}."
            for note in [*([start_words(data)] if plan.keeps else []), *plan_notes(data, wanted), *cost_notes(points)]
        ],
        command=command,
        details=("Settings of the best", json.dumps(best.point["settings"], indent=2)),
        foot="The scheduler and the router that serve took every decision here, under a virtual clock; step durations "
        "and the workload are models. The same command gives the same numbers. Power is the rated board power.",
    )
    return pages.render(report)


def plan_lead(data: Mapping[str, Any], question: PlanQuestion) -> str:
    """What the best gives, or that none keeps the objectives. data: of plain_plan."""
    best = data["best"]
    wanted = ", ".join(objectives(question.base)) or "those of the workload"
    share = percent(question.options.search.attainment)
    if not data["keeps_objectives"]:
        highest = best["highest_rate_rps"]
        most = "no rate that was tried" if highest is None else f"up to {rate(highest)} requests/s"
        return (
            f"No fleet that is allowed keeps the objectives ({wanted}) of {share} of the requests at "
            f"{rate(best['rate_rps'])} requests/s: the nearest, {best['layout']}, keeps {percent(best['attainment'])}, "
            f"and the wanted share at {most}"
        )
    return (
        f"{best['layout']}. At {rate(best['rate_rps'])} requests/s {percent(best['attainment'])} of the requests keep "
        f"their objectives ({wanted}); {share} do up to {rate(best['highest_rate_rps'])} requests/s."
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


def plain_plan(plan: CapacityPlan, commands: Callable[[MeasuredLayout], Mapping[str, str]]) -> dict[str, Any]:
    """What ``--json`` prints. commands: of a fleet, under ``command`` and ``simulate_command``."""
    shapes = [{**plain_fleet(fleet), **commands(fleet)} for fleet in plan.fleets]
    ties = {str(fleet.layout) for fleet in plan.ties}
    for shape in shapes:
        shape["is_tie"] = shape["layout"] in ties
    return {
        "best": shapes[0],
        "keeps_objectives": plan.keeps,
        "shapes": shapes,
        "devices": {name: {**plain_fleet(fleet), **commands(fleet)} for name, fleet in plan.by_device.items()},
        "twice_the_rate": _plain_layout(plan.twice),
        "enough": _plain_layout(plan.enough),
        "refused": dict(plan.refused),
        "left_out": dict(plan.left_out),
        "num_layouts": plan.num_layouts,
        "num_runs": plan.num_runs,
        "compared_requests": min(
            run["workload"]["num_requests"] for fleet in plan.fleets for run in fleet.runs if run["length"] != "sorting"
        ),
    }


def _plain_layout(layout: FleetLayout | None) -> dict[str, Any] | None:
    if layout is None:
        return None
    return {
        "layout": str(layout),
        "groups": layout.plain(),
        "devices": layout.num_devices,
        "usd_per_hour": layout.usd_per_hour or None,
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
        "simulated_requests": fleet.point["workload"]["num_requests"],
        "attainment_interval": list(fleet.point["attainment_interval"]),
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
    """The launch command, on lines of its own where it is several."""
    command = data["best"]["command"]
    return f"Start the best:{chr(10) if chr(10) in command else ' '}{command}"


def plan_tables(data: Mapping[str, Any], attainment: float) -> list[Table]:
    """One row for each shape, the best first: what it gives, and what it costs; and one for each device where there
    are several. attainment: the share that the highest rate keeps."""
    shapes = data["shapes"]
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
    verdicts = [
        "best" if data["keeps_objectives"] else "nearest",
        *("tie" if row["is_tie"] else "" for row in shapes[1:]),
    ]
    given = tuple((*_given(fleet), verdict) for fleet, verdict in zip(shapes, verdicts, strict=True))
    tables = [Table(title, (*columns, ""), given), Table("Cost at the rate: M are millions of tokens", costs, spent)]
    if len(data["devices"]) > 1:
        rows = tuple(
            (name, *_given(fleet), number(fleet["usd_per_hour"], 2)) for name, fleet in data["devices"].items()
        )
        tables.insert(1, Table("The best of each device", ("device", *columns, "$/h"), rows))
    return tables


def _given(fleet: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        fleet["layout"],
        percent(fleet["attainment"]),
        rate(fleet["goodput_rps"]),
        rate(fleet["highest_rate_rps"]),
        milliseconds(fleet["ttft_p99_ms"]),
        milliseconds(fleet["tpot_p99_ms"]),
    )


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


def plan_notes(data: Mapping[str, Any], attainment: float) -> list[str]:
    """Sentences under the table: ties, other rates, what was not possible, and how sure all that is."""
    notes = []
    ties = [shape["layout"] for shape in data["shapes"] if shape["is_tie"]]
    if ties:
        near = f"within {TIE:.0%} of each other, which is less than the search can tell; the simpler shape stands first"
        notes.append(f"A tie: {', '.join([data['best']['layout'], *ties])}: {near}")
    for name, words in (("twice_the_rate", "Twice the rate"), ("enough", "What keeps them at this rate")):
        if (fleet := data[name]) is not None:
            price = "" if fleet["usd_per_hour"] is None else f", ${fleet['usd_per_hour']:,.2f} an hour"
            notes.append(f"{words}: {fleet['layout']} ({fleet['devices']:,} devices{price})")
    notes += [f"Not possible: {layout}: {reason}" for layout, reason in data["refused"].items()]
    if left_out := data["left_out"]:
        layout, reason = next(iter(left_out.items()))
        notes.append(
            f"Left out, since requests alone on them miss the objectives: {len(left_out)} ({layout}: {reason})"
        )
    fewest = data["compared_requests"]
    reach = percent(_reach(attainment, fewest))
    low, high = map(percent, data["best"]["attainment_interval"])
    notes += [
        f"{data['num_runs']:,} simulations of {data['num_layouts']:,} layouts, compared by runs of {fewest:,} requests "
        f"or more: they know a share of {percent(attainment)} within {reach}, at {CONFIDENCE:.0%} confidence",
        f"Figures at the rate are of {data['best']['simulated_requests']:,} requests (in time, of the first: {low} to "
        f"{high})",
    ]
    return notes


def _reach(attainment: float, num_requests: int) -> float:
    """Half the confidence interval of a share that was counted over ``num_requests``."""
    low, high = wilson(round(attainment * num_requests), num_requests)
    return (high - low) / 2


def _kwh_per_million(summary: Mapping[str, Any], economy: Mapping[str, Any]) -> float | None:
    tokens = (summary["prompt_tokens"] + summary["output_tokens"]) / 1e6
    return economy["kwh"] / tokens if economy["kwh"] is not None and tokens else None
