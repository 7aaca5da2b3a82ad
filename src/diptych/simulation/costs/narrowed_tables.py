"""Measured layers with fewer bits than they were measured with.

Layer tables hold 16 bits. With fewer, each measured time is multiplied with what a general cost model says of the
change: the operators of the device where they were measured one by one, else the roofline. Neither is ever slower with
fewer bits, so the scaled layers are not; the output layer, which keeps 16 bits on GPUs, stays as measured.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

from diptych.control.errors import ConfigError
from diptych.simulation.costs.interpolation import Curve, Grid, Surface
from diptych.simulation.costs.layer_tables import LayerTableCost
from diptych.simulation.costs.operator_tables import layer_tables
from diptych.simulation.costs.operators import load_operator_tables
from diptych.simulation.costs.roofline import RooflineCost, attention_op
from diptych.simulation.hardware import Hardware
from diptych.simulation.models import ModelSpec
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.weight_precision import GPU_WEIGHTS, WeightPrecision

OCTAVES_BEYOND = 6  # from the 2,048 tokens of most tables to 131,072


@dataclass(frozen=True, slots=True)
class Narrowing:
    """Time with fewer bits over time with 16, at most 1. source: the cost model that says so. tokens: of all dense
    operators, by tokens of the step. decode: of decode attention, by (sequences, context of each)."""

    source: str
    tokens: Callable[[float], float]
    decode: Callable[[float, float], float]


def narrowed(
    table: LayerTableCost,
    model: ModelSpec,
    hardware: Hardware,
    parallelism: Parallelism,
    weights: WeightPrecision,
    kv_bits: int,
) -> LayerTableCost:
    """The layers of a table of 16 bits with these weights and bits of KV."""
    change = _by_operators(model, hardware, parallelism, weights, kv_bits)
    change = change or _by_roofline(model, hardware, parallelism, weights, kv_bits)
    tables = table.tables
    scaled = replace(
        tables,
        tokens=_scaled(tables.tokens, change.tokens).rising(),
        shared=None if tables.shared is None else _scaled(tables.shared, change.tokens).rising(),
        decode_attention=_scaled_rows(tables.decode_attention, change.decode).rising(),
        mixed_attention=None if tables.mixed_attention is None else _scaled_grid(table, change.decode).rising(),
    )
    info = replace(
        table.info,
        name=f"{table.name}:{weights.name}:kv{kv_bits}",
        assumptions=(
            *table.info.assumptions,
            f"layers measured with 16 bits are scaled to weights of {weights.name} and KV of {kv_bits} bits by the "
            f"{change.source}",
        ),
    )
    return LayerTableCost(info, scaled)


def _by_operators(
    model: ModelSpec, hardware: Hardware, parallelism: Parallelism, weights: WeightPrecision, kv_bits: int
) -> Narrowing | None:
    """None where no operators were measured with such weights on the device."""
    if weights != GPU_WEIGHTS.get(weights.bits):
        return None
    try:
        operators = load_operator_tables(hardware)
        narrow, wide = (
            layer_tables(operators, model, parallelism, *bits) for bits in ((weights.bits, kv_bits), (16, 16))
        )
    except ConfigError:
        return None
    return Narrowing(
        "measured operators",
        lambda tokens: min(1.0, narrow.tokens(tokens) / wide.tokens(tokens)),
        lambda seqs, context: min(1.0, narrow.decode_attention(seqs, context) / wide.decode_attention(seqs, context)),
    )


def _by_roofline(
    model: ModelSpec, hardware: Hardware, parallelism: Parallelism, weights: WeightPrecision, kv_bits: int
) -> Narrowing:
    narrow, wide = (
        RooflineCost(model, hardware, parallelism, weights=entry, step_overhead_s=0.0)
        for entry in (weights, GPU_WEIGHTS[16])
    )
    few, many = (attention_op(model, hardware, parallelism.tensor, bits, 1) for bits in (kv_bits, 16))

    def tokens(num_tokens: float) -> float:
        count = int(num_tokens)
        mine = -(-count // parallelism.data)
        return min(1.0, narrow.tokens_ns(mine, count) / wide.tokens_ns(mine, count))

    def decode(seqs: float, context: float) -> float:
        times = [op.launch_ns + op.decode_ns(seqs, seqs * context) for op in (few, many)]
        return min(1.0, times[0] / times[1])

    return Narrowing("roofline", tokens, decode)


def _scaled(curve: Curve, ratio: Callable[[float], float]) -> Curve:
    """The curve with knots beyond the last one, so that the ratio holds there too."""
    knots = (*curve.knots, *(curve.knots[-1] * 2**octave for octave in range(1, OCTAVES_BEYOND + 1)))
    return Curve(knots, tuple(ratio(knot) * curve(knot) for knot in knots))


def _scaled_rows(surface: Surface, ratio: Callable[[float, float], float]) -> Surface:
    rows = [
        Curve(row.knots, tuple(ratio(x, y) * us for y, us in zip(row.knots, row.values, strict=True)))
        for x, row in zip(surface.knots, surface.rows, strict=True)
    ]
    return Surface(surface.knots, tuple(rows))


def _scaled_grid(table: LayerTableCost, ratio: Callable[[float, float], float]) -> Grid:
    """Mixed steps: as much less as the sum of prefill and decode alone."""
    tables, mixed = table.tables, table.tables.mixed_attention
    assert mixed is not None
    prefills = [tables.prefill_attention(*point) for point in product(*mixed.axes[:2])]
    decodes = [(tables.decode_attention(*point), ratio(*point)) for point in product(*mixed.axes[2:])]
    factors = [
        (prefill + share * decode) / (prefill + decode) for prefill, (decode, share) in product(prefills, decodes)
    ]
    return Grid(mixed.axes, tuple(factor * us for factor, us in zip(factors, mixed.values, strict=True)))
