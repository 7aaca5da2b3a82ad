"""Derive the layer tables of the catalogue from the published profiles in FOLDER.

    python scripts/derive_layer_tables.py FOLDER [--only NAME]

FOLDER holds ``llmservingsim``, ``vidur`` and ``aiconfigurator`` as their authors published them. Writes
src/diptych/simulation/catalogue/tables/*.json.gz, each with its sources, licences and what was changed inside. The same
input gives the same bytes. Reading the all-reduce tables (parquet) needs pyarrow; nothing else does.

What is done to the measurements: the operators of all layers are summed into one curve over the tokens of a step, the
collectives of tensor parallelism (which no layer profile holds) are added from all-reduce measurements of the same
GPU, dense grids are thinned, and attention of mixed steps is kept as a factor on the sum of its two parts.
"""

import argparse
import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from layer_profiles import (
    MixedKey,
    Profile,
    Rows,
    Table,
    as_curve,
    curve,
    custom_all_reduce,
    fused_kernels,
    host_overhead,
    read_artifact,
    read_vidur,
    read_vllm,
    vidur_all_reduce,
    vllm_attention,
)

from diptych.simulation.costs.interpolation import Surface

TABLES = Path(__file__).parent.parent / "src" / "diptych" / "simulation" / "catalogue" / "tables"

LLMSERVINGSIM = "casys-kaist/LLMServingSim @ 5daddb2"
VIDUR = "microsoft/vidur @ 7d47513 (attention: history, blob ee3dec76)"
AICONFIGURATOR = "ai-dynamo/aiconfigurator @ 095f58a"
NO_OVERHEAD = "0: the profile holds kernels only, and no source measures the host's part for this engine"
ASYNC_OVERHEAD = "0: vLLM 0.19 schedules asynchronously, which hides the host's work; gaps between kernels are not held"


def thin_tokens(tokens: Iterable[int]) -> list[int]:
    """Every count up to 16, every 4th to 64, every 8th to 512, then every 16th, and the token after each multiple of
    128, where matrix kernels need one row of tiles more."""
    kept = []
    for count in sorted(tokens):
        step = 1 if count <= 16 else 4 if count <= 64 else 8 if count <= 512 else 16
        if count % step == 0 or (count > 128 and count % 128 == 1):
            kept.append(count)
    return kept


def thin_batches(batches: Iterable[int]) -> list[int]:
    """Every batch up to 16, every 2nd to 32, every 4th to 64, then every 8th."""
    return [b for b in sorted(batches) if b % (1 if b <= 16 else 2 if b <= 32 else 4 if b <= 64 else 8) == 0]


def thin_contexts(contexts: Iterable[int]) -> list[int]:
    """The first, the last, and those an eighth larger than the one kept before."""
    ordered = sorted(contexts)
    kept = ordered[:1]
    for context in ordered[1:]:
        if context >= kept[-1] * 1.125 or context == ordered[-1]:
            kept.append(context)
    return kept


def surface(rows: Rows) -> Table:
    """A surface as data: one curve a row."""
    return {"knots": sorted(rows), "rows": [curve(rows[knot]) for knot in sorted(rows)]}


def mixed_factors(points: dict[MixedKey, float], prefill: Table, decode: Table) -> Table:
    """Attention of a mixed step over the sum of its parts, on the full grid of powers of two.

    Points that were not measured (their KV does not fit in memory) take the factor of the nearest smaller contexts.
    """
    axes = [sorted({key[axis] for key in points}) for axis in range(4)]
    # the grid that all profiles share: powers of two (a finer one, where there is one, was only measured in part)
    axes = [[value for value in axis if value and value & (value - 1) == 0] for axis in axes]
    axes[1] = [0, *axes[1]]
    before = Surface(tuple(map(float, prefill["knots"])), tuple(as_curve(row) for row in prefill["rows"]))
    after = Surface(tuple(map(float, decode["knots"])), tuple(as_curve(row) for row in decode["rows"]))
    factors = []
    for chunk in axes[0]:
        for start in axes[1]:
            for batch in axes[2]:
                last: float | None = None
                for context in axes[3]:
                    measured = points.get((chunk, start, batch, context))
                    if measured is not None:
                        last = measured / (before(chunk, start) + after(batch, context))
                    factors.append(last)
    filled = fill(factors, [len(axis) for axis in axes])
    return {"axes": axes, "factors": [round(value, 3) for value in filled]}


