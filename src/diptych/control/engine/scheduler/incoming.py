"""Requests that another worker prefills and this one will decode: those that wait for blocks, those that wait for KV,
those that may join.

Owns these three places; the scheduler decides when a request moves from one to the next.

What the tiers of this worker hold of a prompt that another worker will compute *into its blocks* is copied into these
first, and the reservation is reported when that is done: so the other worker never reads a block that is not written.
"""

from diptych.control.engine.kvcache.kv_cache_manager import KVCacheManager
from diptych.control.engine.kvcache.prefix_cache import Hit
from diptych.control.engine.kvcache.tier_loads import WorkNs
from diptych.control.engine.scheduler.budget import Budget
from diptych.control.engine.scheduler.step_plan import StepPlan
from diptych.control.events import HandoffReserved
from diptych.control.request import Request


class Incoming:
    """Requests before they decode here, in order of arrival: ``waiting`` for blocks (by wait class first), ``reserved``
    until the KV has come, ``delivered`` until the next plan. ``revoked``: those of the reserved whose blocks a stream
    needs. ``raising``: those of the reserved for which copies are to come, or are in the step at hand."""

    def __init__(self) -> None:
        self.waiting: dict[str, Request] = {}
        self.reserved: dict[str, Request] = {}
        self.delivered: dict[str, Request] = {}
        self.revoked: dict[str, Request] = {}
        self.raising: dict[str, Request] = {}

    def __len__(self) -> int:
        """Requests that hold blocks."""
        return len(self.reserved) + len(self.delivered)

    def holders(self) -> list[Request]:
        """The requests that hold blocks."""
        return [*self.reserved.values(), *self.delivered.values()]

    def add(self, request: Request) -> None:
        """Let a request wait for blocks, before those whose wait class is higher; all before best-effort ones."""
        place = (request.is_best_effort, request.wait_class)
        behind = [other for other in self.waiting.values() if (other.is_best_effort, other.wait_class) > place]
        self.waiting[request.request_id] = request
        for other in behind:
            self.waiting[other.request_id] = self.waiting.pop(other.request_id)

    def revoke(self, stream: Request, num_blocks: int) -> list[Request]:
        """Ask for the blocks of reservations that rank behind this stream, the latest first, until these hold
        ``num_blocks``: at least one reservation. Asks for none while others are on their way back."""
        if self.revoked:
            return []
        for request in reversed(self.reserved.values()):
            if request.order_key > stream.order_key and (num_blocks > 0 or not self.revoked):
                self.revoked[request.request_id] = request
                num_blocks -= request.num_blocks - request.num_shared_blocks
        return list(self.revoked.values())

    def seat(self, request: Request, hit: Hit, expected_tokens: int, kv: KVCacheManager, work_ns: WorkNs) -> None:
        """The first in the queue gets its blocks, those of the ``hit`` among them."""
        kv.admit(request, hit, expected_tokens)
        below: list[int] = []
        if request.is_remote_prefill:
            below = kv.blocks_below(request, hit, work_ns)
            kv.tiers.attach(request, below)
        request.num_cached_tokens = kv.num_found_tokens(request, hit, below)
        request.num_tier_tokens = request.num_cached_tokens - hit.num_device_tokens
        del self.waiting[request.request_id]
        self.reserved[request.request_id] = request
        if below:
            self.raising[request.request_id] = request

    def raise_blocks(self, plan: StepPlan, budget: Budget, kv: KVCacheManager) -> None:
        """Copy up what is wanted for the reserved ones, as much as the step has time for."""
        for request in self.raising.values():
            num_below = len(request.host_block_ids)
            count = budget.copies(num_below, kv.config.tiers.copy_block_ns)
            plan.swap_in += kv.raise_blocks(request, count)
            if count < num_below:
                break

    def take_raised(self) -> list[Request]:
        """A step has ended: those whose last copies were in it."""
        raised = [request for request in self.raising.values() if not request.host_block_ids]
        for request in raised:
            del self.raising[request.request_id]
        return raised

    def deliver(self, request: Request) -> None:
        """Take in that a request's KV is here, and its first token is known."""
        del self.reserved[request.request_id]
        self.revoked.pop(request.request_id, None)
        request.awaits_kv = request.is_remote_prefill = False
        request.num_computed_tokens = request.num_scheduled_tokens = request.num_prompt_tokens
        request.num_output_tokens = 1
        self.delivered[request.request_id] = request

    def take_delivered(self) -> list[Request]:
        """Take the requests that may join the decode batch now."""
        delivered = list(self.delivered.values())
        self.delivered.clear()
        return delivered

    def remove(self, request_id: str) -> None:
        """The request ends, wherever it is."""
        for place in (self.waiting, self.reserved, self.delivered, self.revoked, self.raising):
            place.pop(request_id, None)


def reservation(request: Request, kv: KVCacheManager, now: int) -> HandoffReserved:
    """The report that a reserved request has its blocks, and in these what is cached of it."""
    tables = kv.reserved_tables(request)
    return HandoffReserved(now, request.request_id, request.num_cached_tokens, tables, request.num_tier_tokens)
