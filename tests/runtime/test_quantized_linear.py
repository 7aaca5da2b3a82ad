"""Linear layers with weights in whole numbers: every set of kernels gives what the plain arithmetic says."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from diptych.runtime.native import load_native
from diptych.runtime.ops import make_ops
from diptych.runtime.ops.native_ops import NativeOps
from diptych.runtime.ops.ops import Ops
from diptych.runtime.ops.torch_ops import TorchOps
from diptych.runtime.ops.torch_quantized_linear import quantize_rows
from diptych.runtime.quantized_weight import QuantizedSource, QuantizedWeight, WeightFormat, quantize
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


@pytest.fixture(params=OPS)
def native(request: pytest.FixtureRequest) -> tuple[Ops, torch.dtype]:
    return OPS[request.param]


def source(weight: QuantizedWeight) -> QuantizedSource:
    rows, columns = weight.values.shape
    return QuantizedSource(weight.format, rows, columns, lambda: weight)


def expected(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """x W^T with rows of x in 8 bits, fp32."""
    numbers, scales = quantize_rows(x)
    return F.linear(numbers.double(), weight.dequantize().double()).float() * scales


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize("columns", [128, 384])
def test_a_quantized_layer_multiplies_rows_of_8_bits(
    native: tuple[Ops, torch.dtype], weight_format: WeightFormat, columns: int
) -> None:
    ops, dtype = native
    for outputs in (1, 50, 96, 300):
        weight = quantize(torch.randn(outputs, columns), weight_format)
        bias = torch.randn(outputs).to(dtype)
        layer = ops.pack_quantized(source(weight), bias, dtype)
        for rows in (1, 3, 4, 13, 40, 100, 130):
            x = torch.randn(rows, columns).to(dtype)
            assert_close(layer(x), expected(x, weight) + bias.float(), dtype)


def assert_close(actual: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3  # a bf16 is rounded once
    torch.testing.assert_close(actual.float(), wanted, rtol=tolerance, atol=tolerance * wanted.abs().mean().item())
