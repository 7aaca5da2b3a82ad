"""Fleets on several hosts: whatever fails between which two, nothing is lost, nothing counts twice, and all recover."""

from dataclasses import replace
from typing import Any

import pytest

from diptych.control.cluster.cluster_events import WorkerDown, WorkerUp
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.simulation.fault_places import SCOPES, befall, workers_at
from diptych.simulation.faults import Fault, FaultKind, Watch
from diptych.simulation.fleet.pools import Pools
from diptych.simulation.prepare import prepare
from diptych.simulation.scenario import Scenario
from diptych.simulation.settings import settings_from
from diptych.workload.spec import RequestSpec
from tests.laws import law
from tests.simulation.fault_schedules import AuditedCluster, run_schedule
from tests.simulation.host_schedules import check_spread_strides, random_place_faults, restart_schedule, run_spread
from tests.simulation.scenarios import front_end
from tests.simulation.test_faults import complete_answers, two_workers

PREFILL, DECODE = 0, 1
WHOLE_NS = 10 * NS_PER_S


@law(weight=1.5)
def test_every_law_holds_among_hosts_on_a_bad_day(seed: int) -> None:
    run_spread(seed)


@law(weight=1.0)
def test_strides_give_the_log_of_single_steps_among_hosts_too(seed: int) -> None:
    check_spread_strides(seed, run_spread(seed))


@law(weight=1.5)
def test_every_law_holds_when_the_front_end_dies_too(seed: int) -> None:
    cluster = run_spread(seed, restart_schedule)
    if seed % 6 == 0:
        check_spread_strides(seed, cluster, restart_schedule)


class WatchedCluster(AuditedCluster):
    """Notes when workers come and go, as the front end has it."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.losses: list[tuple[int, bool]] = []  # worker, whether it crashed
        self.num_ups = 0
        self.watcher = lambda event, commands, now: self._note(event)

    def _note(self, event: object) -> None:
        if isinstance(event, WorkerDown):
            self.losses.append((event.worker, event.crashed))
        self.num_ups += isinstance(event, WorkerUp)


def watched(scenario: Scenario) -> WatchedCluster:
    cluster = WatchedCluster(scenario)
    cluster.run(4000 * NS_PER_S)
    return cluster


# -- the front end does not see a worker ------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", [PREFILL, DECODE])
@pytest.mark.parametrize("at_ms", [1, 30, 75, 140, 250, 400])
@pytest.mark.parametrize("duration_ms", [5, 300])
def test_a_worker_that_is_cut_off_comes_back_as_it_was(worker: int, at_ms: int, duration_ms: int) -> None:
    """Given up after 50 ms, or at once when it dials again: either way it is lost once, and its process goes on."""
    cut = Fault("isolate", worker, at_ms * NS_PER_MS, duration_ms * NS_PER_MS)
    scenario = two_workers(cut, watch=Watch(heartbeat_ns=50 * NS_PER_MS))
    assert complete_answers(run_schedule(scenario)) == 3
    cluster = watched(scenario)
    assert cluster.losses == [(worker, False)]  # no request is blamed for it
    assert cluster.num_ups == 3
    assert cluster.lives.life(worker) == 0


def test_what_a_worker_holds_outlives_its_connection() -> None:
    """The same prompt again, after the worker was cut off: most of it is in the prefix cache."""
    specs = [RequestSpec(arrival_ns=at * NS_PER_S, prompt_tokens=2000, output_tokens=5, hash_ids=tuple(range(4)))
             for at in (0, 5)]  # fmt: skip
    cut = Fault("isolate", 0, 2 * NS_PER_S, NS_PER_S)
    scenario = two_workers(cut, workload=specs, pools=Pools(num_both=1, kv_bytes_per_token=10**5))
    kept = run_schedule(replace(scenario, cluster=front_end("kv_aware")))
    lost = run_schedule(replace(scenario, cluster=front_end("kv_aware"), faults=(replace(cut, kind="crash"),)))
    assert kept.workers[0].usage.busy_prefill_ns < lost.workers[0].usage.busy_prefill_ns


def test_a_worker_that_is_cut_off_again_and_crashes_meanwhile_is_used_when_all_is_over() -> None:
    faults = (
        Fault("isolate", DECODE, 100 * NS_PER_MS, 400 * NS_PER_MS),
        Fault("isolate", DECODE, 300 * NS_PER_MS, 500 * NS_PER_MS),
        Fault("crash", DECODE, 600 * NS_PER_MS, 10 * NS_PER_MS),
    )
    scenario = replace(two_workers(None), faults=faults, watch=Watch(heartbeat_ns=50 * NS_PER_MS))
    cluster = watched(scenario)
    assert cluster.losses == [(DECODE, False)]
    assert complete_answers(run_schedule(scenario)) == 3
    assert cluster.lives.life(DECODE) == 1
    assert cluster.core.members.is_ready(DECODE)


# -- the front end dies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_ms", [1, 30, 75, 140, 250, 400])
@pytest.mark.parametrize("duration_ms", [1, 300])
def test_streams_go_on_with_the_next_front_end(at_ms: int, duration_ms: int) -> None:
    """The workers' processes go on; each stream is resumed once, after the tokens that its client has."""
    crash = Fault("front_end_crash", 0, at_ms * NS_PER_MS, duration_ms * NS_PER_MS)
    scenario = two_workers(crash)
    cluster = run_schedule(scenario)
    assert complete_answers(cluster) == 3
    assert [cluster.lives.life(worker) for worker in (PREFILL, DECODE)] == [0, 0]
    late_ns = cluster.last_end_ns - run_schedule(replace(scenario, faults=())).last_end_ns
    assert late_ns < (duration_ms + 500) * NS_PER_MS


