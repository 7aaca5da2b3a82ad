"""Choosing by cost: every way to serve one request that is allowed, and the cheapest of them.

Reads the front end's picture of the fleet (views, index) and changes nothing; placement.py keeps the picture.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from diptych.control.router.pairing import DecodeOffer, Pair, PrefillOffer, best_pair
from diptych.control.router.placement_config import PlacementConfig, PlacementRequest, Reason
from diptych.control.router.prefix_index import PrefixIndex
from diptych.control.router.scorers import HOST_RESTORED, WorkerView
from diptych.control.router.workers import Level, WorkerInfo, level


@dataclass(frozen=True, slots=True)
class Chosen:
    """A placement by position. source, target: who prefills, who decodes. num_cached_tokens: what the source need not
    compute. target_cached: what the target holds already. work_ns: at the source, ``queue_ns`` after now. is_borrowed:
    the source computes into the target's blocks."""

    reason: Reason
    source: int
    target: int
    cost_ns: int = 0
    num_cached_tokens: int = 0
    target_cached: int = 0
    work_ns: int = 0
    queue_ns: int = 0
    is_borrowed: bool = False


@dataclass(frozen=True, slots=True)
class _Question:
    """One request, as the scoring needs it. held: leading tokens that each worker holds; restorable: those included
    that lie in its host tier (the same list when no host tier is known)."""

    request: PlacementRequest
    num_output_tokens: int
    held: list[int]
    restorable: list[int]
    now: int


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
        self._places, self._levels = _places(workers)
        self._long_roles = {worker.role for worker in workers if worker.is_long_pool}
        self._least_blocks = min(worker.num_blocks for worker in workers)

    def choose(self, request: PlacementRequest, num_output_tokens: int, now: int) -> Chosen | None:
        """The cheapest placement; None when no worker is up. Preferences that leave nobody are given up."""
        question = self._question(request, num_output_tokens, now)
        up = [position for position, view in enumerate(self._views) if view.is_up]
        usable = self._usable(up, request, now)
        return self._cheapest(question, usable) or (self._cheapest(question, up) if len(usable) < len(up) else None)

    def _question(self, request: PlacementRequest, num_output_tokens: int, now: int) -> _Question:
        size = self._block_size
        longest = (request.num_prompt_tokens - 1) // size * size
        matches = self._index.matches(request.hashes, now)
        held = [min(matched * size, longest) for matched in matches]
        if not self._index.has_host_blocks:
            return _Question(request, num_output_tokens, held, held, now)
        matches = self._index.host_matches(request.hashes)
        restorable = [max(one, min(matched * size, longest)) for one, matched in zip(held, matches, strict=True)]
        return _Question(request, num_output_tokens, held, restorable, now)

    def _usable(self, up: list[int], request: PlacementRequest, now: int) -> list[int]:
        """Those that may take it as long as anybody may: not to be avoided, large enough, heard of lately, of the right
        pool."""
        config, avoid = self._config, request.avoid
        num_blocks = -(-(request.num_prompt_tokens + request.max_tokens) // self._block_size)
        is_long = bool(config.long_prompt_tokens) and request.num_prompt_tokens >= config.long_prompt_tokens
        if not (avoid or self._long_roles or config.stale_ns or num_blocks > self._least_blocks):
            return up
        usable = []
        for position in up:
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

    def _cheapest(self, question: _Question, usable: list[int]) -> Chosen | None:
        """Served whole, or by a pair, whichever costs less."""
        if not usable:
            return None
        pair = None
        if question.request.hands_off and question.num_output_tokens > 1 and self._config.disaggregate != "never":
            pair = self._pair(question, usable)
        whole = self._whole(question, usable, has_pair=pair is not None)
        if whole is None or (pair is not None and pair.cost_ns < whole.cost_ns):
            return pair
        return replace(whole, reason=self._why(question, whole, pair))

    def _whole(self, question: _Question, usable: list[int], *, has_pair: bool) -> Chosen | None:
        """The cheapest single worker. Workers of one role do the other job only where that may be."""
        config, now = self._config, question.now
        num_tokens, num_outputs = question.request.num_prompt_tokens, question.num_output_tokens
        size, price_ns = self._block_size, config.kv_price_ns
        needs_pair = has_pair and config.disaggregate == "always"
        best, least_ns = -1, 0
        for position in usable:
            view = self._views[position]
            cost_ns = view.queue_ns(now)
            if best >= 0 and cost_ns >= least_ns:
                continue
            role = self._workers[position].role
            cached = question.restorable[position]
            if role != "both" and has_pair:
                limit = config.max_local_tokens
                if needs_pair or (limit and role == "decode" and view.streams and num_tokens - cached > limit):
                    continue
            cost_ns += view.charged_ns(self._work_ns(question, position))
            cost_ns += view.blocks_ns(-(-(num_tokens + num_outputs - cached) // size), price_ns)
            cost_ns += view.decode_ns(num_tokens, num_outputs)
            if best < 0 or cost_ns < least_ns:
                best, least_ns = position, cost_ns
        if best < 0:
            return None
        cached = question.restorable[best]
        return Chosen("both", best, best, least_ns, cached, cached, self._work_ns(question, best))

    def _pair(self, question: _Question, usable: list[int]) -> Chosen | None:
        """The cheapest two workers of which one at least has a single role."""
        roles = [self._workers[position].role for position in usable]
        sources = [position for position, role in zip(usable, roles, strict=True) if role == "prefill"]
        targets = [position for position, role in zip(usable, roles, strict=True) if role == "decode"]
        both = [position for position, role in zip(usable, roles, strict=True) if role == "both"]
        if not sources and not (targets and both):
            return None
        decodes = [self._decode_offer(question, position) for position in targets]
        prefills = [self._prefill_offer(question, position) for position in sources]
        num_tokens, links = question.request.num_prompt_tokens, self._config.links
        if not both:
            return self._as_chosen(question, best_pair(prefills, decodes, num_tokens, self._levels, links))
        more_decodes = [self._decode_offer(question, position) for position in both]
        more_prefills = [self._prefill_offer(question, position) for position in both]
        pairs = (
            best_pair(prefills, decodes + more_decodes, num_tokens, self._levels, links),
            best_pair(more_prefills, decodes, num_tokens, self._levels, links),
        )
        best = min((pair for pair in pairs if pair), key=lambda pair: pair.cost_ns, default=None)
        return self._as_chosen(question, best)

    def _as_chosen(self, question: _Question, pair: Pair | None) -> Chosen | None:
        if pair is None:
            return None
        source, target = pair.prefill, pair.decode
        return Chosen(
            "remote",
            source,
            target,
            pair.cost_ns,
            pair.num_cached_tokens,
            question.held[target],
            pair.work_ns,
            pair.queue_ns,
            is_borrowed=self._levels[self._places[source]][self._places[target]] is Level.POOL,
        )

    def _prefill_offer(self, question: _Question, position: int) -> PrefillOffer:
        view, cached = self._views[position], question.restorable[position]
        num_blocks = -(-(question.request.num_prompt_tokens - cached) // self._block_size)
        return PrefillOffer(
            position,
            self._places[position],
            view,
            view.queue_ns(question.now),
            cached,
            self._work_ns(question, position),
            view.blocks_ns(num_blocks, self._config.kv_price_ns),
        )

    def _decode_offer(self, question: _Question, position: int) -> DecodeOffer:
        view, held = self._views[position], question.held[position]
        num_tokens, num_outputs = question.request.num_prompt_tokens, question.num_output_tokens
        num_blocks = -(-(num_tokens + num_outputs - held) // self._block_size)
        cost_ns = view.memory_ns + view.blocks_ns(num_blocks, self._config.kv_price_ns)
        return DecodeOffer(position, self._places[position], cost_ns + view.decode_ns(num_tokens, num_outputs), held)

    def _work_ns(self, question: _Question, position: int) -> int:
        """Computing what is not held, and restoring what lies in the host tier (a share of computing it)."""
        view, held, restorable = self._views[position], question.held[position], question.restorable[position]
        work_ns = view.work_ns(question.request.num_prompt_tokens - restorable, restorable)
        if restorable > held:
            work_ns += view.work_ns(restorable - held, held) * HOST_RESTORED // 100
        return work_ns

    def _why(self, question: _Question, whole: Chosen, pair: Chosen | None) -> Reason:
        """The word for metrics: what spoke for a single worker."""
        role = self._workers[whole.source].role
        if role == "both":
            return "both"
        if self._config.disaggregate == "never":
            return "never"
        if not question.request.hands_off:
            return "whole"
        if question.num_output_tokens < 2:
            return "one_token"
        if pair is None:
            return "only_worker"
        if role == "prefill":
            return "prefill_keeps"
        if not self._views[whole.source].streams:
            return "local_idle_decode"
        if 2 * whole.num_cached_tokens >= question.request.num_prompt_tokens:
            return "local_cached"
        if pair.queue_ns >= pair.cost_ns - whole.cost_ns:
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
