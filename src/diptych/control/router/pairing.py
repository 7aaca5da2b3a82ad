"""The cheapest pair of a prefill and a decode worker, exactly, without trying all pairs.

    pair = queue at p + work of the prompt at p + what the transfer shows after it + memory and answer at d

Only where p and d are, and how much of the prompt d holds, ties the two together. So of the decode workers at one
place only those are tried that no other there beats in both; and where nothing is shared, prefill workers come in the
order of their own cost until none can win any more. Must never know a request beyond its length.
"""

from collections.abc import Sequence
from typing import NamedTuple

from diptych.control.router.scorers import UNBOUNDED, Prices, Question, pairs, prompt_ns, work_ns
from diptych.control.router.workers import Level, LinkCosts

PrefillOffer = tuple[float, int, Prices]  # queue, position, prices
DecodeOffer = tuple[float, int, int]  # memory and answer, -tokens that it holds, position
_Sender = tuple[float, int, float, float]  # queue, own prompt and blocks for the copy; position, work, queue


class Pair(NamedTuple):
    """The choice. num_cached_tokens: what need not be computed. work_ns: at the prefill worker. queue_ns: before it."""

    cost_ns: float
    source: int
    target: int
    num_cached_tokens: int
    work_ns: float
    queue_ns: float


class Pairing:
    """Where the workers are: ``places[position]``, and the levels between places. ``size``: of a block, in tokens."""

    def __init__(self, places: Sequence[int], levels: Sequence[Sequence[Level]], links: LinkCosts, size: int) -> None:
        self._places = places
        self._levels = levels
        self._links = links
        self._block_size = size
        self._is_pool = [row[place] is Level.POOL for place, row in enumerate(levels)]

    def shares_pool(self, a: int, b: int) -> bool:
        """Whether two workers' blocks lie in one memory."""
        return self._levels[self._places[a]][self._places[b]] is Level.POOL

    def best(self, prefills: list[PrefillOffer], decodes: list[DecodeOffer], question: Question) -> Pair | None:
        """The cheapest pair; None without either."""
        if not prefills or not decodes:
            return None
        prefills.sort()
        senders: list[_Sender] | None = None
        found: Pair | None = None
        for target in self._undominated(decodes):
            place = self._places[target[2]]
            if self._is_pool[place]:
                found = self._in_pool(prefills, target, question, found) or found
            if len(self._is_pool) > 1 or not self._is_pool[place]:
                if senders is None:
                    senders = self._senders(prefills, question)
                found = self._across(senders, target, question, found) or found
        return found

    def _senders(self, prefills: list[PrefillOffer], question: Question) -> list[_Sender]:
        """The prefill workers with their own caches and their own blocks, cheapest first."""
        num_tokens, size, held = question.num_tokens, self._block_size, question.held
        num_blocks, num_pairs = -(-num_tokens // size), pairs(num_tokens, 0)
        senders: list[_Sender] = []
        for queue_ns, position, prices in prefills:
            cached = held[position]
            if not cached:
                own_ns = num_tokens * prices[4] + num_pairs * prices[5] + num_blocks * prices[8]
                alone_ns = num_tokens * prices[6] + num_pairs * prices[7]
            else:
                left = num_tokens - cached
                own_ns = prompt_ns(prices, left, cached) + prices.block * (-(-left // size))
                alone_ns = work_ns(prices, left, cached)
            senders.append((queue_ns + own_ns, position, alone_ns, queue_ns))
        senders.sort()
        return senders

    def _undominated(self, decodes: list[DecodeOffer]) -> list[DecodeOffer]:
        """Of each place those that no other there beats in cost and in tokens held; cheapest first."""
        most: dict[int, int] = {}
        kept = []
        decodes.sort()
        for offer in decodes:
            place = self._places[offer[2]]
            if -offer[1] > most.get(place, -1):
                most[place] = -offer[1]
                kept.append(offer)
        return kept

    def _in_pool(
        self, prefills: list[PrefillOffer], target: DecodeOffer, question: Question, found: Pair | None
    ) -> Pair | None:
        """The prefill worker that computes straight into the target's blocks, after what the target holds."""
        places, row, cached = self._places, self._levels[self._places[target[2]]], -target[1]
        left = question.num_tokens - cached
        num_pairs = pairs(left, cached)
        rest_ns = target[0] + self._links.pool_latency_ns
        limit_ns = (found.cost_ns if found else UNBOUNDED) - rest_ns
        best = None
        for offer in prefills:
            queue_ns, position, prices = offer
            if queue_ns >= limit_ns:
                break
            if row[places[position]] is Level.POOL:
                cost_ns = queue_ns + left * prices[4] + num_pairs * prices[5]
                if cost_ns < limit_ns:
                    best, limit_ns = offer, cost_ns
        if best is None:
            return None
        queue_ns, position, prices = best
        return Pair(limit_ns + rest_ns, position, target[2], cached, work_ns(prices, left, cached), queue_ns)

    def _across(
        self, senders: list[_Sender], target: DecodeOffer, question: Question, found: Pair | None
    ) -> Pair | None:
        """The prefill worker that uses its own cache and sends what the target does not hold."""
        place, left = self._places[target[2]], question.num_tokens + target[1]
        limit_ns = found.cost_ns if found else UNBOUNDED
        better = None
        for own_ns, position, prompt_work_ns, queue_ns in senders:
            cost_ns = own_ns + target[0]
            if cost_ns >= limit_ns:
                break
            at = self._levels[self._places[position]][place]
            if at is not Level.POOL:
                cost_ns += self._links.exposed_ns(at, left, int(prompt_work_ns))
                if cost_ns < limit_ns:
                    limit_ns = cost_ns
                    cached = question.held[position]
                    better = Pair(cost_ns, position, target[2], cached, prompt_work_ns, queue_ns)
        return better
