"""Random fleets on hosts and in racks, and faults of places and of the ways between them; the laws are those of
fault_schedules.py, and that recovery is bounded.

Used by test_host_faults.py (some hundreds of schedules) and benchmarks/fault_schedules.py --hosts.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.simulation.fault_places import SCOPES, Scope, befall, workers_at
from diptych.simulation.faults import CHANNEL_FAULTS, KV_FAULTS, Direction, Fault, FaultKind
from diptych.simulation.fleet.pools import Pools
from diptych.simulation.scenario import Scenario
from tests.simulation.fault_schedules import LIMIT_NS, AuditedCluster, check_same_log, random_schedule, run_schedule

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
RECOVERY_NS = 5 * NS_PER_S  # after the last fault, beside the time in which one worker does the whole load again


def random_place_faults(
    seed: int, pools: Pools, *, until_ns: int, count: int, mean_duration_ns: int
) -> tuple[Fault, ...]:
    """``count`` faults at uniform times of random replicas, hosts and racks, and between two of them; equal arguments
    give equal faults. Only workers that share no memory are isolated."""
    rng = random.Random(seed)
    places = pools.places()
    numbers: dict[Scope, list[int]] = {
        "replica": sorted({place.replica for place in places}),
        "host": sorted({pools.host_of(place.replica) for place in places}),
        "rack": sorted({pools.rack_of(place.replica) for place in places}),
    }
    whole: tuple[FaultKind, ...] = ("crash", "hang", "slow", "link_down", "isolate", "isolate")
    faults: list[Fault] = []
    for _ in range(count):
        scope = rng.choice(SCOPES)
        workers = workers_at(pools, scope, rng.choice(numbers[scope]))
        peers = workers_at(pools, scope, rng.choice(numbers[scope]))
        times = (rng.randrange(max(1, until_ns)), 1 + rng.randrange(2 * mean_duration_ns))
        factor = 1.0 + rng.randrange(1, 90) / 10
        kind, channel = rng.choice(whole), rng.choice(("process", "control", "kv", "kv"))
        direction = rng.choice(DIRECTIONS)
        if channel == "process":
            kind = "crash" if kind == "isolate" and pools.num_domains else kind
            faults += befall(Fault(kind, 0, *times, factor), workers)
        elif channel == "control":
            faults += befall(Fault(rng.choice(CHANNEL_FAULTS), 0, *times, factor, "control", direction), workers)
        else:
            faults += befall(Fault(rng.choice(KV_FAULTS), 0, *times, factor, "kv", direction), workers, peers)
    return tuple(sorted(faults, key=lambda fault: (fault.at_ns, fault.worker, fault.kind, fault.peer or 0)))


def spread_schedule(seed: int, *, fast_forward: bool = True) -> Scenario:
    """The fleet and the load of ``random_schedule``, on hosts that share no memory, in up to three racks."""
    scenario, rng = random_schedule(seed, fast_forward=fast_forward), random.Random(f"hosts {seed}")
    pools, count = scenario.pools, scenario.num_workers
    if pools is None:
        pools = Pools(num_both=count, kv_bytes_per_token=10**5)
    num_hosts = rng.choice([0, 2, max(1, count // 2), max(1, count // 3)])
    num_racks = rng.choice([0, 1, 2, 3])
    pools = replace(
        pools,
        link=rng.choice(["nvlink4", "eth100"]),
        num_hosts=num_hosts,
        shares_memory=not num_hosts,
        num_racks=num_racks,
        uplink=rng.choice(["", "eth100"]) if num_racks else "",
    )
    last_ns = max(spec.arrival_ns for spec in scenario.workload)  # type: ignore[union-attr]
    faults = random_place_faults(
        rng.randrange(2**30),
        pools,
        until_ns=last_ns + rng.choice([50, 500]) * NS_PER_MS,
        count=rng.choice([1, 3, 8, 16]),
        mean_duration_ns=rng.choice([2, 20, 200]) * NS_PER_MS,
    )
    routing = replace(scenario.cluster.routing, disaggregate=rng.choice(["always", "always", "auto"]))
    return replace(scenario, pools=pools, faults=faults, cluster=replace(scenario.cluster, routing=routing))


def restart_schedule(seed: int, *, fast_forward: bool = True) -> Scenario:
    """The same, and the front end dies, too, up to four times."""
    scenario, rng = spread_schedule(seed, fast_forward=fast_forward), random.Random(f"front end {seed}")
    last_ns = max(spec.arrival_ns for spec in scenario.workload)  # type: ignore[union-attr]
    faults = [
        Fault(
            "front_end_crash",
            0,
            rng.randrange(last_ns + 200 * NS_PER_MS),
            1 + rng.randrange(rng.choice([1, 5, 100, 1000]) * NS_PER_MS),
        )
        for _ in range(rng.choice([1, 1, 2, 4]))
    ]
    return replace(scenario, faults=(*scenario.faults, *faults))


def run_spread(seed: int, make: Callable[[int], Scenario] = spread_schedule) -> AuditedCluster:
    """To the end, with every law checked, and that recovery takes a bounded time."""
    scenario = make(seed)
    cluster, quiet = run_schedule(scenario), AuditedCluster(replace(scenario, faults=()))
    quiet.run(LIMIT_NS)
    over_ns = max([fault.end_ns for fault in scenario.faults], default=0)
    again_ns = scenario.num_workers * quiet.last_end_ns  # what waited may all be on the worker that came back first
    late_ns = cluster.last_end_ns - over_ns - again_ns
    assert late_ns <= RECOVERY_NS, f"{late_ns} ns more than the whole load takes again after the last fault"
    return cluster


def check_spread_strides(seed: int, cluster: AuditedCluster, make: Callable[..., Scenario] = spread_schedule) -> None:
    """The same schedule, every step on its own: the same log."""
    check_same_log(cluster, AuditedCluster(make(seed, fast_forward=False)))
