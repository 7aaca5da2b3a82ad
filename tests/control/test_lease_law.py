"""Renewals come in time: while a handoff is under way, no lease on either worker runs out, however long it is, if
messages take less than half of that; and when renewals stop, it runs out after exactly its length."""

import random

import pytest

from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.cluster.cluster_core import ClusterCore
from diptych.control.cluster.cluster_events import Arrived, Reported, Tick, WorkerUp
from diptych.control.commands import Prefill, Renew, Reserve
from diptych.control.engine.leases import Leases
from diptych.control.events import HandoffReserved
from diptych.control.request import Submission
from diptych.control.router.routing import RoutingConfig
from diptych.control.router.topology import WorkerInfo


class Workers:
    """The leases of both workers of a fleet of one prefill and one decode worker, with commands on their way."""

    def __init__(self, lease_ns: int, delay_ns: int) -> None:
        self.core = ClusterCore(ClusterConfig(routing=RoutingConfig(disaggregate="always"), lease_ns=lease_ns))
        self.leases = {0: Leases(), 1: Leases()}
        self.delay_ns = delay_ns
        self.expired: list[tuple[int, str, int]] = []
        self._on_their_way: list[tuple[int, Renew]] = []
        self.core.on_event(WorkerUp(WorkerInfo(0, "prefill", 100, 16)), 0)
        self.core.on_event(WorkerUp(WorkerInfo(1, "decode", 100, 16)), 0)

    def handle(self, event: Arrived | Reported | Tick, now: int) -> None:
        """The core's answer to an event: workers that compute or hold blocks grant their leases when they get it."""
        for command in self.core.on_event(event, now):
            if isinstance(command, Reserve | Prefill):
                self.leases[command.worker].grant(command.attempt_id, command.lease_ns, now)
            elif isinstance(command, Renew):
                self._on_their_way.append((now + self.delay_ns, command))

    def advance(self, now: int) -> None:
        """Deliver what has arrived by now, then look for what has run out."""
        while self._on_their_way and self._on_their_way[0][0] <= now:
            at, command = self._on_their_way.pop(0)
            self.expire(at)
            self.leases[command.worker].renew(command.attempt_ids, at)
        self.expire(now)

    def expire(self, now: int) -> None:
        for worker, leases in self.leases.items():
            while (at := leases.next_expiry_ns) is not None and at <= now:
                self.expired += [(worker, attempt_id, at) for attempt_id in leases.take_expired(at)]


@pytest.mark.parametrize("lease_ns", [3, 4, 5, 7, 9, 100, 101, 60 * 10**9])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.45])
def test_no_lease_of_a_handoff_under_way_runs_out(lease_ns: int, share: float) -> None:
    rng = random.Random(lease_ns)
    fleet = Workers(lease_ns, int(share * lease_ns))
    now = 0
    num_renewed = 0
    for number in range(8):
        name = f"r{number}"
        fleet.handle(Arrived(Submission(name, 100, 8)), now)
        fleet.handle(Reported(1, (HandoffReserved(now, name, 16, ((1, 2),)),)), now)
        for _ in range(rng.randint(1, 6)):
            due = fleet.core.next_time()
            assert due is not None and now <= due <= now + lease_ns  # the driver is asked to come back in time
            fleet.advance(due)
            before = len(fleet._on_their_way)
            fleet.handle(Tick(), due)
            num_renewed += len(fleet._on_their_way) > before
            now = due
    assert num_renewed and fleet.expired == []
    assert num_renewed <= 5 * (now // lease_ns + 1)  # and not all the time


@pytest.mark.parametrize("lease_ns", [9, 1000])
def test_without_renewals_every_lease_runs_out_after_its_length(lease_ns: int) -> None:
    fleet = Workers(lease_ns, 0)
    fleet.handle(Arrived(Submission("a", 100, 8)), 0)
    fleet.handle(Reported(1, (HandoffReserved(0, "a", 16, ((1, 2),)),)), 0)
    fleet.advance(lease_ns - 1)
    assert fleet.expired == []
    fleet.advance(10 * lease_ns)
    assert sorted(fleet.expired) == [(0, "a", lease_ns), (1, "a", lease_ns)]


def test_a_lease_of_no_length_is_never_renewed_and_never_ends() -> None:
    fleet = Workers(0, 0)
    fleet.handle(Arrived(Submission("a", 100, 8)), 0)
    fleet.handle(Reported(1, (HandoffReserved(0, "a", 16, ((1, 2),)),)), 0)
    fleet.handle(Tick(), 10**12)
    fleet.advance(10**15)
    assert fleet.expired == [] and not fleet._on_their_way
