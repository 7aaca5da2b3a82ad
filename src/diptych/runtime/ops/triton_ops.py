"""The operations on a GPU in Triton, each row with the same bits in any batch."""

from dataclasses import dataclass

import torch

from diptych.runtime.kernels.triton_kernels import elementwise
from diptych.runtime.kernels.triton_kernels.linear import linear
from diptych.runtime.models.experts import ClampedSwish
from diptych.runtime.ops.ops import Activation
from diptych.runtime.ops.torch_ops import TorchLinear, TorchOps
from diptych.runtime.weights.weight_memory import CPU_MEMORY, WeightMemory


@dataclass(frozen=True, slots=True)
class TritonLinear(TorchLinear):
    """A linear layer whose sums have one order for every number of rows."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class TritonOps(TorchOps):
    """Triton kernels for weights in floating point. Weights in whole numbers are torch's business."""

    name = "triton"

    def pack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, memory: WeightMemory = CPU_MEMORY
    ) -> TorchLinear:
        return TritonLinear(memory.keep(weight), bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return elementwise.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, multiplier: float = 1.0
    ) -> torch.Tensor:
        return elementwise.rms_norm(x, weight, eps, residual, multiplier)

    def activate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        if isinstance(activation, ClampedSwish):  # by element, and so the same in any batch
            return super().activate(gate_up, activation)
        return elementwise.activate_and_mul(gate_up, activation)

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
        head_dim = k_cache.shape[3]
        is_by_head = all(norm is None or norm.shape[0] == head_dim for norm in (q_norm, k_norm))
        arguments = (qkv, positions, cos_sin, slots, k_cache, v_cache, q_norm, k_norm, eps)
        if cos_sin.shape[1] == head_dim and is_by_head and query_scale is None:
            return elementwise.rope_and_cache(*arguments)
        # Norms are the kernel's there, too; the rest is by element, and so the same in any batch.
        return super().rope_and_cache(*arguments, query_scale)
