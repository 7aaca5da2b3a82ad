"""Compute units move between workers: given up first, taken afterwards, in whole cores."""

import random

import pytest

from diptych.control.cluster.cluster_core import ClusterCore
from diptych.control.cluster.cluster_events import PartitionChanged, Reported, WorkerDown, WorkerUp
from diptych.control.cluster.core_split import CoreSplit, parse_core_split, split_for
from diptych.control.commands import Command, Resize
from diptych.control.compute_share import ComputeShare, cpu_ranges
from diptych.control.errors import ConfigError
from diptych.control.events import Resized
from diptych.control.router.topology import ROLES, WorkerInfo


def on(*cpus: int) -> ComputeShare:
    return ComputeShare(cpus, len(cpus))


class Machine:
    """A ClusterCore and the shares that its workers hold."""

    def __init__(self, *shares: ComputeShare) -> None:
        self.core = ClusterCore()
        self.started = shares
        for worker in range(len(shares)):
            self.up(worker)

    def up(self, worker: int) -> list[Command]:
        info = WorkerInfo(worker, "both", 100, 16, share=self.started[worker])
        return self.core.on_event(WorkerUp(info), 0)

    def change(self, **shares: ComputeShare) -> list[Command]:
        return self.core.on_event(PartitionChanged(tuple((int(name[1:]), share) for name, share in shares.items())), 0)

    def resized(self, worker: int, share: ComputeShare, message: str = "") -> list[Command]:
        return self.core.on_event(Reported(worker, [Resized(0, share, message)]), 0)

    def share(self, worker: int) -> ComputeShare:
        return self.core.members.infos[worker].share


def test_a_core_is_given_up_before_another_worker_takes_it() -> None:
    machine = Machine(on(0, 1, 2), on(3))
    assert machine.change(w0=on(0), w1=on(1, 2, 3)) == [Resize(0, on(0))]
    assert machine.share(0) == on(0, 1, 2)
    assert machine.resized(0, on(0)) == [Resize(1, on(1, 2, 3))]
    assert machine.resized(1, on(1, 2, 3)) == []
    assert (machine.share(0), machine.share(1)) == (on(0), on(1, 2, 3))


def test_workers_that_trade_cores_do_not_wait_for_each_other() -> None:
    machine = Machine(on(0), on(1))
    assert machine.change(w0=on(1), w1=on(0)) == [Resize(0, on(1)), Resize(1, on(0))]


def test_cores_of_a_worker_that_ended_are_free_at_once_and_its_next_process_gets_its_share() -> None:
    machine = Machine(on(0, 1), on(2))
    assert machine.change(w0=on(0), w1=on(1, 2)) == [Resize(0, on(0))]
    assert machine.core.on_event(WorkerDown(0), 0) == [Resize(1, on(1, 2))]
    assert machine.up(0) == [Resize(0, on(0))]


def test_a_share_that_cannot_be_taken_leaves_everyone_with_what_they_have() -> None:
    machine = Machine(on(0, 1), on(2))
    machine.change(w0=on(0), w1=on(1, 2))
    assert machine.resized(0, on(0, 1), "the CPU is gone") == []
    assert (machine.share(0), machine.share(1)) == (on(0, 1), on(2))
    assert machine.change(w1=on(2, 3)) == [Resize(1, on(2, 3))]


def test_a_newer_share_is_ordered_when_the_older_one_is_answered() -> None:
    machine = Machine(on(0, 1))
    assert machine.change(w0=on(0)) == [Resize(0, on(0))]
    assert machine.change(w0=on(1)) == []
    assert machine.resized(0, on(0)) == [Resize(0, on(1))]


