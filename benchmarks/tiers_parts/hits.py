"""How much of a real trace's prompts do the tiers find, on a live server and in the simulator?

    python benchmarks/tiers.py hits [--requests 500] [--model DIR] [--json tier_hits.json]

The first requests of Mooncake's conversation trace, one after the other, made small: each of its blocks of 512 tokens
becomes a block of 32, the lengths shrink with them, and equal blocks stay equal. Every cache size gets the same
requests: a fresh ``diptych serve`` by HTTP, and the simulator with the same blocks, the cost of the steps that the
live worker measures when it starts, and the cost of a copy that it measures there. Hits are the prompt tokens that
were not computed, as a share of all, live as the server's ``usage`` says. "endless": what a cache would find that
never forgets.
"""

import argparse
import http.client
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import report
from servers import PORT, diptych_server

from diptych.bench.prompts import PromptMaker
from diptych.control.config import shape_preset
from diptych.runtime.kv_cache.checkpoint_geometry import read_kv_geometry
from diptych.runtime.local_engine import engine_config
from diptych.runtime.models.registry import read_model_config
from diptych.runtime.step.model_runner import RunnerConfig, load_runner
from diptych.runtime.step.warm_up import warm_up
from diptych.serving.link.engine_options import BUNDLED_MODEL, MemoryOptions
from diptych.serving.worker.load_tiers import num_host_blocks, tier_config
from diptych.simulation.costs.fitted import MeasuredPoint, fit_linear
from diptych.simulation.fleet.simulated_disk import DiskModel
from diptych.simulation.results import summarize
from diptych.simulation.run import simulate
from diptych.simulation.scenario import Scenario
from diptych.workload.spec import RequestSpec
from diptych.workload.traces import MOONCAKE_BLOCK_TOKENS, load_trace

BLOCK = 32  # tokens
OWN_IDS = 1 << 20  # of one request, for what it shares with no other
ISA = "avx2"  # kernels so slow that a disk is worth reading for so small a model
OPTIONS = ("--shape", "chunked", "--speculation", "off", "--isa", ISA)
GB = 10**9


@dataclass(frozen=True)
class Size:
    """Sizes of the KV cache and of the tiers below it."""

    cache_mib: int
    host_gb: float = 0.0
    disk_gb: float = 0.0

    @property
    def name(self) -> str:
        parts = [f"{self.cache_mib} MiB"]
        parts += [f"host {self.host_gb:g} GB"] if self.host_gb else []
        parts += [f"disk {self.disk_gb:g} GB"] if self.disk_gb else []
        return " + ".join(parts)

    def options(self, folder: str) -> list[str]:
        """The options of ``diptych serve`` for these sizes."""
        words = ["--kv-cache-memory", f"{self.cache_mib}MiB", "--kv-host-gb", f"{self.host_gb:g}"]
        return [*words, "--kv-disk", folder, "--kv-disk-gb", f"{self.disk_gb:g}"] if self.disk_gb else words

    def memory(self) -> MemoryOptions:
        """The same, as a worker gets it."""
        return MemoryOptions(
            block_size=BLOCK,
            kv_cache_bytes=self.cache_mib << 20,
            host_bytes=round(self.host_gb * GB),
            disk="a folder" if self.disk_gb else None,
            disk_bytes=round(self.disk_gb * GB),
        )


SIZES = (Size(32), Size(32, host_gb=0.1), Size(32, host_gb=0.4), Size(32, disk_gb=0.2), Size(32, 0.05, disk_gb=2.0))


class InTurn:
    """A closed loop of one client."""

    concurrency = 1

    def __init__(self, specs: Sequence[RequestSpec]) -> None:
        self._specs = specs
        self._next = 0

    def __len__(self) -> int:
        return len(self._specs)

    def next_request(self, client: int, now: int) -> RequestSpec | None:
        """The next request at once; None when all were given."""
        if self._next == len(self._specs):
            return None
        self._next += 1
        return replace(self._specs[self._next - 1], arrival_ns=now)


