"""The matrix products of a model's layers on one device, which every cost model that adds up operators prices.

Tensor parallelism cuts heads and widths: a width that the devices do not divide is rounded up, as engines pad it.
"""

from dataclasses import dataclass

from diptych.control import expert_law
from diptych.simulation.models import ModelSpec, MoESpec
from diptych.simulation.parallelism import Parallelism

# The busiest of several groups of experts computes this factor times its share of the visits. Measured where popularity
# falls as rank ** -1.01 (aiconfigurator's MoE tables, 16,384 tokens, 8 groups, beside even popularity): H100 1.17,
# B200 1.41, L40S 1.0.
EXPERT_IMBALANCE = 1.2


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """``count`` products a step of [tokens, inputs] by [inputs, outputs]. is_router: kept in 16 bits."""

    count: int
    inputs: int
    outputs: int
    is_router: bool = False


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The routed experts of one layer as one device sees them: the share of its group, cut to ``width``."""

    count: int
    experts: int
    inputs: int
    width: int


def linear_shapes(model: ModelSpec, tensor_parallel: int) -> tuple[MatrixShape, ...]:
    """The dense products of all layers: around the attention, the MLPs, shared experts and routers."""
    count = model.attention_layers
    shapes = [MatrixShape(count, inputs, outputs) for inputs, outputs in _attention(model, tensor_parallel)]
    shapes += _linear_attention(model, tensor_parallel)
    widths = [(model.layers - model.num_moe_layers, model.intermediate)]
    if model.moe:
        shapes.append(MatrixShape(model.num_moe_layers, model.hidden, model.moe.experts, is_router=True))
        widths.append((model.num_moe_layers, model.moe.shared * model.moe.intermediate))
    for count, width in widths:
        if count and width:
            part = -(-width // tensor_parallel)
            shapes.append(MatrixShape(count, model.hidden, (2 if model.gated_mlp else 1) * part))
            shapes.append(MatrixShape(count, part, model.hidden))
    return tuple(shapes)


def _attention(model: ModelSpec, tensor_parallel: int) -> list[tuple[int, int]]:
    """(inputs, outputs) around the attention of one layer. KV heads are copied where there are fewer than devices; the
    down-projections to the latent of MLA are not cut (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    hidden, heads = model.hidden, model.heads // tensor_parallel
    if model.mla is None:
        queries = heads * model.head_dim
        kv = 2 * -(-model.kv_heads // tensor_parallel) * model.head_dim
        return [(hidden, (2 if model.gated_attention else 1) * queries + kv), (queries, hidden)]
    mla = model.mla
    return [
        (hidden, mla.q_rank + model.kv_width),
        (mla.q_rank or hidden, heads * (mla.nope_dim + mla.rope_dim)),
        (mla.kv_rank, heads * (mla.nope_dim + mla.value_dim)),
        (heads * mla.value_dim, hidden),
    ]


def _linear_attention(model: ModelSpec, tensor_parallel: int) -> list[MatrixShape]:
    """The products around the recurrence, whose heads are dealt out to the devices."""
    if model.linear is None:
        return []
    *inwards, (hidden, width) = model.linear.shapes(model.hidden)
    shapes = [MatrixShape(model.linear.layers, inputs, -(-outputs // tensor_parallel)) for outputs, inputs in inwards]
    return [*shapes, MatrixShape(model.linear.layers, -(-width // tensor_parallel), hidden)]


def expert_shape(model: ModelSpec, parallelism: Parallelism) -> ExpertShape | None:
    """None without experts."""
    if model.moe is None:
        return None
    inside = parallelism.stage_devices // parallelism.expert
    experts = -(-model.moe.experts // parallelism.expert)
    return ExpertShape(model.num_moe_layers, experts, model.hidden, -(-model.moe.intermediate // inside))


def touched_share(moe: MoESpec, num_tokens: int) -> float:
    """Expected share of the experts that at least one of ``num_tokens`` tokens visits, each choosing at random: 1 - (1
    - k/E)^n."""
    return expert_law.touched_share(moe.experts, moe.experts_per_token, num_tokens)
