"""How far the operator tables are from measurements that they do not hold.

    python benchmarks/twin.py operators [--json step_cost_operators.json] [--gpu NAME] [--seed 1]

The shipped tables hold measured points (catalogue/operators/; rounded to four digits). Points are taken out, the tables
are made from the rest, and asked for the points taken out:

    random     every point is out with a chance of 20 %, except the first and the last of each curve
    alternate  every second knot of the curves is out (harder: kernels change at multiples of 64 and 128 tokens, and the
               tables hold both sides of such an edge)

by ``tokens`` (or length, context, message size: the knots of a curve), by ``batch`` (whole curves of a batch size), by
``shape`` (whole sets of curves: all points of a matrix product n x k, all points of a set of heads).

Between the edges (``inside``): single token counts that are no edge of a tile (multiple of 128, or one more) are asked
for after they and their neighbours left the curves. This is what a simulated step mostly asks for, since the edges
themselves are in the tables.

Then whole steps of three models, one point out at a time: ``batch`` asks for decode steps of a batch that no table
holds any more (its row of attention is gone, and its token count and both neighbours from every matrix product, so
that the other side of an edge cannot help), ``context`` for decode steps at a context that is gone, ``length`` for
prompts of a length that is gone from attention and, with its neighbours, from every product; ``all``: the three
together. What is asked for is compared with the sum of the measured operators at that very point; norms and the like
are the same in both, the host's part is 0. Batches and lengths are powers of two, so these are mostly edges: the
hardest points there are.

Errors are |asked - measured| / measured; the goal is a median of 3 % and a 95th percentile of 10 %.
"""

import argparse
import random
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from common import report

from diptych.control.step import ScheduledPrefill, SchedulerOutput, StepFeatures, chunk_attention
from diptych.report.statistics import percentile
from diptych.simulation.costs.interpolation import Curve, Surface
from diptych.simulation.costs.layer_tables import LayerTables
from diptych.simulation.costs.operator_tables import layer_tables, operator_table_cost
from diptych.simulation.costs.operators import (
    AttentionTable,
    LinearTable,
    OperatorTables,
    load_operator_tables,
    operator_table_names,
    prompt_law,
    refined,
)
from diptych.simulation.hardware import load_hardware
from diptych.simulation.model_catalogue import load_model
from diptych.simulation.parallelism import Parallelism

