"""The native operations give what plain torch gives, and a row's result depends on that row alone."""

import pytest
import torch
import torch.nn.functional as F

from diptych.control.errors import ConfigError
from diptych.runtime.attention.layout import allocate_cpu, read_cpu
from diptych.runtime.native import load_native
from diptych.runtime.ops import make_ops
from diptych.runtime.ops.native_ops import NativeLinear, OneDnnLinear
from diptych.runtime.ops.ops import Ops
from diptych.runtime.ops.torch_ops import TorchOps

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


def native(dtype: torch.dtype) -> Ops:
    library = load_native()
    if library is None or not library.supports(dtype):
        pytest.skip(f"no native kernels for {dtype} here")
    return make_ops(CPU, dtype, native=True)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    tolerance = 2e-5 if dtype == torch.float32 else 1.6e-2  # bf16 has 8 bits: half a step is 0.4 %, twice rounded
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "inputs"), [(32, 64), (96, 130), (50, 48), (1, 2), (1000, 896)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_linear_layer_multiplies(dtype: torch.dtype, columns: int, inputs: int, bias: bool) -> None:
    ops = native(dtype)
    weight, vector = torch.randn(columns, inputs).to(dtype), torch.randn(columns).to(dtype) if bias else None
    layer = ops.pack_linear(weight.clone(), vector)
    for rows in (1, 2, 5, 12, 13, 40, 100, 200):
        x = torch.randn(rows, inputs).to(dtype)
        expected = F.linear(x.float(), weight.float(), vector.float() if vector is not None else None)
        close(layer(x), expected, dtype, scale=inputs**0.5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_linear_layer_is_bitwise_the_same_in_any_batch(dtype: torch.dtype) -> None:
    library = load_native()
    if library is None or not library.supports(dtype):
        pytest.skip("no native kernels here")
    layer = NativeLinear(library, torch.randn(200, 320).to(dtype), None)
    x = torch.randn(301, 320).to(dtype)
    whole = layer(x)
    for rows in (1, 2, 3, 7, 11, 12, 13, 96, 97, 300):
        assert torch.equal(layer(x[:rows]), whole[:rows])
        assert torch.equal(layer(x[-rows:]), whole[-rows:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "hidden"), [(16, 32), (40, 64), (1536, 576)])
def test_the_gated_layer_is_silu_of_gate_times_up(dtype: torch.dtype, inner: int, hidden: int) -> None:
    ops = native(dtype)
    weight = (torch.randn(2 * inner, hidden) / hidden**0.5).to(dtype)
    fused, plain = ops.pack_gate_up(weight.clone(), None), TorchOps().pack_gate_up(weight, None)
    assert fused.out_features == plain.out_features == inner
    for rows in (1, 6, 30):
        x = torch.randn(rows, hidden).to(dtype)
        close(fused(x), plain(x), dtype)
    extreme = torch.full((1, hidden), 1e4, dtype=dtype)
    assert torch.isfinite(fused(extreme)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 64, 100, 576])
def test_norms_and_activation_match_torch(dtype: torch.dtype, dim: int) -> None:
    ops, reference = native(dtype), TorchOps()
    weight = torch.randn(dim).to(dtype)
    for rows in (1, 3, 40):
        x, residual = torch.randn(rows, dim).to(dtype), torch.randn(rows, dim).to(dtype)
        close(ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), dtype)
        ours, theirs = residual.clone(), residual.clone()
        close(ops.add_rms_norm(x, ours, weight, 1e-6), reference.add_rms_norm(x, theirs, weight, 1e-6), dtype)
        close(ours, theirs, dtype)
        gate_up = 3 * torch.randn(rows, 2 * dim).to(dtype)
        close(ops.silu_and_mul(gate_up), reference.silu_and_mul(gate_up), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (7, 1, 32), (3, 3, 80)])
def test_rope_rotates_and_fills_the_cache(dtype: torch.dtype, norms: bool, heads: int, kv_heads: int, dim: int) -> None:
    ops, reference = native(dtype), TorchOps()
    rows, block_size = 37, 16
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype)
    angles = torch.rand(100, dim // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).contiguous()
    positions = torch.randint(0, 100, (rows,))
    slots = torch.randperm(6 * block_size)[:rows]
    weights = (torch.randn(dim).to(dtype), torch.randn(dim).to(dtype), 1e-6) if norms else (None, None, 0.0)
    results = []
    for implementation in (ops, reference):
        k_cache, v_cache = allocate_cpu(6, kv_heads, block_size, dim, dtype)
        copy = qkv.clone()
        q = implementation.rope_and_cache(copy, positions, cos_sin, slots, k_cache, v_cache, *weights)
        results.append((q, *read_cpu(k_cache, v_cache, slots)))
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs, dtype)


def test_the_onednn_layer_multiplies() -> None:
    weight, bias = torch.randn(48, 64).bfloat16(), torch.randn(48).bfloat16()
    layer = OneDnnLinear(weight, bias)
    x = torch.randn(5, 64).bfloat16()
    close(layer(x), F.linear(x, weight, bias), torch.bfloat16, scale=8)


def test_asking_for_kernels_that_are_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match="native"):
        make_ops(CPU, torch.float16, native=True)
