"""What must hold of one worker's requests, blocks and leases between two steps, whatever has happened before.

Each check is O(1): it compares counts that are kept in different places. Raises BrokenInvariantError, also under
``python -O``; nothing is changed here.
"""

from collections.abc import Sized

from diptych.control.engine.kvcache.kv_cache_manager import KVCacheManager
from diptych.control.engine.scheduler.scheduler import Scheduler
from diptych.control.errors import BrokenInvariantError

STEPS_BETWEEN = 64  # from one check to the next: one costs a tenth of a step of 256 sequences


def num_placed(scheduler: Scheduler) -> int:
    """Requests in all places where one can be: those that wait, and those that hold blocks or have lent them."""
    block_owners = scheduler.block_owners
    incoming = block_owners.incoming
    waiting = scheduler.num_waiting + len(incoming.waiting)
    return (
        waiting
        + block_owners.num_running
        + len(block_owners.swapped)
        + len(block_owners.outgoing)
        + len(block_owners.best_effort)
    )


def check_step(requests: Sized, leases: Sized, scheduler: Scheduler, kv: KVCacheManager) -> None:
    """Every request is in one place, every block in one state, no lease and no interrupted stream without a request."""
    kv.pool.check_counts()
    if num_placed(scheduler) != len(requests):
        raise BrokenInvariantError(
            f"{len(requests)} requests are open and {num_placed(scheduler)} are waiting, running or set aside"
        )
    kv.check_counts()
    if len(leases) > len(requests):
        raise BrokenInvariantError(f"{len(leases)} leases of {len(requests)} requests")
    if len(scheduler.interrupted) > len(scheduler.waiting):
        raise BrokenInvariantError(
            f"{len(scheduler.interrupted)} interrupted streams among {len(scheduler.waiting)} waiting requests"
        )


def check_idle(leases: Sized, scheduler: Scheduler, kv: KVCacheManager) -> None:
    """No request is open: no block, no lease and no place is taken."""
    kv.pool.check_counts()
    if kv.pool.num_used or not kv.is_unused:
        raise BrokenInvariantError(f"{kv.pool.num_used} blocks are held, or reserved, and no request is open")
    if num_placed(scheduler) or scheduler.interrupted or scheduler.best_effort.requests:
        raise BrokenInvariantError(f"{num_placed(scheduler)} requests have a place, and none is open")
    if len(leases):
        raise BrokenInvariantError(f"{len(leases)} leases, and no request is open")
