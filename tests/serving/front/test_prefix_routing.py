"""Where a front sends prompts that share a beginning, and what it knows of the engines' caches."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest
from fake_engine import BLOCK, FakeEngine
from fake_events import FakePublisher, removed, stored
from front_harness import FrontClient, fronted

from diptych.control.engine.reports import LoadReport
from diptych.control.errors import ConfigError
from diptych.control.router.kv_bridge import BlocksRemoved, CacheCleared, EngineBlocksStored
from diptych.serving.front.adapters.vllm_adapter import VLLMAdapter, published, reachable
from diptych.serving.front.capabilities import EngineNotReadyError
from diptych.serving.front.engine_connection import pool_to
from diptych.serving.front.engine_load import EngineLoad, LearnedPrices
from diptych.serving.front.engine_spec import EngineSpec
from diptych.serving.front.kv_events import UnreadableBatchError, read_batch

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def caches_alone_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines cost the same and are never busy with others' work: prices are learned by the clock, and where a prompt
    goes would hang on the pace of this machine."""
    learned = EngineLoad.report

    def report(load: EngineLoad, now: int) -> LoadReport:
        prices = LearnedPrices()
        return replace(
            learned(load, now), backlog_ns=0, used_blocks=0, token_ns=prices.token_ns, pair_ns=prices.pair_ns,
            fixed_ns=prices.fixed_ns, sequence_ns=prices.sequence_ns, context_ns=prices.context_ns,
        )  # fmt: skip

    monkeypatch.setattr(EngineLoad, "report", report)


@asynccontextmanager
async def publishing(
    count: int = 2, form: str = "array", *, replay: bool = True, **engine: object
) -> AsyncIterator[FrontClient]:
    """A front over vLLMs that publish their events."""
    publishers = [FakePublisher(form) for _ in range(count)]
    engines = [FakeEngine(publisher=publisher, **engine) for publisher in publishers]  # type: ignore[arg-type]
    for each in engines:
        await each.start()
    specs = [
        EngineSpec("vllm", each.url, kv_events=publisher.address, kv_replay=publisher.replay if replay else "")
        for each, publisher in zip(engines, publishers, strict=True)
    ]
    try:
        async with fronted(specs=specs) as client:
            client.engines = engines
            await client.until_up(count)
            yield client
    finally:
        for each in engines:
            await each.stop()
        for publisher in publishers:
            await publisher.close()


