"""Which workers serve a request: one for both jobs, or one for the prompt and one for the answer.

Filter, score, pick: workers that may not are left out, every way of serving the request gets a cost in nanoseconds
(scorers.py, and pairing.py for two workers), and the cheapest is taken. Whether prefill and decode are separated is
one more comparison of the same costs, request by request. Owns the front end's picture of the fleet: what workers
report, what they hold, what was sent there. Must never ask a worker, and never wait.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diptych.control.engine.load_report import LoadReport
from diptych.control.errors import ConfigError
from diptych.control.router.candidates import Choice, Chosen
from diptych.control.router.costs import UNBOUNDED, WorkerView
from diptych.control.router.hit_watch import HitWatch
from diptych.control.router.output_length import OutputLengthClasses
from diptych.control.router.picker import Picker
from diptych.control.router.prefix_index import PrefixIndex
from diptych.control.router.routing import Placement, PlacementConfig, PlacementRequest, Reason
from diptych.control.router.topology import WorkerInfo

__all__ = ["Placement", "PlacementConfig", "PlacementRequest", "Placer", "WorkerInfo"]


@dataclass(slots=True)
class _Placed:
    """A request that was placed and has not ended. The views are those of then: a worker that died has a new one."""

    prefill: WorkerView
    decode: WorkerView
    num_prompt_tokens: int
    num_output_tokens: int  # expected
    length_class: str
    positions: tuple[int, int]
    expected: dict[int, int]  # worker -> tokens expected in its cache, until it says what it found


class Placer:
    """All workers of one front end. They are down until ``set_up``."""

    def __init__(self, workers: Sequence[WorkerInfo], config: PlacementConfig | None = None) -> None:
        if not workers:
            raise ConfigError("a placer of 0 workers; it needs at least 1", param="workers")
        self._config = config or PlacementConfig()
        self._workers = tuple(workers)
        self._position = {worker.number: position for position, worker in enumerate(self._workers)}
        if len(self._position) != len(self._workers):
            raise ConfigError("two workers have the same number", param="workers")
        self.index = PrefixIndex(len(self._workers))
        self.watch = HitWatch()
        self.lengths = OutputLengthClasses()
        self._block_size = self._workers[0].block_size
        self._views = [WorkerView(is_up=False, role=worker.role) for worker in self._workers]
        self._placed: dict[str, _Placed] = {}
        self._picked: dict[str, tuple[int, int]] = {}  # by routing without costs: request -> positions (-1: done there)
        self._decode_role = frozenset(at for at, worker in enumerate(self._workers) if worker.role == "decode")
        self._prefill_role = frozenset(at for at, worker in enumerate(self._workers) if worker.role == "prefill")
        self._choice = Choice(self._workers, self._views, self.index, self._config)
        self._now = 0
        self._pickers: tuple[Picker, Picker] | None = None  # of the worker that begins, and of the one that decodes
        if self._config.routing != "kv_aware":
            kind, seed = self._config.routing, self._config.seed
            self._pickers = (Picker(kind, len(workers), seed), Picker(kind, len(workers), seed + 1))
            for position in range(len(workers)):
                self._set_pickers(position, False)

    @property
    def hit_error(self) -> float:
        """Share of the prompt tokens of late whose being cached was predicted wrongly."""
        return self.watch.error

    @property
    def alarm(self) -> str:
        """What is wrong with the picture of the caches; empty while nothing is."""
        return self.watch.alarm

    # -- what workers say -------------------------------------------------------------------------------------------

    def set_up(self, worker: int, is_up: bool) -> None:
        """A worker came (holding nothing) or went."""
        position = self._position[worker]
        self.index.remove(position)
        self._views[position] = WorkerView(is_up=is_up, role=self._workers[position].role)
        self._choice.set_up()
        self._set_pickers(position, is_up)

    def on_report(self, worker: int, report: LoadReport) -> None:
        """A worker's load. Tell its events of the same message first: this report covers what they acknowledge."""
        self._now = max(self._now, report.time_ns)
        position = self._position[worker]
        self._views[position].on_report(report)
        self._reprice(self._views[position])

    def on_blocks(
        self, worker: int, sequence: int, stored: Iterable[bytes] = (), evicted: Sequence[bytes] = ()
    ) -> bool:
        """A worker's publication, numbered from 1; False: some are missing, ask it for a snapshot."""
        return self.index.on_events(self._position[worker], sequence, stored, evicted)

    def on_snapshot(self, worker: int, sequence: int, hashes: Iterable[bytes]) -> None:
        """All that a worker holds, as of its publication ``sequence``."""
        self.index.on_snapshot(self._position[worker], sequence, hashes)

    def on_queued(self, request_id: str, worker: int) -> None:
        """A worker took the request into its queue: its next report counts it."""
        self._heard(request_id, worker, holds_blocks=False)

    def on_admitted(self, request_id: str, worker: int, num_cached_tokens: int) -> None:
        """A worker gave the request (or its reservation) blocks, and found so much in its cache."""
        placed = self._heard(request_id, worker, holds_blocks=True)
        if placed is not None:
            expected = placed.expected.pop(self._position[worker], None)
            if expected is not None:
                self.watch.observe(expected, num_cached_tokens, placed.num_prompt_tokens)

    def on_first_token(self, request_id: str) -> None:
        """Its prompt is computed: it no longer waits at its prefill worker."""
        if self._pickers is not None:
            self._leave_prefill(request_id)
            return
        placed = self._placed.get(request_id)
        if placed is not None:
            if placed.prefill is placed.decode:
                placed.prefill.drop_work(request_id)
            else:
                placed.prefill.drop(request_id)
            self._reprice(placed.prefill)

    def on_ended(self, request_id: str, num_output_tokens: int | None) -> None:
        """The request is over, or this attempt is (None: its length says nothing of others)."""
        if self._pickers is not None:
            self._unpick(request_id)
            return
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return
        if num_output_tokens is not None:
            self.lengths.observe(placed.length_class, num_output_tokens)
        placed.decode.join(-1, placed.num_prompt_tokens, placed.num_output_tokens)
        for view in (placed.prefill, placed.decode):
            view.drop(request_id)
            self._reprice(view)

    # -- placing ----------------------------------------------------------------------------------------------------

    def place(self, request: PlacementRequest, now: int) -> Placement | None:
        """The workers for a request; None when none is up. Counts it as sent there. An earlier placement of the same
        request is over."""
        if self._pickers is not None:
            return self._pick(request)
        if request.request_id in self._placed:
            self.on_ended(request.request_id, None)
        self._now = max(self._now, now)
        name = self.lengths.name(request.service_class, request.num_prompt_tokens)
        num_output_tokens = max(1, self.lengths.expected(name, request.max_tokens))
        chosen = self._choice.choose(request, num_output_tokens, now)
        if chosen is None:
            return None
        self._remember(request, chosen, num_output_tokens, name)
        source, target = self._workers[chosen.source].number, self._workers[chosen.target].number
        return Placement(source, target, chosen.num_cached_tokens, chosen.cost_ns, chosen.reason)

    def _remember(self, request: PlacementRequest, chosen: Chosen, num_output_tokens: int, name: str) -> None:
        """Count it as sent, its answer as growing there, and its blocks as cached soon."""
        prefill, decode = self._views[chosen.source], self._views[chosen.target]
        num_tokens, size, request_id = request.num_prompt_tokens, self._block_size, request.request_id
        expected = {chosen.target: chosen.target_cached}
        decode_blocks = -(-(num_tokens - chosen.target_cached) // size)
        if chosen.source == chosen.target:
            prefill.send(request_id, UNBOUNDED, chosen.work_ns, decode_blocks)
        else:
            source_blocks = 0 if chosen.is_borrowed else -(-(num_tokens - chosen.num_cached_tokens) // size)
            prefill.send(request_id, UNBOUNDED, chosen.work_ns, source_blocks)
            decode.send(request_id, UNBOUNDED, 0, decode_blocks)
            expected[chosen.source] = chosen.num_cached_tokens
        prefill.busy.add(self._now, chosen.work_ns)
        decode.join(1, num_tokens, num_output_tokens)
        self._reprice(prefill)
        self._reprice(decode)
        positions = (chosen.source, chosen.target)
        self._placed[request_id] = _Placed(prefill, decode, num_tokens, num_output_tokens, name, positions, expected)
        self.index.predict(chosen.target, request.hashes[chosen.target_cached // size :], self._now)
        if chosen.source != chosen.target and not chosen.is_borrowed:
            self.index.predict(chosen.source, request.hashes[chosen.num_cached_tokens // size :], self._now)

    def _pick(self, request: PlacementRequest) -> Placement | None:
        """By load: no costs, no picture of the caches."""
        self._unpick(request.request_id)
        chosen = self._by_load(request)
        if chosen is None:
            return None
        has_roles = bool(self._decode_role or self._prefill_role)  # else the second picker is never asked
        self._picked[request.request_id] = (chosen.source, chosen.target if has_roles else -1)
        source, target = self._workers[chosen.source].number, self._workers[chosen.target].number
        return Placement(source, target, 0, 0, chosen.reason)

    def _leave_prefill(self, request_id: str) -> None:
        """The worker that began a handoff has done its part."""
        source, target = self._picked.get(request_id, (-1, -1))
        if self._pickers is not None and source not in (-1, target) and target >= 0:
            self._pickers[0].ended(source)
            self._picked[request_id] = (-1, target)

    def _unpick(self, request_id: str) -> None:
        """The request is over, or is placed again."""
        positions = self._picked.pop(request_id, None)
        if positions is not None and self._pickers is not None:
            for picker, position in zip(self._pickers, positions, strict=True):
                if position >= 0:
                    picker.ended(position)

    def _by_load(self, request: PlacementRequest) -> Chosen | None:
        """Routing without costs: the pickers' own order; separated whenever it is possible."""
        assert self._pickers is not None
        begins, decodes = self._pickers
        avoid = request.avoid and frozenset(self._position[one] for one in request.avoid if one in self._position)
        is_whole = self._config.disaggregate == "never" or not request.hands_off
        decode_role = self._decode_role
        first = None
        if not is_whole:
            first = begins.pick(avoid | decode_role)
            if first is None:
                first = begins.pick(decode_role)
        if first is None:
            is_alone = not is_whole
            first = begins.pick(avoid)
            if first is None:
                first = begins.pick()
            reason: Reason = "only_worker" if is_alone else ("whole" if not request.hands_off else "never")
            return None if first is None else self._whole_at(first, reason)
        role = self._workers[first].role
        if role == "both" or request.max_tokens == 1:
            return self._whole_at(first, "both" if role == "both" else "one_token")
        prefill_role = self._prefill_role
        second = decodes.pick(avoid | prefill_role)
        if second is None:
            second = decodes.pick(prefill_role)
        if second is None:
            return self._whole_at(first, "only_worker")
        return Chosen("remote", first, second)

    def _whole_at(self, position: int, reason: Reason) -> Chosen:
        assert self._pickers is not None
        if self._decode_role or self._prefill_role:
            self._pickers[1].sent(position)
        return Chosen(reason, position, position)

    def _heard(self, request_id: str, worker: int, *, holds_blocks: bool) -> _Placed | None:
        placed = self._placed.get(request_id)
        if placed is None:
            return None
        position = self._position[worker]
        for view, at in zip((placed.prefill, placed.decode), placed.positions, strict=True):
            if at == position:
                view.heard(request_id, holds_blocks=holds_blocks)
        return placed

    def _reprice(self, view: WorkerView) -> None:
        view.reprice(self._config.kv_price_ns, self._now, self._block_size)

    def _set_pickers(self, position: int, is_up: bool) -> None:
        for picker in self._pickers or ():
            picker.set_up(position, is_up)
