"""What KV crosses between two workers of a simulated fleet: cards, the uplinks of racks, and the faults of pairs.

Owns the links of every path and the channels of the pairs that faults name. Must never know what is sent.

    other hosts   card of the sender -> (uplink of its rack -> uplink of the other rack) -> card of the receiver
    one host      a copy by the sender, through memory

A pair that a fault slows down has one more link, whose bandwidth is that of the pair.
"""

from collections.abc import Sequence
from functools import partial

from diptych.simulation.environment import MESSAGE, Environment
from diptych.simulation.faults import Fault
from diptych.simulation.fleet.control_channels import FaultyChannel
from diptych.simulation.fleet.links import Link, Network
from diptych.simulation.fleet.pools import LOCAL_LINK, Pools

UNLIMITED = 2**60  # bytes per second
Pair = tuple[int, int]  # from which worker, to which


class KVNetwork:
    """All paths. The lanes of a replica share its network cards, and a transfer uses all of them: each device sends its
    own part."""

    def __init__(self, environment: Environment, pools: Pools, faults: Sequence[Fault], seed: int) -> None:
        self.network = Network(environment)
        self._environment = environment
        self._places = pools.places()
        self._hosts = [pools.host_of(place.replica) for place in self._places]
        self._racks = [pools.rack_of(place.replica) for place in self._places]
        self._has_local_copies = pools.num_hosts > 0
        self.out = self._cards(pools.link)
        self.into = self._cards(pools.link)
        self._local = self._cards(LOCAL_LINK)
        self._uplinks: dict[tuple[int, str], Link] = {}
        if pools.uplink:
            for rack in sorted(set(self._racks)):
                self._uplinks |= {(rack, way): Link.named(pools.uplink) for way in ("out", "in")}
        self._wires: dict[Pair, Link] = {}
        self._channels: dict[Pair, FaultyChannel] = {}
        self._prepare(faults, seed)

    def path(self, source: int, target: int) -> tuple[Link, ...]:
        """The links that KV from one worker to another crosses."""
        if self._has_local_copies and self._hosts[source] == self._hosts[target]:
            path: tuple[Link, ...] = (self._local[source],)
        else:
            path = (self.out[source], self.into[target])
            first, last = self._racks[source], self._racks[target]
            if self._uplinks and first != last:
                path = (path[0], self._uplinks[first, "out"], self._uplinks[last, "in"], path[1])
        wire = self._wires.get((source, target)) if self._wires else None
        return path if wire is None else (*path, wire)

    def channel(self, source: int, target: int) -> FaultyChannel | None:
        """The faults of messages from one worker to another; None: there are none."""
        return self._channels.get((source, target)) if self._channels else None

    def cut(self, worker: int) -> None:
        """Take in that a process has died: what is on its way to it and from it is lost."""
        for pair, channel in self._channels.items():
            if worker in pair:
                channel.cut()

    def connect(self, worker: int, lost: set[int]) -> None:
        """A new process of it is there. lost: workers without one."""
        for pair, channel in self._channels.items():
            if worker in pair and lost.isdisjoint(pair):
                channel.connect()

    def _cards(self, name: str) -> list[Link]:
        """The cards of each worker's replica, in one direction."""
        of_replica: dict[int, Link] = {}
        for place in self._places:
            if place.replica not in of_replica:
                link = of_replica[place.replica] = Link.named(name)
                link.bandwidth *= place.pool.nics
        return [of_replica[place.replica] for place in self._places]

    def _prepare(self, faults: Sequence[Fault], seed: int) -> None:
        """The wires and channels of the pairs that faults name."""
        ours = [fault for fault in faults if fault.channel == "kv"]
        count = len(self._places)
        for source in range(count) if ours else ():
            for target in range(count):
                mine = [fault for fault in ours if source != target and fault.befalls(source, target)]
                slow = [fault for fault in mine if fault.kind == "slow"]
                other = [fault for fault in mine if fault.kind != "slow"]
                if other:
                    number = (seed * 1_000_003 + source) * 1_000_003 + target
                    self._channels[source, target] = FaultyChannel(self._environment, other, number)
                if slow:
                    self._wires[source, target] = Link(UNLIMITED, name=f"{source} to {target}")
                for fault in slow:
                    for at_ns in (fault.at_ns, fault.end_ns):
                        self._environment.at(at_ns, MESSAGE, partial(self._set_speed, (source, target), slow))

    def _set_speed(self, pair: Pair, faults: Sequence[Fault]) -> None:
        now = self._environment.now
        factors = [fault.factor for fault in faults if fault.at_ns <= now < fault.end_ns]
        bandwidth = min(link.bandwidth for link in self.path(*pair)[:-1])
        self.network.set_bandwidth(self._wires[pair], max(1, int(bandwidth / max(factors))) if factors else UNLIMITED)
