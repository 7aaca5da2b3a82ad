"""The roofline: laws that any cost model keeps, and a few measured steps it must come close to."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from diptych.control.errors import ConfigError
from diptych.control.step import ScheduledPrefill, SchedulerOutput, StepFeatures, chunk_attention
from diptych.simulation.costs.collectives import pipeline_hops
from diptych.simulation.costs.cost_model import UNBOUNDED
from diptych.simulation.costs.layer_shapes import EXPERT_IMBALANCE
from diptych.simulation.costs.roofline import ExpertOps, RooflineCost
from diptych.simulation.hardware import load_hardware
from diptych.simulation.model_catalogue import load_model
from diptych.simulation.parallelism import ONE_DEVICE, Parallelism
from diptych.simulation.weight_precision import GPU_WEIGHTS, MatrixFormat


def roofline(model: str, hardware: str, tensor_parallel: int = 1, weight_bits: int = 16) -> RooflineCost:
    return RooflineCost(
        load_model(model), load_hardware(hardware), Parallelism(tensor_parallel), weights=GPU_WEIGHTS[weight_bits]
    )


def plan(chunks: tuple[tuple[int, int], ...] = (), num_decodes: int = 0, context: int = 0) -> SchedulerOutput:
    prefills = tuple(ScheduledPrefill(f"r{i}", start, n, (), True) for i, (start, n) in enumerate(chunks))
    features = StepFeatures(
        sum(n for _, n in chunks), sum(chunk_attention(start, n) for start, n in chunks), num_decodes, context
    )
    return SchedulerOutput(0, prefills=prefills, num_decodes=num_decodes, features=features)


COSTS = [
    roofline("llama-3.1-8b", "h100"),
    roofline("qwen3-30b-a3b", "rtx-pro-6000"),
    roofline("deepseek-v3", "h200", 8, 8),
    roofline("opt-66b", "a100", 4),
]


@pytest.mark.parametrize("cost", COSTS, ids=lambda cost: cost.name)
def test_a_pure_decode_step_costs_what_its_line_says(cost: RooflineCost) -> None:
    for num_seqs in (1, 7, 300):
        for context in (num_seqs, 90 * num_seqs, 5000 * num_seqs):
            line = cost.decode_line(num_seqs, context)
            assert line.until_context > context
            assert cost.step_ns(plan(num_decodes=num_seqs, context=context)) == line.step_ns(context) >= 1


@pytest.mark.parametrize("cost", COSTS, ids=lambda cost: cost.name)
def test_more_work_never_takes_less_time(cost: RooflineCost) -> None:
    steps = [cost.step_ns(plan(num_decodes=n, context=1000 * n)) for n in (1, 2, 8, 33, 128, 129, 512)]
    assert all(fewer <= more for fewer, more in pairwise(steps))
    chunks = [cost.step_ns(plan(((0, n),))) for n in (1, 16, 100, 512, 513, 4096)]
    assert all(fewer <= more for fewer, more in pairwise(chunks))
    assert cost.step_ns(plan(((0, 512),))) < cost.step_ns(plan(((4096, 512),)))
    alone, decodes = cost.step_ns(plan(((0, 512),))), cost.step_ns(plan(num_decodes=16, context=16000))
    assert max(alone, decodes) < cost.step_ns(plan(((0, 512),), 16, 16000)) < alone + decodes


def test_the_latent_line_changes_slope_without_a_jump_when_compute_takes_over() -> None:
    cost = roofline("deepseek-v3", "rtx-pro-6000", 1, 8)  # many heads share the latent, and memory is fast enough
    num_seqs = 64
    first = cost.decode_line(num_seqs, num_seqs)
    assert first.until_context < UNBOUNDED
    second = cost.decode_line(num_seqs, first.until_context)
    assert second.slope > first.slope
    assert second.until_context == UNBOUNDED
    gap = second.step_ns(first.until_context) - first.step_ns(first.until_context)
    assert 0 <= gap <= math.ceil((second.slope - first.slope) / 2**20) + 1


def test_experts_are_read_once_however_many_tokens_visit_them() -> None:
    model, hardware = load_model("qwen3-30b-a3b"), load_hardware("h100")
    experts = ExpertOps.of(model, hardware, ONE_DEVICE, MatrixFormat())
    assert experts is not None
    kernels = [op.kernels[0] for op in experts.ops]
    launches = sum(kernel.launch_ns for kernel in kernels)
    one, many, more = (experts.total_ns(n) / model.num_moe_layers - launches for n in (1, 256, 512))
    assert one == pytest.approx(8 * sum(kernel.weight_ns + kernel.io_ns for kernel in kernels))
    assert more - many == pytest.approx(256 * 8 * sum(kernel.io_ns for kernel in kernels), rel=0.01)


def test_order_of_calls_changes_nothing() -> None:
    first, second = roofline("llama-3.1-8b", "h100"), roofline("llama-3.1-8b", "h100")
    plans = [plan(((0, n), (64, 32)), n, 100 * n) for n in (1, 50, 500)]
    forward = [first.step_ns(one) for one in plans]
    assert forward == [second.step_ns(one) for one in reversed(plans)][::-1]


def test_eight_bit_weights_halve_the_read_and_need_no_eight_bit_arithmetic() -> None:
    for hardware in ("h100", "a100"):  # the second has no fp8: its int8 arithmetic is used
        wide, narrow = roofline("llama-3.1-8b", hardware), roofline("llama-3.1-8b", hardware, weight_bits=8)
        assert 0.5 < narrow.decode_line(1, 1).step_ns(1) / wide.decode_line(1, 1).step_ns(1) < 0.75


def test_measured_steps_are_near() -> None:
    """Llama-3-8B on an H100: 6 ms a decode step, 116 ms for 4,096 tokens; Yi-34B on two A100 (Sarathi-Serve, table of
    prefill times): 366 ms for 2,048 tokens and 1,863 ms for 8,192."""
    small, large = roofline("llama-3-8b", "h100"), roofline("yi-34b", "a100", 2)
    assert small.decode_line(1, 500).step_ns(500) / 1e6 == pytest.approx(6, rel=0.25)
    assert small.step_ns(plan(((0, 4096),))) / 1e6 == pytest.approx(116, rel=0.25)
    assert large.step_ns(plan(((0, 2048),))) / 1e6 == pytest.approx(366, rel=0.15)
    assert large.step_ns(plan(((0, 8192),))) / 1e6 == pytest.approx(1863, rel=0.15)


def test_a_pass_through_a_pipeline_takes_the_whole_models_time_and_its_hops() -> None:
    model, hardware = load_model("llama-3.1-70b"), load_hardware("h100")
    whole, staged = (RooflineCost(model, hardware, Parallelism(4, stages)) for stages in (1, 4))
    hops_ns = 1e9 * pipeline_hops(hardware, Parallelism(4, 4)).seconds(64 * 2 * model.hidden)
    step = plan(num_decodes=64, context=64_000)
    assert staged.step_ns(step) - whole.step_ns(step) == pytest.approx(hops_ns, abs=2)


def test_the_fullest_group_sets_the_pace() -> None:
    cost = RooflineCost(load_model("deepseek-v3"), load_hardware("h200"), Parallelism(data=8), weights=GPU_WEIGHTS[8])
    spread, full = (cost.step_ns(plan(num_decodes=n, context=n * 4000)) for n in (8, 9))
    assert full > spread  # a ninth sequence is the second of one group
    steps = [cost.step_ns(plan(num_decodes=n, context=n * 4000)) for n in range(9, 17)]
    assert steps == sorted(steps)
    alone, two = cost.step_ns(plan(((0, 2048),))), cost.step_ns(plan(((0, 2048), (0, 2048))))
    assert alone < two < 1.5 * alone  # another prompt is another group's


def test_experts_of_their_own_are_visited_by_a_share_of_the_tokens() -> None:
    model, hardware = load_model("qwen3-235b-a22b"), load_hardware("h100")
    alone, cut, whole = (
        ExpertOps.of(model, hardware, split, MatrixFormat())
        for split in (ONE_DEVICE, Parallelism(8), Parallelism(8, expert=8))
    )
    assert alone is not None and cut is not None and whole is not None
    assert cut.total_ns(64) < alone.total_ns(64) / 6
    assert whole.total_ns(64) < alone.total_ns(64) / 6  # as many bytes
    even = replace(whole, imbalance=1.0)
    assert whole.total_ns(65_536) == pytest.approx(EXPERT_IMBALANCE * even.total_ns(65_536), rel=0.02)


def test_what_is_assumed_is_said() -> None:
    def said(hardware: str, split: Parallelism = ONE_DEVICE, bits: int = 16) -> str:
        model = "qwen3-235b-a22b"
        weights = GPU_WEIGHTS[bits]
        return " ".join(RooflineCost(load_model(model), load_hardware(hardware), split, weights=weights).assumptions)

    assert said("h100") == ""
    assert "link of 16 GB/s and 20 us" in said("rtx-pro-6000", Parallelism(2))
    assert "16 GB/s" not in said("rtx-pro-6000")
    assert "8 bits" in said("rtx-pro-6000", bits=8)
    assert "W4A8" in said("h100", bits=4)
    assert "InfiniBand NDR" in said("h100", Parallelism(16))
    assert "pipeline" in said("h100", Parallelism(4, 2))
    assert "busiest group" in said("h100", Parallelism(8, expert=8))
    assert "data-parallel" in said("h100", Parallelism(data=8))


def test_impossible_splits_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel is 3"):
        roofline("llama-3.1-8b", "h100", 3)
    with pytest.raises(ConfigError, match="joins at most 1 x cpu"):
        roofline("llama-3.1-8b", "cpu-epyc-9004-2c", 2)
