"""Cost model from measured operators: any model on a GPU whose kernels were measured one by one.

Owns the sum of operators (operators.py) over the layers of a model. The sum becomes the tables of one worker
(layer_tables.py), which price the steps; the host's part of a step is a constant. Must never be fitted to served runs.

A chunk after ``start`` tokens takes what one prompt with as many (query, key) pairs takes, because only prompts without
a prefix were measured. Norms, rotary positions, activations and the sampler were not measured: they follow the
roofline of the hardware entry. The gathering of logits over devices is left out.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce

from diptych.control.errors import ConfigError
from diptych.control.step import chunk_attention
from diptych.simulation.costs.assumptions import assumptions_of
from diptych.simulation.costs.bounded_attention import AttentionOp
from diptych.simulation.costs.collectives import num_hosts, pipeline_hops
from diptych.simulation.costs.interpolation import Curve, Surface, lower_of, rising_values
from diptych.simulation.costs.layer_shapes import linear_shapes
from diptych.simulation.costs.layer_tables import LayerTableCost, LayerTables, TableInfo
from diptych.simulation.costs.operators import (
    US,
    AttentionHeads,
    AttentionTable,
    OperatorTables,
    load_operator_tables,
    prompt_law,
    refined,
)
from diptych.simulation.costs.roofline import (
    ACTIVATION_BYTES,
    KERNELS_PER_LAYER,
    SAMPLER_BYTES,
    attention_op,
    elementwise_bytes,
    expert_exchange,
    num_sums,
)
from diptych.simulation.hardware import Hardware
from diptych.simulation.models import ModelSpec, check_parallelism
from diptych.simulation.parallelism import ONE_DEVICE, Parallelism
from diptych.simulation.weight_precision import GPU_WEIGHTS

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
    """The cost model of a worker whose GPUs' operators were measured.

    weight_bits: 16, 8 or 4; see operators.py for what was not measured with them. kv_bits: 16 or 8. step_overhead_s:
    the host's part of a step in place of the hardware entry's. Raises ConfigError for what was not measured: other
    GPUs, latent attention, numbers of devices without an all-reduce.
    """
    check_parallelism(model, parallelism)
    operators = load_operator_tables(hardware)
    _check_measured(operators, model, parallelism)
    overhead = hardware.achieved.step_overhead_s if step_overhead_s is None else step_overhead_s
    tables = layer_tables(operators, model, parallelism, weight_bits, kv_bits)
    info = TableInfo(
        name=f"operators:{model.name}:{hardware.name}:{parallelism}:w{weight_bits}:kv{kv_bits}",
        hardware=hardware.name,
        model=model.name,
        tensor_parallel=parallelism.tensor,
        engine=operators.engine,
        num_layers=model.layers,
        overhead_source=OVERHEAD_SOURCE if step_overhead_s is None else "given",
        skew_alpha=0.0,
        sources=operators.sources,
        assumptions=_assumptions(operators, model, parallelism, weight_bits, kv_bits),
    )
    return LayerTableCost(info, replace(tables, overhead=Curve((1.0,), (US * overhead,))).rising())


def _check_measured(operators: OperatorTables, model: ModelSpec, parallelism: Parallelism) -> None:
    """Raise ConfigError for what no table holds."""
    where = f"on {operators.hardware.name}"
    if model.mla is not None:
        raise ConfigError(f"{model.name} has latent attention, which was not measured {where}", param="model")
    if model.window is not None or model.linear is not None:
        part = "a window" if model.window else "linear attention"
        raise ConfigError(f"layers of {model.name} have {part}, which was not measured {where}", param="model")
    inside = -(-parallelism.tensor // num_hosts(operators.hardware, parallelism.tensor))
    if inside > 1 and inside not in operators.all_reduce:
        raise ConfigError(
            f"tensor_parallel is {parallelism.tensor}; measured {where}: 1, "
            f"{', '.join(map(str, sorted(operators.all_reduce)))}",
            param="tensor_parallel",
        )


def _assumptions(
    operators: OperatorTables, model: ModelSpec, parallelism: Parallelism, weight_bits: int, kv_bits: int
) -> tuple[str, ...]:
    experts = model.moe is not None and operators.experts.is_measured(model, parallelism, weight_bits)
    weights = GPU_WEIGHTS[weight_bits]
    found = [*assumptions_of(operators.hardware, parallelism, weights, measured_experts=True)]
    if weight_bits not in operators.linear:
        more = 8 if weight_bits == 4 and 8 in operators.linear else 16
        found.append(f"matrix products of {weight_bits} bits take those of {more} bits, scaled by the roofline")
    if model.moe and not experts:
        bits = weight_bits
        while bits not in operators.experts.curves:
            bits *= 2
        what = "the nearest measured shape" if bits == weight_bits else f"those measured with {bits} bits"
        found.append(f"experts of {weight_bits} bits take {what}, scaled by the roofline")
    if not operators.decode_attention.has_bits(kv_bits):
        found.append(f"attention over KV of {kv_bits} bits takes that over 16 bits, scaled by the roofline")
    return tuple(found)


def layer_tables(
    operators: OperatorTables, model: ModelSpec, parallelism: Parallelism, weight_bits: int, kv_bits: int
) -> LayerTables:
    """The operators of a model summed over its layers, without the host's part of a step."""
    tensor = parallelism.tensor
    tokens, shared = _token_curves(operators, model, parallelism, weight_bits)
    head, vocab = operators.linear[16], -(-model.vocab // tensor)
    batches = sorted({knot for curve in head.curves.values() for knot in curve.knots if knot <= 4096})
    sampler = US * SAMPLER_BYTES * model.vocab / _elementwise_rate(operators.hardware)
    sequences = [head.us(int(batch), vocab, model.hidden) + sampler * batch for batch in batches]
    return LayerTables(
        tokens=tokens,
        sequences=Curve(tuple(batches), tuple(sequences)),
        prefill_attention=_prefill_surface(operators, model, tensor, kv_bits),
        decode_attention=_decode_surface(operators, model, tensor, kv_bits),
        mixed_attention=None,
        overhead=Curve((1.0,), (0.0,)),
        groups=parallelism.data,
        shared=shared,
    )


def _prefill_surface(operators: OperatorTables, model: ModelSpec, tensor_parallel: int, kv_bits: int) -> Surface:
    """Prefill times by (chunk, tokens before it). With fewer bits of KV than 16: what was measured with them, but never
    longer than with 16 bits, nor shorter than a launch with 16 bits."""
    table = operators.prefill_attention

    def surface(bits: int) -> Surface:
        heads = _heads(model, tensor_parallel, bits)
        return chunked(_attention(table, heads), prompt_law(operators.hardware, heads[0])).rising()

    wide = surface(16)
    if kv_bits == 16 or not table.has_bits(kv_bits):
        return wide
    return lower_of(wide, surface(kv_bits)).at_least(wide(0, 0))


def _decode_surface(operators: OperatorTables, model: ModelSpec, tensor_parallel: int, kv_bits: int) -> Surface:
    """Decode times by (batch, context of each). With fewer bits of KV than 16: what was measured with them, but never
    longer than with 16 bits; where nothing was, the time with 16 bits, scaled by the rooflines of both."""
    table = operators.decode_attention
    wide = _attention(table, _heads(model, tensor_parallel, 16))
    if kv_bits == 16:
        return wide
    if table.has_bits(kv_bits):
        return lower_of(wide, _attention(table, _heads(model, tensor_parallel, kv_bits)))
    ratio = _kv_ratio(operators, model, tensor_parallel, kv_bits)
    rows = [
        Curve(row.knots, tuple(us * ratio(batch, knot) for knot, us in zip(row.knots, row.values, strict=True)))
        for batch, row in zip(wide.knots, wide.rows, strict=True)
    ]
    return Surface(wide.knots, tuple(rows))


def _heads(model: ModelSpec, tensor_parallel: int, kv_bits: int) -> list[AttentionHeads]:
    """The heads of one device; where it has the copy of a KV head, also with twice, four times ... as many of that
    head's queries."""
    heads, kv_heads = model.heads // tensor_parallel, -(-model.kv_heads // tensor_parallel)
    most = kv_heads * model.heads // model.kv_heads
    found = [AttentionHeads(model.head_dim, kv_bits, heads, kv_heads)]
    while 2 * found[-1].heads <= most:
        found.append(replace(found[-1], heads=2 * found[-1].heads))
    return found


def _attention(table: AttentionTable, heads: Sequence[AttentionHeads]) -> Surface:
    """The fastest of these: a device never takes longer for a part of the queries of a KV head than for all of them."""
    return reduce(lower_of, [table.surface(entry) for entry in heads])


def _kv_ratio(
    operators: OperatorTables, model: ModelSpec, tensor_parallel: int, kv_bits: int
) -> Callable[[float, float], float]:
    """Roofline of decode attention with ``kv_bits`` bits of KV over that with 16, by (batch, context of each)."""
    narrow, wide = (
        attention_op(model, operators.hardware, tensor_parallel, bits, model.layers) for bits in (kv_bits, 16)
    )

    def ns(op: AttentionOp, batch: float, context: float) -> float:
        return op.launch_ns + op.decode_ns(batch, batch * context)

    return lambda batch, context: ns(narrow, batch, context) / ns(wide, batch, context)


def _token_curves(
    operators: OperatorTables, model: ModelSpec, parallelism: Parallelism, weight_bits: int
) -> tuple[Curve, Curve | None]:
    """All that a step does with each token but attention: what one group does, by its tokens, and what all groups do
    together, by theirs (None: there is one group, and the first curve holds all).

    Measured parts are made rising one by one, so that the parts of two splits differ by what the split changes.
    """
    knots = _token_knots(operators, model)
    times = [rising_values(list(_products_us(operators, model, parallelism.tensor, weight_bits, knots)))]
    times.append(tuple(_messages_us(operators, model, parallelism, knots)))
    if model.moe is None:
        return _sum(knots, times), None
    experts = operators.experts.curve(model, parallelism, weight_bits)
    visits = rising_values([model.num_moe_layers * experts(knot) for knot in knots])
    if parallelism.data == 1:
        return _sum(knots, [*times, visits]), None
    return _sum(knots, times), Curve(knots, visits)


def _elementwise_rate(hardware: Hardware) -> float:
    """Bytes a second that elementwise kernels reach."""
    return hardware.memory_bandwidth * hardware.achieved.elementwise_memory


def _sum(knots: tuple[float, ...], parts: Sequence[Sequence[float]]) -> Curve:
    return Curve(knots, tuple(map(sum, zip(*parts, strict=True))))


def _token_knots(operators: OperatorTables, model: ModelSpec) -> tuple[float, ...]:
    """Token counts that any product was measured at, and some beyond: the same for all bits, so that fewer are never
    slower between two knots either."""
    curves = [curve for table in operators.linear.values() for curve in table.curves.values()]
    if model.moe:
        curves += [curve for table in operators.experts.curves.values() for curve in table.values()]
    knots = {knot for curve in curves for knot in curve.knots}
    return tuple(sorted(knots | {max(knots) * factor for factor in (2, 4, 8)}))


def _products_us(
    operators: OperatorTables, model: ModelSpec, tensor_parallel: int, weight_bits: int, knots: Sequence[float]
) -> Iterator[float]:
    """The matrix products of all layers but the experts', by the tokens of a group."""
    shapes = linear_shapes(model, tensor_parallel)
    for knot in knots:
        yield sum(
            shape.count * operators.linear_us(16 if shape.is_router else weight_bits, int(knot), shape)
            for shape in shapes
        )


def _messages_us(
    operators: OperatorTables, model: ModelSpec, parallelism: Parallelism, knots: Sequence[float]
) -> Iterator[float]:
    """What devices send to each other, and the elementwise kernels, by the tokens of a group."""
    hardware, tensor = operators.hardware, parallelism.tensor
    # The measured experts contain their activation.
    outside = replace(model, moe=replace(model.moe, experts_per_token=0)) if model.moe else model
    token_us = US * elementwise_bytes(outside, tensor) / _elementwise_rate(hardware)
    launches = US * model.layers * KERNELS_PER_LAYER * hardware.achieved.elementwise_launch_s
    sent = pipeline_hops(hardware, parallelism).times(1, ACTIVATION_BYTES * model.hidden)
    sent += expert_exchange(model, hardware, parallelism)
    sums = num_sums(model, parallelism) + 1  # once after the embedding, too
    summed = [operators.all_reduce_us(tensor, knot * model.hidden) if tensor > 1 else 0.0 for knot in knots]
    for knot, us in zip(knots, rising_values(summed), strict=True):
        yield launches + token_us * knot + US * sent.seconds(knot) + sums * us


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