def test_the_next_front_end_finds_what_the_workers_have_cached() -> None:
    specs = [RequestSpec(arrival_ns=at * NS_PER_S, prompt_tokens=2000, output_tokens=5, hash_ids=tuple(range(4)))
             for at in (0, 5)]  # fmt: skip
    crash = Fault("front_end_crash", 0, 2 * NS_PER_S, NS_PER_S)
    scenario = two_workers(crash, workload=specs, pools=Pools(num_both=1, kv_bytes_per_token=10**5))
    scenario = replace(scenario, cluster=front_end("kv_aware"))
    kept, quiet = run_schedule(scenario), run_schedule(replace(scenario, faults=()))
    assert kept.workers[0].usage.busy_prefill_ns == quiet.workers[0].usage.busy_prefill_ns


def test_a_front_end_that_dies_again_while_there_is_none_begins_later() -> None:
    faults = (
        Fault("front_end_crash", 0, 100 * NS_PER_MS, 400 * NS_PER_MS),
        Fault("front_end_crash", 0, 300 * NS_PER_MS, 900 * NS_PER_MS),
        Fault("front_end_crash", 0, 400 * NS_PER_MS, 10 * NS_PER_MS),
        Fault("crash", DECODE, 600 * NS_PER_MS, 10 * NS_PER_MS),
    )
    cluster = watched(replace(two_workers(None), faults=faults))
    assert complete_answers(run_schedule(replace(two_workers(None), faults=faults))) == 3
    assert cluster.losses == [] and cluster.num_ups == 4
    assert cluster.lives.life(DECODE) == 1
    assert cluster.last_end_ns > 1200 * NS_PER_MS


def test_what_comes_while_there_is_no_front_end_waits_and_clients_may_leave_meanwhile() -> None:
    specs = [
        RequestSpec(arrival_ns=50 * NS_PER_MS, prompt_tokens=100, output_tokens=400, abort_after_ns=NS_PER_S),
        RequestSpec(arrival_ns=800 * NS_PER_MS, prompt_tokens=100, output_tokens=5),
    ]
    crash = Fault("front_end_crash", 0, 500 * NS_PER_MS, 2 * NS_PER_S)
    cluster = run_schedule(two_workers(crash, workload=specs))
    assert complete_answers(cluster) == 1
    assert cluster.last_end_ns > 2500 * NS_PER_MS


# -- workers do not see each other ------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["both", "to", "from"])
def test_two_workers_that_do_not_see_each_other_work_alone(direction: Any) -> None:
    fault = Fault("link_loss", PREFILL, 0, WHOLE_NS, channel="kv", peer=DECODE, direction=direction)
    cluster = run_schedule(two_workers(fault, watch=Watch(resume_ns=20 * NS_PER_MS)))
    assert complete_answers(cluster) == 3
    # KV leaves the prefill worker; when only answers are lost, handoffs arrive all the same
    assert bool(cluster.core.counts["lost_transfer"]) == (direction != "to")
    assert bool(cluster.core.counts["handoffs"]) == (direction == "to")


