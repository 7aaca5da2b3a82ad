"""How compute units move between live workers: first they are given up, then they are taken.

A worker changes its share between two steps, and a step may take seconds. If another worker took its cores meanwhile,
both would wait for each other's threads at every barrier. So workers that give up units are ordered to at once, and a
worker that only gains is ordered to when those that have its units have answered (or have ended). Workers that trade
units with each other are all ordered at once: none of them could wait for the other.
"""

from diptych.control.cluster.cluster_events import PartitionChanged
from diptych.control.cluster.membership import Membership
from diptych.control.commands import Command, Resize
from diptych.control.compute_share import ComputeShare
from diptych.control.events import Resized


class Partition:
    """The changes of shares that are wanted, and those that were ordered and not answered."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._wanted: dict[int, ComputeShare] = {}  # of workers whose shares were changed since the start
        self._ordered: dict[int, ComputeShare] = {}

    def on_changed(self, event: PartitionChanged, now: int) -> list[Command]:
        """Take in PartitionChanged: note the shares that are wanted, and order what can change first."""
        self._wanted.update(event.shares)
        return self._next_orders()

    def on_up(self) -> list[Command]:
        """A new process is ready, and computes on the share that it was started with."""
        return self._next_orders()

    def on_down(self, worker: int) -> list[Command]:
        """Take in that a worker's process has ended, and uses nothing any more."""
        self._ordered.pop(worker, None)
        return self._next_orders()

    def take_resized(self, worker: int, event: Resized, now: int) -> list[Command]:
        """The worker computes on this share now. When it could not do as it was ordered, it keeps this one, and those
        that wait for its units keep theirs."""
        self._members.on_resized(worker, event.share)
        ordered = self._ordered.pop(worker, None)
        if event.message and self._wanted.get(worker) == ordered:
            for other in self._wanted:
                if self._is_due(other) and not self._gained(other).isdisjoint(event.share.cpus):
                    self._wanted[other] = self._members.infos[other].share
            self._wanted[worker] = event.share
        return self._next_orders()

    def _next_orders(self) -> list[Command]:
        orders: list[Command] = []
        waiting = [worker for worker in self._wanted if self._is_due(worker)]
        for worker in sorted(waiting, key=self._only_gains):
            share = self._wanted[worker]
            if not self._only_gains(worker) or not self._is_held_back(worker):
                self._ordered[worker] = share
                orders.append(Resize(worker, share))
        return orders

    def _is_due(self, worker: int) -> bool:
        """Whether it computes on another share than is wanted and has not been ordered to change that."""
        members = self._members
        return (
            members.is_ready(worker)
            and worker not in self._ordered
            and members.infos[worker].share != self._wanted[worker]
        )

    def _gained(self, worker: int) -> set[int]:
        return set(self._wanted[worker].cpus) - set(self._members.infos[worker].share.cpus)

    def _only_gains(self, worker: int) -> bool:
        return not set(self._members.infos[worker].share.cpus) - set(self._wanted[worker].cpus)

    def _is_held_back(self, worker: int) -> bool:
        """Whether a CPU that it gains is one that another worker is to give up and still uses."""
        infos, gained = self._members.infos, self._gained(worker)
        return any(
            gained & (set(infos[other].share.cpus) - set(self._wanted[other].cpus))
            for other in self._wanted
            if other != worker and self._members.is_ready(other)
        )
