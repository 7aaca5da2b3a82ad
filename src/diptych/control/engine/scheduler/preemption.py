"""Taking a decode's blocks away: for a decode that must grow, or for a waiting request of higher priority.

Only decodes are ever preempted. A half-prefilled prompt keeps its blocks, or its work would be lost for nothing.
"""

from diptych.control.config import PreemptionConfig
from diptych.control.engine.kvcache.kv_cache_manager import KVCacheManager
from diptych.control.engine.scheduler.decode_batch import DecodeBatch
from diptych.control.engine.scheduler.step_plan import StepPlan
from diptych.control.events import RequestPreempted
from diptych.control.request import Request


def _rank(request: Request) -> tuple[int, int]:
    """The highest rank loses its place first: least important, then latest arrival."""
    return (request.priority, request.number)


class Preemption:
    """Chooses victims and moves them out of the decode batch."""

    def __init__(self, kv: KVCacheManager, batch: DecodeBatch) -> None:
        self.config = PreemptionConfig()
        self._kv = kv
        self._batch = batch
        self.num_preemptions = 0

    def victim_for_growth(self) -> Request:
        """Who makes room for a decode that needs a block (perhaps that decode itself)."""
        return max(self._batch, key=_rank)

    def victims_for(self, request: Request, blocks_needed: int, seats_needed: int) -> list[Request]:
        """Running decodes that a waiting request may displace, enough to seat it; empty when there are not enough.

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
            freed += sum(self._kv.pool.references(block) == 1 for block in member.block_ids)
        return victims if freed >= blocks_needed and len(victims) >= seats_needed else []

    def preempt(self, plan: StepPlan, victim: Request, *, by_priority: bool) -> bool:
        """Take the victim out of the batch: to the host tier (True) if that is the policy and there is room, or back
        to the start (False). The caller queues it."""
        self._batch.leave(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        # What this very plan gave it goes, too: a block, or a place in the batch, which the executor has not heard of.
        plan.new_blocks = [entry for entry in plan.new_blocks if entry[0] != victim.request_id]
        resumed = [member for member in plan.resumed if member.request_id != victim.request_id]
        if len(resumed) == len(plan.resumed):
            plan.paused.append(victim.request_id)
        plan.resumed = resumed
        copies = None
        if self.config.kind == "swap":
            copies = self._kv.swap_out(victim, victim.num_scheduled_tokens)
        if copies is not None:
            plan.swap_out.extend(copies)
        else:
            self._kv.release(victim)
            victim.num_computed_tokens = victim.num_scheduled_tokens = 0
        plan.events.append(RequestPreempted(plan.now, victim.request_id, copies is not None, by_priority))
        return copies is not None