def fill(values: list[float | None], shape: Sequence[int]) -> list[float]:
    """Holes take the value before them along the second axis, then along the third."""
    strides = [shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1]
    filled = list(values)
    for axis in (1, 2, 0):
        for index, value in enumerate(filled):
            if value is None and index // strides[axis] % shape[axis] > 0:
                filled[index] = filled[index - strides[axis]]
    assert all(value is not None for value in filled)
    return [value for value in filled if value is not None]


def whole_table(profile: Profile, header: Table) -> Table:
    """Everything in the profile."""
    table = {
        **header,
        "num_layers": profile.num_layers,
        "tokens": curve(profile.tokens),
        "sequences": curve(profile.sequences),
        "prefill_attention": surface(profile.prefill),
        "decode_attention": surface(profile.decode),
    }
    table["mixed_attention"] = mixed_factors(profile.mixed, table["prefill_attention"], table["decode_attention"])
    return table


def thin_table(profile: Profile, header: Table) -> Table:
    """A subset of a dense profile; the rest of its points test it."""
    counts = thin_tokens(profile.tokens)
    return {
        **header,
        "num_layers": profile.num_layers,
        "tokens": curve(profile.tokens, counts),
        "sequences": curve(profile.sequences, [count for count in thin_tokens(profile.sequences) if count <= 512]),
        "prefill_attention": surface(thin_prefill(profile.prefill)),
        "decode_attention": surface(thin_decode(profile.decode)),
    }


def thin_decode(decode: Rows) -> Rows:
    """A subset of the measured batches and contexts; the others test the table."""
    return {
        batch: {context: decode[batch][context] for context in thin_contexts(decode[batch])}
        for batch in thin_batches(decode)
    }


def thin_prefill(prefill: Rows) -> Rows:
    """Chunks of 32, 64, 96, 128, then every 64th to 512, every 128th to 1024 and every 512th, thinned along the start;
    rows with fewer than three starts get one more, in proportion to the (query, key) pairs, from the last row that has
    them."""
    rows: Rows = {}
    rate = 0.0  # microseconds for each token of chunk and token of start
    for chunk in sorted(prefill):
        points = prefill[chunk]
        step = 32 if chunk <= 128 else 64 if chunk <= 512 else 128 if chunk <= 1024 else 512
        if chunk % step and chunk != 16:
            continue
        starts = sorted(points)
        kept = [start for start in starts if start == 0 or start in thin_contexts(starts[1:])]
        row = {start: points[start] for start in kept}
        if len(starts) >= 3:
            rate = (points[starts[-1]] - points[starts[1]]) / (starts[-1] - starts[1]) / chunk
        elif rate:
            row[4096] = points[starts[-1]] + rate * chunk * (4096 - starts[-1])
        rows[chunk] = row
    return rows


def header(name: str, hardware: str, model: str, tensor_parallel: int, engine: str, sources: list[Table]) -> Table:
    """What every table says about itself."""
    asynchronous = "0.19" in engine
    return {
        "name": name,
        "hardware": hardware,
        "model": model,
        "tensor_parallel": tensor_parallel,
        "engine": engine,
        "sources": sources,
        "overhead": {"knots": [1], "us": [0.0]},
        "overhead_source": ASYNC_OVERHEAD if asynchronous else NO_OVERHEAD,
        "skew_alpha": 0.0,
    }


def source(repository: str, path: str, licence: str, changes: str) -> Table:
    """Where numbers come from."""
    return {"repository": repository, "path": path, "licence": licence, "changes": changes}


SUMMED = (
    "operators of all layers summed over the layer count of the full model (the profile holds one layer); attention of "
    "mixed steps divided by the sum of its prefill and decode parts; unmeasured corners filled; rounded"
)
PER_SEQUENCE = "contexts of decodes divided by the batch; batches not measured up to 1,024 tokens each left out"
THINNED = "operators of all layers summed; token counts, batches and contexts thinned; rounded"


VLLM_PROFILES = (  # name, hardware, model, layers, experts, experts of each token
    ("rtx4090-llama-3.1-8b", "RTX4090", "meta-llama/Llama-3.1-8B", 32, 0, 0),
    ("rtxpro6000-llama-3.1-8b", "RTXPRO6000", "meta-llama/Llama-3.1-8B", 32, 0, 0),
    ("rtxpro6000-qwen3-32b", "RTXPRO6000", "Qwen/Qwen3-32B", 64, 0, 0),
    ("rtxpro6000-qwen3-30b-a3b", "RTXPRO6000", "Qwen/Qwen3-30B-A3B-Instruct-2507", 48, 128, 8),
)
SKEW_ALPHA = {  # alpha_default of tensor parallelism 1 in each profile's meta.yaml; the RTX 4090's was not measured
    "meta-llama/Llama-3.1-8B": 0.0543,
    "Qwen/Qwen3-32B": 0.057,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 0.0645,
}
H100_ATTENTION = "systems/data/h100_sxm/attention/vllm/0.24.0"
H100_ALL_REDUCE = "systems/data/h100_sxm/comm/vllm/0.24.0/custom_allreduce_perf.parquet"