def test_random_changes_end_with_every_worker_on_its_share_and_no_core_used_twice() -> None:
    rng = random.Random(5)
    for _ in range(200):
        num_workers = rng.randrange(1, 5)
        cores = [(cpu,) for cpu in range(rng.randrange(num_workers, 9))]
        split = CoreSplit(*(rng.randrange(1, 5) for _ in ROLES))
        held = split.divide(cores, {worker: rng.choice(ROLES) for worker in range(num_workers)}, {})
        machine = Machine(*(held[worker] for worker in range(num_workers)))
        wanted = split.divide(cores, {worker: rng.choice(ROLES) for worker in range(num_workers)}, held)
        orders = machine.core.on_event(PartitionChanged(tuple(wanted.items())), 0)
        while orders:
            order = orders.pop(rng.randrange(len(orders)))
            assert isinstance(order, Resize)
            orders += machine.resized(order.worker, order.share)
            trades = any(set(held[worker].cpus) - set(wanted[worker].cpus) and set(wanted[worker].cpus) -
                         set(held[worker].cpus) for worker in held)  # fmt: skip
            used = [cpu for worker in held for cpu in machine.share(worker).cpus]
            assert trades or len(used) == len(set(used))
        assert {worker: machine.share(worker) for worker in held} == wanted
        assert sorted(cpu for share in wanted.values() for cpu in share.cpus) == [cpu for (cpu,) in cores]


def test_cores_follow_the_weights_of_the_roles_and_every_worker_has_one() -> None:
    split = parse_core_split("prefill=3,decode=1")
    assert split.counts({0: "prefill", 1: "decode"}, 4) == {0: 3, 1: 1}
    assert split.counts({0: "prefill", 1: "decode"}, 8) == {0: 6, 1: 2}
    assert split.counts({0: "prefill", 1: "prefill", 2: "decode"}, 7) == {0: 3, 1: 3, 2: 1}
    assert split.counts({0: "prefill", 1: "decode"}, 2) == {0: 1, 1: 1}
    with pytest.raises(ConfigError, match="core_split: 1 cores for 2 workers"):
        split.counts({0: "prefill", 1: "decode"}, 1)


def test_siblings_stay_together_and_a_flip_moves_only_the_cores_that_it_must() -> None:
    split, cores = CoreSplit(prefill=3), [(0, 4), (1, 5), (2, 6), (3, 7)]
    before = split.divide(cores, {0: "prefill", 1: "decode"}, {})
    assert before == {0: ComputeShare((0, 1, 2, 4, 5, 6), 3), 1: ComputeShare((3, 7), 1)}
    after = split.divide(cores, {0: "decode", 1: "prefill"}, before)
    assert after == {0: ComputeShare((0, 4), 1), 1: ComputeShare((1, 2, 3, 5, 6, 7), 3)}


def test_a_rule_is_found_for_every_division_that_weights_can_give_and_gives_it_whatever_the_numbers() -> None:
    rng, num_found = random.Random(7), 0
    for _ in range(2000):
        workers = {role: rng.randrange(1, 4) for role in rng.sample(ROLES, rng.randrange(2, 4))}
        cores = {role: count + rng.randrange(9) for role, count in workers.items()}
        split = split_for(cores, workers)
        if split is None:
            assert any(cores[role] % count for role, count in workers.items()), "whole cores for each are no ties"
            continue
        num_found += 1
        numbered = [role for role, count in workers.items() for _ in range(count)]
        rng.shuffle(numbered)
        counts = split.counts(dict(enumerate(numbered)), sum(cores.values()))
        for role in workers:
            assert sum(counts[number] for number, other in enumerate(numbered) if other == role) == cores[role]
    assert num_found > 1200
    assert split_for({"prefill": 5, "decode": 3}, {"prefill": 1, "decode": 1}) == CoreSplit(5, 3, 4)
    assert split_for({"prefill": 5, "decode": 3}, {"prefill": 2, "decode": 2}) is None


@pytest.mark.parametrize("text", ["", "prefill", "prefill=x", "writer=2", "prefill=1,prefill=2", "prefill=0"])
def test_a_split_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="core_split"):
        parse_core_split(text)


def test_a_list_of_cpus_is_as_short_as_it_can_be() -> None:
    assert cpu_ranges((0, 1, 2, 8)) == "0-2,8" and cpu_ranges((3,)) == "3"
    assert str(on(0, 1)) == "CPUs 0-1, 2 threads" and str(ComputeShare(num_sms=66)) == "66 multiprocessors"
