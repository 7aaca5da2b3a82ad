"""Run the tests that failed in the last runs of pytest once more, alone: what scripts/test does at its end.

A test that fails again fails the run. One that passes hangs on the pace of the machine or on its neighbours; that is a
fault of the test, and it is named in the last lines, but a few of them do not stop a release. More than LIMIT failures
are not looked at again.
"""

import json
import subprocess
import sys
from pathlib import Path

LIMIT = 3
ROOT = Path(__file__).resolve().parent.parent
FAILED = ROOT / ".pytest_cache/v/cache/lastfailed"


def failed() -> list[str]:
    """The tests whose last run failed, by name."""
    return sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []


def main() -> int:
    """The exit status of the tests: 0 where all pass the second time."""
    names = failed()
    if not 0 < len(names) <= LIMIT:
        print(f"{len(names)} tests failed; they are not run again")
        return 1
    print(f"once more, alone: {', '.join(names)}", flush=True)
    run = [sys.executable, "-m", "pytest", "--last-failed", "--last-failed-no-failures=none", "-m", "not slow"]
    if subprocess.run(run, cwd=ROOT, check=False).returncode != 0:
        return 1
    for name in names:
        print(f"UNSTABLE (failed, then passed alone): {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
