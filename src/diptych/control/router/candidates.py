"""Every way to serve one request that is allowed, and the cheapest of them.

Reads the router's picture of the fleet (views, index) and changes nothing; cost_router.py keeps the picture.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from diptych.control.request import PeerRun
from diptych.control.router.costs import UNBOUNDED, RequestDemand, WorkerView, pairs, prompt_ns, raised
from diptych.control.router.pairing import DecodeOffer, Pair, PairSearch, PrefillOffers
from diptych.control.router.path_speeds import PathSpeeds
from diptych.control.router.prefix_index import PrefixIndex
from diptych.control.router.routing import RouteReason, RoutingConfig, RoutingRequest
from diptych.control.router.tier_index import TierIndex
from diptych.control.router.topology import LinkCost, LinkCosts, WorkerInfo, level

_Whole = tuple[float, int]  # cost, position; -1: no worker


class Candidate(NamedTuple):
    """One way to serve a request, workers by position. source prefills, target decodes. num_cached_tokens: what the
    source need not compute. target_cached: what the cache of the target holds already. work_ns: at the source.
    is_borrowed: the source computes into the target's blocks. source_peer, target_peer: what these may read from other
    workers of their hosts."""

    reason: RouteReason
    source: int
    target: int
    cost_ns: int = 0
    num_cached_tokens: int = 0
    target_cached: int = 0
    work_ns: int = 0
    is_borrowed: bool = False
    source_peer: PeerRun | None = None
    target_peer: PeerRun | None = None


class CandidateSearch:
    """The cheapest candidate among workers by position. The router's own lists: ``workers``, ``views``."""

    def __init__(
        self,
        workers: list[WorkerInfo],
        views: list[WorkerView],
        index: PrefixIndex,
        tiers: tuple[TierIndex, TierIndex],
        config: RoutingConfig,
    ) -> None:
        self._workers = workers
        self._views = views
        self._index = index
        self._host, self._disk = tiers
        self._config = config
        self.speeds = PathSpeeds()
        self._up: list[int] = []
        self._up_by_role: tuple[list[int], list[int], list[int]] = ([], [], [])
        self.place_workers()

    def place_workers(self) -> None:
        """A worker is new, or came back with another description: place all workers again."""
        workers = self._workers
        self._block_size = workers[0].block_size if workers else 1
        self._longest = [worker.max_sequence_tokens for worker in workers]
        self._longest_of_all = max(self._longest, default=0)
        self._longest_of_each = min(self._longest, default=0)
        self._copies = [worker.model_copy for worker in workers]
        self._num_copies = len(set(self._copies))
        self._mates = _mates(workers)
        self._places, paths = _places(workers, self._config.links, self.speeds)
        self._num_places = len(paths)
        self._pairs = PairSearch(self._places, paths, self._config.links, self._block_size)

    def on_transfer(self, source: int, target: int, num_bytes: int, wire_ns: int, now: int) -> None:
        """KV went from the worker at one position to another: where it goes next may follow from how fast it was."""
        a, b = self._workers[source], self._workers[target]
        guessed = self._config.links.link(level(a, b))
        if guessed is not None and self.speeds.observe((a.number, b.number), guessed, num_bytes, wire_ns, now):
            self.place_workers()

    def set_up(self) -> None:
        """Workers came or went, or changed roles."""
        self._up = [position for position, view in enumerate(self._views) if view.is_up]
        self._up_by_role = self._by_role(self._up)

    def _by_role(self, positions: list[int]) -> tuple[list[int], list[int], list[int]]:
        """The positions of workers that prefill, that decode, and that do both."""
        views = self._views
        prefill = [position for position in positions if views[position].role == "prefill"]
        decode = [position for position in positions if views[position].role == "decode"]
        return prefill, decode, [position for position in positions if views[position].role == "both"]

    def cheapest(self, request: RoutingRequest, num_output_tokens: int, now: int) -> Candidate | None:
        """The cheapest; None when no worker is up that is large enough. The wish to avoid some is given up where it
        leaves none."""
        usable = self._usable(request)
        if not usable:
            return None
        demand = self._demand(request, num_output_tokens, now)
        if self._num_copies == 1:
            return self._cheapest(demand, usable)
        found = None
        for copy in sorted({self._copies[at] for at in usable}):  # only workers of one copy share a request
            best = self._cheapest(demand, [at for at in usable if self._copies[at] == copy])
            if best is not None and (found is None or best.cost_ns < found.cost_ns):
                found = best
        return found

    def cheapest_move(self, request: RoutingRequest, source: int, num_output_tokens: int, now: int) -> Candidate:
        """The cheapest other worker for a stream of the worker at ``source``, which hands it over unless it may not.
        There is one: see ``movable_to``."""
        targets = self.movable_to(request, source)
        demand = self._demand(request, num_output_tokens, now)
        (cost_ns, target), decodes = self._targets(demand, targets, (math.inf, -1), has_pair=True)
        if request.hands_off and self._config.disaggregate != "never":
            _, prefills = self._sources(demand, [source], (0.0, -1))
            pair = self._pairs.best(prefills, decodes, demand)
            assert pair is not None, "there is a source and a target"
            return self._as_pair(demand, pair)._replace(reason="moved")
        return self._as_whole(demand, (cost_ns, target), None)._replace(reason="moved")

    def movable_to(self, request: RoutingRequest, source: int) -> list[int]:
        """The workers that may decode what runs at ``source``: the tokens of another copy would differ."""
        views, copies, avoid, workers = self._views, self._copies, request.avoid, self._workers
        most_tokens = self._most_tokens(request)
        return [
            at
            for at in self._up
            if at != source
            and views[at].role != "prefill"
            and self._longest[at] >= most_tokens
            and copies[at] == copies[source]
            and workers[at].number not in avoid
        ]

    def _demand(self, request: RoutingRequest, num_output_tokens: int, now: int) -> RequestDemand:
        size, num_tokens = self._block_size, request.num_prompt_tokens
        hashes: Sequence[bytes] = request.submission.hashes
        longest = (num_tokens - 1) // size  # the last token is always computed
        if len(hashes) > longest:
            hashes = hashes[:longest]
        held = [matched * size for matched in self._index.matches(hashes, now)]
        may_hand_off = request.hands_off and num_output_tokens > 1 and self._config.disaggregate != "never"
        most_tokens = self._most_tokens(request)
        is_prefill_only = request.is_prefill_only and self._config.disaggregate != "never"
        demand = RequestDemand(
            num_tokens, num_output_tokens, held, held, [], may_hand_off, now, most_tokens, is_prefill_only
        )
        self._look_below(hashes, demand)
        return demand

    def _look_below(self, hashes: Sequence[bytes], demand: RequestDemand) -> None:
        """Find, for each worker, the tokens that it need not compute, the cost of bringing up those that are below its
        cache, and the peer that has what comes next."""
        host, disk, held, size = self._host, self._disk, demand.held, self._block_size
        demand.raise_ns = raise_ns = [0.0] * len(held)
        if not hashes or not (len(host) or len(disk)):
            return
        demand.ready = ready = held.copy()
        at_peers: dict[tuple[int, int], tuple[int, int]] = {}  # (mates, first block) -> (blocks, peer)
        for at in self._up:
            start = held[at] // size
            num_host = host.run(at, hashes, start)
            start += num_host
            num_disk = disk.run(at, hashes, start)
            num_peer, mates = 0, self._mates[at]
            if mates and self._views[at].prices.peer:
                if (mates, start) not in at_peers:
                    at_peers[mates, start] = host.shared_run(mates, hashes, start)
                num_peer, peer = at_peers[mates, start]
                if num_peer:
                    demand.peer_runs[at] = PeerRun(self._workers[peer].number, start, num_peer)
            if num_host or num_disk or num_peer:
                prices = self._views[at].prices
                ready[at], raise_ns[at] = raised(prices, held[at], num_host, num_disk, num_peer, size)

    def _usable(self, request: RoutingRequest) -> list[int]:
        """Workers that are large enough and not to be avoided, if that leaves any. One that only prefills need not hold
        the answer as long as another can take it over."""
        most_tokens, avoid = self._most_tokens(request), request.avoid
        if not avoid and most_tokens <= self._longest_of_each:
            return self._up
        longest, num_prompt = self._longest, request.num_prompt_tokens
        views, workers = self._views, self._workers
        fitting = [at for at in self._up if longest[at] >= most_tokens]
        usable = [at for at in fitting if workers[at].number not in avoid] or fitting
        if usable and most_tokens > self._longest_of_each and request.hands_off:
            helpers = [at for at in self._up if num_prompt < longest[at] < most_tokens and views[at].role == "prefill"]
            usable = sorted(usable + [at for at in helpers if workers[at].number not in avoid])
        return usable

    def _most_tokens(self, request: RoutingRequest) -> int:
        """Tokens of prompt and answer together; an answer ends at the largest context of the fleet at the latest."""
        return min(request.num_prompt_tokens + request.max_tokens, self._longest_of_all)

    def _cheapest(self, demand: RequestDemand, usable: list[int]) -> Candidate | None:
        """Served whole, or by a pair, whichever costs less."""
        sources, targets, both = self._up_by_role if usable is self._up else self._by_role(usable)
        has_pair = demand.may_hand_off and bool((sources and targets) or (both and (sources or targets)))
        whole, decodes = self._targets(demand, both, (UNBOUNDED, -1), has_pair)
        has_choice = has_pair or (demand.is_prefill_only and bool(sources or both))
        if has_choice and not has_pair and self._config.disaggregate == "always":
            targets = []
        limit = self._config.max_local_tokens if has_choice and self._config.local_prefill == "short" else 0
        single = (0.0, -1) if has_pair and self._config.disaggregate == "always" else whole  # (nothing beats 0)
        single, prefills = self._sources(demand, sources, single)
        single, more_decodes = self._targets(demand, targets, single, has_pair, limit)
        if single[1] >= 0:
            whole = single
        pair = None
        if has_pair:
            pair = self._pairs.best(prefills, more_decodes + decodes, demand)
            if both and targets:
                _, prefills = self._sources(demand, both, (0.0, -1))
                other = self._pairs.best(prefills, more_decodes, demand)
                pair = min((found for found in (pair, other) if found), default=None)
        if pair is not None and pair.cost_ns < whole[0]:
            return self._as_pair(demand, pair)
        return self._as_whole(demand, whole, pair) if whole[1] >= 0 else None

    def _sources(self, demand: RequestDemand, positions: list[int], best: _Whole) -> tuple[_Whole, PrefillOffers]:
        """What workers that may compute the prompt offer, by memory domain, and ``best`` or the one of them that serves
        it whole for less."""
        views, now, steps, middle = self._views, demand.now, demand.num_steps, demand.middle
        least_ns, choice = best
        domains = self._pairs.domains
        offers: PrefillOffers = [[] for _ in range(self._pairs.num_domains)]
        for position in positions:
            prices = views[position].prices
            queue_ns = prices.standing
            if prices.idle_at > now:
                queue_ns += (prices.idle_at - now) * prices.stretch
            offers[domains[position]].append((queue_ns, position, prices))
            cost_ns = queue_ns + steps * (prices.step + middle * prices.context)
            if cost_ns < least_ns and self._longest[position] >= demand.most_tokens:
                ready, num_tokens = demand.ready[position], demand.num_tokens
                new_tokens = num_tokens + demand.num_output_tokens - demand.held[position]
                cost_ns += prompt_ns(prices, num_tokens - ready, ready) + demand.raise_ns[position]
                cost_ns += prices.block * -(-new_tokens // self._block_size)
                if cost_ns < least_ns:
                    least_ns, choice = cost_ns, position
        return (least_ns, choice), offers

    def _targets(
        self, demand: RequestDemand, positions: list[int], best: _Whole, has_pair: bool, max_local_tokens: int = 0
    ) -> tuple[_Whole, list[DecodeOffer]]:
        """Decode candidates for a split (none unless pairs are asked for; of workers at one place with no cached prefix
        only the cheapest). Also returns the cheaper of ``best`` and a worker among them that serves the request whole.
        """
        if not positions:
            return best, []
        views, held, now, places = self._views, demand.held, demand.now, self._places
        all_ready = demand.ready
        steps, middle, size, num_prompt = demand.num_steps, demand.middle, self._block_size, demand.num_tokens
        least_ns, choice = best
        num_tokens, num_pairs = num_prompt + demand.num_output_tokens, pairs(num_prompt, 0)
        num_blocks = -(-num_tokens // size)
        offers: list[DecodeOffer] = []
        empty_ns, empty_at = [math.inf] * self._num_places, [-1] * self._num_places  # those that hold nothing, by place
        for position in positions:
            prices = views[position].prices
            cached = held[position]
            answer_ns = steps * (prices.step + middle * prices.context)
            answer_ns += prices.block * (-(-(num_tokens - cached) // size) if cached else num_blocks)
            if has_pair:
                offer_ns = prices.memory + answer_ns
                if all_ready[position]:
                    offers.append((offer_ns, -cached, position))
                elif offer_ns < empty_ns[place := places[position]]:
                    empty_ns[place], empty_at[place] = offer_ns, position
            cost_ns = prices.standing + answer_ns
            if cost_ns < least_ns:
                if prices.idle_at > now:
                    cost_ns += (prices.idle_at - now) * prices.stretch
                if ready := all_ready[position]:
                    cost_ns += prompt_ns(prices, num_prompt - ready, ready) + demand.raise_ns[position]
                else:
                    cost_ns += num_prompt * prices.token + num_pairs * prices.pair
                if cost_ns < least_ns and not (max_local_tokens and self._disturbs(demand, position)):
                    least_ns, choice = cost_ns, position
        offers += [(offer_ns, 0, at) for offer_ns, at in zip(empty_ns, empty_at, strict=True) if at >= 0]
        return (least_ns, choice), offers

    def _disturbs(self, demand: RequestDemand, position: int) -> bool:
        """Whether more is to be computed there than settings allow next to streams."""
        uncached = demand.num_tokens - demand.ready[position]
        return uncached > self._config.max_local_tokens and self._views[position].streams > 0

    def _as_pair(self, demand: RequestDemand, pair: Pair) -> Candidate:
        is_borrowed = self._pairs.shares_memory(pair.source, pair.target)
        held, work_ns = demand.held[pair.target], int(pair.work_ns)
        cached = pair.num_cached_tokens
        peers = (demand.peer_runs.get(pair.source), demand.peer_runs.get(pair.target))
        cost_ns = int(pair.cost_ns)
        return Candidate("remote", pair.source, pair.target, cost_ns, cached, held, work_ns, is_borrowed, *peers)

    def _as_whole(self, demand: RequestDemand, whole: _Whole, pair: Pair | None) -> Candidate:
        cost_ns, position = whole
        ready = demand.ready[position]
        work_ns = self._views[position].work_ns(demand.num_tokens - ready, ready)
        reason = self._why(demand, whole, pair)
        peer, held = demand.peer_runs.get(position), demand.held[position]
        return Candidate(reason, position, position, int(cost_ns), ready, held, work_ns, False, peer, peer)

    def _why(self, demand: RequestDemand, whole: _Whole, pair: Pair | None) -> RouteReason:
        """The reason for the metrics: why one worker serves the request whole."""
        cost_ns, position = whole
        role = self._views[position].role
        if role == "both":
            return "both"
        if self._config.disaggregate == "never":
            return "never"
        if demand.num_output_tokens < 2:
            return "one_token"
        if not demand.may_hand_off:
            return "whole"
        if pair is None:
            return "only_worker"
        if role == "prefill":
            return "prefill_keeps"
        if not self._views[position].streams:
            return "local_idle_decode"
        if 2 * demand.ready[position] >= demand.num_tokens:
            return "local_cached"
        if pair.queue_ns >= pair.cost_ns - cost_ns:
            return "local_backlog"
        return "local_short"


def _mates(workers: Sequence[WorkerInfo]) -> list[int]:
    """A bit mask per worker of those whose host memories it may read, itself included; 0: of no other."""
    masks: dict[tuple[int | None, int], int] = {}
    for position, worker in enumerate(workers):
        group = (worker.host_domain, worker.model_copy)
        masks[group] = masks.get(group, 0) | 1 << position
    own = [masks[worker.host_domain, worker.model_copy] for worker in workers]
    return [
        mask if worker.host_domain is not None and mask & (mask - 1) else 0
        for worker, mask in zip(workers, own, strict=True)
    ]


def _places(
    workers: Sequence[WorkerInfo], links: LinkCosts, speeds: PathSpeeds
) -> tuple[list[int], list[list[LinkCost | None]]]:
    """Workers that share a place are equally far from any other; the paths from place to place. A worker for which
    something else was measured than its labels say has a place of its own."""
    special = {worker for path in speeds.measured for worker in path}
    first: dict[tuple[str, str, int | None, int], int] = {}
    places: list[int] = []
    members: list[WorkerInfo] = []
    for worker in workers:
        key = (worker.host, worker.rack, worker.memory_domain, worker.number if worker.number in special else -1)
        if key not in first:
            first[key] = len(members)
            members.append(worker)
        places.append(first[key])
    return places, [[_path(a, b, links, speeds) for b in members] for a in members]


def _path(a: WorkerInfo, b: WorkerInfo, links: LinkCosts, speeds: PathSpeeds) -> LinkCost | None:
    guessed = links.link(level(a, b))
    return None if guessed is None else speeds.link((a.number, b.number), guessed)
