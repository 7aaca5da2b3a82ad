"""The Triton kernels give what plain torch gives, and a row has the same bits in any batch.

Without a GPU the interpreter runs them, in float32 and in float16: it has no arithmetic for bfloat16. Where there is a
GPU they run as they are. Whether they compile for a GPU is asked of the compiler, which needs none.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from diptych.runtime.attention import make_attention  # noqa: E402
from diptych.runtime.attention.triton_attention import TritonAttention  # noqa: E402
from diptych.runtime.kernels.instruction_set import TORCH, TRITON, available, choose  # noqa: E402
from diptych.runtime.kernels.triton_kernels import linear as linear_kernel  # noqa: E402
from diptych.runtime.kernels.triton_kernels import paged_attention as attention_kernel  # noqa: E402
from diptych.runtime.ops import make_ops  # noqa: E402
from diptych.runtime.ops.ops import Activation  # noqa: E402
from diptych.runtime.ops.torch_ops import TorchOps  # noqa: E402
from diptych.runtime.ops.triton_ops import TritonOps  # noqa: E402
from tests.runtime.test_attention import Sequences, Shape, make_batch  # noqa: E402

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPES = ["float32", "bfloat16" if HAS_GPU else "float16"]
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    """New tensors lie where the kernels run."""
    with torch.device(DEVICE):
        torch.manual_seed(0)
        yield


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return getattr(torch, request.param)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences have several tiles and several splits: the interpreter takes its time for each."""
    monkeypatch.setattr(attention_kernel, "TILE", 16)
    monkeypatch.setattr(attention_kernel, "SPLIT", 32)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = TOLERANCE[str(ours.dtype).removeprefix("torch.")]
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)


