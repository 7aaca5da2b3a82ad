"""Measured operators of one GPU, and the look-up of those that were not measured.

Owns the reading of catalogue/operators/ and its interpolation. Must never fill a table of one GPU with numbers of
another. Knows nothing of steps and layers (operator_tables.py).

A matrix product of unmeasured dimensions takes its roofline time (the hardware entry's law) times the ratio of measured
time to roofline at the four measured neighbours, weighted linearly; between measured token counts the time itself is
linear. Attention of heads that were not measured together is looked up with as many queries to a KV head, and the
batch scaled by the heads; between measured lengths of prompts it follows the roofline's shape. Experts of unmeasured
shape take the nearest shape's time, scaled by the rooflines of both.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import msgspec

from diptych.control.errors import ConfigError
from diptych.simulation.costs.interpolation import Curve, Surface
from diptych.simulation.costs.layer_tables import TableSource
from diptych.simulation.costs.roofline import ExpertOps
from diptych.simulation.hardware import Hardware
from diptych.simulation.models import ModelSpec, MoESpec
from diptych.simulation.packed_tables import packed_names, packed_table
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.weight_precision import MatrixFormat

US = 1e6


class LinearTable:
    """Matrix products [m, k] x [k, n] of one precision: microseconds by m, for each measured (n, k)."""

    def __init__(self, hardware: Hardware, weight_bits: int, curves: Mapping[tuple[int, int], Curve]) -> None:
        self.hardware = hardware
        self.weight_bits = weight_bits
        self.curves = curves
        self.ns = sorted({n for n, _ in curves})
        self.ks = sorted({k for _, k in curves})

    def us(self, m: int, n: int, k: int) -> float:
        """Microseconds of one product (n, k >= 1)."""
        measured = self.curves.get((n, k))
        if measured is not None:
            return measured(m)
        ratio = self._ratio(m, _neighbours(self.ns, n), _neighbours(self.ks, k))
        if ratio is None:  # a hole in the grid: the nearest along either dimension
            others_n = _neighbours([knot for knot in self.ns if knot != n], n)
            others_k = _neighbours([knot for knot in self.ks if knot != k], k)
            along = [self._ratio(m, others_n, ((k, 1.0),)), self._ratio(m, ((n, 1.0),), others_k)]
            known = [value for value in along if value is not None]
            ratio = sum(known) / len(known) if known else 1.0
        return ratio * self.roofline_us(m, n, k)

    def _ratio(
        self, m: int, n_knots: Iterable[tuple[int, float]], k_knots: Iterable[tuple[int, float]]
    ) -> float | None:
        """Weighted mean of measured time over roofline; None when none of these products was measured."""
        total = weights = 0.0
        for (n, n_weight), (k, k_weight) in product(n_knots, k_knots):
            curve = self.curves.get((n, k))
            if curve is not None:
                total += n_weight * k_weight * curve(m) / self.roofline_us(m, n, k)
                weights += n_weight * k_weight
        return total / weights if weights else None

    def roofline_us(self, m: int, n: int, k: int) -> float:
        """max(FLOP, bytes) + launch, with the shares of the hardware entry."""
        hardware, achieved = self.hardware, self.hardware.achieved
        low = self.weight_bits == 8
        flops = hardware.flops["fp8"] * achieved.fp8_compute if low else hardware.flops["bf16"] * achieved.gemm_compute
        item = self.weight_bits / 8
        memory = (item * (m + n) * k + 2 * m * n) / (hardware.memory_bandwidth * achieved.gemm_memory)
        launch = achieved.fp8_launch_s if low else achieved.gemm_launch_s
        return US * (max(2 * m * n * k / flops, memory) + launch)


def _neighbours(knots: Sequence[int], x: int) -> tuple[tuple[int, float], ...]:
    """The knots around ``x`` and their weights; the last or first one alone outside."""
    index = bisect_left(knots, x)
    if index == len(knots):
        return ((knots[-1], 1.0),)
    if index == 0 or knots[index] == x:
        return ((knots[index], 1.0),)
    low, high = knots[index - 1], knots[index]
    weight = (x - low) / (high - low)
    return (low, 1.0 - weight), (high, weight)


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """What attention of one layer on one device depends on besides the batch."""

    head_dim: int
    kv_bits: int
    heads: int
    kv_heads: int


@dataclass(frozen=True, slots=True)
class AttentionTable:
    """Microseconds of attention of one layer, by (batch, length), for each measured set of heads."""

    surfaces: Mapping[AttentionHeads, Surface]

    def surface(self, heads: AttentionHeads) -> Surface:
        """The surface of these heads: the measured one, or the nearest with batch and time scaled.

        Nearest: the same cache type, head dimension and queries for each KV head before the number of KV heads.
        """
        measured = self.surfaces.get(heads)
        if measured is not None:
            return measured
        nearest = min(self.surfaces, key=lambda other: _distance(heads, other))
        surface = self.surfaces[nearest]
        batch_scale = heads.kv_heads / nearest.kv_heads
        time_scale = heads.head_dim / nearest.head_dim
        if heads.heads * nearest.kv_heads > nearest.heads * heads.kv_heads:  # more queries a KV head than measured
            time_scale *= heads.heads * nearest.kv_heads / (nearest.heads * heads.kv_heads)
        knots = tuple(knot / batch_scale for knot in surface.knots)
        rows = tuple(Curve(row.knots, tuple(time_scale * value for value in row.values)) for row in surface.rows)
        return Surface(knots, rows)


def _distance(wanted: AttentionHeads, other: AttentionHeads) -> tuple[float, ...]:
    return (
        wanted.kv_bits != other.kv_bits,
        _ratio(wanted.head_dim, other.head_dim),
        _ratio(wanted.heads * other.kv_heads, other.heads * wanted.kv_heads),
        _ratio(wanted.kv_heads, other.kv_heads),
        -other.heads,
    )


def _ratio(a: int, b: int) -> float:
    return a / b if a > b else b / a


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """Microseconds of the experts of one layer by tokens, for each measured (experts, hidden size, devices)."""

    curves: Mapping[tuple[MoESpec, int, int], Curve]  # MoESpec without shared experts and dense layers

    def curve(self, model: ModelSpec, hardware: Hardware, tensor_parallel: int) -> Curve:
        """The measured curve, or that of the nearest shape times the ratio of both rooflines.

        Raises ConfigError when nothing was measured for so many devices.
        """
        assert model.moe is not None
        wanted = replace(model.moe, shared=0, dense_layers=0)
        known = self.curves.get((wanted, model.hidden, tensor_parallel))
        if known is not None:
            return known
        same = [key for key in self.curves if key[2] == tensor_parallel]
        if not same:
            raise ConfigError(
                f"tensor_parallel is {tensor_parallel}; no experts were measured on so many {hardware.name}",
                param="tensor_parallel",
            )
        nearest = min(same, key=lambda key: _shape_distance(wanted, model.hidden, key[0], key[1]))
        curve = self.curves[nearest]
        like = replace(model, moe=nearest[0], hidden=nearest[1])
        values = tuple(
            value * _expert_us(model, hardware, tensor_parallel, tokens) / _expert_us(like, hardware, tensor_parallel,
                                                                                     tokens)
            for tokens, value in zip(curve.knots, curve.values, strict=True)
        )  # fmt: skip
        return Curve(curve.knots, values)


def _shape_distance(wanted: MoESpec, hidden: int, other: MoESpec, other_hidden: int) -> float:
    """Product of the ratios of all dimensions, above 1."""
    return (
        _ratio(wanted.experts, other.experts)
        * _ratio(wanted.experts_per_token, other.experts_per_token)
        * _ratio(wanted.intermediate, other.intermediate)
        * _ratio(hidden, other_hidden)
    )


def _expert_us(model: ModelSpec, hardware: Hardware, tensor_parallel: int, tokens: float) -> float:
    """Roofline of the experts of a layer (only ratios of it are used)."""
    ops = ExpertOps.of(model, hardware, Parallelism(tensor_parallel), MatrixFormat())
    assert ops is not None
    return ops.total_ns(int(tokens)) / model.num_moe_layers


@dataclass(frozen=True, slots=True)
class OperatorTables:
    """Everything that was measured on one GPU. all_reduce: microseconds by 16-bit values, for each number of
    devices. linear: by bits of the weights."""

    hardware: Hardware
    engine: str
    sources: tuple[TableSource, ...]
    linear: Mapping[int, LinearTable]
    prefill_attention: AttentionTable
    decode_attention: AttentionTable
    experts: ExpertTable
    all_reduce: Mapping[int, Curve]


def refined(curve: Curve, law: Callable[[float], float]) -> Curve:
    """The curve with three more knots in each interval, where the ratio of time to ``law`` is linear.

    For prompts, whose attention grows with the square of their length: a straight line over an octave is 12 % too high.
    """
    knots: list[float] = []
    values: list[float] = []
    for (left, low), (right, high) in pairwise(zip(curve.knots, curve.values, strict=True)):
        low_ratio, high_ratio = low / law(left), high / law(right)
        for quarter in range(4):
            x = left + (right - left) * quarter / 4
            knots.append(x)
            values.append(low if quarter == 0 else law(x) * (low_ratio + (high_ratio - low_ratio) * quarter / 4))
    return Curve((*knots, curve.knots[-1]), (*values, curve.values[-1]))


def prompt_law(hardware: Hardware, heads: AttentionHeads, batch: float = 1.0) -> Callable[[float], float]:
    """Roofline microseconds of one layer's attention over ``batch`` prompts without a prefix, by their length."""
    achieved = hardware.achieved
    pair = 2 * heads.head_dim * heads.heads / (hardware.flops["bf16"] * achieved.attention_compute)  # 4 FLOP, half
    item = 2 * 2 * heads.head_dim * (heads.heads + heads.kv_heads)
    token = item / (hardware.memory_bandwidth * achieved.attention_io)
    return lambda length: US * (achieved.attention_launch_s + batch * length * (token + pair * length))


