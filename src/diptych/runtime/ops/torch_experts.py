"""Routed experts in plain torch, over linear layers of any kind: the reference of the native kernels, and what computes
where there are none.

A row's result does not depend on the other rows, bitwise, where that is so of the linear layers: everything else here
is computed element by element, or for each row in an order of its own. Functions whose vectors and single elements may
differ in the last bit (exp, and what uses it) are taken of whole rows only, by softmax.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diptych.runtime.models.experts import ClampedSwish, ExpertRouting
from diptych.runtime.ops.ops import Expert, Linear

SMALLEST_SUM = 1e-20  # of sigmoids: with this added, rows of zeros stay zeros


def route(
    logits: torch.Tensor, routing: ExpertRouting, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts: the contract is Ops.route."""
    wide = logits.float()
    if routing.scoring == "sparsemixer":
        chosen, weights = _sparsemixer(wide, routing.jitter)
    else:
        scores = {"softmax": _softmax, "sigmoid": _sigmoid, "softmax_of_top": _as_they_are}[routing.scoring](wide)
        chosen = _largest(scores if correction is None else scores + correction, routing.top_k)
        weights = scores.gather(-1, chosen)
    chosen, order = chosen.sort(dim=-1)
    weights = weights.gather(-1, order)
    if routing.scoring == "softmax_of_top":
        weights = _softmax(weights)
    if routing.is_normalized:
        total = weights[:, :1].clone()
        for index in range(1, routing.top_k):  # in one order, whatever the number of rows
            total += weights[:, index : index + 1]
        weights = weights / (total + SMALLEST_SUM if routing.scoring == "sigmoid" else total)
    return chosen, weights if routing.scale == 1.0 else weights * routing.scale


@dataclass(frozen=True, slots=True)
class TorchExperts:
    """RoutedExperts that computes each expert once, for all of its rows, one after the other."""

    experts: Sequence[Expert]

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        flat = chosen.flatten()
        pairs = flat.argsort(stable=True)  # of a row and an expert, those of one expert side by side
        rows, factors = pairs // chosen.shape[1], weights.flatten()[pairs].unsqueeze(1)
        start = 0
        counts = torch.bincount(flat, minlength=len(self.experts)).tolist()
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                mine = rows[start : start + count]  # no row is there twice
                total[mine] += expert.down(expert.gate_up(x[mine])).float() * factors[start : start + count]
            start += count
        return total.to(x.dtype)


@dataclass(frozen=True, slots=True)
class WideLinear:
    """A linear layer in fp32 for rows of any dtype."""

    linear: Linear

    @property
    def in_features(self) -> int:
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        return self.linear.out_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.float())


def clamped_swish(gate_up: torch.Tensor, how: ClampedSwish) -> torch.Tensor:
    """gate_up [rows, 2 * dim], gates first -> [rows, dim]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=how.limit), up.clamp(-how.limit, how.limit)
    return ((up + 1.0) * (gate * _sigmoid(gate * how.alpha))).to(gate_up.dtype)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((x, torch.zeros_like(x)), dim=-1).softmax(-1)[..., 0]


def _as_they_are(x: torch.Tensor) -> torch.Tensor:
    return x


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The columns of the largest scores of each row, of equal ones the first. (topk does not say which it takes.)"""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _sparsemixer(logits: torch.Tensor, jitter: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The best two experts. Each one's weight is that of a softmax of which those experts are left out that are worse
    than it by more than 2 * jitter of the larger magnitude; of the second's, the first is left out, too."""
    chosen = _largest(logits, 2)
    weights, rest = [], logits
    for place in range(2):
        mine = chosen[:, place : place + 1]
        best = logits.gather(-1, mine)
        is_worse = (best - logits) / logits.abs().maximum(best) > 2 * jitter
        weights.append(_softmax(rest.masked_fill(is_worse, -torch.inf)).gather(-1, mine))
        rest = rest.scatter(-1, mine, -torch.inf)
    return chosen, torch.cat(weights, dim=-1)
