"""Windows and linear attention: what they keep and what they cost stops growing with the context."""

from dataclasses import replace

import pytest

from diptych.control.config import CacheConfig, EngineConfig, shape_preset
from diptych.control.engine.engine_core import EngineCore
from diptych.control.errors import ConfigError
from diptych.control.kv_layout import GroupKind, KVGroup
from diptych.control.page_groups import deal_windows
from diptych.control.step import ScheduledPrefill, SchedulerOutput, StepFeatures, chunk_attention
from diptych.simulation.costs.bounded_attention import fullest, window_pairs
from diptych.simulation.costs.cost_choice import choose_cost
from diptych.simulation.costs.roofline import RooflineCost
from diptych.simulation.fleet.members import fleet
from diptych.simulation.hardware import load_hardware
from diptych.simulation.model_catalogue import load_model
from diptych.simulation.models import kv_bytes_per_gpu, kv_capacity_tokens
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.prepare import cache_config, mean_context, prepare
from diptych.simulation.scenario import Scenario
from diptych.simulation.settings import settings_from
from tests.simulation.linear_cost import LinearCost

H100 = load_hardware("h100")


def test_pairs_within_a_window_are_counted_one_by_one() -> None:
    for start, tokens, window in [(0, 5, 3), (2, 5, 3), (7, 4, 3), (0, 3, 8), (6, 4, 8), (0, 1, 1), (5, 0, 4)]:
        assert window_pairs(start, tokens, window) == sum(min(start + i + 1, window) for i in range(tokens))
    assert window_pairs(100, 50, 10**9) == chunk_attention(100, 50)
    assert (fullest([3, 4], 1), fullest([3, 4], 2), fullest([1, 9], 2)) == (7, 4, 9)


def test_a_window_keeps_its_tokens_and_a_state_does_not_grow() -> None:
    gemma, qwen = load_model("gemma-3-27b"), load_model("qwen3-next-80b-a3b")
    layer = 2 * 16 * 128 * 2
    assert gemma.kv_bytes_per_token(context=512) == 62 * layer
    assert gemma.kv_bytes_per_token(context=8192) == 10 * layer + 52 * layer // 8
    for context in (4096, 65536):
        whole = context * qwen.kv_bytes_per_token(context=context)
        assert whole == pytest.approx(context * 12 * 2 * 2 * 256 * 2 + qwen.state_bytes, rel=1e-3)
    state = 36 * (32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2)
    assert qwen.state_bytes == state
    assert kv_bytes_per_gpu(qwen, Parallelism(tensor=2), 16, 1000) == pytest.approx(12 * 1024 + state / 2000, abs=1)


