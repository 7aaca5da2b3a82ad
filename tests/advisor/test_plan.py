"""Plans: layouts fill the budget, the best is what single runs say, and what is impossible is said."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from diptych.advisor.device_layout import FleetLayout, LayoutGroup, LayoutName, PlannedDevice, WorkerKind
from diptych.advisor.layout_runs import RunOptions
from diptych.advisor.layout_space import FleetBudget, LayoutSpace, spread
from diptych.advisor.phase_search import PhaseRates, phase_settings
from diptych.advisor.plan_search import PlanQuestion, PlanSearch
from diptych.cli import main as cli
from diptych.cli.plan import commands
from diptych.control.errors import ConfigError
from diptych.search.goodput_search import SearchConfig
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.settings import Settings, settings_from
from diptych.simulation.sweep import run_here

H100 = PlannedDevice("h100", 2.9, 700.0)
A100 = PlannedDevice("a100-80gb", 1.5, 400.0)
ONE, TWO = WorkerKind(H100, Parallelism(1)), WorkerKind(H100, Parallelism(2))
OLD = WorkerKind(A100, Parallelism(1))
BASE = (
    "--model", "llama-3-8b", "--num-requests", "24", "--probe", "1s", "--tolerance", "0.5", "--processes", "1",
    "--prompt-tokens", "2000", "--output-tokens", "8", "--ttft-slo-ms", "800", "--tpot-slo-ms", "15", "--parallel",
    "tp1",
)  # fmt: skip


def space(*shapes: LayoutName, **limits: Any) -> LayoutSpace:
    """A space of workers of one and two H100."""
    kinds = (ONE, TWO)
    return LayoutSpace(
        shapes=shapes, kinds=kinds, prefill_kinds=kinds, decode_kinds=kinds, budget=FleetBudget(**limits)
    )


def load(rate: float | None = 4.0) -> Settings:
    """A small load."""
    lengths = {"prompt": {"mean": 2000}, "output": {"mean": 8}}
    workload = {"num_requests": 24, "lengths": lengths, **({} if rate is None else {"rate": rate})}
    return settings_from({"model": "llama-3-8b", "slo": {"ttft_ms": 800.0, "tpot_ms": 15.0}, "workload": workload})


def question(where: LayoutSpace, rate: float | None = 4.0) -> PlanQuestion:
    """Searched coarsely."""
    return PlanQuestion(
        base=load(rate), space=where, options=RunOptions(search=SearchConfig(tolerance=0.5), probe_s=1.0)
    )


@pytest.mark.parametrize(
    ("device", "settings", "command"),
    [
        ("cpu-epyc-9004-2c", {}, "diptych serve --model llama-3-8b --both 2"),
        (
            "cpu-epyc-9004-2c",
            {"quantize": "int4", "kv_bits": 8},
            "diptych serve --model llama-3-8b --quantize int4 --kv-dtype int8 --both 2",
        ),
        ("h100", {"kv_bits": 8}, "diptych simulate "),  # serve keeps 16 bits there
    ],
)
def test_the_command_of_a_fleet_has_the_numbers_that_were_simulated(
    device: str, settings: dict[str, Any], command: str
) -> None:
    kind = WorkerKind(PlannedDevice(device, None, 100.0), Parallelism(1))
    layout = FleetLayout("unified", (LayoutGroup("both", 2, kind),))
    measured = SimpleNamespace(layout=layout, point={"settings": {"workload": {}}})
    base = settings_from({"model": "llama-3-8b", "hardware": device, **settings})
    assert commands(measured, settings, base)["command"].startswith(command)  # type: ignore[arg-type]


def invoke(*words: str) -> Any:
    """Run ``diptych plan`` here."""
    return CliRunner().invoke(cli.app, ["plan", *words])


def test_no_worker_can_be_added_to_a_layout_of_the_space_and_none_exceeds_the_budget() -> None:
    for devices in range(2, 9):
        for layout in space("unified", "split", "mixed", devices=devices).layouts():
            spare = devices - layout.num_devices
            assert 0 <= spare < min(group.kind.num_devices for group in layout.groups)
            assert all(group.count for group in layout.groups)


def test_every_ratio_of_four_devices_is_in_the_space() -> None:
    splits = {str(layout) for layout in space("split", devices=4).layouts()}
    assert splits == {
        f"split: {prefill}, {decode}"
        for prefill, decode in (
            ("1 prefill tp1", "3 decode tp1"),
            ("2 prefill tp1", "2 decode tp1"),
            ("3 prefill tp1", "1 decode tp1"),
            ("2 prefill tp1", "1 decode tp2"),
            ("1 prefill tp2", "2 decode tp1"),
            ("1 prefill tp2", "1 decode tp2"),
        )
    }


def test_a_budget_of_money_buys_more_of_the_cheaper_device() -> None:
    budget = FleetBudget(usd_per_hour=6.0)
    assert (budget.most(ONE), budget.most(OLD)) == (2, 4)
    assert FleetBudget(kilowatts=1.4).most(ONE) == 2
    assert FleetBudget(devices=3, usd_per_hour=100.0).most(OLD) == 3


def test_a_large_fleet_is_tried_at_ratios_that_are_spread_evenly_and_refined_between_them() -> None:
    where = space("split", devices=40)
    counts = [tuple(group.count for group in layout.groups) for layout in where.layouts()]
    assert (1, 39) in counts and (39, 1) in counts and len(counts) <= 4 * 8
    middle = LayoutSpace.layout("split", (ONE, ONE), (20, 20))
    assert {str(layout) for layout in where.neighbours(middle)} == {
        "split: 19 prefill tp1, 21 decode tp1",
        "split: 21 prefill tp1, 19 decode tp1",
    }
    assert spread([(count,) for count in range(10)], 4) == [(0,), (3,), (6,), (9,)]


def test_the_best_of_a_plan_carries_what_a_single_run_says() -> None:
    where = space("chunked", "split", devices=2)
    found = PlanSearch(question(where)).within_budget(where.layouts())
    best = found.fleets[0]
    assert {fleet.layout.shape for fleet in found.fleets} == {"chunked", "split"}
    assert best.highest_rate_rps == max(fleet.highest_rate_rps or 0 for fleet in found.fleets)
    assert best.point["summary"]["attainment"] == best.attainment == 1.0
    again = run_here(best.layout.settings(load())).point["summary"]
    assert again["goodput_rps"] == best.point["summary"]["goodput_rps"]
    assert found.twice is not None


def test_without_a_budget_the_cheapest_fleet_that_carries_the_rate_is_planned() -> None:
    where = space("chunked")
    best = PlanSearch(question(where, rate=60.0)).smallest().fleets[0]
    assert best.attainment >= 0.9 and best.layout.num_devices > 1
    with pytest.raises(ConfigError, match="rate is not given"):
        PlanSearch(question(where, rate=None)).smallest()


def test_each_phase_takes_the_kind_that_carries_most_for_its_cost() -> None:
    rates = PhaseRates({ONE: 10.0, TWO: 18.0}, {ONE: 4.0, OLD: 3.0})
    assert str(rates.layout(FleetBudget(), 30.0)) == "split: 3 prefill h100:tp1, 10 decode a100-80gb:tp1"
    assert str(rates.layout(FleetBudget(devices=8), None)) == "split: 2 prefill h100:tp1, 6 decode a100-80gb:tp1"
    with pytest.raises(ConfigError, match="decode at any rate"):
        PhaseRates({ONE: 1.0}, {}).best()


def test_a_phase_is_measured_by_its_own_objective() -> None:
    assert phase_settings(load(), "prefill").slo.tpot_ms is None
    assert phase_settings(load(), "decode").slo.ttft_ms is None


def test_the_command_prints_the_best_the_shapes_and_how_to_start_them(tmp_path: Path) -> None:
    words = (*BASE, "--hardware", "h100", "--devices", "2", "--rate", "4", "--shapes", "split,chunked", "--json")
    page = tmp_path / "plan.html"
    result = invoke(*words, "--report", str(page))
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["best"] == data["shapes"][0] and len(data["shapes"]) == 2
    for fleet in data["shapes"]:
        assert {"layout", "attainment", "goodput_rps", "usd_per_million_tokens", "command"} <= fleet.keys()
        assert fleet["command"].startswith("diptych serve --model llama-3-8b --")
        assert fleet["simulate_command"].startswith("diptych simulate ")
    assert data["best"]["layout"] in page.read_text()
    again = CliRunner().invoke(cli.app, [*shlex.split(data["best"]["simulate_command"])[1:], "--json"])
    assert json.loads(again.stdout)["summary"]["goodput_rps"] == data["best"]["goodput_rps"]


def test_the_answer_stands_above_the_tables() -> None:
    words = (*BASE, "--hardware", "h100", "--devices", "1", "--rate", "4", "--shapes", "chunked")
    first, second, *_ = invoke(*words).stdout.splitlines()
    assert first.startswith("chunked: 1 both tp1. At 4.553 requests/s 100.0 % of the requests keep")
    assert second.startswith("Start the best: diptych serve --model llama-3-8b --both 1")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_an_interrupted_plan_knows_the_layouts_that_are_done(num_processes: int) -> None:
    where = space("split", devices=6)
    assert len(list(where.layouts())) > 2 * num_processes
    asked = question(where)
    asked = replace(asked, options=replace(asked.options, num_processes=num_processes))

    def interrupt(_: str, share: float) -> None:
        if 0 < share < 1:
            raise KeyboardInterrupt

    search = PlanSearch(asked, interrupt)
    with pytest.raises(KeyboardInterrupt):
        search.within_budget(where.layouts())
    assert 1 <= len(search.tried()) <= search.num_runs
    assert search.num_runs < len(list(where.layouts()))
    assert search.tried()[0].highest_kept_rps in (4.0, None)


def test_an_interrupted_plan_is_shown_and_ends_with_the_status_of_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PlanSearch, "_refined", interrupt)
    words = (*BASE, "--hardware", "h100", "--devices", "1", "--rate", "4", "--shapes", "chunked")
    result = invoke(*words)
    assert result.exit_code == 130 and "chunked: 1 both tp1" in result.stdout
    assert "there is no plan yet" in result.stdout and "there is no plan yet" in result.stderr
    layouts = json.loads(invoke(*words, "--json").stdout)["layouts"]
    assert [(fleet["devices"], fleet["highest_kept_rps"] >= 4.0) for fleet in layouts] == [(1, True)]


def test_a_model_that_does_not_fit_is_refused_with_the_reason() -> None:
    words = (*BASE, "--model", "llama-3.1-405b", "--hardware", "h100", "--devices", "1", "--shapes", "chunked")
    result = invoke(*words, "--rate", "1")
    assert result.exit_code == 1 and "can be simulated" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hardware", "h100", "--shapes", "both"), "shapes has 'both'"),
        (("--hardware", "h100", "--parallel", "2"), "parallel has '2'"),
        (("--hardware", "h100", "--placement", "best"), "placement is 'best'"),
        (("--hardware", "h100", "--devices", "-1"), "devices is -1"),
        ((), "hardware is not given"),
    ],
)
def test_what_is_wrong_is_named(words: tuple[str, ...], message: str) -> None:
    result = invoke(*BASE, *words, "--rate", "1")
    assert result.exit_code == 1 and message in result.stderr
