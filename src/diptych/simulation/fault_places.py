"""Faults of hosts and racks, as faults of their workers.

A host that loses power is a crash of all its workers, a partition between two racks a loss of messages between each
pair of their workers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from diptych.simulation.faults import Fault
from diptych.simulation.fleet.pools import Pools

Scope = Literal["replica", "host", "rack"]
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
