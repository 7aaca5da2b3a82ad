"""Random fleets, loads and faults, and the laws that hold whatever goes wrong.

Used by test_faults.py (some hundreds of schedules) and benchmarks/fault_schedules.py (as many as one likes).
"""

import random
from collections import Counter
from dataclasses import replace

from diptych.control.admission.admission_config import AdmissionConfig, ServiceClassConfig
from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.cluster.cluster_events import ClusterEvent, EvacuationReady, WorkerDown, WorkerUp
from diptych.control.commands import Command, Drained, Drop, End, Prefill, Release, Renew, Reserve, Restarted, Serve
from diptych.control.config import AdmissionName, BudgetConfig, CapsConfig, EngineConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.reports import LoadReport
from diptych.control.events import (
    Event,
    FirstToken,
    HandoffDelivered,
    HandoffReserved,
    HandoffRevoked,
    RequestFinished,
)
from diptych.control.kv_layout import GroupKind, KVGroup
from diptych.control.request import BlockTables, FinishReason, only_table
from diptych.control.router.routing import RoutingConfig
from diptych.control.router.topology import ROLES, Role
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.control.step import SchedulerOutput
from diptych.simulation.faults import FAULTS, Watch, random_faults
from diptych.simulation.fleet.kv_transfers import Span
from diptych.simulation.fleet.pools import Pool, Pools
from diptych.simulation.fleet.simulated_cluster import SimulatedCluster
from diptych.simulation.fleet.simulated_drafts import SimulatedDrafts
from diptych.simulation.results import REASONS
from diptych.simulation.scenario import Scenario, WorkerChange
from diptych.workload.spec import RequestSpec
from tests.control.driver import in_groups
from tests.control.stream_law import StreamLaw
from tests.simulation.linear_cost import LinearCost
from tests.simulation.scenarios import check_is_empty, check_row, random_engine_config, random_spec

CROWDED_EVERY, CROWDED = 7, (3, 6)  # of so many seeds, these have little memory and long answers
ADMISSIONS: tuple[AdmissionName, ...] = ("greedy", "greedy", "expected")
LIMIT_NS = 100_000 * NS_PER_S  # of virtual time: longer than a request of class batch may wait
ALLOWED_ERRORS = (
    "the context holds",
    "the KV cache holds",
    "are waiting already",
    "workers died while they computed this request",
    "attempts in a row were lost",
    "no worker that could take the request came up in time",
    "on_failure is fail",
    "requests wait",
    "waited",
    "the queue is full",
    "would wait",
)


