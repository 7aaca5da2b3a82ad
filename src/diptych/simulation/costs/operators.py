"""Measured operators of one GPU, and the look-up of those that were not measured.

Reads catalogue/operators/ and interpolates; a table of one GPU is never filled with numbers of another. Steps and
layers are the business of operator_tables.py.

A matrix product of unmeasured dimensions takes its roofline time (the hardware entry's law) times the ratio of measured
time to roofline at the four measured neighbours, weighted linearly; between measured token counts the time itself is
linear. Attention of heads that were not measured together is looked up with as many queries to a KV head, and the
batch scaled by the heads; between measured lengths of prompts it follows the roofline's shape. Experts of unmeasured
shape take the nearest shape's time, scaled by the rooflines of both.

Fewer bits than 16 take what was measured with them, but never longer than the same with more bits (engines have
kernels that widen the weights to 16 bits as they read them); what was not measured with them takes the time of the next
more bits, scaled by the rooflines of both.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import msgspec

from diptych.control.errors import ConfigError
from diptych.simulation.costs.collectives import between_hosts, num_hosts
from diptych.simulation.costs.interpolation import Curve, Surface
from diptych.simulation.costs.layer_shapes import MatrixShape
from diptych.simulation.costs.layer_tables import NS_PER_US, TableSource
from diptych.simulation.costs.roofline import ACTIVATION_BYTES, ExpertOps, kernel_of, linear_op
from diptych.simulation.hardware import Hardware, load_hardware
from diptych.simulation.models import ModelSpec, MoESpec
from diptych.simulation.packed_tables import packed_names, packed_table
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.weight_precision import GPU_WEIGHTS

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
        """The law of the hardware entry, in the arithmetic that was measured."""
        weights = GPU_WEIGHTS[self.weight_bits].layers
        return kernel_of(self.hardware, MatrixShape(1, k, n), weights, weights.peak(self.hardware)).ns(m) / NS_PER_US


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

    def has_bits(self, kv_bits: int) -> bool:
        """Whether anything was measured with ``kv_bits`` bits of KV."""
        return any(heads.kv_bits == kv_bits for heads in self.surfaces)

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
class ExpertKey:
    """What the routed experts of a layer were measured with: ``inside`` devices cut the width of each, ``groups`` of
    them have experts of their own. moe: without shared experts and dense layers."""

    moe: MoESpec
    hidden: int
    inside: int
    groups: int

    @classmethod
    def of(cls, model: ModelSpec, parallelism: Parallelism) -> "ExpertKey":
        """The key of a model with experts."""
        assert model.moe is not None
        moe = replace(model.moe, shared=0, dense_layers=0)
        return cls(moe, model.hidden, parallelism.stage_devices // parallelism.expert, parallelism.expert)

    def distance(self, other: "ExpertKey") -> float:
        """Product of the ratios of all dimensions, above 1."""
        return (
            _ratio(self.moe.experts, other.moe.experts)
            * _ratio(self.moe.experts_per_token, other.moe.experts_per_token)
            * _ratio(self.moe.intermediate, other.moe.intermediate)
            * _ratio(self.hidden, other.hidden)
            * _ratio(self.inside, other.inside) ** 2
            * _ratio(self.groups, other.groups) ** 2
        )

    def roofline(self, like: ModelSpec, hardware: Hardware, bits: int) -> Callable[[float], float]:
        """Nanoseconds of the experts of a layer by tokens, with the MLPs of ``like`` (only ratios are used)."""
        model = replace(like, moe=self.moe, hidden=self.hidden)
        split = Parallelism(self.inside * self.groups, expert=self.groups)
        ops = ExpertOps.of(model, hardware, split, GPU_WEIGHTS[bits].layers)
        assert ops is not None
        return lambda tokens: ops.total_ns(int(tokens)) / model.layers


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """Microseconds of the routed experts of a layer by tokens, for each measured shape, by bits of the weights."""

    hardware: Hardware
    curves: Mapping[int, Mapping[ExpertKey, Curve]]

    def curve(self, model: ModelSpec, parallelism: Parallelism, bits: int = 16) -> Curve:
        """The curve of a model with experts: measured, or that of the nearest shape and split, scaled by the rooflines
        of both."""
        key = ExpertKey.of(model, parallelism)
        narrow = self._nearest(model, key, bits)
        if bits == 16:
            assert narrow is not None, "every GPU was measured with 16 bits"
            return narrow
        wide = self.curve(model, parallelism, 2 * bits)
        if narrow is not None:
            knots = sorted({*wide.knots, *narrow.knots})
            return Curve(tuple(knots), tuple(min(wide(knot), narrow(knot)) for knot in knots))
        return _scaled(wide, key.roofline(model, self.hardware, bits), key.roofline(model, self.hardware, 2 * bits))

    def is_measured(self, model: ModelSpec, parallelism: Parallelism, bits: int) -> bool:
        """Whether this very shape was."""
        return ExpertKey.of(model, parallelism) in self.curves.get(bits, {})

    def _nearest(self, model: ModelSpec, key: ExpertKey, bits: int) -> Curve | None:
        known = self.curves.get(bits)
        if not known:
            return None
        nearest = min(known, key=key.distance)
        curve = known[nearest]
        if nearest == key:
            return curve
        laws = [wanted.roofline(model, self.hardware, bits) for wanted in (key, nearest)]
        return _scaled(curve, *laws)


def _scaled(curve: Curve, law: Callable[[float], float], measured: Callable[[float], float]) -> Curve:
    """The curve times the ratio of two laws at each knot."""
    pairs = zip(curve.knots, curve.values, strict=True)
    return Curve(curve.knots, tuple(value * law(knot) / measured(knot) for knot, value in pairs))


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

    def on(self, hardware: Hardware) -> "OperatorTables":
        """The same measurements of a device whose links, memory or price are others."""
        linear = {bits: LinearTable(hardware, bits, table.curves) for bits, table in self.linear.items()}
        return replace(self, hardware=hardware, linear=linear, experts=replace(self.experts, hardware=hardware))

    def linear_us(self, bits: int, m: int, shape: MatrixShape) -> float:
        """Microseconds of one product of ``m`` rows with weights of ``bits`` bits (16, 8 or 4)."""
        n, k = shape.outputs, shape.inputs
        wide = self.linear[16].us(m, n, k)
        if bits == 16:
            return wide
        if 8 in self.linear:
            us = min(wide, self.linear[8].us(m, n, k))
        else:
            us = wide * self._law(8, m, shape) / self._law(16, m, shape)
        return us if bits == 8 else us * self._law(4, m, shape) / self._law(8, m, shape)

    def all_reduce_us(self, num_devices: int, num_values: float) -> float:
        """Microseconds of a sum of ``num_values`` 16-bit values; over several hosts, of a sum inside each that was
        measured and one between them (costs/collectives.py). Raises ConfigError."""
        inside = -(-num_devices // num_hosts(self.hardware, num_devices))
        between = between_hosts(self.hardware, num_devices).seconds(ACTIVATION_BYTES * num_values)
        return self.all_reduce[inside](num_values) + US * between if inside > 1 else US * between

    def _law(self, bits: int, m: int, shape: MatrixShape) -> float:
        return linear_op(self.hardware, replace(shape, count=1), GPU_WEIGHTS[bits].layers).total_ns(m)


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
    """The operators of a GPU. Raises ConfigError for one that is not in ``operator_table_names()``, or whose speed was
    changed from the catalogue's, which was measured."""
    names = operator_table_names()
    if hardware.name not in names:
        raise ConfigError(
            f"hardware is {hardware.name!r}; operators were measured on {', '.join(names)}", param="hardware"
        )
    measured = _measured(hardware.name)
    known = measured.hardware
    if (hardware.flops, hardware.memory_bandwidth) != (known.flops, known.memory_bandwidth):
        raise ConfigError(
            f"the flops or the memory_bandwidth of hardware are not those of the {hardware.name} that was measured",
            param="hardware",
        )
    return measured.on(hardware)


@cache
def _measured(name: str) -> OperatorTables:
    """The operators of a GPU of the catalogue."""
    hardware, data = load_hardware(name), operator_data(name)
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
        experts=ExpertTable(
            hardware,
            {
                int(bits): {_expert_key(row): curve_of(row) for row in rows}
                for bits, rows in data["experts"].items()
                if rows
            },
        ),
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


def _expert_key(row: Mapping[str, Any]) -> ExpertKey:
    moe = MoESpec(row["experts"], row["experts_per_token"], row["intermediate"])
    return ExpertKey(moe, row["hidden"], row["tensor_parallel"], row["expert_parallel"])
