"""The parts of a fleet without processes: its settings, what an end of a process means, who hangs."""

import logging
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diptych.base.processor import Processor
from diptych.control.cluster.cluster_config import ClusterConfig, cluster_config
from diptych.control.cluster.core_split import CoreSplit
from diptych.control.errors import ConfigError
from diptych.control.router.routing import RoutingName
from diptych.serving.fleet import fleet_plan
from diptych.serving.fleet.exit_status import count_oom_kills, in_words, is_crash
from diptych.serving.fleet.fleet_options import FleetOptions, divide_cores
from diptych.serving.fleet.fleet_plan import plan_fleet
from diptych.serving.fleet.heartbeat_monitor import verdict
from diptych.serving.fleet.joint_ready import joint_ready
from diptych.serving.fleet.shared_memory import default_num_blocks, keeps_order
from diptych.serving.fleet.worker_groups import WorkerGroup
from diptych.serving.kv_memory import kv_geometry_of
from diptych.serving.link.engine_options import DeviceOptions, EngineOptions, MemoryOptions
from diptych.serving.link.heartbeat import Pulse
from diptych.serving.link.messages import Ready

S = 10**9


def ready(capacity: int = 1000, length: int = 512) -> Ready:
    return Ready(4096, length, capacity, 8, 4, [0], "a worker", num_blocks=32, block_size=32)


def test_the_default_fleet_is_one_worker_that_does_both() -> None:
    assert FleetOptions().roles == ("both",)
    assert FleetOptions(prefill=1, decode=2).roles == ("prefill", "decode", "decode")
    assert FleetOptions(prefill=1, both=1).roles == ("prefill", "both")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefill": 1}, "no worker can decode"),
        ({"decode": 2}, "no worker can prefill"),
        ({"both": 0}, "at least one must serve"),
        ({"prefill": -1}, "prefill is -1"),
        ({"transfer": "tcp"}, "no effect with one worker"),
        ({"kv_codec": "int8"}, "no effect with one worker"),
        ({"cluster": cluster_config(disaggregate="always")}, "only one worker"),
        (
            {"prefill": 1, "decode": 1, "transfer": "shared_memory", "kv_codec": "int4"},
            "no effect with transfer shared_",
        ),
        ({"prefill": 1, "decode": 1, "transfer": "carrier_pigeon"}, "one of auto"),
        ({"heartbeat_timeout_s": 0.1}, "at least 0.5"),
    ],
)
def test_settings_that_contradict_or_do_nothing_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FleetOptions(**changes)


def shares(cores: Sequence[tuple[int, ...]], num_workers: int, wish: str | None) -> list[tuple[str | None, int | None]]:
    divided = divide_cores(cores, num_workers, wish)
    return [(share.cpus, share.num_threads) for share in divided if share is not None]


def test_the_cores_are_divided_and_sharing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    cores = [(0,), (1,), (2,), (3,)]
    assert divide_cores(cores, 1, None) == (None,)
    assert shares([*cores, (4,)], 2, None) == [("0,1", 2), ("2,3", 2)]
    assert shares(cores, 2, "1") == [("0", 1), ("1", 1)]
    assert shares(cores[:2], 2, "0-3/4,6") == [("0,1,2,3", None), ("4,6", None)]
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert shares(cores[:2], 3, None) == [("0", 1), ("1", 1), ("0", 1)]
    assert "share a core" in caplog.text
    for wish, words in (("9", "cores_per_worker is 9"), ("0/1/2", "3 lists for 2 workers"), ("a/b", "expected a list")):
        with pytest.raises(ConfigError, match=words):
            divide_cores(cores[:2], 2, wish)


def test_workers_get_whole_cores_and_never_one_sibling_each() -> None:
    assert shares([(0, 2), (1, 3)], 2, None) == [("0,2", 1), ("1,3", 1)]
    assert shares([(0, 1), (2, 3), (4,), (5,)], 2, "2") == [("0,1,2,3", 2), ("4,5", 2)]


