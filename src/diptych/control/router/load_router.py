"""Routing by load alone: round robin, fewest outstanding requests, or the better of two drawn at random.

Knows no costs and no caches: a baseline to compare kv_aware with, and what most load balancers do. Prefill and decode
are separated whenever that is possible. Randomness is a seeded sequence of its own, so that equal histories give equal
routes.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from diptych.control.engine.kvcache.tier_records import Tier
from diptych.control.engine.reports import LoadReport
from diptych.control.errors import ConfigError
from diptych.control.router.routing import Route, RouteReason, RoutingConfig, RoutingName, RoutingRequest
from diptych.control.router.topology import Role, WorkerInfo

LOAD_ROUTINGS: tuple[RoutingName, ...] = ("round_robin", "least_loaded", "power_of_two")
_MASK = 2**64 - 1


class Picker:
    """Workers by number, each with the requests that it was given and that have not ended."""

    def __init__(self, kind: RoutingName, seed: int = 0) -> None:
        if kind not in LOAD_ROUTINGS:
            raise ConfigError(f"routing is {kind!r}; one of {', '.join(LOAD_ROUTINGS)}", param="routing")
        self._kind = kind
        self._state = seed & _MASK
        self._next = 0
        self._outstanding: dict[int, int] = {}
        self._up: list[int] = []  # in order
        self._heap: list[tuple[int, int]] = []  # lazily updated (outstanding, worker)

    def pick(self, avoid: frozenset[int] = frozenset()) -> int | None:
        """The worker for the next request (None: none is up); counts the request as sent. ``avoid``: as if these were
        down."""
        if self._kind == "round_robin":
            choice = self._in_turn(avoid)
        elif self._kind == "least_loaded":
            choice = self._least_loaded_but(avoid) if avoid else self._least_loaded()
        else:
            choice = self._better_of_two(avoid)
        if choice is not None:
            self._change(choice, 1)
        return choice

    def sent(self, worker: int) -> None:
        """A request was sent there that was not picked here."""
        self._change(worker, 1)

    def ended(self, worker: int) -> None:
        """A request of this worker ended."""
        self._change(worker, -1)

    def set_up(self, worker: int) -> None:
        """The worker came."""
        if worker not in self._up:
            insort(self._up, worker)
        self._change(worker, 0)

    def set_down(self, worker: int) -> None:
        """The worker went."""
        if worker in self._up:
            self._up.remove(worker)

    def _change(self, worker: int, by: int) -> None:
        count = self._outstanding[worker] = self._outstanding.get(worker, 0) + by
        if self._kind == "least_loaded":
            heappush(self._heap, (count, worker))

    def _in_turn(self, avoid: frozenset[int]) -> int | None:
        """The worker with the next number, after the last the first."""
        start = bisect_left(self._up, self._next)
        for worker in (*self._up[start:], *self._up[:start]):
            if worker not in avoid:
                self._next = worker + 1
                return worker
        return None

    def _least_loaded_but(self, avoid: frozenset[int]) -> int | None:
        loads = [(self._outstanding[worker], worker) for worker in self._up if worker not in avoid]
        return min(loads)[1] if loads else None

    def _least_loaded(self) -> int | None:
        heap = self._heap
        while heap:
            load, worker = heap[0]
            if self._outstanding[worker] == load and worker in self._up:
                return worker
            heappop(heap)
        return None

    def _better_of_two(self, avoid: frozenset[int]) -> int | None:
        up = [worker for worker in self._up if worker not in avoid]
        if not up:
            return None
        first, second = up[self._draw(len(up))], up[self._draw(len(up))]
        return min(first, second, key=lambda worker: (self._outstanding[worker], worker))

    def _draw(self, limit: int) -> int:
        """Below ``limit``: SplitMix64 (Steele, Lea and Flood 2014)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return (mixed ^ (mixed >> 31)) % limit


@dataclass(slots=True)
class _Counted:
    """Where a request counts: with the worker that computes its prompt (None: done there), and with the one that
    decodes it (None: no worker has a role of its own, and one count is enough)."""

    prefill: int | None
    decode: int | None = None


