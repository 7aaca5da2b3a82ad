"""Reading a processor from trees of files as in /sys: SMT, offline CPUs, two kinds of cores, quotas, missing files."""

from pathlib import Path

import pytest

from diptych.base.processor import Processor, parse_cpu_list, read_processor

EPYC = (
    "processor\t: 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC 9555 64-Core Processor\n\nprocessor\t: 1\n"
)


def machine(
    root: Path, siblings: str, *, online: str | None = None, name: str = EPYC, file: str = "core_cpus_list"
) -> Path:
    """A tree of a machine whose cores are ``siblings``, such as "0,2 1,3"; the first core has caches."""
    files = {"proc/cpuinfo": name}
    cpus = {cpu: core for core in siblings.split() for cpu in parse_cpu_list(core)}
    for cpu, core in cpus.items():
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/{file}"] = core
    files["sys/devices/system/cpu/online"] = online or ",".join(map(str, cpus))
    everyone = files["sys/devices/system/cpu/online"]
    caches = ((1, "Data", "48K", "0"), (1, "Instruction", "32K", "0"), (2, "Unified", "1024K", "0"))
    for index, (level, kind, size, sharers) in enumerate((*caches, (3, "Unified", "32768K", everyone))):
        folder = f"sys/devices/system/cpu/cpu0/cache/index{index}"
        files |= {f"{folder}/level": str(level), f"{folder}/type": kind, f"{folder}/size": size}
        files[f"{folder}/shared_cpu_list"] = sharers
    return write(root, files)


def write(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    return root


def test_without_smt_each_cpu_is_a_core(tmp_path: Path) -> None:
    found = read_processor(machine(tmp_path, "0 1"), usable=[0, 1])
    assert found == Processor("AMD EPYC 9555", ((0,), (1,)), (0, 1), None, 2**20, 32 * 2**20, 1)
    assert found.describe(2) == "AMD EPYC 9555 (2 of 2 cores, no SMT, L2 1 MiB, L3 32 MiB)"
    assert (found.num_threads, found.spread(found.usable)) == (2, (0, 1))


@pytest.mark.parametrize("file", ["core_cpus_list", "thread_siblings_list"])
def test_siblings_are_one_core_and_its_second_cpu_comes_last(tmp_path: Path, file: str) -> None:
    found = read_processor(machine(tmp_path, "0,4 1,5 2,6 3,7", file=file), usable=range(8))
    assert found.cores == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert (found.num_threads, found.spread(found.usable)) == (4, (0, 1, 2, 3, 4, 5, 6, 7))
    assert found.describe(4) == "AMD EPYC 9555 (4 of 4 cores, SMT, L2 1 MiB, L3 32 MiB)"


def test_a_process_that_may_use_one_sibling_or_both_of_a_core_has_one_core(tmp_path: Path) -> None:
    tree = machine(tmp_path, "0-1 2-3 4-5")
    for usable in ([2], [2, 3]):
        found = read_processor(tree, usable=usable)
        assert (found.num_threads, len(found.cores)) == (1, 3)
    assert read_processor(tree, usable=[1, 2, 3]).cores_of([1, 2, 3]) == ((1,), (2, 3))


def test_offline_cpus_are_in_no_core(tmp_path: Path) -> None:
    found = read_processor(machine(tmp_path, "0,2 1,3", online="0-1,3"), usable=[0, 1, 3])
    assert found.cores == ((0,), (1, 3))


def test_cores_with_and_without_siblings_get_a_thread_each(tmp_path: Path) -> None:
    """Two performance cores with SMT beside four efficiency cores."""
    found = read_processor(machine(tmp_path, "0-1 2-3 4 5 6 7"), usable=range(8))
    assert found.num_threads == 6
    assert found.spread(found.usable)[:6] == (0, 2, 4, 5, 6, 7)


def test_a_machine_that_says_nothing_has_a_core_for_each_cpu(tmp_path: Path) -> None:
    found = read_processor(tmp_path, usable=[3, 5])
    assert (found.cores, found.num_threads, found.quota) == (((3,), (5,)), 2, None)
    assert found.name and found.describe(1) == f"{found.name} (1 of 2 cores, no SMT)"


@pytest.mark.parametrize("broken", ["", "no list", "7-", "0,x"])
def test_files_that_make_no_sense_are_as_good_as_none(tmp_path: Path, broken: str) -> None:
    tree = write(machine(tmp_path, "0 1"), {"sys/devices/system/cpu/cpu1/topology/core_cpus_list": broken})
    write(tree, {"sys/devices/system/cpu/cpu0/cache/index2/size": broken})
    found = read_processor(tree, usable=[0, 1])
    assert (found.cores, found.l2_bytes) == (((0,), (1,)), 0)


@pytest.mark.parametrize(
    ("files", "quota", "threads"),
    [
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None, 4),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5, 2),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5, 1),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "300000 100000"}, 3.0, 3),
        ({"proc/self/cgroup": "0::/outside/x", "sys/fs/cgroup/cpu.max": "100000 100000"}, 1.0, 1),
        (
            {
                "proc/self/cgroup": "4:memory:/\n2:cpu,cpuacct:/docker/1",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            2.0,
            2,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
            4,
        ),
    ],
    ids=str,
)
def test_the_quota_of_a_control_group_limits_the_threads(
    tmp_path: Path, files: dict[str, str], quota: float | None, threads: int
) -> None:
    found = read_processor(write(machine(tmp_path, "0 1 2 3"), files), usable=range(4))
    assert (found.quota, found.num_threads, found.is_limited_by_quota) == (quota, threads, quota is not None)


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("model name : Intel(R) Xeon(R) Platinum 8488C", "Intel Xeon Platinum 8488C"),
        (
            "cpu family : 6\nmodel : 143\nmodel name : Intel(R) Xeon(R) Processor @ 2.70GHz",
            "Intel Xeon Processor family 6 model 143",
        ),
        ("cpu family : 25\nmodel : 17\nmodel name : AMD EPYC", "AMD EPYC family 25 model 17"),
        ("CPU implementer : 0x41\nCPU part : 0xd40", "Neoverse V1"),
    ],
)
def test_names_say_the_kind_and_little_else(tmp_path: Path, cpuinfo: str, name: str) -> None:
    assert read_processor(write(tmp_path, {"proc/cpuinfo": cpuinfo}), usable=[0]).name == name


def test_several_third_caches_are_counted(tmp_path: Path) -> None:
    tree = machine(tmp_path, " ".join(map(str, range(16))))
    write(tree, {"sys/devices/system/cpu/cpu0/cache/index3/shared_cpu_list": "0-7"})
    assert "L3 2 x 32 MiB" in read_processor(tree, usable=range(16)).describe(8)


def test_this_machine_can_be_read() -> None:
    found = read_processor()
    assert 1 <= found.num_threads <= len(found.usable)
    assert set(found.usable) <= {cpu for core in found.cores for cpu in core}