def read_a6000_8b(folder: Path) -> Profile:
    """Llama-3.1-8B on one A6000."""
    path = folder / "llmservingsim/profiles/v0/A6000/meta-llama/Llama-3.1-8B/tp1"
    return read_artifact(path, 32, lambda tokens: 0.0)


def read_h100_70b(folder: Path) -> Profile:
    """Llama-3.1-70B on four H100 as a serving engine runs it: the artifact's matrix multiplications, vLLM's norms,
    rotary embedding, attention and all-reduce."""
    path = folder / "llmservingsim/profiles/v0/H100/meta-llama/Llama-3.1-70B/tp4"
    reduce_us = custom_all_reduce(folder / "aiconfigurator" / H100_ALL_REDUCE, 4, 8192)
    kernels_us = fused_kernels(folder / "vidur/compute/h100/meta-llama/Llama-2-70b-hf/mlp.csv.gz", 4)
    profile = read_artifact(path, 80, lambda tokens: 2 * reduce_us(tokens) + kernels_us(tokens), fused=True)
    prefill, decode = vllm_attention(folder / "aiconfigurator" / H100_ATTENTION, 16, 2)
    return replace(profile, prefill=prefill, decode=decode)


def read_h100_8b(folder: Path) -> Profile:
    """Llama-3.1-8B on one H100, in the same way."""
    kernels_us = fused_kernels(folder / "vidur/compute/h100/meta-llama/Llama-2-7b-hf/mlp.csv.gz", 1)
    path = folder / "llmservingsim/profiles/v0/H100/meta-llama/Llama-3.1-8B/tp1"
    profile = read_artifact(path, 32, kernels_us, fused=True)
    prefill, decode = vllm_attention(folder / "aiconfigurator" / H100_ATTENTION, 32, 8)
    return replace(profile, prefill=prefill, decode=decode)


def read_h100_70b_eager(folder: Path) -> Profile:
    """Llama-3.1-70B on four H100 as the artifact measured it, and vLLM's all-reduce."""
    path = folder / "llmservingsim/profiles/v0/H100/meta-llama/Llama-3.1-70B/tp4"
    reduce_us = custom_all_reduce(folder / "aiconfigurator" / H100_ALL_REDUCE, 4, 8192)
    return read_artifact(path, 80, lambda tokens: 2 * reduce_us(tokens))


def read_a100_70b(folder: Path) -> Profile:
    """Llama-2-70B on two A100."""
    path = folder / "vidur/compute/a100/meta-llama/Llama-2-70b-hf"
    reduce_us = vidur_all_reduce(folder / "vidur/network/a100_dgx/all_reduce.csv.gz", 2, 8192)
    return read_vidur(path / "mlp.csv.gz", path / "attention_tp2_flashattention_history.csv.gz", 80, reduce_us)


def h100_tables(folder: Path) -> Iterable[Table]:
    """Llama-3.1-70B on four H100: as the artifact measured its operators; with the kernels of a serving engine in
    place of those that none runs like that; and with the host's part of a synchronous engine added."""
    model, name = "meta-llama/Llama-3.1-70B", "h100-llama-3.1-70b-tp4"
    artifact = "profiler/v0/perf_models/H100/meta-llama/Llama-3.1-70B/tp4"
    core = "aic-core/src/aiconfigurator_core"
    added = "two all-reduces a layer, of the step's tokens times 8192 values, in a CUDA graph, added to the dense curve"
    network = source(AICONFIGURATOR, f"{core}/{H100_ALL_REDUCE}", "Apache-2.0", added)
    sources = [source(LLMSERVINGSIM, artifact, "MIT", f"{THINNED}; {PER_SEQUENCE}"), network]
    head = header(f"{name}-eager", "H100", model, 4, "ISPASS'26 artifact: operators of one layer, unfused", sources)
    yield thin_table(read_h100_70b_eager(folder), head)
    yield from served_tables(folder, name, model, 4, network)
    yield from served_tables(folder, "h100-llama-3.1-8b", "meta-llama/Llama-3.1-8B", 1, None)


