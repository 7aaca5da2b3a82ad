"""A server that was observed, as a scenario: the same requests, workers that cost what its steps cost.

Where every request was seen, these are all that came, at their times, also those that have not ended
(observed_arrivals.py), and after them as many again at the same intervals, because the traffic goes on; else as many
with the same mean lengths, at random times (seeded). The twin decides by the objectives that the server was told, and
is judged by those that are asked. Costs are the terms of the step-time model; of an engine that has none, they follow
from its means.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.config import BudgetConfig, CacheConfig, EngineConfig, SchedulerConfig
from diptych.control.fleet_settings import FleetSettings
from diptych.control.router.topology import Role
from diptych.control.slo import NS_PER_S, Slo, objectives
from diptych.control.step import StepFeatures
from diptych.diagnosis.observation import Observation
from diptych.simulation.costs.cost_model import CostModel
from diptych.simulation.costs.fitted import MeasuredPoint, fit_scaled, fit_table, gather
from diptych.simulation.costs.terms_cost import StepTermsCost
from diptych.simulation.fleet.pools import Pool, Pools
from diptych.simulation.fleet.simulated_disk import DiskModel
from diptych.simulation.results import RequestTable
from diptych.simulation.run import simulate
from diptych.simulation.scenario import Scenario
from diptych.workload.spec import RequestSpec

MOST_REQUESTS = 400  # that are simulated: the newest
FEWEST_POINTS = 8  # different steps, from which costs are fitted
NUM_DRAWN = 150  # of an engine whose requests were not seen
ENGINE_BLOCK = 16
ENGINE_BLOCKS = 1 << 16  # the size of their KV cache is not exported
ENGINE_SEATS, ENGINE_STEP_TOKENS = 256, 2048  # defaults of vLLM


@dataclass(frozen=True, slots=True)
class TwinModel:
    """What is simulated. roles, engines: of the workers, in order. link, kv_bytes_per_token: between them. asked: the
    objectives of the diagnosis; judged: those of each request (empty: each is judged by its own). counted: numbers of
    the requests that are judged; the others count only as work. measured: by number, the seconds to the first token and
    after it of the requests that have ended (empty: not seen one by one). cost: of steps (None: the terms)."""

    requests: tuple[RequestSpec, ...]
    terms: tuple[float, float, float, float, float]
    roles: tuple[Role, ...]
    engines: tuple[EngineConfig, ...]
    cluster: ClusterConfig
    link: str = "shared_memory"
    kv_bytes_per_token: int = 1
    asked: Slo = field(default_factory=Slo)
    judged: tuple[Slo, ...] = ()
    counted: tuple[int, ...] = ()
    measured: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    cost: CostModel | None = None

    def scenario(self) -> Scenario:
        """The scenario to simulate."""
        cost = self.cost or StepTermsCost(*self.terms)
        if len(self.roles) == 1 and self.roles[0] == "both":
            engine = self.engines[0]
            disk = _disk_of(engine)
            return Scenario(engine=engine, cost=cost, workload=self.requests, cluster=self.cluster, disk=disk)
        pools = tuple(
            Pool(name=f"{role}-{number}", role=role, replicas=1, engine=engine, disk=_disk_of(engine))
            for number, (role, engine) in enumerate(zip(self.roles, self.engines, strict=True))
        )
        fleet = Pools(kv_bytes_per_token=max(1, self.kv_bytes_per_token), link=self.link, named=pools)
        return Scenario(engine=self.engines[0], cost=cost, workload=self.requests, cluster=self.cluster, pools=fleet)

    def with_scheduler(self, *, role: Role | None = None, **changes: object) -> "TwinModel":
        """All workers (of a role) with these fields of SchedulerConfig changed."""
        engines = tuple(
            replace(engine, scheduler=replace(engine.scheduler, **changes))  # type: ignore[arg-type]
            if role in (None, own)
            else engine
            for own, engine in zip(self.roles, self.engines, strict=True)
        )
        return replace(self, engines=engines)

    def told(self) -> "TwinModel":
        """The server is told the objectives that are asked, and the requests those by which they are judged."""
        if not self.judged:
            return self
        requests = (replace(spec, slo=slo) for spec, slo in zip(self.requests, self.judged, strict=True))
        engines = tuple(replace(engine, slo=self.asked) for engine in self.engines)
        return replace(self, requests=tuple(requests), engines=engines)

    def laws(self) -> "tuple[TwinModel, ...]":
        """The same with each law of the step times that fits the present: they differ in what was not seen."""
        return (self,) if self.cost is None else (self, replace(self, cost=None))

    def objectives(self, number: int) -> Slo:
        """The objectives by which a request is judged."""
        return self.judged[number] if self.judged else objectives(self.requests[number].slo, self.engines[0].slo)

    def run(self) -> RequestTable:
        """The requests after the simulation."""
        return simulate(self.scenario()).requests


def _disk_of(engine: EngineConfig) -> DiskModel | None:
    """The disk below a worker's cache, at the pace that its settings say; None where it has none."""
    tiers = engine.cache.tiers
    return DiskModel.measured(tiers.load_block_ns) if tiers.has_disk else None


