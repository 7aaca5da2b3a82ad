"""The operations on a GPU in Triton, each row with the same bits in any batch."""

from dataclasses import dataclass

import torch

from diptych.runtime.kernels.triton_kernels import elementwise
from diptych.runtime.kernels.triton_kernels.linear import linear
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

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return elementwise.rms_norm(x, weight, eps, residual)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return elementwise.silu_and_mul(gate_up)

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
        return elementwise.rope_and_cache(qkv, positions, cos_sin, slots, k_cache, v_cache, q_norm, k_norm, eps)