async def settled(client: FrontClient) -> None:
    """Until what the front knows of the caches is what they hold, after the last batch."""
    async with asyncio.timeout(5):
        for engine, fake in zip(client.front.external.engines, client.engines, strict=True):
            assert fake.publisher is not None
            source = engine.cache._source
            assert source is not None
            while (source._applied, engine.cache.num_blocks) != (fake.publisher.number - 1, len(fake.blocks)):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_without_events_a_conversation_stays_where_its_beginning_was_computed(kind: str) -> None:
    engines = [FakeEngine(kind), FakeEngine(kind)]
    async with fronted(*engines) as client:
        texts = [f"conversation {number} " + "x" * 400 for number in range(6)]
        oracle = 0
        for turn in range(3):
            oracle += sum(len(text) // BLOCK * BLOCK for text in texts) if turn else 0
            texts = [text + f" turn {turn} " + "y" * 50 for text in texts]
            await asyncio.gather(*(client.complete(text, 2) for text in texts))
        assert sum(found for engine in engines for found, _ in engine.cached) >= 0.95 * oracle
        assert all(engine.requests for engine in engines)  # and both work
        await client.idle()


@pytest.mark.parametrize("form", ["array", "map"])
async def test_with_events_the_prompt_goes_where_it_is_held_also_when_another_sent_it_there(form: str) -> None:
    async with publishing(form=form) as client:
        engines = client.front.external.engines
        prompt = "a prompt that another router has sent " * 8
        for number in (0, 1, 1):  # only engine 1 is to know it; engine 0 is to be idle
            if number:
                await client.engines[1]._compute([ord(letter) for letter in prompt])
        await settled(client)
        assert engines[1].cache.kind == "exact"
        for _ in range(3):
            await client.complete(prompt + str(random.random()), 2)
        assert len(client.engines[1].requests) == 3
        assert all(found >= len(prompt) // BLOCK * BLOCK for found, _ in client.engines[1].cached[2:])
        assert all(isinstance(sent["prompt"], list) for sent in client.engines[1].requests)  # tokenised once
        await client.idle()


async def test_a_vllm_can_be_asked_where_it_publishes() -> None:
    publisher = FakePublisher("array")
    engines = [FakeEngine(publisher=publisher), FakeEngine()]
    for each in engines:
        await each.start()
    specs = [EngineSpec("vllm", each.url, kv_events="auto") for each in engines]
    try:
        async with fronted(specs=specs) as client:
            await client.until_up(2)
            one, other = client.front.external.engines
            await engines[0]._compute([ord(letter) for letter in "a prompt of another router " * 8])
            async with asyncio.timeout(5):
                while one.cache.num_blocks != len(engines[0].blocks) or not one.cache.num_blocks:
                    await asyncio.sleep(0.01)
            assert one.cache.kind == "exact" and other.cache.kind == "assumed"
            assert other.facts is not None and not other.facts.capabilities.kv_events
            assert any(words.startswith("kv_events (it says") for words in other.facts.degraded)
    finally:
        for each in engines:
            await each.stop()
        await publisher.close()


@asynccontextmanager
async def ranked(count: int, *rank: int, events: str = "auto") -> AsyncIterator[FrontClient]:
    """A front over one vLLM of ``count`` data-parallel ranks, of which these are engines (none: all are one)."""
    publishers = [FakePublisher("array") for _ in range(count)]
    ranks = [FakeEngine(publisher=publisher) for publisher in publishers]
    for each in ranks:
        each.ranks = ranks
    await ranks[0].start()
    specs = [EngineSpec("vllm", ranks[0].url, kv_events=events, rank=each) for each in rank or (None,)]
    try:
        async with fronted(specs=specs) as client:
            client.engines = ranks
            await client.until_up(len(specs))
            yield client
    finally:
        await ranks[0].stop()
        for publisher in publishers:
            await publisher.close()


async def test_each_rank_of_a_vllm_is_an_engine_with_its_own_cache_and_its_own_load() -> None:
    async with ranked(3, 0, 1, 2) as client:
        prompt = "a prompt that another router has sent " * 8
        await client.engines[2]._compute([ord(letter) for letter in prompt])
        for engine in client.engines:  # a batch, from which on all is known
            await engine._compute([ord(letter) for letter in f"{id(engine):20}"])
        await settled(client)
        engines = client.front.external.engines
        assert [engine.cache.kind for engine in engines] == ["exact"] * 3
        assert [engine.facts.num_blocks for engine in engines if engine.facts] == [4096] * 3
        for number in range(3):
            await client.complete(f"{prompt}{number}", 2)
        assert [len(engine.requests) for engine in client.engines] == [0, 0, 3]
        assert all(found >= len(prompt) // BLOCK * BLOCK for found, _ in client.engines[2].cached[-3:])
        client.engines[1].num_running = 5
        async with asyncio.timeout(5):
            while engines[1].load._gauges.num_running != 5:
                await asyncio.sleep(0.01)
        assert engines[0].load._gauges.num_running == 0
        await client.idle()


@pytest.mark.parametrize("events", ["auto", "given"])
async def test_nothing_is_believed_of_the_caches_of_ranks_that_are_one_engine(events: str) -> None:
    """The events are those of one rank; which one a request goes to, only the server knows."""
    address = "auto" if events == "auto" else "tcp://127.0.0.1:5557"
    async with ranked(2, events=address) as client:
        (engine,) = client.front.external.engines
        for number in range(4):
            await client.complete(f"{number} prompts " * 20, 2)
        assert all(rank.requests for rank in client.engines)
        assert engine.cache.kind == "assumed" and engine.facts is not None
        assert not engine.facts.capabilities.kv_events
        assert "prefix_index (it has 2 data-parallel ranks: rank=0-1)" in engine.facts.degraded
        await client.idle()


async def test_nothing_is_believed_of_the_caches_of_an_sglang_with_ranks() -> None:
    publisher = FakePublisher("map")
    server = FakeEngine("sglang", publisher=publisher, more_information={"dp_size": 4})
    await server.start()
    specs = [EngineSpec("sglang", server.url, kv_events=publisher.address)]
    try:
        async with fronted(specs=specs) as client:
            await client.until_up(1)
            (engine,) = client.front.external.engines
            assert engine.cache.kind == "assumed" and engine.facts is not None
            assert "prefix_index (it has 4 data-parallel ranks)" in engine.facts.degraded
    finally:
        await server.stop()
        await publisher.close()


async def test_the_only_rank_of_a_server_is_found_whatever_its_number() -> None:
    source = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5560", "replay_endpoint": "tcp://*:5660"}
    found = "tcp://10.0.0.1:5560", "tcp://10.0.0.1:5660"
    assert published({"3": source}, "10.0.0.1", None) == found == published({"3": source, "0": {}}, "10.0.0.1", 3)
    assert published({"3": source, "0": source}, "10.0.0.1", None) == published({}, "10.0.0.1", None) == ("", "")


async def test_a_rank_that_the_server_does_not_have_is_never_ready() -> None:
    server = await FakeEngine().start()
    try:
        spec = EngineSpec("vllm", server.url, rank=1)
        with pytest.raises(EngineNotReadyError, match=r"it has no rank 1, but \[0\]"):
            await VLLMAdapter().look(pool_to(*spec.address, spec.headers, is_tls=False), spec)
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("endpoint", "host", "found"),
    [
        ("tcp://*:5557", "10.0.0.1", "tcp://10.0.0.1:5557"),
        ("tcp://0.0.0.0:5557", "fd00::1", "tcp://[fd00::1]:5557"),
        ("tcp://127.0.0.1:5557", "127.0.0.1", "tcp://127.0.0.1:5557"),
        ("tcp://127.0.0.1:5557", "10.0.0.1", ""),  # it listens where only its own host can ask
        ("tcp://10.0.0.9:5557", "10.0.0.1", "tcp://10.0.0.9:5557"),
        ("ipc:///tmp/events", "localhost", "ipc:///tmp/events"),
        ("ipc:///tmp/events", "10.0.0.1", ""),
        ("inproc://x", "127.0.0.1", ""),
        ("tcp://*:port", "127.0.0.1", ""),
        ("", "127.0.0.1", ""),
    ],
)
async def test_an_endpoint_is_an_address_only_where_it_can_be_reached(endpoint: str, host: str, found: str) -> None:
    assert reachable(endpoint, host) == found


async def test_chats_are_tokenised_with_the_engines_template() -> None:
    async with publishing() as client:
        await client.chat("hello " * 30, 2)
        await settled(client)
        await client.chat("hello " * 30 + "more", 2)
        used = [engine for engine in client.engines if engine.requests]
        assert len(used) == 1 and used[0].cached[-1][0] >= 160
        assert sum(engine.tokenized for engine in client.engines) >= 2


async def test_predicted_is_reported_through_gaps_and_restarts() -> None:
    """What is predicted of 100 prompts is reported, with lost messages, restarts of the numbering, evictions."""
    rng = random.Random(5)
    async with publishing(capacity=60) as client:
        wrong = total = 0
        texts = [f"{number} " + "z" * 120 for number in range(8)]
        for turn in range(100):
            if rng.random() < 0.1:
                client.engines[rng.randrange(2)].publisher.lose = rng.randint(1, 3)  # type: ignore[union-attr]
            number = rng.randrange(8)
            text = texts[number] + str(turn)
            await client.complete(text, 1)
            await asyncio.sleep(0)
        for engine, fake in zip(client.front.external.engines, client.engines, strict=True):
            fake.publisher.lose = 0  # type: ignore[union-attr]
            await fake._compute(list(range(BLOCK)))
            async with asyncio.timeout(5):
                while engine.cache.num_blocks != len(fake.blocks):
                    await asyncio.sleep(0.01)
            total += len(fake.blocks)
            wrong += engine.cache.num_gaps
        assert total and wrong == 0  # every gap was filled by a replay
        assert client.front.fleet.core.router.alarm == ""
        await client.idle()


async def again(client: FrontClient, number: int) -> None:
    """The process of an engine ends and starts again, its cache empty, its numbers from 0."""
    engine, fake = client.front.external.engines[number], client.engines[number]
    assert fake.publisher is not None
    port = int(fake.url.rsplit(":", 1)[1])
    await fake.stop()
    fake.publisher.restart()
    async with asyncio.timeout(10):
        while engine.state.value == "ready":
            await asyncio.sleep(0.005)
        await fake.start(port)
        while engine.state.value != "ready":
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("faults", [12, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
async def test_predicted_is_reported_after_gaps_restarts_and_resets(faults: int) -> None:
    """After each fault, and the next batch of that engine, which shows that something is missing: a prompt whose
    beginning both engines held before the fault: wherever it goes it is found, unless the fault has emptied that cache.
    At least 999 of 1,000 are predicted to the token."""
    rng = random.Random(11)
    texts = [f"{number} " + "z" * 150 for number in range(12)]
    async with publishing(capacity=60) as client:
        recent = client.front.fleet.core.router.watch._recent  # type: ignore[attr-defined]
        right = predicted = 0
        for _ in range(faults):
            text = rng.choice(texts)
            for fake in client.engines:
                await fake._compute([ord(letter) for letter in text])
            number, kind = rng.randrange(2), rng.choice(["gap", "restart", "reset"])
            fake = client.engines[number]
            assert fake.publisher is not None
            if kind == "gap":
                fake.publisher.lose = rng.randint(1, 3)
                for _ in range(fake.publisher.lose):
                    await fake._compute([ord(letter) for letter in rng.choice(texts) + str(rng.random())])
                fake.publisher.lose = 0
            elif kind == "restart":
                await again(client, number)
            else:
                fake.blocks.clear()
                await fake.publisher.publish({"type": "AllBlocksCleared"})
            await fake._compute([ord(letter) for letter in str(rng.random()) * 3])
            await settled(client)
            recent.clear()
            await client.complete(text + str(rng.random()), 2)
            await settled(client)
            right += [expected == found for expected, found, _ in recent] == [True]
            predicted += sum(expected for expected, _, _ in recent)
        print(f"{right} of {faults} predicted to the token")
        assert right >= 0.999 * faults
        assert predicted > 0
        await client.idle()


async def test_a_prompt_that_the_engines_held_before_their_first_event_is_found_once_it_was_served() -> None:
    async with publishing(2, replay=False) as client:
        prompt = "a prompt from before " * 8
        for fake in client.engines:
            assert fake.publisher is not None
            fake.publisher.lose = 1
            await fake._compute([ord(letter) for letter in prompt])
        async with asyncio.timeout(5):
            while any(engine.cache.kind != "degraded" for engine in client.front.external.engines):
                for fake in client.engines:  # until the sockets are connected
                    await fake._compute([random.randrange(256) for _ in range(BLOCK)])
                await asyncio.sleep(0.02)
        recent = client.front.fleet.core.router.watch._recent  # type: ignore[attr-defined]
        for turn in range(3):
            await client.complete(f"{prompt}{turn}", 2)
        found = [(expected, cached) for expected, cached, _ in recent][-3:]
        assert found == [(0, found[0][1]), *[(len(prompt) // BLOCK * BLOCK,) * 2] * 2]
        await client.idle()


@pytest.mark.parametrize("payload", [b"\xc1", b"\xa1\xff", b"\x91" * 5000], ids=["no batch", "no text", "too deep"])
async def test_after_a_batch_that_cannot_be_read_others_are_and_it_is_not_asked_for_again(payload: bytes) -> None:
    async with publishing(1) as client:
        engine, fake = client.front.external.engines[0], client.engines[0]
        publisher = fake.publisher
        assert publisher is not None
        await client.complete("w" * 100, 2)
        await settled(client)
        asked = publisher.num_asked
        await publisher.publish_bytes(payload)
        for number in range(5):
            await fake._compute([number] * BLOCK)
        source = engine.cache._source
        assert source is not None
        async with asyncio.timeout(5):
            while source._applied < publisher.number - 1:
                await asyncio.sleep(0.01)
        assert (engine.cache.kind, engine.cache.num_blocks, engine.cache.num_gaps) == ("degraded", 5, 1)
        assert publisher.num_asked <= asked + 1  # in silence: whether there is more
        fake.blocks.clear()
        await publisher.publish({"type": "AllBlocksCleared"})
        await settled(client)
        assert engine.cache.kind == "exact"


async def test_an_engine_that_starts_again_is_known_from_its_first_event() -> None:
    async with publishing(1) as client:
        engine, fake = client.front.external.engines[0], client.engines[0]
        await client.complete("w" * 100, 2)
        await settled(client)
        port = int(fake.url.rsplit(":", 1)[1])
        await fake.stop()
        fake.publisher.restart()  # type: ignore[union-attr]
        async with asyncio.timeout(10):
            while engine.facts is not None and engine.state.value == "ready":
                await asyncio.sleep(0.02)
        await fake.start(port)
        async with asyncio.timeout(10):
            while engine.state.value != "ready":
                await asyncio.sleep(0.02)
        await client.complete("v" * 100, 2)
        await settled(client)
        assert engine.cache.kind == "exact" and engine.cache.num_blocks == 100 // BLOCK


async def test_blocks_that_are_not_plain_prompts_do_not_count() -> None:
    plain = stored([1], None, [5] * 16, 16)
    odd = [{**plain, "lora_id": 3}, {**plain, "medium": "CPU"}, {**plain, "extra_keys": [["salt"]]},
           {**plain, "kv_cache_spec_kind": "sliding_window"}, removed([1], "CPU"), {"type": "NewThing"}]  # fmt: skip
    assert read_batch(msgspec.msgpack.encode([0.0, odd, 0])) == []
    events = read_batch(
        msgspec.msgpack.encode({"ts": 0, "events": [plain, removed([1]), {"type": "AllBlocksCleared"}]})
    )
    assert events == [EngineBlocksStored([1], None, [5] * 16, 16), BlocksRemoved([1]), CacheCleared()]


NO_BATCHES = [b"\xc1", [1], [0.0, "x"], [0.0, [7]], [0.0, [["BlockRemoved", "x"]]]]
NO_BATCHES += [[0.0, [["BlockStored", [1], *rest]]] for rest in ((None, ["a"], 16), (None, [-1], 16), (1.5, [1], 16))]


async def test_what_a_sliding_window_gives_up_other_layers_still_hold() -> None:
    groups: set[int] = set()

    def read(*events: dict[str, object]) -> list[object]:
        return list(read_batch(msgspec.msgpack.encode([0.0, list(events), 0]), groups))

    full = stored(["h"], None, [1] * BLOCK, BLOCK, group_idx=0, kv_cache_spec_kind="full_attention")
    window = stored(["h"], None, [1] * BLOCK, BLOCK, group_idx=1, kv_cache_spec_kind="sliding_window")
    full["block_hashes"] = window["block_hashes"] = [7]
    assert [type(event) for event in read(full, window)] == [EngineBlocksStored]
    assert read({**removed([7]), "group_idx": 1}) == []
    assert read({**removed([7]), "group_idx": 0}) == read(removed([7])) == [BlocksRemoved([7])]
    assert read({**removed([7]), "group_idx": [1]}) == [BlocksRemoved([7])]


@pytest.mark.parametrize("content", NO_BATCHES)
async def test_what_is_no_batch_is_not_believed(content: object) -> None:
    payload = content if isinstance(content, bytes) else msgspec.msgpack.encode(content)
    with pytest.raises(UnreadableBatchError):
        read_batch(payload)


async def test_events_are_refused_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match="publishes no KV events"):
        EngineSpec("llamacpp", "http://h:1", kv_events="tcp://h:2")
    with pytest.raises(ConfigError, match="no effect without kv_events"):
        EngineSpec("vllm", "http://h:1", kv_replay="tcp://h:2")
