"""A KV cache of whole numbers of 8 bits: each value within half a step, half the memory, and the same bits for a token
whatever is beside it, wherever its blocks have been."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diptych.control.errors import ConfigError
from diptych.control.events import RequestPreempted
from diptych.control.request import FinishReason
from diptych.control.step import TokenLogprobs
from diptych.runtime.attention.layout import allocate_cpu, read_cpu, to_numbers, write_cpu
from diptych.runtime.kernels.instruction_set import TORCH
from diptych.runtime.kv_cache.checkpoint_geometry import read_kv_geometry
from diptych.runtime.local_engine import engine_config
from diptych.runtime.ops import make_ops
from diptych.runtime.ops.torch_ops import TorchOps
from diptych.runtime.step.model_runner import RunnerConfig, load_runner
from diptych.runtime.transfer.codec.kv_codec import KVCodec
from diptych.runtime.transfer.codec.wire_format import WireEncoding, wire_encoding
from diptych.runtime.transfer.kv_format import KVFormat
from diptych.serving.link.engine_options import BUNDLED_MODEL, DeviceOptions, EngineOptions, MemoryOptions
from diptych.serving.llm import LLM
from diptych.serving.start_checks import check_start
from diptych.serving.worker.load_engine import kv_format
from tests.runtime.checkpoints import prompt_of, reference, runner
from tests.runtime.driving import chunks_of, generate, greedy, hand_off
from tests.runtime.gathering_engine import GatheringEngine
from tests.runtime.kernel_sets import EVERY, FASTEST_NATIVE, NATIVE, every_pair
from tests.runtime.test_attention import HEADS, Sequences, Shape, check_same_bits, make_batch
from tests.runtime.test_freed_windows import PROMPTS, chunked, freeing, logprobs_of, spoil
from tests.runtime.test_handoff_by_layer import connected
from tests.runtime.test_model_runner import crowded_engine, fixed_budget

FAMILIES = ["llama", "gemma3", "qwen2-window", "olmo3", "mixtral", "gpt-oss"]


def exact(cache_of: torch.Tensor) -> torch.Tensor:
    """What rows [..., heads, head_dim] become in the cache, fp32."""
    scales, numbers = to_numbers(cache_of)
    return numbers * scales.unsqueeze(-1)


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 300.0, 1e30])
def test_a_value_comes_back_within_half_a_step_of_its_row(size: float) -> None:
    rows = torch.randn(50, 3, 64) * size
    rows[7] = 0.0
    back, steps = exact(rows), rows.abs().amax(-1, keepdim=True) / 127
    assert bool(((back - rows).abs() <= steps * 0.5001).all())
    assert not back[7].any()


@pytest.mark.parametrize(("dtype", "instruction_set"), NATIVE)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), [(4, 2, 64, 16), (3, 3, 80, 32), (2, 1, 40, 16)])
def test_kernels_write_the_numbers_of_the_reference_and_nothing_else(
    dtype: str, instruction_set: str, heads: int, kv_heads: int, dim: int, block_size: int
) -> None:
    compute: torch.dtype = getattr(torch, dtype)
    rows = 37
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(compute)
    qkv[3] = 0.0
    still = torch.cat([torch.ones(9, dim // 2), torch.zeros(9, dim // 2)], 1)  # no rotation: the same keys everywhere
    positions, slots = torch.randint(0, 9, (rows,)), torch.randperm(5 * block_size)[:rows]
    caches = []
    for ops in (make_ops(compute, instruction_set), TorchOps()):
        pair = allocate_cpu(5, kv_heads, block_size, dim, torch.int8)
        ops.rope_and_cache(qkv.clone(), positions, still, slots, *pair)
        caches.append(pair)
    for ours, theirs in zip(*caches, strict=True):
        assert torch.equal(ours, theirs)
    keys, values = (part.reshape(rows, kv_heads, dim) for part in qkv[:, heads * dim :].chunk(2, 1))
    for read, written in zip(read_cpu(*caches[0], slots), (keys, values), strict=True):
        assert torch.equal(read, exact(written))


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("window", "has_sinks", "heads"),
    [(window, has_sinks, heads) for heads in HEADS for window, has_sinks in ((None, False), (40, True))],
)
def test_attention_is_that_over_the_values_of_the_cache(
    dtype: str, window: int | None, has_sinks: bool, heads: tuple[int, int, int, int]
) -> None:
    shape = Shape(*heads, dtype, "int8")
    wide = Shape(*heads, "float32")
    how = shape.how(window, has_sinks=has_sinks)
    sequences = Sequences(shape, [1, 17, 300, 257, 700, 130])
    of_cache = Sequences(wide, sequences.lengths)  # the same blocks
    of_cache.q = [q.float() for q in sequences.q]
    of_cache.k, of_cache.v = [exact(k) for k in sequences.k], [exact(v) for v in sequences.v]
    chunks = [(0, 0, 1), (1, 16, 1), (2, 299, 1), (3, 200, 57), (4, 0, 700), (5, 3, 127)]
    expected = of_cache.attend(wide.backend(), chunks, how)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for instruction_set in [TORCH, *(name for kind, name in NATIVE if kind == dtype)]:
        backend = shape.backend(instruction_set)
        assert backend.name == ("torch-cpu" if instruction_set == TORCH else "native-cpu")
        for ours, theirs in zip(sequences.attend(backend, chunks, how), expected, strict=True):
            torch.testing.assert_close(ours.float(), theirs, rtol=tolerance, atol=tolerance, msg=instruction_set)


@pytest.mark.parametrize(("dtype", "instruction_set"), NATIVE)
@pytest.mark.parametrize(("window", "softcap", "has_sinks"), [(None, None, True), (100, 2.0, False)])
def test_a_token_is_bitwise_the_same_whole_chunked_decoded_and_in_any_batch(
    dtype: str, instruction_set: str, window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    check_same_bits(Shape(6, 2, 64, 32, dtype, "int8"), instruction_set, window, softcap, has_sinks)


def poisoned(cache: torch.Tensor) -> torch.Tensor:
    """Bytes that make every scale not a number."""
    cache.fill_(-1)
    assert cache.flatten().view(torch.float32).isnan().all()
    return cache


@pytest.mark.parametrize(("dtype", "instruction_set"), EVERY)
def test_stale_memory_behind_the_last_token_is_never_seen(dtype: str, instruction_set: str) -> None:
    shape = Shape(2, 1, 32, 32, dtype, "int8")
    backend = shape.backend(instruction_set)
    q, (k, v) = torch.randn(7, 2, 32).to(shape.dtype), torch.randn(2, 40, 1, 32).to(shape.dtype)
    results = []
    for caches in (backend.allocate(2), tuple(map(poisoned, backend.allocate(2)))):
        for count in (1, 7):
            write_cpu(k, v, *caches, torch.arange(40))
            batch = make_batch([(40 - count, count)], 32, [[0, 1]])
            results.append(backend.run(q[:count], *caches, backend.plan(batch, shape.how())))
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    assert bool(results[3].isfinite().all())


@pytest.mark.parametrize(("dtype", "instruction_set"), NATIVE)
def test_a_row_that_is_not_finite_is_seen_by_its_sequence_and_by_no_other(dtype: str, instruction_set: str) -> None:
    shape = Shape(4, 2, 64, 16, dtype, "int8")
    backend, sequences = shape.backend(instruction_set), Sequences(shape, [90, 70])
    chunks = [(0, 89, 1), (1, 69, 1), (0, 10, 30), (0, 50, 20)]
    before = sequences.attend(backend, chunks)
    for part, value in ((sequences.k, float("inf")), (sequences.v, float("nan"))):
        kept = part[0][45, 0, 3].clone()
        part[0][45, 0, 3] = value
        after = sequences.attend(backend, chunks)
        part[0][45, 0, 3] = kept
        assert bool(after[0].isnan().any()) and bool(after[3].isnan().any())
        assert torch.equal(after[1], before[1]) and torch.equal(after[2], before[2])


@pytest.mark.parametrize(("dtype", "instruction_set"), EVERY)
def test_blocks_before_a_window_are_not_read(dtype: str, instruction_set: str) -> None:
    shape, window = Shape(6, 2, 64, 16, dtype, "int8"), 40
    backend, how = shape.backend(instruction_set), shape.how(window)
    sequences = Sequences(shape, [600, 90])
    chunks = [(0, 599, 1), (1, 80, 1), (0, 511, 40)]
    whole = sequences.attend(backend, chunks, how)
    tables = [list(sequences.tables[sequence]) for sequence, _, _ in chunks]
    for table, (_, start, _) in zip(tables, chunks, strict=True):
        gone = max(0, start - window + 1) // 16
        table[:gone] = [sequences.num_blocks] * gone
    batch = make_batch([(start, count) for _, start, count in chunks], 16, tables)
    q = torch.cat([sequences.q[sequence][start : start + count] for sequence, start, count in chunks])
    caches = [torch.cat([cache, poisoned(cache[:1].clone())]) for cache in sequences.cache(backend)]
    assert torch.equal(backend.run(q, *caches, backend.plan(batch, how)), torch.cat(whole))


# ---------------------------------------------------------------- models


@pytest.mark.parametrize(("family", "dtype", "instruction_set"), every_pair(FAMILIES, NATIVE))
def test_a_model_gives_the_same_bits_in_chunks_batches_parts_and_after_hits(
    family: str, dtype: str, instruction_set: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = runner(family, instruction_set, dtype, kv_dtype="int8")
    prompt, sampling = prompt_of(150), greedy(30, logprobs=4)

    def results(engine: GatheringEngine) -> list[TokenLogprobs]:
        engine.add("r", prompt, sampling)
        return engine.run()["r"].logprobs

    twice = GatheringEngine(shared, engine_config(shared))
    alone = results(twice)
    twice.add("again", prompt, sampling)
    assert twice.run()["again"].logprobs == alone and twice.core.stats().prefix_hit_tokens == 128
    for chunk in (70, 149):
        engine = GatheringEngine(shared, engine_config(shared, fixed_budget(chunk), enable_prefix_cache=False))
        assert results(engine) == alone
    crowd = GatheringEngine(shared, engine_config(shared, fixed_budget(96)))
    for index in range(12):
        crowd.add(f"other{index}", prompt_of(5 + 20 * index, seed=1), greedy(10 + 3 * index))
    assert results(crowd) == alone
    if shared.model.layers.native_step is not None:
        monkeypatch.setattr(shared.model.layers, "native_step", None)
        assert results(GatheringEngine(shared, engine_config(shared))) == alone


@pytest.mark.parametrize(("family", "dtype", "instruction_set"), every_pair(["gemma3", "gpt-oss"], NATIVE))
def test_a_cache_that_frees_windows_gives_the_bits_of_one_that_keeps_everything(
    family: str, dtype: str, instruction_set: str
) -> None:
    expected = logprobs_of(runner(family, instruction_set, dtype, kv_dtype="int8"), PROMPTS, chunked(2000))
    found = freeing(family, instruction_set, dtype, "int8")
    for tokens in (2000, 33):
        spoil(found)
        assert logprobs_of(found, PROMPTS, chunked(tokens)) == expected


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize(("dtype", "instruction_set"), NATIVE)
def test_a_model_gives_the_same_bits_after_preemption(dtype: str, instruction_set: str, preemption: str) -> None:
    shared = runner("llama", instruction_set, dtype, kv_dtype="int8")
    crowded = crowded_engine(shared, preemption, num_blocks=16)
    prompts = {f"r{i}": prompt_of(40 + 13 * i, seed=i) for i in range(5)}
    for request_id, prompt in prompts.items():
        crowded.add(request_id, prompt, greedy(60, logprobs=4))
    results = crowded.run()
    assert any(isinstance(event, RequestPreempted) for event in crowded.events)
    for request_id, prompt in prompts.items():
        alone = GatheringEngine(shared, engine_config(shared))
        alone.add(request_id, prompt, greedy(60, logprobs=4))
        assert alone.run()[request_id].logprobs == results[request_id].logprobs


@pytest.mark.parametrize("instruction_set", [TORCH, FASTEST_NATIVE[1]])
def test_a_model_is_nearly_the_one_with_a_cache_of_its_dtype(instruction_set: str) -> None:
    prompt, found = prompt_of(200), []
    for kv_dtype in ("auto", "int8"):
        shared = runner("llama", instruction_set, "bfloat16", kv_dtype=kv_dtype)
        _, results = generate(shared, prompt, [200], greedy(1, logprobs=8))
        found.append(dict(results[0].payload.logprobs[0].top))
    common = found[0].keys() & found[1].keys()
    assert common and all(abs(found[0][token] - found[1][token]) < 0.25 for token in common)


def test_blocks_left_by_a_broken_request_do_no_harm() -> None:
    broken = load_runner(RunnerConfig(reference("qwen3").directory, num_blocks=12, kv_dtype="int8"))
    engine = GatheringEngine(broken, engine_config(broken, fixed_budget(64)))
    results = []
    for _ in range(2):
        engine.add("r", prompt_of(37), greedy(20, logprobs=2))
        results.append(engine.run()["r"])
        for pair in broken.kv.layers:
            for cache in pair:
                poisoned(cache)
        engine = GatheringEngine(broken, engine_config(broken, fixed_budget(64)))
    assert results[0].logprobs == results[1].logprobs and results[1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_takes_its_numbers_and_a_scale_for_each_token_and_head(dtype: str) -> None:
    directory = reference("llama", dtype).directory
    whole, half = (read_kv_geometry(directory, dtype, 32, kv_dtype=kind) for kind in ("auto", "int8"))
    dim = whole.head_dim
    assert half.block_bytes / whole.block_bytes == (dim + 4) / (dim * (4 if dtype == "float32" else 2))
    shared = runner("llama", dtype=dtype, kv_dtype="int8")
    taken = sum(cache.nbytes for region in shared.kv.regions for cache in region)
    assert taken == shared.num_blocks * half.block_bytes and shared.attention.geometry == half


# ---------------------------------------------------------------- ways of a block


@pytest.mark.parametrize("chunk_tokens", [40, 200])
def test_an_answer_that_is_handed_over_is_that_of_one_runner(chunk_tokens: int) -> None:
    first = runner("llama", kv_dtype="int8")
    second = load_runner(RunnerConfig(reference("llama").directory, num_blocks=30, kv_dtype="int8"))
    prefill, decode = connected(first), connected(second)
    prompt, sampling = prompt_of(200), greedy(8)
    expected, _ = generate(first, prompt, chunks_of(200, chunk_tokens), sampling)
    assert hand_off(prefill, decode, "a", prompt, sampling, chunk_tokens) == expected
    for sent, received in zip(first.kv.layers, second.kv.layers, strict=True):
        for computed, arrived in zip(sent, received, strict=True):
            assert torch.equal(computed[20:26], arrived[10:16])
    for side in (prefill, decode):
        side.connector.close()


def test_blocks_that_were_computed_in_another_dtype_are_others() -> None:
    config = RunnerConfig(reference("llama").directory, num_blocks=4, kv_dtype="int8")
    for quantize in ("none", "int8"):  # with int8 the formats of the weights do not say it
        found = [
            kv_format(load_runner(replace(config, dtype=dtype, quantize=quantize))) for dtype in ("float32", "bfloat16")
        ]
        assert found[0].model != found[1].model and found[0].dtype == found[1].dtype == "int8"


def test_the_start_says_that_the_cache_is_in_8_bits() -> None:
    memory = MemoryOptions(kv_dtype="int8", kv_cache_bytes=1 << 24)
    with LLM(options=EngineOptions(memory=memory, warm_up=False)) as llm:
        assert "GiB, int8)" in llm.ready.description


FORMAT = KVFormat("m", 2, 2, 32, "int8", 32, "cpu")


def test_a_format_says_its_dtype_and_only_equal_ones_are_copied_as_they_lie() -> None:
    assert KVFormat.from_bytes(FORMAT.to_bytes()) == FORMAT
    assert FORMAT.bytes_per_block == 2 * 2 * 32 * 2 * (32 + 4)
    assert wire_encoding("none", FORMAT, FORMAT) is WireEncoding.RAW
    assert wire_encoding("none", FORMAT, replace(FORMAT, dtype="bfloat16")) is WireEncoding.BF16
    assert wire_encoding("none", FORMAT, replace(FORMAT, block_size=64)) is WireEncoding.FP32


@pytest.mark.parametrize(("dtype", "block_size"), [("bfloat16", 32), ("float32", 16), ("int8", 64)])
def test_another_cache_takes_the_values(dtype: str, block_size: int) -> None:
    other = replace(FORMAT, dtype=dtype, block_size=block_size)
    encoding, caches = wire_encoding("none", FORMAT, other), []
    for form in (FORMAT, other):
        layers = [
            allocate_cpu(64 // form.block_size, 2, form.block_size, 32, getattr(torch, form.dtype)) for _ in range(2)
        ]
        caches.append((layers, KVCodec(layers, form, encoding)))
    k, v, slots = torch.randn(50, 2, 32), torch.randn(50, 2, 32), torch.arange(50)
    for layer in caches[0][0]:
        write_cpu(k, v, *layer, slots)
    wire = bytearray(caches[0][1].num_bytes(50))
    caches[0][1].encode(range(2), 0, 50, wire)
    caches[1][1].decode(wire, range(64 // block_size), 0, 50)
    for layer in caches[1][0]:
        for read, written in zip(read_cpu(*layer, slots), (k, v), strict=True):
            torch.testing.assert_close(read.float(), exact(written), rtol=1e-2, atol=1e-6)


# ---------------------------------------------------------------- refusals


def test_what_a_cache_of_whole_numbers_cannot_be_is_named(tmp_path: Path) -> None:
    disk = MemoryOptions(kv_dtype="int8", disk=str(tmp_path), disk_bytes=1 << 20, disk_codec="int8")
    with pytest.raises(ConfigError, match="kv_disk_codec is int8 and kv_dtype is int8: blocks are in 8 bits already"):
        check_start(EngineOptions(model=str(BUNDLED_MODEL), memory=disk))
    cuda = DeviceOptions(device="cuda")  # refused before a process is started, whether there is one or not
    with pytest.raises(ConfigError, match="kv_dtype is 'int8' and device is cuda; supported: cpu"):
        check_start(EngineOptions(model=str(BUNDLED_MODEL), device=cuda, memory=MemoryOptions(kv_dtype="int8")))
    with pytest.raises(ConfigError, match="kv_dtype is 'int8' and device is cuda; supported: cpu"):
        load_runner(RunnerConfig(reference("llama").directory, device="cuda", kv_dtype="int8"))
    with pytest.raises(ConfigError, match="kv_dtype is int8; heads of this model have 33 values"):
        Shape(2, 1, 33, 16, "float32", "int8").backend()
