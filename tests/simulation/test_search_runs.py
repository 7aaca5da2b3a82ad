"""Searches by simulation: what they find is what single runs say, and what cannot be searched is refused."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from diptych.cli import main as cli
from diptych.control.errors import ConfigError
from diptych.search.goodput_search import SearchConfig
from diptych.simulation.search_runs import Question, answer, answer_points, at_rate, sustained_share, with_workers
from diptych.simulation.settings import Settings, settings_from
from diptych.simulation.sweep import grid, parse_sweep, run_here
from diptych.workload.description import ArrivalConfig, TraceConfig, WorkloadConfig

BASE = (
    "--model", "llama-3-8b", "--hardware", "h100", "--num-requests", "24", "--seed", "1", "--tpot-slo-ms", "9",
    "--rate", "4", "--probe", "1s", "--prompt-tokens", "2000", "--output-tokens", "16",
)  # fmt: skip
GOODPUT = Question(asked="goodput", search=SearchConfig(tolerance=0.2, repeats=1), probe_s=1.0)
DEVICES = Question(asked="devices", probe_s=1.0)


def settings(**changes: Any) -> Settings:
    """A small load of one kind of requests."""
    lengths = {"prompt": {"mean": 2000}, "output": {"mean": 16}}
    workload = {"num_requests": 24, "rate": 4.0, "lengths": lengths, **changes.pop("workload", {})}
    base = {"model": "llama-3-8b", "hardware": "h100", "slo": {"tpot_ms": 9.0, "ttft_ms": 800.0}, "seed": 1}
    return settings_from({**base, "workload": workload, **changes})


def invoke(*words: str) -> Any:
    """Run ``diptych simulate`` here."""
    return CliRunner().invoke(cli.app, ["simulate", *words])


def share(changed: Settings) -> float:
    """Attainment of one run."""
    return float(run_here(changed).point["summary"]["attainment"])


def test_the_rate_that_is_found_holds_and_a_fifth_more_does_not() -> None:
    found = answer(settings(), GOODPUT)
    rate = found.result["rate"]
    assert found.result["is_bracketed"] and found.result["num_probes"] == len(found.probes)
    assert share(settings(workload={"rate": rate})) >= 0.9 > share(settings(workload={"rate": 1.21 * rate}))
    assert found.best.point["settings"]["workload"]["rate"] == rate
    assert rate <= found.result["estimate"] <= 1.2 * rate
    again = answer(settings(), GOODPUT)
    assert (again.result, again.best.point) == (found.result, found.best.point)


def test_the_fleet_that_is_found_holds_and_one_worker_less_does_not() -> None:
    load = settings(workload={"rate": 20.0})
    found = answer(load, DEVICES)
    replicas = found.result["workers"]["replicas"]
    assert replicas > 1 and found.result["devices"] == replicas
    assert 0.9 <= found.result["attainment"] <= share(with_workers(load, {"replicas": replicas}))
    assert [run["attainment"] >= 0.9 for run in found.probes if run["workers"] == {"replicas": replicas - 1}] == [False]


def test_both_pools_are_searched() -> None:
    load = settings(workload={"rate": 10.0}, pools={"prefill": 1, "decode": 1}, tensor_parallel=2)
    found = answer(load, DEVICES)
    workers = found.result["workers"]
    assert found.result["devices"] == 2 * (workers["prefill"] + workers["decode"])
    assert share(with_workers(load, workers)) >= 0.9


def test_pools_of_different_devices_are_weighed_by_their_devices() -> None:
    pools = {"prefill": "1xh100:tp2", "decode": "1xa100-80gb"}
    found = answer(settings(workload={"rate": 10.0}, pools=pools, slo={"ttft_ms": 800.0, "tpot_ms": 30.0}), DEVICES)
    workers = found.result["workers"]
    assert found.result["devices"] == 2 * workers["prefill"] + workers["decode"]


def test_objectives_that_no_fleet_keeps_end_the_search_early() -> None:
    found = answer(settings(slo={"tpot_ms": 0.5}), DEVICES)
    assert found.result["devices"] is None and found.result["num_probes"] < 12
    nothing = answer(settings(slo={"tpot_ms": 0.5}), GOODPUT)
    assert nothing.result["rate"] is None and not nothing.result["is_bracketed"]


def test_a_sweep_has_an_answer_at_every_point() -> None:
    points = grid(settings(), [parse_sweep("replicas=1,2")])
    one, two = answer_points(points, GOODPUT, num_workers=1)
    assert one["goodput"] == answer(settings(), GOODPUT).result
    assert 1.5 < two["goodput"]["rate"] / one["goodput"]["rate"] < 3.0
    assert (two["values"], two["fleet"]["devices"]) == ({"replicas": 2}, 2)
    fleets = answer_points(grid(settings(), [parse_sweep("rate=5,20")]), DEVICES, num_workers=1)
    assert [point["devices"]["devices"] for point in fleets] == sorted(point["devices"]["devices"] for point in fleets)


def test_a_rate_that_the_fleet_cannot_serve_is_no_goodput_even_if_queueing_is_no_objective() -> None:
    found = answer(settings(slo={"tpot_ms": 50.0}), GOODPUT)
    assert found.result["is_bracketed"]
    overloaded = run_here(settings(slo={"tpot_ms": 50.0}, workload={"num_requests": 200, "rate": 40.0}))
    assert overloaded.point["summary"]["attainment"] == 1.0 and sustained_share(overloaded.result.requests) < 0.6
    assert found.result["rate"] < 40 and sustained_share(found.best.result.requests) >= 0.9
    assert sustained_share(run_here(settings(workload={"rate": 1.0})).result.requests) > 0.99
    empty = run_here(settings(max_model_len=100))
    assert sustained_share(empty.result.requests) > 0.99


def test_a_run_of_a_search_has_enough_requests() -> None:
    plain = WorkloadConfig()
    assert at_rate(plain, 1.0, None).num_requests == 300
    assert at_rate(plain, 20.0, None).num_requests == 1200
    assert at_rate(plain, 20.0, 30.0).num_requests == 600
    asked = WorkloadConfig(num_requests=50)
    assert (at_rate(asked, 20.0, 2.0).num_requests, at_rate(asked, 20.0, 30.0).num_requests) == (50, 600)
    trace = at_rate(WorkloadConfig(trace=TraceConfig(path="azure-conv", scale=2.0)), 3.0, None)
    assert trace.trace is not None and (trace.trace.scale, trace.rate, trace.num_requests) == (1.0, 3.0, None)


@pytest.mark.parametrize(
    ("changes", "asked", "message"),
    [
        ({"slo": {}}, GOODPUT, "goodput cannot be searched without objectives: set --ttft-slo-ms"),
        ({"slo": {}}, DEVICES, "devices cannot be searched without objectives"),
        (
            {"slo": {}, "workload": {"rate": None, "num_requests": 20, "lengths": {}, "trace": {"path": "azure-conv"}}},
            DEVICES,
            "no request .* objective",
        ),
        ({"pools": {"prefill": 1, "decode": 1, "late": "1xh200"}}, DEVICES, "at most two pools; there are prefill"),
        ({"workload": {"rate": None, "arrivals": {"kind": "closed"}}}, GOODPUT, "open loop; arrivals.kind is 'closed'"),
    ],
)
def test_what_cannot_be_searched_is_refused(changes: dict[str, Any], asked: Question, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        answer(settings(**changes), asked)


def test_a_closed_loop_has_a_smallest_fleet() -> None:
    load = settings(workload={"rate": None, "arrivals": {"kind": "closed", "concurrency": 20}})
    assert load.workload.arrivals == ArrivalConfig(kind="closed", concurrency=20)
    assert answer(load, DEVICES).result["devices"] is not None


def test_the_command_prints_the_runs_and_the_answer_and_the_shape_of_bench() -> None:
    words = (*BASE, "--find-goodput", "--attainment", "90", "--tolerance", "0.3")
    text = invoke(*words)
    assert text.exit_code == 0, text.output
    assert text.stdout.startswith("llama-3-8b on h100. The highest rate of 1 worker, ")
    assert "simulating requests at 4/s" in text.stderr and ", at several rates: llama-3-8b" in text.stderr
    for word in ("goodput, 90.0 % in time", "highest rate that held", "rate/s", "TTFT", "KV cache"):
        assert word in text.output
    data = json.loads(invoke(*words, "--json").stdout)
    assert (data["mode"], data["goodput"]["config"]["attainment"]) == ("find_goodput", 0.9)
    assert {"rate", "devices", "met", "judged", "attainment", "attainment_interval", "summary"} == set(
        data["points"][0]
    )
    fleet = invoke(*BASE, "--fewest-devices")
    assert fleet.exit_code == 0 and "fewest devices, 90.0 % in time" in fleet.output
    assert fleet.stdout.startswith("llama-3-8b on h100. The smallest fleet, ")


@pytest.mark.parametrize(
    ("asked", "expected"), [(GOODPUT, {"rate": 2.0, "num_probes": 3}), (DEVICES, {"devices": 8, "num_probes": 4})]
)
def test_an_interrupted_search_says_what_its_runs_say(asked: Question, expected: dict[str, Any]) -> None:
    num_said = 0

    def interrupt(*_: Any) -> None:
        nonlocal num_said
        num_said += 1
        if num_said == expected["num_probes"]:
            raise KeyboardInterrupt

    load = settings(workload={"rate": 20.0 if asked is DEVICES else 4.0})
    found = answer(load, asked, on_probe=interrupt, keeps_done=True)
    assert not found.is_complete and len(found.probes) == expected["num_probes"]
    assert {name: found.result[name] for name in expected} == expected
    num_said = 0
    with pytest.raises(KeyboardInterrupt):
        answer(load, asked, on_probe=interrupt)


def test_an_interrupted_search_is_shown_and_ends_with_the_status_of_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def one(*arguments: Any, **_: Any) -> Any:
        def interrupt(said: str, _: float) -> None:
            if said.endswith(": 100.0 % in time"):
                raise KeyboardInterrupt

        return answer(*arguments, on_probe=interrupt, keeps_done=True)

    monkeypatch.setattr("diptych.simulation.search_runs.answer", one)
    result = invoke(*BASE, "--find-goodput")
    assert result.exit_code == 130 and ": at least " in result.stdout.splitlines()[0]
    assert all(" runs; the search is" in text for text in (result.stdout, result.stderr))


def test_a_sweep_of_searches_prints_a_table_and_writes_a_page(tmp_path: Any) -> None:
    page = tmp_path / "search.html"
    words = (*BASE, "--find-goodput", "--tolerance", "0.5", "--report", str(page))
    result = invoke(*words, "--sweep", "hardware=h100,h200", "--processes", "1")
    assert result.exit_code == 0, result.output
    assert "per device" in result.output and "Highest rate that keeps the objectives" in page.read_text()
    assert "<h1>llama-3-8b</h1>" in page.read_text()  # the device is swept
    single = invoke(*words)
    assert single.exit_code == 0 and "Attainment" in page.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--attainment", "90"), "attainment has no effect without --find-goodput or --fewest-devices"),
        (("--fewest-devices", "--tolerance", "0.1"), "tolerance has no effect without --find-goodput"),
        (("--fewest-devices", "--find-goodput"), "are two searches"),
        (("--find-goodput", "--attainment", "100"), "attainment is 100"),
        (("--find-goodput", "--timeline", "x.json"), "has no effect with a search"),
        (("--find-goodput", "--sweep", "rate=1,2", "--processes", "1"), "workload.rate is what is searched"),
        (("--fewest-devices", "--sweep", "replicas=1,2", "--processes", "1"), "replicas is what is searched"),
        (("--fewest-devices", "--prefill", "1", "--sweep", "decode=1,2", "--processes", "1"), "pools.decode is what"),
    ],
)
def test_wrong_searches_are_one_line(words: tuple[str, ...], message: str) -> None:
    result = invoke(*BASE, *words)
    assert result.exit_code == 1 and result.stdout == ""
    assert message in result.stderr and result.stderr.count("\n") == 1
