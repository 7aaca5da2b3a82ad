"""The law of streams: how long one that has lost its blocks may wait for them, checked against every plan of a worker.

Written from the docstring of the scheduler, not from its code. Time is counted in decode steps of the worker (ticks):
what waits for other machines is the business of other laws.
"""

from dataclasses import dataclass, field

from diptych.control.engine.engine_core import EngineCore
from diptych.control.request import Request
from diptych.control.step import SchedulerOutput


@dataclass(slots=True)
class _Wait:
    """A stream without blocks. due_tick: by then it must have got them. counted: the streams whose tokens it waits for
    are part of that."""

    begun_tick: int
    due_tick: int
    counted: set[str] = field(default_factory=set)


class StreamLaw:
    """Follows one engine. Call ``check`` with every plan, before the engine is told anything else."""

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self.num_waits = 0
        self.longest_wait = 0
        self._settings = engine.config.scheduler
        self._waits: dict[str, _Wait] = {}
        self._holders: set[str] = set()  # of blocks or a reservation, as of the plan before
        self._num_ahead = 0
        self._lost_before: set[str] = set()  # streams that lost their blocks under other rules
        self._without: set[str] = set()  # streams without blocks, as of the plan before, also those that gave way then

    def check(self, output: SchedulerOutput) -> None:
        """A plan was made."""
        self._check_pace(output)
        scheduler = self.engine.scheduler
        settings = self.engine.config.scheduler
        if settings is not self._settings or settings.preemption.from_waiting:
            self._settings = settings  # other rules from now on; or a more important request may go first
            self._waits.clear()
            self._lost_before = {*scheduler.interrupted, *scheduler.swapped}
        elif self._waits or scheduler.interrupted or scheduler.swapped:
            self._check_waits(output)
        self._without = {*scheduler.interrupted, *scheduler.swapped}
        reserved = scheduler.incoming
        self._holders = {*scheduler.prefilling, *scheduler.joining, *reserved.reserved, *reserved.delivered}

    def _check_pace(self, output: SchedulerOutput) -> None:
        """Streams that have blocks: a token in every step, or a rest that prompts of one whole cache end."""
        scheduler, kv = self.engine.scheduler, self.engine.kv
        size = len(scheduler.batch)
        if output.num_decodes or not size or not output.prefills:
            assert output.num_decodes in (0, size)
            self._num_ahead = 0
            return
        assert self.engine.config.scheduler.budget.kind == "whole", "a step without the streams that have blocks"
        assert self._num_ahead < kv.capacity_tokens, "streams rest for more prompts than the cache holds"
        self._num_ahead += output.features.prefill_tokens

    def _check_waits(self, output: SchedulerOutput) -> None:
        scheduler = self.engine.scheduler
        # A stream whose worker was lost waits here, too; for how long, this worker cannot promise.
        lost = [request for request in scheduler.interrupted.values() if request.num_output_tokens]
        streams = [request for request in (*lost, *scheduler.swapped.values()) if not request.is_best_effort]
        waiting = sorted(streams, key=lambda request: request.order_key)
        now = scheduler.batch.ticks_scheduled - bool(output.num_decodes)  # before this step
        batch = {request.request_id: self._left(request) for request in scheduler.batch}
        computing = {
            request.request_id: self._left(request)
            for request in (*scheduler.prefilling.values(), *scheduler.joining.values())
            if request.is_stream and not request.hands_off
        }
        self._check_order(output, waiting)
        waits = {}
        for place, request in enumerate(waiting):
            wait = self._waits.get(request.request_id)
            before = {other.request_id: self._left(other) for other in waiting[:place]}
            if wait is None:
                if request.request_id not in self._lost_before | self._without:
                    self._check_loss(request)
                self.num_waits += 1
                wait = _Wait(now, now + max(batch.values(), default=0) + sum(before.values()) + sum(computing.values()))
                wait.counted = {*batch, *before, *computing}
            else:
                newly_lost = {name: left for name, left in before.items() if name not in self._waits}
                others = {**batch, **computing}
                newly_here = {name: left for name, left in others.items() if name not in wait.counted}
                wait.due_tick += sum(newly_lost.values()) + sum(newly_here.values())
                wait.counted |= newly_here.keys()
            self.longest_wait = max(self.longest_wait, now - wait.begun_tick)
            assert now <= wait.due_tick, (
                f"{request.request_id} has waited for blocks for {now - wait.begun_tick} decode steps; all streams "
                f"before it have ended after {wait.due_tick - wait.begun_tick}"
            )
            waits[request.request_id] = wait
        self._waits = waits
        self._lost_before &= waits.keys()

    def _check_loss(self, lost: Request) -> None:
        """A stream lost its blocks in this plan: no prompt that is computed for this worker had any left."""
        for prompt in self.engine.scheduler.prefilling.values():
            is_spared = prompt.is_stream or prompt.hands_off or prompt.request_id not in self._holders
            assert is_spared, f"{lost.request_id} lost its blocks, and the prompt {prompt.request_id} kept its own"

    def _check_order(self, output: SchedulerOutput, waiting: list[Request]) -> None:
        """While a stream waits, none behind it gets blocks and no prompt does; what holds them for later, gives up."""
        scheduler = self.engine.scheduler
        still = [request for request in waiting if request.request_id in self._waits]
        if not still:
            return
        first = still[0]
        back = [name for name in self._waits if name in scheduler.prefilling or name in scheduler.batch]
        for name in back:
            request = self.engine.requests[name]
            assert request.order_key < first.order_key, f"{name} came back before {first.request_id}"
        for chunk in output.prefills:
            request = self.engine.requests[chunk.request_id]
            assert request.is_stream or chunk.request_id in self._holders, (
                f"{chunk.request_id} got blocks while the stream {first.request_id} waits for its own"
            )
        prompts = [request for request in scheduler.incoming.reserved.values() if not request.is_stream]
        for request in prompts:
            assert request.request_id in self._holders, (
                f"{request.request_id} got blocks while the stream {first.request_id} waits for its own"
            )
        if prompts and not any(self.engine.requests[chunk.request_id].is_stream for chunk in output.prefills):
            assert scheduler.incoming.revoked, f"{first.request_id} waits, and {prompts} keep their blocks"

    def _left(self, request: Request) -> int:
        """Tokens that it may still give."""
        batch = self.engine.scheduler.batch
        given = batch.num_outputs(request) if request.request_id in batch else request.num_output_tokens
        return request.max_tokens - given
