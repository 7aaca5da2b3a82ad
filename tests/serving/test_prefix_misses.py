"""Prefix misses in a whole front end, with real engines in virtual time: every reason is known from how a prompt was
made."""

import pickle
import random
from array import array
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from in_process_fleet import ALWAYS, BLOCK_SIZE, TOKENIZER, InProcessFleet, in_process_fleet
from virtual_time import in_virtual_time

from diptych.control.cluster.cluster_config import cluster_config
from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.errors import ConfigError
from diptych.control.events import KVEvents, RequestAdmitted
from diptych.control.misses.miss_explainer import MissExplainer
from diptych.control.misses.prefix_history import Origin, PrefixHistory
from diptych.control.misses.prefix_miss import NEW, MissReason, PrefixMiss
from diptych.control.request import RequestOptions
from diptych.serving.api.miss_views import client_view, misses_reply
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.fleet_plan import plan_fleet
from diptych.serving.link.engine_options import EngineOptions, MemoryOptions
from diptych.serving.misses.difference import alike_again, kind_of
from diptych.serving.misses.hashed_prompts import HashedPrompt

VOCABULARY = range(300, 1500)


@dataclass
class Conversation:
    """What was sent under one id, with its answer, without the last token of that: it was never computed."""

    request_id: str
    tokens: list[int]
    num_prompt: int
    salt: str | None
    worker: int


@dataclass
class World:
    """Sends prompts whose fate it knows."""

    setup: InProcessFleet
    rng: random.Random
    sent: dict[str, Conversation] = field(default_factory=dict)  # all
    known: list[Conversation] = field(default_factory=list)  # those that are in the cache
    evicted: dict[bytes, tuple[str, int]] = field(default_factory=dict)  # by whom, when: watched at the pool itself
    count: int = 0

    def text(self, length: int) -> list[int]:
        """Tokens that no other text has in a row."""
        return [self.rng.choice(VOCABULARY) for _ in range(length)]

    def tokens_of(self, request_id: str) -> list[int]:
        """What was sent under this id, with its answer."""
        return self.sent[request_id].tokens

    async def send(
        self, prompt: list[int], salt: str | None = None, **sampling: Any
    ) -> tuple[PrefixMiss, Conversation]:
        """Send a prompt, wait for its answer, and return why it missed."""
        self.count += 1
        request_id = f"r{self.count}"
        kvs = [worker.engine.core.engine.kv for worker in self.setup.workers if worker.engine]
        before = [set(kv.pool.prefix_cache) for kv in kvs]
        options = RequestOptions(cache_salt=salt)
        length = 1 if len(prompt) % BLOCK_SIZE >= BLOCK_SIZE - 2 else 3  # this runner hashes no blocks of answers
        stream = self.setup.client.submit(request_id, prompt, options, max_tokens=length, **sampling)
        answer = await self.setup.client.read(request_id)
        for kv, held in zip(kvs, before, strict=True):
            for block_hash in held - set(kv.pool.prefix_cache):
                self.evicted[block_hash] = request_id, self.setup.time.now
        assert stream.prefix_miss is not None
        miss = stream.prefix_miss
        assert miss.num_cached_tokens + sum(count for _, count in miss.spent) == len(prompt)
        conversation = Conversation(request_id, [*prompt, *answer[:-1]], len(prompt), salt, miss.worker)
        self.sent[request_id] = conversation
        self.known.append(conversation)
        return miss, conversation


def full(count: int) -> int:
    """The tokens of full blocks."""
    return count // BLOCK_SIZE * BLOCK_SIZE


def common(tokens: list[int], other: list[int]) -> int:
    """Leading tokens in common."""
    pairs = enumerate(zip(tokens, other, strict=False))
    return next((at for at, (mine, its) in pairs if mine != its), min(len(tokens), len(other)))


