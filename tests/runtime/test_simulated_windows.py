"""The simulator decides for a model with windows as a worker does that computes it, event for event."""

import random
from dataclasses import replace

import pytest

from diptych.control.config import CacheConfig, EngineConfig, TierConfig
from diptych.control.events import (
    Event,
    FirstToken,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    RequestResumed,
)
from diptych.control.page_groups import deal_windows
from diptych.runtime.local_engine import engine_config
from diptych.runtime.models.registry import read_model_config
from diptych.simulation.fleet.simulated_cluster import SimulatedCluster
from diptych.simulation.model_catalogue import load_model
from diptych.simulation.prepare import prepare
from diptych.simulation.scenario import Scenario, load_balancer
from diptych.simulation.settings import settings_from
from diptych.workload.spec import RequestSpec
from tests.runtime.checkpoints import MAX_POSITIONS, prompt_of, reference
from tests.runtime.driving import greedy
from tests.runtime.gathering_engine import GatheringEngine
from tests.runtime.test_freed_windows import BLOCK_SIZE, chunked, freeing
from tests.simulation.linear_cost import LinearCost

KNOWN_TO_BOTH = ["gemma3", "gemma2", "mistral-window", "qwen2-window"]


def decision(event: Event) -> tuple[object, ...] | None:
    """What an event says but for its time."""
    name = type(event).__name__
    match event:
        case RequestAdmitted():
            return name, event.request_id, event.num_cached_tokens, event.is_first
        case RequestPreempted():
            return name, event.request_id, event.swapped, event.is_stream
        case RequestResumed() | FirstToken():
            return name, event.request_id
        case RequestFinished():
            return name, event.request_id, event.reason, event.num_cached_tokens, event.num_preemptions
    return None


@pytest.mark.parametrize("family", KNOWN_TO_BOTH)
def test_layers_are_dealt_alike_by_what_either_knows_of_a_model(family: str) -> None:
    directory = reference(family).directory
    layers, spec = read_model_config(directory).attention.layers, load_model(str(directory))
    assert spec.window is not None
    live = deal_windows([how.window or 0 for how in layers], BLOCK_SIZE, MAX_POSITIONS)
    simulated = deal_windows(
        [0] * spec.full_layers + [spec.window.tokens] * spec.window.layers, BLOCK_SIZE, MAX_POSITIONS
    )
    assert (simulated.groups, simulated.num_places) == (live.groups, live.num_places)


class Prompts:
    """Prompts of which some begin alike, as tokens and as identities of blocks."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.tokens: list[list[int]] = []
        self.specs: list[RequestSpec] = []
        next_id = 100
        for number in range(14):
            num_shared = rng.choice((0, 0, 3, 5))  # of the blocks of a system prompt
            length = num_shared * BLOCK_SIZE + rng.randrange(5, 250)
            num_outputs = rng.randrange(1, 90)
            num_blocks = (length + num_outputs) // BLOCK_SIZE
            ids = (*range(num_shared), *range(next_id, next_id + num_blocks - num_shared))
            next_id += num_blocks
            system = prompt_of(5 * BLOCK_SIZE)[: num_shared * BLOCK_SIZE]
            self.tokens.append(system + prompt_of(length - len(system), seed=1000 * seed + number))
            arrival_ns = 1_000_000 * bool(number)  # the others come in the middle of the first step
            self.specs.append(
                RequestSpec(
                    arrival_ns=arrival_ns,
                    prompt_tokens=length,
                    output_tokens=num_outputs,
                    hash_ids=ids,
                    hash_block_tokens=BLOCK_SIZE,
                )
            )


def live_decisions(family: str, config: EngineConfig, prompts: Prompts) -> list[tuple[object, ...]]:
    engine = GatheringEngine(freeing(family), config)
    for number, (tokens, spec) in enumerate(zip(prompts.tokens, prompts.specs, strict=True)):
        engine.add(str(number), tokens, greedy(spec.output_tokens))
        if not number:
            engine.step()
    engine.run()
    return [found for event in engine.events if (found := decision(event))]


def simulated_decisions(config: EngineConfig, prompts: Prompts) -> list[tuple[object, ...]]:
    scenario = Scenario(
        engine=config, cost=LinearCost(20_000_000), workload=prompts.specs, cluster=load_balancer(), record_events=True
    )
    cluster = SimulatedCluster(scenario)
    cluster.run()
    assert cluster.log is not None
    return [found for worker, event in cluster.log if worker >= 0 and (found := decision(event))]


@pytest.mark.parametrize("family", ["gemma3", "mistral-window"])
@pytest.mark.parametrize(
    ("preemption", "admission"), [("recompute", "greedy"), ("swap", "greedy"), ("swap", "expected")]
)
def test_a_windowed_model_is_admitted_and_preempted_as_live(family: str, preemption: str, admission: str) -> None:
    runner = freeing(family)
    settings = settings_from({
        "model": str(reference(family).directory), "hardware": "h100", "workload": {"num_requests": 1},
        "memory": {"kv_cache_tokens": 20 * BLOCK_SIZE, "block_size": BLOCK_SIZE},
    })  # fmt: skip
    prepared = prepare(settings).scenario.engine
    live = engine_config(runner, chunked(64, preemption))
    assert prepared.cache.groups == live.cache.groups and prepared.max_model_len == live.max_model_len
    memory = CacheConfig(
        prepared.cache.num_blocks,
        BLOCK_SIZE,
        64 if preemption == "swap" else 0,
        watermark_blocks=0,
        admission=admission,
        groups=prepared.cache.groups,
        tiers=TierConfig(clean_blocks=0),  # whether copying up pays is a matter of time, which differs
    )
    preempted = 0
    for seed in range(3):
        prompts, config = Prompts(seed), live.with_(cache=replace(memory, num_blocks=memory.num_blocks + 2 * seed))
        expected = live_decisions(family, config, prompts)
        assert simulated_decisions(config, prompts) == expected
        preempted += sum(found[0] == "RequestPreempted" for found in expected)
    assert preempted or admission == "expected"
