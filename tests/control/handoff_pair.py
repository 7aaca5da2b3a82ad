"""Two workers that hand prompts over to each other, with KV that can be checked, and a cluster that is late.

In one memory (borrowed blocks), or each with its own: then the KV of a chunk is read at any time between its sending
and the end of its transfer.
"""

import random
from dataclasses import dataclass, field, replace

from diptych.control.commands import NOT_RESERVED, Drop, Prefill, Release, Reserve, Send
from diptych.control.config import EngineConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.engine.outgoing import SendChunk
from diptych.control.engine.worker_core import (
    CancelTransfer,
    CommitTransfer,
    ExpectTransfer,
    ForgetTransfer,
    OpenTransfer,
    TransferAction,
    TransferCommitted,
    WorkerCore,
)
from diptych.control.events import (
    Event,
    FirstToken,
    HandoffDelivered,
    HandoffReleased,
    HandoffReserved,
    HandoffRevoked,
    RequestAdmitted,
    RequestFinished,
)
from diptych.control.request import Request
from tests.control.checking_executor import CheckingExecutor, token_at

MS = 1_000_000


@dataclass
class Attempt:
    """One prompt, computed by the worker ``prefill`` and answered by the worker ``decode``."""

    prompt: list[int]
    max_tokens: int
    prefill: int
    decode: int
    is_early: bool
    expected: ExpectTransfer | None = None
    chunks: list[SendChunk] = field(default_factory=list)  # that are not read yet
    is_committed: bool = False
    is_at_prefill: bool = False
    is_closing: bool = False
    is_delivered: bool = False
    num_cached: int = 0
    rows: int = 0  # tokens that were copied, counted in each group
    end: RequestFinished | None = None