def test_a_short_partition_is_waited_out() -> None:
    fault = Fault("link_loss", PREFILL, 60 * NS_PER_MS, 15 * NS_PER_MS, channel="kv", peer=DECODE)
    cluster = run_schedule(two_workers(fault, watch=Watch(resume_ns=20 * NS_PER_MS)))
    assert complete_answers(cluster) == 3
    assert cluster.core.counts["lost_transfer"] == 0


@pytest.mark.parametrize("kind", ["delay", "reorder", "duplicate", "repeat"])
@pytest.mark.parametrize("direction", ["both", "to", "from"])
def test_kv_may_be_late_mixed_up_or_doubled(kind: FaultKind, direction: Any) -> None:
    fault = Fault(kind, DECODE, 0, WHOLE_NS, 9.0, "kv", direction)
    cluster = run_schedule(two_workers(fault))
    assert complete_answers(cluster) == 3
    assert cluster.core.counts["handoffs"] == 3
    assert cluster.transfers is not None
    assert cluster.transfers.num_bytes == 3 * 2000 * 100_000


@pytest.mark.parametrize("kind", ["link_loss", "delay", "reorder", "duplicate", "repeat"])
@pytest.mark.parametrize("direction", ["to", "from"])
def test_one_direction_of_the_control_channel_may_fail(kind: FaultKind, direction: Any) -> None:
    for worker in (PREFILL, DECODE):
        fault = Fault(kind, worker, 50 * NS_PER_MS, 300 * NS_PER_MS, 9.0, direction=direction)
        assert complete_answers(run_schedule(two_workers(fault))) == 3


def test_all_channels_at_once() -> None:
    kinds: tuple[FaultKind, ...] = ("delay", "reorder", "duplicate", "repeat")
    control = [Fault(kind, worker, 0, WHOLE_NS, 5.0) for kind in kinds for worker in (PREFILL, DECODE)]
    kv = [Fault(kind, PREFILL, 0, WHOLE_NS, 5.0, "kv") for kind in kinds]
    assert complete_answers(run_schedule(replace(two_workers(None), faults=(*control, *kv)))) == 3


# -- far, slow and lying ----------------------------------------------------------------------------------------------


def one_sender(num_decode: int, **pools: Any) -> Scenario:
    """One request after the other, of 2,000 tokens with 100 kB each, from one prefill worker."""
    specs = [RequestSpec(arrival_ns=number * NS_PER_S, prompt_tokens=2000, output_tokens=5) for number in range(20)]
    return two_workers(
        None,
        workload=specs,
        pools=Pools(num_prefill=1, num_decode=num_decode, kv_bytes_per_token=100_000, **{"link": "eth100"} | pools),
        cluster=front_end("kv_aware", "always"),
    )


def handoffs_to(scenario: Scenario) -> list[int]:
    cluster = run_schedule(scenario)
    assert complete_answers(cluster) == 20
    table = cluster.collector.requests
    return [table.worker[list(table.number).index(number)] for number in range(20)]


def test_a_worker_of_another_rack_is_avoided() -> None:
    """Workers 0 and 2 are in one rack, 1 in the other; of two that are equally near, the first one is taken."""
    assert handoffs_to(one_sender(2)) == [1] * 20
    assert handoffs_to(one_sender(2, num_racks=1)) == [1] * 20
    assert handoffs_to(one_sender(2, link="eth400", num_racks=2, uplink="eth100")) == [2] * 20


def test_a_slow_path_is_found_out_by_what_travels_over_it() -> None:
    """The labels say that all are equally near; the path to worker 1 carries a hundredth."""
    slow = Fault("slow", 1, 0, 3600 * NS_PER_S, 100.0, "kv", peer=0)
    scenario = replace(one_sender(2), faults=(slow,))
    targets = handoffs_to(scenario)
    assert targets[0] == 1
    assert set(targets[2:]) == {2}  # the first handoff takes almost two seconds


def test_a_path_that_was_slow_is_tried_again() -> None:
    slow = Fault("slow", 1, 0, 30 * NS_PER_S, 100.0, "kv", peer=0)
    late = [RequestSpec(arrival_ns=at * NS_PER_S, prompt_tokens=2000, output_tokens=5) for at in range(0, 100, 5)]
    targets = handoffs_to(replace(one_sender(2), faults=(slow,), workload=late))
    assert targets[0] == targets[-1] == 1
    assert targets.count(2) > 5


