"""How well the layer tables predict measurements that they do not hold.

    python benchmarks/twin.py tables DATA_FOLDER [--json step_cost_tables.json]

Part 1, held-out points. Profiles that are thinned for the catalogue are tested at every measured point that the
shipped table leaves out. What ships whole is tested with a table from a part of it: token counts, every other one;
attention, the grid of powers of two where a finer grid was measured as well, else every other knot of every axis. One
step is dense operators + layers * attention, at a held-out attention point and a held-out token count. Those sums are
of measured operators; nobody measured these steps as a whole.

Part 2, whole steps of a real engine: Yi-34B on two A100 (Sarathi-Serve, OSDI 2024). The table is made from both runs of
figure 2 alone (one prefill or one decode batch a step); it then predicts the hybrid batches of table 2 and the cost of
chunking of figure 9a. One constant is fitted: nanoseconds for a (query, key) pair, by least squares on figure 2.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import ROOT, report

sys.path.insert(0, str(ROOT / "scripts"))

import derive_layer_tables as derive
import layer_profiles as profiles

from diptych.control.step import ScheduledPrefill, SchedulerOutput, StepFeatures, chunk_attention
from diptych.simulation.costs.layer_tables import LayerTableCost, parse_layer_table

Pairs = list[tuple[float, float]]  # (predicted, measured)
Row = dict[str, Any]
HEADER = derive.header("held-out", "", "", 1, "", [])


def spread(name: str, part: str, pairs: Pairs) -> Row:
    """Median, 95th percentile and mean of the relative errors, in percent."""
    errors = sorted(100 * abs(predicted / measured - 1) for predicted, measured in pairs)
    signed = sum(predicted / measured - 1 for predicted, measured in pairs) / len(pairs)
    return {
        "table": name,
        "part": part,
        "points": len(pairs),
        "median_%": round(errors[len(errors) // 2], 2),
        "p95_%": round(errors[int(0.95 * len(errors))], 2),
        "mean_signed_%": round(100 * signed, 2),
    }


def plan(chunks: Sequence[tuple[int, int]], num_decodes: int, context: int, *, last: bool = True) -> SchedulerOutput:
    """A step with these chunks (start, tokens) and a decode batch with this sum of contexts."""
    prefills = tuple(ScheduledPrefill("", start, tokens, (), last) for start, tokens in chunks)
    pairs = sum(chunk_attention(start, tokens) for start, tokens in chunks)
    tokens = sum(tokens for _, tokens in chunks)
    features = StepFeatures(tokens, pairs, num_decodes, context)
    return SchedulerOutput(0, prefills, num_decodes, features=features)


def compare(
    name: str, profile: profiles.Profile, cost: LayerTableCost, unseen: Iterable[profiles.MixedKey]
) -> list[Row]:
    """Errors at attention points (chunk, start, batch, context), and at every token count that is not a knot."""
    tables = cost.tables
    knots = set(tables.tokens.knots)
    limit = max(knots)
    counts = [count for count in sorted(profile.tokens) if count not in knots and count < limit]
    dense = [(tables.tokens(count), profile.tokens[count]) for count in counts]
    parts: dict[str, Pairs] = {"prefill attention": [], "decode attention": [], "mixed attention": []}
    steps: Pairs = []
    for chunk, start, batch, context in unseen:
        if not batch:
            part, measured = "prefill attention", profile.prefill[chunk][start]
            predicted = tables.prefill_attention(chunk, start)
        elif not chunk:
            part, measured = "decode attention", profile.decode[batch][context]
            predicted = tables.decode_attention(batch, context)
        else:
            part, measured = "mixed attention", profile.mixed[chunk, start, batch, context]
            assert tables.mixed_attention is not None
            predicted = tables.mixed_attention((chunk, start, batch, context))
        parts[part].append((predicted, measured))
        count = min(counts, key=lambda count: abs(count - chunk - batch))
        steps.append(
            (
                tables.tokens(count) + profile.num_layers * predicted,
                profile.tokens[count] + profile.num_layers * measured,
            )
        )
    rows = [spread(name, "dense operators", dense)]
    rows += [spread(name, part, pairs) for part, pairs in parts.items() if pairs]
    return [*rows, spread(name, "step", steps)]


def attention_keys(profile: profiles.Profile) -> list[profiles.MixedKey]:
    """Every measured attention point as (chunk, start, batch, context)."""
    prefill = [(chunk, start, 0, 0) for chunk, row in profile.prefill.items() for start in row]
    decode = [(0, 0, batch, context) for batch, row in profile.decode.items() for context in row]
    return [*prefill, *decode, *profile.mixed]


def every_other(values: Iterable[int]) -> set[int]:
    """The first, third, fifth, ... and the last value."""
    ordered = sorted(set(values))
    return {*ordered[::2], ordered[-1]}


def powers(values: Iterable[int]) -> set[int]:
    """0 and the powers of two."""
    return {value for value in values if value & (value - 1) == 0}


def part_of(profile: profiles.Profile, kept: Sequence[set[int]]) -> profiles.Profile:
    """What remains of a profile when only these knots of chunk, start, batch and context were measured, and every
    other token count."""
    chunks, starts, batches, contexts = kept
    tokens = every_other(profile.tokens)
    return replace(
        profile,
        tokens={count: value for count, value in profile.tokens.items() if count in tokens},
        prefill={
            chunk: {start: value for start, value in row.items() if start in starts}
            for chunk, row in profile.prefill.items()
            if chunk in chunks
        },
        decode={
            batch: {context: value for context, value in row.items() if context in contexts}
            for batch, row in profile.decode.items()
            if batch in batches
        },
        mixed={
            key: value
            for key, value in profile.mixed.items()
            if all(value in axis for value, axis in zip(key, kept, strict=True))
        },
    )


def held_out(folder: Path) -> list[Row]:
    """Part 1."""
    rows = []
    for published in derive.VLLM_PROFILES:
        name, profile = published.name, published.read(folder)
        axes = list(zip(*profile.mixed, strict=True))
        finer = any(chunk & (chunk - 1) for chunk in profile.prefill)
        kept = [powers(axis) if finer else every_other(axis) for axis in axes]
        cost = parse_layer_table(derive.whole_table(part_of(profile, kept), HEADER))
        kept = [axis | {0} for axis in kept]
        unseen = [
            key for key in attention_keys(profile) if any(x not in axis for x, axis in zip(key, kept, strict=True))
        ]
        rows += compare(name, profile, cost, unseen)
    for name, read in (
        ("a6000-llama-3.1-8b", lambda folder: derive.read_a6000_8b(folder, 1)),
        ("a6000-llama-3.1-8b-eager", derive.read_a6000_8b_eager),
        ("h100-llama-3.1-70b-tp4-eager", derive.read_h100_70b_eager),
        ("h100-llama-3.1-70b-tp4", lambda folder: derive.read_h100_llama_3(folder, "70B", 4)),
        ("h100-llama-3.1-8b", lambda folder: derive.read_h100_llama_3(folder, "8B", 1)),
        ("h100-llama-3.1-8b-tp2", lambda folder: derive.read_h100_llama_3(folder, "8B", 2)),
        ("a100-llama-2-70b-tp2-vidur", derive.read_a100_70b),
    ):
        profile = read(folder)
        shown = profile
        if len(profile.tokens) < 1000:  # its token counts ship almost whole
            counts = every_other(profile.tokens)
            shown = replace(profile, tokens={count: profile.tokens[count] for count in sorted(counts)})
        if sum(map(len, profile.decode.values())) < 1000:  # its attention ships whole
            contexts = every_other(context for row in profile.decode.values() for context in row)
            starts = {start for row in profile.prefill.values() for start in row}
            kept = [every_other(profile.prefill), starts, every_other(profile.decode), contexts]
            shown = replace(part_of(profile, kept), tokens=profile.tokens)
        table = derive.thin_table(shown, HEADER)
        held = {
            part: dict(zip(table[part]["knots"], (set(row["knots"]) for row in table[part]["rows"]), strict=True))
            for part in ("prefill_attention", "decode_attention")
        }
        unseen = [
            (chunk, start, batch, context)
            for chunk, start, batch, context in attention_keys(profile)
            if (batch and context not in held["decode_attention"].get(batch, ()))
            or (chunk and start not in held["prefill_attention"].get(chunk, ()))
        ]
        rows += compare(name, profile, parse_layer_table(table), unseen)
    return rows


def yi_table(folder: Path) -> tuple[LayerTableCost, float]:
    """Yi-34B TP2 from figure 2 alone, and the fitted nanoseconds of a (query, key) pair.

    A prefill of n tokens takes dense(n) + pairs(n) * rate; dense work is taken as proportional to n from 2,048 tokens,
    so rate is the least-squares slope of T(n) / n over n there. Decode attention is what a decode batch takes beyond
    the dense operators of as many tokens; its contexts were not recorded, so it does not depend on them.
    """
    prefill = {
        int(row["batch_num_prefill_tokens"]): 1e6 * float(row["batch_execution_time"])
        for row in profiles.rows_of(folder / "figure-2/prefill.csv")
        if row["inter_batch_delay"]  # the first batch of that run (256 tokens) took longer than one of 512
    }
    decode = {
        int(float(row["batch_size"])): 1e6 * float(row["batch_execution_time"])
        for row in profiles.rows_of(folder / "figure-2/decode.csv")
    }
    longs = [count for count in prefill if count >= 2048]
    per_token = {count: prefill[count] / count for count in longs}
    mean_x, mean_y = sum(longs) / len(longs), sum(per_token.values()) / len(longs)
    slope = sum((x - mean_x) * (per_token[x] - mean_y) for x in longs) / sum((x - mean_x) ** 2 for x in longs)
    rate = 2 * slope  # a causal prompt of n tokens has about n * n / 2 pairs
    dense = {count: value - rate * chunk_attention(0, count) for count, value in prefill.items()}
    dense[1] = min(decode.values())
    tokens = profiles.curve(dense)
    base = profiles.as_curve(tokens)
    chunks = (1, 512, 1024, 2048, 4096, 8192, 16384)
    rows = {
        chunk: {start: rate * chunk_attention(start, chunk) for start in (0, 16384)}
        for chunk in (*chunks, *(chunk * 3 // 2 for chunk in chunks[1:-1]))
    }
    table = {
        **HEADER,
        "num_layers": 1,
        "tokens": tokens,
        "sequences": {"knots": [1], "us": [0.0]},
        "prefill_attention": derive.surface(rows),
        "decode_attention": derive.surface({n: {1: max(0.0, value - base(n))} for n, value in decode.items()}),
    }
    return parse_layer_table(table), 1000 * rate


def sarathi(folder: Path) -> tuple[list[Row], float]:
    """Part 2."""
    cost, pair_ns = yi_table(folder)
    rows = []
    for row in profiles.rows_of(folder / "table-2/results.csv"):
        tokens, batch = int(row["batch_num_prefill_tokens"]), int(row["batch_num_decode_tokens"])
        predicted = cost.step_ns(plan([(0, tokens)] if tokens else [], batch, batch)) / 1e6
        measured = float(row["batch_execution_time"])
        name = f"{tokens}P + {batch}D" if tokens and batch else f"{tokens}P" if tokens else f"{batch}D"
        rows.append({"what": f"step, {name} (ms)", "measured": measured, "predicted": predicted})
    measured_ms = {
        (int(row["prefill_length"]), int(row["chunk_size"])): float(row["prefill_execution_time"])
        for row in profiles.rows_of(folder / "figure-9/chunking-overhead.csv")
    }
    for length in (2047, 4095, 8191, 16383):
        whole = cost.step_ns(plan([(0, length)], 0, 0)) / 1e6
        rows.append(
            {"what": f"prompt of {length}, whole (ms)", "measured": measured_ms[length, 16384], "predicted": whole}
        )
        for size in (512, 1024, 2048):
            chunked = 0.0
            for start in range(0, length, size):
                chunked += cost.step_ns(plan([(start, min(size, length - start))], 0, 0)) / 1e6
            rows.append(
                {
                    "what": f"prompt of {length}, chunks of {size}: overhead (%)",
                    "measured": 100 * (measured_ms[length, size] / measured_ms[length, 16384] - 1),
                    "predicted": 100 * (chunked / whole - 1),
                }
            )
    for row in rows:
        difference = row["predicted"] - row["measured"]
        row["difference"] = difference if "%" in row["what"] else 100 * difference / row["measured"]
        row["unit"] = "points" if "%" in row["what"] else "%"
    return [{key: round(v, 2) if isinstance(v, float) else v for key, v in row.items()} for row in rows], pair_ns


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("folder", type=Path)


def main(options: argparse.Namespace) -> None:
    """Print both parts."""
    steps, pair_ns = sarathi(options.folder / "sarathi-serve/osdi")
    report("step_cost_tables: Yi-34B, two A100", steps)
    report("step_cost_tables", held_out(options.folder), options.json, sarathi=steps, sarathi_pair_ns=round(pair_ns, 3))
