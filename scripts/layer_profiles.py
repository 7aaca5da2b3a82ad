"""Readers of published layer profiles, each into the same record. Writes nothing; see derive_layer_tables.py."""

import csv
import gzip
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diptych.simulation.costs.interpolation import Curve, Surface

Table = dict[str, Any]
Rows = dict[int, dict[int, float]]
MixedKey = tuple[int, int, int, int]


@dataclass
class Profile:
    """One profile as read, in microseconds. tokens: dense operators of all layers by tokens of the step. sequences: by
    sequences that sample. Of one layer: prefill[chunk][start], decode[batch][context],
    mixed[chunk, start, batch, context]."""

    num_layers: int
    tokens: dict[int, float]
    sequences: dict[int, float]
    prefill: Rows
    decode: Rows
    mixed: dict[MixedKey, float] = field(default_factory=dict)


def rows_of(path: Path) -> Iterable[dict[str, str]]:
    """Rows of a CSV file, gzip or not."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as stream:
        yield from csv.DictReader(stream)


def curve(points: dict[int, float], knots: Iterable[int] | None = None) -> Table:
    """A curve as data: knots and microseconds."""
    chosen = sorted(points) if knots is None else list(knots)
    return {"knots": chosen, "us": [round(points[knot], 2) for knot in chosen]}


def as_curve(table: Table) -> Curve:
    """The function that the data stand for."""
    return Curve(tuple(map(float, table["knots"])), tuple(table["us"]))


def read_vllm(folder: Path, num_layers: int) -> Profile:
    """A profile of vLLM 0.19 (LLMServingSim's present format): dense, per_sequence, attention. Without experts and
    collectives."""
    times = {"embedding": 1, "final_layernorm": 1, "layernorm": 2 * num_layers}
    tokens: dict[int, float] = defaultdict(float)
    for row in rows_of(folder / "dense.csv"):
        tokens[int(row["tokens"])] += times.get(row["layer"], num_layers) * float(row["time_us"])
    sequences: dict[int, float] = defaultdict(float)
    for row in rows_of(folder / "per_sequence.csv"):
        sequences[int(row["sequences"])] += float(row["time_us"])
    profile = Profile(num_layers, tokens, sequences, defaultdict(dict), defaultdict(dict))
    for row in rows_of(folder / "attention.csv"):
        chunk, start = int(row["prefill_chunk"]), int(row["kv_prefill"])
        batch, context = int(row["n_decode"]), int(row["kv_decode"])
        if not batch:
            profile.prefill[chunk][start] = float(row["time_us"])
        elif not chunk:
            profile.decode[batch][context] = float(row["time_us"])
        else:
            profile.mixed[chunk, start, batch, context] = float(row["time_us"])
    return profile


def expert_time(path: Path, num_experts: int, top_k: int, num_devices: int = 1) -> Callable[[int], float]:
    """Microseconds of the experts of one layer on one device, when routing is uniform: E * (1 - (1 - k/E)^tokens) of E
    experts are touched by a step on average.

    Measured was one device that holds all of them. On one of several, the time is that of its share of the experts and
    of the visits, whether it holds whole experts or a part of each: both bytes and products are that share.
    """
    by_tokens: dict[int, dict[int, float]] = defaultdict(dict)
    for row in rows_of(path):
        by_tokens[int(row["tokens"])][int(row["activated_experts"])] = float(row["time_us"])
    counts = sorted(by_tokens)
    curves = tuple(as_curve(curve(by_tokens[count])) for count in counts)
    measured = Surface(tuple(map(float, counts)), curves)
    fewest = min(by_tokens[counts[0]])

    def time(tokens: int) -> float:
        touched = num_experts * (1.0 - (1.0 - top_k / num_experts) ** tokens) / num_devices
        share = measured(tokens / num_devices, max(touched, fewest))
        return share * min(1.0, touched / fewest)  # fewer experts than were ever measured: as many bytes less

    return time


UNFUSED = ("input_layernorm", "post_layernorm", "rope")
MIN_CONTEXT = 1024  # batches that were not measured up to here say nothing of real ones


def read_artifact(folder: Path, num_layers: int, added_us: Callable[[int], float], *, fused: bool = False) -> Profile:
    """A profile of LLMServingSim's ISPASS'26 artifact: every operator at 1..2048 tokens, prefill and decode attention
    apart (flash_attn_varlen_func). ``added_us``: microseconds to add to each layer by tokens (collectives, other
    kernels). fused: without the norms and rotary embeddings, which the artifact ran as chains of elementwise kernels
    (18 microseconds for the norm of one token where a fused kernel takes 6).

    kv_cache_size of a decode counts the tokens of the whole batch there (the artifact splits it among the sequences):
    it is divided here. Batches not measured up to MIN_CONTEXT tokens each are left out.
    """
    layers: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows_of(folder / "layers.csv.gz"):
        layers[row["layer_name"]][int(row["input"])] = float(row["latency(ns)"]) / 1000
    tokens = {count: num_layers * added_us(count) for count in layers["q_proj"]}
    for name, points in layers.items():
        if name not in ("lm_head", "attn", *(UNFUSED if fused else ())):
            for count, value in points.items():
                tokens[count] += value * (1 if name in ("embedding", "final_layernorm") else num_layers)
    prefill, totals = attention_points(path) if (path := folder / "attention.csv.gz").exists() else ({}, {})
    for chunk in (*prefill, 16, 1536, 2048):
        prefill.setdefault(chunk, {})[0] = layers["attn"][chunk]
    decode = {
        batch: {total // batch: value for total, value in row.items() if total >= batch}
        for batch, row in totals.items()
        if max(row) // batch >= MIN_CONTEXT
    }
    return Profile(num_layers, tokens, layers["lm_head"], prefill, decode)


def vllm_attention(folder: Path, num_heads: int, num_kv_heads: int) -> tuple[Rows, Rows]:
    """vLLM's attention of one layer as aiconfigurator measured it (16 bit, heads of 128, no window): prefill, decode.

    Its prompts start at 0; for later starts the time of a (query, key) pair is taken from the two longest.
    """
    import pyarrow.parquet

    def measured(kind: str) -> list[Table]:
        rows = pyarrow.parquet.read_table(folder / f"{kind}_attention_perf.parquet").to_pylist()
        wanted = {
            "num_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": 128,
            "window_size": 0,
            "kv_cache_dtype": "bfloat16",
            "attn_dtype": "bfloat16",
        }
        return [row for row in rows if all(row[key] == value for key, value in wanted.items())]

    decode: Rows = defaultdict(dict)
    for row in measured("generation"):
        decode[row["batch_size"]][row["isl"] + row["step"]] = 1000 * row["latency"]
    prompts = {row["isl"]: 1000 * row["latency"] for row in measured("context") if row["batch_size"] == 1}
    shorter, longer = sorted(prompts)[-2:]
    pair_us = 2 * (prompts[longer] - prompts[shorter]) / (longer**2 - shorter**2)
    prefill = {count: {0: value, 8192: value + pair_us * count * 8192} for count, value in prompts.items()}
    return prefill, decode


def fused_kernels(compute: Path, tensor_parallel: int) -> Callable[[int], float]:
    """Microseconds of both norms and the rotary embedding of one layer, as vidur measured vLLM's kernels."""
    points: dict[int, float] = {}
    for row in rows_of(compute):
        if row["num_tensor_parallel_workers"] == str(tensor_parallel):
            names = ("input_layernorm", "post_attention_layernorm", "attn_rope")
            points[int(row["num_tokens"])] = 1000 * sum(float(row[f"time_stats.{name}.median"]) for name in names)
    return as_curve(curve(points))


def attention_points(path: Path) -> tuple[Rows, Rows]:
    """Medians of an attention profile in vidur's format: prefill[chunk][start], decode[batch][context]."""
    prefill: Rows = defaultdict(dict)
    decode: Rows = defaultdict(dict)
    for row in rows_of(path):
        context = int(row["kv_cache_size"])
        if row["is_prefill"] == "True":
            prefill[int(row["prefill_chunk_size"])][context] = 1000 * float(row["time_stats.attn_prefill.median"])
        else:
            decode[int(row["batch_size"])][context] = 1000 * float(row["time_stats.attn_decode.median"])
    return prefill, decode


def read_vidur(compute: Path, attention: Path, num_layers: int, reduce_us: Callable[[int], float]) -> Profile:
    """vidur's A100 profile of one model at tensor parallelism 2: projections and MLP, attention, all-reduce."""
    operators = (
        "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj", "post_attention_layernorm", "mlp_up_proj",
        "mlp_act", "mlp_down_proj", "add", "add",
    )  # fmt: skip
    tokens: dict[int, float] = {}
    for row in rows_of(compute):
        if row["num_tensor_parallel_workers"] == "2":
            count = int(row["num_tokens"])
            layer = 1000 * sum(float(row[f"time_stats.{name}.median"]) for name in operators) + 2 * reduce_us(count)
            tokens[count] = num_layers * layer + 1000 * float(row["time_stats.emb.median"])
    prefill, decode = attention_points(attention)
    return Profile(num_layers, tokens, {1: 0.0}, prefill, decode)


def custom_all_reduce(path: Path, num_gpus: int, hidden_size: int) -> Callable[[int], float]:
    """Microseconds of vLLM's custom all-reduce inside a CUDA graph for the activations of some tokens (16 bit)."""
    import pyarrow.parquet

    points = {
        row["message_size"]: 1000 * row["latency"]  # message_size counts elements
        for row in pyarrow.parquet.read_table(path).to_pylist()
        if row["num_gpus"] == num_gpus and row["backend"] == "vllm_graph"
    }
    measured = as_curve(curve(points))
    return lambda tokens: measured(tokens * hidden_size)


def vidur_all_reduce(path: Path, num_gpus: int, hidden_size: int) -> Callable[[int], float]:
    """Microseconds of an all-reduce (NCCL) among GPUs of one node, from vidur's network profile."""
    points = {
        int(row["size"]): 1000 * float(row["time_stats.all_reduce.median"])
        for row in rows_of(path)
        if row["num_workers"] == row["devices_per_node"] == str(num_gpus)
    }
    measured = as_curve(curve(points))
    return lambda tokens: measured(tokens * hidden_size * 2)
