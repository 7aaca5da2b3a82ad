"""``diptych simulate``: settings from files and flags, sweeps, files it writes, and errors in one line."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diptych.cli import main as cli
from diptych.cli.simulate import command_line, overrides, parse_window
from diptych.cli.simulate_options import PATHS
from diptych.control.config import CacheConfig, shape_preset
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS, NS_PER_S, Slo
from diptych.simulation.costs.fitted import Calibration, FittedCost, write_calibration
from diptych.simulation.prepare import prepare, scheduler_of
from diptych.simulation.settings import plain, read_settings, settings_from
from diptych.simulation.sweep import grid, parse_sweep, run_points, setting_path
from tests.test_cli import given as served

BASE = ("--model", "llama-3-8b", "--hardware", "h100", "--rate", "8", "--num-requests", "40", "--seed", "1")
SMALL = {"model": "llama-3-8b", "hardware": "h100", "workload": {"rate": 8.0, "num_requests": 30}}


def invoke(*words: str) -> Any:
    """Run ``diptych simulate`` here."""
    return CliRunner().invoke(cli.app, ["simulate", *words])


def test_a_simulation_prints_its_tables() -> None:
    result = invoke(*BASE, "--ttft-slo-ms", "500")
    assert result.exit_code == 0, result.output
    for word in ("TTFT", "TPOT", "ITL", "E2E", "goodput", "attainment", "KV cache, peak", "preemptions", "$"):
        assert word in result.output


def test_json_is_one_object_and_equal_runs_print_equal_bytes() -> None:
    first, second = invoke(*BASE, "--json"), invoke(*BASE, "--json")
    assert first.stdout == second.stdout
    data = json.loads(first.stdout)
    assert set(data) == {
        "settings", "values", "cost_model", "assumptions", "workload", "fleet", "summary", "failure_messages",
        "classes", "pools", "economy", "num_events",
    }  # fmt: skip
    assert (data["fleet"]["devices"], data["workload"]["num_requests"]) == (1, 40)
    assert data["summary"]["num_completed"] == 40
    assert data["settings"]["workload"]["num_requests"] == 40
    assert settings_from(data["settings"]).seed == 1
    assert data["cost_model"]


def test_it_writes_records_a_page_and_a_timeline(tmp_path: Path) -> None:
    files = {name: tmp_path / f"run.{name}" for name in ("records", "report", "timeline")}
    words = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    result = invoke(*BASE, *words, "--timeline-window", "0:1")
    assert result.exit_code == 0, result.output
    assert len(files["records"].read_text().splitlines()) == 40
    shown = re.sub(r"<[^>]*>", "", files["report"].read_text())
    assert "diptych simulate --model llama-3-8b --hardware h100 --rate 8 --num-requests 40" in shown
    assert max(event["ts"] for event in json.loads(files["timeline"].read_text())["traceEvents"]) <= 1e6


def test_it_runs_without_torch_and_numpy() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['numpy'] = None\n"
        f"sys.argv = ['diptych', 'simulate', '--json', *{BASE!r}]\n"
        "from diptych.cli.main import main; main()"
    )
    result = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["summary"]["num_completed"] == 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "nobody", "--hardware", "h100"), "model 'nobody'"),
        (("--hardware", "h100"), "model is not set"),
        ((*BASE, "--shape", "square"), "shape is 'square'; one of chunked, unified"),
        ((*BASE, "--replicas", "0"), "replicas is 0; it must be int >= 1"),
        ((*BASE, "--max-num-seqs", "0"), "--max-num-seqs is 0"),
        ((*BASE, "--cost", "magic"), "cost is 'magic'"),
        ((*BASE, "--cost", "tables", "--hardware", "mi300x"), "does not hold llama-3-8b on 1 x mi300x"),
        ((*BASE, "--set", "scheduler.zeal=1"), "scheduler.zeal is not a setting"),
        ((*BASE, "--set", "seed"), "expected PATH=VALUE"),
        ((*BASE, "--kv-cache-memory", "much"), "--kv-cache-memory is 'much'"),
        ((*BASE, "--sweep", "rate=5:1"), "ascends"),
        ((*BASE, "--sweep", "rate=1:2", "--timeline", "x.json"), "timeline is for a single run"),
        ((*BASE, "--processes", "2"), "--processes has no effect without --sweep"),
        ((*BASE, "--timeline-window", "1:2"), "--timeline-window has no effect"),
        ((*BASE, "--report", "nowhere/x.html"), "there is no folder"),
        ((*BASE, "--sweep", "memory.kv_cache_tokens=10,4000", "--processes", "1"), "at memory.kv_cache_tokens=10:"),
        (("absent.toml",), "cannot read absent.toml"),
    ],
)
def test_what_is_wrong_is_one_line(words: tuple[str, ...], message: str) -> None:
    result = invoke(*words)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"replica": 1}, "unknown field replica"),
        ({"slo": {"ttft_ms": -1}}, r"slo.ttft_ms is -1; it must be float > 0.0"),
        ({"faults": [{"kind": "fire", "at_s": 0, "duration_s": 1}]}, r"is 'fire'; one of .*crash"),
        ({"faults": [{"kind": "crash", "at_s": 0}]}, "missing required field duration_s"),
        ({"scheduler": 3}, "scheduler is 3; it must be object"),
    ],
)
def test_a_wrong_file_is_an_error_with_the_path_the_value_and_the_limit(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_from(raw)


def test_options_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text('model = "llama-3-8b"\nreplicas = 3\n[scheduler]\nmax_num_seqs = 8\norder = "fcfs"\n')
    options = {"replicas": 2, "max_num_seqs": 16, "assign": ["memory.prefix_cache=false", "slo.tpot_ms=30"]}
    settings = read_settings(path, overrides(options))
    assert (settings.replicas, settings.scheduler.max_num_seqs, settings.scheduler.order) == (2, 16, "fcfs")
    assert (settings.memory.prefix_cache, settings.slo.tpot_ms) == (False, 30.0)
    assert settings_from(plain(settings)) == settings


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shape": "unified"},
        {"max_batched_tokens": 512, "max_num_seqs": 8, "max_waiting": 3, "step_target_ms": 50.0, "order": "deadline"},
        {"budget": "whole"},
        {"order": "priority", "preempt_for_priority": True, "preemption": "swap"},
        {"long_prefill_threshold": 64, "max_partial_prefills": 3, "max_long_partial_prefills": 2},
    ],
)
def test_the_same_options_mean_the_same_scheduler_as_for_serve(changes: dict[str, Any]) -> None:
    live = cli.engine_options(served(**changes)).scheduler
    assert scheduler_of(read_settings(None, overrides(changes))) == live


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"routing": "round_robin"},
        {"disaggregate": "always", "on_failure": "local"},
        {"max_prefills_in_flight_per_worker": 2, "max_queued": 7},
    ],
)
def test_the_same_options_mean_the_same_cluster_as_for_serve(changes: dict[str, Any]) -> None:
    workers = {"prefill": 1, "decode": 1}
    live = cli.fleet_options(served(**workers, **changes)).cluster
    base = {"model": "llama-3-8b", "hardware": "h100"}
    options = {name: value for name, value in changes.items() if name in PATHS}
    values = {name: value for name, value in changes.items() if name not in PATHS}
    settings = read_settings(None, base | values | overrides(workers | options))
    simulated = prepare(settings).scenario.cluster_config
    # What a handoff carries and the objectives come from the model and the workload, there as here.
    links = live.routing.links
    assert replace(simulated, slo=live.slo, routing=replace(simulated.routing, links=links)) == live


def test_a_fleet_of_roles_and_its_failures_become_a_scenario() -> None:
    options = {"prefill": 2, "decode": 1, "both": 1, "hosts": 2, "disaggregate": "always", "on_failure": "local"}
    base = {"model": "llama-3-8b", "hardware": "h100", "watch.detection_ms": 5, "watch.heartbeat_s": 1}
    settings = read_settings(None, base | overrides(options))
    scenario = prepare(settings).scenario
    assert scenario.pools is not None
    assert [scenario.pools.role(worker) for worker in range(4)] == ["prefill", "prefill", "decode", "both"]
    assert (scenario.num_workers, scenario.pools.num_hosts) == (4, 2)
    assert scenario.cluster_config.routing.disaggregate == "always"
    assert scenario.cluster_config.on_failure == "local"
    assert (scenario.watch.detection_ns, scenario.watch.heartbeat_ns) == (5 * NS_PER_MS, NS_PER_S)


POOLS = """
model = "llama-3.1-70b"
weight_bits = 8
tensor_parallel = 4
[pools]
link = "eth200"
nics = 2
stall_ms = 3
decode = "3xa100-80gb:tp4,pp2"
burst = 1
[pools.prefill]
replicas = 2
hardware = "h100"
tensor_parallel = 8
[pools.prefill.scheduler]
max_batched_tokens = 4096
"""


def pools_file(folder: Path) -> Path:
    path = folder / "fleet.toml"
    path.write_text(POOLS)
    return path


def test_named_pools_have_devices_costs_and_memory_of_their_own(tmp_path: Path) -> None:
    settings = read_settings(pools_file(tmp_path), overrides({"hardware": "h200", "pool": ["burst=2"], "prefill": 1}))
    assert settings_from(plain(settings)) == settings
    prepared = prepare(settings)
    prefill, decode, burst = prepared.pools
    assert [pool.name for pool in prepared.pools] == ["prefill", "decode", "burst"]
    assert [pool.role for pool in prepared.pools] == ["prefill", "decode", "both"]
    assert [(pool.num_devices, pool.num_workers) for pool in prepared.pools] == [(8, 1), (24, 6), (8, 2)]
    assert [pool.hardware and pool.hardware.name for pool in prepared.pools] == ["h100-sxm", "a100-80gb", "h200"]
    assert prefill.engine.scheduler.budget.max_batched_tokens == 4096
    assert prefill.engine.scheduler.budget.idle_target_ns and not burst.engine.scheduler.budget.idle_target_ns
    whole = prepare(settings_from({"model": "llama-3.1-70b", "hardware": "a100-80gb", "tensor_parallel": 4,
                                   "pipeline_parallel": 2, "weight_bits": 8})).pools[0]  # fmt: skip
    assert decode.engine.cache == whole.engine.cache
    pools = prepared.scenario.pools
    assert pools is not None and pools.stall_ns == 3 * NS_PER_MS
    assert [place.replica for place in pools.places()] == [0, 1, 1, 2, 2, 3, 3, 4, 5]
    assert [(pool.nics, pool.layout) for pool in pools.pools] == [(2, (8, 1)), (2, (4, 2)), (2, (4, 1))]
    assert "prefill: measured layers" in prepared.cost_model and "; decode: " in prepared.cost_model


def test_pools_with_other_weights_hand_nothing_over(tmp_path: Path) -> None:
    path = pools_file(tmp_path)
    with pytest.raises(ConfigError, match="no pool can decode with the weights of prefill"):
        prepare(read_settings(path, {"hardware": "h100", "pools.prefill.weight_bits": 4}))
    changes = {"hardware": "h100", "pools.burst.weight_bits": 4, "pools.burst.max_model_len": 9000}
    prepared = prepare(read_settings(path, changes))
    assert prepared.scenario.pools is not None
    assert [pool.model_copy for pool in prepared.scenario.pools.pools] == [0, 0, 1]
    assert [pool.engine.max_model_len for pool in prepared.pools] == [131_072, 131_072, 9000]


def test_every_pool_has_a_row_and_the_fleet_costs_their_sum(tmp_path: Path) -> None:
    words = (str(pools_file(tmp_path)), "--hardware", "h100", "--rate", "4", "--num-requests", "30")
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    assert "Pools" in result.output and "a100-80gb (tp4-pp2)" in result.output
    data = json.loads(invoke(*words, "--json").stdout)
    assert [pool["num_gpus"] for pool in data["pools"]] == [16, 24, 4]
    assert data["economy"]["num_gpus"] == 44
    assert data["economy"]["usd"] == pytest.approx(sum(pool["usd"] for pool in data["pools"]))
    assert all(0 <= pool["busy"] <= 1 for pool in data["pools"])


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ({"prefill": 1, "decode": "2xh100:tp4,zz"}, "pools.decode is '2xh100:tp4,zz'; 'zz' is none of tpN"),
        ({"prefill": 1, "decode": {"replicas": -1}}, "pools.decode.replicas is -1; it must be `?int`? >= 0"),
        ({"prefill": {"role": "cook"}}, "pools.prefill.role is 'cook'; one of"),
        ({"prefill": {"colour": 1}, "decode": 1}, "pools.prefill: object contains unknown field"),
        ({"prefill": 1}, "pools.decode is 0"),
        ({"prefill": 1, "decode": "1xtoaster"}, "hardware 'toaster'"),
        ({"link": "rope", "prefill": 1, "decode": 1}, "link is 'rope'"),
    ],
)
def test_impossible_pools_are_refused_with_their_path(pools: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(settings_from({**SMALL, "pools": pools}))


def test_settings_of_pools_can_be_swept_and_assigned() -> None:
    assert setting_path("prefill") == "pools.prefill"
    assert setting_path("pools.decode.tensor_parallel") == "pools.decode.tensor_parallel"
    assert setting_path("pools.big.scheduler.max_num_seqs") == "pools.big.scheduler.max_num_seqs"
    with pytest.raises(ConfigError, match="not a setting"):
        setting_path("pools.decode.colour")
    settings = settings_from({**SMALL, "pools": {"prefill": "2xh200", "decode": 1}})
    points = grid(settings, [parse_sweep("pools.prefill=1,3"), parse_sweep("pools.decode.tensor_parallel=1,2")])
    pools = [point.pools.named for _, point in points]
    assert [pool["prefill"].replicas for pool in pools] == [1, 1, 3, 3]
    assert {pool["prefill"].hardware for pool in pools} == {"h200"}
    assert [pool["decode"].tensor_parallel for pool in pools] == [1, 2, 1, 2]


def test_a_fault_of_a_replica_strikes_all_lanes_of_its_pipeline() -> None:
    raw = {**SMALL, "pipeline_parallel": 2, "replicas": 2, "faults": [{"kind": "crash", "replica": 1, "at_s": 1,
           "duration_s": 1}]}  # fmt: skip
    scenario = prepare(settings_from(raw)).scenario
    assert scenario.num_workers == 4
    assert [fault.worker for fault in scenario.faults] == [2, 3]


def test_settings_become_a_scenario() -> None:
    settings = settings_from(
        {
            **SMALL,
            "replicas": 2,
            "slo": {"ttft_ms": 250},
            "memory": {"kv_cache_tokens": 6400, "block_size": 64},
            "faults": [{"kind": "slow", "replica": 1, "at_s": 1.5, "duration_s": 2, "factor": 2}],
            "random_faults": {"count": 3, "until_s": 10},
        }
    )
    scenario = prepare(settings).scenario
    assert scenario.engine.cache.num_blocks == 100
    assert scenario.engine.slo == Slo(250_000_000, None)
    assert scenario.engine.scheduler == shape_preset("chunked")
    assert (scenario.num_workers, len(scenario.faults), scenario.faults[0].at_ns) == (2, 4, 1_500_000_000)
    assert len(scenario.workload) == 30
    with pytest.raises(ConfigError, match="must be below replicas"):
        prepare(settings_from({**plain(settings), "replicas": 1}))


def test_auto_takes_measured_layers_where_there_are_any_and_says_so() -> None:
    measured = prepare(settings_from({**SMALL, "model": "llama-3.1-8b", "hardware": "rtx-4090"}))
    assert measured.cost.words.startswith("measured layers of meta-llama/Llama-3.1-8B on 1 x RTX4090")
    summed = prepare(settings_from({**SMALL, "model": "llama-3.1-70b", "hardware": "h200", "tensor_parallel": 8}))
    assert summed.cost.words.startswith("measured operators, summed over the layers of llama-3.1-70b on 8 x h200")
    other = prepare(settings_from({**SMALL, "hardware": "mi300x"}))
    assert other.cost.words == "roofline of llama-3-8b on 1 x mi300x, with assumed efficiencies"
    assert other.cost.assumptions[0].startswith("mi300x: every achieved share")


def test_a_calibration_brings_its_model_its_cache_and_its_context_length(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    cost = FittedCost((0, 1), (5e6, 6e6), (10.0, 10.0), (0, 1), (0.0, 4e4), 2.0, "linear")
    cache = CacheConfig(num_blocks=500, block_size=16)
    write_calibration(path, Calibration(model="some/small-model", cost=cost, cache=cache, max_model_len=1024))
    words = ("--cost", str(path), "--num-requests", "20", "--json")
    data = json.loads(invoke(*words).stdout)
    assert data["cost_model"] == "calibration of small-model on this machine (here.json, linear law)"
    assert data["economy"]["usd"] is None
    prepared = prepare(settings_from({"cost": str(path)}))
    assert prepared.scenario.engine.cache == cache
    assert prepared.scenario.engine.max_model_len == 1024
    tables = invoke(*words[:-1])
    assert "$" not in tables.output and "goodput" in tables.output


def test_the_grammar_of_sweeps() -> None:
    assert parse_sweep("rate=1:4").values == (1, 2, 3, 4)
    assert parse_sweep("rate=0.1:0.5:0.1").values == (0.1, 0.2, 0.3, 0.4, 0.5)
    assert parse_sweep("chunk=256,512").path == "scheduler.max_batched_tokens"
    assert parse_sweep("shape=unified,chunked").values == ("unified", "chunked")
    assert setting_path("block_size") == "memory.block_size"
    assert set(PATHS.values()) <= {setting_path(path) for path in PATHS.values()}
    for text in ("rate", "rate=", "rate=1:2:3:4", "rate=1:2:0", "rate=a:b", "rate=1,1", "rate=1:1e6", "what=1"):
        with pytest.raises(ConfigError):
            parse_sweep(text)


def test_a_run_in_which_every_request_fails_shows_why_and_ends_with_an_error() -> None:
    words = (*BASE, "--max-model-len", "100")
    result = invoke(*words)
    assert result.exit_code == 1
    assert "failed: too long for the context or the KV cache" in result.stdout
    assert "\nerror: every request failed (context_length_exceeded): " in result.stderr
    as_json = invoke(*words, "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["summary"]["failures"] == {"context_length_exceeded": 40}
    swept = invoke(*words, "--sweep", "rate=4,8", "--processes", "1")
    assert swept.exit_code == 1 and "failed" in swept.stdout
    partly = invoke(*BASE, "--sweep", "max_model_len=100,8192", "--processes", "1")
    assert partly.exit_code == 0, partly.output


def test_points_are_the_same_in_any_number_of_processes() -> None:
    points = grid(settings_from(SMALL), [parse_sweep("rate=4,40"), parse_sweep("replicas=1,2")])
    assert [values for values, _ in points] == [
        {"rate": rate, "replicas": workers} for rate in (4, 40) for workers in (1, 2)
    ]
    done: list[int] = []
    alone = run_points(points, num_workers=1, on_done=done.append)
    assert done == [1, 2, 3, 4]
    assert run_points(points, num_workers=2) == alone
    assert alone[3]["settings"]["replicas"] == alone[3]["values"]["replicas"] == 2


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_interrupted_sweep_keeps_what_is_done(num_workers: int) -> None:
    points = grid(settings_from(SMALL), [parse_sweep("rate=2:9")])

    def interrupt(done: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    kept = run_points(points, num_workers=num_workers, on_done=interrupt, keeps_done=True)
    rates = [point["values"]["rate"] for point in kept]
    assert rates[:2] == [2, 3] and rates == sorted(set(rates))
    with pytest.raises(KeyboardInterrupt):
        run_points(points, num_workers=1, on_done=interrupt)


def test_an_interrupted_sweep_is_shown_and_ends_with_the_status_of_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def two(points: Any, **_: Any) -> list[dict[str, Any]]:
        return run_points(points[:2], num_workers=1)

    monkeypatch.setattr("diptych.simulation.sweep.run_points", two)
    result = invoke(*BASE, "--sweep", "rate=2:9")
    assert result.exit_code == 130
    assert "interrupted: 2 of 8 points are done" in result.stdout and "interrupted" in result.stderr


@pytest.mark.parametrize("what", ["models", "hardware", "links", "engines", "traces", "settings"])
def test_a_list_names_what_there_is(what: str) -> None:
    result = invoke("--list", what)
    known = {"models": "llama-3-8b", "hardware": "h100", "links": "ib400", "engines": "vllm-0.19"}
    assert result.exit_code == 0 and result.stderr == ""
    assert {**known, "traces": "azure-conv", "settings": "workload.sessions.max_turns"}[what] in result.stdout


def test_what_failed_stands_above_the_tables() -> None:
    result = invoke(*BASE, "--set", "workload.lengths.prompt.kind=uniform", "--set", "workload.lengths.prompt.max=9000")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("llama-3-8b on h100. 40 requests in ")
    assert " of 40 requests failed: too long for the context or the KV cache (such as: the prompt has" in lines[1]


def test_objectives_may_be_given_at_once() -> None:
    apart = invoke(*BASE, "--json", "--ttft-slo-ms", "300", "--tpot-slo-ms", "50")
    assert invoke(*BASE, "--json", "--slo", "ttft=300ms,tpot=50ms").stdout == apart.stdout


def test_an_impossible_point_is_found_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs is 512"):
        grid(settings_from(SMALL), [parse_sweep("max_num_seqs=16,512"), parse_sweep("chunk=256,1024")])


def test_a_sweep_prints_a_table_and_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "sweep.html"
    result = invoke(*BASE, "--tpot-slo-ms", "20", "--sweep", "rate=4:12:4", "--processes", "1", "--report", str(page))
    assert result.exit_code == 0, result.output
    assert "goodput" in result.output
    assert "--sweep rate=4:12:4" in re.sub(r"<[^>]*>", "", page.read_text())
    data = json.loads(invoke(*BASE, "--sweep", "rate=4,8", "--processes", "1", "--json").stdout)
    assert data["sweep"] == ["rate"] and [point["values"]["rate"] for point in data["points"]] == [4, 8]


def test_a_page_shows_a_command_that_can_be_pasted() -> None:
    given = {"config": Path("a b.toml"), "rate": 2.0, "as_json": True, "sweep": ["rate=1:2"], "assign": ["seed=3"]}
    assert command_line(given) == "diptych simulate 'a b.toml' --rate 2 --json --sweep rate=1:2 --set seed=3"
    assert command_line({"prefix_cache": False}) == "diptych simulate --no-prefix-cache"


def test_windows_are_in_seconds() -> None:
    assert parse_window("1.5:2").start_ns == 1_500_000_000
    assert parse_window(":2").end_ns == 2 * NS_PER_S
    for text in ("5", "2:1", "a:b", "-1:2"):
        with pytest.raises(ConfigError, match="timeline_window"):
            parse_window(text)
