"""Measured layers with fewer bits than they were measured with."""

import pytest

from diptych.control.step import SchedulerOutput, StepFeatures
from diptych.simulation.costs.cost_choice import CostChoice, choose_cost
from diptych.simulation.costs.layer_tables import LayerTableCost
from diptych.simulation.costs.roofline import RooflineCost
from diptych.simulation.hardware import load_hardware
from diptych.simulation.model_catalogue import load_model
from diptych.simulation.weight_precision import GPU_WEIGHTS

STEP = SchedulerOutput(0, num_decodes=16, features=StepFeatures(0, 0, 16, 16_000))


def choice(hardware: str, weight_bits: int = 16, kv_bits: int = 16) -> CostChoice:
    return choose_cost("auto", model="llama-3.1-8b", hardware=hardware, weight_bits=weight_bits, kv_bits=kv_bits)


@pytest.mark.parametrize(("hardware", "source"), [("rtx-4090", "roofline"), ("h100", "measured operators")])
def test_layers_are_scaled_by_the_best_law_there_is_and_that_is_said(hardware: str, source: str) -> None:
    wide, narrow = choice(hardware), choice(hardware, 8, 8)
    assert 0.4 < narrow.cost.step_ns(STEP) / wide.cost.step_ns(STEP) < 0.8
    assert "scaled to 8 bits (KV 8 bits)" in narrow.words
    assert any(f"scaled to weights of 8 bits and KV of 8 bits by the {source}" in said for said in narrow.assumptions)
    assert not any("scaled" in said for said in wide.assumptions)


def test_the_change_is_the_laws_own() -> None:
    model, hardware = load_model("llama-3.1-8b"), load_hardware("rtx-4090")
    laws = [RooflineCost(model, hardware, weights=GPU_WEIGHTS[bits]).tokens_ns(16, 16) for bits in (8, 16)]
    tables = [cost.tables for bits in (8, 16) if isinstance(cost := choice("rtx-4090", bits).cost, LayerTableCost)]
    overhead = 1e9 * hardware.achieved.step_overhead_s
    assert tables[0].tokens(16) / tables[1].tokens(16) == pytest.approx(
        (laws[0] - overhead) / (laws[1] - overhead), rel=0.01
    )
    assert tables[0].sequences == tables[1].sequences
    assert tables[0].prefill_attention == tables[1].prefill_attention
