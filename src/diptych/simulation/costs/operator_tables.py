"""Cost model from measured operators: any model on a GPU whose kernels were measured one by one.

Owns the sum of operators (operators.py) over the layers of a model. The sum becomes the tables of one worker
(layer_tables.py), which price the steps; the host's part of a step is a constant. Must never be fitted to served runs.

A chunk after ``start`` tokens takes what one prompt with as many (query, key) pairs takes, because only prompts without
a prefix were measured. Norms, rotary positions, activations and the sampler were not measured: they follow the
roofline of the hardware entry. The gathering of logits over devices is left out.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

from diptych.control.errors import ConfigError
from diptych.control.step import chunk_attention
from diptych.simulation.costs.collectives import pipeline_hops
from diptych.simulation.costs.interpolation import Curve, Surface
from diptych.simulation.costs.layer_shapes import linear_shapes
from diptych.simulation.costs.layer_tables import LayerTableCost, LayerTables, TableInfo
from diptych.simulation.costs.operators import (
    US,
    AttentionHeads,
    OperatorTables,
    load_operator_tables,
    prompt_law,
    refined,
)
from diptych.simulation.costs.roofline import ACTIVATION_BYTES, KERNELS_PER_LAYER, SAMPLER_BYTES, elementwise_bytes
from diptych.simulation.hardware import Hardware
from diptych.simulation.models import ModelSpec, check_parallelism
from diptych.simulation.parallelism import ONE_DEVICE, Parallelism

STARTS = (0, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)  # knots of the tokens before a chunk
OVERHEAD_SOURCE = "step_overhead_s of the hardware entry"


def operator_table_cost(
    model: ModelSpec,
    hardware: Hardware,
    parallelism: Parallelism = ONE_DEVICE,
    *,
    weight_bits: int = 16,
    kv_bits: int = 16,
    step_overhead_s: float | None = None,
) -> LayerTableCost:
    """The cost model of the GPUs of a worker whose operators were measured.

    weight_bits: 16, or 8 (per-tensor fp8; not of experts) where the GPU has it. kv_bits: 16 or 8.
    step_overhead_s: the host's part of a step in place of the hardware entry's. Raises ConfigError for what was not
    measured: other GPUs, latent attention, numbers of devices without an all-reduce.
    """
    check_parallelism(model, parallelism)
    operators = load_operator_tables(hardware)
    tensor_parallel = parallelism.tensor
    if parallelism.data > 1 or parallelism.expert > 1:
        raise ConfigError(
            f"parallelism is {parallelism}; measured operators are of tensor-parallel devices and pipelines of them",
            param="expert_parallel" if parallelism.expert > 1 else "data_parallel",
        )
    _check_measured(operators, model, tensor_parallel, weight_bits, kv_bits)
    overhead = hardware.achieved.step_overhead_s if step_overhead_s is None else step_overhead_s
    tables = layer_tables(operators, model, tensor_parallel, weight_bits, kv_bits)
    hops = pipeline_hops(hardware, parallelism)
    knots, us = tables.tokens.knots, tables.tokens.values
    moved = [US * hops.seconds(knot * model.hidden * ACTIVATION_BYTES) for knot in knots]
    tables = replace(tables, tokens=Curve(knots, tuple(map(sum, zip(us, moved, strict=True)))))
    info = TableInfo(
        name=f"operators:{model.name}:{hardware.name}:{parallelism}:w{weight_bits}:kv{kv_bits}",
        hardware=hardware.name,
        model=model.name,
        tensor_parallel=tensor_parallel,
        engine=operators.engine,
        num_layers=model.layers,
        overhead_source=OVERHEAD_SOURCE if step_overhead_s is None else "given",
        skew_alpha=0.0,
        sources=operators.sources,
    )
    return LayerTableCost(info, replace(tables, overhead=Curve((1.0,), (US * overhead,))))


def _check_measured(
    operators: OperatorTables, model: ModelSpec, tensor_parallel: int, weight_bits: int, kv_bits: int
) -> None:
    """Raise ConfigError for what no table holds."""
    where = f"on {operators.hardware.name}"
    if model.mla is not None:
        raise ConfigError(f"{model.name} has latent attention, which was not measured {where}", param="model")
    if model.window is not None or model.linear is not None:
        part = "a window" if model.window else "linear attention"
        raise ConfigError(f"layers of {model.name} have {part}, which was not measured {where}", param="model")
    if weight_bits not in operators.linear:
        bits = ", ".join(map(str, sorted(operators.linear)))
        raise ConfigError(f"weight_bits is {weight_bits}; measured {where}: {bits}", param="weight_bits")
    known = {heads.kv_bits for heads in operators.decode_attention.surfaces}
    if kv_bits not in known:
        raise ConfigError(f"kv_bits is {kv_bits}; measured {where}: {sorted(known)}", param="kv_bits")
    if tensor_parallel > 1 and tensor_parallel not in operators.all_reduce:
        raise ConfigError(
            f"tensor_parallel is {tensor_parallel}; measured {where}: 1, "
            f"{', '.join(map(str, sorted(operators.all_reduce)))}",
            param="tensor_parallel",
        )


def layer_tables(
    operators: OperatorTables, model: ModelSpec, tensor_parallel: int, weight_bits: int, kv_bits: int
) -> LayerTables:
    """The operators of a model summed over its layers, without the host's part of a step."""
    heads = AttentionHeads(
        model.head_dim, kv_bits, model.heads // tensor_parallel, -(-model.kv_heads // tensor_parallel)
    )
    linear = operators.linear[weight_bits]
    measured = {knot for curve in linear.curves.values() for knot in curve.knots}
    if model.moe:
        measured |= set(operators.experts.curve(model, operators.hardware, tensor_parallel).knots)
    knots = sorted(measured)
    tokens = [_tokens_us(operators, model, tensor_parallel, weight_bits, int(knot)) for knot in knots]
    head, vocab = operators.linear[16], -(-model.vocab // tensor_parallel)
    batches = sorted({knot for curve in head.curves.values() for knot in curve.knots if knot <= 4096})
    sampler = US * SAMPLER_BYTES * model.vocab / _elementwise_rate(operators.hardware)
    sequences = [head.us(int(batch), vocab, model.hidden) + sampler * batch for batch in batches]
    return LayerTables(
        tokens=Curve(tuple(knots), tuple(tokens)),
        sequences=Curve(tuple(batches), tuple(sequences)),
        prefill_attention=chunked(operators.prefill_attention.surface(heads), prompt_law(operators.hardware, heads)),
        decode_attention=operators.decode_attention.surface(heads),
        mixed_attention=None,
        overhead=Curve((1.0,), (0.0,)),
    )


def _elementwise_rate(hardware: Hardware) -> float:
    return hardware.memory_bandwidth * hardware.achieved.elementwise_memory


def _tokens_us(
    operators: OperatorTables, model: ModelSpec, tensor_parallel: int, weight_bits: int, tokens: int
) -> float:
    """All that a step does with each of its tokens, but attention."""
    hardware, linear = operators.hardware, operators.linear[weight_bits]
    total = sum(
        shape.count * linear.us(tokens, shape.outputs, shape.inputs) for shape in linear_shapes(model, tensor_parallel)
    )
    outside = model  # the measured experts contain their activation
    if model.moe:
        curve = operators.experts.curve(model, hardware, tensor_parallel)
        total += model.num_moe_layers * curve(tokens)
        outside = replace(model, moe=replace(model.moe, experts_per_token=0))
    total += US * tokens * elementwise_bytes(outside, tensor_parallel) / _elementwise_rate(hardware)
    total += US * model.layers * KERNELS_PER_LAYER * hardware.achieved.elementwise_launch_s
    if tensor_parallel > 1:  # after attention, after the MLP, and once after the embedding
        total += (2 * model.layers + 1) * operators.all_reduce[tensor_parallel](tokens * model.hidden)
    return total


def chunked(prompts: Surface, law: Callable[[float], float]) -> Surface:
    """Microseconds by (chunk, tokens before it), from those by (batch, length) of prompts without a prefix and the law
    of their growth.

    A chunk takes what one prompt with as many (query, key) pairs takes (math.sqrt is exact by IEEE 754, so this is
    the same everywhere), but never less than without a prefix.
    """
    index = bisect_right(prompts.knots, 1.0) - 1
    alone = refined(prompts.rows[max(0, index)], law)
    longest = alone.knots[-1]
    most = chunk_attention(0, int(longest))
    rows = []
    for chunk in alone.knots:
        values: list[float] = []
        for start in STARTS:
            pairs = chunk_attention(start, int(chunk))
            length = math.sqrt(2 * pairs)
            time = alone(length) if length <= longest else alone.values[-1] * pairs / most
            values.append(max(time, alone(chunk), values[-1] if values else 0.0))
        rows.append(Curve(tuple(map(float, STARTS)), tuple(values)))
    return Surface(alone.knots, tuple(rows))