def served_tables(folder: Path, name: str, model: str, tensor_parallel: int, network: Table | None) -> Iterable[Table]:
    """Kernels as a serving engine runs them: with an asynchronous host, then with a synchronous one."""
    is_large = tensor_parallel > 1
    artifact = f"profiler/v0/perf_models/H100/{model}/tp{tensor_parallel}"
    dimensions = "Llama-2-70b-hf" if is_large else "Llama-2-7b-hf"
    heads = "16 query heads, 2 key-value heads" if is_large else "32 query heads, 8 key-value heads"
    kernels = f"norms and rotary embedding at tensor parallelism {tensor_parallel}, added to the dense curve"
    sources = [
        source(LLMSERVINGSIM, artifact, "MIT", f"{THINNED}; without norms, rotary embedding and attention"),
        source(VIDUR, f"data/profiling/compute/h100/meta-llama/{dimensions}/mlp.csv", "MIT", kernels),
        source(AICONFIGURATOR, f"aic-core/src/aiconfigurator_core/{H100_ATTENTION}", "Apache-2.0",
               f"{heads}; later starts of prompts from the time of a (query, key) pair"),
        *([network] if network else []),
    ]  # fmt: skip
    profile = read_h100_70b(folder) if is_large else read_h100_8b(folder)
    engine = "fused kernels, attention of vLLM 0.24"
    head = header(name, "H100", model, tensor_parallel, engine, sources)
    yield thin_table(profile, head)
    measured_on = f"{dimensions}, tensor parallelism {tensor_parallel}, host of an A100"
    changes = f"scheduling, inputs, sampler and outputs summed by batch ({measured_on})"
    host = source(VIDUR, "data/profiling/a100/cpu_overheads (history, blob bf106186)", "MIT", changes)
    engine = f"{engine}, synchronous host"
    head = header(f"{name}-sync", "H100", model, tensor_parallel, engine, [*sources, host])
    overheads = folder / "vidur/compute/a100_cpu_overheads_history.csv"
    head["overhead"] = host_overhead(overheads, f"meta-llama/{dimensions}", tensor_parallel)
    head["overhead_source"] = "measured on the host of a synchronous engine of 2024; see sources"
    yield thin_table(profile, head)


def derive(folder: Path) -> Iterable[Table]:
    """All tables, one after the other."""
    for name, hardware, model, layers, experts, top_k in VLLM_PROFILES:
        path = f"{hardware}/{model}/bf16/tp1"
        extra = "; experts at the number that uniform routing touches" if experts else ""
        origin = source(LLMSERVINGSIM, f"profiler/perf/{path}", "MIT", SUMMED + extra)
        head = header(name, hardware, model, 1, "vLLM 0.19.0, eager kernels", [origin])
        head["skew_alpha"] = 0.0 if hardware == "RTX4090" else SKEW_ALPHA[model]
        yield whole_table(read_vllm(folder / "llmservingsim/profiles" / path, layers, experts, top_k), head)
    path = "profiler/v0/perf_models/A6000/meta-llama/Llama-3.1-8B/tp1"
    origin = source(LLMSERVINGSIM, path, "MIT", f"{THINNED}; {PER_SEQUENCE}")
    head = header("a6000-llama-3.1-8b", "A6000", "meta-llama/Llama-3.1-8B", 1, "ISPASS'26 artifact", [origin])
    yield thin_table(read_a6000_8b(folder), head)
    yield from h100_tables(folder)
    changes = THINNED + "; all-reduce of two GPUs of a DGX; the profile holds no output layer and no sampler"
    origin = source(VIDUR, "data/profiling/{compute,network}/a100*", "MIT", changes)
    model = "meta-llama/Llama-2-70b-hf"
    head = header("a100-llama-2-70b-tp2", "A100-80GB", model, 2, "vidur's profiler, FlashAttention", [origin])
    yield thin_table(read_a100_70b(folder), head)


def main() -> None:
    """Write every table, or the one that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only")
    options = parser.parse_args()
    TABLES.mkdir(parents=True, exist_ok=True)
    total = 0
    for table in derive(options.folder):
        if options.only in (None, table["name"]):
            text = json.dumps(table, separators=(",", ":")).encode()
            target = TABLES / f"{table['name']}.json.gz"
            target.write_bytes(gzip.compress(text, 9, mtime=0))
            total += target.stat().st_size
            print(f"{target.name}: {target.stat().st_size} bytes")
    print(f"{total} bytes in all")


if __name__ == "__main__":
    main()
