"""The recorded workloads: their statistics, and how much of their prompts a prefix cache saves (R3).

    python benchmarks/twin.py traces [--json traces.json]
    python benchmarks/twin.py traces --derive azure-conv AzureLLMInferenceTrace_conv.csv
    python benchmarks/twin.py traces --derive mooncake-conversation conversation_trace.jsonl.gz

The cache is the engine's own KVCacheManager: whole blocks, least recently used, one request at a time, and at least
one token of each prompt is computed. --derive writes the file inside the package from the published one.
"""

import argparse
import statistics
from collections.abc import Iterable
from typing import Any

from common import ROOT, report

from diptych.control.config import CacheConfig
from diptych.control.engine.kvcache.kv_cache_manager import KVCacheManager
from diptych.control.request import Request
from diptych.workload.packed import PackedTrace, pack, tree_columns
from diptych.workload.spec import RequestSpec
from diptych.workload.traces import Trace, load_trace

DATA = ROOT / "src/diptych/workload/data"
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
    """Share of prompt tokens, in percent, found in a cache of ``num_blocks``; requests come one after the other."""
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--derive", nargs=2, metavar=("NAME", "FILE"))


def main(options: argparse.Namespace) -> None:
    """Measure, or derive a file."""
    if options.derive:
        derive(*options.derive)
        return
    traces = [statistics_row(name) for name in SOURCES]
    caches = cache_rows(load_trace("mooncake-conversation"))
    report("prefix cache on mooncake-conversation", caches)
    report("traces", traces, options.json, prefix_cache=caches)
