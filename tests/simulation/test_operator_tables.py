"""The cost model from measured operators: exact at measured points, sane between and beyond them, one law for steps."""

from dataclasses import replace

import pytest

from diptych.control.errors import ConfigError
from diptych.control.step import ScheduledPrefill, SchedulerOutput, StepFeatures, chunk_attention
from diptych.simulation.costs.collectives import between_hosts
from diptych.simulation.costs.interpolation import Curve, Surface
from diptych.simulation.costs.layer_shapes import linear_shapes
from diptych.simulation.costs.operator_tables import chunked, operator_table_cost
from diptych.simulation.costs.operators import (
    AttentionHeads,
    AttentionTable,
    LinearTable,
    load_operator_tables,
    operator_data,
    operator_table_names,
)
from diptych.simulation.hardware import load_hardware
from diptych.simulation.model_catalogue import load_model
from diptych.simulation.parallelism import Parallelism

A100 = load_hardware("a100-80gb")


def decode(num_seqs: int, context: int) -> SchedulerOutput:
    return SchedulerOutput(0, num_decodes=num_seqs, features=StepFeatures(0, 0, num_seqs, context))


def prefill(num_tokens: int, start: int = 0) -> SchedulerOutput:
    chunk = ScheduledPrefill("a", start, num_tokens, (), True)
    return SchedulerOutput(0, (chunk,), features=StepFeatures(num_tokens, chunk_attention(start, num_tokens)))


def test_every_file_belongs_to_the_hardware_catalogue_and_names_its_source_and_licence():
    for name in operator_table_names():
        assert load_hardware(name).name == name
        for source in operator_data(name)["sources"]:
            assert source["repository"].startswith("ai-dynamo/aiconfigurator @ ")
            assert source["licence"].startswith("Apache-2.0")
            assert source["changes"]


def test_a_measured_product_is_returned_as_it_was_measured():
    linear = load_operator_tables(A100).linear[16]
    row = next(row for row in operator_data("a100-80gb")["gemm"]["16"] if (row["n"], row["k"]) == (4096, 4096))
    assert [linear.us(m, 4096, 4096) for m in row["knots"]] == row["us"]


def test_an_unmeasured_product_lies_between_its_neighbours_and_a_larger_one_grows_like_its_work():
    linear = load_operator_tables(A100).linear[16]
    assert linear.us(4096, 4096, 4096) < linear.us(4096, 4608, 4096) < linear.us(4096, 5120, 4096)
    assert linear.us(4096, 131072, 4096) == pytest.approx(2 * linear.us(4096, 65536, 4096), rel=0.02)


def test_a_hole_in_the_grid_of_products_is_filled_from_its_neighbours():
    whole = load_operator_tables(A100).linear[16]
    curves = {pair: curve for pair, curve in whole.curves.items() if pair != (4096, 4096)}
    holed = LinearTable(A100, 16, curves)
    assert holed.us(4096, 4096, 4096) == pytest.approx(whole.us(4096, 4096, 4096), rel=0.1)


def test_as_many_bytes_of_kv_take_as_long_when_only_the_heads_differ():
    surface = Surface((1.0, 8.0), (Curve((1.0, 1000.0), (5.0, 10.0)), Curve((1.0, 1000.0), (6.0, 40.0))))
    table = AttentionTable({AttentionHeads(128, 16, 8, 8): surface})
    assert table.surface(AttentionHeads(128, 16, 16, 16))(4, 1000) == surface(8, 1000)
    assert table.surface(AttentionHeads(64, 16, 8, 8))(8, 1000) == surface(8, 1000) / 2


def test_a_chunk_after_other_tokens_takes_longer_and_the_chunks_of_a_prompt_no_less_than_the_whole():
    tables = operator_table_cost(load_model("llama-3.1-8b"), A100).tables
    chunks = tables.prefill_attention
    assert chunks(512, 0) < chunks(512, 4096) < chunks(512, 100_000)
    assert sum(chunks(1024, start) for start in range(0, 8192, 1024)) > 0.8 * chunks(8192, 0)
    flat = chunked(Surface((1.0,), (Curve((1.0, 1024.0), (7.0, 7.0)),)), lambda length: 7.0)
    assert flat(16, 0) == 7.0


