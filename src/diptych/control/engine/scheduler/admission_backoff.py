"""The number of steps for which a decision stands, so that nothing is asked twice for the same answer.

A steady decode decides nothing for many steps: the simulator takes these at once (SchedulerOutput.max_repeats). A
request that was refused for lack of memory stays refused until a request leaves, or for a few steps: the answer costs a
look at every running request and changes slowly. Live and simulated workers refuse at the same steps.
"""

from diptych.control.engine.kvcache.kv_cache_manager import KVCacheManager
from diptych.control.engine.scheduler.decode_batch import UNLIMITED, DecodeBatch
from diptych.control.engine.scheduler.step_time import LEARN_EVERY
from diptych.control.request import Request

REFUSAL_STEPS = 8  # decode steps for which a refusal for lack of memory to come stands


class AdmissionBackoff:
    """Why the first request of a queue has no blocks, as far as decode steps can change it.

    until_tick: the tick of the decode batch before which it need not be asked again (0: ask in every step).
    """

    def __init__(self) -> None:
        self.until_tick = 0
        self._number = -1  # of the request that was refused for its growth
        self._num_departures = 0  # when it was
        self._stands_until = 0

    def clear(self) -> None:
        """The queue is asked again."""
        self.until_tick = 0

    def stand_until_departure(self) -> None:
        """Let the refusal stand until a request leaves."""
        self.until_tick = UNLIMITED

    def repeat(self, request: Request, num_departures: int, tick: int) -> bool:
        """Whether this request was refused for its growth a few steps ago, and nothing has left since: it is again."""
        if (self._number, self._num_departures) != (request.number, num_departures) or tick >= self._stands_until:
            return False
        self.until_tick = self._stands_until
        return True

    def stand(self, request: Request, num_departures: int, tick: int) -> None:
        """This request was refused for its growth at this tick."""
        self._number, self._num_departures = request.number, num_departures
        self._stands_until = self.until_tick = tick + REFUSAL_STEPS


def steps_without_decision(batch: DecodeBatch, kv: KVCacheManager, refusals: list[AdmissionBackoff]) -> int:
    """Steps in a row, the one just handed out included, for which a batch that nothing joins decides nothing. refusals:
    those of the queues in which requests wait."""
    steps = LEARN_EVERY - batch.ticks_completed % LEARN_EVERY
    for refusal in refusals:
        steps = min(steps, refusal.until_tick + 1 - batch.ticks_scheduled)
    steps, num_groups = min(steps, batch.steps_until_end()), len(kv.layout.groups)
    if (
        steps > 1
        and len(batch) * num_groups * (steps // kv.block_size + 1) > kv.pool.num_free - kv.tiers.num_watched_blocks
    ):
        steps = min(steps, batch.steps_until_block())
    return max(1, steps)