def random_fleet(rng: random.Random, sizes: tuple[int, ...]) -> tuple[Pools | None, int]:
    """At most three times a size of workers of all roles, alone, in pairs or all on one host."""
    most = rng.choice(sizes)
    numbers = (rng.randint(1, most), rng.randint(1, most), rng.choice([0, 0, rng.randint(1, most)]))
    if rng.random() < 0.1:
        numbers = (rng.choice([0, 1]), 0, 1 + rng.randrange(most))
    count = sum(numbers)
    if rng.random() < 0.08:
        return None, count
    pools = Pools(
        num_prefill=numbers[0],
        num_decode=numbers[1],
        num_both=numbers[2],
        kv_bytes_per_token=rng.choice([1000, 10**5, 10**6]),
        link=rng.choice(["nvlink4", "eth100"]),
        num_hosts=rng.choice([0, 1, 1, 2, max(1, count // 2)]),
    )
    return pools, count


def random_cluster(rng: random.Random) -> ClusterConfig:
    """From patient to hasty, with room in the admission queue or not."""
    routing = RoutingConfig(
        rng.choice(["kv_aware", "kv_aware", "round_robin", "round_robin", "round_robin"]),
        rng.choice(["always", "always", "auto", "never"]),
    )
    on_failure = rng.choice(["retry", "retry", "local", "fail"])
    admission = AdmissionConfig()
    if rng.random() < 0.2:
        service_class = ServiceClassConfig(60 * NS_PER_S, rng.choice([1, 300]) * NS_PER_S, 80, 10 * NS_PER_S)
        admission = AdmissionConfig(standard=service_class, max_queued=rng.choice([8, 4096]))
    return ClusterConfig(
        routing=routing,
        admission=admission,
        on_failure=on_failure,
        max_attempts=rng.choice([1, 2, 5, 5]),
        lease_ns=rng.choice([0, NS_PER_MS, 5 * NS_PER_MS, 50 * NS_PER_MS, 60 * NS_PER_S]),
        max_prefills_in_flight_per_worker=rng.choice([0, 0, 1, 4]),
        park_ns=rng.choice([100 * NS_PER_MS, 120 * NS_PER_S]),
    )


def fitting_spec(rng: random.Random, arrival_ns: int, worker: EngineConfig) -> RequestSpec:
    """A request that can be served, mostly."""
    room = min(worker.max_model_len, (worker.cache.num_blocks - 4) * worker.cache.block_size)
    spec = random_spec(rng, arrival_ns)
    for _ in range(4):
        if spec.prompt_tokens + (spec.max_tokens or spec.output_tokens) < room:
            break
        spec = random_spec(rng, arrival_ns)
    return spec


def crowded(rng: random.Random, worker: EngineConfig) -> EngineConfig:
    """One that lets in all that fits now, so that its streams lose their blocks when they grow."""
    cache = worker.cache
    num_blocks = rng.choice([160, 300, 500]) // cache.block_size + cache.watermark_blocks
    scheduler = replace(worker.scheduler, max_num_seqs=rng.choice([8, 24]), max_waiting=4096)
    if scheduler.budget.kind != "whole" and rng.random() < 0.5:  # prompts take many steps
        small = BudgetConfig(scheduler.budget.kind, 32, 8 * NS_PER_MS, min_chunk_tokens=1)
        scheduler = replace(scheduler, budget=small, caps=CapsConfig(rng.choice([0, 1, 2])))
    return replace(
        worker, scheduler=scheduler, cache=replace(cache, num_blocks=num_blocks, admission=rng.choice(ADMISSIONS))
    )


def growing_spec(rng: random.Random, arrival_ns: int, worker: EngineConfig) -> RequestSpec:
    """A request with a long answer that can be served."""
    room = min(
        worker.max_model_len, (worker.cache.num_blocks - worker.cache.watermark_blocks) * worker.cache.block_size
    )
    spec = random_spec(rng, arrival_ns)
    prompt = rng.randrange(1, room // 2)
    output = min(rng.choice([30, 60, 140]), room - prompt - 1)
    return replace(spec, prompt_tokens=prompt, output_tokens=output, max_tokens=None)


def random_changes(
    rng: random.Random, worker: EngineConfig, pools: Pools | None, num_workers: int, until_ns: int
) -> tuple[WorkerChange, ...]:
    """Other roles and other scheduler settings while everything runs, on one day of three."""
    if rng.random() < 0.7:
        return ()
    changes = []
    for _ in range(rng.randint(1, 6)):
        number = rng.randrange(num_workers)
        scheduler = random_engine_config(rng).scheduler if rng.random() < 0.5 else None
        if scheduler is not None:
            is_prefill = pools is not None and pools.role(number) == "prefill"
            engine = (pools and is_prefill and pools.prefill) or worker  # what it was started with
            most = min(engine.scheduler.max_num_seqs, scheduler.max_num_seqs)
            scheduler = replace(scheduler, max_num_seqs=most, max_waiting=4096)
        role: Role | None = rng.choice(ROLES) if pools and (scheduler is None or rng.random() < 0.5) else None
        is_draining = rng.choice([True, False]) if pools and role is scheduler is None else None
        changes.append(WorkerChange(rng.randrange(1, until_ns), number, role, scheduler, is_draining))
    return tuple(sorted(changes, key=lambda change: change.at_ns))


def random_schedule(seed: int, *, fast_forward: bool = True) -> Scenario:
    """One fleet on a bad day."""
    rng = random.Random(seed)
    worker = random_engine_config(rng)
    if rng.random() < 0.8:
        worker = replace(worker, scheduler=replace(worker.scheduler, max_waiting=4096))
    is_crowded = seed % CROWDED_EVERY in CROWDED
    if is_crowded:
        worker = crowded(rng, worker)
    pools, num_workers = random_fleet(rng, (1, 1, 2) if is_crowded else (1, 2, 2, 3, 3, 8, 8, 21))
    if pools is not None and rng.random() < 0.3:
        other = random_engine_config(rng)
        cache = replace(worker.cache, num_blocks=other.cache.num_blocks)
        pools = replace(pools, prefill=replace(worker, scheduler=other.scheduler, cache=cache))
    arrival_ns, specs = 0, []
    mean_gap_ns = rng.choice([1, 5, 30]) * NS_PER_MS
    make_spec = growing_spec if is_crowded else fitting_spec
    is_storm = rng.random() < 0.15
    for _ in range(rng.choice([5, 15, 40])):
        arrival_ns += rng.choice([0, rng.randrange(2 * mean_gap_ns)])
        spec = make_spec(rng, arrival_ns, worker)
        if is_storm and rng.random() < 0.7:
            spec = replace(spec, abort_after_ns=rng.randrange(1, 100 * NS_PER_MS))
        specs.append(spec)
    faults = random_faults(
        rng.randrange(2**30),
        num_workers=num_workers,
        until_ns=arrival_ns + rng.choice([50, 500]) * NS_PER_MS,
        count=rng.choice([1, 3, 8, 3 * num_workers]),
        kinds=rng.choice([FAULTS, FAULTS, ("crash",), ("crash", "hang", "link_down"), ("link_down",)]),
        mean_duration_ns=rng.choice([2, 20, 200]) * NS_PER_MS,
    )
    return Scenario(
        engine=worker,
        cost=LinearCost(5e6, 3e4, rng.choice([0.0, 40.0]), 1e5, rng.choice([0.0, 20.0])),
        workload=specs,
        num_workers=num_workers,
        pools=pools,
        cluster=random_cluster(rng),
        watch=Watch(
            detection_ns=rng.choice([1, NS_PER_MS, 40 * NS_PER_MS]),
            heartbeat_ns=rng.choice([10, 100, 1000]) * NS_PER_MS,
            resume_ns=rng.choice([1, 20, 200]) * NS_PER_MS,
            max_lost_tokens=rng.choice([0, 3]),
        ),
        faults=faults,
        drafts=SimulatedDrafts(0.6, 0.7) if seed % 4 == 3 else None,
        worker_changes=random_changes(random.Random(-seed), worker, pools, num_workers, arrival_ns + 100 * NS_PER_MS),
        seed=seed,
        record_events=True,
        fast_forward=fast_forward,
    )


def unequal_schedule(seed: int) -> Scenario:
    """The same day for workers of which some take half the context, have half the blocks, or other weights."""
    scenario, rng = random_schedule(seed), random.Random(seed)
    large, pools = scenario.engine, scenario.pools
    if pools is None:
        return scenario
    cache = large.cache
    half = replace(cache, num_blocks=max(cache.watermark_blocks + 1, cache.num_blocks // 2))
    kinds = (
        large,
        replace(large, max_model_len=large.max_model_len // 2),
        replace(large, max_model_len=large.max_model_len // 2, cache=half),
    )
    named = [
        Pool(name=str(worker), role=pools.role(worker), engine=rng.choice(kinds), model_copy=rng.choice((0, 0, 0, 1)))
        for worker in range(scenario.num_workers)
    ]
    named[-1] = replace(named[-1], engine=large)  # it decodes: those that prefill come first
    return replace(
        scenario,
        pools=Pools(
            kv_bytes_per_token=pools.kv_bytes_per_token,
            link=pools.link,
            num_hosts=pools.num_hosts,
            named=tuple(named),
        ),
        worker_changes=tuple(change for change in scenario.worker_changes if change.scheduler is None),
    )


def windowed_schedule(seed: int, *, fast_forward: bool = True) -> Scenario:
    """The same day for a model whose layers attend to windows, in memory for as many tokens in full."""
    scenario, rng = random_schedule(seed, fast_forward=fast_forward), random.Random(seed)
    size = scenario.engine.cache.block_size
    windows = [KVGroup(size, GroupKind.WINDOW, rng.choice((1, 3, 17, 40)))] * rng.choice((1, 2))
    full = [KVGroup(size)] * rng.choice((0, 1, 1))
    groups = tuple(rng.sample([*full, *windows], len(full) + len(windows)))
    chunk = rng.choice((16, 64, 2048))

    def grouped(config: EngineConfig) -> EngineConfig:
        return replace(config, cache=in_groups(config.cache, groups, chunk))

    pools = scenario.pools
    if pools is not None and pools.prefill is not None:
        pools = replace(pools, prefill=grouped(pools.prefill))
    return replace(scenario, engine=grouped(scenario.engine), pools=pools)


class AuditedCluster(SimulatedCluster):
    """Looks over everybody's shoulder while it runs."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario, auditor=self._audit)
        self.num_borrowed_steps = 0
        self.num_arrivals = 0
        self.num_resumed = 0  # streams that went on with another front end
        self._counts: Counter[str] = Counter()  # of the cores of front ends that have died
        self._lives: dict[tuple[int, str], tuple[int, int, BlockTables]] = {}  # attempt -> owner, its life, blocks
        self._reserved: dict[str, int] = {}  # attempt -> the life of its decode worker in which it got its blocks
        self._fruitless: dict[str, int] = {}
        self._is_changing = False
        self.streams: dict[int, StreamLaw] = {}
        self.num_waits = 0  # streams that lost their blocks
        self._planned: dict[int, SchedulerOutput] = {}  # the newest plan of each worker
        self._withdrawn: set[str] = set()  # attempts whose blocks were needed for a stream, or for a longer prompt
        self._ready: set[int] = set()  # as the core was told
        self._missing: dict[str, range] = {}  # attempt -> the tokens whose KV is to come
        self._landed: dict[str, set[int]] = {}  # attempt -> those whose KV has come
        self._owner_of: dict[str, int] = {}  # attempt that is computed into borrowed blocks -> whose they are
        if self.transfers is not None:
            self.transfers.on_arrival = self._audit_arrival

    def _audit(self, worker: int, output: SchedulerOutput) -> None:
        """A step begins or ends: the blocks that it writes belong to the attempt for which it does, here or
        elsewhere."""
        core = self.workers[worker].engine
        self._audit_streams(worker, core, output)
        for chunk in output.prefills:
            request = core.requests.get(chunk.request_id)
            key = (worker, chunk.request_id)
            if request is not None and request.remote_block_tables and key not in self._lives:
                owner = self._owner_of[chunk.request_id]
                self._lives[key] = (owner, self._reserved[chunk.request_id], request.remote_block_tables)
            if key in self._lives:
                self.num_borrowed_steps += 1
                self._check_borrowed(chunk.request_id, *self._lives[key])

    def _audit_streams(self, worker: int, core: EngineCore, output: SchedulerOutput) -> None:
        if self._planned.get(worker) is output:  # it ends
            return
        self._planned[worker] = output
        law = self.streams.get(worker)
        if law is None or law.engine is not core:  # a new process
            law = self.streams[worker] = StreamLaw(core)
        before = law.num_waits
        law.check(output)
        self.num_waits += law.num_waits - before

    def _check_borrowed(self, attempt_id: str, owner: int, life: int, tables: BlockTables) -> None:
        is_used = self.lives.is_alive(owner) and owner in self.core.members.up
        if self.lives.life(owner) > life and not is_used:
            return  # memory that no process uses
        assert self.lives.life(owner) == life, f"{attempt_id} is computed into memory that is used again"
        engine = self.workers[owner].engine
        held = engine.requests.get(attempt_id)
        assert held is not None, f"{attempt_id} is computed into blocks that worker {owner} has released"
        if held.awaits_kv:
            assert engine.kv.reserved_tables(held) == tables
        elif engine.kv.is_dense:
            assert only_table(held.tables)[: len(only_table(tables))] == only_table(tables)

    def on_report(
        self, worker: int, events: list[Event], load: LoadReport | None, ended: SchedulerOutput | None
    ) -> None:
        for event in events:
            if isinstance(event, HandoffReserved):
                self._reserved[event.request_id] = self.lives.life(worker)
                num_tokens = self.workers[worker].engine.requests[event.request_id].num_prompt_tokens
                self._missing[event.request_id] = range(event.num_cached_tokens, num_tokens)
            elif isinstance(event, HandoffDelivered):
                self._check_landed(event.request_id)
            elif isinstance(event, FirstToken) and (request := self._of_attempt(event.request_id)):
                has_place = not request.is_handoff or event.request_id in self._reserved
                assert has_place, f"{event.request_id} has a token and no place to go on"
            elif isinstance(event, HandoffRevoked):
                self._withdrawn.add(event.request_id)
        super().on_report(worker, events, load, ended)

    def _check_landed(self, attempt_id: str) -> None:
        """The KV that was to come has come, all of it, unless it was computed in place or is simply there."""
        if attempt_id not in self._owner_of and (landed := self._landed.pop(attempt_id, None)) is not None:
            assert landed == set(self._missing[attempt_id]), f"{attempt_id} goes on without all of its KV"

    def _audit_arrival(self, attempt_id: str, source: int, target: int, span: Span) -> None:
        """KV lands once, in blocks that are reserved for it, from blocks that still hold it."""
        start, num_tokens = span
        landed = self._landed.setdefault(attempt_id, set())
        assert landed.isdisjoint(range(start, start + num_tokens)), f"KV of {attempt_id} counts twice"
        landed.update(range(start, start + num_tokens))
        self.num_arrivals += 1
        assert self.lives.is_alive(target)
        assert attempt_id in self.workers[target].engine.scheduler.incoming.reserved
        if source >= 0:  # (else the sender has given it up meanwhile, and this was on its way)
            assert attempt_id in self.workers[source].engine.requests

    def _tell(self, event: ClusterEvent, *, later: bool = False) -> None:
        if isinstance(event, WorkerUp):
            self._ready.add(event.info.number)
            assert not self.workers[event.info.number].engine.requests, "it holds attempts of a life before"
        elif isinstance(event, WorkerDown):
            self._ready.discard(event.worker)
        attempts = self._attempts() if isinstance(event, EvacuationReady) else {}
        super()._tell(event, later=later)
        now = self._attempts() if attempts else {}
        self._withdrawn |= {attempt for request_id, attempt in attempts.items() if now.get(request_id) != attempt}

    def _attempts(self) -> dict[str, str]:
        """The newest attempt of each request."""
        requests = self.core.requests.items()
        return {request_id: entry.attempt.attempt_id for request_id, entry in requests if entry.attempt}

    def _carry_out(self, command: Command) -> None:
        if not isinstance(command, Release | Drop | Renew | End | Restarted | Drained):
            assert command.worker in self._ready, "a command for a worker that is down"
        if isinstance(command, Serve | Reserve | Prefill):
            assert command.worker in self.core.members.up, "a request for a worker that may not be used"
        if isinstance(command, Serve | Reserve):
            assert command.worker not in self.core.members.draining, "a request for a worker that drains"
        if isinstance(command, Drained):
            assert not self.workers[command.worker].engine.requests or command.worker not in self._ready
        if isinstance(command, Prefill) and command.borrowed:
            self._owner_of[command.attempt_id] = command.target
        super()._carry_out(command)

    @property
    def counts(self) -> Counter[str]:
        """The counts of all cores."""
        return self._counts + self.core.counts

    def on_front_end_back(self) -> None:
        self._counts += self.core.counts
        super().on_front_end_back()

    def on_front_end_lost(self, until_ns: int) -> None:
        self._ready.clear()
        before = [(request, request.num_tokens + request.has_token) for request in self._open.values()]
        super().on_front_end_lost(until_ns)
        for request, num_tokens in before:
            most = request.spec.output_tokens
            assert num_tokens <= request.num_tokens < most, "a stream goes on elsewhere than its client has it"
            self.num_resumed += bool(request.num_tokens)

    def change(self, change: WorkerChange) -> None:
        self._is_changing = True
        super().change(change)
        self._is_changing = False

    def _restart(self, command: Restarted) -> None:
        request = self._open.get(command.request_id)
        if request is None:
            return
        before, has_token, was_withdrawn = request.num_tokens, request.has_token, request.attempt_id in self._withdrawn
        super()._restart(command)
        assert request.num_tokens >= before + has_token, "the core counts fewer tokens than the client has"
        if was_withdrawn or self._is_changing:  # not lost
            if request.num_tokens > before:
                self._fruitless[command.request_id] = 0
            return
        streak = 1 if request.num_tokens > before else self._fruitless.get(command.request_id, 0) + 1
        assert streak < self.core.config.max_attempts or request.num_tokens > before
        self._fruitless[command.request_id] = streak


def run_schedule(scenario: Scenario) -> AuditedCluster:
    """To the end, with every law checked."""
    cluster = AuditedCluster(scenario)
    cluster.run(LIMIT_NS)
    check_ends(scenario, cluster)
    check_nothing_is_left(cluster)
    return cluster


def check_strides(seed: int, cluster: SimulatedCluster) -> None:
    """The same schedule, every step on its own: the same log."""
    check_same_log(cluster, SimulatedCluster(random_schedule(seed, fast_forward=False)))


def check_same_log(cluster: SimulatedCluster, steps: SimulatedCluster) -> None:
    """``steps``, which has not run yet, is the same schedule with every step on its own."""
    steps.run(LIMIT_NS)
    assert cluster.log is not None
    assert steps.log is not None
    assert list(cluster.log.lines()) == list(steps.log.lines()), "strides change the log"


def check_ends(scenario: Scenario, cluster: SimulatedCluster) -> None:
    """Each request ends once: complete, cancelled by its client, or with an error that says why."""
    table = cluster.collector.requests
    specs = list(scenario.workload)  # type: ignore[arg-type]
    assert sorted(table.number) == list(range(len(specs))), "each request ends exactly once"
    for row in range(len(table)):
        check_row(table, row, specs[table.number[row]], scenario)
    assert cluster.log is not None
    ended = set()
    for row in range(len(table)):
        if REASONS[table.reason[row]] is FinishReason.ERROR:
            ended.add(str(table.number[row]))
    for _, event in cluster.log:
        message = event.message if isinstance(event, RequestFinished) else ""
        if message:
            assert any(words in message for words in ALLOWED_ERRORS), message
    if scenario.cluster.on_failure != "fail":
        assert not any("on_failure is fail" in str(getattr(event, "message", "")) for _, event in cluster.log)


def check_nothing_is_left(cluster: SimulatedCluster) -> None:
    """Tables, blocks, leases, transfers: all empty, on both sides."""
    cluster.core.check_idle()
    assert not getattr(cluster.core.router, "_sent", ())  # (round robin keeps nothing)
    for worker in cluster.workers:
        core = worker.engine
        check_is_empty(core)
        assert not core.scheduler.outgoing
        assert not core.scheduler.incoming.waiting
        assert not len(core.scheduler.incoming)
        assert not len(core.leases)
        assert worker.core.is_idle
        assert cluster.lives.is_alive(worker.number)
        assert worker._run is None
        assert not worker._inbox
        assert not worker._transfers
    if cluster.transfers is not None:
        assert not len(cluster.transfers)
        assert not cluster.transfers.num_travelling
    assert not cluster.collector._handoffs
    assert not cluster.collector._interrupted
