"""Linear layers with weights in whole numbers in plain torch: the reference of the native kernels, and what computes
where there are none.

torch multiplies whole numbers of 8 bits with one scale per row of the weight. Weights in other formats become floating
point when they are loaded: right, and as large and as fast as if they had never been quantised.
"""

import torch
import torch.nn.functional as F

from diptych.runtime.weights.quantized_weight import QuantizedSource, QuantizedWeight
from diptych.runtime.weights.weight_format import WeightFormat
from diptych.runtime.weights.weight_memory import WeightMemory

LARGEST = 127
SMALLEST_LIMIT = 1e-30  # spans below it count as zeros
SPAN = 256  # columns of x that share a scale; see Cut in quantized_gemm.h


def quantize_span(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, columns] -> (int8 [rows, columns], fp32 scales [rows, 1]): the nearest whole numbers, the largest
    magnitude of a row at 127. A row that holds infinity or no number gets zeros and a scale that is no number."""
    wide = x.float()
    limits = wide.abs().amax(-1, keepdim=True)
    is_usable = limits.isfinite() & (limits > SMALLEST_LIMIT)
    steps = torch.full_like(limits, LARGEST) / limits  # a quotient: torch computes 127 / limits as 127 (1 / limits)
    numbers = torch.where(is_usable, wide * steps, 0.0).round().to(torch.int8)
    return numbers, torch.where(limits.isfinite(), limits / LARGEST * is_usable, torch.nan)


def multiplies_numbers(weight_format: WeightFormat) -> bool:
    """Whether torch has a product for the format."""
    return weight_format == WeightFormat(8)


class TorchQuantizedLinear:
    """A QuantizedLinear in torch, for formats that ``multiplies_numbers``."""

    def __init__(
        self, weight: QuantizedSource, bias: torch.Tensor | None, dtype: torch.dtype, memory: WeightMemory
    ) -> None:
        self.in_features, self.out_features = weight.columns, weight.rows
        self._bias, self._dtype = bias, dtype
        read = _ReadOnce(weight)
        shape = [weight.rows, weight.columns]
        self._values = memory.new(
            shape, torch.int8, lambda to: torch.bitwise_xor(read().values, 128, out=to.view(torch.uint8))
        )  # less 128, as signed bytes
        self._scales = memory.new(shape[:1], torch.float32, lambda to: to.copy_(read().scales[:, 0]))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros((x.shape[0], self.out_features), dtype=torch.float32)
        for part, values in zip(torch.split(x, SPAN, dim=1), torch.split(self._values, SPAN, dim=1), strict=True):
            numbers, scales = quantize_span(part)
            y += torch._int_mm(numbers, values.t()) * scales
        y *= self._scales
        return (y if self._bias is None else y + self._bias).to(self._dtype)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        return (self._values[numbers] * self._scales[numbers].unsqueeze(1)).to(self._dtype)


class DequantizedLinear:
    """A QuantizedLinear that keeps its weight in floating point."""

    def __init__(
        self, weight: QuantizedSource, bias: torch.Tensor | None, dtype: torch.dtype, memory: WeightMemory
    ) -> None:
        self.in_features, self.out_features = weight.columns, weight.rows
        self._bias = bias
        shape = [weight.rows, weight.columns]
        self._weight = memory.new(shape, dtype, lambda to: to.copy_(weight.read().dequantize()))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        return self._weight[numbers]


class _ReadOnce:
    """A weight that is read when it is asked for, once."""

    def __init__(self, source: QuantizedSource) -> None:
        self._source = source
        self._weight: QuantizedWeight | None = None

    def __call__(self) -> QuantizedWeight:
        self._weight = self._weight or self._source.read()
        return self._weight