def attend(shape: Shape, sequences: Sequences, chunks: list[tuple[int, int, int]], **how: Any) -> list[torch.Tensor]:
    backend = TritonAttention(shape.backend().geometry, DEVICE)
    return sequences.attend(backend, chunks, shape.how(**how))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("dtype_name", "heads", "kv_heads", "dim", "block_size", "how"),
    [
        (DTYPES[0], 4, 2, 64, 16, {}),
        (DTYPES[1], 7, 1, 80, 32, {"window": 20}),
        (DTYPES[0], 1, 1, 128, 16, {"softcap": 1.0}),
        (DTYPES[1], 2, 1, 256, 8, {"window": 33}),
        (DTYPES[0], 6, 2, 64, 16, {"window": 40, "has_sinks": True}),
    ],
)
def test_attention_over_pages_equals_torch(
    dtype_name: str, heads: int, kv_heads: int, dim: int, block_size: int, how: dict[str, Any]
) -> None:
    window, softcap = how.get("window"), how.get("softcap")
    shape = Shape(heads, kv_heads, dim, block_size, dtype_name)
    sequences = Sequences(shape, [70, 20, 75, 17])
    chunks = [(0, 69, 1), (1, 12, 1), (2, 40, 35), (3, 0, 17)]
    ours = attend(shape, sequences, chunks, **how)
    for (sequence, start, count), result in zip(chunks, ours, strict=True):
        q, k, v = (part[sequence].float() for part in (sequences.q, sequences.k, sequences.v))
        k, v = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None]
        scores[:, (distance < 0) | (distance >= (window or len(q)))] = -torch.inf
        if "has_sinks" in how:
            scores = torch.cat((scores, sequences.sinks.view(-1, 1, 1).expand(heads, len(q), 1)), dim=-1)
        weights = scores.softmax(-1)[..., : len(k)]
        expected = torch.einsum("hqk,khd->qhd", weights, v)[start : start + count]
        close(result, expected.reshape(count, -1))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("dtype_name", "how"),
    [(DTYPES[0], {"window": 40}), (DTYPES[1], {}), (DTYPES[0], {"window": 40, "has_sinks": True})],
)
def test_a_token_has_the_same_bits_whole_chunked_decoded_and_in_any_batch(
    dtype_name: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(3, 1, 64, 16, dtype_name)
    sequences = Sequences(shape, [100, 30])
    monkeypatch.setattr(attention_kernel, "WANTED_PROGRAMS", 0)  # one program for all splits of a tile
    (whole,) = attend(shape, sequences, [(0, 0, 100)], **how)
    (alone,) = attend(shape, sequences, [(0, 99, 1)], **how)
    monkeypatch.setattr(attention_kernel, "WANTED_PROGRAMS", 1 << 20)  # each split has its own
    (chunk,) = attend(shape, sequences, [(0, 60, 25)], **how)
    crowd = attend(shape, sequences, [(1, 29, 1), (0, 99, 1)], **how)
    mixed = attend(shape, sequences, [(0, 99, 1), (1, 3, 20), (0, 62, 3)], **how)
    for part, start in ((alone, 99), (chunk, 60), (crowd[1], 99), (mixed[0], 99), (mixed[2], 62)):
        assert torch.equal(part, whole[start : start + len(part)])


def test_stale_memory_behind_the_last_token_is_never_seen(dtype: torch.dtype) -> None:
    shape = Shape(2, 1, 32, 16, str(dtype).removeprefix("torch."))
    sequences = Sequences(shape, [40])
    clean = attend(shape, sequences, [(0, 39, 1)])
    backend = TritonAttention(shape.backend().geometry, DEVICE)
    allocate = backend.allocate

    def stale(num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = allocate(num_blocks)
        return k.fill_(float("nan")), v.fill_(float("nan"))

    backend.allocate = stale  # type: ignore[method-assign]
    (ours,) = sequences.attend(backend, [(0, 39, 1)], shape.how())
    assert torch.equal(ours, clean[0])


@pytest.mark.usefixtures("small_tiles")
def test_blocks_before_a_window_are_not_read_and_change_no_bit(dtype: torch.dtype) -> None:
    shape, window = Shape(3, 1, 64, 8, str(dtype).removeprefix("torch.")), 20
    sequences = Sequences(shape, [100, 60])
    chunks = [(0, 99, 1), (1, 41, 19)]
    whole = attend(shape, sequences, chunks, window=window)
    backend = TritonAttention(shape.backend().geometry, DEVICE)
    caches = sequences.cache(backend)
    for sequence, start, _ in chunks:
        gone = sequences.tables[sequence][: (start - window + 1) // 8]
        for cache in caches:
            cache[gone] = float("nan")
    batch = make_batch([(99, 1), (41, 19)], 8, sequences.tables)
    q = torch.cat([sequences.q[sequence][start : start + count] for sequence, start, count in chunks])
    freed = backend.run(q, *caches, backend.plan(batch, shape.how(window=window)))
    assert torch.equal(freed, torch.cat(whole))


@pytest.mark.parametrize(("columns", "inner", "has_bias"), [(130, 70, False), (40, 1030, True)])
def test_a_row_of_a_linear_layer_has_the_same_bits_in_any_batch(
    dtype: torch.dtype, columns: int, inner: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = (torch.randn(columns, inner) / inner**0.5).to(dtype)
    layer = TritonOps().pack_linear(weight, torch.randn(columns).to(dtype) if has_bias else None)
    x = torch.randn(66, inner + 8).to(dtype)[:, :inner]  # rows that lie apart
    monkeypatch.setattr(linear_kernel, "WANTED_PROGRAMS", 256)
    assert (linear_kernel.part_length(columns, inner) < inner) == (inner == 1030)
    split = [layer(x[:rows]) for rows in (1, 65)]
    part = linear_kernel.part_length(columns, inner)
    monkeypatch.setattr(linear_kernel, "part_length", lambda *_: part)
    monkeypatch.setattr(linear_kernel, "WANTED_PROGRAMS", 0)  # one program for all parts of a tile
    whole = layer(x)
    close(whole, F.linear(x.float(), weight.float(), layer.bias.float() if layer.bias is not None else None))
    for rows in split:
        assert torch.equal(rows, whole[: len(rows)])
    assert layer(x[:0]).shape == (0, columns)


@pytest.mark.parametrize("dim", [64, 100, 576])
def test_norms_and_the_gate_equal_torch_and_rows_stand_alone(dtype: torch.dtype, dim: int) -> None:
    ours, theirs = TritonOps(), TorchOps()
    weight = torch.randn(dim).to(dtype)
    x, residual = torch.randn(7, dim).to(dtype), torch.randn(7, dim).to(dtype)
    close(ours.rms_norm(x, weight, 1e-6), theirs.rms_norm(x, weight, 1e-6))
    sums, expected = residual.clone(), residual.clone()
    normed = ours.add_rms_norm(x, sums, weight, 1e-6)
    close(normed, theirs.add_rms_norm(x, expected, weight, 1e-6))
    assert torch.equal(sums, expected)
    for rows in (slice(0, 1), slice(2, 5)):
        alone = residual[rows].clone()
        assert torch.equal(ours.add_rms_norm(x[rows], alone, weight, 1e-6), normed[rows])
    wide, sums, expected = torch.randn(dim), residual.clone(), residual.clone()
    normed = ours.add_rms_norm(x, sums, wide, 1e-6, 0.25)
    close(normed, theirs.add_rms_norm(x, expected, wide, 1e-6, 0.25))
    close(sums, expected)
    assert torch.equal(normed[1:2], ours.rms_norm(sums[1:2], wide, 1e-6))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gate_equals_torch_and_rows_stand_alone(dtype: torch.dtype, activation: Activation) -> None:
    ours, theirs, dim = TritonOps(), TorchOps(), 100
    gate_up = 3 * torch.randn(5, 2 * dim).to(dtype)
    gated = ours.activate(gate_up, activation)
    close(gated, theirs.activate(gate_up, activation))
    assert torch.equal(ours.activate(gate_up[3:4], activation), gated[3:4])
    for extreme in (-200.0, 200.0):
        rows = torch.full((1, 2 * dim), extreme).to(dtype)
        rows[:, dim:] = 1
        assert torch.isfinite(ours.activate(rows, activation)).all()


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 3, 80)])
def test_rope_rotates_and_fills_the_cache(
    dtype: torch.dtype, has_norms: bool, heads: int, kv_heads: int, dim: int
) -> None:
    rows, block_size = 5, 16
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype)
    angles = torch.rand(100, dim // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).contiguous()
    positions, slots = torch.randint(0, 100, (rows,)), torch.randperm(6 * block_size)[:rows]
    norms = [torch.randn(dim).to(dtype) if has_norms else None for _ in "qk"]
    k_cache, v_cache = (torch.zeros(6, block_size, kv_heads, dim, dtype=dtype) for _ in "kv")
    q = TritonOps().rope_and_cache(qkv.clone(), positions, cos_sin, slots, k_cache, v_cache, *norms, 1e-6)
    parts = list(qkv.view(rows, -1, dim).split([heads, kv_heads, kv_heads], dim=1))
    for index, norm in enumerate(norms):
        if norm is not None:
            parts[index] = TorchOps().rms_norm(parts[index], norm, 1e-6)
        cosines, sines = cos_sin[positions][:, None].chunk(2, dim=-1)
        first, second = parts[index].float().chunk(2, dim=-1)
        parts[index] = torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1).to(dtype)
    close(q, parts[0])
    close(k_cache.view(-1, kv_heads, dim)[slots], parts[1])
    assert torch.equal(v_cache.view(-1, kv_heads, dim)[slots], parts[2])
    assert int((k_cache != 0).any(-1).sum()) == rows * kv_heads  # and nothing else


