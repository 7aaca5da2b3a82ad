"""Best-effort requests (class batch): computed only in steps in which requests of other classes have nothing to do.

Owns those that are set aside meanwhile. They keep their blocks until others need them; then they lose these before any
other request does. A stream among them leaves the decode batch, as one that is swapped out does, and comes back without
a copy; a prompt goes on with its next chunk. tests/control/yield_law.py checks it.
"""

from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from diptych.control.engine.kvcache.kv_cache_manager import KVCacheManager
from diptych.control.engine.kvcache.prefix_cache import Hit
from diptych.control.engine.scheduler.decode_batch import DecodeBatch
from diptych.control.engine.scheduler.speculation import Speculation
from diptych.control.engine.scheduler.step_plan import StepPlan
from diptych.control.events import RequestRested, RequestResumed
from diptych.control.request import Request
from diptych.control.step import ResumedDecode, SchedulerOutput


class BestEffortRequests:
    """requests: all on this worker that gave way when they came. streams, prompts: those that are set aside."""

    def __init__(self, kv: KVCacheManager, batch: DecodeBatch, speculation: Speculation) -> None:
        self._kv = kv
        self._batch = batch
        self._speculation = speculation
        self.requests: dict[str, Request] = {}
        self.streams: dict[str, Request] = {}
        self.prompts: dict[str, Request] = {}
        self._ends: list[tuple[int, int, Request]] = []  # heap of (when it stops to give way, number, request)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests that are set aside."""
        yield from self.streams.values()
        yield from self.prompts.values()

    def __len__(self) -> int:
        return len(self.streams) + len(self.prompts)

    @property
    def has_limits(self) -> bool:
        """Whether one may stop to give way as time passes."""
        return bool(self._ends)

    def add(self, request: Request) -> None:
        """Add a request that came, or lost its blocks."""
        if not request.is_best_effort or request.request_id in self.requests:
            return
        self.requests[request.request_id] = request
        if (limit_ns := request.options.best_effort_ns) is not None:
            heappush(self._ends, (request.arrival_ns + limit_ns, request.number, request))

    def remove(self, request: Request) -> None:
        """Remove a request that ends."""
        if self.requests.pop(request.request_id, None) is None:
            return
        self._take(request)
        if request.options.best_effort_ns is not None:
            self._ends = [entry for entry in self._ends if entry[2] is not request]
            heapify(self._ends)

    def take_due(self, now: int) -> list[Request]:
        """Requests that have given way for as long as they were to; they do not any more."""
        due = []
        while self._ends and self._ends[0][0] <= now:
            request = heappop(self._ends)[2]
            if request.request_id in self._batch:
                self._batch.num_best_effort -= 1
            request.is_best_effort = False
            due.append(request)
        return due

    def rest(self, plan: StepPlan, prefilling: dict[str, Request]) -> bool:
        """Set aside all best-effort requests, before anything of this step is planned. Returns whether there were
        any."""
        streams = [request for request in self._batch if request.is_best_effort] if self._batch.num_best_effort else []
        for request in streams:
            self._batch.leave(request)
            self._speculation.forget(request.request_id)
            self.streams[request.request_id] = request
            if not plan.forget_resumed(request.request_id):
                plan.paused.append(request.request_id)
            plan.events.append(RequestRested(plan.now, request.request_id))
        prompts = [request for request in prefilling.values() if request.is_best_effort]
        for request in prompts:
            self.prompts[request.request_id] = prefilling.pop(request.request_id)
            self._kv.stop_progress(request)
        return bool(streams or prompts)

    def go_on(self, plan: StepPlan, prefilling: dict[str, Request], num_seats: int, *, only_due: bool) -> None:
        """Give the requests that are set aside their places again, as many as there are seats for; while others are
        here (``only_due``), only those that are no longer best-effort."""
        back = [request for request in self if not (only_due and request.is_best_effort)]
        back.sort(key=lambda request: request.order_key)
        for request in back[: max(0, num_seats)]:
            if self._take(request):
                self._join(plan, request)
            else:
                prefilling[request.request_id] = request

    def are_all(self, output: SchedulerOutput) -> bool:
        """Whether the step just handed out has work of requests that give way, and of no others."""
        if not self.requests or (output.num_decodes and self._batch.num_best_effort < len(self._batch)):
            return False
        chunks = [self.requests.get(chunk.request_id) for chunk in output.prefills]
        return all(request is not None and request.is_best_effort for request in chunks)

    def given_up_for(self, request: Request, hit: Hit) -> tuple[int, int]:
        """What those set aside would give up for a request that finds the ``hit``: blocks that nothing else
        holds, and blocks reserved for their growth."""
        if request.is_best_effort or not len(self):
            return 0, 0
        yielding = [other for other in self if self._may_lose_blocks(other)]
        held = Counter(block for other in yielding for block_ids in other.block_tables for block in block_ids)
        kept, references = {*hit.blocks}, self._kv.pool.references
        freed = sum(count == references(block) and block not in kept for block, count in held.items())
        return freed, sum(other.num_reserved_blocks for other in yielding)

    def victim(self) -> Request | None:
        """The request that loses its blocks first: a prompt, or else the stream that came last. None if none may."""
        yielding = [request for request in self if self._may_lose_blocks(request)]
        return max(yielding, key=lambda request: request.order_key, default=None)

    def keeps_blocks_from(self, request: Request) -> bool:
        """Whether there is one set aside that does not lose its blocks to this request."""
        return any(request.is_best_effort or not self._may_lose_blocks(other) for other in self)

    def leave_prompt(self, request: Request) -> bool:
        """Take the blocks of a prompt that is set aside. Returns whether the request is one."""
        if request.request_id not in self.prompts:
            return False
        self._take(request)
        return True

    def leave_stream(self, request: Request) -> bool:
        """The same for a stream."""
        return self.streams.pop(request.request_id, None) is not None

    def _may_lose_blocks(self, request: Request) -> bool:
        """Whether a request may lose its blocks: not a prompt that is computed for another worker, since what is sent
        of its blocks may be on its way."""
        return not request.hands_off

    def _take(self, request: Request) -> bool:
        """Stop setting the request aside. Returns whether it is a stream."""
        if self.prompts.pop(request.request_id, None) is not None:
            self._kv.resume_progress(request)
        return self.streams.pop(request.request_id, None) is not None

    def _join(self, plan: StepPlan, request: Request) -> None:
        num_tokens = request.num_scheduled_tokens
        self._batch.join(request, num_tokens, request.num_output_tokens)
        if request.request_id in plan.paused:  # by this very plan: the executor has not heard of it
            plan.paused.remove(request.request_id)
        else:
            plan.resumed.append(ResumedDecode(request.request_id, num_tokens, request.tables, request.first_blocks))
        rested = RequestRested(plan.now, request.request_id)
        if rested in plan.events:
            plan.events.remove(rested)
        else:
            plan.events.append(RequestResumed(plan.now, request.request_id))
