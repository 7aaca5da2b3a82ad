"""Paged attention: native equals torch, whole equals chunked, alone equals in a batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from diptych.runtime.attention import make_attention
from diptych.runtime.attention.attention_backend import AttentionBackend
from diptych.runtime.attention.input_batch import InputBatch
from diptych.runtime.attention.layout import write_cpu, write_cuda
from diptych.runtime.kernels.instruction_set import TORCH
from diptych.runtime.kernels.native import load_native
from diptych.runtime.models.model_config import AttentionConfig, LayerAttention
from tests.runtime.kernel_sets import EVERY, FASTEST_NATIVE, NATIVE, pairwise

CPU = torch.device("cpu")


def make_batch(chunks: list[tuple[int, int]], block_size: int, tables: list[list[int]]) -> InputBatch:
    """Sequences as (context before, new tokens); decodes (one token) first."""
    starts = [0]
    for _, new in chunks:
        starts.append(starts[-1] + new)
    width = max(len(table) for table in tables)
    padded = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)
    positions = torch.cat([torch.arange(before, before + new) for before, new in chunks])
    slots = torch.cat(
        [
            torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(before, before + new)])
            for (before, new), table in zip(chunks, tables, strict=True)
        ]
    )
    return InputBatch(
        token_ids=torch.zeros(starts[-1], dtype=torch.int64),
        positions=positions,
        slot_mappings=(slots,),
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([before + new for before, new in chunks], dtype=torch.int32),
        block_tables=(padded,),
        sample_rows=torch.empty(0, dtype=torch.int64),
        num_decodes=sum(new == 1 for _, new in chunks),
        max_query_len=max(new for _, new in chunks),
        max_context_len=max(before + new for before, new in chunks),
    )


@dataclass(frozen=True)
class Shape:
    """The heads of a model of one layer, and its blocks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype_name: str
    kv_dtype: str = "auto"

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype_name)

    def how(
        self, window: int | None = None, softcap: float | None = None, *, has_sinks: bool = False
    ) -> LayerAttention:
        return LayerAttention(self.head_dim**-0.5, window, softcap, has_sinks)

    def config(self, *layers: LayerAttention) -> AttentionConfig:
        return AttentionConfig(self.num_heads, self.num_kv_heads, self.head_dim, layers or (self.how(),))

    def backend(self, instruction_set: str = TORCH, *layers: LayerAttention) -> AttentionBackend:
        return make_attention(
            self.config(*layers), self.block_size, self.dtype, CPU, instruction_set, kv_dtype=self.kv_dtype
        )


