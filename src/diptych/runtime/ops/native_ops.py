"""The operations through the native kernels: bf16 and fp32 on processors with AVX-512.

A row's result does not depend on the other rows of the call, bitwise, and a linear layer has one packed copy of its
weights for all batch sizes. Each call costs a few microseconds on top of its work, so a layer is few calls.
"""

from functools import partial

import torch

from diptych.runtime.native import NativeLibrary
from diptych.runtime.ops.ops import Linear
from diptych.runtime.ops.torch_ops import TorchOps
from diptych.runtime.weight_memory import CPU_MEMORY, WeightMemory

PANEL = 32  # columns that are packed together


class NativeLinear:
    """A linear layer over packed panels; ``gated`` halves the output: silu(first half) * second half."""

    def __init__(
        self,
        library: NativeLibrary,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gated: bool = False,
        memory: WeightMemory = CPU_MEMORY,
    ) -> None:
        self._run = library.functions.diptych_linear
        self._rows, self.in_features = weight.shape
        self.out_features = self._rows // 2 if gated else self._rows
        self._gated = int(gated)
        self._is_bf16 = int(weight.dtype == torch.bfloat16)
        self.bias = bias
        self._bias_ptr = 0 if bias is None else bias.data_ptr()
        width = PANEL // 2 if gated else PANEL
        panels = -(-self.out_features // width)
        # room behind the last panel: the kernel prefetches past it
        size = panels * PANEL * self.in_features + 4096
        self.packed = memory.new([size], weight.dtype, partial(self._pack, library, weight))
        self._packed_ptr = self.packed.data_ptr()

    def _pack(self, library: NativeLibrary, weight: torch.Tensor, packed: torch.Tensor) -> None:
        source = weight.contiguous()
        library.functions.diptych_pack(
            source.data_ptr(), packed.data_ptr(), self._rows, self.in_features, self._gated, self._is_bf16
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        rows = x.shape[0]
        y = x.new_empty((rows, self.out_features))
        self._run(
            x.data_ptr(), self._packed_ptr, self._bias_ptr, y.data_ptr(), rows, self._rows, self.in_features,
            x.stride(0), self._gated, self._is_bf16,
        )  # fmt: skip
        return y


class NativeOps:
    """See Ops."""

    name = "native"

    def __init__(self, library: NativeLibrary, dtype: torch.dtype) -> None:
        self._library = library
        self._functions = library.functions
        self._is_bf16 = int(dtype == torch.bfloat16)
        self._fallback = TorchOps()

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None, memory: WeightMemory = CPU_MEMORY) -> Linear:
        """See Ops."""
        if weight.shape[1] % 2:
            return self._fallback.pack_linear(weight, bias, memory)
        return NativeLinear(self._library, weight, bias, memory=memory)

    def pack_gate_up(
        self, weight: torch.Tensor, bias: torch.Tensor | None, memory: WeightMemory = CPU_MEMORY
    ) -> Linear:
        """See Ops."""
        if bias is not None or weight.shape[1] % 2:
            return self._fallback.gated(self.pack_linear(weight, bias, memory), self.silu_and_mul)
        return NativeLinear(self._library, weight, None, gated=True, memory=memory)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Ops."""
        out = torch.empty_like(x)
        rows, dim = x.shape
        self._functions.diptych_rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, dim, eps, self._is_bf16)
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Ops."""
        out = torch.empty_like(x)
        rows, dim = x.shape
        self._functions.diptych_add_rms_norm(
            x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, dim, eps, self._is_bf16
        )
        return out

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        rows, width = gate_up.shape
        out = gate_up.new_empty((rows, width // 2))
        self._functions.diptych_silu_and_mul(gate_up.data_ptr(), out.data_ptr(), rows, width // 2, self._is_bf16)
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
        """See Ops."""
        rows, width = qkv.shape
        dim, kv_heads = cos_sin.shape[1], k_cache.shape[1]
        heads = width // dim - 2 * kv_heads
        self._functions.diptych_rope_and_cache(
            qkv.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), slots.data_ptr(),
            k_cache.data_ptr(), v_cache.data_ptr(),
            0 if q_norm is None else q_norm.data_ptr(), 0 if k_norm is None else k_norm.data_ptr(),
            rows, heads, kv_heads, dim, k_cache.shape[2] * k_cache.shape[4], eps, self._is_bf16,
        )  # fmt: skip
        return qkv.view(rows, -1, dim)[:, :heads]
