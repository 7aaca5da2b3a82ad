"""Cost model from measured layer profiles: a step is the sum of what its operators were measured to take.

A step takes dense(all tokens of the step) + outputs(sequences that sample) + layers * attention + overhead, each an
interpolated table of one GPU, one model and one engine version; nothing is fitted to end-to-end runs. Owns how a plan
is looked up in the tables. Never mixes tables, and never scales one GPU's numbers to another.

Attention is looked up at the mean context of the decode batch, because tables hold batches of equal contexts. A skewed
batch takes a little longer: alpha of the way from the time at its mean context to the time at its longest, with alpha
as measured; ``skew`` says how many times the mean the longest context is. Several chunks in a step take a launch and
what each of them takes above it, but no longer than one chunk of all their tokens after the longest of their prefixes.
Prefill and decode in one step take the sum of the two alone, or what was measured where the profile has mixed steps
(of several chunks, the one that decodes slow down most).
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import msgspec

from diptych.control.errors import ConfigError
from diptych.control.step import SchedulerOutput
from diptych.simulation.costs.cost_model import UNBOUNDED, DecodeLine
from diptych.simulation.costs.interpolation import Curve, Grid, Surface
from diptych.simulation.packed_tables import packed_json, packed_names, packed_table

NS_PER_US = 1000.0
UNFUSED = "unfused"  # kernels of tables whose operators no engine runs like that


@dataclass(frozen=True, slots=True)
class TableSource:
    """Where a table's numbers come from, under which licence, and what was changed."""

    repository: str
    path: str
    licence: str
    changes: str


@dataclass(frozen=True, slots=True)
class TableInfo:
    """What a table describes. skew_alpha: see the module; 0: not measured. tensor_parallel, data_parallel,
    expert_parallel: see Parallelism.

    kernels: the engine whose kernels these are, with its version ("vllm-0.24"), or "unfused": operators as no engine
    runs them. assumptions: sentences about what of the table was not measured.
    """

    name: str
    hardware: str
    model: str
    tensor_parallel: int
    engine: str
    num_layers: int
    overhead_source: str
    skew_alpha: float
    sources: tuple[TableSource, ...]
    kernels: str = ""
    data_parallel: int = 1
    expert_parallel: int = 1
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerTables:
    """The measured functions, in microseconds.

    tokens: all dense operators of all layers, by tokens of the step (with the collectives). sequences: output layer
    and sampler, by sequences that sample. prefill_attention: one layer, by (chunk, tokens before it). decode_attention:
    one layer, by (sequences, context of each). mixed_attention: both in one step, by (chunk, tokens before it,
    sequences, context of each); None: the sum of both. overhead: what the host adds to a step, by sequences in it.
    groups: data-parallel groups with sequences of their own, of which the fullest sets the pace: the others are of one
    group then. shared: what all groups compute together, by tokens of all of them.
    """

    tokens: Curve
    sequences: Curve
    prefill_attention: Surface
    decode_attention: Surface
    mixed_attention: Grid | None
    overhead: Curve
    groups: int = 1
    shared: Curve | None = None

    def rising(self) -> "LayerTables":
        """The tables without the noise that makes more work faster than less: no curve falls any more."""
        mixed = self.mixed_attention
        return LayerTables(
            tokens=self.tokens.rising(),
            sequences=self.sequences.rising(),
            prefill_attention=self.prefill_attention.rising(),
            decode_attention=self.decode_attention.rising(),
            mixed_attention=None if mixed is None else mixed.rising(),
            overhead=self.overhead.rising(),
            groups=self.groups,
            shared=None if self.shared is None else self.shared.rising(),
        )


