"""The operations through the native kernels of one instruction set, in bf16 or fp32.

A row's result does not depend on the other rows of the call, bitwise. Each call costs a few microseconds on top of its
work, so a layer is few calls.
"""

import torch

from diptych.runtime.kernels.native import NativeKernels
from diptych.runtime.ops.native_linear import has_kernel, pack_native, pack_native_quantized
from diptych.runtime.ops.ops import Linear, QuantizedLinear
from diptych.runtime.ops.torch_ops import TorchOps
from diptych.runtime.weights.quantized_weight import QuantizedSource
from diptych.runtime.weights.weight_memory import CPU_MEMORY, WeightMemory


class NativeOps:
    """Ops on the native kernels."""

    name = "native"

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels
        self._fallback = TorchOps()

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None, memory: WeightMemory = CPU_MEMORY) -> Linear:
        if weight.shape[1] % 2:
            return self._fallback.pack_linear(weight, bias, memory)
        return pack_native(self._kernels, weight, bias, False, memory)

    def pack_gate_up(
        self, weight: torch.Tensor, bias: torch.Tensor | None, memory: WeightMemory = CPU_MEMORY
    ) -> Linear:
        if bias is not None or weight.shape[1] % 2:
            return self._fallback.gated(self.pack_linear(weight, bias, memory), self.silu_and_mul)
        return pack_native(self._kernels, weight, None, True, memory)

    def pack_quantized(
        self,
        weight: QuantizedSource,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        memory: WeightMemory = CPU_MEMORY,
    ) -> QuantizedLinear:
        if not has_kernel(weight):
            return self._fallback.pack_quantized(weight, bias, dtype, memory)
        return pack_native_quantized(self._kernels, weight, bias, False, memory)

    def pack_quantized_gate_up(
        self,
        weight: QuantizedSource,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        memory: WeightMemory = CPU_MEMORY,
    ) -> Linear:
        if bias is not None or not has_kernel(weight):
            return self._fallback.gated(self.pack_quantized(weight, bias, dtype, memory), self.silu_and_mul)
        return pack_native_quantized(self._kernels, weight, None, True, memory)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        rows, dim = x.shape
        self._kernels.functions.diptych_norm(
            self._kernels.handle, x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), rows, dim, eps
        )
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        rows, dim = x.shape
        self._kernels.functions.diptych_norm(
            self._kernels.handle, x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, dim, eps
        )
        return out

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape
        out = gate_up.new_empty((rows, width // 2))
        self._kernels.functions.diptych_silu_and_mul(
            self._kernels.handle, gate_up.data_ptr(), out.data_ptr(), rows, width // 2
        )
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
    ) -> torch.Tensor:
        rows, width = qkv.shape
        dim, kv_heads = cos_sin.shape[1], k_cache.shape[1]
        heads = width // dim - 2 * kv_heads
        self._kernels.functions.diptych_rope_and_cache(
            self._kernels.handle, qkv.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), slots.data_ptr(),
            k_cache.data_ptr(), v_cache.data_ptr(),
            0 if q_norm is None else q_norm.data_ptr(), 0 if k_norm is None else k_norm.data_ptr(),
            rows, heads, kv_heads, dim, k_cache.shape[2] * k_cache.shape[4], eps,
        )  # fmt: skip
        return qkv.view(rows, -1, dim)[:, :heads]
