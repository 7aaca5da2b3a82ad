"""scripts/test --repeat: a test that fails now and then is found, and what there was no time for is named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system
REPEAT = Path(__file__).parents[1] / "scripts" / "repeat_tests.py"
THIRD_TIME = """\
from pathlib import Path

def test_that_fails_at_its_third_run():
    runs = Path(__file__).with_name("runs")
    runs.write_text((runs.read_text() if runs.exists() else "") + "x")
    assert len(runs.read_text()) != 3
"""
PASSES = "def test_that_passes():\n    pass\n"
HANGS = "import time\n\ndef test_that_hangs():\n    time.sleep(3600)\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit: a test that passes, and one that fails at its third run."""
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_passes.py").write_text(PASSES)
    (tests / "test_third_time.py").write_text(THIRD_TIME)
    for command in (["init", "-q"], ["add", "tests"], ["commit", "-q", "-m", "first"]):
        git(tmp_path, *command)
    return tmp_path


def git(folder: Path, *command: str) -> None:
    """Run git, as nobody."""
    named = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run(["git", *named, *command], cwd=folder, check=True)


def repeat(checkout: Path, *arguments: str) -> tuple[int, str]:
    """The exit status, and what was said."""
    result = subprocess.run(
        [sys.executable, str(REPEAT), "--repeat", *arguments], cwd=checkout, capture_output=True, text=True
    )
    return result.returncode, result.stdout + result.stderr


def test_a_test_that_fails_at_its_third_run_is_found(checkout: Path) -> None:
    status, said = repeat(checkout, "2", "tests/test_third_time.py")
    assert status == 0 and "1 of 1 files passed 2 times" in said
    (checkout / "tests" / "runs").unlink()
    status, said = repeat(checkout, "3", "tests/test_third_time.py", "tests/test_passes.py")
    assert status == 1
    assert "tests/test_third_time.py: run 3 of 3 failed" in said and "1 of 2 files passed 3 times" in said


def test_files_that_differ_from_a_commit_are_repeated_and_no_others(checkout: Path) -> None:
    assert "no test file differs" in repeat(checkout, "2", "--since", "HEAD")[1]
    (checkout / "tests" / "test_new.py").write_text(PASSES)  # not committed
    (checkout / "tests" / "tool.py").write_text(PASSES)  # no test file
    (checkout / "tests" / "test_third_time.py").unlink()
    status, said = repeat(checkout, "2", "--since", "HEAD")
    assert status == 0 and "1 of 1 files passed 2 times" in said


def test_files_that_start_servers_come_behind_the_others(checkout: Path) -> None:
    (checkout / "tests" / "test_new.py").write_text(PASSES)
    (checkout / "tests" / "test_a_server.py").write_text(
        f"import pytest\n\npytestmark = pytest.mark.system\n\n{PASSES}"
    )
    code = "import repeat_tests; print(*repeat_tests.changed_files('HEAD'))"
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=checkout, env={**os.environ, "PYTHONPATH": str(REPEAT.parent)},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert said.split() == ["tests/test_new.py", "tests/test_a_server.py"]


def test_what_does_not_fit_into_the_time_is_named_and_does_not_fail(checkout: Path) -> None:
    (checkout / "tests" / "test_hangs.py").write_text(HANGS)
    status, said = repeat(checkout, "5", "--within", "2", "tests/test_hangs.py")
    assert status == 0
    assert "left out, for they did not fit into 2 s" in said and "tests/test_hangs.py (0)" in said


def test_a_commit_that_the_clone_does_not_have_is_said(checkout: Path) -> None:
    status, said = repeat(checkout, "5", "--since", "0" * 40)
    assert status == 0 and "NOT RUN: repeated tests:" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("0", "tests/test_passes.py"), "must be greater than 0"),
        (("2",), "name test files"),
        (("2", "tests/test_none.py"), "there is no tests/test_none.py"),
    ],
)
def test_wrong_usage_is_said(checkout: Path, arguments: tuple[str, ...], words: str) -> None:
    status, said = repeat(checkout, *arguments)
    assert status == 2 and words in said
