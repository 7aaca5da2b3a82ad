"""A driver under virtual time for tests: an EngineCore, the checking executor, and the laws that hold at every step."""

import random
from dataclasses import dataclass, field, replace

from diptych.control.config import CacheConfig, EngineConfig, SchedulerConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.events import Event, FirstToken, RequestFinished, StepFinished
from diptych.control.kv_layout import KVGroup
from diptych.control.request import PeerRun, Request, RequestOptions, WaitClass
from diptych.control.slo import Slo
from diptych.control.step import SchedulerOutput
from tests.control.checking_executor import CheckingExecutor
from tests.control.stream_law import StreamLaw
from tests.control.yield_law import check_yielding


def expect_answers(core: EngineCore, num_tokens: int, count: int = 100) -> None:
    """Teach the core, by ``count`` answers, that they end after ``num_tokens`` tokens. With few it admits too much."""
    lengths = core.scheduler.lengths
    for _ in range(count):
        lengths.observe(lengths.group("standard", 100), num_tokens)


def in_groups(cache: CacheConfig, groups: tuple[KVGroup, ...], window_chunk: int) -> CacheConfig:
    """The same memory for as many tokens in full, in pages of several groups."""
    room = cache.num_blocks - cache.watermark_blocks
    return replace(
        cache,
        num_blocks=room * len(groups) + cache.watermark_blocks,
        num_host_blocks=cache.num_host_blocks * len(groups),
        groups=groups,
        window_chunk=window_chunk,
    )


