"""The operations of a transformer layer around attention. Rows are tokens; tensors are contiguous in the last dim."""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch

from diptych.runtime.models.experts import ClampedSwish, ExpertRouting
from diptych.runtime.weights.quantized_weight import QuantizedSource
from diptych.runtime.weights.weight_memory import CPU_MEMORY, WeightMemory

# Of the gate of an MLP; gelu_tanh: x (1 + tanh(u)) / 2, see torch's gelu. ClampedSwish changes both halves.
NamedActivation = Literal["silu", "gelu_tanh"]
Activation = NamedActivation | ClampedSwish


class Linear(Protocol):
    """A linear layer whose weight was packed once for the machine."""

    @property
    def in_features(self) -> int:
        """Width of its rows in."""
        ...

    @property
    def out_features(self) -> int:
        """Width of its rows out."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, in_features] -> [num_tokens, out_features]."""
        ...


class QuantizedLinear(Linear, Protocol):
    """A linear layer whose weight is in whole numbers. It quantises its rows of x to 8 bits, with a scale
    for each span of 128 or 256 columns."""

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """numbers [count] int64 -> these rows of the weight [count, in_features], in the dtype that is computed in."""
        ...


class Expert(Protocol):
    """A gated MLP: down(gate_up(x))."""

    @property
    def gate_up(self) -> Linear:
        """[rows, hidden] -> [rows, width of the expert]."""
        ...

    @property
    def down(self) -> Linear:
        """[rows, width of the expert] -> [rows, hidden]."""
        ...


class RoutedExperts(Protocol):
    """The experts of one layer."""

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The sum of what the chosen experts give for each row, times their weights: x [num_tokens, hidden] ->
        [num_tokens, hidden]. chosen, weights [num_tokens, top_k]: as from Ops.route, but in any order. A row's experts
        are added in ascending order in fp32, whatever the batch, and their sum is rounded once."""
        ...


class Ops(Protocol):
    """Implementations: TorchOps (any device) and NativeOps (CPU kernels); same results within the dtype's rounding.

    Norms and softmax are computed in fp32 whatever the dtype.
    """

    name: str

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None, memory: WeightMemory = CPU_MEMORY) -> Linear:
        """weight [out_features, in_features]; the caller drops its own reference, so that memory does not double. What
        the layer keeps of the weight lies in ``memory``; where that is filled, the weight has no values. The bias is
        kept as it is."""
        ...

    def pack_router(self, weight: torch.Tensor, bias: torch.Tensor | None, memory: WeightMemory = CPU_MEMORY) -> Linear:
        """Pack a router as pack_linear does. A weight in fp32 is multiplied with rows in fp32, whatever dtype they come
        in, and logits are in fp32 then."""
        ...

    def pack_gate_up(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        memory: WeightMemory = CPU_MEMORY,
        activation: Activation = "silu",
    ) -> Linear:
        """weight [2 * dim, in_features], gate rows first: a layer that gives activation(gate) * up [num_tokens,
        dim]."""
        ...

    def pack_quantized(
        self,
        weight: QuantizedSource,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        memory: WeightMemory = CPU_MEMORY,
    ) -> QuantizedLinear:
        """Pack a quantised weight as pack_linear does, for rows in ``dtype``. The weight is read where ``memory`` is
        not filled."""
        ...

    def pack_quantized_gate_up(
        self,
        weight: QuantizedSource,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        memory: WeightMemory = CPU_MEMORY,
        activation: Activation = "silu",
    ) -> Linear:
        """Pack quantised weights as pack_gate_up does."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [num_tokens, dim] -> [num_tokens, dim]. weight: in the dtype of x, where the normed value is rounded to it
        before the product is; or in fp32, where only the product is rounded."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, multiplier: float = 1.0
    ) -> torch.Tensor:
        """residual += multiplier * x in place; returns rms_norm(residual)."""
        ...

    def add(self, x: torch.Tensor, residual: torch.Tensor, multiplier: float = 1.0) -> None:
        """residual += multiplier * x in place. Both are [num_tokens, dim]."""
        ...

    def activate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """gate_up [num_tokens, 2 * dim] -> activation(gate) * up [num_tokens, dim]."""
        ...

    def gate(self, x: torch.Tensor, gates: torch.Tensor) -> None:
        """x *= sigmoid(gates) in place. Both are [num_tokens, dim]."""
        ...

    def softcap(self, x: torch.Tensor, cap: float) -> None:
        """x = cap * tanh(x / cap) in place. x [num_rows, dim]."""
        ...

    def route(
        self, logits: torch.Tensor, routing: ExpertRouting, correction: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [num_tokens, num_experts] -> the experts of each token [num_tokens, top_k] int64, in ascending order,
        and their weights [num_tokens, top_k] fp32. correction [num_experts] fp32: what is added to scores to choose by,
        but not to weights. Of equal scores, that of the lowest index is the larger one."""
        ...

    def join_experts(self, experts: Sequence[Expert]) -> RoutedExperts:
        """Experts whose layers this has packed, of one shape and one activation, to be computed together."""
        ...

    def short_convolution(
        self,
        projected: torch.Tensor,  # [num_tokens, 3 * width]: b, c and x of each token
        weight: torch.Tensor,  # [taps, width]
        bias: torch.Tensor | None,  # [width]
        before: torch.Tensor,  # [num_seqs, taps - 1, width]: b * x of the tokens before each sequence's first one
        query_start: torch.Tensor,  # [num_seqs + 1] int32: first row of each sequence, then num_tokens
    ) -> torch.Tensor:
        """c * (bias + the sum over taps of weight * (b * x of the token ``taps - 1 - tap`` before)), [num_tokens,
        width]. Products b * x and the sum are rounded to the dtype; the sum is taken in fp32, in the order of taps,
        whatever the batch."""
        ...

    def rope_and_cache(
        self,
        qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        positions: torch.Tensor,  # [num_tokens] int64
        cos_sin: torch.Tensor,  # [max_positions, rotary] fp32: rotary/2 cosines, then rotary/2 sines
        slots: torch.Tensor,  # [num_tokens] int64
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        q_norm: torch.Tensor | None = None,  # [head_dim]: RMS norm of each query head first; [all heads]: of the row
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
        query_scale: torch.Tensor | None = None,  # [max_positions] fp32: what rotated queries are multiplied with
    ) -> torch.Tensor:
        """Rotate the first ``rotary`` values of each head of q and k (the "half" convention of Hugging Face Llama:
        pairs are rotary/2 apart), write k and v into the cache, return q as [num_tokens, num_heads, head_dim] (a view
        of qkv, rotated in place)."""
        ...
