"""How the simulated front end chooses replicas: the picker or the router of control, fed with what replicas report.

Owns when reports travel. Must decide nothing: which replica it is, control says.
"""

from diptych.control.config import ReplicaConfig
from diptych.control.events import BlocksEvicted, BlocksStored, Event, RequestAdmitted, StepFinished
from diptych.control.request import Request
from diptych.control.router.picker import Picker
from diptych.control.router.router import Router
from diptych.control.slo import NS_PER_MS
from diptych.simulation.replica import SimulatedReplica
from diptych.simulation.scenario import Scenario

REPORT_NS = 100 * NS_PER_MS  # a replica reports its load at most this often


class Dispatch:
    """Chooses among replicas first .. end - 1 of the fleet."""

    def __init__(self, scenario: Scenario, first: int, end: int) -> None:
        self._router: Router | None = None
        self._first = first
        self._sequence = [0] * (end - first)
        self._reported_ns = [-REPORT_NS] * (end - first)
        if scenario.routing == "kv_aware":
            self._router = Router(max(1, end - first), scenario.replica.cache.block_size)
            self.picker = Picker("least_loaded", scenario.num_replicas, scenario.seed)
        else:
            self.picker = Picker(scenario.routing, scenario.num_replicas, scenario.seed)
        for replica in range(scenario.num_replicas):
            if not first <= replica < end:
                self.picker.set_up(replica, False)

    @property
    def hit_error(self) -> float | None:
        """How wrong the router's picture of the caches was; None without a router."""
        return self._router.hit_error if self._router else None

    def choose(self, request: Request, config: ReplicaConfig, now: int) -> int | None:
        """The replica for a request; None when none is up."""
        if self._router is None:
            return self.picker.pick()
        hashes = request.block_hashes if config.cache.enable_prefix_cache else ()
        decision = self._router.route(request.request_id, request.num_prompt_tokens, hashes, now)
        return None if decision is None else self._first + decision.replica

    def on_events(self, replica: SimulatedReplica, events: list[Event], now: int, *, is_step_end: bool) -> None:
        """What a replica of this pool reports. Its load travels at the end of a step in which something happened
        besides the step itself, so that it does not matter how many steps were taken at once."""
        router = self._router
        if router is None:
            return
        index = replica.number - self._first
        for event in events:
            if isinstance(event, BlocksStored | BlocksEvicted):
                self._sequence[index] += 1
                stored, evicted = (event.hashes, ()) if isinstance(event, BlocksStored) else ((), event.hashes)
                router.index.on_events(index, self._sequence[index], stored, evicted)
            elif isinstance(event, RequestAdmitted) and event.is_first:
                request = replica.core.requests.get(event.request_id)
                if request is not None:
                    router.on_admitted(request.request_id, request.num_prompt_tokens, event.num_cached_tokens)
        is_news = is_step_end and any(not isinstance(event, StepFinished) for event in events)
        if is_news and now >= self._reported_ns[index] + REPORT_NS:
            self._reported_ns[index] = now
            router.on_report(index, replica.core.load(now))

    def ended(self, request_id: str, replica: int) -> None:
        """A request of this replica ended."""
        if self._router is None:
            self.picker.ended(replica)
        else:
            self._router.on_ended(request_id)

    def set_up(self, replica: int, is_up: bool) -> None:
        """The replica came (empty) or went."""
        if self._router is None:
            self.picker.set_up(replica, is_up)
            return
        index = replica - self._first
        self._router.set_up(index, is_up)
        self._sequence[index] = 0
        self._reported_ns[index] = -REPORT_NS
