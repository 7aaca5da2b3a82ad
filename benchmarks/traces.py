"""The recorded workloads: their statistics, how much of their prompts a prefix cache saves, and what drawing costs.

    python benchmarks/traces.py [--json traces.json]
    python benchmarks/traces.py --derive azure-conv AzureLLMInferenceTrace_conv.csv
    python benchmarks/traces.py --derive mooncake-conversation conversation_trace.jsonl.gz

The cache is the engine's own KVCacheManager: whole blocks, least recently used, one request at a time, and at least
one token of each prompt is computed. --derive writes the file inside the package from the published one.
"""

import argparse
import gc
import statistics
import time
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import report

from diptych.control.config import CacheConfig
from diptych.control.engine.kvcache.kv_cache_manager import KVCacheManager
from diptych.control.request import Request
from diptych.workload.build import (
    ArrivalConfig,
    LengthConfig,
    LengthsConfig,
    PrefixConfig,
    SessionConfig,
    WorkloadConfig,
    build,
)
from diptych.workload.packed import PackedTrace, pack, tree_columns
from diptych.workload.spec import RequestSpec
from diptych.workload.synthetic import SyntheticWorkload
from diptych.workload.traces import Trace, load_trace

DATA = Path(__file__).parent.parent / "src/diptych/workload/data"
SOURCES = {
    "azure-conv": (
        "Azure LLM inference trace 2023, conversation: github.com/Azure/AzurePublicDataset @ b469a11, "
        "data/AzureLLMInferenceTrace_conv.csv; Patel et al., Splitwise, ISCA 2024",
        "CC-BY-4.0, Microsoft",
        "dates became gaps from the first request, in microseconds; columns instead of rows; gzip",
    ),
    "mooncake-conversation": (
        "Mooncake conversation trace: github.com/kvcache-ai/Mooncake @ 3b5a594, "
        "FAST25-release/traces/conversation_trace.jsonl; Qin et al., Mooncake, FAST 2025",
        "Apache-2.0, the Mooncake authors",
        "times became gaps in milliseconds; hash_ids became a tree; columns instead of rows; gzip",
    ),
}
UNITS_NS = {"azure-conv": 1_000, "mooncake-conversation": 1_000_000}
TARGETS = {"3 M": (3_000_000, 13.9), "50 M": (50_000_000, None), "unlimited": (None, 37.4)}


