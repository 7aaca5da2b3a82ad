"""What happens to a fleet, as data: requests, clients that leave, workers that are lost, roles that change."""

import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from in_process_fleet import BLOCK_SIZE, NUM_BLOCKS, Client, engine_options
from in_process_worker import COST, MAX_MODEL_LEN, Host

from diptych.base.processor import Processor
from diptych.control.cluster.cluster_config import ClusterConfig, cluster_config
from diptych.control.compute_share import ComputeShare
from diptych.control.config import CacheConfig, EngineConfig, prefill_scheduler
from diptych.control.request import RequestOptions
from diptych.control.router.topology import Role
from diptych.control.slo import NS_PER_MS, NS_PER_S, Slo
from diptych.serving.fleet.fleet import Fleet
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.worker_groups import WorkerGroup
from diptych.simulation.environment import MESSAGE
from diptych.simulation.faults import Fault
from diptych.simulation.fleet.pools import Pool, Pools
from diptych.simulation.scenario import Scenario, WorkerChange
from diptych.workload.spec import RequestSpec

MS = NS_PER_MS
BYTES_PER_TOKEN = 1000
SLO = Slo(ttft_ns=300 * MS, tpot_ns=30 * MS)


@dataclass(frozen=True)
class Script:
    """What happens to a fleet. losses: (when, worker, how long until it is back)."""

    requests: tuple[RequestSpec, ...]
    prefill: int = 0
    decode: int = 0
    both: int = 0
    link: str = "shared_memory"  # of workers with a role of their own
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    losses: tuple[tuple[int, int, int], ...] = ()
    changes: tuple[WorkerChange, ...] = ()
    slo: Slo = field(default_factory=Slo)
    groups: tuple[WorkerGroup, ...] = ()  # instead of prefill, decode, both

    @property
    def num_workers(self) -> int:
        """The number of workers of the whole fleet."""
        return self.prefill + self.decode + self.both + sum(group.replicas for group in self.groups)

    @property
    def machine(self) -> Processor:
        """The machine of the live fleet: a core for each worker."""
        return Processor(
            "a processor", tuple((cpu,) for cpu in range(self.num_workers)), tuple(range(self.num_workers))
        )

    @property
    def transfer(self) -> str:
        """The live fleet's connector."""
        if self.num_workers == 1:
            return "auto"
        return "shared_memory" if (self.prefill or self.decode) and self.link == "shared_memory" else "tcp"

    @property
    def workers(self) -> FleetOptions:
        """As the live fleet takes it."""
        return FleetOptions(
            prefill=self.prefill,
            decode=self.decode,
            both=None if self.groups else self.both,
            transfer=self.transfer,
            cluster=self.cluster,
            groups=self.groups,
        )

    def _with_settings(self, change: WorkerChange) -> WorkerChange:
        """With the settings that a live fleet gives to a worker that begins, or ends, to do nothing but prefill."""
        roles: list[Role] = ["prefill"] * self.prefill + ["decode"] * self.decode + ["both"] * self.both
        for earlier in self.changes[: self.changes.index(change)]:
            if earlier.worker == change.worker and earlier.role is not None:
                roles[change.worker] = earlier.role
        if change.role is None or (change.role == "prefill") == (roles[change.worker] == "prefill"):
            return change
        scheduler = engine_options(slo=self.slo).scheduler
        if change.role == "prefill":
            scheduler = prefill_scheduler(scheduler, self.slo)
        return replace(change, scheduler=scheduler)

    def scenario(self, *, fast_forward: bool) -> Scenario:
        """As the simulator takes it."""
        options = engine_options(slo=self.slo)
        engine = EngineConfig(CacheConfig(NUM_BLOCKS, BLOCK_SIZE), options.scheduler, self.slo, MAX_MODEL_LEN)
        pools = None
        if self.prefill or self.decode:
            pools = Pools(
                num_prefill=self.prefill,
                num_decode=self.decode,
                num_both=self.both,
                kv_bytes_per_token=BYTES_PER_TOKEN,
                link=self.link,
                prefill=replace(engine, scheduler=prefill_scheduler(engine.scheduler, self.slo)),
            )
        if self.groups:
            named = tuple(
                Pool(name=group.name, role="both", replicas=group.replicas, engine=_of_group(engine, group))
                for group in self.groups
            )
            pools = Pools(kv_bytes_per_token=BYTES_PER_TOKEN, link=self.link, named=named)
        shares = tuple(ComputeShare((cpu,), 1) for cpu in range(self.num_workers))
        return Scenario(
            engine=engine,
            cost=COST,
            workload=list(self.requests),
            num_workers=self.both or self.num_workers,
            shares=shares if self.num_workers > 1 else (),
            cluster=self.cluster,
            pools=pools,
            faults=tuple(Fault("crash", worker, at_ns, back_ns) for at_ns, worker, back_ns in self.losses),
            worker_changes=tuple(self._with_settings(change) for change in self.changes),
            fast_forward=fast_forward,
        )