async def check_new(world: World) -> None:
    prompt, before = world.text(world.rng.randint(40, 200)), list(world.sent.values())
    miss, _ = await world.send(prompt)
    by_chance = max((common(other.tokens, prompt) for other in before if other.salt is None), default=0)
    assert (miss.reason, miss.first_token, miss.num_again_tokens) == (MissReason.NEVER_SEEN, by_chance, 0)


async def check_continued(world: World, old: Conversation) -> None:
    """The next turn of a conversation: all of it was seen, and the rest is new. It differs where the conversation was
    continued before, in another way."""
    prompt, before = [*old.tokens, *world.text(world.rng.randint(5, 60))], list(world.sent.values())
    miss, _ = await world.send(prompt, old.salt)
    same_salt = [other for other in before if other.salt == old.salt]
    first = max(common(other.tokens, prompt) for other in same_salt)
    goes_on = any(common(other.tokens, prompt) == first < len(other.tokens) for other in same_salt)
    reason = MissReason.DIFFERS if goes_on else MissReason.NEVER_SEEN
    assert (miss.reason, miss.first_token) == (reason, first)
    assert world.tokens_of(miss.nearest)[: len(old.tokens)] == old.tokens
    assert miss.num_cached_tokens >= full(len(old.tokens) - 1)


async def check_repeated(world: World, old: Conversation) -> None:
    miss, _ = await world.send(old.tokens[: old.num_prompt], old.salt)
    assert (miss.reason, miss.first_token) == (MissReason.NONE, None)
    assert miss.num_seen_tokens == old.num_prompt


async def check_edited(world: World, old: Conversation) -> None:
    """A token is replaced, left out or put in at a known place."""
    at = world.rng.randrange(BLOCK_SIZE, old.num_prompt)
    prompt, kind = old.tokens[: old.num_prompt], world.rng.choice(("replace", "insert"))
    prompt[at : at + (kind == "replace")] = [10_000 + world.count]  # a token that came nowhere else
    miss, _ = await world.send(prompt, old.salt)
    assert (miss.reason, miss.first_token) == (MissReason.DIFFERS, at), (kind, miss)
    assert world.tokens_of(miss.nearest)[:at] == prompt[:at]
    assert miss.num_cached_tokens == full(at)


async def check_other_salt(world: World, old: Conversation) -> None:
    miss, _ = await world.send(old.tokens[: old.num_prompt], f"salt {world.count}")
    assert (miss.reason, miss.first_token, miss.num_cached_tokens) == (MissReason.OTHER_SALT, 0, 0)
    assert world.tokens_of(miss.nearest)[: full(old.num_prompt - 1)] == old.tokens[: full(old.num_prompt - 1)]
    assert dict(miss.spent)[MissReason.OTHER_SALT] == full(old.num_prompt - 1)


async def check_not_read(world: World, old: Conversation) -> None:
    miss, _ = await world.send(old.tokens[: old.num_prompt], old.salt, prompt_logprobs=0)
    assert (miss.reason, miss.first_token, miss.num_cached_tokens) == (MissReason.CACHE_NOT_READ, 0, 0)


