"""Choosing by cost: every way to serve one request that is allowed, and the cheapest of them.

Reads the front end's picture of the fleet (views, index) and changes nothing; placement.py keeps the picture.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from diptych.control.router.costs import UNBOUNDED, Question, WorkerView, pairs, prompt_ns
from diptych.control.router.pairing import DecodeOffer, Pair, Pairing, PrefillOffers
from diptych.control.router.prefix_index import PrefixIndex
from diptych.control.router.routing import PlacementConfig, PlacementRequest, Reason
from diptych.control.router.topology import Level, WorkerInfo, level

_Whole = tuple[float, int]  # cost, position; -1: nobody


class Chosen(NamedTuple):
    """A placement by position. source, target: who prefills, who decodes. num_cached_tokens: what the source need not
    compute. target_cached: what the target holds already. work_ns: at the source. is_borrowed: the
    source computes into the target's blocks."""

    reason: Reason
    source: int
    target: int
    cost_ns: int = 0
    num_cached_tokens: int = 0
    target_cached: int = 0
    work_ns: int = 0
    is_borrowed: bool = False


class Choice:
    """Chooses among workers by position. ``views`` is the placer's own list."""

    def __init__(
        self, workers: Sequence[WorkerInfo], views: list[WorkerView], index: PrefixIndex, config: PlacementConfig
    ) -> None:
        self._workers = workers
        self._views = views
        self._index = index
        self._config = config
        self._block_size = workers[0].block_size
        self._roles = [worker.role for worker in workers]
        self._places, levels = _places(workers)
        self._num_places = len(levels)
        self._pairing = Pairing(self._places, levels, config.links, self._block_size)
        self._long_roles = {worker.role for worker in workers if worker.is_long_pool}
        self._least_blocks = min(worker.num_blocks for worker in workers)
        self._up: list[int] = []
        self._up_by_role: tuple[list[int], list[int], list[int]] = ([], [], [])

    def set_up(self) -> None:
        """Workers came or went."""
        self._up = [position for position, view in enumerate(self._views) if view.is_up]
        self._up_by_role = self._by_role(self._up)

    def _by_role(self, positions: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Those that prefill, that decode, that do both."""
        roles = self._roles
        prefill = [position for position in positions if roles[position] == "prefill"]
        decode = [position for position in positions if roles[position] == "decode"]
        return prefill, decode, [position for position in positions if roles[position] == "both"]

    def choose(self, request: PlacementRequest, num_output_tokens: int, now: int) -> Chosen | None:
        """The cheapest placement; None when no worker is up. Preferences that leave nobody are given up."""
        usable = self._usable(request, now) or self._up
        return self._cheapest(self._question(request, num_output_tokens, now), usable) if usable else None

    def _question(self, request: PlacementRequest, num_output_tokens: int, now: int) -> Question:
        size, num_tokens = self._block_size, request.num_prompt_tokens
        hashes, longest = request.hashes, (num_tokens - 1) // size  # the last token is always computed
        if len(hashes) > longest:
            hashes = hashes[:longest]
        held = [matched * size for matched in self._index.matches(hashes, now)]
        may_hand_off = request.hands_off and num_output_tokens > 1 and self._config.disaggregate != "never"
        return Question(num_tokens, num_output_tokens, held, may_hand_off, now)

    def _usable(self, request: PlacementRequest, now: int) -> list[int]:
        """Those that may take it as long as anybody may: not to be avoided, large enough, heard of lately, of the right
        pool."""
        config, avoid = self._config, request.avoid
        num_blocks = -(-(request.num_prompt_tokens + request.max_tokens) // self._block_size)
        is_long = bool(config.long_prompt_tokens) and request.num_prompt_tokens >= config.long_prompt_tokens
        if not (avoid or self._long_roles or config.stale_ns or num_blocks > self._least_blocks):
            return self._up
        usable = []
        for position in self._up:
            worker, view = self._workers[position], self._views[position]
            report = view.report
            is_stale = config.stale_ns and report is not None and now - report.time_ns > config.stale_ns
            if worker.number in avoid or worker.num_blocks < num_blocks or is_stale:
                continue
            if is_long and worker.role in self._long_roles and not worker.is_long_pool:
                continue
            if worker.is_long_pool and config.long_prompt_tokens and not is_long and not view.is_idle(now):
                continue
            usable.append(position)
        return usable

    def _cheapest(self, question: Question, usable: list[int]) -> Chosen | None:
        """Served whole, or by a pair, whichever costs less."""
        sources, targets, both = self._up_by_role if usable is self._up else self._by_role(usable)
        has_pair = question.may_hand_off and bool((sources and targets) or (both and (sources or targets)))
        whole, decodes = self._targets(question, both, (UNBOUNDED, -1), has_pair)
        limit = self._config.max_local_tokens if has_pair else 0
        single = (0.0, -1) if has_pair and self._config.disaggregate == "always" else whole  # (nothing beats 0)
        single, prefills = self._sources(question, sources, single)
        single, more_decodes = self._targets(question, targets, single, has_pair, limit)
        if single[1] >= 0:
            whole = single
        pair = None
        if has_pair:
            pair = self._pairing.best(prefills, more_decodes + decodes, question)
            if both and targets:
                _, prefills = self._sources(question, both, (0.0, -1))
                other = self._pairing.best(prefills, more_decodes, question)
                pair = min((one for one in (pair, other) if one), default=None)
        if pair is not None and pair.cost_ns < whole[0]:
            return self._as_pair(question, pair)
        return self._as_whole(question, whole, pair)

    def _sources(self, question: Question, positions: list[int], best: _Whole) -> tuple[_Whole, PrefillOffers]:
        """What those who may compute the prompt offer, by pool, and ``best`` or whoever serves it whole for less."""
        views, now, steps, middle = self._views, question.now, question.num_steps, question.middle
        least_ns, choice = best
        pools = self._pairing.pools
        offers: PrefillOffers = [[] for _ in range(self._pairing.num_pools)]
        for position in positions:
            prices = views[position].prices
            queue_ns = prices.standing
            if prices.idle_at > now:
                queue_ns += (prices.idle_at - now) * prices.stretch
            offers[pools[position]].append((queue_ns, position, prices))
            cost_ns = queue_ns + steps * (prices.step + middle * prices.context)
            if cost_ns < least_ns:
                cached = question.held[position]
                num_blocks = -(-(question.num_tokens + question.num_output_tokens - cached) // self._block_size)
                cost_ns += prompt_ns(prices, question.num_tokens - cached, cached) + prices.block * num_blocks
                if cost_ns < least_ns:
                    least_ns, choice = cost_ns, position
        return (least_ns, choice), offers

    def _targets(
        self, question: Question, positions: list[int], best: _Whole, has_pair: bool, max_local_tokens: int = 0
    ) -> tuple[_Whole, list[DecodeOffer]]:
        """What those who may decode offer (only where pairs are asked for, and of those at one place that hold nothing
        only the cheapest), and ``best`` or whoever serves it whole for less."""
        if not positions:
            return best, []
        views, held, now, places = self._views, question.held, question.now, self._places
        steps, middle, size, num_prompt = question.num_steps, question.middle, self._block_size, question.num_tokens
        least_ns, choice = best
        num_tokens, num_pairs = num_prompt + question.num_output_tokens, pairs(num_prompt, 0)
        num_blocks = -(-num_tokens // size)
        offers: list[DecodeOffer] = []
        empty_ns, empty_at = [math.inf] * self._num_places, [-1] * self._num_places  # who holds nothing, by place
        for position in positions:
            prices = views[position].prices
            cached = held[position]
            answer_ns = steps * (prices.step + middle * prices.context)
            answer_ns += prices.block * (-(-(num_tokens - cached) // size) if cached else num_blocks)
            if has_pair:
                offer_ns = prices.memory + answer_ns
                if cached:
                    offers.append((offer_ns, -cached, position))
                elif offer_ns < empty_ns[place := places[position]]:
                    empty_ns[place], empty_at[place] = offer_ns, position
            cost_ns = prices.standing + answer_ns
            if cost_ns < least_ns:
                if prices.idle_at > now:
                    cost_ns += (prices.idle_at - now) * prices.stretch
                if cached:
                    cost_ns += prompt_ns(prices, num_prompt - cached, cached)
                else:
                    cost_ns += num_prompt * prices.token + num_pairs * prices.pair
                if cost_ns < least_ns and not (max_local_tokens and self._disturbs(question, position)):
                    least_ns, choice = cost_ns, position
        offers += [(offer_ns, 0, at) for offer_ns, at in zip(empty_ns, empty_at, strict=True) if at >= 0]
        return (least_ns, choice), offers

    def _disturbs(self, question: Question, position: int) -> bool:
        """Whether more is to be computed there than settings allow next to streams."""
        uncached = question.num_tokens - question.held[position]
        return uncached > self._config.max_local_tokens and self._views[position].streams > 0

    def _as_pair(self, question: Question, pair: Pair) -> Chosen:
        is_borrowed = self._pairing.shares_pool(pair.source, pair.target)
        held, work_ns = question.held[pair.target], int(pair.work_ns)
        cached = pair.num_cached_tokens
        return Chosen("remote", pair.source, pair.target, int(pair.cost_ns), cached, held, work_ns, is_borrowed)

    def _as_whole(self, question: Question, whole: _Whole, pair: Pair | None) -> Chosen:
        cost_ns, position = whole
        cached = question.held[position]
        work_ns = self._views[position].work_ns(question.num_tokens - cached, cached)
        reason = self._why(question, whole, pair)
        return Chosen(reason, position, position, int(cost_ns), cached, cached, work_ns)

    def _why(self, question: Question, whole: _Whole, pair: Pair | None) -> Reason:
        """The word for metrics: what spoke for a single worker."""
        cost_ns, position = whole
        role = self._roles[position]
        if role == "both":
            return "both"
        if self._config.disaggregate == "never":
            return "never"
        if question.num_output_tokens < 2:
            return "one_token"
        if not question.may_hand_off:
            return "whole"
        if pair is None:
            return "only_worker"
        if role == "prefill":
            return "prefill_keeps"
        if not self._views[position].streams:
            return "local_idle_decode"
        if 2 * question.held[position] >= question.num_tokens:
            return "local_cached"
        if pair.queue_ns >= pair.cost_ns - cost_ns:
            return "local_backlog"
        return "local_short"


def _places(workers: Sequence[WorkerInfo]) -> tuple[list[int], list[list[Level]]]:
    """Workers that share a place are equally far from any other; the levels between places."""
    first: dict[tuple[str, int | None, str], int] = {}
    places: list[int] = []
    members: list[WorkerInfo] = []
    for worker in workers:
        key = (worker.host, worker.pool, worker.island)
        if key not in first:
            first[key] = len(members)
            members.append(worker)
        places.append(first[key])
    return places, [[level(a, b) for b in members] for a in members]
