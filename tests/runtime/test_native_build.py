"""The native library builds from its sources, and its absence is a slower start, never a failing one."""

import os
import platform
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diptych.runtime.kernels import native
from diptych.runtime.kernels.instruction_set import TORCH, available

ROOT = Path(__file__).parents[2]


AS_ON = "import platform, runpy; platform.machine = lambda: {!r}; runpy.run_path('setup.py', run_name='__main__')"


def build(target: Path, compiler: str, machine: str = platform.machine()) -> subprocess.CompletedProcess[str]:
    """Run setup.py's build of the library into ``target`` with a given compiler, as on a kind of machine."""
    pytest.importorskip("setuptools")
    folders = (f"--build-lib={target}", f"--build-temp={target / 'objects'}")
    return subprocess.run(
        [sys.executable, "-c", AS_ON.format(machine), "build_ext", *folders],
        cwd=ROOT,
        env={**os.environ, "CC": compiler, "CXX": compiler},
        capture_output=True,
        text=True,
    )


def test_without_a_compiler_the_build_warns_and_succeeds(tmp_path: Path) -> None:
    done = build(tmp_path, "/nonexistent/compiler")
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("_native*.so"))
    assert "warning" in (done.stdout + done.stderr).lower() or sys.platform != "linux"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_with_a_compiler_the_library_is_built(tmp_path: Path) -> None:
    done = build(tmp_path, "g++")
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("_native*.so")), done.stderr


def test_a_machine_without_kernels_builds_none_and_succeeds(tmp_path: Path) -> None:
    done = build(tmp_path, "/nonexistent/compiler", "aarch64")
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("_native*.so"))
    assert "warning" not in (done.stdout + done.stderr).lower(), "nothing is missing there"


def test_there_are_kernels_for_linux_on_x86_64_alone() -> None:
    pytest.importorskip("setuptools")
    extensions = runpy.run_path(str(ROOT / "setup.py"))["native_extensions"]
    for system, machine in [("linux", "aarch64"), ("linux", "ppc64le"), ("darwin", "arm64"), ("darwin", "x86_64")]:
        assert extensions(system, machine) == []
    (library,) = extensions("linux", "x86_64")
    folder = ROOT / "src/diptych/runtime/attention/kernels"
    assert {ROOT / path for path in library.sources} == set(folder.glob("*.cpp"))
    assert {ROOT / path for path in library.depends} == set(folder.glob("*.h"))


def test_without_the_library_torch_does_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "KERNELS", tmp_path)
    native.load_native.cache_clear()
    try:
        assert native.load_native() is None
        assert available(torch.float32) == available(torch.bfloat16) == (TORCH,)
    finally:
        native.load_native.cache_clear()


def test_torch_sets_the_number_of_threads_of_the_kernels() -> None:
    """In a process of its own: a call with two threads starts one more thread, which torch then shares."""
    if native.load_native() is None:
        pytest.skip("no native kernels here")
    script = """
import os, torch
from diptych.runtime.kernels.instruction_set import choose
from diptych.runtime.ops import make_ops
tasks = lambda: len(os.listdir("/proc/self/task"))
ops = make_ops(torch.float32, choose(torch.float32))
torch.set_num_threads(1)
layer, x = ops.pack_linear(torch.randn(512, 64), None), torch.randn(300, 64)
alone = tasks()
layer(x)
assert tasks() == alone, "one thread was asked for"
torch.set_num_threads(2)
layer(x)
assert tasks() == alone + 1, "two threads were asked for"
torch.randn(2000, 2000).exp()
assert tasks() == alone + 1, "torch started a pool of its own"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