class HandoffPair:
    """``borrows``: the workers lie in one memory."""

    def __init__(self, configs: tuple[EngineConfig, EngineConfig], rng: random.Random, *, borrows: bool) -> None:
        first, second = configs
        if borrows:
            cache = replace(second.cache, first_block=first.cache.num_blocks)
            second = replace(second, cache=cache)
        self.rng, self.borrows, self.now = rng, borrows, 0
        self.cores = [WorkerCore(EngineCore(config), publishes_kv=False) for config in (first, second)]
        self.executors = [
            CheckingExecutor(config.cache.num_blocks, config.cache.block_size, config.cache.num_host_blocks,
                             config.cache.groups)
            for config in (first, second)
        ]  # fmt: skip
        if borrows:
            device = self.executors[0].device + self.executors[1].device
            for executor in self.executors:
                executor.device = device
        self.attempts: dict[str, Attempt] = {}
        self.log: list[Event] = []

    # -- what a cluster does ------------------------------------------------------------------------------------------

    def request(self, request_id: str, attempt: Attempt, worker: int) -> Request:
        """The request as a worker gets it; its executor gets the tokens."""
        size = self.cores[worker].engine.config.cache.block_size
        hashes = hash_blocks(attempt.prompt, size)
        return Request(request_id, len(attempt.prompt), attempt.max_tokens, block_hashes=hashes)

    def start(self, request_id: str, prompt: list[int], max_tokens: int, prefill: int, decode: int) -> Attempt:
        """A request, served whole where both workers are one."""
        is_early = not self.borrows and self.rng.random() < 0.5
        attempt = self.attempts[request_id] = Attempt(prompt, max_tokens, prefill, decode, is_early)
        request = self.request(request_id, attempt, decode)
        if prefill == decode:
            self.cores[decode].serve(request, self.now)
        else:
            command = Reserve(decode, request_id, request_id, 0, 0, self.borrows)
            self.cores[decode].reserve(command, request, self.now)
        self._add(request_id, attempt, decode, request)
        if prefill != decode and is_early and not attempt.is_closing:
            self._prefill(request_id, attempt, NOT_RESERVED, ())
        self.look()
        return attempt

    def _add(self, request_id: str, attempt: Attempt, worker: int, request: Request) -> None:
        if request_id in self.cores[worker].engine.requests:
            self.executors[worker].add(request, attempt.prompt)

    def _prefill(self, request_id: str, attempt: Attempt, num_cached: int, tables: tuple[tuple[int, ...], ...]) -> None:
        attempt.is_at_prefill = True
        request = self.request(request_id, attempt, attempt.prefill)
        at_target = (attempt.decode, num_cached, tables)
        command = Prefill(attempt.prefill, request_id, request_id, 0, *at_target, 0)
        self.cores[attempt.prefill].prefill(command, request, self.now)
        self._add(request_id, attempt, attempt.prefill, request)

    def drop(self, request_id: str) -> None:
        """The client goes away: borrowed blocks are given back when their writer has let go."""
        attempt = self.attempts[request_id]
        if attempt.is_closing or attempt.end:
            return
        attempt.is_closing = True
        attempt.chunks.clear()
        if attempt.is_at_prefill:
            self.cores[attempt.prefill].handle(Drop(attempt.prefill, request_id), self.now)
        if not (self.borrows and attempt.is_at_prefill):
            self.cores[attempt.decode].handle(Drop(attempt.decode, request_id), self.now)
        self.look()

    def look(self) -> None:
        """Take in what the workers report, and carry out what they want of their connectors."""
        while any(core.has_output for core in self.cores):
            for worker, core in enumerate(self.cores):
                outbox = core.take_outbox()
                for action in outbox.before:
                    self._act(worker, action)
                for event in outbox.events:
                    self._on_event(worker, event)
                for action in outbox.after:
                    self._act(worker, action)

    def _on_event(self, worker: int, event: Event) -> None:
        self.log.append(event)
        if not isinstance(
            event, HandoffReserved | HandoffDelivered | HandoffReleased | RequestFinished | FirstToken | HandoffRevoked
        ):
            return
        attempt = self.attempts[event.request_id]
        match event:
            case HandoffReserved() if not attempt.is_closing:
                attempt.num_cached = event.num_cached_tokens
                if attempt.is_early:
                    send = Send(attempt.prefill, event.request_id, event.num_cached_tokens)
                    self.cores[attempt.prefill].handle(send, self.now)
                else:
                    tables = event.block_tables if self.borrows else ()
                    self._prefill(event.request_id, attempt, event.num_cached_tokens, tables)
            case HandoffRevoked():
                self.drop(event.request_id)
            case HandoffDelivered():
                attempt.is_delivered = True
                self.cores[attempt.prefill].handle(Release(attempt.prefill, event.request_id), self.now)
            case HandoffReleased():
                self._gone(event.request_id, attempt, worker)
            case RequestFinished():
                if worker == attempt.decode:
                    attempt.end = event
                self._gone(event.request_id, attempt, worker)
                if not attempt.is_closing and worker == attempt.prefill != attempt.decode:
                    attempt.is_closing = True  # its prompt cannot be computed, or its first token was its last
                    self.cores[attempt.decode].handle(Drop(attempt.decode, event.request_id), self.now)

    def _gone(self, request_id: str, attempt: Attempt, worker: int) -> None:
        was_there, attempt.is_at_prefill = attempt.is_at_prefill, attempt.is_at_prefill and worker != attempt.prefill
        if self.borrows and was_there and not attempt.is_at_prefill and attempt.is_closing and not attempt.end:
            self.cores[attempt.decode].handle(Drop(attempt.decode, request_id), self.now)

    # -- what connectors do -------------------------------------------------------------------------------------------

    def _act(self, worker: int, action: TransferAction) -> None:
        attempt = self.attempts[action.attempt_id]
        match action:
            case ExpectTransfer():
                attempt.expected = action
            case SendChunk():
                assert not self.borrows
                attempt.chunks.append(action)
            case CommitTransfer():
                attempt.is_committed = True
            case CancelTransfer() | ForgetTransfer():
                attempt.chunks.clear()
                attempt.is_committed = attempt.is_committed and isinstance(action, ForgetTransfer)
                if isinstance(action, ForgetTransfer):
                    attempt.expected = None
            case OpenTransfer():
                pass

    def carry(self) -> None:
        """A chunk is read and written, or a commit delivered, where there is one."""
        under_way = [
            (name, attempt)
            for name, attempt in self.attempts.items()
            if attempt.expected and not attempt.is_delivered and not attempt.is_closing
            and (attempt.chunks or attempt.is_committed)
        ]  # fmt: skip
        if not under_way:
            return
        name, attempt = self.rng.choice(under_way)
        if attempt.chunks:
            self._copy(attempt, attempt.chunks.pop(0))
        else:
            tokens = self.executors[attempt.decode].sequences[name].tokens
            tokens.append(token_at(tokens))
            assert self.cores[attempt.decode].on_transfer(TransferCommitted(name, self.now, self.now), self.now)
        self.look()

    def _copy(self, attempt: Attempt, chunk: SendChunk) -> None:
        """From where the sender has it to where the receiver expects it."""
        expected, size = attempt.expected, self.executors[0].block_size
        assert expected is not None
        source, target = self.executors[attempt.prefill].device, self.executors[attempt.decode].device
        numbers = range(len(self.executors[0].groups))
        for number in numbers:
            first = chunk.first_blocks[number] if chunk.first_blocks else 0
            theirs = expected.first_blocks[number] if expected.first_blocks else 0
            assert first == theirs, "both leave out the same"
            for position in range(max(chunk.start, first * size), chunk.start + chunk.num_tokens):
                here = chunk.block_tables[number][position // size - first]
                there = expected.block_tables[number][position // size - theirs]
                target[there][position % size] = source[here][position % size]
                attempt.rows += 1

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self, worker: int) -> bool:
        """One step of one worker. Whether there was one."""
        core = self.cores[worker]
        output = core.begin_step(self.now)
        self.look()
        if output is None:
            return False
        for chunk in output.prefills:
            self._check_place(worker, chunk.request_id)
        for _, block_id in output.block_copies:
            pool = self.cores[1 - worker].engine.kv.pool
            assert pool.references(block_id) == 1 and not pool.prefix_cache.holds(block_id), "others may read it"
        result = self.executors[worker].execute(output)
        self.now += 5 * MS + 50_000 * output.features.prefill_tokens
        core.end_step(output, result, self.now)
        core.end_turn(self.now)
        self.look()
        for each in self.cores:
            each.engine.kv.check()
        return True

    def _check_place(self, worker: int, request_id: str) -> None:
        """What is computed into another worker's blocks is computed into blocks that it holds for that."""
        request, attempt = self.cores[worker].engine.requests[request_id], self.attempts[request_id]
        if not request.remote_block_tables:
            return
        kv = self.cores[attempt.decode].engine.kv
        held = self.cores[attempt.decode].engine.requests[request_id]
        assert kv.reserved_tables(held) == request.remote_block_tables
        cache = self.cores[attempt.decode].engine.config.cache
        own = range(cache.first_block, cache.first_block + cache.num_blocks)
        size, start = cache.block_size, request.num_computed_tokens
        for number, block_ids in enumerate(request.block_tables):
            first = request.first_blocks[number] if request.first_blocks else 0
            for index, block_id in enumerate(block_ids, first):
                if block_id in own and index >= start // size:
                    assert kv.pool.references(block_id) == 1, "it is written, and others may read it"

    def run(self) -> None:
        """Until everything has ended."""
        idle = 0
        for _ in range(100_000):
            moved = [self.step(worker) for worker in self.rng.sample((0, 1), 2)]
            before = len(self.log)
            self.carry()
            idle = 0 if any(moved) or len(self.log) > before or self._is_carrying() else idle + 1
            if idle > 2:
                break
        else:
            raise AssertionError("not done: livelock")
        for core in self.cores:
            assert core.is_idle, core.engine.requests
            assert not core.engine.kv.pool.num_used and core.engine.kv.is_unused
            assert core.engine.kv.host.num_available == core.engine.kv.host.num_blocks
        assert not any(executor.sequences for executor in self.executors)

    def _is_carrying(self) -> bool:
        return any(
            attempt.chunks or (attempt.is_committed and attempt.expected and not attempt.is_delivered)
            for attempt in self.attempts.values()
            if not attempt.is_closing
        )

    def admitted(self) -> dict[str, int]:
        """What requests found when they were first admitted where they are computed."""
        return {
            event.request_id: event.num_cached_tokens
            for event in self.log
            if isinstance(event, RequestAdmitted) and event.is_first
        }