def operator_table_names() -> tuple[str, ...]:
    """Names (of the hardware catalogue) of the GPUs whose operators are shipped, in order."""
    return packed_names("operators")


def load_operator_tables(hardware: Hardware) -> OperatorTables:
    """The operators of a GPU. Raises ConfigError for one that is not in ``operator_table_names()``."""
    names = operator_table_names()
    if hardware.name not in names:
        raise ConfigError(
            f"hardware is {hardware.name!r}; operators were measured on {', '.join(names)}", param="hardware"
        )
    data = operator_data(hardware.name)
    return OperatorTables(
        hardware=hardware,
        engine=data["engine"],
        sources=msgspec.convert(data["sources"], tuple[TableSource, ...]),
        linear={
            int(bits): LinearTable(hardware, int(bits), {(row["n"], row["k"]): curve_of(row) for row in rows})
            for bits, rows in data["gemm"].items()
            if rows
        },
        prefill_attention=_attention(data["prefill_attention"]),
        decode_attention=_attention(data["decode_attention"]),
        experts=ExpertTable({_expert_key(row): curve_of(row) for row in data["experts"]}),
        all_reduce={row["devices"]: curve_of(row) for row in reversed(data["all_reduce"])},  # vLLM's kernel wins
    )


def operator_data(name: str) -> dict[str, Any]:
    """The shipped file of a GPU as plain data (what scripts/derive_operator_tables.py writes)."""
    return packed_table("operators", name)


def curve_of(row: Mapping[str, Any]) -> Curve:
    """A curve of plain data."""
    return Curve(tuple(map(float, row["knots"])), tuple(row["us"]))


def _attention(entries: Sequence[Mapping[str, Any]]) -> AttentionTable:
    surfaces = {}
    for entry in entries:
        heads = AttentionHeads(entry["head_dim"], entry["kv_bits"], entry["heads"], entry["kv_heads"])
        rows = entry["rows"]
        surfaces[heads] = Surface(tuple(float(row["batch"]) for row in rows), tuple(curve_of(row) for row in rows))
    return AttentionTable(surfaces)


def _expert_key(row: Mapping[str, Any]) -> tuple[MoESpec, int, int]:
    moe = MoESpec(row["experts"], row["experts_per_token"], row["intermediate"])
    return moe, row["hidden"], row["tensor_parallel"]