class Sequences:
    """Random q, k, v of several sequences in one cache, with blocks in random places."""

    def __init__(self, shape: Shape, lengths: list[int], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.shape, self.lengths = shape, lengths
        size = shape.block_size
        counts = [-(-length // size) for length in lengths]
        order = torch.randperm(sum(counts) + 3).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        self.num_blocks = sum(counts) + 3
        self.q = [torch.randn(length, shape.num_heads, shape.head_dim).to(shape.dtype) for length in lengths]
        kv = (shape.num_kv_heads, shape.head_dim)
        self.k = [torch.randn(length, *kv).to(shape.dtype) for length in lengths]
        self.v = [torch.randn(length, *kv).to(shape.dtype) for length in lengths]
        self.sinks = torch.linspace(-3.0, 5.0, shape.num_heads)  # from nothing to nearly all

    def cache(self, backend: AttentionBackend) -> tuple[torch.Tensor, torch.Tensor]:
        """A cache that holds every token of every sequence."""
        k_cache, v_cache = backend.allocate(self.num_blocks)
        size = self.shape.block_size
        for k, v, table in zip(self.k, self.v, self.tables, strict=True):
            slots = torch.tensor([table[p // size] * size + p % size for p in range(len(k))])
            is_cuda = k_cache.dim() == 4 and k_cache.dtype is not torch.int8
            write = write_cuda if is_cuda else write_cpu
            write(k, v, k_cache, v_cache, slots)
        return k_cache, v_cache

    def attend(
        self, backend: AttentionBackend, chunks: list[tuple[int, int, int]], how: LayerAttention | None = None
    ) -> list[torch.Tensor]:
        """Attention of (sequence, start, count) chunks in one call, decodes first; one result per chunk."""
        batch = make_batch(
            [(start, count) for _, start, count in chunks],
            self.shape.block_size,
            [self.tables[sequence] for sequence, _, _ in chunks],
        )
        q = torch.cat([self.q[sequence][start : start + count] for sequence, start, count in chunks])
        how = how or self.shape.how()
        out = backend.run(q, *self.cache(backend), backend.plan(batch, how), self.sinks if how.has_sinks else None)
        return list(out.split([count for _, _, count in chunks]))


WINDOWS = (None, 1, 40, 300)
HEADS = (
    (4, 4, 32, 16),
    (4, 2, 64, 32),
    (9, 3, 64, 32),
    (14, 2, 64, 64),
    (8, 1, 80, 16),
    (2, 1, 128, 32),
    (2, 1, 256, 16),
)
MANY_HEADS = (60, 1, 96, 16)  # as many as all of the others together


def windowed() -> Iterator[Any]:
    """Windows and heads: all heads without a window and with one of the others; the rest is slow."""
    for number, heads in enumerate(HEADS):
        for place, window in enumerate(WINDOWS):
            is_quick = window is None or place == 1 + number % (len(WINDOWS) - 1)
            yield pytest.param(window, *heads, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("window", "heads", "kv_heads", "dim", "block_size"),
    [
        *windowed(),
        (WINDOWS[0], *MANY_HEADS),
        *(pytest.param(window, *MANY_HEADS, marks=pytest.mark.slow) for window in WINDOWS[1:]),
    ],
)
def test_native_attention_equals_torch(
    dtype: str, window: int | None, heads: int, kv_heads: int, dim: int, block_size: int
) -> None:
    shape = Shape(heads, kv_heads, dim, block_size, dtype)
    reference, how = shape.backend(), shape.how(window)
    sequences = Sequences(shape, [1, 17, 300, 257, 700, 130])
    chunks = [(0, 0, 1), (1, 16, 1), (2, 299, 1), (3, 200, 57), (4, 0, 700), (5, 3, 127)]
    expected, tolerance = sequences.attend(reference, chunks, how), 1e-5 if dtype == "float32" else 2e-2
    for instruction_set in (name for kind, name in NATIVE if kind == dtype):
        native = shape.backend(instruction_set)
        assert (native.name, reference.name) == ("native-cpu", "torch-cpu")
        for ours, theirs in zip(sequences.attend(native, chunks, how), expected, strict=True):
            torch.testing.assert_close(
                ours.float(),
                theirs.float(),
                rtol=tolerance,
                atol=tolerance,
                msg=lambda why, s=instruction_set: f"{s}: {why}",
            )


def check_same_bits(
    shape: Shape, instruction_set: str, window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    """A token has the same bits whole, chunked, decoded and in any batch."""
    native, how = shape.backend(instruction_set), shape.how(window, softcap, has_sinks=has_sinks)
    sequences = Sequences(shape, [600, 90, 1000])
    (whole,) = sequences.attend(native, [(0, 0, 600)], how)
    for size in (1, 7, 64, 255, 256, 257):
        for start in range(0, 600, max(size, 97)):
            count = min(size, 600 - start)
            (part,) = sequences.attend(native, [(0, start, count)], how)
            assert torch.equal(part, whole[start : start + count])
    crowd = sequences.attend(native, [(1, 89, 1), (0, 599, 1), (2, 0, 1000), (0, 300, 200)], how)
    assert torch.equal(crowd[1], whole[599:600])
    assert torch.equal(crowd[3], whole[300:500])


@pytest.mark.parametrize(
    ("limits", "kernels"),
    pairwise([(None, None, False), (100, None, False), (100, 2.0, False), (100, None, True)], NATIVE, FASTEST_NATIVE),
)
def test_a_token_is_bitwise_the_same_whole_chunked_decoded_and_in_any_batch(
    limits: tuple[int | None, float | None, bool], kernels: tuple[str, str]
) -> None:
    (window, softcap, has_sinks), (dtype, instruction_set) = limits, kernels
    check_same_bits(Shape(6, 2, 64, 32, dtype), instruction_set, window, softcap, has_sinks)


@pytest.mark.parametrize(("dtype", "instruction_set"), NATIVE)
@pytest.mark.parametrize(("dim", "block_size"), [(40, 16), (64, 8), (272, 16)])
def test_shapes_that_the_kernels_do_not_cover_go_to_torch(
    dtype: str, instruction_set: str, dim: int, block_size: int
) -> None:
    shape = Shape(4, 2, dim, block_size, dtype)
    assert shape.backend(instruction_set).name == "torch-cpu"


@pytest.mark.parametrize(("dtype", "instruction_set"), EVERY)
@pytest.mark.parametrize("window", [None, 40])
def test_capped_scores_are_the_softcap_times_the_tangent_of_their_share_of_it(
    dtype: str, instruction_set: str, window: int | None
) -> None:
    shape, softcap = Shape(4, 2, 32, 16, dtype), 0.7
    how, sequences = shape.how(window, softcap), Sequences(shape, [90, 61])
    results = sequences.attend(shape.backend(instruction_set, how), [(0, 89, 1), (1, 20, 41)], how)
    for (sequence, start), result in zip(((0, 89), (1, 20)), results, strict=True):
        q, k, v = (part[sequence].double() for part in (sequences.q, sequences.k, sequences.v))
        k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
        scores = softcap * (torch.einsum("qhd,khd->hqk", q, k) * how.scale / softcap).tanh()
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None]
        scores[:, (distance < 0) | (distance >= (window or len(q)))] = -torch.inf
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)[start:].reshape(len(result), -1)
        tolerance = 1e-5 if dtype == "float32" else 2e-2
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "instruction_set"), EVERY)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, None), (None, 0.7)])
def test_a_sink_has_a_share_of_the_softmax_and_no_value(
    dtype: str, instruction_set: str, window: int | None, softcap: float | None
) -> None:
    shape = Shape(4, 2, 32, 16, dtype)
    how, sequences = shape.how(window, softcap, has_sinks=True), Sequences(shape, [290, 61])
    for sinks in (sequences.sinks, torch.tensor([-200.0, 0.0, 60.0, 2000.0])):
        sequences.sinks = sinks
        results = sequences.attend(shape.backend(instruction_set, how), [(0, 289, 1), (1, 20, 41)], how)
        for (sequence, start), result in zip(((0, 289), (1, 20)), results, strict=True):
            q, k, v = (part[sequence].double() for part in (sequences.q, sequences.k, sequences.v))
            k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * how.scale
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None]
            scores[:, (distance < 0) | (distance >= (window or len(q)))] = -torch.inf
            scores = torch.cat((scores, sinks.double().view(4, 1, 1).expand(4, len(q), 1)), dim=-1)
            expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :-1], v)[start:].reshape(len(result), -1)
            tolerance = 1e-5 if dtype == "float32" else 2e-2
            torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "instruction_set"), NATIVE)