@dataclass
class Driver:
    """Runs one worker; ``cost`` turns a plan into nanoseconds."""

    config: EngineConfig
    seed: int = 0
    now: int = 0
    log: list[Event] = field(default_factory=list)
    outputs: list[SchedulerOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        cache = self.config.cache
        self.core = EngineCore(self.config)
        self.streams = StreamLaw(self.core)
        self.executor = CheckingExecutor(cache.num_blocks, cache.block_size, cache.num_host_blocks, cache.groups)
        self.rng = random.Random(self.seed)
        self.prompts: dict[str, list[int]] = {}
        self.wanted: dict[str, tuple[int, int | None]] = {}  # max_tokens, and after how many the model stops
        self.is_configured = False

    def cost(self, output: SchedulerOutput) -> int:
        """A machine with 5 ms a step, 50 us a prompt token and 100 us a sequence."""
        features = output.features
        return (
            5_000_000 + 50_000 * features.prefill_tokens + 5 * features.prefill_attention
            + 100_000 * features.decode_seqs + 20 * features.decode_context
        )  # fmt: skip

    def add(
        self,
        request_id: str,
        prompt: int | list[int],
        max_tokens: int = 8,
        *,
        stop_after: int | None = None,
        priority: int = 0,
        slo: Slo | None = None,
        standing: WaitClass = WaitClass.NEW,
        service_class: str = "standard",
        best_effort_ns: int | None = None,
        peer_run: PeerRun | None = None,
    ) -> Request:
        """A request arrives now; a number stands for a prompt of that length that shares nothing."""
        if isinstance(prompt, int):
            prompt = [self.rng.randrange(1000) for _ in range(prompt)]
        hashes = hash_blocks(prompt, self.config.cache.block_size)
        options = RequestOptions(priority=priority, slo=slo, service_class=service_class, best_effort_ns=best_effort_ns)
        request = Request(request_id, len(prompt), max_tokens, block_hashes=hashes, options=options)
        request.wait_class_at_arrival, request.peer_run = standing, peer_run
        events = self.core.add_request(request, self.now)
        self.log += events
        self.prompts[request_id] = prompt
        self.wanted[request_id] = (max_tokens, stop_after)
        if not isinstance(events[0], RequestFinished):
            self.executor.add(request, prompt, stop_after)
        return request

    def configure(self, scheduler: SchedulerConfig) -> None:
        """Other settings from now on. What was seated under the old ones may be more than the new ones allow."""
        self.core.configure(scheduler)
        self.is_configured = True

    def abort(self, request_id: str) -> None:
        """The client goes away now."""
        self.log += self.core.abort(request_id, self.now)

    def step(self) -> SchedulerOutput | None:
        """One step. None when nothing is left to do."""
        output = self.core.begin_step(self.now)
        self.log += self.core.take_events()
        if output is None:
            return None
        self.outputs.append(output)
        self.check_step(output)
        result = self.executor.execute(output)
        self.now += self.cost(output)
        self.log += self.core.end_step(result, self.now)
        self.core.kv.check()
        batch = self.core.scheduler.batch
        assert batch.output_tokens == sum(batch.num_outputs(request) for request in batch)
        return output

    def check_step(self, output: SchedulerOutput) -> None:
        """The laws of one plan: streams, caps, budget, seats, and blocks that belong to one request unless cached."""
        if self.streams.engine is not self.core:  # a test has put another in its place
            self.streams = StreamLaw(self.core)
        self.streams.check(output)
        check_yielding(self.core, output)
        core, settings = self.core, self.core.config.scheduler
        scheduler, caps = core.scheduler, settings.caps
        if caps.max_partial_prefills and not self.is_configured:
            prompts = [request for request in scheduler.prefilling.values() if not request.is_stream]
            prompts = [
                request for request in prompts if not request.options.is_best_effort
            ]  # these may come back at once
            assert len(prompts) <= caps.max_partial_prefills
        if caps.max_long_partial_prefills and not self.is_configured:
            in_step = {chunk.request_id for chunk in output.prefills} | set(scheduler.prefilling)
            longs = [r for r in in_step if core.requests[r].is_long and not core.requests[r].options.is_best_effort]
            assert len(longs) <= caps.max_long_partial_prefills
        assert scheduler.block_owners.num_running <= self.config.scheduler.max_num_seqs
        tokens = output.features.prefill_tokens + output.features.decode_seqs
        if settings.budget.kind != "whole":
            assert self.is_configured or tokens <= settings.budget.max_batched_tokens
        else:
            assert not (output.prefills and output.num_decodes)
        block_owners: dict[int, int] = {}
        for request in core.requests.values():
            blocks = [block for block_ids in request.block_tables for block in block_ids]
            assert len(blocks) == len(set(blocks)) == request.num_blocks
            assert request.tables == tuple(tuple(block_ids) for block_ids in request.block_tables)
            for block in blocks:
                block_owners[block] = block_owners.get(block, 0) + 1
        for block, count in block_owners.items():
            assert core.kv.pool.references(block) == count
            assert count == 1 or core.kv.pool.prefix_cache.holds(block)
        assert core.kv.pool.num_used == len(block_owners)

    def run(self, max_steps: int = 100_000) -> None:
        """Until everything has ended and nothing is left behind."""
        for _ in range(max_steps):
            if self.step() is None:
                break
        else:
            raise AssertionError(f"not done after {max_steps} steps: livelock")
        assert not self.core.requests
        assert self.core.kv.pool.num_used == 0
        assert self.core.kv.host.num_available == self.core.kv.host.num_blocks
        assert not self.executor.sequences
        assert not self.core.kv._in_progress

    def finished(self) -> dict[str, RequestFinished]:
        """Terminal events by request; asserts that there is one each."""
        ended: dict[str, RequestFinished] = {}
        for event in self.log:
            if isinstance(event, RequestFinished):
                assert event.request_id not in ended, "ended twice"
                ended[event.request_id] = event
        return ended

    def first_token_ns(self, request_id: str) -> int:
        """When its first token came."""
        return next(e.time_ns for e in self.log if isinstance(e, FirstToken) and e.request_id == request_id)

    def steps(self) -> list[StepFinished]:
        """The steps that computed something."""
        return [event for event in self.log if isinstance(event, StepFinished)]
