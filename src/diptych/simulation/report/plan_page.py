"""The page of a plan: the answer, what each shape gives and costs, and how the best fares as the rate grows."""

import json
from collections.abc import Mapping
from typing import Any

from diptych.report import pages
from diptych.report.charts import rate_charts
from diptych.report.pages import Report, Section
from diptych.report.text import dollars, latency_table, number, percent, pool_table, rate
from diptych.simulation.planning.plan_search import CapacityPlan, PlanQuestion
from diptych.simulation.report.plan_tables import plan_notes, plan_tables, start_words
from diptych.simulation.report.simulation_tables import cost_notes, simulated_table
from diptych.simulation.report.titles import objectives


def render(plan: CapacityPlan, data: Mapping[str, Any], question: PlanQuestion, command: str) -> str:
    """The whole file as text. data: see plan_tables.plain_plan."""
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
    """What the best gives. best: of plan_tables.plain_plan."""
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
