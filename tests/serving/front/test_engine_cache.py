"""What the router is told of an engine's cache while the engine's events do not say everything."""

import random
from collections.abc import Sequence

import pytest
from tests.laws import law

from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.events import Event, KVEvents, KVSnapshot
from diptych.control.router.kv_bridge import BlocksRemoved, CacheCleared, EngineBlocksStored, EngineCacheEvent
from diptych.control.router.kv_source import KVSource, SourceState
from diptych.control.slo import NS_PER_S
from diptych.serving.front.engine_cache import EngineCache
from diptych.serving.front.engine_spec import EngineSpec, FrontOptions

pytestmark = pytest.mark.asyncio
BLOCK = 4
LIFE_S = 10.0


class Told:
    """An EngineCache whose events are given by hand, and what its router knows of it."""

    def __init__(self, capacity: int = 100) -> None:
        spec = EngineSpec("vllm", "http://h:1", kv_events="tcp://127.0.0.1:1")
        self.now = 0
        self.cache = EngineCache(FrontOptions((spec,), BLOCK, assumed_s=LIFE_S), spec, lambda: self.now)
        self.held: set[bytes] = set()
        self.snapshots: list[KVSnapshot] = []
        self.cache.begin(capacity, capacity, self._report, (spec.kv_events, spec.kv_replay))
        assert self.cache._source is not None
        self.source: KVSource = self.cache._source

    def _report(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, KVEvents):
                assert not self.held & set(event.stored) and self.held >= set(event.evicted)
                assert len(set(event.evicted)) == len(event.evicted)
                self.held = self.held - set(event.evicted) | set(event.stored)
            elif isinstance(event, KVSnapshot):
                self.snapshots.append(event)

    def batch(self, number: int, *events: EngineCacheEvent) -> None:
        self.cache._on_change(self.source.on_batch(number, events))

    def computed(self, tokens: Sequence[int]) -> None:
        self.cache.on_computed(hash_blocks(tokens, BLOCK), self.now)

    def snapshot(self) -> list[bytes]:
        self.cache.snapshot()
        return list(self.snapshots[-1].hashes)


def block(tokens: Sequence[int]) -> EngineBlocksStored:
    """The event of all blocks of a prompt; the engine names each by its tokens."""
    names = [bytes(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
    return EngineBlocksStored(names, None, list(tokens[: len(names) * BLOCK]), BLOCK)


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


async def test_a_prompt_that_was_cached_before_the_first_event_is_assumed_when_it_was_computed() -> None:
    told = Told()
    told.batch(7, block([9, 9, 9, 9]))
    assert told.source.state is SourceState.DEGRADED
    told.computed(PROMPT)
    assert told.held == {*hash_blocks(PROMPT, BLOCK), *hash_blocks([9] * 4, BLOCK)} == set(told.snapshot())
    assert told.cache.num_blocks == 3
    told.now = int(LIFE_S * NS_PER_S)
    told.cache.tick(told.now)
    assert told.held == set(hash_blocks([9] * 4, BLOCK))  # what events said has no age


async def test_where_events_say_everything_nothing_is_assumed() -> None:
    told = Told()
    told.computed(PROMPT)
    assert told.held == set(hash_blocks(PROMPT, BLOCK))
    told.batch(0, block(PROMPT[:4]))
    assert told.held == set(hash_blocks(PROMPT[:4], BLOCK)) == set(told.snapshot())
    told.computed(PROMPT)
    assert len(told.held) == 1


async def test_what_is_assumed_and_known_goes_when_the_engine_removes_it_and_stays_when_events_are_lost() -> None:
    told = Told()
    told.batch(5, block(PROMPT))
    told.computed(PROMPT)
    assert told.snapshot() == list(hash_blocks(PROMPT, BLOCK))  # each once
    told.batch(6, BlocksRemoved([bytes(PROMPT)]))
    assert told.held == set(hash_blocks(PROMPT[:4], BLOCK))
    told.batch(9)
    assert told.held == set(hash_blocks(PROMPT[:4], BLOCK)) and told.cache.num_gaps == 1
    told.batch(10, CacheCleared())
    assert told.held == set() and told.cache.num_blocks == 0


async def test_an_engine_that_starts_again_holds_nothing_that_was_assumed() -> None:
    told = Told()
    told.batch(5)
    told.computed(PROMPT)
    told.batch(3)  # of its next life
    assert told.held == set() and told.source.state is SourceState.DEGRADED


@law(weight=0.4)
async def test_the_router_knows_what_is_known_or_assumed_whatever_comes(seed: int) -> None:
    rng = random.Random(seed)
    told, number = Told(capacity=12), rng.choice([0, 5])
    prompts = [[rng.randrange(2) for _ in range(BLOCK * rng.randint(1, 4))] for _ in range(6)]
    for _ in range(150):
        told.now += rng.randrange(NS_PER_S)
        prompt, kind = rng.choice(prompts), rng.random()
        if kind < 0.4:
            told.computed(prompt)
        elif kind < 0.5:
            told.cache.tick(told.now)
        else:
            number = 0 if rng.random() < 0.03 else number + rng.choice([1] * 12 + [2])
            event = block(prompt) if kind < 0.75 else BlocksRemoved([bytes(prompt)])
            told.batch(number, *([CacheCleared()] if kind > 0.98 else []), event)
        assert sorted(told.held) == sorted(told.snapshot())
        if told.source.state is SourceState.EXACT:
            assert told.held == set(told.source.bridge.hashes)