def requests_of_trace(count: int, max_model_len: int) -> list[RequestSpec]:
    """The first ones, made small; those that are still longer than the model's context are left out."""
    specs: list[RequestSpec] = []
    for number, row in enumerate(load_trace("mooncake-conversation").rows(0, count)):
        prompt = max(1, row.prompt_tokens * BLOCK // MOONCAKE_BLOCK_TOKENS)
        answer = max(1, row.output_tokens * BLOCK // MOONCAKE_BLOCK_TOKENS)
        if prompt + answer > max_model_len:
            continue
        shared = row.hash_ids[: prompt // BLOCK]
        num_own = -(-(prompt + answer) // BLOCK) - len(shared)
        own = tuple(-1 - OWN_IDS * number - index for index in range(num_own))
        spec = RequestSpec(
            arrival_ns=0,
            prompt_tokens=prompt,
            output_tokens=answer,
            hash_ids=shared + own,
            hash_block_tokens=BLOCK,
        )
        specs.append(spec)
    return specs


def endless(specs: Sequence[RequestSpec]) -> float:
    """Hits of a cache that never forgets."""
    known: set[int] = set()
    num_found = 0
    for spec in specs:
        limit = (spec.prompt_tokens - 1) // BLOCK
        for identity in spec.hash_ids[:limit]:
            if identity not in known:
                break
            num_found += BLOCK
        known.update(spec.hash_ids)
    return num_found / sum(spec.prompt_tokens for spec in specs)


def live(model: Path, size: Size, specs: Sequence[RequestSpec]) -> float:
    """Hits of a server that begins with nothing."""
    vocab_size = read_model_config(model).vocab_size
    maker = PromptMaker("tier hits", vocab_size // 2, vocab_size)
    num_cached = 0
    with tempfile.TemporaryDirectory() as folder, diptych_server(model, *OPTIONS, *size.options(folder)):
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
        for number, spec in enumerate(specs):
            body = {"model": model.name, "prompt": maker.units(spec, number), "max_tokens": spec.output_tokens,
                    "temperature": 0, "ignore_eos": True}  # fmt: skip
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            reply = json.load(connection.getresponse())
            usage = reply["usage"]
            if usage["prompt_tokens"] != spec.prompt_tokens or usage["completion_tokens"] != spec.output_tokens:
                raise RuntimeError(f"request {number} was to have {spec}; the server counted {usage}")
            num_cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        connection.close()
    return num_cached / sum(spec.prompt_tokens for spec in specs)


def scenario(model: Path, size: Size, specs: Sequence[RequestSpec]) -> Scenario:
    """A simulated worker with the blocks of a live one, at the pace of this machine."""
    memory, geometry = size.memory(), read_kv_geometry(model, "auto", BLOCK)
    longest = read_model_config(model).max_position_embeddings
    runner = load_runner(
        RunnerConfig(
            model,
            block_size=BLOCK,
            num_blocks=geometry.blocks_within(size.cache_mib << 20),
            num_host_blocks=num_host_blocks(memory, geometry, longest),
            instruction_set=ISA,
        )
    )
    tiers = tier_config(memory, runner, geometry)
    settings = engine_config(runner, shape_preset("chunked"))
    measured = tuple(warm_up(runner))
    disk = DiskModel.named("virtual", memory.disk_bytes, geometry.block_bytes) if size.disk_gb else None
    return Scenario(
        engine=settings.with_(cache=replace(settings.cache, tiers=tiers)),
        cost=fit_linear([MeasuredPoint(*point) for point in measured]),
        workload=InTurn(specs),
        swap_block_ns=tiers.copy_block_ns,
        disk=disk,
        warm_up=measured,
    )


def compare(model: Path, size: Size, specs: Sequence[RequestSpec]) -> dict[str, Any]:
    """A row: shares in percent, the difference in points."""
    told = scenario(model, size, specs)
    simulated = float(summarize(simulate(told))["cached_token_share"])
    measured = live(model, size, specs)
    cache = told.engine.cache
    row = {
        "cache": size.name,
        "blocks": cache.num_blocks,
        "host blocks": cache.num_host_blocks,
        "live %": round(100 * measured, 2),
        "simulated %": round(100 * simulated, 2),
        "difference": round(100 * (simulated - measured), 2),
    }
    print(row, file=sys.stderr, flush=True)
    return row


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL)


def main(asked: argparse.Namespace) -> None:
    specs = requests_of_trace(asked.requests, read_model_config(asked.model).max_position_embeddings)
    rows = [compare(asked.model, size, specs) for size in SIZES]
    about = {
        "requests": len(specs),
        "prompt tokens": sum(spec.prompt_tokens for spec in specs),
        "endless %": round(100 * endless(specs), 2),
    }
    report("tier hits, live and simulated", rows, asked.json, goal="within 2 points", trace=about)
    print(about)
