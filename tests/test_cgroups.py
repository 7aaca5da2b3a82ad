"""The memory that control groups leave, from trees of files as in /sys and /proc."""

from pathlib import Path

import pytest

from diptych.base.cgroups import UNKNOWN_MEMORY_BYTES, available_memory_bytes, memory_limit_bytes
from diptych.control.errors import ConfigError
from diptych.runtime.kv_cache.checkpoint_geometry import read_kv_geometry
from diptych.serving.fleet.shared_memory import MIN_BLOCKS, default_num_blocks
from diptych.serving.link.engine_options import BUNDLED_MODEL, EngineOptions
from diptych.serving.start_checks import check_kv_memory

GIB = 2**30
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


def tree(root: Path, files: dict[str, object]) -> Path:
    """A machine with 64 GiB to spare, and these files."""
    for path, content in {"proc/meminfo": f"MemTotal: 9\nMemAvailable: {64 * 2**20} kB", **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{content}\n")
    return root


@pytest.mark.parametrize(
    ("files", "limit", "available"),
    [
        ({}, None, 64 * GIB),
        ({"proc/self/cgroup": "0::/", f"{V2}/memory.max": "max", f"{V2}/memory.current": 9 * GIB}, None, 64 * GIB),
        ({"proc/self/cgroup": "0::/", f"{V2}/memory.max": 8 * GIB}, 8 * GIB, 8 * GIB),
        (
            {
                "proc/self/cgroup": "0::/",
                f"{V2}/memory.max": 8 * GIB,
                f"{V2}/memory.current": 7 * GIB,
                f"{V2}/memory.stat": f"anon {4 * GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}",
            },
            8 * GIB,
            4 * GIB,
        ),
        ({"proc/self/cgroup": "0::/", f"{V2}/memory.max": 8 * GIB, f"{V2}/memory.high": 6 * GIB}, 6 * GIB, 6 * GIB),
        ({"proc/self/cgroup": "0::/", f"{V2}/memory.max": 100 * GIB}, 100 * GIB, 64 * GIB),
        ({"proc/self/cgroup": "0::/", f"{V2}/memory.max": GIB, f"{V2}/memory.current": 2 * GIB}, GIB, 0),
        (  # the group above is nearly full
            {
                "proc/self/cgroup": "0::/a/b",
                f"{V2}/a/b/memory.max": 4 * GIB,
                f"{V2}/a/memory.max": 8 * GIB,
                f"{V2}/a/memory.current": 7 * GIB,
            },
            4 * GIB,
            GIB,
        ),
        ({"proc/self/cgroup": "0::/outside/x", f"{V2}/memory.max": 5 * GIB}, 5 * GIB, 5 * GIB),
        (
            {
                "proc/self/cgroup": "4:memory:/docker/1\n2:cpu,cpuacct:/docker/1\n0::/",
                f"{V1}/memory.limit_in_bytes": 4 * GIB,
                f"{V1}/memory.usage_in_bytes": 3 * GIB,
                f"{V1}/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}",
            },
            4 * GIB,
            2 * GIB,
        ),
        ({"proc/self/cgroup": "4:memory:/", f"{V1}/memory.limit_in_bytes": 2**63 - 4096}, None, 64 * GIB),
        ({"proc/self/cgroup": "4:memory:/", f"{V1}/memory.limit_in_bytes": "nonsense"}, None, 64 * GIB),
    ],
    ids=str,
)
def test_the_smallest_of_what_all_groups_and_the_machine_leave(
    tmp_path: Path, files: dict[str, object], limit: int | None, available: int
) -> None:
    root = tree(tmp_path, files)
    assert (memory_limit_bytes(root), available_memory_bytes(root)) == (limit, available)


def test_where_the_kernel_says_nothing_there_are_some_gibibytes(tmp_path: Path) -> None:
    assert (memory_limit_bytes(tmp_path), available_memory_bytes(tmp_path)) == (None, UNKNOWN_MEMORY_BYTES)


def test_a_kv_cache_that_the_group_cannot_hold_is_refused(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/", f"{V2}/memory.max": GIB})
    check_kv_memory(GIB, root)
    with pytest.raises(ConfigError, match=r"is 2\.0 GiB; the control group of this process has 1\.0 GiB"):
        check_kv_memory(2 * GIB, root)
    with pytest.raises(ConfigError, match="this machine has"):
        check_kv_memory(2**60, tmp_path / "none")


def test_the_default_kv_cache_fits_into_the_group(tmp_path: Path) -> None:
    options, geometry = EngineOptions(), read_kv_geometry(BUNDLED_MODEL, "auto", 32)

    def default_bytes(name: str, limit: int, num_workers: int = 1) -> int:
        root = tree(tmp_path / name, {"proc/self/cgroup": "0::/", f"{V2}/memory.max": limit})
        return default_num_blocks(options, geometry, num_workers, root=root) * geometry.block_bytes

    assert default_bytes("large", 32 * GIB) > GIB // 8
    assert GIB // 32 < default_bytes("small", GIB // 4) <= GIB // 16
    assert default_bytes("small", GIB // 4, num_workers=2) <= GIB // 32
    with pytest.raises(ConfigError, match="the weights of"):
        default_bytes("tiny", 2**20)
    assert default_bytes("little", 64 * 2**20, num_workers=64) == MIN_BLOCKS * geometry.block_bytes
