"""Plans: layouts fill the budget, the best is what single runs say, and what is impossible is said."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from diptych.advisor.device_layout import LayoutName, PlannedDevice, WorkerKind
from diptych.advisor.layout_preference import LayoutOffer, is_tie
from diptych.advisor.layout_runs import LayoutRuns, Length, RunOptions
from diptych.advisor.layout_space import FleetBudget, LayoutSpace, spread
from diptych.advisor.phase_search import PhaseRates, phase_settings
from diptych.advisor.plan_search import PlanQuestion, PlanSearch
from diptych.cli import main as cli
from diptych.control.errors import ConfigError
from diptych.search.goodput_search import SearchConfig
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.search_runs import lasting_score
from diptych.simulation.settings import Settings, settings_from
from diptych.simulation.sweep import run_here
from diptych.workload.description import TraceConfig, WorkloadConfig

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
        "split: 1 prefill + 3 decode h100:tp1",
        "split: 2 prefill + 2 decode h100:tp1",
        "split: 3 prefill + 1 decode h100:tp1",
        "split: 2 prefill h100:tp1, 1 decode h100:tp2",
        "split: 1 prefill h100:tp2, 2 decode h100:tp1",
        "split: 1 prefill + 1 decode h100:tp2",
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
        "split: 19 prefill + 21 decode h100:tp1",
        "split: 21 prefill + 19 decode h100:tp1",
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
        assert "diptych serve --model meta-llama/Meta-Llama-3-8B --download --" in fleet["command"]
        assert fleet["simulate_command"].startswith("diptych simulate ")
    assert data["best"]["layout"] in page.read_text()
    again = CliRunner().invoke(cli.app, [*shlex.split(data["best"]["simulate_command"])[1:], "--json"])
    assert json.loads(again.stdout)["summary"]["goodput_rps"] == data["best"]["goodput_rps"]


def test_the_answer_stands_above_the_tables() -> None:
    words = (*BASE, "--hardware", "h100", "--devices", "1", "--rate", "4", "--shapes", "chunked")
    first, second, *_ = invoke(*words).stdout.splitlines()
    assert first.startswith("chunked: 1 both h100:tp1. At 4.553 requests/s 100.0 % of the requests keep")
    assert second.startswith("Start the best: diptych serve --model meta-llama/Meta-Llama-3-8B --download")


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
    assert result.exit_code == 130 and "chunked: 1 both h100:tp1" in result.stdout
    assert "there is no plan yet" in result.stdout and "there is no plan yet" in result.stderr
    layouts = json.loads(invoke(*words, "--json").stdout)["layouts"]
    assert [(fleet["devices"], fleet["highest_kept_rps"] >= 4.0) for fleet in layouts] == [(1, True)]


def test_every_row_names_its_device_and_each_device_has_its_best() -> None:
    words = (*BASE, "--hardware", "h100", "--hardware", "a100-80gb", "--devices", "2", "--rate", "4")
    data = json.loads(invoke(*words, "--shapes", "chunked,split", "--json").stdout)
    assert set(data["devices"]) == {"h100", "a100-80gb"}
    for name, fleet in data["devices"].items():
        assert {group["hardware"] for group in fleet["groups"]} == {name} and f"{name}:tp1" in fleet["layout"]
        assert fleet["command"] and fleet["simulate_command"]
    shown = invoke(*words, "--shapes", "chunked,split").stdout
    assert "The best of each device" in shown
    rows = [line for line in shown.splitlines() if re.match(r" *(a100-80gb |h100 )?.*(chunked|split): ", line)]
    assert rows and all("h100:" in row or "a100-80gb:" in row for row in rows)


@pytest.mark.parametrize(
    ("limits", "param"),
    [(("--ttft-slo-ms", "5"), "TTFT objective of 5 ms"), (("--tpot-slo-ms", "1"), "TPOT objective of 1 ms")],
)
def test_an_objective_that_a_request_alone_misses_is_said_at_once_with_the_number(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[str, str], param: str
) -> None:
    monkeypatch.setattr(PlanSearch, "_most_enduring", None)  # nothing is searched
    monkeypatch.setattr(PlanSearch, "_size_next", None)
    for budget in (("--devices", "2"), ()):
        result = invoke(*BASE, *limits, "--hardware", "h100", *budget, "--rate", "4")
        assert result.exit_code == 1 and "Start the best" not in result.stdout
        assert re.search(param + r" is unreachable .* at best a T[TP][FO]T of [\d.]+ ms", result.stderr)


def test_a_budget_that_is_too_small_says_what_is_enough_and_ends_with_status_1() -> None:
    words = (*BASE, "--hardware", "h100", "--devices", "1", "--rate", "60", "--shapes", "chunked")
    result = invoke(*words)
    assert result.exit_code == 1 and "Start the best" not in result.stdout
    assert "No fleet that is allowed keeps the objectives" in result.stderr
    data = json.loads(invoke(*words, "--json").stdout)
    assert not data["keeps_objectives"] and data["enough"]["devices"] > 1 and data["twice_the_rate"] is None


def test_the_first_answer_is_said_before_the_search_goes_on() -> None:
    said: list[str] = []
    where = space("chunked", "split", devices=4)
    search = PlanSearch(question(where), on_first=lambda line: said.append(f"{search.num_runs}: {line}"))
    search.within_budget(where.layouts())
    assert len(said) == 1 and said[0].startswith("1: so far: chunked: 4 both h100:tp1 keeps the objectives at 4 ")


@pytest.mark.parametrize("budget", [{"devices": 4}, {}])
def test_progress_never_falls_and_names_its_steps(budget: dict[str, Any]) -> None:
    seen: list[tuple[str, float]] = []
    where = space("chunked", "split", **budget)
    search = PlanSearch(question(where), lambda stage, share: seen.append((stage, share)))
    search.within_budget(where.layouts()) if budget else search.smallest()
    shares = [share for _, share in seen]
    assert shares == sorted(shares) and 0.8 < shares[-1] <= 1.0 and shares[0] == 0.0
    steps = [match for stage, _ in seen if (match := re.match(r"step (\d+) of (\d+): .*, \d+ of \d+$", stage))]
    assert len({match[2] for match in steps}) == 1 and len({match[1] for match in steps}) > 1


def test_fleets_that_are_about_as_good_are_a_tie() -> None:
    one, other = LayoutOffer("chunked", 1.0, worth=10.0), LayoutOffer("split", 0.95, worth=10.4)
    assert is_tie(one, other, 0.9) and not is_tie(one, replace(other, worth=10.6), 0.9)
    assert not is_tie(one, replace(other, attainment=0.5), 0.9)
    assert is_tie(replace(one, attainment=0.5), replace(other, attainment=0.46), 0.9)


def test_a_tie_is_called_one() -> None:
    words = (*BASE, "--hardware", "h100", "--devices", "1", "--rate", "4", "--shapes", "chunked,unified")
    data = json.loads(invoke(*words, "--json").stdout)
    worth = [shape["highest_rate_rps"] for shape in data["shapes"]]
    assert data["shapes"][1]["is_tie"] == (abs(worth[0] - worth[1]) <= 0.05 * max(worth))
    assert ("A tie: " in invoke(*words).stdout) == data["shapes"][1]["is_tie"]


def test_a_run_that_cannot_reach_its_share_ends_early_and_no_other() -> None:
    settings = space("chunked", devices=1)
    [layout] = [found for found in settings.layouts() if found.num_devices == 1]
    for rate in (4.0, 200.0):
        base = load(rate)
        whole = run_here(layout.settings(base))
        cut = run_here(layout.settings(base), attainment=0.9)
        held = lasting_score(whole.result.requests)[0] >= 0.9 * 24
        assert held == (rate == 4.0) and cut.result.is_cut != held
        met, judged = lasting_score(cut.result.requests, is_cut=cut.result.is_cut)
        assert (met >= 0.9 * judged) == held
        if cut.result.is_cut:  # what was decided until then is the same
            number = len(cut.result.requests)
            assert judged - met >= 3 and cut.result.requests.number == whole.result.requests.number[:number]
            assert cut.result.requests.queue_ns == whole.result.requests.queue_ns[:number]


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


@pytest.mark.parametrize(
    ("length", "given", "trace", "expected"),
    [
        ("sorting", None, False, 200), ("comparing", None, False, 600), ("whole", None, False, 1200),
        ("comparing", 900, False, 900), ("whole", 5000, False, 5000), ("sorting", None, True, 200),
        ("whole", None, True, 3000), ("whole", 8000, True, 8000), ("comparing", 100, True, 100),
    ],
)  # fmt: skip
def test_runs_are_as_long_as_what_they_decide(length: Length, given: int | None, trace: bool, expected: int) -> None:
    base = load(20.0)
    workload = msgspec.structs.replace(base.workload, num_requests=given)
    if trace:
        workload = WorkloadConfig(num_requests=given, trace=TraceConfig(path="azure-conv"))
    runs = LayoutRuns(msgspec.structs.replace(base, workload=workload), RunOptions())
    layout = next(space("chunked", devices=1).layouts())
    assert runs._settings(layout, 20.0, length).workload.num_requests == expected
