"""Derive the layer tables of the catalogue from the published profiles in FOLDER.

    python scripts/derive_layer_tables.py FOLDER [--only NAME]

FOLDER holds ``llmservingsim``, ``vidur`` and ``aiconfigurator`` as their authors published them. Writes
src/diptych/simulation/catalogue/tables/*.json.gz, each with its sources, licences and what was changed inside. The same
input gives the same bytes. Reading the all-reduce tables (parquet) needs pyarrow; nothing else does.

What is done to the measurements: the operators of all layers are summed into one curve over the tokens of a step, the
collectives of tensor parallelism (which no layer profile holds) are added from all-reduce measurements of the same
GPU or, where there are none, from the law of its link, dense grids are thinned, and attention of mixed steps is kept as
a factor on the sum of its two parts. What no source measured stands in a table's ``assumptions``.
"""

import argparse
import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from layer_profiles import (
    MixedKey,
    Profile,
    Rows,
    Table,
    as_curve,
    curve,
    expert_time,
    read_vidur,
    read_vllm,
    vidur_all_reduce,
)
from served_profiles import (
    H100_ALL_REDUCE,
    H100_ATTENTION,
    link_all_reduce,
    read_a6000_8b,
    read_a6000_8b_eager,
    read_h100_70b_eager,
    read_h100_llama_3,
    read_vidur_layers,
)

from diptych.simulation.costs.interpolation import Surface

TABLES = Path(__file__).parent.parent / "src" / "diptych" / "simulation" / "catalogue" / "tables"

LLMSERVINGSIM = "casys-kaist/LLMServingSim @ 5daddb2"
VIDUR = "microsoft/vidur @ 7d47513 (attention: history, blob ee3dec76)"
AICONFIGURATOR = "ai-dynamo/aiconfigurator @ 095f58a"
NO_OVERHEAD = "0: the profile holds kernels only, and no source measures the host's part for this engine"
UNFUSED_ENGINE = "ISPASS'26 artifact: operators of one layer, unfused"
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
    return {
        **sparse_table(profile, header),
        "prefill_attention": surface(thin_prefill(profile.prefill)),
        "decode_attention": surface(thin_decode(profile.decode)),
    }


