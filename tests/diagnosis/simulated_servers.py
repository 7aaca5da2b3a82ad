"""Simulated servers that are given one thing that is wrong, as a live one would be: for tests of the diagnosis."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.config import CacheConfig, EngineConfig, SchedulerConfig, scheduler_config
from diptych.control.fleet_settings import FleetSettings, WorkerSettings
from diptych.control.slo import NS_PER_MS, NS_PER_S, Slo
from diptych.diagnosis.adapters.recorded_file import records_of
from diptych.diagnosis.adapters.timeline_records import TimelineSource, observe
from diptych.diagnosis.observation import Observation
from diptych.simulation.fleet.pools import Pool, Pools
from diptych.simulation.run import simulate_with_log
from diptych.simulation.scenario import Scenario
from diptych.timeline.records import Record
from diptych.workload.spec import RequestSpec
from tests.simulation.linear_cost import LinearCost

COST = LinearCost(10e6, 40e3, 4.0, 0.4e6, 60.0)  # 10 ms a step, 40 us a prompt token, 0.4 ms a stream
TERMS = (COST.base_ns, COST.prefill_token_ns, COST.prefill_pair_ns, COST.decode_seq_ns, COST.decode_token_ns)
SLO = Slo(400 * NS_PER_MS, 30 * NS_PER_MS)


def chat(count: int, gap_ms: float, prompt: int = 120, output: int = 40, *, seed: int = 1, start_ms: float = 0.0,
         kind: str = "") -> list[RequestSpec]:  # fmt: skip
    """Requests of about equal lengths, with random gaps."""
    rng = random.Random(seed)
    now, specs = start_ms, []
    for _ in range(count):
        now += rng.expovariate(1 / gap_ms)
        length = round(prompt * rng.uniform(0.8, 1.2))
        specs.append(
            RequestSpec(arrival_ns=round(now * NS_PER_MS), prompt_tokens=length, output_tokens=output, kind=kind)
        )
    return specs


@dataclass
class Server:
    """What is simulated."""

    workload: list[RequestSpec]
    scheduler: SchedulerConfig = field(default_factory=lambda: scheduler_config("chunked"))
    num_blocks: int = 2000
    pools: tuple[tuple[str, int], ...] = ()
    cost: LinearCost = COST
    terms: tuple[float, ...] = TERMS
    link: str = "shared_memory"
    kv_bytes: int = 12_288
    signals: dict[str, Any] = field(default_factory=dict)

    def records(self) -> list[Record]:
        """The records of its timeline."""
        return self._simulated(SLO)[0]

    def observe(self, slo: Slo = SLO) -> Observation:
        """What would be seen of it."""
        records, settings = self._simulated(slo)
        return observe(records, TimelineSource(source="test", settings=settings, slo=slo, signals=self.signals))

    def _simulated(self, slo: Slo) -> tuple[list[Record], FleetSettings]:
        engine = EngineConfig(CacheConfig(self.num_blocks, 16), self.scheduler, slo, 16_384)
        pools = None
        roles = {0: "both"}
        if self.pools:
            named = tuple(Pool(name=role, role=role, replicas=count) for role, count in self.pools)
            pools = Pools(kv_bytes_per_token=self.kv_bytes, link=self.link, named=named)
            roles = dict(enumerate(role for role, count in self.pools for _ in range(count)))
        scenario = Scenario(
            engine=engine, cost=self.cost, workload=sorted(self.workload, key=lambda spec: spec.arrival_ns),
            pools=pools, cluster=ClusterConfig(max_prefills_in_flight_per_worker=0), record_events=True,
            fast_forward=False,
        )  # fmt: skip
        _, log = simulate_with_log(scenario)
        assert log is not None
        workers = tuple(WorkerSettings(number, role, engine, self.terms) for number, role in roles.items())
        settings = FleetSettings("test", "test", workers)
        return records_of(log, roles), settings


def total_s(observation: Observation, account: str) -> float:
    """Seconds of an account over all requests."""
    return sum(parts.ttft[account] + parts.decode[account] for parts in observation.requests) / NS_PER_S


def long_prompts(count: int, gap_ms: float, tokens: int, output: int = 4) -> Sequence[RequestSpec]:
    """Documents that come one after the other."""
    return chat(count, gap_ms, tokens, output, seed=7, start_ms=500.0)


def server_with(cause: str) -> Server:
    """A server that is hurt by one cause of the diagnosis table."""
    chats = chat(120, 120)
    injected = {
        "prefill_queueing": Server(
            chats + list(long_prompts(8, 1500, 8000)), scheduler=scheduler_config("unified")
        ),
        "prefill_interference": Server(
            chat(120, 120, output=80) + list(long_prompts(12, 1000, 4000)),
            scheduler=scheduler_config("chunked", budget="fixed", max_batched_tokens=2048),
        ),
        "decode_batch": Server(chat(150, 40, output=150), num_blocks=6000),
        "kv_cache_full": Server(chat(80, 60, prompt=200, output=120), num_blocks=80),
        "sequence_limit": Server(chat(80, 60, output=60), scheduler=scheduler_config("chunked", max_num_seqs=4)),
        "capacity": Server(chat(150, 20, prompt=600, output=60)),
        "too_few_prefill_workers": Server(
            chat(150, 40, prompt=900, output=8), pools=(("prefill", 1), ("decode", 2))
        ),
        "too_few_decode_workers": Server(
            chat(120, 40, prompt=100, output=150), pools=(("prefill", 2), ("decode", 1)), num_blocks=120
        ),
        "slow_transfer": Server(
            chat(80, 150, prompt=900, output=20), pools=(("prefill", 1), ("decode", 1)), link="pcie4",
            kv_bytes=12_288_000,
        ),
        "small_chunks": Server(
            chat(80, 100, prompt=60, output=100) + list(long_prompts(8, 1500, 3000)),
            scheduler=scheduler_config("chunked", budget="fixed", max_batched_tokens=64, max_num_seqs=32),
        ),
        "oversubscribed_cores": Server(
            chat(80, 150), cost=LinearCost(30e6, 120e3, 12.0, 1.2e6, 180.0), signals={"cpu_wait": 0.6}
        ),
        "prefix_misses": Server(
            chat(60, 500, prompt=9000, output=10), scheduler=scheduler_config("unified"),
            signals={"reread_share": 0.9},
        ),
        "cold_cache": Server(
            chat(60, 500, prompt=9000, output=10), scheduler=scheduler_config("unified"),
            signals={"hit_share_early": 0.0, "hit_share_late": 0.9, "worker_age_s": 30.0},
        ),
        "slow_model": Server(chat(60, 400), cost=LinearCost(60e6, 40e3, 4.0, 0.1e6, 60.0),
                             terms=(60e6, 40e3, 4.0, 0.1e6, 60.0)),
        "batch_flood": Server(chats + chat(400, 1, prompt=300, output=30, seed=3, start_ms=4000.0)),
    }  # fmt: skip
    return injected[cause]


INJECTED = (
    "prefill_queueing", "prefill_interference", "decode_batch", "kv_cache_full", "sequence_limit", "capacity",
    "too_few_prefill_workers", "too_few_decode_workers", "slow_transfer", "small_chunks", "oversubscribed_cores",
    "prefix_misses", "cold_cache", "slow_model", "batch_flood",
)  # fmt: skip