def test_a_gpu_computes_with_triton_where_it_is_installed_and_torch_is_always_the_last() -> None:
    assert available(torch.bfloat16, "cuda") == (TRITON, TORCH)
    assert choose(torch.bfloat16, device="cuda") == TRITON
    assert choose(torch.bfloat16, TORCH, "cuda") == TORCH
    assert make_ops(torch.bfloat16, TRITON).name == "triton"
    shape = Shape(4, 2, 64, 16, "bfloat16")
    assert make_attention(shape.config(), 16, torch.bfloat16, DEVICE, TRITON).name == "triton"


@pytest.mark.slow
def test_a_model_gives_the_same_logits_with_triton_as_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu_parts import models

    monkeypatch.setattr(models, "DEVICE", DEVICE)
    monkeypatch.setattr(models, "DTYPE", torch.float32)
    monkeypatch.setattr(models, "choose", lambda dtype, wish, device: wish)
    found = []
    for kernels in (TRITON, TORCH):
        loaded = models.load("tiny", kernels, num_tokens=200, max_num_seqs=4)
        layout = loaded.runner.attention
        batch = models.batch_of([(0, 20)], 512)
        if kernels == TORCH and not HAS_GPU:
            assert layout.name == "torch-cpu"
        with torch.inference_mode():
            hidden = loaded.runner.forward(batch)
            rest = models.batch_of([(20, 1)], 512)
            decoded = loaded.runner.forward(rest)
            found.append([loaded.runner.model.logits(rows[-1:]) for rows in (hidden, decoded)])
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_all_ways_to_launch_a_kernel_compile_and_multiply_with_the_same_instructions(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.runtime.triton_machine_code", str(capability)]
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    for kernel, variants in json.loads(said).items():
        products = [variant["products"] for variant in variants]
        assert bool(products[0]) is (kernel in ("_attend", "_multiply")), kernel
        assert all(found == products[0] for found in products), kernel
        assert not any(variant["contractions"] for variant in variants), kernel
