"""The operations through the native kernels of one instruction set, in bf16 or fp32.

A row's result does not depend on the other rows of the call, bitwise, and a linear layer has one packed copy of its
weights for all batch sizes. Each call costs a few microseconds on top of its work, so a layer is few calls.
"""

from functools import partial

import torch

from diptych.runtime.native import NativeKernels
from diptych.runtime.ops.ops import Linear
from diptych.runtime.ops.torch_ops import TorchOps
from diptych.runtime.weight_memory import CPU_MEMORY, WeightMemory

PANEL = 32  # columns that are packed together


class NativeLinear:
    """A linear layer over packed panels; ``gated`` halves the output: silu(first half) * second half."""

    def __init__(
        self,
        kernels: NativeKernels,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gated: bool = False,
        memory: WeightMemory = CPU_MEMORY,
    ) -> None:
        self._kernels = kernels
        self._rows, self.in_features = weight.shape
        self.out_features = self._rows // 2 if gated else self._rows
        self._gated = int(gated)
        self.bias = bias
        self._bias_ptr = 0 if bias is None else bias.data_ptr()
        width = PANEL // 2 if gated else PANEL
        panels = -(-self.out_features // width)
        # room behind the last panel: the kernel prefetches past it
        size = panels * PANEL * self.in_features + 4096
        self.packed = memory.new([size], weight.dtype, partial(self._pack, weight))
        self._packed_ptr = self.packed.data_ptr()

    def _pack(self, weight: torch.Tensor, packed: torch.Tensor) -> None:
        source, is_bf16 = weight.contiguous(), weight.dtype == torch.bfloat16
        self._kernels.functions.diptych_pack(
            source.data_ptr(), packed.data_ptr(), self._rows, self.in_features, self._gated, is_bf16
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        rows = x.shape[0]
        y = x.new_empty((rows, self.out_features))
        self._kernels.functions.diptych_linear(
            self._kernels.handle, x.data_ptr(), self._packed_ptr, self._bias_ptr, y.data_ptr(), rows, self._rows,
            self.in_features, x.stride(0), self._gated,
        )  # fmt: skip
        return y


class NativeOps:
    """See Ops."""

    name = "native"

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels
        self._fallback = TorchOps()

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None, memory: WeightMemory = CPU_MEMORY) -> Linear:
        """See Ops."""
        if weight.shape[1] % 2:
            return self._fallback.pack_linear(weight, bias, memory)
        return NativeLinear(self._kernels, weight, bias, memory=memory)

    def pack_gate_up(
        self, weight: torch.Tensor, bias: torch.Tensor | None, memory: WeightMemory = CPU_MEMORY
    ) -> Linear:
        """See Ops."""
        if bias is not None or weight.shape[1] % 2:
            return self._fallback.gated(self.pack_linear(weight, bias, memory), self.silu_and_mul)
        return NativeLinear(self._kernels, weight, None, gated=True, memory=memory)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Ops."""
        out = torch.empty_like(x)
        rows, dim = x.shape
        self._kernels.functions.diptych_norm(
            self._kernels.handle, x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), rows, dim, eps
        )
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Ops."""
        out = torch.empty_like(x)
        rows, dim = x.shape
        self._kernels.functions.diptych_norm(
            self._kernels.handle, x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, dim, eps
        )
        return out

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Ops."""
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
        """See Ops."""
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