class LayerTableCost:
    """The CostModel of one table. Lines of a batch size are made when it is first asked for, and kept."""

    def __init__(self, info: TableInfo, tables: LayerTables) -> None:
        self.name = info.name
        self.info = info
        self.tables = tables
        self._lines = cache(self._make_lines)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What of the table was not measured."""
        return self.info.assumptions

    def with_host(self, host_us: Curve, source: str) -> "LayerTableCost":
        """The same devices behind another host: ``host_us`` microseconds by the sequences of a step."""
        info = replace(self.info, name=f"{self.name}+{source}", overhead_source=source)
        return LayerTableCost(info, replace(self.tables, overhead=host_us))

    def decode_line(self, num_seqs: int, context: int) -> DecodeLine:
        """The segment of the interpolated table around the mean context."""
        ends, lines = self._lines(num_seqs)
        return lines[bisect_right(ends, context)]

    def step_ns(self, output: SchedulerOutput) -> int:
        features, chunks = output.features, output.prefills
        if not chunks:
            return self.decode_line(features.decode_seqs, features.decode_context).step_ns(features.decode_context)
        tables, groups, num_decodes = self.tables, self.tables.groups, features.decode_seqs
        num_samples = num_decodes + sum([chunk.is_last for chunk in chunks])
        tokens = features.prefill_tokens
        if groups > 1:
            tokens = max(-(-tokens // groups), max([chunk.num_tokens for chunk in chunks]))
        total = tables.overhead(-(-(num_decodes + len(chunks)) // groups))
        total += tables.tokens(tokens - (-num_decodes // groups))
        if tables.shared is not None:
            total += tables.shared(features.prefill_tokens + num_decodes)
        if num_samples:
            total += tables.sequences(-(-num_samples // groups))
        total += self.info.num_layers * self._attention_us(output)
        return max(1, round(total * NS_PER_US))

    def _attention_us(self, output: SchedulerOutput) -> float:
        """Attention of one layer in a step with prefills; see the module."""
        tables, chunks, groups = self.tables, output.prefills, self.tables.groups
        seqs = output.features.decode_seqs
        context = output.features.decode_context / seqs if seqs else 0.0
        seqs = -(-seqs // groups)
        decode = tables.decode_attention(seqs, context) if seqs else 0.0
        if len(chunks) == 1:
            alone = self._prefill_us(chunks[0].num_tokens, chunks[0].start)
            return alone + self._added_us(chunks[0].num_tokens, chunks[0].start, alone, seqs, context, decode)
        times = [self._prefill_us(chunk.num_tokens, chunk.start) for chunk in chunks]
        tokens, longest = output.features.prefill_tokens, max([chunk.start for chunk in chunks])
        whole = self._prefill_us(tokens, longest)
        least = tables.prefill_attention(0, 0)  # what a launch takes, whatever it computes
        apart = least + max(sum([time - least for time in times]) / groups, max(times) - least)
        if not seqs or tables.mixed_attention is None:
            return min(apart, whole) + decode
        apart += max(
            [
                self._added_us(chunk.num_tokens, chunk.start, time, seqs, context, decode)
                for chunk, time in zip(chunks, times, strict=True)
            ]
        )
        return min(apart, whole + self._added_us(tokens, longest, whole, seqs, context, decode))

    def _added_us(self, tokens: int, start: int, prefill: float, seqs: int, context: float, decode: float) -> float:
        """What a decode batch that takes ``decode`` alone adds to a chunk that takes ``prefill`` alone."""
        mixed, tables = self.tables.mixed_attention, self.tables
        if not seqs or mixed is None:
            return decode
        near = mixed.nearest((tokens, start, seqs, context))
        time = mixed(near)
        if near != (tokens, start, seqs, context):  # outside the grid as much longer as the two alone are
            time += prefill - tables.prefill_attention(near[0], near[1])
            time += decode - tables.decode_attention(near[2], near[3])
        return max(time, prefill, decode) - prefill

    def _prefill_us(self, tokens: int, start: float) -> float:
        """Prefill attention of one layer; a chunk larger than any measured one as several of the largest."""
        surface = self.tables.prefill_attention
        largest = int(surface.knots[-1])
        time = 0.0
        while tokens > largest:
            time += surface(largest, start)
            tokens, start = tokens - largest, start + largest
        return time + surface(tokens, start)

    def _make_lines(self, num_seqs: int) -> tuple[list[int], list[DecodeLine]]:
        """The lines of one batch size and where each but the last ends (in context tokens, exclusive)."""
        tables = self.tables
        mine = -(-num_seqs // tables.groups)
        low, high, weight = tables.decode_attention.between(mine)
        fixed = tables.overhead(mine) + tables.tokens(mine) + tables.sequences(mine)
        if tables.shared is not None:
            fixed += tables.shared(num_seqs)
        scale = self.info.num_layers * NS_PER_US
        ends: list[int] = []
        lines: list[DecodeLine] = []
        mean = 0.0
        while True:
            low_at_0, low_slope, low_end = low.segment(mean)
            high_at_0, high_slope, high_end = high.segment(mean)
            attention = low_at_0 + weight * (high_at_0 - low_at_0)
            slope = low_slope + weight * (high_slope - low_slope)
            end = min(low_end, high_end)
            intercept_ns = fixed * NS_PER_US + scale * attention
            is_last = end == float("inf")
            until = UNBOUNDED if is_last else math.ceil(end * num_seqs)
            lines.append(DecodeLine.of(intercept_ns, scale * slope / num_seqs, until))
            if is_last:
                return ends, lines
            ends.append(until)
            mean = end


def layer_table_names() -> tuple[str, ...]:
    """Names that ``load_layer_table`` knows, in order."""
    return packed_names("tables")


@cache
def layer_table_info(name: str) -> TableInfo:
    """What a shipped table says about itself."""
    return msgspec.json.decode(packed_json("tables", name), type=TableInfo)


def load_layer_table(name: str, *, skew: float = 1.0) -> LayerTableCost:
    """The cost model of a shipped table. Raises ConfigError for a name that is not in ``layer_table_names()``.

    skew: longest context of a decode batch over its mean (1: all equal); tables without a measured alpha ignore it.
    """
    if name not in layer_table_names():
        raise ConfigError(f"layer table is {name!r}; one of {', '.join(layer_table_names())}", param="layer_table")
    return parse_layer_table(packed_table("tables", name), skew=skew)


def parse_layer_table(data: dict[str, Any], *, skew: float = 1.0) -> LayerTableCost:
    """The cost model of a table as plain data (the JSON that scripts/derive_layer_tables.py writes)."""
    if not skew >= 1:
        raise ConfigError(f"skew is {skew}; the longest context over the mean is at least 1", param="skew")
    prefill = _surface(data["prefill_attention"])
    decode = _skewed(_surface(data["decode_attention"]), data["skew_alpha"], skew)
    tables = LayerTables(
        tokens=_curve(data["tokens"]),
        sequences=_curve(data["sequences"]),
        prefill_attention=prefill,
        decode_attention=decode,
        mixed_attention=_mixed(data.get("mixed_attention"), prefill, decode),
        overhead=_curve(data["overhead"]),
        groups=data.get("data_parallel", 1),
        shared=_curve(data["shared"]) if "shared" in data else None,
    )
    return LayerTableCost(msgspec.convert(data, TableInfo), tables.rising())


def _mixed(data: dict[str, Any] | None, prefill: Surface, decode: Surface) -> Grid | None:
    """Microseconds from factors on the sum of both."""
    if data is None:
        return None
    axes = tuple(tuple(map(float, axis)) for axis in data["axes"])
    alone = [[surface(x, y) for x, y in product(*pair)] for surface, pair in ((prefill, axes[:2]), (decode, axes[2:]))]
    sums = [first + second for first, second in product(*alone)]
    return Grid(axes, tuple(factor * us for factor, us in zip(data["factors"], sums, strict=True)))


def _curve(data: dict[str, Any]) -> Curve:
    return Curve(tuple(map(float, data["knots"])), tuple(map(float, data["us"])))


def _surface(data: dict[str, Any]) -> Surface:
    return Surface(tuple(map(float, data["knots"])), tuple(_curve(row) for row in data["rows"]))


def _skewed(surface: Surface, alpha: float, skew: float) -> Surface:
    """Attention of batches whose longest context is ``skew`` times the mean, by that mean."""
    if skew == 1 or alpha == 0:
        return surface
    rows = []
    for row in surface.rows:
        knots = tuple(sorted({*row.knots, *(knot / skew for knot in row.knots)}))
        rows.append(Curve(knots, tuple((1 - alpha) * row(knot) + alpha * row(skew * knot) for knot in knots)))
    return Surface(surface.knots, tuple(rows))
