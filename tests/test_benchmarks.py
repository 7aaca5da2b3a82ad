"""The benchmarks are run by hand; what they import and call them by must still exist."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("*.py"))
IMPORTS = """
import importlib, sys
paths = list(sys.path)
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name.split(".")[0] not in ("diptych", "tests", *sys.argv[1:]), f"{name}: {error}"
    sys.path[:] = paths
    for other in ("servers", "common"):  # each script's own
        sys.modules.pop(other, None)
"""


def test_every_benchmark_can_be_imported() -> None:
    names = [path.removesuffix(".py") for path in SCRIPTS]
    done = subprocess.run([sys.executable, "-c", IMPORTS, *names], cwd=BENCHMARKS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
