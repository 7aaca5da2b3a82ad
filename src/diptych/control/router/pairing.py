"""The cheapest pair of a prefill and a decode worker, exactly, without trying all pairs.

    pair = queue at p + work of the prompt at p + what the transfer shows after it + memory and decode at d

Only where p and d are, and how much of the prompt d holds, ties the two together. So of the decode workers at one
place only those are tried that no other there beats in both, and prefill workers in the order of their best case until
it cannot win any more. Must never know a request beyond its length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.control.router.scorers import UNBOUNDED, WorkerView
from diptych.control.router.workers import Level, LinkCosts


@dataclass(frozen=True, slots=True)
class PrefillOffer:
    """A prefill worker for one prompt. place: see Places. queue_ns: before its work begins. num_cached_tokens,
    work_ns: with its own cache. blocks_ns: the price of the blocks that the prompt takes there when it is copied."""

    position: int
    place: int
    view: WorkerView
    queue_ns: int
    num_cached_tokens: int
    work_ns: int
    blocks_ns: int


@dataclass(frozen=True, slots=True)
class DecodeOffer:
    """A decode worker for one prompt. cost_ns: memory and decoding there. num_cached_tokens: what it holds."""

    position: int
    place: int
    cost_ns: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Pair:
    """The choice. num_cached_tokens: what need not be computed. work_ns: at the prefill worker. queue_ns: before it."""

    prefill: int
    decode: int
    cost_ns: int
    num_cached_tokens: int
    work_ns: int
    queue_ns: int


def undominated(offers: Sequence[DecodeOffer]) -> list[DecodeOffer]:
    """Of each place those that no other there beats in cost and in cached tokens; cheapest first."""
    most: dict[int, int] = {}
    kept = []
    for offer in sorted(offers, key=lambda one: (one.cost_ns, -one.num_cached_tokens, one.position)):
        if offer.num_cached_tokens > most.get(offer.place, -1):
            most[offer.place] = offer.num_cached_tokens
            kept.append(offer)
    return kept


def best_pair(
    prefills: Sequence[PrefillOffer],
    decodes: Sequence[DecodeOffer],
    num_tokens: int,
    levels: Sequence[Sequence[Level]],
    links: LinkCosts,
) -> Pair | None:
    """The cheapest pair; ties go to the lower prefill, then decode cost, then number. None without either."""
    if not prefills or not decodes:
        return None
    targets = undominated(decodes)
    most = max(target.num_cached_tokens for target in targets)
    least_ns = targets[0].cost_ns
    bounds = []
    for offer in prefills:
        work_ns = offer.work_ns
        if most > offer.num_cached_tokens:
            work_ns = min(work_ns, offer.view.work_ns(num_tokens - most, most))
        bounds.append((offer.queue_ns + offer.view.charged_ns(work_ns), offer.position, offer))
    bounds.sort(key=lambda one: one[:2])
    best, best_ns = None, UNBOUNDED
    for bound_ns, _, offer in bounds:
        if bound_ns + least_ns >= best_ns:
            break
        view, row = offer.view, levels[offer.place]
        for target in targets:
            if bound_ns + target.cost_ns >= best_ns:
                break
            at = row[target.place]
            cached, work_ns, blocks_ns = offer.num_cached_tokens, offer.work_ns, offer.blocks_ns
            if at is Level.POOL:  # computed straight into the target's blocks, after what it holds
                cached, blocks_ns = target.num_cached_tokens, 0
                work_ns = view.work_ns(num_tokens - cached, cached)
            shown_ns = links.exposed_ns(at, num_tokens - target.num_cached_tokens, work_ns)
            cost_ns = offer.queue_ns + view.charged_ns(work_ns) + blocks_ns + shown_ns + target.cost_ns
            if cost_ns < best_ns:
                best_ns = cost_ns
                best = Pair(offer.position, target.position, cost_ns, cached, work_ns, offer.queue_ns)
    return best