def _of_group(engine: EngineConfig, group: WorkerGroup) -> EngineConfig:
    assert group.kv_cache_tokens is not None
    cache = CacheConfig(group.kv_cache_tokens // BLOCK_SIZE, BLOCK_SIZE)
    return replace(engine, cache=cache, max_model_len=group.max_model_len or MAX_MODEL_LEN)


def prompt_of(number: int, spec: RequestSpec) -> list[int]:
    """Token ids that share what the spec says is shared, and nothing else."""
    filler = [3] * (BLOCK_SIZE - 3)
    blocks = [[1 + block_id // 3000**power % 3000 for power in range(3)] + filler for block_id in spec.hash_ids]
    stems = [token_id for block in blocks for token_id in block]
    own = [3100 + (number * 17 + at) % 900 for at in range(spec.prompt_tokens)]
    return (stems + own[len(stems) :])[: spec.prompt_tokens]


def request(
    arrival_ms: float,
    prompt_tokens: int,
    output_tokens: int,
    *,
    stem: int = 0,
    shared_blocks: int | None = None,
    **more: Any,
) -> RequestSpec:
    """A request whose full blocks belong to a stem (0: to no other request). Its answer fills no block."""
    num_blocks = prompt_tokens // BLOCK_SIZE
    shared = num_blocks if shared_blocks is None else shared_blocks
    own = round(arrival_ms * 1000) + 1000
    ids = tuple(stem * 100 + at if stem and at < shared else own * 100 + at for at in range(num_blocks))
    assert prompt_tokens % BLOCK_SIZE + output_tokens < BLOCK_SIZE, "the simulator would have to name output blocks"
    return RequestSpec(
        arrival_ns=round(arrival_ms * MS) + 7,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        hash_ids=ids,
        hash_block_tokens=BLOCK_SIZE,
        **more,
    )


def submit(client: Client, number: int, spec: RequestSpec) -> None:
    """The request of a spec, as the live front end has it."""
    max_tokens = spec.max_tokens or spec.output_tokens
    last = spec.prompt_tokens + spec.output_tokens - 1
    client.submit(
        str(number),
        prompt_of(number, spec),
        RequestOptions(priority=spec.priority, slo=spec.slo),
        max_tokens=max_tokens,
        stop_token_ids=(last,) if spec.output_tokens < max_tokens else (),
        ignore_eos=True,
    )


async def play(script: Script, fleet: Fleet, host: Host) -> None:
    """Let all of it happen to a live fleet; returns a second after the last request has ended."""
    time, client = host.time, Client(fleet)

    def lose(worker: int, restart_ns: int) -> None:
        host.workers[worker].lose(restart_ns=restart_ns)

    for number, spec in enumerate(script.requests):
        time.at(spec.arrival_ns, MESSAGE, partial(submit, client, number, spec))
        if spec.abort_after_ns is not None:
            time.at(spec.arrival_ns + spec.abort_after_ns, MESSAGE, partial(client.leave, str(number)))
    for at_ns, worker, back_ns in script.losses:
        time.at(at_ns, MESSAGE, partial(lose, worker, back_ns))
    for change in script.changes:
        if change.role is not None:
            time.at(change.at_ns, MESSAGE, partial(fleet.changes.change_role, change.worker, change.role))
        if change.scheduler is not None:
            time.at(change.at_ns, MESSAGE, partial(fleet.changes.change_scheduler, change.worker, change.scheduler))
        if change.share is not None:
            time.at(change.at_ns, MESSAGE, partial(fleet.changes.change_share, change.worker, change.share))
        if change.is_draining is not None:
            drain = fleet.changes.drain if change.is_draining else fleet.changes.use_again
            time.at(change.at_ns, MESSAGE, partial(drain, change.worker))
    await time.until(max(spec.arrival_ns for spec in script.requests))
    while len(fleet.streams) or len(fleet.core.members.up) < len(host.workers):
        await time.until(time.now + 100 * MS)
        assert time.now < 10**12, "requests that never end"
    await time.until(time.now + NS_PER_S)


def random_script(seed: int) -> Script:
    """Requests, clients that leave, and losses, all at times of their own."""
    rng = random.Random(seed)
    requests, now_ms = [], 1.0
    for _ in range(rng.choice([5, 15, 30])):
        now_ms += rng.choice([0.3, 5.0, 40.0]) * rng.random() + 0.01
        prompt = rng.choice([0, 1, 2, 5, 12, 30]) * BLOCK_SIZE + rng.randrange(1, 16)
        output = rng.randrange(1, BLOCK_SIZE - prompt % BLOCK_SIZE)
        requests.append(
            request(
                round(now_ms, 3),
                prompt,
                output,
                stem=rng.randrange(4),
                shared_blocks=rng.choice([1, 4, None]),
                max_tokens=output + rng.choice([0, 0, 5]),
                priority=rng.choice([0, 0, 0, 3]),
                slo=rng.choice([None, SLO]),
                abort_after_ns=rng.choice([None] * 5 + [1000 + rng.randrange(100 * MS)]),
            )
        )
    shape = rng.choice([(0, 0, 1), (0, 0, 3), (1, 1, 0), (1, 2, 0), (2, 1, 1)])
    cluster = cluster_config(
        disaggregate="auto" if shape[2] == 1 else rng.choice(["auto", "always"]),
        on_failure=rng.choice(["retry", "local", "fail"]),
        max_prefills_in_flight_per_worker=rng.choice([None, 1, 2]),
    )
    losses = tuple(
        (rng.randrange(MS, round(now_ms * MS) + 50 * MS), worker, 20 * MS + rng.randrange(300 * MS))
        for worker in range(sum(shape))
        if rng.random() < 0.4
    )
    return Script(tuple(requests), *shape, cluster=cluster, losses=losses, slo=rng.choice([Slo(), SLO]))
