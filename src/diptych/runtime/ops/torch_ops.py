"""The operations in plain torch: any device, any dtype. The reference that the native kernels are tested against."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from diptych.runtime.attention.layout import write_cpu, write_cuda


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """A linear layer through torch.nn.functional."""

    weight: torch.Tensor  # [out_features, in_features]
    bias: torch.Tensor | None

    @property
    def in_features(self) -> int:
        """See Linear."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """See Linear."""
        return self.weight.shape[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return F.linear(x, self.weight, self.bias)


class TorchOps:
    """See Ops."""

    name = "torch"

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> TorchLinear:
        """See Ops."""
        return TorchLinear(weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Ops."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * normed.to(x.dtype)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See Ops."""
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def qk_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """See Ops."""
        x.copy_(self.rms_norm(x, weight, eps))

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        slots: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        """See Ops."""
        rows, head_dim = qkv.shape[0], cos_sin.shape[1]
        on_cuda = k_cache.device.type == "cuda"
        num_kv_heads = k_cache.shape[2] if on_cuda else k_cache.shape[1]
        heads = qkv.view(rows, -1, head_dim)
        num_heads = heads.shape[1] - 2 * num_kv_heads
        rotated = heads[:, : num_heads + num_kv_heads]
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [rows, 1, head_dim / 2] each
        first, second = rotated.float().chunk(2, dim=-1)
        rotated.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
        write = write_cuda if on_cuda else write_cpu
        write(rotated[:, num_heads:], heads[:, num_heads + num_kv_heads :], k_cache, v_cache, slots)
        return heads[:, :num_heads]
