"""Run test files several times in a row, because a test that passes once may still fail on correct code.

usage: scripts/test --repeat N [--within SECONDS] FILE...
       scripts/test --repeat N [--within SECONDS] --since COMMIT     (test files that differ from COMMIT)

As many files run side by side as there are cores. What does not fit within the time is named. Exits with 1 when any run
failed, and shows its output.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

NO_TESTS = 5  # pytest's exit status where all tests of a file are deselected
SHOWN_LINES = 60  # of the output of a run that failed


@dataclass
class Repeated:
    """The runs of one file. output: of the last one that failed."""

    file: str
    num_passed: int = 0
    num_failed: int = 0
    output: str = ""

    @property
    def num_runs(self) -> int:
        """Runs that came to their end."""
        return self.num_passed + self.num_failed


def main() -> int:
    """Run what the command line says; the exit status."""
    arguments = _arguments()
    files = arguments.files
    if arguments.since is not None:
        files = [*files, *changed_files(arguments.since)]
        if not files:
            print(f"repeated tests: no test file differs from {arguments.since}")
            return 0
    deadline = time.monotonic() + arguments.within if arguments.within else None
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        done = list(pool.map(lambda file: repeat(file, arguments.repeat, deadline), files))
    return report(done, arguments.repeat, arguments.within)


def changed_files(commit: str) -> list[str]:
    """Test files that differ from ``commit`` or are not in it: those that were changed last first, and behind all those
    that start servers, of which a few would take all the time. Exits, with a line that says so, where git knows no such
    commit (a shallow clone)."""
    compared = subprocess.run(
        ["git", "diff", "--name-only", "--diff-filter=d", commit, "--", "tests"], capture_output=True, text=True
    )
    if compared.returncode:
        print(f"NOT RUN: repeated tests: {compared.stderr.strip()}", file=sys.stderr)
        raise SystemExit(0)
    untracked = _git("ls-files", "--others", "--exclude-standard", "--", "tests")
    found = {name for name in [*compared.stdout.split(), *untracked] if _is_test_file(name)}
    return sorted(found, key=lambda name: ("pytest.mark.system" in Path(name).read_text(), -_changed_s(name)))


def repeat(file: str, times: int, deadline: float | None) -> Repeated:
    """Run one file ``times`` times, each in a process of its own, unless ``deadline`` (monotonic seconds) comes first:
    the run of that moment is broken off and does not count."""
    done = Repeated(file)
    while done.num_runs < times and not done.num_failed:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        result = _run(file, left)
        if result is None:
            break
        status, output = result
        if status in (0, NO_TESTS):
            done.num_passed += 1
        else:
            done.num_failed, done.output = 1, output
    return done


def report(done: Sequence[Repeated], times: int, within: float | None) -> int:
    """Print what was run how often, what failed, and what was left out; the exit status."""
    failed = [each for each in done if each.num_failed]
    for each in failed:
        print(f"--- {each.file}: run {each.num_runs} of {times} failed\n{each.output}")
    whole = sum(each.num_passed == times for each in done)
    print(f"repeated tests: {whole} of {len(done)} files passed {times} times in a row, {len(failed)} failed")
    left_out = [each for each in done if each.num_runs < times and not each.num_failed]
    if left_out:
        print(f"left out, for they did not fit into {within:g} s (runs of each):")
        for each in left_out:
            print(f"  {each.file} ({each.num_runs})")
    return 1 if failed else 0


def _run(file: str, left_s: float | None) -> tuple[int, str] | None:
    """The exit status and the end of the output of one run; None when the time was over before it ended."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", file]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=left_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # the servers that its tests have started, too
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise
    return process.returncode, "\n".join(output.splitlines()[-SHOWN_LINES:])


def _is_test_file(name: str) -> bool:
    path = Path(name)
    return path.name.startswith("test_") and path.suffix == ".py"


def _changed_s(name: str) -> float:
    """When a file was changed last: now, where that is not committed."""
    if _git("status", "--porcelain", "--", name):
        return Path(name).stat().st_mtime
    return float((_git("log", "-1", "--format=%ct", "--", name) or ["0"])[0])


def _git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.splitlines()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/test", usage=(__doc__ or "").split("usage: ")[1].split("\n\n")[0])
    parser.add_argument("--repeat", type=int, required=True)
    parser.add_argument("--within", type=float, default=None)
    parser.add_argument("--since", default=None)
    parser.add_argument("files", nargs="*")
    arguments = parser.parse_args()
    if arguments.repeat < 1 or (arguments.within is not None and arguments.within <= 0):
        parser.error("--repeat and --within must be greater than 0")
    if not arguments.files and arguments.since is None:
        parser.error("name test files, or --since COMMIT")
    missing = [file for file in arguments.files if not Path(file.split("::")[0]).exists()]
    if missing:
        parser.error(f"there is no {missing[0]}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
