"""Routing in turn: each request goes to the worker with the next number, after the last to the first.

Knows no costs, no loads and no caches: a baseline to compare kv_aware with, and what many load balancers do. Prefill
and decode are separated whenever that is possible.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from diptych.control.engine.kvcache.tier_records import Tier
from diptych.control.engine.reports import LoadReport
from diptych.control.router.routing import Route, RouteReason, RoutingConfig, RoutingRequest
from diptych.control.router.topology import Role, WorkerInfo


class Turns:
    """Workers by number, and whose turn it is."""

    def __init__(self) -> None:
        self._next = 0
        self._up: list[int] = []  # in order

    def pick(self, avoid: frozenset[int] = frozenset()) -> int | None:
        """The worker for the next request (None: none is up). ``avoid``: as if these were down."""
        start = bisect_left(self._up, self._next)
        for worker in (*self._up[start:], *self._up[:start]):
            if worker not in avoid:
                self._next = worker + 1
                return worker
        return None

    def set_up(self, worker: int) -> None:
        """The worker came."""
        if worker not in self._up:
            insort(self._up, worker)

    def set_down(self, worker: int) -> None:
        """The worker went."""
        if worker in self._up:
            self._up.remove(worker)


class RoundRobinRouter:
    """A Router that takes workers in turn; the methods are those of Router."""

    def __init__(self, config: RoutingConfig) -> None:
        self.alarm = ""
        self._config = config
        self._prefills = Turns()  # of the worker that begins
        self._decodes = Turns()  # of the one that decodes
        self._role_of: dict[int, Role] = {}
        self._prefill_only: frozenset[int] = frozenset()
        self._decode_only: frozenset[int] = frozenset()
        self._infos: dict[int, WorkerInfo] = {}
        self._shortest = self._longest = 0  # of the longest sequences that each worker takes
        self._num_copies = 0

    def set_up(self, info: WorkerInfo) -> None:
        self._infos[info.number] = info
        limits = [known.max_sequence_tokens for known in self._infos.values()]
        self._shortest, self._longest = min(limits), max(limits)
        self._num_copies = len({known.model_copy for known in self._infos.values()})
        self.set_role(info.number, info.role)
        self._prefills.set_up(info.number)
        self._decodes.set_up(info.number)

    def set_down(self, worker: int) -> None:
        self._prefills.set_down(worker)
        self._decodes.set_down(worker)

    def set_role(self, worker: int, role: Role) -> None:
        self._role_of[worker] = role
        self._prefill_only = frozenset(worker for worker, own in self._role_of.items() if own == "prefill")
        self._decode_only = frozenset(worker for worker, own in self._role_of.items() if own == "decode")

    def on_load(self, worker: int, report: LoadReport) -> None:
        """Ignore load reports: what was routed is counted here."""

    def on_kv_events(
        self,
        worker: int,
        sequence: int,
        stored: Iterable[bytes] = (),
        evicted: Sequence[bytes] = (),
        tier: Tier = "device",
    ) -> bool:
        return True

    def on_kv_snapshot(self, worker: int, sequence: int, hashes: Iterable[bytes], tier: Tier = "device") -> None:
        """Ignore caches."""

    def on_queued(self, request_id: str, worker: int) -> None:
        """Ignore it: the request was counted when it was routed."""

    def on_admitted(self, request_id: str, worker: int, num_cached_tokens: int, num_tier_tokens: int = 0) -> None:
        """Ignore it: what is cached changes nothing here."""

    def on_first_token(self, request_id: str) -> None:
        """Ignore it: what is computed changes nothing here."""

    def on_transfer(self, prefill: int, decode: int, num_bytes: int, wire_ns: int, now: int) -> None:
        """Ignore transfers."""

    def on_ended(self, request_id: str) -> None:
        """Ignore it: no request is counted here."""

    def route(self, request: RoutingRequest, now: int) -> Route | None:
        if request.leaves is not None:
            return self._move(request, request.leaves)
        chosen = self._choose(request)
        if chosen is None:
            return None
        prefill, decode, reason = chosen
        return Route(prefill, decode, 0, 0, reason)

    def _move(self, request: RoutingRequest, source: int) -> Route | None:
        turns = self._decodes if self._prefill_only or self._decode_only else self._prefills
        strangers = self._too_small(request) | self._of_other_copies(source)
        target = turns.pick(request.avoid | self._prefill_only | strangers | {source})
        if target is None:
            return None
        if not request.hands_off or self._config.disaggregate == "never":
            source = target
        return Route(source, target, 0, 0, "moved")

    def _too_small(self, request: RoutingRequest) -> frozenset[int]:
        """Workers that cannot hold prompt and answer; an answer ends at the largest context at the latest."""
        most_tokens = min(request.num_prompt_tokens + request.max_tokens, self._longest)
        if most_tokens <= self._shortest:
            return frozenset()
        return frozenset(worker for worker, info in self._infos.items() if info.max_sequence_tokens < most_tokens)

    def _of_other_copies(self, worker: int) -> frozenset[int]:
        if self._num_copies < 2:
            return frozenset()
        copy = self._infos[worker].model_copy
        return frozenset(other for other, info in self._infos.items() if info.model_copy != copy)

    def _choose(self, request: RoutingRequest) -> tuple[int, int, RouteReason] | None:
        avoid, too_small = request.avoid, self._too_small(request)
        is_whole = self._config.disaggregate == "never" or not request.hands_off
        first = None
        if not is_whole or (request.is_prefill_only and self._config.disaggregate != "never"):
            first = _pick(self._prefills, avoid, self._decode_only | too_small)
        if first is None:
            first = _pick(self._prefills, avoid, too_small)
            if first is None:
                return None
            return first, first, "only_worker" if not is_whole else "never" if request.hands_off else "whole"
        role = self._role_of[first]
        if role == "both" or request.is_prefill_only:
            return first, first, "both" if role == "both" else "one_token"
        strangers = self._prefill_only | too_small | self._of_other_copies(first)
        second = _pick(self._decodes, avoid, strangers)
        return (first, first, "only_worker") if second is None else (first, second, "remote")


def _pick(turns: Turns, avoid: frozenset[int], never: frozenset[int]) -> int | None:
    """A worker not among ``never``, and not among ``avoid`` if that is possible."""
    first = turns.pick(avoid | never)
    return turns.pick(never) if first is None and avoid else first