@dataclass(slots=True)
class _Roles:
    """Numbers of the workers with a role of their own."""

    prefill: frozenset[int] = field(default_factory=frozenset)
    decode: frozenset[int] = field(default_factory=frozenset)

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)


class LoadRouter:
    """A Router that picks by load alone: the baselines."""

    def __init__(self, config: RoutingConfig) -> None:
        self.alarm = ""
        self._config = config
        self._prefills = Picker(config.routing, config.seed)  # of the worker that begins
        self._decodes = Picker(config.routing, config.seed + 1)  # of the one that decodes
        self._role_of: dict[int, Role] = {}
        self._roles = _Roles()
        self._infos: dict[int, WorkerInfo] = {}
        self._shortest = self._longest = 0  # of the longest sequences that each worker takes
        self._num_copies = 0
        self._sent: dict[str, _Counted] = {}

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
        self._roles = _Roles(self._workers_of("prefill"), self._workers_of("decode"))

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
        """Ignore it: the request was counted when it was routed."""

    def on_first_token(self, request_id: str) -> None:
        sent = self._sent.get(request_id)
        if sent is not None and sent.prefill is not None and sent.decode is not None and sent.prefill != sent.decode:
            self._prefills.ended(sent.prefill)
            sent.prefill = None

    def on_transfer(self, prefill: int, decode: int, num_bytes: int, wire_ns: int, now: int) -> None:
        """Ignore transfers."""

    def on_ended(self, request_id: str) -> None:
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return
        if sent.prefill is not None:
            self._prefills.ended(sent.prefill)
        if sent.decode is not None:
            self._decodes.ended(sent.decode)

    def route(self, request: RoutingRequest, now: int) -> Route | None:
        if request.leaves is not None:
            return self._move(request, request.leaves)
        self.on_ended(request.request_id)
        chosen = self._choose(request)
        if chosen is None:
            return None
        prefill, decode, reason = chosen
        self._sent[request.request_id] = _Counted(prefill, decode if self._roles else None)
        return Route(prefill, decode, 0, 0, reason)

    def _move(self, request: RoutingRequest, source: int) -> Route | None:
        picker = self._decodes if self._roles else self._prefills
        strangers = self._too_small(request) | self._of_other_copies(source)
        target = picker.pick(request.avoid | self._roles.prefill | strangers | {source})
        if target is None:
            return None
        self.on_ended(request.request_id)
        if not request.hands_off or self._config.disaggregate == "never":
            source = target
        if self._roles:
            self._prefills.sent(source)
        self._sent[request.request_id] = _Counted(source, target) if self._roles else _Counted(target)
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

    def _workers_of(self, role: Role) -> frozenset[int]:
        return frozenset(worker for worker, own in self._role_of.items() if own == role)

    def _choose(self, request: RoutingRequest) -> tuple[int, int, RouteReason] | None:
        avoid, roles, too_small = request.avoid, self._roles, self._too_small(request)
        is_whole = self._config.disaggregate == "never" or not request.hands_off
        first = None
        if not is_whole or (request.is_prefill_only and self._config.disaggregate != "never"):
            first = self._pick(self._prefills, avoid, roles.decode | too_small)
        if first is None:
            first = self._pick(self._prefills, avoid, too_small)
            if first is None:
                return None
            return self._whole(first, "only_worker" if not is_whole else "never" if request.hands_off else "whole")
        role = self._role_of[first]
        if role == "both" or request.is_prefill_only:
            return self._whole(first, "both" if role == "both" else "one_token")
        second = self._pick(self._decodes, avoid, roles.prefill | too_small | self._of_other_copies(first))
        if second is None:
            return self._whole(first, "only_worker")
        return first, second, "remote"

    def _pick(self, picker: Picker, avoid: frozenset[int], never: frozenset[int]) -> int | None:
        """A worker not among ``never``, and not among ``avoid`` if that is possible."""
        first = picker.pick(avoid | never)
        return picker.pick(never) if first is None and avoid else first

    def _whole(self, worker: int, reason: RouteReason) -> tuple[int, int, RouteReason]:
        if self._roles:
            self._decodes.sent(worker)
        return worker, worker, reason