@pytest.mark.parametrize(
    ("device", "quota", "told"),
    [
        (DeviceOptions(), None, [("0,2", 1), ("1,3", 1)]),
        (DeviceOptions(threads=2), None, [("0,2", 2), ("1,3", 2)]),
        (DeviceOptions(cores="0,2,1,3"), None, [("0,2", None), ("1,3", None)]),  # a thread for each CPU that was named
        (DeviceOptions(cores="0-1"), None, [("0", None), ("1", None)]),
        (DeviceOptions(), 1.5, [(None, 1), (None, 1)]),  # nothing is pinned: other groups would be pinned there, too
    ],
)
def test_a_fleet_divides_the_cores_of_its_processor(
    device: DeviceOptions, quota: float | None, told: list[tuple[str | None, int | None]]
) -> None:
    processor = Processor("a processor", ((0, 2), (1, 3)), (0, 1, 2, 3), quota)
    plan = plan_fleet(EngineOptions(device=device), FleetOptions(both=2, transfer="tcp"), processor)
    assert [(options.device.cores, options.device.threads) for options in plan.options] == told


def test_a_core_split_is_whole_cores_by_role_for_all_workers_that_may_come() -> None:
    processor = Processor("a processor", ((0, 4), (1, 5), (2, 6), (3, 7)), tuple(range(8)))
    fleet = FleetOptions(prefill=1, decode=1, transfer="tcp", core_split=CoreSplit(prefill=3))
    cpu = EngineOptions(device=DeviceOptions(device="cpu"))
    plan = plan_fleet(cpu, fleet, processor)
    assert [(options.device.cores, options.device.threads) for options in plan.options] == [
        ("0,1,2,4,5,6", 3),
        ("3,7", 1),
    ]
    with pytest.raises(ConfigError, match="4 cores for 5 workers"):
        plan_fleet(cpu, replace(fleet, max_workers=5), processor)
    with pytest.raises(ConfigError, match="core_split and threads exclude each other"):
        plan_fleet(EngineOptions(device=DeviceOptions(device="cpu", threads=1)), fleet, processor)
    for changes in ({"both": 1}, {"both": 2, "cores_per_worker": "1"}):
        with pytest.raises(ConfigError, match="core_split"):
            FleetOptions(core_split=CoreSplit(), **changes)