def test_the_cache_is_sized_for_the_sequences_of_the_workload() -> None:
    model = load_model("gemma-3-27b")
    sizes = [
        kv_capacity_tokens(model, H100, parallelism=Parallelism(tensor=4), context=context)
        for context in (0, 512, 1024, 4096, 32768)
    ]
    assert sizes[0] == sizes[1] == sizes[2] and sizes[2] < sizes[3] < sizes[4] < 6.3 * sizes[0]
    settings = settings_from({
        "model": "gemma-3-27b", "hardware": "h100", "tensor_parallel": 4,
        "workload": {"num_requests": 20, "lengths": {"prompt": {"mean": 8000}, "output": {"mean": 200}}},
    })  # fmt: skip
    assert mean_context(settings, model) == 8100
    assert mean_context(settings, load_model("llama-3-8b")) == 0
    prepared = prepare(settings)
    cache = cache_config(settings, shape_preset("chunked"), prepared.cost)
    step_tokens = prepared.scenario.engine.scheduler.budget.max_batched_tokens
    expected = kv_capacity_tokens(model, H100, parallelism=Parallelism(tensor=4), context=8100, step_tokens=step_tokens)
    assert len(cache.groups) > 1 and cache.layout.tokens_within(cache.num_blocks, 8100) == pytest.approx(
        expected, rel=0.08
    )
    tiers = settings_from({
        "model": "gemma-3-27b", "hardware": "h100", "tensor_parallel": 4, "memory": {"host_bytes": 2**30},
        "workload": {"num_requests": 20, "lengths": {"prompt": {"mean": 8000}, "output": {"mean": 200}}},
    })  # fmt: skip
    below = prepare(tiers).scenario.engine.cache
    places = deal_windows([0] * 10 + [1024] * 52, 32, model.max_context).num_places
    page = 4 * (32 * kv_bytes_per_gpu(model, Parallelism(tensor=4)) * places // 62)
    assert below.groups == cache.groups and below.num_host_blocks == 2**30 // page


def test_a_cache_is_counted_in_blocks_of_groups_as_a_worker_counts_it() -> None:
    def cache(name: str, **memory: int) -> CacheConfig:
        settings = settings_from({
            "model": name, "hardware": "h100", "tensor_parallel": 8, "memory": memory, "workload": {"num_requests": 1}
        })  # fmt: skip
        return cache_config(settings, shape_preset("chunked"), prepare(settings).cost)

    gemma, model = cache("gemma-3-27b", kv_cache_tokens=32_000), load_model("gemma-3-27b")
    layers = deal_windows([0] * 10 + [1024] * 52, 32, model.max_context)
    assert gemma.groups == layers.groups and gemma.num_blocks == 1000 * len(layers.groups)
    assert cache("llama-3.1-8b", kv_cache_tokens=32_000).num_blocks == 1000
    token = kv_bytes_per_gpu(model, Parallelism(tensor=8))
    sized = cache("gemma-3-27b", kv_cache_bytes=32 * 500 * token)
    assert sized.num_blocks == 500 * 62 // layers.num_places
    assert cache("gemma-3-27b", kv_cache_tokens=32_000, block_size=16).num_blocks == 2000 * len(layers.groups)


def test_a_worker_promises_what_its_cache_holds() -> None:
    """Also where a step computes less than a block: a prompt keeps its last boundary."""
    groups = (KVGroup(16), KVGroup(16, GroupKind.WINDOW, 1))
    for window_chunk, capacity in ((1, 224), (16, 224), (17, 224), (18, 208)):
        engine = EngineConfig(CacheConfig(20, 16, groups=groups, window_chunk=window_chunk))
        (member,) = fleet(Scenario(engine=engine, cost=LinearCost(1), workload=[]))
        assert member.info.max_model_len == EngineCore(engine).kv.capacity_tokens == capacity


def decode_ns(name: str, num_seqs: int, mean: int) -> int:
    """Time of the attention of one decode step."""
    return (
        RooflineCost(load_model(name), H100, Parallelism(tensor=4))
        .decode_line(num_seqs, num_seqs * mean)
        .step_ns(num_seqs * mean)
    )


@pytest.mark.parametrize(("name", "window"), [("gpt-oss-120b", 128), ("gemma-3-27b", 1024), ("gemma-2-9b", 4096)])
def test_beyond_the_window_a_decode_step_grows_with_the_full_layers_alone(name: str, window: int) -> None:
    model = load_model(name)
    assert model.window is not None
    inside = decode_ns(name, 64, window) - decode_ns(name, 64, window // 2)
    beyond = decode_ns(name, 64, 4 * window) - decode_ns(name, 64, 3 * window)
    assert beyond / 2 / inside == pytest.approx(model.full_layers / model.layers, rel=0.02)
    full = RooflineCost(replace(model, window=None), H100, Parallelism(tensor=4))
    for mean in (window // 2, window):
        assert decode_ns(name, 64, mean) == pytest.approx(full.decode_line(64, 64 * mean).step_ns(64 * mean), rel=1e-6)
    line = RooflineCost(model, H100, Parallelism(tensor=4)).decode_line(4, 4 * window)
    assert line.until_context == 4 * window + 1


def test_a_state_costs_every_sequence_the_same() -> None:
    name = "qwen3-next-80b-a3b"
    grown = decode_ns(name, 64, 8000) - decode_ns(name, 64, 4000)
    model = load_model(name)
    full = replace(model, linear=None)
    cost = RooflineCost(full, H100, Parallelism(tensor=4))
    grown_full = cost.decode_line(64, 64 * 8000).step_ns(64 * 8000) - cost.decode_line(64, 64 * 4000).step_ns(64 * 4000)
    assert grown / grown_full == pytest.approx(12 / 48, rel=0.01)
    per_sequence = decode_ns(name, 128, 1) - decode_ns(name, 64, 1)
    state_ns = 64 * 2 * model.state_bytes / 4 / (H100.memory_bandwidth * H100.achieved.decode_memory) * 1e9
    assert per_sequence > state_ns


def chunk(start: int, tokens: int) -> SchedulerOutput:
    """A step with one chunk of a prompt."""
    features = StepFeatures(tokens, chunk_attention(start, tokens), 0, 0)
    prefill = ScheduledPrefill("a", start, tokens, (), False)
    return SchedulerOutput(step_id=1, prefills=(prefill,), features=features)


@pytest.mark.parametrize("name", ["gpt-oss-120b", "gemma-3-27b", "llama-4-scout", "qwen3-next-80b-a3b"])
def test_chunks_cost_more_the_later_they_are_but_less_than_with_full_attention(name: str) -> None:
    model = load_model(name)
    cost = RooflineCost(model, H100, Parallelism(tensor=8 if "llama" in name else 2))
    times = [cost.step_ns(chunk(start, 2048)) for start in (0, 2048, 16384, 65536)]
    assert times == sorted(times)
    if model.window:
        full = RooflineCost(replace(model, window=None), H100, Parallelism(tensor=8 if "llama" in name else 2))
        assert times[-1] < full.step_ns(chunk(65536, 2048))


def test_published_weights_count_as_they_are_published() -> None:
    choice = choose_cost("auto", model="gpt-oss-120b", hardware="h100")
    assert choice.weights is not None and choice.weights.name == "16 bits, experts 4.25 bits"
    assert choice.words.startswith("roofline of gpt-oss-120b on 1 x h100-sxm (weights 16 bits, experts 4.25")
    assert any("window of 128 tokens" in sentence for sentence in choice.assumptions)
    assert any("experts of 4.25 bits" in sentence for sentence in choice.assumptions)
    model = load_model("gpt-oss-120b")
    assert model.weight_bytes(choice.weights) / 1e9 == pytest.approx(65.2, rel=0.02)  # the checkpoint has 65.3 GB
    widened = choose_cost("roofline", model="gpt-oss-120b", hardware="h100", weight_bits=16)
    assert widened.weights is not None and widened.weights.experts is None
    deepseek = choose_cost("auto", model="deepseek-v3", hardware="h200", parallelism=Parallelism(tensor=8))
    assert deepseek.weights is not None and deepseek.weights.bits == 8
    with pytest.raises(ConfigError, match="have a window, which was not measured on h100-sxm"):
        choose_cost("operators", model="gemma-3-27b", hardware="h100")
    with pytest.raises(ConfigError, match="have linear attention, which was not measured"):
        choose_cost("operators", model="qwen3-next-80b-a3b", hardware="h100")


@pytest.mark.parametrize("name", ["h20", "b300", "mi350x", "mi355x"])
def test_devices_of_a_data_sheet_say_that_their_efficiencies_are_assumed(name: str) -> None:
    choice = choose_cost("auto", model="llama-3-8b", hardware=name)
    assert choice.words == f"roofline of llama-3-8b on 1 x {name}, with assumed efficiencies"
    assert choice.assumptions[0].startswith(f"{name}: every achieved share")
