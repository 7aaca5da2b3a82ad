"""AMX: the emulated tiles compute what is documented for the processor's, and the processor's compute the same."""

import pytest
import torch

from diptych.runtime.kernels.instruction_set import AMX_EMULATED, available
from diptych.runtime.kernels.native import load_native
from diptych.runtime.ops import make_ops

BF16 = torch.bfloat16
STEP = 32  # elements of a row that one instruction multiplies

pytestmark = pytest.mark.skipif(load_native() is None, reason="no native kernels here")


def documented(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T as TDPBF16PS adds it up: in each step of 32, even and odd products in two fp32 sums (a product of two bf16
    is exact in fp32), then both, then to what was there."""
    rows, columns = x.float(), weight.float()
    result = torch.zeros(len(x), len(weight))
    for start in range(0, x.shape[1], STEP):
        lanes = [torch.zeros(len(x), len(weight)) for _ in range(2)]
        for k in range(start, start + STEP):
            lanes[k % 2] += rows[:, k, None] * columns[None, :, k]
        result += lanes[0] + lanes[1]
    return result.to(BF16)


@pytest.mark.parametrize(("columns", "inputs"), [(32, 32), (40, 96), (300, 128)])
def test_emulated_tiles_add_up_as_documented(columns: int, inputs: int) -> None:
    weight = torch.randn(columns, inputs).to(BF16)
    layer = make_ops(BF16, AMX_EMULATED).pack_linear(weight.clone(), None)
    for rows in (1, 16, 17, 33, 140):
        x = torch.randn(rows, inputs).to(BF16)
        assert torch.equal(layer(x), documented(x, weight))


@pytest.mark.skipif("amx" not in available(BF16), reason="no AMX here")
@pytest.mark.parametrize(("columns", "inputs"), [(40, 96), (2100, 896)])
def test_the_processor_gives_the_bits_of_the_emulation(columns: int, inputs: int) -> None:
    weight = torch.randn(columns, inputs).to(BF16)
    layers = [make_ops(BF16, name).pack_linear(weight.clone(), None) for name in ("amx", AMX_EMULATED)]
    for rows in (1, 16, 17, 33, 140):
        x = torch.randn(rows, inputs).to(BF16)
        assert torch.equal(layers[0](x), layers[1](x))
