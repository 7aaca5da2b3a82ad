"""A server that was observed, as a scenario: the same requests, workers that cost what its steps cost.

Where every request was seen, these are the requests, at their times; else as many with the same mean lengths, at random
times (seeded). Costs are the terms of the step-time model; of an engine that has none, they follow from its means.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.config import BudgetConfig, CacheConfig, EngineConfig, SchedulerConfig
from diptych.control.router.topology import Role
from diptych.control.slo import NS_PER_S
from diptych.diagnosis.observation import Observation
from diptych.diagnosis.request_parts import RequestParts
from diptych.simulation.costs.terms_cost import StepTermsCost
from diptych.simulation.fleet.pools import Pool, Pools
from diptych.simulation.results import RequestTable
from diptych.simulation.run import simulate
from diptych.simulation.scenario import Scenario
from diptych.workload.spec import RequestSpec

MOST_REQUESTS = 400  # that are simulated: the newest
NUM_DRAWN = 150  # of an engine whose requests were not seen
ENGINE_BLOCK = 16
ENGINE_BLOCKS = 1 << 16  # the size of their KV cache is not exported
ENGINE_SEATS, ENGINE_STEP_TOKENS = 256, 2048  # defaults of vLLM


@dataclass(frozen=True, slots=True)
class TwinModel:
    """What is simulated. roles, engines: of the workers, in order. link, kv_bytes_per_token: between them."""

    requests: tuple[RequestSpec, ...]
    terms: tuple[float, float, float, float, float]
    roles: tuple[Role, ...]
    engines: tuple[EngineConfig, ...]
    cluster: ClusterConfig
    link: str = "shared_memory"
    kv_bytes_per_token: int = 1

    def scenario(self) -> Scenario:
        """To be simulated."""
        cost = StepTermsCost(*self.terms)
        if len(self.roles) == 1 and self.roles[0] == "both":
            return Scenario(engine=self.engines[0], cost=cost, workload=self.requests, cluster=self.cluster)
        pools = tuple(
            Pool(name=f"{role}-{number}", role=role, replicas=1, engine=engine)
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

    def run(self) -> RequestTable:
        """The requests after the simulation."""
        return simulate(self.scenario()).requests


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
    return TwinModel(
        _specs(observation.requests[-MOST_REQUESTS:]),
        (fixed, token, pair, stream, context),
        tuple(worker.role for worker in fleet.workers),
        tuple(worker.engine for worker in fleet.workers),
        fleet.cluster,
        "shared_memory" if fleet.shares_memory else "eth100",
        fleet.kv_bytes_per_token,
    )


def _specs(requests: Sequence[RequestParts]) -> tuple[RequestSpec, ...]:
    """The requests as they came. Tokens that were found in the cache need not be computed here either."""
    begin_ns = requests[0].arrival_ns
    return tuple(
        RequestSpec(
            arrival_ns=parts.arrival_ns - begin_ns,
            prompt_tokens=max(1, parts.num_prompt_tokens - parts.num_cached_tokens),
            output_tokens=max(1, parts.num_output_tokens),
            slo=parts.slo,
            kind=parts.service_class,
        )
        for parts in requests
    )


def _of_means(observation: Observation) -> TwinModel | None:
    """Of an engine that exports sums: a step costs its fastest gap and a share for each stream; a prompt token what
    prefills take on average."""
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
        ClusterConfig(max_untouched_per_worker=0),
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
