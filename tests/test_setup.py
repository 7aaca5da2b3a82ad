"""scripts/setup: the environment is installed once, and again when something that decides about it has changed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[1] / "scripts" / "setup"
TOOLS = ("bash", "cat", "cut", "dirname", "find", "grep", "sha256sum", "sort", "xargs")
pytestmark = pytest.mark.system


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Where scripts/setup installs with a python that only notes it; its tools are in bin."""
    for folder in ("scripts", "src", ".venv/bin", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "constraints.txt"):
        (tmp_path / name).touch()
    shutil.copy(SETUP, tmp_path / "scripts")
    executable(tmp_path / ".venv/bin/python", f'echo "$@" >>{tmp_path}/calls')
    executable(tmp_path / "bin" / "python3", f'exec {sys.executable} "$@"')
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    return tmp_path


def executable(path: Path, line: str) -> None:
    """A script of one line."""
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def setup(checkout: Path) -> tuple[int, str]:
    """How often it has been installed by now, and what this run said."""
    result = subprocess.run(
        ["bash", "scripts/setup", "engine"],
        cwd=checkout,
        env={"PATH": f"{checkout}/bin"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    calls = (checkout / "calls").read_text().splitlines()
    return sum("pip install" in call for call in calls), result.stderr


def test_a_compiler_that_comes_later_is_used_at_the_next_start(checkout: Path) -> None:
    number, said = setup(checkout)
    assert number == 1 and "No C++ compiler found" in said
    assert setup(checkout) == (1, "")
    executable(checkout / "bin" / "g++", "true")
    number, said = setup(checkout)
    assert number == 2 and "No C++ compiler found" not in said
    assert setup(checkout) == (2, "")
