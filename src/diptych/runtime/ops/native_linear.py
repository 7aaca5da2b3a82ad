"""Linear layers over packed panels, which the native kernels multiply: in floating point and in whole numbers.

A layer has one packed copy of its weight for all batch sizes, whatever the instruction set.
"""

import ctypes
from functools import partial

import torch
import torch.nn.functional as F

from diptych.runtime.kernels.native import NativeGate, NativeKernels, NativeWeight
from diptych.runtime.models.experts import ClampedSwish
from diptych.runtime.ops.ops import Activation
from diptych.runtime.weights.quantized_weight import QuantizedSource
from diptych.runtime.weights.weight_format import MIN_GROUP, WeightFormat
from diptych.runtime.weights.weight_memory import WeightMemory

PANEL = 32  # columns that are packed together
PREFETCHED_BYTES = 8192  # room behind the last panel: the kernels ask for what they will not read
GATES: dict[Activation | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2}  # as kernels.h numbers them
CLAMPED_SWISH = 3  # likewise
MAX_SUMMED_COLUMNS = 1 << 16  # products of bytes that a sum of 32 bits holds


def native_gate(activation: Activation | None) -> NativeGate:
    """An activation as the kernels take it."""
    if isinstance(activation, ClampedSwish):
        return NativeGate(CLAMPED_SWISH, activation.limit, activation.alpha)
    return NativeGate(GATES[activation])


class NativeLinear:
    """A QuantizedLinear on a native kernel. packed, shape: those of the weight. activation: halves the output,
    activation(first half) * second half. weight_format: None for floating point, without ``rows``."""

    def __init__(
        self,
        kernels: NativeKernels,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        shape: tuple[int, int],
        activation: Activation | None,
        weight_format: WeightFormat | None = None,
    ) -> None:
        self._kernels = kernels
        self._rows, self.in_features = shape
        self.out_features = self._rows if activation is None else self._rows // 2
        self.activation, self.gate = activation, native_gate(activation)
        bias = bias if bias is None or activation is None else _by_panel(bias)
        self._tensors = (packed, bias)  # that the record points to
        self.weight = NativeWeight(packed.data_ptr(), None if bias is None else bias.data_ptr())
        if weight_format is not None:
            self.weight.bits, self.weight.has_mins = weight_format.bits, weight_format.has_mins
            self.weight.group = weight_format.group_size or self.in_features
        self._weight_ptr, self._gate_ptr = ctypes.addressof(self.weight), ctypes.addressof(self.gate)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        y = x.new_empty((rows, self.out_features))
        self._kernels.functions.diptych_linear(
            self._kernels.handle, x.data_ptr(), self._weight_ptr, y.data_ptr(), rows, self._rows, self.in_features,
            x.stride(0), self._gate_ptr,
        )  # fmt: skip
        return y

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        out = torch.empty((len(numbers), self.in_features), dtype=self._kernels.dtype)
        self._kernels.functions.diptych_quantized_rows(
            self._weight_ptr, numbers.data_ptr(), out.data_ptr(), *out.shape, out.dtype == torch.bfloat16
        )
        return out


class WideNativeLinear(NativeLinear):
    """A layer in fp32 on kernels that compute in bf16: its rows are widened, and stay so."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float().contiguous()
        y = wide.new_empty((wide.shape[0], self.out_features))
        self._kernels.functions.diptych_wide_linear(
            self._kernels.handle, wide.data_ptr(), self._weight_ptr, y.data_ptr(), wide.shape[0], self.out_features,
            self.in_features,
        )  # fmt: skip
        return y


def _by_panel(bias: torch.Tensor) -> torch.Tensor:
    """The bias of a gated layer in the order of its packed columns: 16 of gates, 16 of ups, and so on."""
    width, half = len(bias) // 2, PANEL // 2
    panels = -(-width // half)
    padded = F.pad(bias.view(2, width), (0, panels * half - width))
    return padded.view(2, panels, half).transpose(0, 1).contiguous().view(-1)


def pack_native(
    kernels: NativeKernels,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None,
    memory: WeightMemory,
) -> NativeLinear:
    """weight [out_features, in_features], an even number of columns. activation: see NativeLinear."""
    (rows, columns), gated = weight.shape, activation is not None
    panels = -(-rows // 2 // (PANEL // 2)) if gated else -(-rows // PANEL)
    size = panels * PANEL * columns + PREFETCHED_BYTES // weight.itemsize

    def fill(packed: torch.Tensor) -> None:
        source, is_bf16 = weight.contiguous(), weight.dtype == torch.bfloat16
        kernels.functions.diptych_pack(source.data_ptr(), packed.data_ptr(), rows, columns, gated, is_bf16)

    packed = memory.new([size], weight.dtype, fill)
    kind = NativeLinear if weight.dtype is kernels.dtype else WideNativeLinear
    return kind(kernels, packed, bias, (rows, columns), activation)


def has_kernel(weight: QuantizedSource) -> bool:
    """Whether ``pack_native_quantized`` takes the weight."""
    if (group_size := weight.format.group_size) is not None:
        return group_size % MIN_GROUP == 0 and weight.columns % group_size == 0
    return weight.columns % (32 // weight.format.bits) == 0 and weight.columns <= MAX_SUMMED_COLUMNS


def pack_native_quantized(
    kernels: NativeKernels,
    weight: QuantizedSource,
    bias: torch.Tensor | None,
    activation: Activation | None,
    memory: WeightMemory,
) -> NativeLinear:
    """A weight that ``has_kernel``. activation: see NativeLinear."""
    gated = activation is not None
    number, shape = weight.format, (weight.rows, weight.columns)
    group = number.group_size or weight.columns
    size = kernels.functions.diptych_quantized_size(*shape, gated, number.bits, group, number.has_mins)
    packed = memory.new([size + PREFETCHED_BYTES], torch.uint8, partial(_pack_quantized, kernels, weight, gated))
    return NativeLinear(kernels, packed, bias, shape, activation, number)


def _pack_quantized(kernels: NativeKernels, source: QuantizedSource, gated: bool, packed: torch.Tensor) -> None:
    weight, number = source.read(), source.format
    group = number.group_size or source.columns
    kept = torch.float32 if group == source.columns else torch.float16
    values, scales = weight.values.contiguous(), weight.scales.to(kept).contiguous()
    mins = None if weight.mins is None else weight.mins.to(kept).contiguous()
    kernels.functions.diptych_pack_quantized(
        values.data_ptr(), scales.data_ptr(), None if mins is None else mins.data_ptr(), packed.data_ptr(),
        source.rows, source.columns, gated, number.bits, group,
    )  # fmt: skip