def twin_of(observation: Observation) -> TwinModel | None:
    """The twin of an observed server; None when too little is known of it."""
    if observation.is_exact and observation.fleet is not None and observation.fleet.workers:
        return _of_fleet(observation)
    return _of_means(observation)


def _of_fleet(observation: Observation) -> TwinModel | None:
    fleet = observation.fleet
    assert fleet is not None
    terms = next((worker.terms_ns for worker in fleet.workers if len(worker.terms_ns) == 5), None)
    if terms is None or not observation.requests:
        return None
    fixed, token, pair, stream, context = terms
    arrivals = observation.arrivals[-MOST_REQUESTS:]
    begin_ns = arrivals[0].spec.arrival_ns
    specs = [replace(arrival.spec, arrival_ns=arrival.spec.arrival_ns - begin_ns) for arrival in arrivals]
    span_ns = specs[-1].arrival_ns * len(specs) // max(1, len(specs) - 1)
    specs += [replace(spec, arrival_ns=spec.arrival_ns + span_ns) for spec in specs]
    ended = {parts.request_id: (parts.ttft_ns / NS_PER_S, parts.decode_ns / NS_PER_S) for parts in observation.requests}
    return TwinModel(
        tuple(specs),
        (fixed, token, pair, stream, context),
        tuple(worker.role for worker in fleet.workers),
        tuple(worker.engine for worker in fleet.workers),
        fleet.cluster,
        "shared_memory" if fleet.shares_memory else "eth100",
        fleet.kv_bytes_per_token,
        observation.slo,
        2 * tuple(arrival.judged for arrival in arrivals),
        tuple(number for number, arrival in enumerate(arrivals) if not arrival.is_early),
        {number: ended[arrival.request_id] for number, arrival in enumerate(arrivals) if arrival.request_id in ended},
        _cost(observation, fleet),
    )


def _cost(observation: Observation, fleet: FleetSettings) -> CostModel | None:
    """What steps cost, also those that this server does not compute as it is set now: its warm-up has seen small chunks
    and large batches; its own steps say how much longer they take now. None: too little is known."""
    single = next((worker.measured for worker in fleet.workers if len(worker.measured) >= FEWEST_POINTS), ())
    points = gather(observation.steps)
    if not single or len(points) < FEWEST_POINTS:
        return None
    forward = fit_table([MeasuredPoint(StepFeatures(*row[:4]), row[4]) for row in single])
    return fit_scaled(forward, points)


def _of_means(observation: Observation) -> TwinModel | None:
    """The twin of an engine that exports sums: a step costs its fastest gap and a share for each stream; a prompt token
    what prefills take on average."""
    known, ttft, itl = observation.signals.get, observation.ttft, observation.itl
    prompt, output, rate = known("prompt_mean", 0.0), known("output_mean", 0.0), known("rate", 0.0)
    if ttft is None or itl is None or not (prompt and output and rate):
        return None
    running = max(1.0, known("running", 1.0))
    floor_s = itl.parts_s.get("decode_floor", itl.measured_s)
    stream_s = itl.parts_s.get("rest", 0.0) / running
    prefill_s = max(ttft.parts_s.get("prefill", ttft.measured_s) - floor_s, 0.1 * floor_s)
    seats = int(known("max_num_seqs", ENGINE_SEATS))
    budget = BudgetConfig(kind="fixed", max_batched_tokens=ENGINE_STEP_TOKENS)
    scheduler = SchedulerConfig(order="fcfs", budget=budget, max_num_seqs=min(seats, ENGINE_STEP_TOKENS))
    cache = CacheConfig(ENGINE_BLOCKS, ENGINE_BLOCK, admission="greedy")
    engine = EngineConfig(cache, scheduler, observation.slo, 1 << 17)
    return TwinModel(
        _drawn(observation, rate, prompt, output),
        (floor_s * NS_PER_S, prefill_s / prompt * NS_PER_S, 0.0, stream_s * NS_PER_S, 0.0),
        ("both",),
        (engine,),
        ClusterConfig(max_prefills_in_flight_per_worker=0),
        counted=tuple(range(NUM_DRAWN)),
    )


def _drawn(observation: Observation, rate: float, prompt: float, output: float) -> tuple[RequestSpec, ...]:
    """Poisson arrivals; prompts half below the median and half as long as keeps the mean."""
    rng, now_s, specs = random.Random(0), 0.0, []
    median = min(observation.signals.get("prompt_p50", prompt), prompt)
    for _ in range(NUM_DRAWN):
        now_s += rng.expovariate(rate)
        tokens = median if rng.random() < 0.9 or median == prompt else median + (prompt - median) * 10
        spec = RequestSpec(
            arrival_ns=round(now_s * NS_PER_S),
            prompt_tokens=max(1, round(tokens)),
            output_tokens=max(1, round(output * rng.uniform(0.5, 1.5))),
            slo=observation.slo,
        )
        specs.append(spec)
    return tuple(specs)
