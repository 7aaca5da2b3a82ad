"""Derives the operator tables of the simulator from aiconfigurator's measurements.

    python scripts/derive_operator_tables.py FOLDER [--only NAME]

FOLDER holds ``systems/data/<gpu>/...`` of ai-dynamo/aiconfigurator (parquet; reading it needs pyarrow and pandas).
Writes one file a GPU to src/diptych/simulation/catalogue/operators/, each with its source, licence and what was
changed. Selects, averages rows that were measured twice, and rounds: no number is fitted or filled in.
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import pandas

OPERATORS = Path(__file__).parent.parent / "src" / "diptych" / "simulation" / "catalogue" / "operators"
SUFFIX = ".json.gz"
REPOSITORY = "ai-dynamo/aiconfigurator @ 095f58a"
LICENCE = "Apache-2.0, Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES"
CHANGES = (
    "matrix products with both dimensions from 128 on, in bfloat16 and per-tensor fp8; attention without a window, "
    "of head dimensions 64 and 128; experts in bfloat16, block-wise fp8 and int4, split by width or by expert, of one "
    "routing distribution; all-reduce in a captured graph and NCCL's; milliseconds became microseconds, rounded to "
    "four digits; rows measured twice were averaged"
)
GPUS = {  # name in the hardware catalogue: folder of the source
    "a100-80gb": "a100_sxm",
    "h100-sxm": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "l40s": "l40s",
}
SMALLEST = 128  # dimension of a matrix; models have no smaller one
HEAD_DIMS = (64, 128)
ROUTING = "power_law_1.01"  # expert popularity ~ rank ** -1.01, the one that every GPU was measured with
# By bits. 8: blocks of 128 x 128 weights with a scale, as the 8-bit checkpoints of DeepSeek and Qwen have them; the
# per-tensor kernels that were measured are slower than those of 16 bits on the same GPU, and no engine would take them.
EXPERT_TYPES = {"16": "bfloat16", "8": "fp8_block", "4": "int4_wo"}
Table = dict[str, Any]


def read(folder: Path, gpu: str, file: str) -> tuple[pandas.DataFrame, str]:
    """A table and its path in the source."""
    (path,) = (folder / "systems" / "data" / gpu).rglob(file)
    frame = pandas.read_parquet(path)
    frame["us"] = frame["latency"] * 1000.0
    return frame, f"aic-core/src/aiconfigurator_core/{path.relative_to(folder)}"


def rounded(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


def curve(frame: pandas.DataFrame, knot: str) -> Table:
    """Microseconds over one column."""
    mean = frame.groupby(knot)["us"].mean().sort_index()
    return {"knots": [int(value) for value in mean.index], "us": [rounded(value) for value in mean]}


def gemm(frame: pandas.DataFrame, dtype: str) -> list[Table]:
    """One curve over tokens for each (outputs n, inputs k)."""
    frame = frame[(frame.gemm_dtype == dtype) & (frame.n >= SMALLEST) & (frame.k >= SMALLEST)]
    return [{"n": int(n), "k": int(k), **curve(rows, "m")} for (n, k), rows in frame.groupby(["n", "k"])]


def attention(frame: pandas.DataFrame, knot: str) -> list[Table]:
    """For each (head dimension, bits of the cache, heads, KV heads) a curve over ``knot`` for each batch size."""
    if "window_size" in frame:
        frame = frame[frame.window_size == 0]
    tables = []
    for kv_dtype, bits in (("bfloat16", 16), ("fp8", 8)):
        chosen = frame[frame.head_dim.isin(HEAD_DIMS) & (frame.kv_cache_dtype == kv_dtype)]
        if knot == "step":
            chosen = chosen.assign(step=chosen.step + chosen.isl)  # tokens that the new one attends to, itself included
        if bits == 8:
            chosen = chosen[chosen.head_dim == 128]
        for (dim, heads, kv_heads), rows in chosen.groupby(["head_dim", "num_heads", "num_key_value_heads"]):
            batches = [{"batch": int(batch), **curve(points, knot)} for batch, points in rows.groupby("batch_size")]
            tables.append({"head_dim": int(dim), "kv_bits": bits, "heads": int(heads), "kv_heads": int(kv_heads),
                           "rows": batches})  # fmt: skip
    return tables


def experts(frame: pandas.DataFrame, dtype: str) -> list[Table]:
    """For each shape of experts, and each number of devices that share their width or have experts of their own, a
    curve over tokens."""
    frame = frame[(frame.moe_dtype == dtype) & (frame.distribution == ROUTING)]
    frame = frame[(frame.moe_tp_size <= 8) & (frame.moe_ep_size <= 32)]
    keys = ["hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"]
    names = ("hidden", "intermediate", "experts_per_token", "experts", "tensor_parallel", "expert_parallel")
    return [
        {**dict(zip(names, (int(value) for value in key), strict=True)), **curve(rows, "num_tokens")}
        for key, rows in frame.groupby(keys)
    ]


def all_reduce(custom: pandas.DataFrame, nccl: pandas.DataFrame) -> list[Table]:
    """For each number of devices a curve over the values (16 bits each) of the message: the kernel of vLLM in a
    captured graph where it was measured, NCCL's elsewhere."""
    custom = custom[custom.kernel_source == "vLLM_custom_graph"]
    nccl = nccl[(nccl.op_name == "all_reduce") & (nccl.nccl_dtype == "half")]
    tables = []
    for devices in (2, 4, 8):
        for kernel, frame in (("custom", custom), ("nccl", nccl)):
            rows = frame[frame.num_gpus == devices]
            if len(rows):
                tables.append({"devices": devices, "kernel": kernel, **curve(rows, "message_size")})
    return tables


def derive(folder: Path, name: str) -> Table:
    """All tables of one GPU."""
    gpu = GPUS[name]
    frames, sources = {}, []
    for file in ("gemm", "context_attention", "generation_attention", "moe", "custom_allreduce", "nccl"):
        frames[file], path = read(folder, gpu, f"{file}_perf.parquet")
        sources.append({"repository": REPOSITORY, "path": path, "licence": LICENCE, "changes": CHANGES})
    products = frames["gemm"]
    return {
        "hardware": name,
        "device": str(products.device.iloc[0]),
        "engine": f"vLLM {products.version.iloc[0]}",
        "routing": ROUTING,
        "sources": sources,
        "gemm": {"16": gemm(products, "bfloat16"), "8": gemm(products, "fp8")},
        "prefill_attention": attention(frames["context_attention"], "isl"),
        "decode_attention": attention(frames["generation_attention"], "step"),
        "experts": {bits: experts(frames["moe"], dtype) for bits, dtype in EXPERT_TYPES.items()},
        "all_reduce": all_reduce(frames["custom_allreduce"], frames["nccl"]),
    }


def main() -> None:
    """Write the file of every GPU, or of the one that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=tuple(GPUS))
    options = parser.parse_args()
    OPERATORS.mkdir(parents=True, exist_ok=True)
    for name in GPUS:
        if options.only in (None, name):
            text = json.dumps(derive(options.folder, name), separators=(",", ":")).encode()
            target = OPERATORS / f"{name}{SUFFIX}"
            target.write_bytes(gzip.compress(text, 9, mtime=0))
            print(f"{target.name}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
