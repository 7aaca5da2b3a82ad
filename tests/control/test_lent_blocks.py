"""A decode worker brings up what its tiers hold of a prompt, before it lends its blocks to the one that computes it."""

import random
from dataclasses import dataclass, field

import pytest

from diptych.control.config import (
    BudgetConfig,
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
    TierConfig,
)
from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.engine.kvcache.tier_records import CancelLoad, LoadBlocks
from diptych.control.events import FirstToken, HandoffReserved, HandoffRevoked
from diptych.control.request import Request, only_table
from diptych.control.slo import NS_PER_MS
from diptych.control.step import SchedulerOutput, StepResult
from tests.control.checking_executor import token_at
from tests.control.driver import expect_answers
from tests.control.test_tiers import BLOCK, COPY_NS, prompt, random_driver, settle
from tests.control.tiered_driver import TieredDriver
from tests.laws import law


@dataclass
class LendingDriver(TieredDriver):
    """Also plays the prefill worker: it reads what it is lent when it is told of it, and computes the rest."""

    lent: dict[str, HandoffReserved] = field(default_factory=dict)
    num_seen: int = 0

    def lend(self, request_id: str, prompt: list[int], max_tokens: int = 8, *, is_remote_prefill: bool = True) -> None:
        """Blocks are to be reserved for this prompt."""
        hashes = hash_blocks(prompt, self.config.cache.block_size)
        request = Request(request_id, len(prompt), max_tokens, block_hashes=hashes)
        request.is_remote_prefill = is_remote_prefill
        self.log += self.core.reserve(request, self.now)
        self.prompts[request_id] = prompt
        self.executor.add(request, prompt)

    def check_step(self, output: SchedulerOutput) -> None:
        """What planning reports is sent before the step: it must be true by then."""
        super().check_step(output)
        self.look()

    def step(self) -> SchedulerOutput | None:
        """One step."""
        output = super().step()
        self.look()
        return output

    def look(self) -> None:
        """The prefill worker hears of reservations."""
        size = self.config.cache.block_size
        for event in self.log[self.num_seen :]:
            if isinstance(event, HandoffReserved):
                assert event.request_id not in self.lent, "reserved twice"
                assert 0 <= event.num_tier_tokens <= event.num_cached_tokens < len(self.prompts[event.request_id])
                for position in range(event.num_cached_tokens):
                    slot = self.executor.device[only_table(event.block_tables)[position // size]][position % size]
                    assert slot == self.fingerprint(event.request_id, position)
                self.lent[event.request_id] = event
        self.num_seen = len(self.log)

    def fingerprint(self, request_id: str, position: int) -> object:
        """What the slot of a token holds."""
        return (*self.prompts[request_id][: position + 1][-40:], position)

    def compute(self, request_id: str) -> None:
        """The prefill worker is done."""
        event, size = self.lent.pop(request_id), self.config.cache.block_size
        for position in range(event.num_cached_tokens, len(self.prompts[request_id])):
            block = only_table(event.block_tables)[position // size]
            self.executor.device[block][position % size] = self.fingerprint(request_id, position)
        sequence = self.executor.sequences[request_id]
        sequence.tokens.append(token_at(sequence.tokens))
        assert self.core.deliver(request_id, self.now, first_step_ns=self.now, first_token_ns=self.now)


def make(
    num_host_blocks: int = 100, *, has_disk: bool = False, budget: BudgetConfig | None = None, copy_ns: int = COPY_NS
) -> LendingDriver:
    tiers = TierConfig(copy_ns, clean_blocks=24, has_disk=has_disk, load_block_ns=100_000)
    cache = CacheConfig(40, BLOCK, num_host_blocks, watermark_blocks=1, tiers=tiers)
    settings = SchedulerConfig(budget=budget or BudgetConfig("fixed", 256), max_num_seqs=8)
    return LendingDriver(EngineConfig(cache, settings, max_model_len=600))


def evicted(driver: LendingDriver) -> LendingDriver:
    """Prompt 1 lies on the host alone."""
    for number in range(4):
        driver.add(f"first {number}", prompt(number))
        settle(driver)
    return driver


def until_reserved(driver: LendingDriver, request_id: str = "again") -> HandoffReserved:
    while request_id not in driver.lent:
        assert driver.step() is not None
    return driver.lent[request_id]


@pytest.mark.parametrize("is_remote_prefill", [True, False])
def test_what_the_host_holds_is_copied_and_then_the_reservation_is_reported(is_remote_prefill: bool) -> None:
    driver = evicted(make())
    driver.lend("again", prompt(1), is_remote_prefill=is_remote_prefill)
    driver.step()
    event = until_reserved(driver)
    tokens = 19 * BLOCK if is_remote_prefill else 0  # of KV that is sent, only the sending would be saved
    assert (event.num_cached_tokens, event.num_tier_tokens) == (tokens, tokens)
    assert bool(driver.outputs[-1].swap_in) is is_remote_prefill
    driver.compute("again")
    driver.run()
    assert len(driver.finished()) == 5


def test_while_streams_run_the_copies_take_what_their_objective_leaves() -> None:
    driver = evicted(make(budget=BudgetConfig("slo", 256, target_ns=8 * NS_PER_MS), copy_ns=500_000))
    driver.add("stream", 20, max_tokens=200)
    while not any(isinstance(event, FirstToken) and event.request_id == "stream" for event in driver.log):
        driver.step()
    driver.lend("again", prompt(1))
    begun = len(driver.outputs)
    assert until_reserved(driver).num_tier_tokens > 0
    copies = [len(output.swap_in) for output in driver.outputs[begun:]]
    assert sum(copies) * BLOCK == driver.lent["again"].num_tier_tokens
    assert sum(count > 0 for count in copies) > 1
    assert all(output.num_decodes == 1 for output in driver.outputs[begun:])
    driver.compute("again")
    driver.run()


@pytest.mark.parametrize("fault_share", [0.0, 1.0])
def test_what_only_the_disk_holds_is_read_first_and_computed_where_that_fails(fault_share: float) -> None:
    before = make(60, has_disk=True)
    before.add("first", prompt(1))
    settle(before)
    driver = make(60, has_disk=True)
    driver.contents, driver.fault_share = before.contents, fault_share
    driver.__post_init__()
    driver.lend("again", prompt(1))
    assert driver.core.load(driver.now).backlog_ns == 0  # it is computed elsewhere
    event = until_reserved(driver)
    assert len(driver.loads[0].hashes) == 19
    assert (event.num_tier_tokens == 19 * BLOCK) is (fault_share == 0)
    driver.compute("again")
    driver.run()


def test_a_load_that_takes_too_long_ends_and_the_prompt_is_reserved_without_it() -> None:
    before = make(60, has_disk=True)
    before.add("first", prompt(1))
    settle(before)
    driver = make(60, has_disk=True)
    driver.contents, driver.delay_ns = before.contents, 10**12
    driver.__post_init__()
    driver.lend("again", prompt(1))
    deadline_ns = driver.core.next_expiry_ns
    assert deadline_ns is not None
    driver.core.expire(deadline_ns)
    actions = driver.core.kv.tiers.take_actions()
    assert [type(action) for action in actions] == [LoadBlocks, CancelLoad]
    output = driver.core.begin_step(deadline_ns)
    events = driver.core.take_events()
    assert output is None or not output.swap_in
    assert [event.num_cached_tokens for event in events if isinstance(event, HandoffReserved)] == [0]


@pytest.mark.parametrize("when", ["waiting", "raising"])
def test_a_reservation_that_is_dropped_before_it_is_reported_leaves_nothing(when: str) -> None:
    driver = evicted(make())
    driver.lend("again", prompt(1))
    if when == "raising":
        output = driver.core.begin_step(driver.now)
        assert output is not None and output.swap_in
        driver.executor.execute(output)
        assert driver.core.scheduler.incoming.raising
    driver.log += driver.core.drop("again", driver.now)
    if when == "raising":
        driver.log += driver.core.end_step(StepResult(output.step_id), driver.now)
    driver.run()
    assert not driver.lent


@law(weight=0.5)
def test_every_lent_block_holds_what_is_said_whatever_the_tiers_do(seed: int) -> None:
    made, rng = random_driver(seed), random.Random(seed)
    driver = LendingDriver(made.config, seed=seed, delay_ns=made.delay_ns, fault_share=made.fault_share)
    stems = [[rng.randrange(1000) for _ in range(120)] for _ in range(3)]
    gone: set[str] = set()
    for number in range(30):
        for _ in range(rng.choice([0, 1, 6, 30])):
            driver.step()
        stem = rng.choice(stems)[: rng.randrange(20, 120)]
        words = [*stem, *(rng.randrange(1000) for _ in range(rng.randrange(1, 8)))]
        if rng.random() < 0.4:
            driver.add(f"own {number}", words, max_tokens=rng.randrange(1, 20))
        else:
            driver.lend(f"lent {number}", words, max_tokens=rng.randrange(2, 20))
        take_part(driver, rng, gone)
    for _ in range(3000):
        if not driver.core.requests:
            break
        driver.step()
        take_part(driver, rng, gone)
    driver.run()
    driver.core.kv.check()


def take_part(driver: LendingDriver, rng: random.Random, gone: set[str]) -> None:
    """The prefill worker computes some, the front end drops some, and those that are recalled."""
    recalled = {event.request_id for event in driver.log if isinstance(event, HandoffRevoked)}
    for request_id in list(driver.core.requests):
        is_reserved = request_id in driver.core.scheduler.incoming.reserved
        if request_id in recalled and is_reserved and request_id not in gone:
            drop(driver, request_id, gone)
        elif request_id in driver.lent and is_reserved and rng.random() < 0.3:
            driver.compute(request_id)
        elif rng.random() < 0.02:
            drop(driver, request_id, gone)


def drop(driver: LendingDriver, request_id: str, gone: set[str]) -> None:
    gone.add(request_id)
    driver.lent.pop(request_id, None)
    driver.log += driver.core.drop(request_id, driver.now)


def test_one_that_was_delivered_is_preempted_and_computed_as_any_other() -> None:
    driver = evicted(make())
    expect_answers(driver.core, 1)
    for number in range(2):
        driver.add(f"other {number}", prompt(10 + number, 100), max_tokens=150)
    driver.step()
    driver.lend("again", prompt(1), max_tokens=150)
    until_reserved(driver)
    driver.compute("again")
    driver.step()
    assert not driver.core.requests["again"].is_remote_prefill
    driver.run()
    assert driver.finished()["again"].num_preemptions