def test_the_number_of_threads_does_not_matter(dtype: str, instruction_set: str) -> None:
    shape = Shape(4, 2, 64, 32, dtype)
    native = shape.backend(instruction_set)
    sequences = Sequences(shape, [2000, 400])
    chunks = [(0, 1999, 1), (1, 0, 400)]
    before, results = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(sequences.attend(native, chunks))
    torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize(("dtype", "instruction_set"), NATIVE)
def test_stale_memory_behind_the_last_token_is_never_seen(dtype: str, instruction_set: str) -> None:
    shape = Shape(2, 1, 32, 16, dtype)
    native = shape.backend(instruction_set)
    k_cache, v_cache = native.allocate(2)
    k_cache.fill_(float("nan"))
    v_cache.fill_(float("nan"))
    k, v = torch.randn(2, 5, 1, 32).to(shape.dtype)
    write_cpu(k, v, k_cache, v_cache, torch.arange(5))
    batch = make_batch([(4, 1)], 16, [[0]])
    out = native.run(torch.randn(1, 2, 32).to(shape.dtype), k_cache, v_cache, native.plan(batch, shape.how()))
    assert out.abs().max() < 10


@pytest.mark.parametrize(("dtype", "instruction_set"), EVERY)
@pytest.mark.parametrize(("window", "block_size"), [(1, 16), (40, 16), (64, 32), (300, 32)])
def test_blocks_before_a_window_are_not_read_and_change_no_bit(
    dtype: str, instruction_set: str, window: int, block_size: int
) -> None:
    shape = Shape(6, 2, 64, block_size, dtype)
    backend, how = shape.backend(instruction_set), shape.how(window)
    sequences = Sequences(shape, [600, 90, 1000, 257, 33])
    chunks = [(0, 599, 1), (1, 80, 1), (3, 256, 1), (4, 32, 1), (2, 700, 300), (0, 511, 40), (1, 3, 50)]
    whole = sequences.attend(backend, chunks, how)
    tables = [list(sequences.tables[sequence]) for sequence, _, _ in chunks]
    for table, (_, start, _) in zip(tables, chunks, strict=True):
        gone = max(0, start - window + 1) // block_size
        table[:gone] = [sequences.num_blocks] * gone
    batch = make_batch([(start, count) for _, start, count in chunks], block_size, tables)
    q = torch.cat([sequences.q[sequence][start : start + count] for sequence, start, count in chunks])
    caches = [
        torch.cat([cache, torch.full_like(cache[:1], float("nan"))]) for cache in sequences.cache(backend)
    ]  # the block behind the others is another's
    freed = backend.run(q, *caches, backend.plan(batch, how))
    assert torch.equal(freed, torch.cat(whole))


def test_there_is_one_openmp_runtime_in_the_process() -> None:
    load_native()
    with open("/proc/self/maps") as maps:
        names = {line.rpartition("/")[2].strip() for line in maps if "/" in line}
    runtimes = {name for name in names if name.startswith(("libgomp", "libomp", "libiomp5"))}
    assert len(runtimes) == 1, runtimes