Row = dict[str, Any]
Keep = Callable[[int, int], bool]  # (index of a knot, number of knots) -> stays in the table
MODELS = (("llama-3.1-8b", 1), ("qwen3-32b", 2), ("llama-3.1-70b", 4))
SHARE = 0.2
LARGE = 1024  # matrix products of language models have both dimensions from here on
BATCHES = (2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LENGTHS = (64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)  # those that both kinds of tables hold


def randomly(rng: random.Random) -> Keep:
    """Each interior knot stays with a chance of 80 %."""
    return lambda index, count: index in (0, count - 1) or rng.random() >= SHARE


def alternately(index: int, count: int) -> bool:
    """Every second knot stays, and the last one."""
    return index % 2 == 0 or index == count - 1


def split_curve(curve: Curve, keep: Keep) -> tuple[Curve, list[tuple[float, float]]]:
    """The curve without some knots, and the points that are gone."""
    count = len(curve.knots)
    kept = [keep(index, count) for index in range(count)]
    points = list(zip(curve.knots, curve.values, strict=True))
    left = [point for point, stays in zip(points, kept, strict=True) if stays]
    gone = [point for point, stays in zip(points, kept, strict=True) if not stays]
    return Curve(tuple(knot for knot, _ in left), tuple(value for _, value in left)), gone


def curve_errors(curves: Sequence[Curve], keep: Keep) -> Iterator[float]:
    """Errors at the knots that are gone, curve by curve."""
    for curve in curves:
        thin, gone = split_curve(curve, keep)
        yield from (thin(knot) / value - 1 for knot, value in gone)


def prompt_errors(tables: OperatorTables, keep: Keep) -> Iterator[float]:
    """Errors of prefill attention at the lengths that are gone."""
    for heads, surface in tables.prefill_attention.surfaces.items():
        for batch, row in zip(surface.knots, surface.rows, strict=True):
            thin, gone = split_curve(row, keep)
            asked = refined(thin, prompt_law(tables.hardware, heads, batch))
            yield from (asked(knot) / value - 1 for knot, value in gone)


def thin_surface(surface: Surface, keep: Keep) -> Surface:
    """Without some rows."""
    kept = [index for index in range(len(surface.knots)) if keep(index, len(surface.knots))]
    return Surface(tuple(surface.knots[i] for i in kept), tuple(surface.rows[i] for i in kept))


def batch_errors(surfaces: Sequence[Surface], keep: Keep) -> Iterator[float]:
    """Errors at all points of the rows that are gone."""
    for surface in surfaces:
        thin = thin_surface(surface, keep)
        for batch, row in zip(surface.knots, surface.rows, strict=True):
            if batch not in thin.knots:
                yield from (thin(batch, knot) / value - 1 for knot, value in zip(row.knots, row.values, strict=True))


def thin_shapes(table: LinearTable, keep: Keep) -> LinearTable:
    """Without some (n, k). ``keep`` decides on n and on k for the alternate split, on each pair for the random one."""
    if keep is alternately:
        ns = {n for i, n in enumerate(table.ns) if alternately(i, len(table.ns))}
        ks = {k for i, k in enumerate(table.ks) if alternately(i, len(table.ks))}
        curves = {pair: curve for pair, curve in table.curves.items() if pair[0] in ns and pair[1] in ks}
    else:
        curves = {pair: curve for pair, curve in table.curves.items() if keep(1, 3)}
    return LinearTable(table.hardware, table.weight_bits, curves)


def shape_errors(table: LinearTable, keep: Keep) -> Iterator[float]:
    """Errors of whole products that are gone, both dimensions at least ``LARGE``."""
    thin = thin_shapes(table, keep)
    for (n, k), curve in table.curves.items():
        if (n, k) not in thin.curves and min(n, k) >= LARGE:
            yield from (thin.us(int(m), n, k) / us - 1 for m, us in zip(curve.knots, curve.values, strict=True))


def head_errors(table: AttentionTable, keep: Keep) -> Iterator[float]:
    """Errors of whole sets of heads that are gone."""
    kept = {heads: surface for i, (heads, surface) in enumerate(sorted(table.surfaces.items(), key=lambda item: (
        item[0].head_dim, item[0].kv_bits, item[0].kv_heads, item[0].heads))) if keep(i + 1, 10**9)}  # fmt: skip
    thin = AttentionTable(kept)
    for heads, surface in table.surfaces.items():
        if heads not in kept:
            asked = thin.surface(heads)
            for batch, row in zip(surface.knots, surface.rows, strict=True):
                yield from (asked(batch, knot) / us - 1 for knot, us in zip(row.knots, row.values, strict=True))


def operator_rows(tables: OperatorTables, seed: int) -> Iterator[Row]:
    """Errors operator by operator."""
    prefill = list(tables.prefill_attention.surfaces.values())
    decode = list(tables.decode_attention.surfaces.values())
    for split in ("random", "alternate"):
        for bits, table in tables.linear.items():
            large = [curve for (n, k), curve in table.curves.items() if min(n, k) >= LARGE]
            yield line(tables, f"matrix product, {bits} bits", "tokens", split, curve_errors(large, keep(split, seed)))
            yield line(tables, f"matrix product, {bits} bits", "shape", split, shape_errors(table, keep(split, seed)))
        yield line(tables, "prefill attention", "tokens", split, prompt_errors(tables, keep(split, seed)))
        rows = [row for surface in decode for row in surface.rows]
        yield line(tables, "decode attention", "tokens", split, curve_errors(rows, keep(split, seed)))
        for name, surfaces, table_ in (
            ("prefill attention", prefill, tables.prefill_attention),
            ("decode attention", decode, tables.decode_attention),
        ):
            yield line(tables, name, "batch", split, batch_errors(surfaces, keep(split, seed)))
            yield line(tables, name, "shape", split, head_errors(table_, keep(split, seed)))
        experts = [curve for curves in tables.experts.curves.values() for curve in curves.values()]
        yield line(tables, "experts", "tokens", split, curve_errors(experts, keep(split, seed)))
        reduces = list(tables.all_reduce.values())
        yield line(tables, "all-reduce", "tokens", split, curve_errors(reduces, keep(split, seed)))


def keep(split: str, seed: int) -> Keep:
    """The rule of a split."""
    return alternately if split == "alternate" else randomly(random.Random(seed))


def line(tables: OperatorTables, what: str, by: str, split: str, errors: Iterator[float]) -> Row:
    """Median and 95th percentile of the errors."""
    signed = sorted(errors)
    sizes = sorted(abs(error) for error in signed)
    return {
        "gpu": tables.hardware.name,
        "what": what,
        "by": by,
        "split": split,
        "points": len(sizes),
        "median_%": round(100 * percentile(sizes, 50), 2),
        "p95_%": round(100 * percentile(sizes, 95), 2),
        "bias_%": round(100 * percentile(signed, 50), 2),
    }


def without(curve: Curve, gone: set[float]) -> Curve:
    """The curve without some of its knots (its ends stay)."""
    return split_curve(curve, lambda index, count: index in (0, count - 1) or curve.knots[index] not in gone)[0]


def products_without(tables: OperatorTables, tokens: float) -> dict[int, LinearTable]:
    """The matrix products without a token count and its neighbours."""
    gone = {tokens - 1, tokens, tokens + 1}
    return {
        bits: LinearTable(t.hardware, bits, {pair: without(curve, gone) for pair, curve in t.curves.items()})
        for bits, t in tables.linear.items()
    }


def thin_attention(table: AttentionTable, thin: Callable[[Surface], Surface]) -> AttentionTable:
    """Every surface made thinner."""
    return AttentionTable({heads: thin(surface) for heads, surface in table.surfaces.items()})


def without_row(batch: float) -> Callable[[Surface], Surface]:
    """A surface without one row (its ends stay)."""
    return lambda s: thin_surface(s, lambda index, count: index in (0, count - 1) or s.knots[index] != batch)


def without_column(knot: float) -> Callable[[Surface], Surface]:
    """A surface without one knot in every row."""
    return lambda s: Surface(s.knots, tuple(without(row, {knot}) for row in s.rows))


def inside_rows(tables: OperatorTables) -> Iterator[Row]:
    """Errors of large matrix products between the edges of tiles."""
    for bits, table in tables.linear.items():
        found = []
        for (n, k), curve in table.curves.items():
            if min(n, k) >= LARGE:
                for knot, us in list(zip(curve.knots, curve.values, strict=True))[1:-1]:
                    if knot > 17 and knot % 128 > 1:
                        found.append(without(curve, {knot - 1, knot, knot + 1})(knot) / us - 1)
        yield line(tables, f"matrix product, {bits} bits", "inside", "one out", iter(found))


def step_rows(tables: OperatorTables) -> Iterator[Row]:
    """Errors of whole steps of three models, by precision of the weights."""
    for bits in tables.linear:
        errors = {
            ("decode", "batch"): batch_step_errors(tables, bits),
            ("decode", "context"): context_step_errors(tables, bits),
            ("prefill", "length"): length_step_errors(tables, bits),
        }
        for (kind, by), found in errors.items():
            yield line(tables, f"{kind} step, {bits} bits", by, "one out", iter(found))
        together = [error for found in errors.values() for error in found]
        yield line(tables, f"any step, {bits} bits", "all", "one out", iter(together))


def batch_step_errors(tables: OperatorTables, bits: int) -> list[float]:
    """Decode steps of batches that are gone."""
    found: list[float] = []
    for batch in BATCHES:
        attention = thin_attention(tables.decode_attention, without_row(batch))
        thin = replace(tables, linear=products_without(tables, batch), decode_attention=attention)
        found += step_errors(tables, thin, bits, [(batch, context) for context in CONTEXTS], [])
    return found


def context_step_errors(tables: OperatorTables, bits: int) -> list[float]:
    """Decode steps at contexts that are gone."""
    found: list[float] = []
    for context in CONTEXTS:
        thin = replace(tables, decode_attention=thin_attention(tables.decode_attention, without_column(context)))
        found += step_errors(tables, thin, bits, [(batch, context) for batch in BATCHES], [])
    return found


def length_step_errors(tables: OperatorTables, bits: int) -> list[float]:
    """Prompts of lengths that are gone."""
    found: list[float] = []
    for length in LENGTHS:
        attention = thin_attention(tables.prefill_attention, without_column(length))
        thin = replace(tables, linear=products_without(tables, length), prefill_attention=attention)
        found += step_errors(tables, thin, bits, [], [length])
    return found


def step_errors(
    tables: OperatorTables,
    thin: OperatorTables,
    bits: int,
    decodes: Sequence[tuple[int, int]],
    prompts: Sequence[int],
) -> Iterator[float]:
    """Errors of decode steps (batch, context of each) and of single prompts, for every model."""
    for name, devices in MODELS:
        model = load_model(name)
        layers = model.layers
        whole = layer_tables(tables, model, Parallelism(devices), bits, 16)
        asked = layer_tables(thin, model, Parallelism(devices), bits, 16)
        measured = whole.decode_attention
        largest = {batch: row.knots[-1] for batch, row in zip(measured.knots, measured.rows, strict=True)}
        for batch, context in decodes:
            if context <= largest.get(batch, 0):  # beyond, nothing was measured
                yield decode_us(asked, layers, batch, context) / decode_us(whole, layers, batch, context) - 1
        for length in prompts:
            yield prompt_us(asked, layers, length) / prompt_us(whole, layers, length) - 1


def decode_us(tables: LayerTables, layers: int, batch: int, context: int) -> float:
    """A decode step without the host's part."""
    return tables.tokens(batch) + tables.sequences(batch) + layers * tables.decode_attention(batch, context)


def prompt_us(tables: LayerTables, layers: int, tokens: int) -> float:
    """A prompt without the host's part."""
    return tables.tokens(tokens) + tables.sequences(1) + layers * tables.prefill_attention(tokens, 0)


def speed() -> dict[str, float]:
    """Seconds of making a cost model, microseconds of its answers (Llama-3.1-8B on an H100)."""
    model, hardware = load_model("llama-3.1-8b"), load_hardware("h100-sxm")
    begun = time.perf_counter()
    cost = operator_table_cost(model, hardware)
    made_s = time.perf_counter() - begun
    chunk = ScheduledPrefill("a", 0, 512, (), True)
    mixed = SchedulerOutput(
        0, (chunk,), num_decodes=64, features=StepFeatures(512, chunk_attention(0, 512), 64, 64 * 1024)
    )
    line_us = min(timeit.repeat(lambda: cost.decode_line(64, 64 * 1024), number=20_000, repeat=5)) / 20_000 * 1e6
    step_us = min(timeit.repeat(lambda: cost.step_ns(mixed), number=20_000, repeat=5)) / 20_000 * 1e6
    return {"make_s": round(made_s, 3), "decode_line_us": round(line_us, 2), "mixed_step_us": round(step_us, 2)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--gpu", choices=operator_table_names())
    parser.add_argument("--seed", type=int, default=1)


def main(options: argparse.Namespace) -> None:
    """Print the errors of every GPU, or of the one that is asked for."""
    rows: list[Row] = []
    for name in operator_table_names():
        if options.gpu in (None, name):
            tables = load_operator_tables(load_hardware(name))
            rows += operator_rows(tables, options.seed)
            rows += inside_rows(tables)
            rows += step_rows(tables)
    seconds = speed()
    print(seconds)
    report("operator tables at points taken out of them", rows, options.json, speed=seconds)