@pytest.mark.parametrize(("model", "devices"), [("llama-3.1-8b", 1), ("qwen3-30b-a3b", 2), ("opt-13b", 4)])
def test_a_pure_decode_step_follows_its_line_and_larger_batches_and_contexts_do_not_get_cheaper(model, devices):
    cost = operator_table_cost(load_model(model), A100, Parallelism(devices))
    for num_seqs in (1, 3, 40, 300):
        for context in (num_seqs, 900 * num_seqs, 3000 * num_seqs):
            line = cost.decode_line(num_seqs, context)
            assert line.until_context > context
            assert cost.step_ns(decode(num_seqs, context)) == line.step_ns(context)
    steps = [cost.step_ns(decode(64, 64 * mean)) for mean in (100, 1000, 2000, 4000, 8000)]
    assert steps == sorted(steps)
    prompts = [cost.step_ns(prefill(tokens)) for tokens in (64, 512, 2048, 8192, 20_000)]
    assert prompts == sorted(prompts)


def test_the_products_of_a_layer_hold_all_parameters_that_the_model_counts():
    for name in ("llama-3.1-70b", "opt-13b", "qwen3-30b-a3b"):
        model = load_model(name)
        products = sum(shape.count * shape.inputs * shape.outputs for shape in linear_shapes(model, 1))
        experts = model.num_moe_layers * model.moe.experts * model.expert_parameters if model.moe else 0
        assert products + experts == model.layer_parameters()


def test_tensor_parallel_devices_share_the_work_and_pay_for_the_sums():
    model = load_model("llama-3.1-70b")
    two, eight = (operator_table_cost(model, A100, Parallelism(devices)) for devices in (2, 8))
    assert 1 < two.step_ns(prefill(4096)) / eight.step_ns(prefill(4096)) < 4


def test_the_time_of_the_host_is_added_to_every_step():
    model = load_model("llama-3.1-8b")
    free, slow = (operator_table_cost(model, A100, step_overhead_s=seconds) for seconds in (0.0, 0.002))
    assert slow.step_ns(decode(8, 800)) - free.step_ns(decode(8, 800)) == pytest.approx(2_000_000, abs=2)
    assert slow.step_ns(prefill(100)) - free.step_ns(prefill(100)) == pytest.approx(2_000_000, abs=2)


@pytest.mark.parametrize(
    ("model", "hardware", "options", "param"),
    [
        ("llama-3.1-8b", "rtx-4090", {}, "hardware"),
        ("deepseek-v3", "a100-80gb", {"parallelism": Parallelism(8)}, "model"),
        ("opt-13b", "a100-80gb", {"parallelism": Parallelism(5)}, "tensor_parallel"),
    ],
)
def test_what_was_not_measured_is_refused_by_name(model, hardware, options, param):
    with pytest.raises(ConfigError) as caught:
        operator_table_cost(load_model(model), load_hardware(hardware), **options)
    assert caught.value.param == param


@pytest.mark.parametrize("name", operator_table_names())
def test_fewer_bits_of_experts_are_never_slower(name):
    model, split = load_model("qwen3-235b-a22b"), Parallelism(8)
    wide, narrow, least = (
        operator_table_cost(model, load_hardware(name), split, weight_bits=bits) for bits in (16, 8, 4)
    )
    for batch in (1, 64, 256):
        steps = [cost.step_ns(decode(batch, 1000 * batch)) for cost in (least, narrow, wide)]
        assert steps == sorted(steps)
    for tokens in (64, 1000, 8192):
        steps = [cost.step_ns(prefill(tokens)) for cost in (least, narrow, wide)]
        assert steps == sorted(steps)
    assert narrow.step_ns(decode(64, 64_000)) < 0.9 * wide.step_ns(decode(64, 64_000))


