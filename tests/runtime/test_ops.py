"""The native operations give what plain torch gives, and a row's result depends on that row alone."""

from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from diptych.runtime.attention.layout import allocate_cpu, read_cpu
from diptych.runtime.models.experts import ClampedSwish
from diptych.runtime.ops import make_ops
from diptych.runtime.ops.ops import Activation, NamedActivation, Ops
from diptych.runtime.ops.torch_ops import TorchOps
from tests.runtime.kernel_sets import NATIVE

ACTIVATIONS: list[Activation] = [*get_args(NamedActivation), ClampedSwish(7.0, 1.702)]


@pytest.fixture(params=NATIVE, ids="-".join)
def native(request: pytest.FixtureRequest) -> tuple[Ops, torch.dtype]:
    """The operations of each set of kernels, and the dtype that they compute in."""
    dtype, instruction_set = getattr(torch, request.param[0]), request.param[1]
    return make_ops(dtype, instruction_set), dtype


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    tolerance = 2e-5 if dtype == torch.float32 else 1.6e-2  # bf16 has 8 bits: half a step is 0.4 %, twice rounded
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize(("columns", "inputs"), [(32, 64), (96, 130), (50, 48), (1, 2), (1000, 896), (2100, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_linear_layer_multiplies(
    native: tuple[Ops, torch.dtype], columns: int, inputs: int, bias: bool
) -> None:
    ops, dtype = native
    weight, vector = torch.randn(columns, inputs).to(dtype), torch.randn(columns).to(dtype) if bias else None
    layer = ops.pack_linear(weight.clone(), vector)
    for rows in (1, 2, 5, 12, 13, 40, 100, 200):
        x = torch.randn(rows, inputs).to(dtype)
        expected = F.linear(x.float(), weight.float(), vector.float() if vector is not None else None)
        close(layer(x), expected, dtype, scale=inputs**0.5)


def test_the_rows_of_a_linear_layer_may_lie_apart(native: tuple[Ops, torch.dtype]) -> None:
    ops, dtype = native
    layer, x = ops.pack_linear(torch.randn(70, 64).to(dtype), None), torch.randn(150, 200).to(dtype)[:, 40:104]
    for rows in (1, 20, 150):
        assert torch.equal(layer(x[:rows]), layer(x[:rows].contiguous()))


@pytest.mark.parametrize("kind", ["plain", "biased", "gated"])
def test_a_row_of_a_linear_layer_is_bitwise_the_same_in_any_batch(native: tuple[Ops, torch.dtype], kind: str) -> None:
    ops, dtype = native
    weight = torch.randn(200, 320).to(dtype)
    if kind == "gated":
        layer = ops.pack_gate_up(weight, None)
    else:
        layer = ops.pack_linear(weight, torch.randn(200).to(dtype) if kind == "biased" else None)
    x = torch.randn(301, 320).to(dtype)
    whole = layer(x)
    for rows in (1, 2, 3, 7, 11, 12, 13, 15, 16, 17, 31, 32, 33, 96, 97, 300):
        assert torch.equal(layer(x[:rows]), whole[:rows])
        assert torch.equal(layer(x[-rows:]), whole[-rows:])


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_of_a_norm_is_bitwise_the_same_in_any_batch(native: tuple[Ops, torch.dtype], num_threads: int) -> None:
    ops, dtype = native
    weight, x, residual = torch.randn(576).to(dtype), torch.randn(100, 576).to(dtype), torch.randn(100, 576).to(dtype)
    before, sums = torch.get_num_threads(), residual.clone()
    torch.set_num_threads(num_threads)
    normed = ops.add_rms_norm(x, sums, weight, 1e-6)
    torch.set_num_threads(before)
    for rows in (1, 15, 16, 17):
        ours = residual[:rows].clone()
        assert torch.equal(ops.add_rms_norm(x[:rows], ours, weight, 1e-6), normed[:rows])
        assert torch.equal(ours, sums[:rows])
        assert torch.equal(ops.rms_norm(ours, weight, 1e-6), normed[:rows])


@pytest.mark.parametrize(("inner", "hidden"), [(16, 32), (40, 64), (1536, 576)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gated_layer_is_the_activation_of_the_gate_times_up(
    native: tuple[Ops, torch.dtype], activation: Activation, inner: int, hidden: int
) -> None:
    ops, dtype = native
    weight = (torch.randn(2 * inner, hidden) / hidden**0.5).to(dtype)
    fused, plain = (some.pack_gate_up(weight, None, activation=activation) for some in (ops, TorchOps()))
    assert fused.out_features == plain.out_features == inner
    for rows in (1, 6, 30):
        x = torch.randn(rows, hidden).to(dtype)
        close(fused(x), plain(x), dtype)
    extreme = torch.full((1, hidden), 1e4, dtype=dtype)
    assert torch.isfinite(fused(extreme)).all()


@pytest.mark.parametrize("dim", [16, 64, 100, 576])
@pytest.mark.parametrize("is_wide", [False, True])
def test_norms_and_activations_match_torch(native: tuple[Ops, torch.dtype], is_wide: bool, dim: int) -> None:
    (ops, dtype), reference = native, TorchOps()
    weight = torch.randn(dim).to(torch.float32 if is_wide else dtype)
    for rows in (1, 3, 40):
        x, residual = torch.randn(rows, dim).to(dtype), torch.randn(rows, dim).to(dtype)
        close(ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), dtype)
        ours, theirs = residual.clone(), residual.clone()
        close(ops.add_rms_norm(x, ours, weight, 1e-6), reference.add_rms_norm(x, theirs, weight, 1e-6), dtype)
        close(ours, theirs, dtype)
        gate_up = 3 * torch.randn(rows, 2 * dim).to(dtype)
        for activation in ACTIVATIONS:
            close(ops.activate(gate_up, activation), reference.activate(gate_up, activation), dtype)
        for change in (
            lambda some, into: some.add_rms_norm(x, into, weight, 1e-6, 0.3),  # noqa: B023
            lambda some, into: some.add(x, into, -0.7),  # noqa: B023
            lambda some, into: some.gate(into, x),  # noqa: B023
            lambda some, into: some.softcap(into, 1.5),
        ):
            ours, theirs = residual.clone(), residual.clone()
            results = change(ops, ours), change(reference, theirs)
            close(ours, theirs, dtype)
            if results[0] is not None:
                close(*results, dtype)
        assert float(ours.abs().max()) <= 1.5


@pytest.mark.parametrize("norms_rows", [False, True])
@pytest.mark.parametrize("rotary", [0, 24, 64])
def test_a_part_of_each_head_is_rotated_and_queries_are_scaled(
    native: tuple[Ops, torch.dtype], rotary: int, norms_rows: bool
) -> None:
    (ops, dtype), reference = native, TorchOps()
    rows, heads, kv_heads, dim = 19, 4, 2, 64
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype)
    angles = torch.rand(100, rotary // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).contiguous()
    positions, slots, scale = torch.randint(0, 100, (rows,)), torch.randperm(96)[:rows], torch.rand(100) + 0.5
    weights = [torch.randn(count * dim if norms_rows else dim) for count in (heads, kv_heads)]
    results = []
    for some in (ops, reference):
        k_cache, v_cache = allocate_cpu(6, kv_heads, 16, dim, dtype)
        arguments = (qkv.clone(), positions, cos_sin, slots, k_cache, v_cache, *weights, 1e-6, scale)
        results.append((some.rope_and_cache(*arguments), *read_cpu(k_cache, v_cache, slots)))
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs, dtype)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (7, 1, 32), (3, 3, 80)])
def test_rope_rotates_and_fills_the_cache(
    native: tuple[Ops, torch.dtype], norms: bool, heads: int, kv_heads: int, dim: int
) -> None:
    (ops, dtype), reference = native, TorchOps()
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_in_plain_torch_multiplies_any_number_of_rows(dtype: torch.dtype) -> None:
    weight, bias = torch.randn(50, 48).to(dtype), torch.randn(50).to(dtype)
    layer = TorchOps().pack_linear(weight, bias)
    assert (layer.in_features, layer.out_features) == (48, 50)
    for rows in (0, 1, 2, 3, 16, 17, 31, 33, 250, 256, 257, 600):
        x = torch.randn(rows, 48).to(dtype)
        close(layer(x), F.linear(x.float(), weight.float(), bias.float()), dtype, scale=48**0.5)
