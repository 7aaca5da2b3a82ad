"""KV memory of a model with windows, and what its prefix cache finds, beside a cache that keeps all tokens.

Both are counted by the code that decides in a worker, with a model of the catalogue; nothing is computed. Memory: long
streams side by side, in blocks that are in use at most and while all of them decode. Hits: conversations that begin
with one system prompt and take turns, in equal memory.
"""

import argparse
from itertools import count, islice

from common import report

from diptych.control.config import CacheConfig, EngineConfig, shape_preset
from diptych.control.engine.engine_core import EngineCore
from diptych.control.events import RequestAdmitted
from diptych.control.page_groups import LayerGroups, deal_windows
from diptych.control.request import Request
from diptych.control.slo import NS_PER_S
from diptych.control.step import StepResult
from diptych.simulation.costs.terms_cost import StepTermsCost
from diptych.simulation.fleet.simulated_cluster import SimulatedCluster
from diptych.simulation.model_catalogue import load_model
from diptych.simulation.models import ModelSpec
from diptych.simulation.scenario import Scenario, load_balancer
from diptych.workload.spec import RequestSpec

BLOCK = 32
ANSWER, QUESTION = 150, 200  # tokens of a turn
PAUSE_NS = 60 * NS_PER_S  # between requests


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``main``."""
    parser.add_argument("--model", default="gemma-3-4b", help="of the catalogue, or a config.json")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--context", type=int, default=16_384, help="tokens of a stream at its end")
    parser.add_argument("--system", type=int, default=4096, help="tokens of the system prompt")
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=6)


def main(options: argparse.Namespace) -> None:
    """Measure and print."""
    model = load_model(options.model)
    if model.window is None:
        raise SystemExit(f"{options.model} has no window")
    windows = [0] * model.full_layers + [model.window.tokens] * model.window.layers
    layers = deal_windows(windows, BLOCK, model.max_context)
    memory = [memory_row(name, model, found, options) for name, found in caches(model, layers)]
    hits = [
        hits_row(name, model, found, tokens, options)
        for tokens in (24_000, 40_000, 80_000)
        for name, found in caches(model, layers)
    ]
    report("windows", [*memory, *hits], options.json)


def caches(model: ModelSpec, layers: LayerGroups) -> list[tuple[str, LayerGroups]]:
    """The two that are compared."""
    return [("all kept", LayerGroups.dense(model.attention_layers, BLOCK)), ("windows freed", layers)]


def block_bytes(model: ModelSpec, layers: LayerGroups) -> int:
    """Bytes of one block, in 16 bits."""
    return BLOCK * layers.num_places * model.kv_width * 2


def engine_of(layers: LayerGroups, num_blocks: int, max_model_len: int) -> EngineConfig:
    """The settings of a worker."""
    cache = CacheConfig(num_blocks, BLOCK, groups=() if layers.is_dense else layers.groups)
    return EngineConfig(cache, shape_preset("chunked", max_num_seqs=64), max_model_len=max_model_len)


def memory_row(name: str, model: ModelSpec, layers: LayerGroups, options: argparse.Namespace) -> dict[str, object]:
    """Streams that all begin at once."""
    core = EngineCore(engine_of(layers, 10**6, options.context))
    for number in range(options.streams):
        core.add_request(Request(str(number), options.context - 400, 400), 0)
    most = decoding = now = 0
    while (output := core.begin_step(now)) is not None:
        now += 10**8
        core.end_step(StepResult(output.step_id), now)
        most = max(most, core.kv.pool.num_used)
        if output.num_decodes == options.streams:
            decoding = max(decoding, core.kv.pool.num_used)
    size = block_bytes(model, layers)
    counted = core.kv.layout.peak_pages(options.context) * options.streams
    return {
        "cache": name,
        "groups": len(layers.groups),
        "arithmetic GiB": round(counted * size / 2**30, 2),
        "decoding GiB": round(decoding * size / 2**30, 2),
        "most GiB": round(most * size / 2**30, 2),
    }


def hits_row(
    name: str, model: ModelSpec, layers: LayerGroups, tokens: int, options: argparse.Namespace
) -> dict[str, object]:
    """Conversations that take turns, one request after the other, in the memory of ``tokens`` tokens of all layers."""
    dense = LayerGroups.dense(model.attention_layers, BLOCK)
    num_blocks = tokens // BLOCK * block_bytes(model, dense) // block_bytes(model, layers)
    specs, identities = [], count(options.system)
    histories = [list(range(options.system // BLOCK)) for _ in range(options.conversations)]
    length = options.system
    for turn in range(options.turns):
        for number, history in enumerate(histories):
            whole = (length + QUESTION + ANSWER) // BLOCK
            history += islice(identities, whole - len(history))
            at_ns = (turn * options.conversations + number) * PAUSE_NS
            ids = tuple(history)
            specs.append(
                RequestSpec(
                    arrival_ns=at_ns,
                    prompt_tokens=length + QUESTION,
                    output_tokens=ANSWER,
                    hash_ids=ids,
                    hash_block_tokens=BLOCK,
                )
            )
        length += QUESTION + ANSWER
    cluster = SimulatedCluster(
        Scenario(
            engine=engine_of(layers, num_blocks, 32_768),
            cost=StepTermsCost(10_000_000, 10_000, 0, 100_000, 0),
            workload=specs,
            cluster=load_balancer(),
            record_events=True,
        )
    )
    cluster.run()
    assert cluster.log is not None
    cached = sum(event.num_cached_tokens for _, event in cluster.log if isinstance(event, RequestAdmitted))
    asked = sum(spec.prompt_tokens for spec in specs)
    return {"cache": name, "memory, tokens of all layers": tokens, "hit rate": round(cached / asked, 3)}