def sparse_table(profile: Profile, header: Table) -> Table:
    """A profile whose attention was measured at few points; its token counts are thinned."""
    return {
        **header,
        "num_layers": profile.num_layers,
        "tokens": curve(profile.tokens, thin_tokens(profile.tokens)),
        "sequences": curve(profile.sequences, [count for count in thin_tokens(profile.sequences) if count <= 512]),
        "prefill_attention": surface(profile.prefill),
        "decode_attention": surface(profile.decode),
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


def header(
    name: str, hardware: str, model: str, tensor_parallel: int, engine: str, sources: list[Table], kernels: str = ""
) -> Table:
    """What every table says about itself. kernels: see TableInfo."""
    return {
        "name": name,
        "hardware": hardware,
        "model": model,
        "tensor_parallel": tensor_parallel,
        "data_parallel": 1,
        "expert_parallel": 1,
        "engine": engine,
        "kernels": kernels,
        "assumptions": [],
        "sources": sources,
        "overhead": {"knots": [1], "us": [0.0]},
        "overhead_source": ASYNC_OVERHEAD if kernels == "vllm-0.19" else NO_OVERHEAD,
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


@dataclass(frozen=True)
class VllmProfile:
    """A profile of vLLM 0.19. skew_alpha: alpha_default of the profile's meta.yaml (0: not measured). groups: of
    devices with sequences of their own, which share the experts out among them."""

    name: str
    hardware: str
    model: str
    layers: int
    hidden: int
    tensor_parallel: int = 1
    skew_alpha: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    groups: int = 1

    @property
    def path(self) -> str:
        """The folder of the profile."""
        return f"{self.hardware}/{self.model}/bf16/tp{self.tensor_parallel}"

    def read(self, folder: Path) -> Profile:
        """The measurements; without groups with the experts and the collectives."""
        profile = read_vllm(folder / "llmservingsim/profiles" / self.path, self.layers)
        if self.groups > 1:
            return profile
        tokens = {count: value + self.shared_us(folder, count) for count, value in profile.tokens.items()}
        return replace(profile, tokens=tokens)

    def shared_us(self, folder: Path, tokens: int) -> float:
        """What all devices do together in all layers: experts, and two all-reduces or, between groups, sending tokens
        to their experts and the sums back."""
        devices, total = self.tensor_parallel * self.groups, 0.0
        if self.experts:
            root = folder / "llmservingsim/profiles" / self.hardware / self.model
            path = root / "bf16/tp1/moe.csv"  # the only one that was measured
            total += experts_of(path, self.experts, self.experts_per_token, devices)(tokens)
        if devices > 1:
            total += (2 if self.groups == 1 else 1) * link_all_reduce(self.hardware, devices, self.hidden)(tokens)
        return self.layers * total


experts_of = cache(expert_time)
LLAMA_8B, QWEN_32B, QWEN_30B_A3B = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B-Instruct-2507"
VLLM_PROFILES = (
    VllmProfile("rtx4090-llama-3.1-8b", "RTX4090", LLAMA_8B, 32, 4096),
    VllmProfile("rtxpro6000-llama-3.1-8b", "RTXPRO6000", LLAMA_8B, 32, 4096, 1, 0.0543),
    VllmProfile("rtxpro6000-llama-3.1-8b-tp2", "RTXPRO6000", LLAMA_8B, 32, 4096, 2, 0.0654),
    VllmProfile("rtxpro6000-qwen3-32b", "RTXPRO6000", QWEN_32B, 64, 5120, 1, 0.057),
    VllmProfile("rtxpro6000-qwen3-32b-tp2", "RTXPRO6000", QWEN_32B, 64, 5120, 2, 0.0649),
    VllmProfile("rtxpro6000-qwen3-30b-a3b", "RTXPRO6000", QWEN_30B_A3B, 48, 2048, 1, 0.0645, 128, 8),
    VllmProfile("rtxpro6000-qwen3-30b-a3b-tp2", "RTXPRO6000", QWEN_30B_A3B, 48, 2048, 2, 0.0748, 128, 8),
    VllmProfile("rtxpro6000-qwen3-30b-a3b-dp2-ep2", "RTXPRO6000", QWEN_30B_A3B, 48, 2048, 1, 0.0645, 128, 8, groups=2),
)
LINK = (
    "two all-reduces a layer take 2 x 20 us + bytes / (16 GB/s): the link that LLMServingSim's authors state for their "
    "host of RTX PRO 6000, without a measurement"
)
EXCHANGE = LINK.replace("two all-reduces a layer take", "sending tokens to their experts and sums back takes")
GROUPS = "both groups of devices have equal numbers of tokens and sequences"
UNIFORM = "every token chooses its experts at random"
HALF_EXPERTS = "each device computes half of the experts' work in half of the time that one device takes for it"
A6000_KERNELS = (
    "norms and rotary embedding follow the roofline of the hardware entry",
    "decode attention is that of vLLM 0.19 on an RTX 4090, slower by the ratio of the memory bandwidths",
)
LATER_STARTS = (
    "prompts after a prefix take the time of their (query, key) pairs; only prompts without one were measured"
)
VIDUR_LAYERS = (  # hardware, prefix of the names, folder of the dimensions, model, numbers of devices
    ("a100-80gb", "a100", "Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf", (1, 2, 4)),
    ("a100-80gb", "a100", "Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B", (1, 2, 4, 8)),
    ("a100-80gb", "a100", "Llama-2-70b-hf", "meta-llama/Llama-2-70b-hf", (2, 4, 8)),
    ("a100-80gb", "a100", "Meta-Llama-3-70B", "meta-llama/Meta-Llama-3-70B", (2, 4, 8)),
    ("h100-sxm", "h100", "Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf", (1, 2, 4)),
    ("h100-sxm", "h100", "Llama-2-70b-hf", "meta-llama/Llama-2-70b-hf", (2, 4, 8)),
    ("h100-sxm", "h100", "Llama-2-70b-hf", "meta-llama/Llama-3.1-70B", (2, 8)),
)


def read_a100_70b(folder: Path) -> Profile:
    """Llama-2-70B on two A100."""
    path = folder / "vidur/compute/a100/meta-llama/Llama-2-70b-hf"
    reduce_us = vidur_all_reduce(folder / "vidur/network/a100_dgx/all_reduce.csv.gz", 2, 8192)
    return read_vidur(path / "mlp.csv.gz", path / "attention_tp2_flashattention_history.csv.gz", 80, reduce_us)


def vllm_tables(folder: Path) -> Iterable[Table]:
    """Whole profiles of vLLM 0.19."""
    for profile in VLLM_PROFILES:
        extra = "; experts at the number that uniform routing touches" if profile.experts else ""
        origin = source(LLMSERVINGSIM, f"profiler/perf/{profile.path}", "MIT", SUMMED + extra)
        devices, engine = profile.tensor_parallel, "vLLM 0.19.0, eager kernels"
        head = header(profile.name, profile.hardware, profile.model, devices, engine, [origin], "vllm-0.19")
        head["skew_alpha"] = profile.skew_alpha
        head["data_parallel"] = head["expert_parallel"] = profile.groups
        head["assumptions"] = [
            *([UNIFORM] if profile.experts else []),
            *([HALF_EXPERTS] if profile.experts and devices * profile.groups > 1 else []),
            *([LINK] if devices > 1 else []),
            *([GROUPS, EXCHANGE] if profile.groups > 1 else []),
        ]
        table = whole_table(measured := profile.read(folder), head)
        if profile.groups > 1:
            counts = [profile.groups * count for count in measured.tokens]
            table["shared"] = curve({count: profile.shared_us(folder, count) for count in counts})
        yield table


def a6000_tables(folder: Path) -> Iterable[Table]:
    """Llama-3.1-8B on A6000: with the kernels of a serving engine, and as the artifact measured its operators."""
    name, root = "a6000-llama-3.1-8b", "profiler/v0/perf_models/A6000/meta-llama/Llama-3.1-8B"
    other = source(LLMSERVINGSIM, "profiler/perf/RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1", "MIT", A6000_KERNELS[1])
    for devices in (1, 2):
        changes = f"{THINNED}; without norms, rotary embedding and decode attention"
        sources = [source(LLMSERVINGSIM, f"{root}/tp{devices}", "MIT", changes), other]
        suffix = "" if devices == 1 else "-tp2"
        engine = "ISPASS'26 artifact, attention of vLLM 0.19"
        head = header(name + suffix, "A6000", LLAMA_8B, devices, engine, sources, "vllm-0.19")
        head["assumptions"] = [*A6000_KERNELS, *([LINK] if devices > 1 else [])]
        head["overhead_source"] = NO_OVERHEAD
        yield thin_table(read_a6000_8b(folder, devices), head)
    origin = source(LLMSERVINGSIM, f"{root}/tp1", "MIT", f"{THINNED}; {PER_SEQUENCE}")
    head = header(f"{name}-eager", "A6000", LLAMA_8B, 1, UNFUSED_ENGINE, [origin], "unfused")
    yield thin_table(read_a6000_8b_eager(folder), head)


def h100_tables(folder: Path) -> Iterable[Table]:
    """Llama-3.1 on H100: with the kernels of a serving engine, and (70B) as the artifact measured its operators."""
    large, model = "h100-llama-3.1-70b-tp4", "meta-llama/Llama-3.1-70B"
    core = "aic-core/src/aiconfigurator_core"
    added = "two all-reduces a layer, of the activations of the step, in a CUDA graph, added to the dense curve"
    network = source(AICONFIGURATOR, f"{core}/{H100_ALL_REDUCE}", "Apache-2.0", added)
    artifact = "profiler/v0/perf_models/H100/meta-llama/Llama-3.1-"
    sources = [source(LLMSERVINGSIM, f"{artifact}70B/tp4", "MIT", f"{THINNED}; {PER_SEQUENCE}"), network]
    head = header(f"{large}-eager", "H100", model, 4, UNFUSED_ENGINE, sources, "unfused")
    yield thin_table(read_h100_70b_eager(folder), head)
    for name, size, devices in ((large, "70B", 4), ("h100-llama-3.1-8b", "8B", 1), ("h100-llama-3.1-8b-tp2", "8B", 2)):
        dimensions = "Llama-2-70b-hf" if size == "70B" else "Llama-2-7b-hf"
        heads = f"{(64 if size == '70B' else 32) // devices} query heads, {8 // devices} key-value heads"
        kernels = f"norms and rotary embedding at tensor parallelism {devices}, added to the dense curve"
        sources = [
            source(LLMSERVINGSIM, f"{artifact}{size}/tp{devices}", "MIT",
                   f"{THINNED}; without norms, rotary embedding and attention"),
            source(VIDUR, f"data/profiling/compute/h100/meta-llama/{dimensions}/mlp.csv", "MIT", kernels),
            source(AICONFIGURATOR, f"{core}/{H100_ATTENTION}", "Apache-2.0", heads),
            *([network] if devices > 1 else []),
        ]  # fmt: skip
        engine = "fused kernels, attention of vLLM 0.24"
        head = header(name, "H100", f"meta-llama/Llama-3.1-{size}", devices, engine, sources, "vllm-0.24")
        head["assumptions"] = [LATER_STARTS]
        yield thin_table(read_h100_llama_3(folder, size, devices), head)


def vidur_tables(folder: Path) -> Iterable[Table]:
    """Layers as vidur measured them, behind vLLM's attention, output layer and all-reduce; and Llama-2-70B on two A100
    with vidur's own attention."""
    for hardware, prefix, dimensions, model, sizes in VIDUR_LAYERS:
        version = "0.14" if prefix == "a100" else "0.24"
        changes = f"{THINNED}; layers of {dimensions}, norms with their additions"
        origin = source(VIDUR, f"data/profiling/compute/{prefix}/meta-llama/{dimensions}/mlp.csv", "MIT", changes)
        added = f"attention, output layer and all-reduce of vLLM {version}, as catalogue/operators holds them"
        kernels = source(
            AICONFIGURATOR, f"aic-core/src/aiconfigurator_core/systems/data/{prefix}_sxm", "Apache-2.0", added
        )
        short = model.partition("/")[2].lower().removeprefix("meta-").removesuffix("-hf")
        for devices in sizes:
            name = f"{prefix}-{short}" + (f"-tp{devices}" if devices > 1 else "")
            engine = f"vidur's layers, attention of vLLM {version}"
            head = header(name, hardware, model, devices, engine, [origin, kernels], f"vllm-{version}")
            head["assumptions"] = [LATER_STARTS, "the sampler follows the roofline of the hardware entry"]
            yield sparse_table(read_vidur_layers(folder, hardware, dimensions, model, devices), head)
    changes = THINNED + "; all-reduce of two GPUs of a DGX; the profile holds no output layer and no sampler"
    origin = source(VIDUR, "data/profiling/{compute,network}/a100*", "MIT", changes)
    model, engine = "meta-llama/Llama-2-70b-hf", "vidur's profiler, FlashAttention"
    head = header("a100-llama-2-70b-tp2-vidur", "A100-80GB", model, 2, engine, [origin], "vidur")
    head["assumptions"] = ["the output layer and the sampler take no time"]
    yield thin_table(read_a100_70b(folder), head)


def derive(folder: Path) -> Iterable[Table]:
    """All tables, one after the other."""
    for tables in (vllm_tables, a6000_tables, h100_tables, vidur_tables):
        yield from tables(folder)


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
