"""The operations through the native kernels of one instruction set, in bf16 or fp32.

A row's result does not depend on the other rows of the call, bitwise. Each call costs a few microseconds on top of its
work, so a layer is few calls.
"""

import ctypes
from collections.abc import Sequence
from functools import partial

import torch

from diptych.runtime.attention.layout import block_size_cpu, head_shape_cpu
from diptych.runtime.kernels.native import NativeKernels
from diptych.runtime.models.experts import ExpertRouting
from diptych.runtime.ops.native_experts import NativeExperts, choose_experts, native_layers
from diptych.runtime.ops.native_linear import has_kernel, native_gate, pack_native, pack_native_quantized
from diptych.runtime.ops.ops import Activation, Expert, Linear, QuantizedLinear, RoutedExperts
from diptych.runtime.ops.torch_experts import TorchExperts
from diptych.runtime.ops.torch_ops import GatedLinear, TorchOps
from diptych.runtime.weights.quantized_weight import QuantizedSource
from diptych.runtime.weights.weight_memory import CPU_MEMORY, WeightMemory


class _ConvolutionCall(ctypes.Structure):
    """The record Convolution of kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("projected", "weight", "bias", "before", "query_start")),
        *((name, ctypes.c_void_p) for name in ("inputs", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "seqs", "width", "taps")),
    )


class NativeOps:
    """Ops on the native kernels."""

    name = "native"

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels
        self._fallback = TorchOps()

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None, memory: WeightMemory = CPU_MEMORY) -> Linear:
        if weight.shape[1] % 2:
            return self._fallback.pack_linear(weight, bias, memory)
        return pack_native(self._kernels, weight, bias, None, memory)

    def pack_router(self, weight: torch.Tensor, bias: torch.Tensor | None, memory: WeightMemory = CPU_MEMORY) -> Linear:
        if weight.shape[1] % 2:
            return self._fallback.pack_router(weight, bias, memory)
        return pack_native(self._kernels, weight, bias, None, memory)

    def pack_gate_up(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        memory: WeightMemory = CPU_MEMORY,
        activation: Activation = "silu",
    ) -> Linear:
        if weight.shape[1] % 2:
            return self._gated(self.pack_linear(weight, bias, memory), activation)
        return pack_native(self._kernels, weight, bias, activation, memory)

    def pack_quantized(
        self,
        weight: QuantizedSource,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        memory: WeightMemory = CPU_MEMORY,
    ) -> QuantizedLinear:
        if not has_kernel(weight):
            return self._fallback.pack_quantized(weight, bias, dtype, memory)
        return pack_native_quantized(self._kernels, weight, bias, None, memory)

    def pack_quantized_gate_up(
        self,
        weight: QuantizedSource,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        memory: WeightMemory = CPU_MEMORY,
        activation: Activation = "silu",
    ) -> Linear:
        if not has_kernel(weight):
            return self._gated(self.pack_quantized(weight, bias, dtype, memory), activation)
        return pack_native_quantized(self._kernels, weight, bias, activation, memory)

    def _gated(self, linear: Linear, activation: Activation) -> Linear:
        return GatedLinear(linear, partial(self.activate, activation=activation))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(x, None, weight, eps, 1.0)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, multiplier: float = 1.0
    ) -> torch.Tensor:
        return self._norm(x, residual.data_ptr(), weight, eps, multiplier)

    def add(self, x: torch.Tensor, residual: torch.Tensor, multiplier: float = 1.0) -> None:
        self._kernels.functions.diptych_add(
            self._kernels.handle, x.data_ptr(), residual.data_ptr(), *x.shape, multiplier
        )

    def _norm(
        self, x: torch.Tensor, residual: int | None, weight: torch.Tensor, eps: float, multiplier: float
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        self._kernels.functions.diptych_norm(
            self._kernels.handle, x.data_ptr(), residual, weight.data_ptr(), weight.dtype is torch.float32,
            out.data_ptr(), *x.shape, eps, multiplier,
        )  # fmt: skip
        return out

    def activate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        rows, width = gate_up.shape
        out, gate = gate_up.new_empty((rows, width // 2)), native_gate(activation)
        self._kernels.functions.diptych_activate(
            self._kernels.handle, gate_up.data_ptr(), out.data_ptr(), rows, width // 2, ctypes.addressof(gate)
        )
        return out

    def gate(self, x: torch.Tensor, gates: torch.Tensor) -> None:
        self._kernels.functions.diptych_gate(self._kernels.handle, x.data_ptr(), gates.data_ptr(), *x.shape)

    def softcap(self, x: torch.Tensor, cap: float) -> None:
        self._kernels.functions.diptych_softcap(self._kernels.handle, x.data_ptr(), *x.shape, cap)

    def route(
        self, logits: torch.Tensor, routing: ExpertRouting, correction: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return choose_experts(self._kernels, logits, routing, correction)

    def join_experts(self, experts: Sequence[Expert]) -> RoutedExperts:
        layers = native_layers(experts)
        return TorchExperts(experts) if layers is None else NativeExperts(self._kernels, layers)

    def short_convolution(
        self,
        projected: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        before: torch.Tensor,
        query_start: torch.Tensor,
    ) -> torch.Tensor:
        (taps, width), rows = weight.shape, projected.shape[0]
        out, inputs = projected.new_empty((rows, width)), projected.new_empty((rows, width))
        before = before.contiguous()
        call = _ConvolutionCall(
            projected.data_ptr(), weight.data_ptr(), _pointer(bias), before.data_ptr(), query_start.data_ptr(),
            inputs.data_ptr(), out.data_ptr(), rows, before.shape[0], width, taps,
        )  # fmt: skip
        self._kernels.functions.diptych_convolve(self._kernels.handle, ctypes.addressof(call))
        return out

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        slots: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
        query_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows, width = qkv.shape
        kv_heads, dim = head_shape_cpu(k_cache)
        heads = width // dim - 2 * kv_heads
        norm = k_norm if q_norm is None else q_norm
        is_wide = norm is not None and norm.dtype is torch.float32
        norms_rows = norm is not None and norm.shape[0] != dim
        self._kernels.functions.diptych_rope_and_cache(
            self._kernels.handle, qkv.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), _pointer(query_scale),
            slots.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), _pointer(q_norm), _pointer(k_norm), is_wide,
            norms_rows, rows, heads, kv_heads, dim, cos_sin.shape[1], block_size_cpu(k_cache),
            k_cache.dtype is torch.int8, eps,
        )  # fmt: skip
        return qkv.view(rows, -1, dim)[:, :heads]


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
