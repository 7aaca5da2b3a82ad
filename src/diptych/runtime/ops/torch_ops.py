"""The operations in plain torch: any device, any dtype. The reference that the native kernels are tested against."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from diptych.runtime.attention.layout import head_shape_cpu, write_cpu, write_cuda
from diptych.runtime.models.experts import ClampedSwish, ExpertRouting
from diptych.runtime.ops.ops import Activation, Expert, Linear, QuantizedLinear, RoutedExperts
from diptych.runtime.ops.torch_experts import TorchExperts, WideLinear, clamped_swish, route
from diptych.runtime.ops.torch_quantized_linear import DequantizedLinear, TorchQuantizedLinear, multiplies_numbers
from diptych.runtime.weights.quantized_weight import QuantizedSource
from diptych.runtime.weights.weight_memory import CPU_MEMORY, WeightMemory

MAX_BLOCK_ROWS = 256


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """A Linear through torch.nn.functional."""

    weight: torch.Tensor  # [out_features, in_features]
    bias: torch.Tensor | None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class BlockedLinear(TorchLinear):
    """A bfloat16 layer on the CPU, in blocks of rows that have one of a few sizes: oneDNN, which computes it, keeps
    about 0.7 MB of code for each number of rows that it has met, whatever the capacity of its cache is set to."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == _block_rows(x.shape[0]):
            return F.linear(x, self.weight, self.bias)
        y = x.new_empty((x.shape[0], self.out_features))
        for rows, out in zip(torch.split(x, MAX_BLOCK_ROWS), torch.split(y, MAX_BLOCK_ROWS), strict=True):
            padding = _block_rows(rows.shape[0]) - rows.shape[0]
            out.copy_(F.linear(F.pad(rows, (0, 0, 0, padding)), self.weight, self.bias)[: rows.shape[0]])
        return y


def _block_rows(rows: int) -> int:
    """The size of the block that computes this many rows, or the first of them: a power of two or a multiple of 16."""
    if rows >= MAX_BLOCK_ROWS:
        return MAX_BLOCK_ROWS
    return -(-rows // 16) * 16 if rows > 16 else 1 << max(rows - 1, 0).bit_length()


@dataclass(frozen=True, slots=True)
class GatedLinear:
    """A Linear in two calls where the kernels have no fused one."""

    linear: Linear
    activate: Callable[[torch.Tensor], torch.Tensor]

    @property
    def in_features(self) -> int:
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        return self.linear.out_features // 2

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.activate(self.linear(x))


class TorchOps:
    """Ops in torch."""

    name = "torch"

    def pack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, memory: WeightMemory = CPU_MEMORY
    ) -> TorchLinear:
        kept = memory.keep(weight)
        is_blocked = kept.dtype == torch.bfloat16 and kept.device.type == "cpu"
        return BlockedLinear(kept, bias) if is_blocked else TorchLinear(kept, bias)

    def pack_router(self, weight: torch.Tensor, bias: torch.Tensor | None, memory: WeightMemory = CPU_MEMORY) -> Linear:
        linear = self.pack_linear(weight, bias, memory)
        return WideLinear(linear) if weight.dtype is torch.float32 else linear

    def pack_gate_up(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        memory: WeightMemory = CPU_MEMORY,
        activation: Activation = "silu",
    ) -> Linear:
        return GatedLinear(self.pack_linear(weight, bias, memory), partial(self.activate, activation=activation))

    def pack_quantized(
        self,
        weight: QuantizedSource,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        memory: WeightMemory = CPU_MEMORY,
    ) -> QuantizedLinear:
        if multiplies_numbers(weight.format):
            return TorchQuantizedLinear(weight, bias, dtype, memory)
        return DequantizedLinear(weight, bias, dtype, memory)

    def pack_quantized_gate_up(
        self,
        weight: QuantizedSource,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        memory: WeightMemory = CPU_MEMORY,
        activation: Activation = "silu",
    ) -> Linear:
        linear = self.pack_quantized(weight, bias, dtype, memory)
        return GatedLinear(linear, partial(self.activate, activation=activation))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * normed.to(x.dtype) if weight.dtype == x.dtype else (weight * normed).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, multiplier: float = 1.0
    ) -> torch.Tensor:
        self.add(x, residual, multiplier)
        return self.rms_norm(residual, weight, eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor, multiplier: float = 1.0) -> None:
        residual.add_(x, alpha=multiplier)

    def activate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        if isinstance(activation, ClampedSwish):
            return clamped_swish(gate_up, activation)
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def gate(self, x: torch.Tensor, gates: torch.Tensor) -> None:
        x.mul_(gates.sigmoid())

    def softcap(self, x: torch.Tensor, cap: float) -> None:
        x.div_(cap).tanh_().mul_(cap)

    def route(
        self, logits: torch.Tensor, routing: ExpertRouting, correction: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return route(logits, routing, correction)

    def join_experts(self, experts: Sequence[Expert]) -> RoutedExperts:
        return TorchExperts(experts)

    def short_convolution(
        self,
        projected: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        before: torch.Tensor,
        query_start: torch.Tensor,
    ) -> torch.Tensor:
        b, c, x = projected.chunk(3, dim=-1)
        inputs = b * x
        (rows, width), (num_seqs, count, _), device = inputs.shape, before.shape, inputs.device
        # all inputs, those of each sequence behind the ones before it
        starts, sequences = query_start.long(), torch.arange(num_seqs, device=device)
        sequence = torch.repeat_interleave(sequences, starts.diff(), output_size=rows)
        places = torch.arange(rows, device=device) + (sequence + 1) * count
        joined = inputs.new_empty((rows + num_seqs * count, width))
        joined[places] = inputs
        joined[(starts[:-1] + sequences * count)[:, None] + torch.arange(count, device=device)] = before
        total = inputs.new_zeros((rows, width), dtype=torch.float32) if bias is None else bias.float().expand(rows, -1)
        for tap, factors in enumerate(weight.float()):
            total = total + joined[places - (count - tap)] * factors
        return total.to(inputs.dtype) * c

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
        rows, rotary = qkv.shape[0], cos_sin.shape[1]
        on_cuda = k_cache.device.type == "cuda"
        num_kv_heads, head_dim = (k_cache.shape[2], k_cache.shape[3]) if on_cuda else head_shape_cpu(k_cache)
        heads = qkv.view(rows, -1, head_dim)
        num_heads = heads.shape[1] - 2 * num_kv_heads
        for norm, part in ((q_norm, heads[:, :num_heads]), (k_norm, heads[:, num_heads : num_heads + num_kv_heads])):
            if norm is not None:
                normed = part.reshape(rows, -1, norm.shape[0])  # one row of all heads, or one of each
                part.copy_(self.rms_norm(normed, norm, eps).view(part.shape))
        keys = heads[:, num_heads : num_heads + num_kv_heads]
        rotated = heads[:, : num_heads + num_kv_heads, :rotary]
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [rows, 1, rotary / 2] each
        first, second = rotated.float().chunk(2, dim=-1)
        rotated.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
        if query_scale is not None:
            heads[:, :num_heads].mul_(query_scale[positions].view(rows, 1, 1))
        write = write_cuda if on_cuda else write_cpu
        write(keys, heads[:, num_heads + num_kv_heads :], k_cache, v_cache, slots)
        return heads[:, :num_heads]
