"""The requests that hold blocks, what they are expected to hold, and whether there is room beside them.

Owns these places; the scheduler decides when a request moves from one to the next. Never takes a block away.
"""

from diptych.control.engine.kvcache.kv_cache_manager import KVCacheManager
from diptych.control.engine.kvcache.prefix_cache import Hit
from diptych.control.engine.scheduler.admission_backoff import AdmissionBackoff
from diptych.control.engine.scheduler.best_effort import BestEffortRequests
from diptych.control.engine.scheduler.decode_batch import DecodeBatch
from diptych.control.engine.scheduler.incoming import Incoming
from diptych.control.length_predictor import LengthPredictor
from diptych.control.request import Request
from diptych.control.step import SchedulerOutput


class BlockOwners:
    """prefilling: admitted prompts. joining: prefilled, or last chunk handed out; they decode from the next step on.
    swapped: streams whose KV lies on the host. incoming: prefilled elsewhere. outgoing: prefilled here, to be decoded
    elsewhere. best_effort: set aside."""

    def __init__(self, kv: KVCacheManager, batch: DecodeBatch, best_effort: BestEffortRequests) -> None:
        self._kv = kv
        self.batch = batch
        self.best_effort = best_effort
        self.prefilling: dict[str, Request] = {}
        self.joining: dict[str, Request] = {}
        self.swapped: dict[str, Request] = {}
        self.incoming = Incoming()
        self.outgoing: dict[str, Request] = {}
        self.lengths = LengthPredictor()

    @property
    def num_running(self) -> int:
        """Requests that hold blocks, but for those set aside."""
        return len(self.prefilling) + len(self.joining) + len(self.batch) + len(self.incoming)

    @property
    def is_empty(self) -> bool:
        """Whether no request holds blocks."""
        return self.num_running == 0 and not len(self.best_effort)

    def others_are_here(self) -> bool:
        """Whether a request that is not best-effort holds blocks, held some, or is to get some for another worker."""
        if len(self.batch) > self.batch.num_best_effort:
            return True
        places = (self.prefilling, self.swapped, self.incoming.waiting)
        here = (request for place in places for request in place.values())
        return any(not request.is_best_effort for request in (*here, *self.best_effort))

    def remove(self, request_id: str) -> None:
        """The request ends, wherever it is, but in the decode batch or set aside."""
        for place in (self.prefilling, self.joining, self.swapped, self.outgoing):
            place.pop(request_id, None)
        self.incoming.remove(request_id)

    def take_back(self, output: SchedulerOutput) -> None:
        """The step just handed out was broken off: what it was to do is still to be done."""
        for chunk in output.prefills:
            for place in (self.prefilling, self.joining):
                if (request := place.pop(chunk.request_id, None)) is not None:
                    request.num_scheduled_tokens = chunk.start
                    self.prefilling[chunk.request_id] = request
        if output.num_decodes:
            self.batch.take_back_scheduled()

    # -- room ---------------------------------------------------------------------------------------------------------

    def has_room(self, request: Request, hit: Hit, refusal: AdmissionBackoff, num_departures: int) -> bool:
        """Whether there is memory for the first of a queue, if need be after those set aside have lost their blocks;
        else ``refusal`` says for how long not."""
        if self.is_behind_swapped(request):
            return False
        given_up = self.best_effort.given_up_for(request, hit)
        is_alone = self.num_running == 0 and not self.best_effort.keeps_blocks_from(request)
        if not self._kv.fits_now(request, hit, alone=is_alone, given_up=given_up[0]):
            refusal.stand_until_departure()
            return False
        if is_alone:
            return True
        tick = self.batch.ticks_scheduled
        if refusal.repeat(request, num_departures, tick):
            return False
        demands = self._demands if request.is_best_effort else self._demands_of_others
        if self._kv.fits_later(request, hit, self.expected(request), demands, given_up, self._growth_of_windows):
            return True
        refusal.stand(request, num_departures, tick)
        return False

    def fits_now(self, request: Request, hit: Hit) -> bool:
        """Whether there are blocks for its prompt."""
        return self._kv.fits_now(request, hit, alone=self.is_empty)

    def fits_back(self, request: Request) -> bool:
        """Whether there are blocks for one that was swapped out."""
        return self._kv.can_swap_in(request, alone=self.is_empty)

    def is_behind_swapped(self, request: Request) -> bool:
        """Whether a request whose KV lies on the host comes back first."""
        return bool(self.swapped) and min(swapped.order_key for swapped in self.swapped.values()) <= request.order_key

    def expected(self, request: Request) -> int:
        """Tokens to keep room for, of a request that does not decode."""
        if request.hands_off or request.request_id in self.incoming.revoked:
            return 0
        return self._to_come(request, request.num_output_tokens)

    def _to_come(self, request: Request, num_generated: int) -> int:
        assert request.length_group is not None
        return self.lengths.high(request.length_group, num_generated, request.max_tokens)

    def _demands(self) -> list[tuple[int, int]]:
        """(blocks held alone, tokens to come) of every request that holds blocks."""
        return self._demands_of_others() + [self._demand(request) for request in self.best_effort]

    def _demands_of_others(self) -> list[tuple[int, int]]:
        """Demands of every holder of blocks that is not set aside."""
        demands = []
        for request in self.batch:
            own = request.num_blocks - request.num_shared_blocks
            demands.append((own, self._to_come(request, self.batch.num_outputs(request))))
        for request in (*self.prefilling.values(), *self.joining.values(), *self.incoming.holders()):
            demands.append(self._demand(request))
        for request in self.outgoing.values():
            demands.append((request.num_blocks - request.num_shared_blocks, 0))
        return demands

    def _growth_of_windows(self) -> int:
        """Blocks that the windows of all that is not set aside will get until they are full."""
        growth = self._kv.window_growth
        streams = [growth(request, self._to_come(request, self.batch.num_outputs(request))) for request in self.batch]
        others = (*self.prefilling.values(), *self.joining.values(), *self.incoming.holders())
        return sum(streams) + sum([growth(request, self.expected(request)) for request in others])

    def _demand(self, request: Request) -> tuple[int, int]:
        return request.num_blocks - request.num_shared_blocks, self.expected(request)
