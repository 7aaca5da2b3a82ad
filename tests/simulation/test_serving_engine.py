"""The host and the front end of serving engines: what they add to steps and requests, whatever prices the devices."""

from pathlib import Path

import pytest

from diptych.control.errors import ConfigError
from diptych.control.step import ScheduledPrefill, SchedulerOutput, StepFeatures, chunk_attention
from diptych.simulation.costs.cost_choice import choose_cost, served_tables
from diptych.simulation.costs.cost_model import CostModel
from diptych.simulation.costs.layer_tables import layer_table_info
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.prepare import prepare
from diptych.simulation.serving_engine import engine_names, load_engine
from diptych.simulation.settings import settings_from

FOUR = Parallelism(4)


def cost(kind: str, engine: str | None) -> CostModel:
    chosen = choose_cost(kind, model="llama-3.1-70b", hardware="h100", parallelism=FOUR, engine=engine)
    return chosen.cost


def plan(num_decodes: int, prompts: int = 0) -> SchedulerOutput:
    prefills = tuple(ScheduledPrefill(str(i), 0, 100, (), True) for i in range(prompts))
    pairs = prompts * chunk_attention(0, 100)
    features = StepFeatures(100 * prompts, pairs, num_decodes, 500 * num_decodes)
    return SchedulerOutput(0, prefills, num_decodes, features=features)


@pytest.mark.parametrize("name", engine_names())
def test_every_engine_says_where_its_figures_come_from(name: str) -> None:
    engine = load_engine(name)
    assert {key.removesuffix("_assumed") for key in engine.sources} == {"step", "front_end"}
    assert engine.front_end.request_ns >= 0
    for devices in (1, 2, 8):
        host = engine.host_us(devices)
        assert host is None or 0 <= host(1) <= host(64) <= host(512) < 60_000


def test_an_unknown_engine_is_refused_with_the_names_of_the_known() -> None:
    with pytest.raises(ConfigError, match=r"engine is 'abacus'; one of diptych, .*sglang"):
        choose_cost("auto", model="llama-3-8b", hardware="h100", engine="abacus")


@pytest.mark.parametrize("kind", ["tables", "operators", "roofline"])
def test_a_synchronous_host_prolongs_every_step_by_the_same_whatever_prices_the_devices(kind: str) -> None:
    bare, served = cost(kind, "vllm-0.19"), cost(kind, "sync-2024")
    host = load_engine("sync-2024").host_us(4)
    assert host is not None
    for step in (plan(1), plan(64), plan(0, 2), plan(30, 3)):
        sequences = step.features.decode_seqs + len(step.prefills)
        added = served.step_ns(step) - bare.step_ns(step)
        assert added == pytest.approx(1000 * host(sequences), abs=2)


@pytest.mark.parametrize("kind", ["tables", "operators", "roofline"])
@pytest.mark.parametrize("engine", engine_names())
def test_a_decode_line_agrees_with_its_steps_behind_every_host(kind: str, engine: str) -> None:
    served = cost(kind, engine)
    for num_seqs in (1, 7, 64, 300):
        step = plan(num_seqs)
        line = served.decode_line(num_seqs, 500 * num_seqs)
        assert line.step_ns(500 * num_seqs) == served.step_ns(step)


def test_what_was_measured_with_an_engine_of_its_own_takes_no_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="measured with one"):
        choose_cost(str(tmp_path / "calibration.json"), model=None, hardware=None, engine="sglang")


def test_the_front_end_of_an_engine_is_part_of_a_simulation_and_what_is_assumed_is_said() -> None:
    plain = {"model": "llama-3-8b", "hardware": "h100"}
    assert prepare(settings_from(plain)).scenario.front_end.delay_ns(100) == 0
    prepared = prepare(settings_from({**plain, "engine": "diptych"}))
    assert prepared.scenario.front_end.delay_ns(100) == 3_000_000
    assumed = choose_cost("auto", model="llama-3-8b", hardware="h100", engine="sync-2024").assumptions
    assert any("sync-2024" in sentence for sentence in assumed)


def test_auto_prefers_the_kernels_of_the_asked_engine_then_the_newest_and_never_unfused_ones() -> None:
    names = served_tables()
    versions = [layer_table_info(name).kernels for name in names]
    assert "unfused" not in versions
    assert versions[0] == "vllm-0.24"
    old = [layer_table_info(name).kernels for name in served_tables(load_engine("vllm-0.12"))]
    assert old[0] == "vllm-0.14"
    assert sorted(names) == sorted(served_tables(load_engine("sglang")))


def test_no_two_tables_of_one_fleet_are_told_apart_by_their_names_alone() -> None:
    seen = set()
    for name in served_tables():
        info = layer_table_info(name)
        key = (info.hardware, info.model, info.tensor_parallel, info.kernels, len(info.assumptions))
        assert key not in seen, name
        seen.add(key)


def test_a_table_of_unfused_operators_is_used_by_its_name_only() -> None:
    wanted = {"model": "llama-3.1-8b", "hardware": "a6000"}
    eager = choose_cost("a6000-llama-3.1-8b-eager", **wanted).cost
    chosen = choose_cost("auto", **wanted).cost
    assert chosen.name == "a6000-llama-3.1-8b"
    assert chosen.step_ns(plan(32)) < eager.step_ns(plan(32))


def test_settings_take_an_engine() -> None:
    settings = settings_from({"model": "llama-3-8b", "hardware": "h100", "engine": "trtllm"})
    assert "host and front end of trtllm" in prepare(settings).cost.words
