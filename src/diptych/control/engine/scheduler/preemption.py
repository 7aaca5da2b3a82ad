"""Taking blocks away: for a stream that must grow, or for a waiting request of higher priority.

A stream grows into the blocks of prompts that have given no token before it takes those of another stream: what is
computed of a prompt is lost either way, but only a stream has a client that sees a gap.
"""

from collections.abc import Iterable

from diptych.control.config import PreemptionConfig
from diptych.control.engine.kvcache.kv_cache_manager import KVCacheManager
from diptych.control.engine.kvcache.prefix_cache import Hit
from diptych.control.engine.scheduler.best_effort import BestEffortRequests
from diptych.control.engine.scheduler.decode_batch import DecodeBatch
from diptych.control.engine.scheduler.step_plan import StepPlan
from diptych.control.events import RequestPreempted
from diptych.control.request import Request


def _rank(request: Request) -> tuple[bool, int, int]:
    """Sort key of streams under pressure: the highest loses its blocks first. Best-effort streams rank highest, then
    the least important, then the latest arrival."""
    return (request.is_best_effort, request.priority, request.number)


class Preemption:
    """Chooses victims and moves them out of the decode batch, or from where they are set aside."""

    def __init__(self, kv: KVCacheManager, batch: DecodeBatch, best_effort: BestEffortRequests) -> None:
        self.config = PreemptionConfig()
        self._kv = kv
        self._batch = batch
        self._best_effort = best_effort
        self.num_preemptions = 0

    def victim_for_growth(self, prefilling: Iterable[Request]) -> Request:
        """The request that makes room for a stream that needs a block (perhaps that stream itself); first of all, one
        that is set aside. A prompt that is computed for another worker keeps its blocks: what is sent of them may be on
        its way."""
        if (aside := self._best_effort.victim()) is not None:
            return aside
        stream = max(self._batch, key=_rank)
        prompts = [request for request in prefilling if not (request.is_stream or request.hands_off)]
        if not prompts:
            return stream
        prompt = max(prompts, key=_rank)
        if self.config.from_waiting and prompt.priority < stream.priority:
            return stream
        return prompt

    def victims_for(self, request: Request, blocks_needed: int, seats_needed: int, hit: Hit) -> list[Request]:
        """Running decodes that a waiting request may displace, enough to seat it; empty when there are not enough.
        hit: what it finds in the prefix cache; it needs more than these blocks.

        Hysteresis: a victim has run for a while since it (re)started and has not been displaced too often.
        """
        if not self.config.from_waiting:
            return []
        candidates = sorted(
            (
                member
                for member in self._batch
                if member.priority >= request.priority + self.config.priority_gap
                and self._batch.ticks_scheduled - member.last_resume_tick >= self.config.min_steps
                and member.num_preemptions < self.config.max_per_request
            ),
            key=_rank,
            reverse=True,
        )
        victims: list[Request] = []
        freed = 0
        for member in candidates:
            if freed >= blocks_needed and len(victims) >= seats_needed:
                break
            victims.append(member)
            blocks = [block for block_ids in member.block_tables for block in block_ids]
            freed += sum(self._kv.pool.references(block) == 1 and block not in hit.blocks for block in blocks)
        return victims if freed >= blocks_needed and len(victims) >= seats_needed else []

    def preempt(self, plan: StepPlan, victim: Request, *, by_priority: bool) -> bool:
        """Take the victim out of the batch: to the host tier (True) if that is the policy and there is room, or back
        to the start (False). The caller queues it."""
        victim.num_preemptions += 1
        self.num_preemptions += 1
        if not self._best_effort.leave_stream(victim):
            self._leave_batch(plan, victim)
        copies = None
        if self.config.kind == "swap":
            copies = self._kv.swap_out(victim, victim.num_scheduled_tokens)
        if copies is not None:
            plan.swap_out.extend(copies)
        else:
            self._begin_again(victim)
        plan.events.append(RequestPreempted(plan.now, victim.request_id, copies is not None, by_priority))
        return copies is not None

    def _leave_batch(self, plan: StepPlan, victim: Request) -> None:
        plan.drop_extra_rows(victim.request_id, self._batch.num_computed(victim) + 1)
        self._batch.leave(victim)
        # What this very plan gave it goes, too: a block, or a place in the batch, which the executor has not heard of.
        plan.new_blocks = [entry for entry in plan.new_blocks if entry[0] != victim.request_id]
        if not plan.forget_resumed(victim.request_id):
            plan.paused.append(victim.request_id)

    def displace(self, plan: StepPlan, prompt: Request) -> None:
        """Take the blocks of a prompt that is being computed; no chunk of it is in the plan. The caller queues it."""
        self._begin_again(prompt)
        plan.events.append(RequestPreempted(plan.now, prompt.request_id, False, False, is_stream=False))

    def _begin_again(self, victim: Request) -> None:
        self._kv.release(victim)
        victim.num_computed_tokens = victim.num_scheduled_tokens = 0