async def check_evicted(world: World, old: Conversation) -> None:
    """Other prompts take all blocks: the first one that is missing was taken by one of them, at that time."""
    hashes = hash_blocks(old.tokens[: old.num_prompt], BLOCK_SIZE, old.salt)
    world.evicted.clear()
    while hashes[0] not in world.evicted:
        await world.send(world.text(world.rng.randint(300, 1200)))
    miss, again = await world.send(old.tokens[: old.num_prompt], old.salt)
    taker, until_ns = world.evicted[hashes[miss.num_cached_tokens // BLOCK_SIZE]]
    assert (miss.reason, miss.first_token, miss.num_cached_tokens) == (MissReason.EVICTED, 0, 0)
    assert miss.evicted_for == taker
    assert miss.lost_ns is not None and miss.lost_ns <= until_ns
    assert dict(miss.spent)[MissReason.EVICTED] == full(old.num_prompt - 1)
    world.known = [again]  # of the others, parts may be gone


CHECKS = (check_continued, check_repeated, check_edited, check_edited, check_other_salt, check_not_read)


def conversations(count: int, seed: int) -> Counter[str]:
    """Generate ``count`` conversations, and assert that every reason is right. Returns how many there were of each."""
    reasons: Counter[str] = Counter()

    @in_virtual_time
    async def scenario() -> None:
        async with in_process_fleet(explain_misses="on") as setup:
            world = World(setup, random.Random(seed))
            while world.count < count:
                usable = [old for old in world.known if old.num_prompt > BLOCK_SIZE + 1]
                num_tokens = sum(len(old.tokens) for old in world.known)
                if not usable or world.rng.random() < 0.15:
                    await check_new(world)
                elif num_tokens > 4000:  # before blocks are lost that a check counts on
                    await check_evicted(world, world.rng.choice(usable))
                else:
                    await world.rng.choice(CHECKS)(world, world.rng.choice(usable))
            assert setup.fleet.misses is not None
            explainer = setup.fleet.misses.explainer
            explainer.history.check()
            reasons.update({str(reason): number for reason, number in explainer.summary.requests.items()})
            assert explainer.summary.tokens.total() == explainer.summary.num_computed_tokens
            await setup.check_nothing_is_left()

    scenario()
    return reasons


def test_every_generated_conversation_gets_its_reason() -> None:
    reasons = conversations(120, seed=1)
    assert set(reasons) == {"never_seen", "none", "differs", "other_salt", "cache_not_read", "evicted"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_every_one_of_a_thousand_generated_conversations_gets_its_reason(seed: int) -> None:
    assert conversations(1000, seed).total() >= 1000


# -- fleets -----------------------------------------------------------------------------------------------------------

PROMPT = list(range(400, 500))
ROUND_ROBIN = cluster_config(routing="round_robin")


def misses_of(setup: InProcessFleet) -> list[PrefixMiss]:
    """All that were explained, in their order."""
    assert setup.fleet.misses is not None
    return [explained.miss for explained in setup.fleet.misses.recent]


@in_virtual_time
async def test_a_prompt_that_another_worker_holds_was_routed_elsewhere() -> None:
    async with in_process_fleet(both=2, cluster=ROUND_ROBIN, explain_misses="on") as setup:
        for request_id in ("a", "b"):
            setup.client.submit(request_id, PROMPT)
            await setup.client.read(request_id)
        first, second = misses_of(setup)
        assert (second.reason, second.first_token) == (MissReason.ROUTED_ELSEWHERE, 0)
        assert (second.holders, second.worker) == ((first.worker,), 1 - first.worker)


@in_virtual_time
async def test_a_prompt_that_another_worker_computes_at_that_moment_is_being_computed() -> None:
    async with in_process_fleet(both=2, cluster=ROUND_ROBIN, explain_misses="on") as setup:
        setup.client.submit("a", PROMPT * 10)
        setup.client.submit("b", PROMPT * 10)
        await setup.client.read("b")
        assert [miss.reason for miss in misses_of(setup)] == [MissReason.NEVER_SEEN, MissReason.BEING_COMPUTED]


@pytest.mark.parametrize("transfer", ["shared_memory", "tcp"])
def test_a_handoffs_prompt_is_found_by_the_next_one(transfer: str) -> None:
    @in_virtual_time
    async def scenario() -> None:
        workers = {"prefill": 1, "decode": 1, "cluster": ALWAYS, "transfer": transfer}
        async with in_process_fleet(**workers, explain_misses="on") as setup:
            for request_id, prompt in (("a", PROMPT), ("b", PROMPT), ("c", [*PROMPT[:70], 9, *PROMPT])):
                setup.client.submit(request_id, prompt)
                await setup.client.read(request_id)
            misses = misses_of(setup)
            assert [miss.reason for miss in misses] == [MissReason.NEVER_SEEN, MissReason.NONE, MissReason.DIFFERS]
            assert [miss.first_token for miss in misses] == [0, None, 70]
            assert misses[1].num_cached_tokens == 96

    scenario()


@in_virtual_time
async def test_what_a_lost_worker_held_is_lost() -> None:
    async with in_process_fleet(explain_misses="on") as setup:
        setup.client.submit("a", PROMPT)
        await setup.client.read("a")
        setup.workers[0].lose()
        await setup.when(lambda: setup.fleet.num_restarts == 1 and setup.fleet.is_routable)
        setup.client.submit("b", PROMPT)
        await setup.client.read("b")
        miss = misses_of(setup)[1]
        assert (miss.reason, miss.lost_worker) == (MissReason.WORKER_LOST, 0)


@in_virtual_time
async def test_a_request_that_was_abandoned_before_its_prefill_ended_was_not_kept() -> None:
    async with in_process_fleet(explain_misses="on") as setup:
        setup.client.submit("a", PROMPT * 15)
        await setup.when(lambda: misses_of(setup))
        setup.client.leave("a")
        await setup.check_nothing_is_left()
        setup.client.submit("b", PROMPT * 15)
        await setup.client.read("b")
        assert misses_of(setup)[1].reason in (MissReason.NOT_KEPT, MissReason.NONE)


@in_virtual_time
async def test_nothing_is_noted_and_nothing_more_is_sent_when_misses_are_not_explained() -> None:
    async with in_process_fleet() as setup:
        stream = setup.client.submit("a", PROMPT)
        await setup.client.read("a")
        assert setup.fleet.misses is None and stream.prefix_miss is None
        engine = setup.workers[0].engine
        assert engine is not None and not engine.core.engine.config.cache.names_evictors


# -- what is computed again, and the text of it -----------------------------------------------------------------------

RULES = "You are a careful assistant. Answer in one sentence. Never invent names of functions. " * 8


async def stamped(setup: InProcessFleet, stamps: list[str]) -> None:
    """Prompts that differ in a time stamp, with the same rules and another question behind it."""
    for number, stamp in enumerate(stamps):
        text = f"Today is 2026-11-22 {stamp}.\n{RULES}\nWhat is {number * 7919}?"
        setup.client.submit(f"s{number}", TOKENIZER.encode(text))
        await setup.client.read(f"s{number}")


@in_virtual_time
async def test_a_time_stamp_before_the_rules_is_found_with_what_it_costs() -> None:
    async with in_process_fleet(explain_misses="text") as setup:
        assert setup.fleet.misses is not None
        setup.fleet.misses.decode = TOKENIZER.decode
        await stamped(setup, ["15:42:10", "15:42:55", "15:43:07", "16:01:33"])
        reply = misses_reply(setup.fleet.misses, 10, with_text=True)
        assert reply.reasons == {"never_seen": 1, "differs": 3}
        place = reply.places[0]
        assert place.requests == 3
        assert place.share > 0.5  # of at most 3/4: text at the edges of chunks is not counted
        assert place.text is not None and place.text.kind == "a time stamp"
        assert (place.text.was, place.text.now) == ("15:43:07", "16:01:33")
        assert "a time stamp" in reply.words[-1]
        hidden = misses_reply(setup.fleet.misses, 10, with_text=False)
        assert "16:01" not in hidden.model_dump_json() and "careful" not in hidden.model_dump_json()


@in_virtual_time
async def test_without_texts_the_same_is_found_and_nothing_that_is_kept_can_be_read() -> None:
    async with in_process_fleet(explain_misses="on") as setup:
        watch = setup.fleet.misses
        assert watch is not None
        await stamped(setup, ["15:42:10", "15:42:55", "15:43:07", "16:01:33"])
        reply = misses_reply(watch, 10, with_text=True)
        assert reply.places[0].requests == 3 and reply.places[0].text is None
        assert 0 < reply.places[0].differing_tokens < 64
        kept = pickle.dumps([watch.explainer.history, watch.explainer.chunks])
        token_ids = array("I", TOKENIZER.encode(RULES)[8:40]).tobytes()
        assert token_ids not in kept


def test_a_client_learns_no_token_of_another_keys_prompts() -> None:
    miss = PrefixMiss(
        time_ns=0, request_id="b", tenant="mine", worker=0, num_prompt_tokens=200, num_cached_tokens=64,
        reason=MissReason.DIFFERS, first_token=75, num_seen_tokens=75, block_size=32,
        spent=(("block_rounding", 11), ("differs", 100), ("new", 25)), nearest="a", nearest_tenant="yours",
        num_differing_tokens=3,
    )  # fmt: skip
    theirs, mine = client_view(miss), client_view(replace(miss, nearest_tenant="mine"))
    assert theirs == {
        "reason": "never_seen", "first_token": 64, "seen_tokens": 64, "computed": {NEW: 136}, "differing_tokens": None,
    }  # fmt: skip
    assert mine is not None and (mine["first_token"], mine["differing_tokens"]) == (75, 3)


def test_the_history_forgets_what_was_not_used_for_longest_and_stays_bounded() -> None:
    history, rng = PrefixHistory(4, max_blocks=50), random.Random(3)
    prompts = [[rng.randrange(3) for _ in range(rng.randint(1, 40))] for _ in range(300)]
    for number, prompt in enumerate(prompts):
        sealed = HashedPrompt(prompt, 4, b"key", "salt" if number % 3 == 0 else None)
        history.add(sealed, Origin(str(number), ""))
        history.check()
        assert history.match(sealed).num_tokens == len(prompt)
    assert len(history) == 50


@pytest.mark.parametrize(
    ("was", "now", "kind"),
    [
        ("15:42:10", "15:43:07", "a time stamp"),
        ("2026-11-22", "2026-11-23", "a date"),
        ("1763826130", "1763826177", "a time stamp"),
        ("3f2a9c1e-77aa-4c0e-9d0b-000000000001", "99887766-77aa-4c0e-9d0b-000000000001", "an id"),
        ("a1b2c3d4e5f60718", "b1b2c3d4e5f60719", "an id"),
        ("41", "1,337", "a number"),
        ("Alice", "alice", "upper and lower case"),
        ("Alice", "Bob", ""),
    ],
)
def test_the_kind_of_a_difference_is_named(was: str, now: str, kind: str) -> None:
    assert kind_of(was, now) == kind


def test_two_texts_are_alike_again_after_as_few_tokens_as_possible() -> None:
    assert alike_again([1, 2, 7, 8, 9, 10, 11], [5, 7, 8, 9, 10, 11]) == (2, 1)
    assert alike_again([1, 2, 3], [4, 5, 6]) is None
    assert alike_again([7, 8, 9, 10], [5, 7, 8, 9, 10]) == (0, 1)


def test_settings_without_an_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match="explain_misses is 'yes'; one of off, on, text"):
        FleetOptions(explain_misses="yes")  # type: ignore[arg-type]
    options = EngineOptions(memory=MemoryOptions(prefix_cache=False))
    with pytest.raises(ConfigError, match="explain_misses has no effect without the prefix cache"):
        plan_fleet(options, FleetOptions(explain_misses="on"))


def test_the_same_inputs_in_the_same_order_give_the_same_reasons() -> None:
    def explained() -> list[PrefixMiss]:
        explainer, rng, misses = MissExplainer(4), random.Random(5), []
        for number in range(200):
            prompt = HashedPrompt([rng.randrange(3) for _ in range(rng.randint(1, 40))], 4, b"key")
            explainer.on_arrived(str(number), prompt)
            events = [RequestAdmitted(0, str(number), 0, True), KVEvents(0, number, prompt.hashes, ())]
            misses += explainer.on_events(0, events, number)
            if rng.random() < 0.3 and prompt.hashes:
                gone = KVEvents(0, number, (), prompt.hashes[-1:], ((str(number), 1),))
                misses += explainer.on_events(0, [gone], number)
            explainer.on_gone(str(number), prompt.followed_by([1, 2]))
        assert explainer.summary.tokens.total() == explainer.summary.num_computed_tokens
        return misses

    assert explained() == explained()
