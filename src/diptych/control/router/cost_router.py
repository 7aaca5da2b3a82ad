"""Routing by predicted cost: every way of serving a request gets a cost in nanoseconds, and the cheapest is taken.

Whether prefill and decode are separated is one more comparison of the same costs, request by request. Owns the front
end's picture of the fleet: what workers report, what they hold, what was sent there. The costs themselves are in
costs.py, the search for the cheapest in candidates.py and pairing.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diptych.control.engine.kvcache.tier_records import Tier
from diptych.control.engine.reports import LoadReport
from diptych.control.kv_layout import KVLayout
from diptych.control.router.candidates import Candidate, CandidateSearch
from diptych.control.router.costs import OBJECTIVE_POWER, UNBOUNDED, WorkerView
from diptych.control.router.hit_rate_monitor import HitRateMonitor
from diptych.control.router.idle_trials import IdleTrials
from diptych.control.router.prefix_index import PrefixIndex
from diptych.control.router.routing import Route, RoutingConfig, RoutingRequest
from diptych.control.router.tier_index import TierIndex
from diptych.control.router.topology import Role, WorkerInfo


@dataclass(slots=True)
class _Routed:
    """A request that was routed and has not ended. The views are those of then: a worker that died has a new one."""

    prefill: WorkerView
    decode: WorkerView
    num_prompt_tokens: int
    num_output_tokens: int  # expected
    positions: tuple[int, int]
    expected: dict[int, int]  # position -> tokens expected in its cache, until the worker reports what it found


class CostRouter:
    """A Router that takes the worker, or pair of workers, with the lowest predicted cost."""

    def __init__(self, config: RoutingConfig) -> None:
        self._config = config
        self._loss_power = OBJECTIVE_POWER if config.local_prefill == "objective" else 1
        self._workers: list[WorkerInfo] = []
        self._views: list[WorkerView] = []
        self._position: dict[int, int] = {}  # number -> index of both lists
        self.index = PrefixIndex()
        self.host, self.disk = TierIndex(), TierIndex()  # of the tiers below
        self.watch = HitRateMonitor()
        self._sent: dict[str, _Routed] = {}
        self._search = CandidateSearch(self._workers, self._views, self.index, (self.host, self.disk), config)
        self._trials = IdleTrials(self._workers, self._views)
        self._now = 0

    @property
    def hit_error(self) -> float:
        """Share of recent prompt tokens that were wrongly predicted to be cached, or not to be."""
        return self.watch.error

    @property
    def alarm(self) -> str:
        return self.watch.alarm

    # -- what workers report ------------------------------------------------------------------------------------------

    def set_up(self, info: WorkerInfo) -> None:
        position = self._position.get(info.number)
        if position is None:
            self._position[info.number] = position = len(self._workers)
            self._workers.append(info)
            self._views.append(WorkerView())
            for index in (self.index, self.host, self.disk):
                index.add_worker()
            self._search.place_workers()
        elif self._workers[position] != info:
            self._workers[position] = info
            self._search.place_workers()
        self.index.set_boundaries(position, only=info.has_windows)
        view = WorkerView(is_up=True, role=info.role, loss_power=self._loss_power)
        if info.groups:
            view.prompt_blocks, view.answer_blocks = len(info.groups), max(1, KVLayout(info.groups).num_growing)
        self._begin_view(position, view)

    def set_down(self, worker: int) -> None:
        position = self._position[worker]
        if self._search.speeds.forget(worker):
            self._search.place_workers()
        self._begin_view(
            position, WorkerView(is_up=False, role=self._views[position].role, loss_power=self._loss_power)
        )

    def on_transfer(self, prefill: int, decode: int, num_bytes: int, wire_ns: int, now: int) -> None:
        self._search.on_transfer(self._position[prefill], self._position[decode], num_bytes, wire_ns, now)

    def set_role(self, worker: int, role: Role) -> None:
        view = self._views[self._position[worker]]
        view.role = role
        self._search.set_up()
        self._reprice(view)

    def on_load(self, worker: int, report: LoadReport) -> None:
        self._now = max(self._now, report.time_ns)
        view = self._views[self._position[worker]]
        view.on_report(report)
        self._reprice(view)

    def on_kv_events(
        self,
        worker: int,
        sequence: int,
        stored: Iterable[bytes] = (),
        evicted: Sequence[bytes] = (),
        tier: Tier = "device",
    ) -> bool:
        return self._index_of(tier).on_events(self._position[worker], sequence, stored, evicted)

    def on_kv_snapshot(self, worker: int, sequence: int, hashes: Iterable[bytes], tier: Tier = "device") -> None:
        self._index_of(tier).on_snapshot(self._position[worker], sequence, hashes)

    def on_queued(self, request_id: str, worker: int) -> None:
        self._acknowledge(request_id, worker, holds_blocks=False)

    def on_admitted(self, request_id: str, worker: int, num_cached_tokens: int, num_tier_tokens: int = 0) -> None:
        sent = self._acknowledge(request_id, worker, holds_blocks=True)
        if sent is not None:
            expected = sent.expected.pop(self._position[worker], None)
            if expected is not None and len(self._workers) > 1:  # one worker need not say what its cache holds
                in_cache = num_cached_tokens - num_tier_tokens  # (more from below than was counted on is no error)
                self.watch.observe(expected, max(in_cache, min(expected, num_cached_tokens)), sent.num_prompt_tokens)

    def on_first_token(self, request_id: str) -> None:
        sent = self._sent.get(request_id)
        if sent is not None:
            if sent.prefill is sent.decode:
                sent.prefill.drop_work(request_id)
            else:
                sent.prefill.drop(request_id)
            self._reprice(sent.prefill)

    def on_ended(self, request_id: str) -> None:
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return
        sent.decode.join(-1, sent.num_prompt_tokens, sent.num_output_tokens)
        for view in (sent.prefill, sent.decode):
            view.drop(request_id)
            self._reprice(view)

    # -- routing ------------------------------------------------------------------------------------------------------

    def route(self, request: RoutingRequest, now: int) -> Route | None:
        source = None if request.leaves is None else self._position[request.leaves]
        if source is not None and not self._search.movable_to(request, source):
            return None
        if request.request_id in self._sent:
            self.on_ended(request.request_id)
        self._now = max(self._now, now)
        if now >= self._trials.due_ns:
            for view in self._trials.review(now):
                self._reprice(view)
        speeds = self._search.speeds
        if speeds.next_ns is not None and now >= speeds.next_ns and speeds.expire(now):
            self._search.place_workers()
        num_output_tokens = max(1, min(request.num_expected, request.max_tokens))
        if source is None:
            found = self._search.cheapest(request, num_output_tokens, now)
        else:
            found = self._search.cheapest_move(request, source, num_output_tokens, now)
        if found is None:
            return None
        self._remember(request, found, num_output_tokens)
        prefill, decode = self._workers[found.source].number, self._workers[found.target].number
        peers = (found.source_peer, found.target_peer)
        return Route(prefill, decode, found.num_cached_tokens, found.cost_ns, found.reason, *peers)

    def _remember(self, request: RoutingRequest, found: Candidate, num_output_tokens: int) -> None:
        """Count it as sent, its answer as growing there, and its blocks as cached soon."""
        prefill, decode = self._views[found.source], self._views[found.target]
        num_tokens, size, request_id = request.num_prompt_tokens, self._workers[0].block_size, request.request_id
        expected = {found.target: found.target_cached}  # and what the tiers below the source's cache hold
        decode_blocks = -(-(num_tokens - found.target_cached) // size)
        expected[found.source] = found.num_cached_tokens
        if found.source == found.target:
            prefill.send(request_id, UNBOUNDED, found.work_ns, decode_blocks)
        else:
            source_blocks = 0 if found.is_borrowed else -(-(num_tokens - found.num_cached_tokens) // size)
            prefill.send(request_id, UNBOUNDED, found.work_ns, source_blocks)
            decode.send(request_id, UNBOUNDED, 0, decode_blocks)
        prefill.busy.add(self._now, found.work_ns)
        decode.join(1, num_tokens, num_output_tokens)
        self._reprice(prefill)
        self._reprice(decode)
        positions = (found.source, found.target)
        self._sent[request_id] = _Routed(prefill, decode, num_tokens, num_output_tokens, positions, expected)
        hashes = request.submission.hashes
        self.index.predict(found.target, hashes[found.target_cached // size :], self._now)
        if found.source != found.target and not found.is_borrowed:
            self.index.predict(found.source, hashes[found.num_cached_tokens // size :], self._now)

    def _begin_view(self, position: int, view: WorkerView) -> None:
        """The worker holds nothing: it came, or went."""
        for index in (self.index, self.host, self.disk):
            index.remove(position)
        self._views[position] = view
        self._search.set_up()

    def _index_of(self, tier: Tier) -> PrefixIndex | TierIndex:
        return self.index if tier == "device" else self.host if tier == "host" else self.disk

    def _acknowledge(self, request_id: str, worker: int, *, holds_blocks: bool) -> _Routed | None:
        sent = self._sent.get(request_id)
        if sent is None:
            return None
        position = self._position[worker]
        for view, at in zip((sent.prefill, sent.decode), sent.positions, strict=True):
            if at == position:
                view.acknowledged(request_id, holds_blocks=holds_blocks)
        return sent

    def _reprice(self, view: WorkerView) -> None:
        view.reprice(self._config.kv_price_ns, self._now, self._workers[0].block_size)
