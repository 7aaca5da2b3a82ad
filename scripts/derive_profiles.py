"""Derive the step-time profiles of benchmarks/profiled_costs.py from the published ones in FOLDER.

    python scripts/derive_profiles.py FOLDER

FOLDER holds ``distserve`` and ``splitwise-sim`` as their authors published them. Writes
benchmarks/data/profiles/*.json, each with source, licence and what was changed inside. The same input
gives the same bytes. Times are milliseconds.
"""

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

PROFILES = Path(__file__).parent.parent / "benchmarks" / "data" / "profiles"
Entry = dict[str, Any]
Points = dict[int, float]

# (layers, KV heads, head size) of the models, for the bytes of a token's keys and values in 16 bits
KV_SHAPES = {
    "opt-13b": (40, 40, 128),
    "opt-66b": (64, 72, 128),
    "bloom-176b": (70, 112, 128),
    "llama-2-70b": (80, 8, 128),
}
SPLITWISE_MODELS = {"bloom-176b": "bloom-176b", "llama2-70b": "llama-2-70b"}
SPLITWISE_HARDWARE = {"a100-80gb": "a100-80", "h100-80gb": "h100"}
MIXED_FACTOR = 1.1  # the authors' simulator: a step with both phases takes so much longer than a prefill of its tokens


def kv_bytes(model: str) -> int:
    """Bytes of one token's keys and values."""
    layers, heads, size = KV_SHAPES[model]
    return 2 * 2 * layers * heads * size


def distserve(folder: Path) -> Entry:
    """The fitted coefficients as they are; memory limits by pipeline stages beside them."""
    limits: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
    with (folder / "max_num_tokens.csv").open() as stream:
        for row in csv.DictReader(stream):
            key = row["model"].removeprefix("facebook/"), int(row["tp"])
            limits[key][row["pp"]] = int(row["max_num_tokens"])
    profiles = {}
    for engine in ("distserve", "vllm"):
        document = json.loads((folder / f"profiler-a100-80g.{engine}.json").read_text())
        for full_name, by_tp in document.items():
            model = full_name.removeprefix("facebook/")
            for tp, fit in by_tp.items():
                profiles[f"distserve-{engine}-{model}-a100-tp{tp}"] = {
                    "hardware": "a100-80",
                    "model": model,
                    "tensor_parallel": int(tp),
                    "engine": "DistServe 2024" if engine == "distserve" else "vLLM as of early 2024",
                    "threshold": fit["decoding_large_small_bs_threshold"],
                    "prefill": fit["prefill"],
                    "decode_small": fit["decoding_smallbs"],
                    "decode_large": fit["decoding_largebs"],
                    "kv_tokens": limits[model, int(tp)],
                    "kv_bytes_per_token": kv_bytes(model),
                }
    return {
        "source": "LLMServe/DistServe @ 82831f1, simdistserve/estimators/profile_data: profiler-a100-80g.*.json, "
        "max_num_tokens.csv",
        "licence": "Apache-2.0",
        "changes": "coefficients unchanged, renamed; limits joined. prefill: 1, tokens, tokens squared; decode: 1, "
        "context, sequences; milliseconds. Prompts of at most 2,048 tokens were measured",
        "form": "fitted",
        "profiles": profiles,
    }


def splitwise(path: Path) -> Entry:
    """Medians of repeated runs, as curves."""
    runs: dict[tuple[str, str, int], list[dict[str, str]]] = defaultdict(list)
    with path.open() as stream:
        for row in csv.DictReader(stream):
            runs[row["model"], row["hardware"], int(row["tensor_parallel"])].append(row)
    profiles: dict[str, Entry] = {}
    for (model, hardware, tp), rows in sorted(runs.items()):
        if hardware in SPLITWISE_HARDWARE:
            name = f"splitwise-{SPLITWISE_MODELS[model]}-{SPLITWISE_HARDWARE[hardware]}-tp{tp}"
            head: Entry = {
                "hardware": SPLITWISE_HARDWARE[hardware],
                "model": SPLITWISE_MODELS[model],
                "tensor_parallel": tp,
                "engine": "vLLM with mixed batching, 2023",
                "kv_bytes_per_token": kv_bytes(SPLITWISE_MODELS[model]),
                "mixed_factor": MIXED_FACTOR,
            }
            profiles[name] = {**head, **measured(rows)}
            if model == "bloom-176b":
                profiles[f"{name}-as-simulated"] = {**head, **as_simulated(rows)}
    return {
        "source": "Mutinifni/splitwise-sim @ 8f99e7d, data/perf_model.csv",
        "licence": "MIT",
        "changes": "medians of repeated runs. prefill by prompt tokens of the step (prompt size times batch), decode "
        "by batch size at prompts of 512 tokens, peak power by prompt tokens at batch 1, mean power by batch size "
        "(shares of rated power; measured on A100 only). 'as-simulated': decode by the same axis as prefill, both "
        "continued in a straight line below 128 tokens, as the authors' simulator reads the table with the number of "
        "sequences for tokens. The rows h100-80gb-pcap are left out: their prefill is that of h100-80gb times 1.300, "
        "their decode the same",
        "form": "table",
        "profiles": profiles,
    }


def medians(rows: Iterable[dict[str, str]], key: str, value: str) -> Points:
    """Median of a column for each value of a key: ``tokens`` (prompt size times batch), or a column's name."""
    groups: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        tokens = int(row["prompt_size"]) * int(row["batch_size"])
        groups[tokens if key == "tokens" else int(row[key])].append(float(row[value]))
    return {group: median(values) for group, values in sorted(groups.items())}


def measured(rows: list[dict[str, str]]) -> Entry:
    """Each quantity by what it was varied with. Power was measured on some machines only (elsewhere it reads 0)."""
    batches = [row for row in rows if row["prompt_size"] == "512" and row["token_size"] == "128"]
    entry = {
        "prefill": curve(medians(rows, "tokens", "prompt_time")),
        "decode": curve(medians(batches, "batch_size", "token_time")),
    }
    powered = [row for row in rows if float(row["peak_power"]) > 0]
    if powered:
        alone = [row for row in powered if row["batch_size"] == "1" and row["token_size"] == "128"]
        batches = [row for row in powered if row["prompt_size"] == "512" and row["token_size"] == "128"]
        entry["peak_power"] = curve(medians(alone, "prompt_size", "peak_power"))
        entry["mean_power"] = curve(medians(batches, "batch_size", "average_power"))
    return entry


def as_simulated(rows: list[dict[str, str]]) -> Entry:
    """Both phases by tokens of the batch."""
    return {
        phase: curve(with_first(medians(rows, "tokens", column)))
        for phase, column in (("prefill", "prompt_time"), ("decode", "token_time"))
    }


def with_first(points: Points) -> Points:
    """The points with one at 1, on the line through the first two."""
    (x0, y0), (x1, y1) = list(points.items())[:2]
    return {1: y0 + (y1 - y0) / (x1 - x0) * (1 - x0), **points}


def curve(points: Points) -> Entry:
    """A curve as data."""
    return {"knots": list(points), "values": [round(value, 4) for value in points.values()]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    PROFILES.mkdir(parents=True, exist_ok=True)
    for name, document in (
        ("distserve-opt", distserve(folder / "distserve")),
        ("splitwise-dgx", splitwise(folder / "splitwise-sim" / "perf_model.csv")),
    ):
        target = PROFILES / f"{name}.json"
        target.write_text(json.dumps(document, indent=1) + "\n")
        print(f"{target.name}: {len(document['profiles'])} profiles, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
