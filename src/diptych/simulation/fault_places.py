"""Faults of hosts and racks, as faults of their workers.

A host that loses power is a crash of all its workers, a partition between two racks a loss of messages between each
pair of their workers.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from diptych.simulation.faults import CHANNEL_FAULTS, KV_FAULTS, Direction, Fault, FaultKind
from diptych.simulation.fleet.pools import Pools

Scope = Literal["replica", "host", "rack"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
SCOPES: tuple[Scope, ...] = ("replica", "host", "rack")


def workers_at(pools: Pools, scope: Scope, number: int) -> list[int]:
    """The workers of a replica, a host or a rack (none: there is no such place)."""
    replicas = [place.replica for place in pools.places()]
    if scope == "host":
        return [worker for worker, replica in enumerate(replicas) if pools.host_of(replica) == number]
    if scope == "rack":
        return [worker for worker, replica in enumerate(replicas) if pools.rack_of(replica) == number]
    return [worker for worker, replica in enumerate(replicas) if replica == number]


def befall(fault: Fault, workers: Sequence[int], peers: Sequence[int] | None = None) -> tuple[Fault, ...]:
    """The fault, of each of these workers; ``peers``: on the way to each of these (None: as it is)."""
    if peers is None:
        return tuple(replace(fault, worker=worker) for worker in workers)
    pairs = [(worker, peer) for worker in workers for peer in peers if worker != peer]
    return tuple(replace(fault, worker=worker, peer=peer) for worker, peer in pairs)


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