def test_what_was_not_measured_with_few_bits_is_scaled_and_said():
    model, moe, h100 = load_model("llama-3.1-8b"), load_model("qwen3-235b-a22b"), load_hardware("h100")
    assert not any("bits" in said for said in operator_table_cost(model, h100, weight_bits=8).assumptions)
    assert any(
        "of 4 bits take those of 8 bits" in x for x in operator_table_cost(model, h100, weight_bits=4).assumptions
    )
    assert any("of 8 bits take those of 16" in x for x in operator_table_cost(model, A100, weight_bits=8).assumptions)
    assert any("KV of 8 bits" in sentence for sentence in operator_table_cost(model, A100, kv_bits=8).assumptions)
    said = operator_table_cost(moe, A100, Parallelism(8), weight_bits=8).assumptions
    assert any("experts of 8 bits take those measured with 16 bits" in sentence for sentence in said)
    assert operator_table_cost(moe, h100, Parallelism(4, expert=4), weight_bits=8).assumptions == ()


def test_experts_of_their_own_take_what_was_measured_with_them():
    model, h100 = load_model("qwen3-235b-a22b"), load_hardware("h100")
    experts = load_operator_tables(h100).experts
    row = next(
        row
        for row in operator_data("h100-sxm")["experts"]["16"]
        if (row["hidden"], row["intermediate"], row["experts"], row["expert_parallel"]) == (4096, 1536, 128, 8)
    )
    curve = experts.curve(model, Parallelism(8, expert=8))
    assert [curve(knot) for knot in row["knots"]] == row["us"]


def test_sixteen_devices_pay_for_the_network_between_their_hosts():
    model = load_model("llama-3.1-405b")
    hardware = load_hardware("h100")
    eight, sixteen = (operator_table_cost(model, hardware, Parallelism(size)) for size in (8, 16))
    assert any("InfiniBand" in sentence for sentence in sixteen.assumptions)
    reduces = (2 * model.layers + 1) * 1e9 * between_hosts(hardware, 16).seconds(2 * model.hidden * 8)
    assert sixteen.step_ns(decode(8, 8000)) > reduces
    assert sixteen.step_ns(prefill(4096)) < eight.step_ns(prefill(4096))


def test_data_parallel_groups_split_the_sequences_and_share_the_experts():
    model, h100 = load_model("qwen3-235b-a22b"), load_hardware("h100")
    cost = operator_table_cost(model, h100, Parallelism(4, expert=8, data=2), weight_bits=8)
    assert cost.tables.groups == 2
    assert cost.step_ns(decode(63, 63_000)) == pytest.approx(cost.step_ns(decode(64, 64_000)), rel=0.02)
    chunks = [ScheduledPrefill(name, 0, 4096, (), True) for name in "ab"]
    features = StepFeatures(8192, 2 * chunk_attention(0, 4096))
    both = SchedulerOutput(0, tuple(chunks), features=features)
    one_group = operator_table_cost(model, h100, Parallelism(4, expert=4), weight_bits=8)
    assert cost.step_ns(prefill(4096)) < cost.step_ns(both) < 0.8 * one_group.step_ns(both)
    line = cost.decode_line(64, 64_000)
    assert line.step_ns(64_000) == cost.step_ns(decode(64, 64_000))


def test_a_device_with_another_speed_was_not_measured():
    model, h100 = load_model("llama-3.1-8b"), load_hardware("h100")
    with pytest.raises(ConfigError, match="memory_bandwidth of hardware are not those of the h100-sxm"):
        operator_table_cost(model, replace(h100, memory_bandwidth=2 * h100.memory_bandwidth))
    cheaper = operator_table_cost(model, replace(h100, price_per_hour=1.0))
    assert cheaper.step_ns(decode(8, 8000)) == operator_table_cost(model, h100).step_ns(decode(8, 8000))