def test_a_checkpoint_is_not_read_again_for_each_of_equal_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large GGUF file takes a second to read."""
    looks = []
    for look in (fleet_plan.kv_geometry_of, fleet_plan.default_num_blocks):
        monkeypatch.setattr(fleet_plan, look.__name__, lambda *given, look=look: looks.append(look) or look(*given))
    cpu = EngineOptions(device=DeviceOptions(device="cpu"))
    plan = plan_fleet(cpu, FleetOptions(both=8), Processor("p", tuple((cpu,) for cpu in range(8)), tuple(range(8))))
    plan.close()
    assert len(plan.options) == 8 and looks == [kv_geometry_of, default_num_blocks]


def test_each_worker_is_told_its_place() -> None:
    options = EngineOptions(
        memory=MemoryOptions(kv_cache_bytes=2**20), device=DeviceOptions(device="cpu"), record="run.jsonl"
    )
    plan = plan_fleet(options, FleetOptions(prefill=1, decode=1, cores_per_worker="0/1"))
    try:
        first, second = plan.options
        assert first.place is not None and second.place is not None
        assert (first.place.role, second.place.role) == ("prefill", "decode")
        assert (first.device.cores, second.device.cores) == ("0", "1")
        assert (first.record, second.record) == ("run-0.jsonl", "run-1.jsonl")
        assert first.place.secret == second.place.secret and len(first.place.secret) >= 32
        assert first.place.pool is not None and second.place.pool is not None
        assert second.place.pool.first_block == first.place.pool.num_blocks > 0
        assert set(plan.pass_fds) == {first.place.pool.fd, first.place.weights_fd}
        assert str(first.place.secret) not in repr(first)
    finally:
        plan.close()
    alone = plan_fleet(options, FleetOptions())
    assert alone.options == (options,)
    assert alone.cluster == ClusterConfig()
    with pytest.raises(ConfigError, match="GPUs"):
        plan_fleet(
            EngineOptions(device=DeviceOptions(device="cuda")),
            FleetOptions(prefill=1, decode=1, transfer="shared_memory"),
        )


CPU = EngineOptions(device=DeviceOptions(device="cpu"), memory=MemoryOptions(kv_cache_bytes=2**22))
SMALL = WorkerGroup(name="small", replicas=2, max_model_len=1000)
LARGE = WorkerGroup(name="large", max_model_len=4000, kv_cache_bytes=2**24)


def test_each_worker_has_what_its_group_says() -> None:
    plan = plan_fleet(CPU, FleetOptions(groups=(LARGE, SMALL), max_workers=4))
    try:
        assert [options.max_model_len for options in plan.options] == [4000, 1000, 1000, None]
        counts = [options.place.pool.num_blocks for options in plan.options if options.place and options.place.pool]
        assert counts[0] == 4 * counts[1] and counts[1] == counts[2] == counts[3]
        assert plan.copies == (0, 0, 0, 0) and len(plan.memories) == 1
    finally:
        plan.close()


def test_workers_with_other_weights_share_no_memory() -> None:
    rough = WorkerGroup(name="rough", quantize="int8", replicas=2)
    plan = plan_fleet(CPU, FleetOptions(groups=(SMALL, rough)))
    try:
        assert plan.copies == (0, 0, 1, 1)
        assert [plan.memory_domain(worker) for worker in range(4)] == [0, 0, 1, 1]
        places = [options.place for options in plan.options if options.place]
        assert places[0].weights_fd == places[1].weights_fd != places[2].weights_fd
        assert [place.pool.first_block > 0 for place in places if place.pool] == [False, True, False, True]
        assert len(set(plan.pass_fds)) == 4
    finally:
        plan.close()


HOST = msgspec.structs.replace(CPU, memory=MemoryOptions(kv_cache_bytes=2**22, host_bytes=2**22))


@pytest.mark.skipif(not keeps_order(), reason="host blocks are not read by others on this machine")
def test_workers_of_equal_weights_read_each_others_host_blocks() -> None:
    rough = WorkerGroup(name="rough", quantize="int8", replicas=2)
    plan = plan_fleet(HOST, FleetOptions(groups=(SMALL, rough)))
    try:
        assert len(set(plan.host_fds)) == 4 and set(plan.host_fds) <= set(plan.pass_fds)
        assert plan.host_domain == 0  # the model copy says who reads whom
        places = [options.place for options in plan.options if options.place]
        mates = [set(place.host_fds) for place in places]
        assert mates == [{0, 1}, {0, 1}, {2, 3}, {2, 3}]
        assert [place.host_fds[at] for at, place in enumerate(places)] == list(plan.host_fds)
        assert all(os.fstat(fd).st_size == 0 for fd in plan.host_fds)  # each worker lays out its own
    finally:
        plan.close()
    for fd in plan.host_fds:
        with pytest.raises(OSError):
            os.fstat(fd)


@pytest.mark.parametrize("why", ["no host memory", "one worker", "cuda", "no prefix cache", "no index"])
def test_host_blocks_are_a_workers_own_where_they_cannot_be_read_by_others(why: str) -> None:
    options, fleet = HOST, FleetOptions(both=2, transfer="tcp")
    match why:
        case "no host memory":
            options = CPU
        case "one worker":
            fleet = FleetOptions()
        case "cuda":
            options = msgspec.structs.replace(options, device=DeviceOptions(device="cuda"))
        case "no prefix cache":
            memory = msgspec.structs.replace(options.memory, prefix_cache=False)
            options = msgspec.structs.replace(options, memory=memory)
        case "no index":
            fleet = replace(fleet, cluster=cluster_config(routing="round_robin"))
    plan = plan_fleet(options, fleet)
    try:
        assert plan.host_fds == () and plan.host_domain is None
        assert not any(own.place and own.place.host_fds for own in plan.options)
    finally:
        plan.close()


def test_a_prefill_worker_with_other_weights_than_all_decode_workers_is_refused() -> None:
    groups = (WorkerGroup(name="p", role="prefill", quantize="int8"), WorkerGroup(name="d", role="decode"))
    with pytest.raises(ConfigError, match="no worker can decode with the weights of worker 0"):
        plan_fleet(CPU, FleetOptions(groups=groups, transfer="tcp"))


@pytest.mark.parametrize(
    ("cores", "told"),
    [
        ({}, ["0", "1", "2"]),
        ({"large": "1-2"}, ["1,2", "0", "3"]),
        ({"large": 2}, ["0,1", "2", "3"]),
        ({"large": "0", "small": "2-3"}, ["0", "2", "3"]),
    ],
)
def test_groups_that_name_no_cores_divide_what_the_others_leave(cores: dict[str, str | int], told: list[str]) -> None:
    groups = tuple(replace(group, cores=cores.get(group.name)) for group in (LARGE, SMALL))
    processor = Processor("a processor", ((0,), (1,), (2,), (3,)), (0, 1, 2, 3))
    plan = plan_fleet(CPU, FleetOptions(groups=groups, transfer="tcp"), processor)
    assert [options.device.cores for options in plan.options] == told


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"groups": (LARGE, LARGE)}, "two pools have one name"),
        ({"groups": (LARGE,), "both": 2}, "both is 2, but the pools"),
        ({"groups": (LARGE,), "cores_per_worker": "1"}, "cores_per_worker is 1, but the pools"),
        ({"groups": (replace(LARGE, role="prefill"),)}, "no worker can decode"),
    ],
)
def test_groups_that_contradict_other_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FleetOptions(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"replicas": 0}, "replicas of g is 0"),
        ({"max_model_len": 1}, "max_model_len of g is 1"),
        ({"kv_cache_bytes": 1, "kv_cache_tokens": 1}, "give one of them"),
        ({"cores": "a-b"}, "expected a list"),
        ({"cores": 0}, "cores of g is 0"),
    ],
)
def test_a_group_that_no_worker_could_have_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        WorkerGroup(name="g", **changes)


@pytest.mark.parametrize(("routing", "publishes"), [("kv_aware", True), ("round_robin", False)])
def test_workers_say_what_they_cache_only_where_the_router_reads_it(routing: RoutingName, publishes: bool) -> None:
    fleet = FleetOptions(both=2, transfer="tcp", cluster=cluster_config(routing=routing))
    plan = plan_fleet(EngineOptions(device=DeviceOptions(device="cpu")), fleet)
    assert [options.place and options.place.publishes_blocks for options in plan.options] == [publishes, publishes]


def test_a_fleet_holds_what_its_largest_decoder_holds() -> None:
    known = {0: ready(9000, 512), 1: ready(1000, 256), 2: ready(2000, 512)}
    joint = joint_ready({0: "prefill", 1: "decode", 2: "decode"}, known)
    assert (joint.max_model_len, joint.kv_capacity_tokens, joint.max_waiting, joint.max_num_seqs) == (512, 2000, 8, 8)
    assert joint.sequence_limits == [256, 512]
    assert joint.description == "1 prefill + 2 decode; 2 x context 512: a worker; 1 x context 256: a worker"
    equal = joint_ready({0: "prefill", 1: "decode"}, {0: ready(), 1: ready()})
    assert equal.description == "1 prefill + 1 decode; each: a worker"
    assert joint_ready({0: "both"}, {0: ready()}).description == "a worker"


@pytest.mark.parametrize(
    ("status", "killed_by_us", "oom_kills", "crashed"),
    [
        (0, False, 0, False),
        (42, False, 0, True),
        (-signal.SIGSEGV, False, 0, True),
        (-signal.SIGABRT, False, 0, True),
        (-signal.SIGTERM, False, 0, False),
        (-signal.SIGKILL, False, 0, False),
        (-signal.SIGKILL, False, 1, True),
        (-signal.SIGKILL, True, 1, False),
    ],
)
def test_only_an_end_that_a_request_may_have_caused_is_a_crash(
    status: int, killed_by_us: bool, oom_kills: int, crashed: bool
) -> None:
    assert is_crash(status, killed_by_us=killed_by_us, oom_kills=oom_kills) is crashed


def test_an_end_is_told_in_words() -> None:
    assert in_words(3) == "exit status 3"
    assert in_words(-11) == "signal 11"
    assert in_words(-9, oom_kills=2) == "killed by the kernel: out of memory"
    assert in_words(-9, killed_because="it hangs") == "killed: it hangs"


def test_kills_for_memory_are_counted_in_both_kinds_of_cgroups(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert count_oom_kills(tmp_path) == 0
    write("proc/self/cgroup", "0::/box\n")
    write("sys/fs/cgroup/box/memory.events", "low 0\noom 3\noom_kill 2\n")
    assert count_oom_kills(tmp_path) == 2
    write("proc/self/cgroup", "5:cpu:/box\n4:memory:/box\n0::/\n")
    write("sys/fs/cgroup/memory/box/memory.oom_control", "under_oom 0\noom_kill 7\n")
    assert count_oom_kills(tmp_path) == 7


def test_silence_and_an_endless_step_are_hangs_and_a_long_one_is_not() -> None:
    now = 1000 * S
    assert verdict(Pulse(now - 9 * S, 5, 0, 0), now, 10.0) == ""
    assert "no sign of life" in verdict(Pulse(now - 11 * S, 5, 0, 0), now, 10.0)
    assert verdict(Pulse(now, 5, now - 59 * S, S), now, 10.0) == ""
    assert verdict(Pulse(now, 5, now - 90 * S, 20 * S), now, 10.0) == ""
    assert "does not end" in verdict(Pulse(now, 5, now - 61 * S, S), now, 10.0)