def test_hosts_without_shared_memory_copy_kv_and_need_no_network() -> None:
    near = run_schedule(one_sender(1, num_hosts=1, shares_memory=False))
    assert near.transfers is not None
    assert near.transfers.num_bytes == 20 * 2000 * 100_000
    assert near.num_borrowed_steps == 0
    network = Fault("link_down", 0, 0, 3600 * NS_PER_S)
    apart = run_schedule(replace(one_sender(1, num_hosts=1, shares_memory=False), faults=(network,)))
    assert apart.core.counts["handoffs"] == 20


# -- places -----------------------------------------------------------------------------------------------------------

FIVE = Pools(num_prefill=2, num_decode=3, kv_bytes_per_token=10, num_hosts=3, shares_memory=False, num_racks=2)


def test_places_have_workers() -> None:
    assert [workers_at(FIVE, "host", host) for host in range(4)] == [[0, 3], [1, 4], [2], []]
    assert [workers_at(FIVE, "rack", rack) for rack in range(3)] == [[0, 2, 3], [1, 4], []]
    assert workers_at(FIVE, "replica", 4) == [4]
    alone = replace(FIVE, num_hosts=0, shares_memory=True, num_racks=0)
    assert workers_at(alone, "host", 2) == [2]
    assert workers_at(alone, "rack", 0) == [0, 1, 2, 3, 4]


def test_a_partition_is_between_all_pairs() -> None:
    fault = Fault("link_loss", 0, 0, 1, channel="kv")
    pairs = [(each.worker, each.peer) for each in befall(fault, [0, 3], [1, 3])]
    assert pairs == [(0, 1), (0, 3), (3, 1)]


def test_faults_of_places_are_drawn_from_their_seed() -> None:
    more: dict[str, int] = {"until_ns": NS_PER_S, "count": 30, "mean_duration_ns": NS_PER_MS}
    faults = random_place_faults(3, FIVE, **more)
    assert faults == random_place_faults(3, FIVE, **more) != random_place_faults(4, FIVE, **more)
    assert {fault.channel for fault in faults} == {"control", "kv"}
    shared = replace(FIVE, shares_memory=True)
    assert all(fault.kind != "isolate" for fault in random_place_faults(3, shared, **more))


def fleet_settings(**fault: Any) -> Scenario:
    raw = {
        "model": "llama-3.1-8b",
        "hardware": "h100-sxm",
        "workload": {"num_requests": 2},
        "pools": {"prefill": 2, "decode": 3, "hosts": 3, "racks": 2, "shares_memory": False, "uplink": "eth100"},
        "faults": [{"kind": "crash", "at_s": 1, "duration_s": 2, **fault}],
    }
    return prepare(settings_from(raw)).scenario


def test_settings_name_replicas_hosts_and_racks() -> None:
    assert [fault.worker for fault in fleet_settings().faults] == [0]
    assert [fault.worker for fault in fleet_settings(host=1).faults] == [1, 4]
    partition = fleet_settings(kind="link_loss", channel="kv", rack=0, peer=1, direction="to")
    assert [(fault.worker, fault.peer, fault.direction) for fault in partition.faults] == [
        (worker, peer, "to") for worker in (0, 2, 3) for peer in (1, 4)
    ]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"host": 3}, "faults[0].host is 3; no worker is there"),
        ({"replica": 5}, "faults[0].replica is 5; it must be below replicas (5)"),
        ({"host": 0, "rack": 0}, "a fault of host and rack; name one of them"),
        ({"host": 0, "peer": 1}, "faults[0].peer is 1; only the channel kv has peers"),
        ({"channel": "kv"}, "kind is crash; on the channel kv one of"),
        ({"direction": "to"}, "direction of crash is to; only messages have one"),
    ],
)
def test_what_no_fault_can_be_is_refused(fault: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fleet_settings(**fault)
    assert words in caught.value.message


def test_workers_of_one_memory_cannot_be_isolated() -> None:
    near = Pools(num_prefill=1, num_decode=1, kv_bytes_per_token=1, link="shared_memory")
    with pytest.raises(ConfigError, match="worker 1 cannot be isolated"):
        two_workers(Fault("isolate", 1, 0, 1), pools=near)


def test_uplinks_need_racks_and_copies_need_hosts() -> None:
    with pytest.raises(ConfigError, match="num_racks is 0"):
        Pools(num_both=2, kv_bytes_per_token=1, uplink="eth100")
    with pytest.raises(ConfigError, match="num_hosts is 0"):
        Pools(num_both=2, kv_bytes_per_token=1, shares_memory=False)
    assert SCOPES == ("replica", "host", "rack")
