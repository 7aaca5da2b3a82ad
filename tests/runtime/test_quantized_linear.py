"""Linear layers with weights in whole numbers: every set of kernels gives what the plain arithmetic says."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from diptych.runtime.kernels.native import load_native
from diptych.runtime.ops import make_ops
from diptych.runtime.ops.native_ops import NativeOps
from diptych.runtime.ops.ops import Ops, QuantizedLinear
from diptych.runtime.ops.torch_quantized_linear import SPAN, quantize_span
from diptych.runtime.weights.quantized_weight import QuantizedSource, QuantizedWeight, quantize, stack
from diptych.runtime.weights.weight_format import WeightFormat
from tests.runtime.kernel_sets import NATIVE

PER_ROW = WeightFormat(8)
FORMATS = [
    PER_ROW,
    WeightFormat(8, 32),
    WeightFormat(8, 64, True),
    WeightFormat(4),
    WeightFormat(4, 32),
    WeightFormat(4, 128, True),
]


SPAN_OF_GROUPS = 128  # columns of x that share a scale where a weight has groups; see Cut in quantized_gemm.h


def span_of(weight_format: WeightFormat) -> int:
    """Columns of x that share a scale when a weight of this format is multiplied."""
    group_size = weight_format.group_size
    return max(group_size, SPAN_OF_GROUPS // group_size * group_size) if group_size else SPAN


def all_ops() -> dict[str, tuple[Ops, torch.dtype]]:
    """The operations of each set of kernels, with and without instructions for whole numbers."""
    found: dict[str, tuple[Ops, torch.dtype]] = {}
    library = load_native()
    for name, instruction_set in NATIVE:
        dtype = getattr(torch, name)
        found[f"{name}-{instruction_set}"] = make_ops(dtype, instruction_set), dtype
        if library is not None and f"{instruction_set}_vnni" in library.features:
            plain = replace(library, features=tuple(f for f in library.features if not f.endswith("_vnni")))
            found[f"{name}-{instruction_set}-without-vnni"] = NativeOps(plain.kernels(instruction_set, dtype)), dtype
    return found


OPS = all_ops()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=OPS)
def native(request: pytest.FixtureRequest) -> tuple[Ops, torch.dtype]:
    return OPS[request.param]


def source(weight: QuantizedWeight) -> QuantizedSource:
    rows, columns = weight.values.shape
    return QuantizedSource(weight.format, rows, columns, lambda: weight)


def expected(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """x W^T with spans of x in 8 bits, fp32."""
    span, total = span_of(weight.format), torch.zeros(len(x), len(weight.values), dtype=torch.float64)
    for part, columns in zip(x.split(span, dim=1), weight.dequantize().split(span, dim=1), strict=True):
        numbers, scales = quantize_span(part)
        total += F.linear(numbers.double(), columns.double()) * scales
    return total.float()


def pack(ops: Ops, weight: QuantizedWeight, dtype: torch.dtype, bias: torch.Tensor | None = None) -> QuantizedLinear:
    return ops.pack_quantized(source(weight), bias, dtype)


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize("columns", [128, 640])
def test_a_quantized_layer_multiplies_rows_of_8_bits(
    native: tuple[Ops, torch.dtype], weight_format: WeightFormat, columns: int
) -> None:
    ops, dtype = native
    for outputs in (1, 50, 96):
        weight = quantize(torch.randn(outputs, columns), weight_format)
        bias = torch.randn(outputs).to(dtype)
        layer = pack(ops, weight, dtype, bias)
        for rows in (1, 3, 4, 13, 40, 130):
            x = torch.randn(rows, columns).to(dtype)
            assert_close(layer(x), expected(x, weight) + bias.float(), dtype)


@pytest.mark.parametrize("weight_format", [PER_ROW, WeightFormat(4)], ids=str)
@pytest.mark.parametrize("columns", [8, 40, 296])
def test_any_number_of_columns_that_fills_units_is_multiplied(
    native: tuple[Ops, torch.dtype], weight_format: WeightFormat, columns: int
) -> None:
    ops, dtype = native
    weight = quantize(torch.randn(70, columns), weight_format)
    x = torch.randn(20, 2 * columns).to(dtype)[:, columns // 2 : columns // 2 + columns]  # rows lie apart
    for rows in (1, 20):
        assert_close(pack(ops, weight, dtype)(x[:rows]), expected(x[:rows], weight), dtype)


@pytest.mark.parametrize("weight_format", [PER_ROW, WeightFormat(4, 32), WeightFormat(8, 64, True)], ids=str)
def test_a_row_of_a_quantized_layer_is_bitwise_the_same_in_any_batch(
    native: tuple[Ops, torch.dtype], weight_format: WeightFormat
) -> None:
    ops, dtype = native
    layer = pack(ops, quantize(torch.randn(200, 320), weight_format), dtype)
    x = torch.randn(201, 320).to(dtype)
    whole = layer(x)
    for rows in (1, 3, 4, 5, 12, 16, 17, 33, 96, 97, 200):
        assert torch.equal(layer(x[:rows]), whole[:rows])
        assert torch.equal(layer(x[-rows:]), whole[-rows:])


@pytest.mark.parametrize("weight_format", [PER_ROW, WeightFormat(4, 32), WeightFormat(8, 64, True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_set_of_kernels_gives_the_same_bits(weight_format: WeightFormat, dtype: torch.dtype) -> None:
    weight, x = quantize(torch.randn(100, 192), weight_format), torch.randn(37, 192).to(dtype)
    results = [pack(ops, weight, dtype)(x) for ops, other in OPS.values() if other == dtype]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("weight_format", [PER_ROW, WeightFormat(4, 32)], ids=str)
@pytest.mark.parametrize(("inner", "columns"), [(16, 32), (40, 64), (330, 192)])
def test_the_gated_quantized_layer_is_silu_of_gate_times_up(
    native: tuple[Ops, torch.dtype], weight_format: WeightFormat, inner: int, columns: int
) -> None:
    ops, dtype = native
    weight = quantize(torch.randn(2 * inner, columns) / columns**0.5, weight_format)
    layer = ops.pack_quantized_gate_up(source(weight), None, dtype)
    assert (layer.in_features, layer.out_features) == (columns, inner)
    for rows in (1, 5, 40, 130):
        x = torch.randn(rows, columns).to(dtype)
        gate, up = expected(x, weight).chunk(2, dim=1)
        assert_close(layer(x), F.silu(gate) * up, dtype)


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_rows_of_the_weight_are_given_in_floating_point(
    native: tuple[Ops, torch.dtype], weight_format: WeightFormat
) -> None:
    ops, dtype = native
    weight = quantize(torch.randn(70, 128), weight_format)
    numbers = torch.tensor([69, 0, 31, 32, 0, *range(20)])
    rows = pack(ops, weight, dtype).rows(numbers)
    assert rows.dtype == dtype
    assert_close(rows, weight.dequantize()[numbers], dtype)


def test_a_row_that_is_broken_breaks_no_other_row(native: tuple[Ops, torch.dtype]) -> None:
    ops, dtype = native
    layer, x = pack(ops, quantize(torch.randn(40, 64), PER_ROW), dtype), torch.randn(30, 64).to(dtype)
    good = layer(x)
    for number in (math.nan, math.inf, -math.inf):
        broken = x.clone()
        broken[7, 13], broken[20, 63] = number, number
        result = layer(broken)
        assert not result[[7, 20]].isfinite().any()
        rest = [row for row in range(30) if row not in (7, 20)]
        assert torch.equal(result[rest], good[rest])


@pytest.mark.parametrize("value", [0.0, 1e-38, -1e-31, 1e33])
def test_rows_of_very_small_and_very_large_numbers_are_multiplied(
    native: tuple[Ops, torch.dtype], value: float
) -> None:
    ops, dtype = native
    layer = pack(ops, quantize(torch.eye(32), PER_ROW), dtype)
    result = layer(torch.full((2, 32), value).to(dtype))
    assert result.isfinite().all() and torch.allclose(result.float(), torch.full((2, 32), value), rtol=0.01, atol=2e-31)


def test_stacked_weights_of_several_formats_stay_what_they_were() -> None:
    formats = [WeightFormat(4, 64), WeightFormat(8, 32), WeightFormat(4, 32, True), PER_ROW]
    parts = [quantize(torch.randn(10, 128), weight_format) for weight_format in formats]
    for chosen in ([0], [0, 1], [0, 2], [1, 3], [0, 1, 2, 3]):
        stacked = stack([parts[index] for index in chosen])
        torch.testing.assert_close(
            stacked.dequantize(), torch.cat([parts[index].dequantize() for index in chosen]), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_a_weight_is_quantized_to_the_nearest_step(weight_format: WeightFormat) -> None:
    weight = torch.randn(30, 256)
    weight[3], weight[4, :32] = 0.0, 0.0
    quantized = quantize(weight, weight_format)
    assert int(quantized.values.max()) < 1 << weight_format.bits
    steps = quantized.scales.repeat_interleave(256 // quantized.scales.shape[1], dim=1)
    longest = 1.01 if weight_format.offset == 8 else 0.51  # -8 ... 7: what is as far on the other side becomes 7
    assert ((quantized.dequantize() - weight).abs() <= steps.abs() * longest).all()


def assert_close(actual: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = 5e-5 if dtype == torch.float32 else 4e-3  # sums cancel out; a bf16 is rounded once
    torch.testing.assert_close(actual.float(), wanted, rtol=tolerance, atol=tolerance * wanted.abs().mean().item())
