"""Cost model from measured layer profiles: a step is the sum of what its operators were measured to take.

A step takes dense(all tokens of the step) + outputs(sequences that sample) + layers * attention + overhead, each an
interpolated table of one GPU, one model and one engine version; nothing is fitted to end-to-end runs. Owns how a plan
is looked up in the tables. Never mixes tables, and never scales one GPU's numbers to another.

Attention is looked up at the mean context of the decode batch, because tables hold batches of equal contexts. A skewed
batch takes a little longer: alpha of the way from the time at its mean context to the time at its longest, with alpha
as measured; ``skew`` says how many times the mean the longest context is. Several chunks in a step count as one chunk
with the same tokens and the same (query, key) pairs; when they have fewer pairs than one causal chunk of that many
tokens, as several short prompts do, as its share of that chunk's time above a launch's, but never less than the slowest
of them takes alone. Prefill and decode in one step take the sum of the two alone, times a measured factor where the
profile has mixed steps.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from diptych.control.errors import ConfigError
from diptych.control.step import ScheduledPrefill, SchedulerOutput, chunk_attention
from diptych.simulation.costs.cost_model import UNBOUNDED, DecodeLine
from diptych.simulation.costs.interpolation import Curve, Grid, Surface
from diptych.simulation.packed_tables import packed_names, packed_table

NS_PER_US = 1000.0


@dataclass(frozen=True, slots=True)
class TableSource:
    """Where a table's numbers come from, under which licence, and what was changed."""

    repository: str
    path: str
    licence: str
    changes: str


@dataclass(frozen=True, slots=True)
class TableInfo:
    """What a table describes. skew_alpha: see the module; 0: not measured. assumptions: sentences about what of the
    table was not measured."""

    name: str
    hardware: str
    model: str
    tensor_parallel: int
    engine: str
    num_layers: int
    overhead_source: str
    skew_alpha: float
    sources: tuple[TableSource, ...]
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerTables:
    """The measured functions, in microseconds.

    tokens: all dense operators of all layers, by tokens of the step (with the collectives). sequences: output layer
    and sampler, by sequences that sample. prefill_attention: one layer, by (chunk, tokens before it). decode_attention:
    one layer, by (sequences, context of each). mixed_attention: factor on the sum of both, by (chunk, tokens before
    it, sequences, context of each); None: 1. overhead: what the host adds to a step, by sequences in it.
    """

    tokens: Curve
    sequences: Curve
    prefill_attention: Surface
    decode_attention: Surface
    mixed_attention: Grid | None
    overhead: Curve


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

    def decode_line(self, num_seqs: int, context: int) -> DecodeLine:
        """See CostModel: the segment of the interpolated table around the mean context."""
        ends, lines = self._lines(num_seqs)
        return lines[bisect_right(ends, context)]

    def step_ns(self, output: SchedulerOutput) -> int:
        """See CostModel."""
        features = output.features
        if not output.prefills:
            return self.decode_line(features.decode_seqs, features.decode_context).step_ns(features.decode_context)
        tables, num_decodes = self.tables, features.decode_seqs
        num_samples = num_decodes + sum([chunk.is_last for chunk in output.prefills])
        total = tables.overhead(num_decodes + len(output.prefills))
        total += tables.tokens(features.prefill_tokens + num_decodes)
        if num_samples:
            total += tables.sequences(num_samples)
        total += self.info.num_layers * self._attention_us(output)
        return max(1, round(total * NS_PER_US))

    def _attention_us(self, output: SchedulerOutput) -> float:
        """Attention of one layer in a step with prefills."""
        features, tables = output.features, self.tables
        tokens, pairs = features.prefill_tokens, features.prefill_attention
        alone = chunk_attention(0, tokens)
        start = max(0.0, (pairs - alone) / tokens)
        time = self._prefill_us(tokens, start)
        if len(output.prefills) > 1:
            least = tables.prefill_attention(0, 0)  # what a launch takes, whatever it computes
            share = min(1.0, pairs / alone)
            time = max(least + (time - least) * share, self._slowest(output.prefills))
        if features.decode_seqs:
            context = features.decode_context / features.decode_seqs
            time += tables.decode_attention(features.decode_seqs, context)
            if tables.mixed_attention is not None:
                time *= tables.mixed_attention((tokens, start, features.decode_seqs, context))
        return time

    def _slowest(self, prefills: tuple[ScheduledPrefill, ...]) -> float:
        return max([self._prefill_us(chunk.num_tokens, chunk.start) for chunk in prefills])

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
        low, high, weight = tables.decode_attention.between(num_seqs)
        fixed = tables.overhead(num_seqs) + tables.tokens(num_seqs) + tables.sequences(num_seqs)
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
            lines.append(_line(intercept_ns, scale * slope / num_seqs, ends[-1] if ends else 0, until))
            if is_last:
                return ends, lines
            ends.append(until)
            mean = end


def _line(intercept_ns: float, slope_ns: float, start: int, until: int) -> DecodeLine:
    """A line that may fall (a table is noisy): then a level one at the middle of its segment, because neither
    coefficient of a DecodeLine is negative."""
    if slope_ns < 0:
        middle = start if until == UNBOUNDED else (start + until) / 2
        return DecodeLine.of(intercept_ns + slope_ns * middle, 0.0, until)
    return DecodeLine.of(intercept_ns, slope_ns, until)


def layer_table_names() -> tuple[str, ...]:
    """Names that ``load_layer_table`` knows, in order."""
    return packed_names("tables")


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
    mixed = data.get("mixed_attention")
    tables = LayerTables(
        tokens=_curve(data["tokens"]),
        sequences=_curve(data["sequences"]),
        prefill_attention=_surface(data["prefill_attention"]),
        decode_attention=_skewed(_surface(data["decode_attention"]), data["skew_alpha"], skew),
        mixed_attention=None
        if mixed is None
        else Grid(tuple(tuple(map(float, axis)) for axis in mixed["axes"]), tuple(mixed["factors"])),
        overhead=_curve(data["overhead"]),
    )
    return LayerTableCost(msgspec.convert(data, TableInfo), tables)


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
