"""A fleet under virtual time: one front end, its workers, the messages between them, and what goes wrong.

The front end here is as thin as can be: it picks a replica (diptych.control.router), sends, hears who finished, and
sees to it that every request ends exactly once, whatever is lost. Must decide nothing else.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from diptych.control.config import ReplicaConfig
from diptych.control.events import Event, HandoffReleased, RequestFinished
from diptych.control.request import FinishReason, Request
from diptych.control.slo import NS_PER_MS, LatencyBreakdown, Slo
from diptych.control.step import SchedulerOutput
from diptych.simulation.collector import Collector
from diptych.simulation.dispatch import Dispatch
from diptych.simulation.environment import MESSAGE, Environment
from diptych.simulation.event_log import EventLog
from diptych.simulation.executor import make_request
from diptych.simulation.faults import MESSAGE_FAULTS, Fault
from diptych.simulation.pools import HandoffDriver
from diptych.simulation.replica import SimulatedReplica, WorkerModel
from diptych.simulation.scenario import Scenario
from diptych.simulation.warm_up import warmed_up_model
from diptych.simulation.workload.spec import ClosedLoop, RequestSpec

FRONT_END = -1  # in the log: who reports when it is no worker
Progress = Callable[[int], None]  # how many requests have ended


@dataclass(slots=True)
class _Sent:
    """A request that has not ended yet, as the front end knows it."""

    number: int
    spec: RequestSpec
    replica: int
    client: int = -1
    prefill: int = -1  # with pools: who prefills it
    is_delivered: bool = False
    delay_ns: int = 0  # what the front end took


class _Wire:
    """Messages between the front end and one worker, and the faults that befall them."""

    def __init__(self, environment: Environment, faults: list[Fault], seed: int) -> None:
        self._environment = environment
        self._faults = faults
        self._rng = random.Random(seed)

    def send(self, deliver: Callable[[], None]) -> None:
        """Deliver the message now, or as late and as often as the faults of this moment say."""
        now = self._environment.now
        active = [fault for fault in self._faults if fault.at_ns <= now < fault.at_ns + fault.duration_ns]
        if not active:
            deliver()
            return
        delay, copies = 0, 1
        for fault in active:
            if fault.kind == "link_loss":
                delay = max(delay, fault.at_ns + fault.duration_ns - now)
            elif fault.kind == "duplicate":
                copies = 2
            else:  # delay: the same for all at one time; reorder: each message its own
                most = max(1, int(fault.factor * NS_PER_MS))
                delay += most if fault.kind == "delay" else self._rng.randrange(most)
        for copy in range(copies):
            self._environment.at(now + delay + copy, MESSAGE, deliver)


def _worker_model(scenario: Scenario, config: ReplicaConfig) -> WorkerModel:
    """A warmed-up worker of the scenario, with these settings."""
    model = warmed_up_model(config, scenario.cost, scenario.warm_up)
    return WorkerModel(config, scenario.cost, model, scenario.fast_forward, scenario.swap_block_ns)


class Cluster:
    """Everything that happens in one simulation."""

    def __init__(self, scenario: Scenario, progress: Progress | None = None) -> None:
        worker = prefill_worker = _worker_model(scenario, scenario.replica)
        if scenario.pools and scenario.pools.prefill:
            prefill_worker = _worker_model(scenario, scenario.pools.prefill)
        self.environment = Environment()
        self.collector = Collector(scenario.num_replicas)
        self.log = EventLog() if scenario.record_events else None
        self.last_end_ns = 0
        self._scenario = scenario
        self._first_decode = scenario.pools.num_prefill if scenario.pools else 0
        self._block_size = scenario.replica.cache.block_size
        self._decode = Dispatch(scenario, self._first_decode, scenario.num_replicas)
        self._prefill = Dispatch(scenario, 0, self._first_decode)
        self._progress = progress
        self._sent: dict[str, _Sent] = {}
        self._num_arrived = 0
        self._wires = [self._wire(index) for index in range(scenario.num_replicas)] if scenario.faults else None
        self.replicas = [
            SimulatedReplica(
                index, prefill_worker if index < self._first_decode else worker, self.environment, self._on_events
            )
            for index in range(scenario.num_replicas)
        ]
        self.driver: HandoffDriver | None = None
        if scenario.pools:
            self.driver = HandoffDriver(
                scenario.pools, self._block_size, self.environment, self.replicas, self._make_request
            )

    @property
    def hit_error(self) -> float | None:
        """How wrong the picture of the caches was, of the pool that prefills."""
        return (self._prefill if self.driver else self._decode).hit_error

    def run(self) -> None:
        """From the first arrival until nothing is left to happen."""
        for fault in self._scenario.faults:
            if fault.kind not in MESSAGE_FAULTS and fault.replica < len(self.replicas):
                self.environment.at(fault.at_ns, MESSAGE, partial(self._strike, fault))
        workload = self._scenario.workload
        if isinstance(workload, ClosedLoop):
            for client in range(workload.concurrency):
                self._next_of(client, workload)
        else:
            self._await_next(iter(workload))
        self.environment.run()
        assert not self._sent, f"{len(self._sent)} requests never ended"

    def _make_request(self, request_id: str) -> tuple[Request, RequestSpec]:
        spec = self._sent[request_id].spec
        return make_request(request_id, spec, self._block_size), spec

    def _wire(self, replica: int) -> _Wire:
        mine = [fault for fault in self._scenario.faults if fault.replica == replica and fault.kind in MESSAGE_FAULTS]
        return _Wire(self.environment, mine, self._scenario.seed * 1_000_003 + replica)

    def _await_next(self, arrivals: Iterator[RequestSpec]) -> None:
        spec = next(arrivals, None)
        if spec is not None:
            self.environment.at(spec.arrival_ns, MESSAGE, partial(self._arrive, spec, arrivals))

    def _arrive(self, spec: RequestSpec, arrivals: Iterator[RequestSpec]) -> None:
        self._await_next(arrivals)
        self._accept(spec)

    def _next_of(self, client: int, workload: ClosedLoop) -> None:
        spec = workload.next_request(client, self.environment.now)
        if spec is not None:
            self.environment.at(spec.arrival_ns, MESSAGE, partial(self._accept, spec, client))

    def _accept(self, spec: RequestSpec, client: int = -1) -> None:
        """A request comes to the front end, which takes its time with it."""
        number = self._num_arrived
        self._num_arrived += 1
        delay_ns = self._scenario.front_end.delay_ns(spec.prompt_tokens)
        if delay_ns:
            self.environment.at(self.environment.now + delay_ns, MESSAGE, partial(self._submit, number, spec, client))
        else:
            self._submit(number, spec, client)

    def _submit(self, number: int, spec: RequestSpec, client: int) -> None:
        """Pick a worker and send the request there."""
        request_id = str(number)
        request = make_request(request_id, spec, self._block_size)
        replica = self._decode.choose(request, self._scenario.replica, self.environment.now)
        sent = _Sent(number, spec, -1 if replica is None else replica, client)
        sent.delay_ns = self._scenario.front_end.delay_ns(spec.prompt_tokens)
        self._sent[request_id] = sent
        if replica is None:
            self._end(request_id, self._lost(request_id, sent, "no worker is up"))
            return
        if spec.abort_after_ns is not None:
            self.environment.at(self.environment.now + spec.abort_after_ns, MESSAGE, partial(self._hang_up, request_id))
        if self.driver is not None:
            self._submit_to_pools(request, sent)
        elif self._wires is None:
            self.replicas[replica].submit(request, spec)
        else:
            self._wires[replica].send(partial(self._deliver, request_id))

    def _submit_to_pools(self, request: Request, sent: _Sent) -> None:
        """Prefill here, decode there; an answer of one token needs no second replica."""
        assert self.driver is not None
        request_id = request.request_id
        prefill = self._prefill.choose(request, self._scenario.replica, self.environment.now)
        if prefill is None:
            self._end(request_id, self._lost(request_id, sent, "no prefill worker is up"))
            return
        sent.prefill = prefill
        if (sent.spec.max_tokens or sent.spec.output_tokens) == 1:
            self.replicas[prefill].submit(request, sent.spec)
            return
        self.collector.expect_handoff(request_id)
        self.driver.begin(request_id, sent.spec.prompt_tokens, prefill, sent.replica)

    def _deliver(self, request_id: str) -> None:
        """The request reaches its worker (perhaps twice, perhaps after it ended)."""
        sent = self._sent.get(request_id)
        if sent is None or sent.is_delivered:
            return
        sent.is_delivered = True
        self.replicas[sent.replica].submit(make_request(request_id, sent.spec, self._block_size), sent.spec)

    def _hang_up(self, request_id: str) -> None:
        sent = self._sent.get(request_id)
        if sent is None:
            return
        replica = self.replicas[sent.replica]
        if self.driver is not None:
            self._end(request_id, self._lost(request_id, sent, "", FinishReason.ABORT))
            for index in (sent.prefill, sent.replica):
                if index >= 0:
                    self.replicas[index].abort(request_id)
        elif self._wires is None:
            replica.abort(request_id)
        else:  # the front end ends it at once; the worker hears of it when it can
            self._end(request_id, self._lost(request_id, sent, "", FinishReason.ABORT))
            self._wires[sent.replica].send(partial(replica.abort, request_id))

    def _on_events(self, replica: int, events: list[Event], output: SchedulerOutput | None) -> None:
        """A worker reports."""
        if self.log is not None:
            self.log.extend(replica, events)
        self.collector.take(replica, events, output, self.replicas[replica].usage)
        self._pool_of(replica).on_events(
            self.replicas[replica], events, self.environment.now, is_step_end=output is not None
        )
        if self.driver is not None:
            self.driver.on_events(events)
        for event in events:
            if type(event) is RequestFinished:
                if self._wires is None:
                    self._end(event.request_id, event)
                else:
                    self._wires[replica].send(partial(self._end, event.request_id, event))
            elif type(event) is HandoffReleased and event.request_id in self._sent:
                self._prefill.ended(event.request_id, replica)
                self._sent[event.request_id].prefill = -1

    def _end(self, request_id: str, event: RequestFinished) -> None:
        """The front end hears of the end of a request (of an end that it has heard of before, nothing comes)."""
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return
        if sent.replica >= 0:
            self._decode.ended(request_id, sent.replica)
        if sent.prefill >= 0:
            self._prefill.ended(request_id, sent.prefill)
        if self.driver is not None:
            self.driver.drop(request_id)
        self.last_end_ns = self.environment.now
        arrival_ns = sent.spec.arrival_ns
        if sent.delay_ns and event.reason is not FinishReason.ERROR:
            event = self._seen_by_client(event, sent)
        self.collector.add_row(event, sent.number, arrival_ns, sent.replica, sent.spec.kind)
        if self._progress is not None:
            self._progress(len(self.collector.requests))
        workload = self._scenario.workload
        if sent.client >= 0 and isinstance(workload, ClosedLoop):
            self._next_of(sent.client, workload)

    def _seen_by_client(self, event: RequestFinished, sent: _Sent) -> RequestFinished:
        """What the replica did not see counts too."""
        latency = replace(event.latency, queue_ns=event.latency.queue_ns + sent.delay_ns)
        slo_met = event.slo_met
        if slo_met:
            slo_met = (sent.spec.slo or Slo()).or_else(self._scenario.replica.slo).is_met(latency)
        return replace(event, latency=latency, slo_met=slo_met)

    def _lost(
        self, request_id: str, sent: _Sent, message: str, reason: FinishReason = FinishReason.ERROR
    ) -> RequestFinished:
        """The terminal event of a request that no worker will end."""
        now, spec = self.environment.now, sent.spec
        latency = LatencyBreakdown(now - spec.arrival_ns, 0, 0, 0)
        has_objective = spec.slo is not None or self._scenario.replica.slo != Slo()
        event = RequestFinished(
            now, request_id, reason, spec.prompt_tokens, 0, 0, latency, False if has_objective else None, message
        )
        if self.log is not None:
            self.log.extend(FRONT_END, [event])
        return event

    def _strike(self, fault: Fault) -> None:
        """A worker's fault begins."""
        replica, environment = self.replicas[fault.replica], self.environment
        end_ns = environment.now + fault.duration_ns
        if fault.kind == "crash":
            self._pool_of(fault.replica).set_up(fault.replica, False)
            replica.crash(end_ns)
            for request_id, sent in list(self._sent.items()):
                if sent.replica == fault.replica or self._is_prefilling(request_id, sent, fault.replica):
                    self._end(request_id, self._lost(request_id, sent, "the worker was lost"))
            environment.at(end_ns, MESSAGE, partial(self._recover, fault.replica))
        elif fault.kind == "hang":
            replica.hang(end_ns)
            environment.at(end_ns, MESSAGE, replica.wake)
        else:
            replica.slow_down(fault.factor)
            environment.at(end_ns, MESSAGE, partial(replica.slow_down, 1))

    def _recover(self, replica: int) -> None:
        if not self.replicas[replica].is_down:  # else it crashed again in the meantime
            self._pool_of(replica).set_up(replica, True)

    def _pool_of(self, replica: int) -> Dispatch:
        return self._prefill if replica < self._first_decode else self._decode

    def _is_prefilling(self, request_id: str, sent: _Sent, replica: int) -> bool:
        """Whether the request still needs this prefill replica."""
        if sent.prefill != replica or self.driver is None:
            return False
        return request_id in self.driver.handoffs or (sent.spec.max_tokens or sent.spec.output_tokens) == 1
