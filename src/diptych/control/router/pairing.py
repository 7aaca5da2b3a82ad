"""The cheapest pair of a prefill and a decode worker, exactly, without trying all pairs.

    pair = queue at p + work of the prompt at p + what the transfer shows after it + memory and answer at d

Only where p and d are, and how much of the prompt d holds, ties the two together. So of the decode workers at one
place only those are tried that no other there beats in both; and where nothing is shared, prefill workers come in the
order of their own cost until none can win any more. Must never know a request beyond its length.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from diptych.control.router.costs import UNBOUNDED, RequestDemand, WorkerPrices, pairs, prompt_ns, work_ns
from diptych.control.router.topology import LinkCost, LinkCosts

PrefillOffer = tuple[float, int, WorkerPrices]  # queue, position, prices
PrefillOffers = list[list[PrefillOffer]]  # by memory domain
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


class PairSearch:
    """Where the workers are: ``places[position]``, and the paths from place to place (None: one memory). ``size``: of a
    block, in tokens."""

    def __init__(
        self, places: Sequence[int], paths: Sequence[Sequence[LinkCost | None]], links: LinkCosts, size: int
    ) -> None:
        self._places = places
        self._paths = paths
        self._links = links
        self._block_size = size
        # each worker's memory domain, by the first place in it; after all places, those that have a memory of their own
        domains = [row.index(None) if row[place] is None else len(paths) for place, row in enumerate(paths)]
        self.domains = [domains[place] for place in places]
        self.num_domains = len(paths) + 1
        used = {link for row in paths for link in row if link is not None}  # that KV may have to travel
        self._nearest: LinkCost | None = None  # no path is better than this
        if used:
            self._nearest = LinkCost(max(link.bytes_per_s for link in used), min(link.latency_ns for link in used))

    def shares_memory(self, a: int, b: int) -> bool:
        """Whether two workers' blocks lie in one memory."""
        return self._paths[self._places[a]][self._places[b]] is None

    def best(self, prefills: PrefillOffers, decodes: list[DecodeOffer], demand: RequestDemand) -> Pair | None:
        """The cheapest pair; None without either."""
        if not decodes or not any(prefills):
            return None
        token_ns = min([prices.token for mates in prefills for _, _, prices in mates])
        senders: list[_Sender] | None = None
        exposed_ns = 0
        found: Pair | None = None
        holders = self._holders(prefills, demand)
        for target in self._raising(decodes, demand):
            found = self._in_domain(prefills[self.domains[target[2]]], target, demand, token_ns, found) or found
        for target in self._undominated(decodes):
            if found is not None and target[0] >= found.cost_ns:
                break
            domain = self.domains[target[2]]
            has_own_memory = domain == len(self._paths)
            if not has_own_memory:
                found = self._in_domain(prefills[domain], target, demand, token_ns, found) or found
                if holders:
                    found = self._copied(holders[domain], target, demand, found) or found
            if has_own_memory or len(self._paths) > 1:
                if senders is None:
                    exposed_ns = self._exposed_ns(decodes, demand)
                    limit_ns = found.cost_ns if found else UNBOUNDED
                    senders = self._senders(prefills, demand, token_ns, (target[0], exposed_ns), limit_ns)
                found = self._across(senders, target, demand, exposed_ns, found) or found
        return found

    def _raising(self, decodes: list[DecodeOffer], demand: RequestDemand) -> list[DecodeOffer]:
        """The offers of those whose blocks are computed into by others, and that bring up what they have below their
        caches first."""
        ready, raise_ns = demand.ready, demand.raise_ns
        return [
            (cost_ns + raise_ns[at], -ready[at], at)
            for cost_ns, held, at in decodes
            if ready[at] > -held and self.domains[at] < len(self._paths)
        ]

    def _exposed_ns(self, decodes: list[DecodeOffer], demand: RequestDemand) -> int:
        """What any transfer shows at least after its prefill."""
        if self._nearest is None:
            return 0
        left = demand.num_tokens + min([offer[1] for offer in decodes])
        return self._links.exposed_ns(self._nearest, left, UNBOUNDED)

    def _senders(
        self,
        prefills: PrefillOffers,
        demand: RequestDemand,
        token_ns: float,
        rest_ns: tuple[float, int],
        limit_ns: float,
    ) -> list[_Sender]:
        """The prefill workers with their own caches, tiers and blocks, cheapest first. Without those that reach the
        limit: a prompt token costs ``token_ns`` or more, and target and transfer ``rest_ns`` or more."""
        num_tokens, size, held = demand.num_tokens, self._block_size, demand.held
        ready, raise_ns = demand.ready, demand.raise_ns
        num_blocks, num_pairs, least_ns = -(-num_tokens // size), pairs(num_tokens, 0), num_tokens * token_ns
        target_ns, exposed_ns = rest_ns
        senders: list[_Sender] = []
        for queue_ns, position, prices in chain.from_iterable(prefills):
            if cached := ready[position]:
                left = num_tokens - cached
                own_ns = prompt_ns(prices, left, cached) + raise_ns[position]
                own_ns += prices.block * (-(-(num_tokens - held[position]) // size))
                senders.append((queue_ns + own_ns, position, work_ns(prices, left, cached), queue_ns))
            elif queue_ns + least_ns + target_ns + exposed_ns < limit_ns:
                own_ns = num_tokens * prices.token + num_pairs * prices.pair + num_blocks * prices.block
                alone_ns = num_tokens * prices.work_token + num_pairs * prices.work_pair
                senders.append((queue_ns + own_ns, position, alone_ns, queue_ns))
        senders.sort()
        return senders

    def _undominated(self, decodes: list[DecodeOffer]) -> list[DecodeOffer]:
        """The offers of each place that no other there beats in cost and in tokens held; cheapest first."""
        most: dict[int, int] = {}
        kept = []
        decodes.sort()
        for offer in decodes:
            place = self._places[offer[2]]
            if -offer[1] > most.get(place, -1):
                most[place] = -offer[1]
                kept.append(offer)
        return kept

    def _in_domain(
        self, mates: list[PrefillOffer], target: DecodeOffer, demand: RequestDemand, token_ns: float, found: Pair | None
    ) -> Pair | None:
        """The prefill worker that computes straight into the target's blocks, after what the target holds. ``mates``:
        those of the target's domain; a prompt token costs ``token_ns`` or more with each."""
        cached = -target[1]
        left = demand.num_tokens - cached
        num_pairs = pairs(left, cached)
        rest_ns, least_ns = target[0] + self._links.memory_latency_ns, left * token_ns
        limit_ns = (found.cost_ns if found else UNBOUNDED) - rest_ns
        best = None
        mates.sort()
        for offer in mates:
            queue_ns, _, prices = offer
            if queue_ns + least_ns >= limit_ns:
                break
            cost_ns = queue_ns + left * prices.token + num_pairs * prices.pair
            if cost_ns < limit_ns:
                best, limit_ns = offer, cost_ns
        if best is None:
            return None
        queue_ns, position, prices = best
        return Pair(limit_ns + rest_ns, position, target[2], cached, work_ns(prices, left, cached), queue_ns)

    def _holders(self, prefills: PrefillOffers, demand: RequestDemand) -> PrefillOffers | None:
        """The prefill workers that need not compute all of the prompt; None when there are none."""
        ready = demand.ready
        holders = [[offer for offer in mates if ready[offer[1]]] for mates in prefills]
        return holders if any(holders) else None

    def _copied(
        self, holders: list[PrefillOffer], target: DecodeOffer, demand: RequestDemand, found: Pair | None
    ) -> Pair | None:
        """The prefill worker of the target's domain that holds more than the target does, in its cache and below it,
        copies that into the target's blocks and computes the rest."""
        better = None
        limit_ns = found.cost_ns if found else UNBOUNDED
        for queue_ns, position, prices in holders:
            cached = demand.ready[position]
            if cached <= -target[1]:
                continue
            left = demand.num_tokens - cached
            cost_ns = queue_ns + prompt_ns(prices, left, cached) + demand.raise_ns[position]
            cost_ns += target[0] + self._links.memory_latency_ns
            if cost_ns < limit_ns:
                limit_ns = cost_ns
                better = Pair(cost_ns, position, target[2], cached, work_ns(prices, left, cached), queue_ns)
        return better

    def _across(
        self, senders: list[_Sender], target: DecodeOffer, demand: RequestDemand, exposed_ns: int, found: Pair | None
    ) -> Pair | None:
        """The prefill worker that uses its own cache and sends what the target does not hold; ``exposed_ns`` or more
        of that shows."""
        place, left = self._places[target[2]], demand.num_tokens + target[1]
        limit_ns = found.cost_ns if found else UNBOUNDED
        better = None
        for own_ns, position, prompt_work_ns, queue_ns in senders:
            cost_ns = own_ns + target[0]
            if cost_ns + exposed_ns >= limit_ns:
                break
            link = self._paths[self._places[position]][place]
            if link is not None:
                cost_ns += self._links.exposed_ns(link, left, int(prompt_work_ns))
                if cost_ns < limit_ns:
                    limit_ns = cost_ns
                    cached = demand.ready[position]
                    better = Pair(cost_ns, position, target[2], cached, prompt_work_ns, queue_ns)
        return better
