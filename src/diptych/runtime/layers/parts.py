"""The parts of a layer around its linear projections. Each is a callable over rows, one row per token."""

from dataclasses import dataclass

import torch

from diptych.runtime.kv_cache.kv_tensors import LayerCache
from diptych.runtime.layers.forward_pass import ForwardPass
from diptych.runtime.layers.rope import RotaryTable
from diptych.runtime.models.experts import ExpertRouting
from diptych.runtime.models.model_config import LayerAttention
from diptych.runtime.ops.ops import Linear, Ops, QuantizedLinear, RoutedExperts


@dataclass(frozen=True, slots=True)
class Embedding:
    """token ids [num_tokens] -> rows [num_tokens, width], a new tensor."""

    weight: torch.Tensor  # [vocab, width]

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(token_ids, self.weight)

    @property
    def vocab_size(self) -> int:
        """Rows."""
        return self.weight.shape[0]

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.weight.shape[1]


@dataclass(frozen=True, slots=True)
class QuantizedEmbedding:
    """An Embedding whose table is the weight of a layer, which a tied lm_head computes with."""

    linear: QuantizedLinear

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.linear.rows(token_ids)

    @property
    def vocab_size(self) -> int:
        """Rows."""
        return self.linear.out_features

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.linear.in_features


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """x / sqrt(mean(x ** 2) + eps) * weight, row by row (Zhang and Sennrich 2019)."""

    ops: Ops
    weight: torch.Tensor  # [width]; see Ops.rms_norm for what its dtype means
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, width] -> [rows, width]."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor, multiplier: float = 1.0) -> torch.Tensor:
        """Add multiplier * x to ``residual`` in place; the norm of the sum. All are [rows, width]."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps, multiplier)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, row by row (Ba, Kiros and Hinton 2016)."""

    ops: Ops
    weight: torch.Tensor  # [width], as bias, in the dtype of x
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, width] -> [rows, width]."""
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor, multiplier: float = 1.0) -> torch.Tensor:
        """Add multiplier * x to ``residual`` in place; the norm of the sum. All are [rows, width]."""
        self.ops.add(x, residual, multiplier)
        return self(residual)


Norm = RmsNorm | LayerNorm


@dataclass(frozen=True, slots=True)
class RopeAndCache:
    """Rotates q and k by their positions, normed head by head before if there are norms, and writes k and v into the
    cache."""

    ops: Ops
    table: RotaryTable
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None

    def __call__(self, qkv: torch.Tensor, cache: LayerCache, step: ForwardPass) -> torch.Tensor:
        """qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], rotated in place -> q [num_tokens, num_heads,
        head_dim], a view of it."""
        table = self.table
        return self.ops.rope_and_cache(
            qkv, step.batch.positions, table.cos_sin, step.slot_mapping, *cache, self.q_weight, self.k_weight, self.eps,
            table.query_scale,
        )  # fmt: skip

    @property
    def q_weight(self) -> torch.Tensor | None:
        """[head_dim] of the norm of each query head, or [all heads] of the norm of them together."""
        return self.q_norm.weight if self.q_norm else None

    @property
    def k_weight(self) -> torch.Tensor | None:
        """Likewise of keys."""
        return self.k_norm.weight if self.k_norm else None

    @property
    def eps(self) -> float:
        """The epsilon of both norms."""
        norm = self.q_norm or self.k_norm
        return norm.eps if norm else 0.0


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention over the paged cache, one way of it: see LayerAttention. Calling it is ForwardPass.attend. sinks:
    [num_heads] fp32, where there are some."""

    how: LayerAttention
    sinks: torch.Tensor | None = None

    def __call__(self, q: torch.Tensor, cache: LayerCache, step: ForwardPass) -> torch.Tensor:
        return step.attend(q, cache, self.how, self.sinks)


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """c * convolution(b * x) of rows in which b, c and x lie side by side, where each channel is convolved over the
    newest tokens of its sequence. What the tokens of a later step see of one is its row b * x: it lies in the cache
    where K and V would, K first, head by head, filled up with zeros. table: of no rotation."""

    ops: Ops
    weight: torch.Tensor  # [taps, width]: the last tap is the token's own
    bias: torch.Tensor | None  # [width]
    table: RotaryTable

    @property
    def taps(self) -> int:
        """Tokens that are seen, the own one among them."""
        return self.weight.shape[0]

    @property
    def width(self) -> int:
        """Channels."""
        return self.weight.shape[1]

    def __call__(self, projected: torch.Tensor, step: ForwardPass, caches: range) -> torch.Tensor:
        """projected [num_tokens, 3 * width] -> [num_tokens, width]. caches: the layers of the cache that hold inputs,
        as many as a row takes."""
        b, _, x = torch.chunk(projected, 3, dim=-1)
        inputs, size = b * x, 2 * step.row_values
        inputs = torch.nn.functional.pad(inputs, (0, len(caches) * size - self.width))
        for index, rows in zip(caches, torch.split(inputs, size, dim=1), strict=True):
            slots = step.batch.slot_mappings[step.group_of(index)]
            positions, table = step.batch.positions, self.table.cos_sin
            self.ops.rope_and_cache(rows.contiguous(), positions, table, slots, *step.caches[index])
        # behind what is written: several rows of a step that are sequences of their own here may be of one
        before = step.rows_before(caches, self.taps - 1, self.width)
        return self.ops.short_convolution(projected, self.weight, self.bias, before, step.batch.query_start)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """An MLP, or one expert of a mixture."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden] -> [rows, hidden]."""
        return self.down(self.gate_up(x))


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """An MLP of which each row takes the experts that the router chooses for it. correction: see Ops.route. shared: an
    expert of all rows; with a shared_gate, which gives one number for a row, times the sigmoid of that."""

    ops: Ops
    routing: ExpertRouting
    router: Linear
    experts: RoutedExperts
    correction: torch.Tensor | None = None
    shared: GatedMlp | None = None
    shared_gate: Linear | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden] -> [rows, hidden]."""
        chosen, weights = self.ops.route(self.router(x), self.routing, self.correction)
        total = self.experts(x, chosen, weights)
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                self.ops.gate(shared, self.shared_gate(x).expand_as(shared).contiguous())
            self.ops.add(shared, total)
        return total