def derive(name: str, path: str) -> None:
    """Write the packed file of a published trace, and read it back to compare."""
    trace, unit = load_trace(path), UNITS_NS[name]
    assert all(arrival % unit == 0 for arrival in trace.arrival_ns)
    times = [arrival // unit for arrival in trace.arrival_ns]
    known, counts = tree_columns(trace.hash_ids)
    source, licence, changes = SOURCES[name]
    packed = PackedTrace(
        name=name,
        source=source,
        licence=licence,
        changes=changes,
        unit_ns=unit,
        gaps=[later - earlier for earlier, later in zip([0, *times], times, strict=False)],
        prompt_tokens=list(trace.prompt_tokens),
        output_tokens=list(trace.output_tokens),
        hash_block_tokens=trace.hash_block_tokens,
        known_ids=known,
        id_counts=counts,
    )
    data = pack(packed)
    (DATA / f"{name}.json.gz").write_bytes(data)
    assert list(load_trace(name)) == list(trace)
    print(f"{name}: {len(trace)} requests, {len(data)} bytes")


def statistics_row(name: str) -> dict[str, Any]:
    """Count, duration and lengths of a trace."""
    trace = load_trace(name)
    return {
        "trace": name,
        "requests": len(trace),
        "seconds": round(trace.arrival_ns[-1] / 1e9, 3),
        "prompt_mean": round(statistics.fmean(trace.prompt_tokens), 1),
        "prompt_p50": statistics.median_low(trace.prompt_tokens),
        "output_mean": round(statistics.fmean(trace.output_tokens), 1),
        "output_p50": statistics.median_low(trace.output_tokens),
        "bytes": (DATA / f"{name}.json.gz").stat().st_size,
    }


def hit_rate(requests: Iterable[RequestSpec], num_blocks: int, block_tokens: int) -> float:
    """Share of prompt tokens, in percent, found in a cache of so many blocks; requests come one after the other."""
    manager = KVCacheManager(CacheConfig(num_blocks=num_blocks, block_size=block_tokens, watermark_blocks=0))
    for spec in requests:
        hashes = tuple(identity.to_bytes(8, "little") for identity in spec.hash_ids)
        request = Request("", spec.prompt_tokens, 1, block_hashes=hashes)
        manager.admit(request, manager.longest_hit(request), 0)
        manager.remember_computed(request, request.num_tokens)
        manager.release(request)
    return 100 * manager.hit_tokens / manager.queried_tokens


def cache_rows(trace: Trace) -> list[dict[str, Any]]:
    """Hit rates of caches of several sizes."""
    everything = sum(map(len, trace.hash_ids)) + 1
    maximum = hit_rate(trace, everything, trace.hash_block_tokens)
    rows = []
    for size, (tokens, expected) in TARGETS.items():
        blocks = everything if tokens is None else tokens // trace.hash_block_tokens
        rate = hit_rate(trace, blocks, trace.hash_block_tokens)
        share = round(100 * rate / maximum, 1)
        rows.append({"cache_tokens": size, "hit_percent": round(rate, 2), "expected": expected, "of_maximum": share})
    return rows


def generation_row(name: str, config: WorkloadConfig) -> dict[str, Any]:
    """CPU time per request of drawing a workload, and its memory (traced over the first tenth)."""
    workload = build(config, 1)
    assert isinstance(workload, SyntheticWorkload)
    gc.collect()
    began = time.process_time()
    count = sum(1 for _ in workload)
    seconds = time.process_time() - began
    tracemalloc.start()
    for number, _ in enumerate(workload):
        if number == count // 10:
            break
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    micros = round(seconds / count * 1e6, 2)
    return {"workload": name, "requests": count, "cpu_us_per_request": micros, "peak_mb": round(peak / 1e6, 2)}


def generation_rows(count: int) -> list[dict[str, Any]]:
    """What it costs to draw ``count`` requests of several workloads."""
    lognormal = LengthsConfig(
        prompt=LengthConfig(kind="lognormal", median=1000, sigma=1.2, max=16384),
        output=LengthConfig(kind="lognormal", median=130, sigma=0.9, max=2048),
    )
    plain = WorkloadConfig(num_requests=count, rate=100.0)
    pairs = WorkloadConfig(num_requests=count, rate=100.0, lengths=LengthsConfig(pairs="azure-conv"))
    heavy = WorkloadConfig(
        num_requests=count, rate=100.0, lengths=lognormal, arrivals=ArrivalConfig(kind="gamma", cv=2.0)
    )
    shared = WorkloadConfig(
        num_requests=count, rate=100.0, lengths=lognormal, prefix=PrefixConfig(prompts=100, choice="zipf")
    )
    talks = WorkloadConfig(
        num_requests=count // 10,
        rate=100.0,
        lengths=LengthsConfig(prompt=LengthConfig(mean=200), output=LengthConfig(mean=200)),
        sessions=SessionConfig(min_turns=1, max_turns=9, think_s=20.0),
    )
    return [
        generation_row("poisson, fixed lengths", plain),
        generation_row("poisson, pairs of azure-conv", pairs),
        generation_row("gamma, lognormal lengths", heavy),
        generation_row("poisson, lognormal, 100 system prompts", shared),
        generation_row("conversations of 1 to 9 turns", talks),
    ]


def main() -> None:
    """Measure, or derive a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--derive", nargs=2, metavar=("NAME", "FILE"))
    parser.add_argument("--requests", type=int, default=1_000_000)
    options = parser.parse_args()
    if options.derive:
        derive(*options.derive)
        return
    traces = [statistics_row(name) for name in SOURCES]
    caches = cache_rows(load_trace("mooncake-conversation"))
    drawing = generation_rows(options.requests)
    report("traces", traces)
    report("prefix cache on mooncake-conversation", caches)
    report("drawing requests", drawing, options.json, statistics=traces, prefix_cache=caches)


if __name__ == "__main__":
    main()
