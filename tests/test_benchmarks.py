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


LIMITS = """
from engine import StepWork, kind_of_products
ceilings = {"read_gbps": 10.0, "bf16_gflops": 100.0, "int8_gflops": 200.0, "fp32_gflops": 50.0}
found = StepWork(8, 10**9, 2e9, 0.05).limit(ceilings, "bf16")
assert (found["limit"], found["ceiling"]) == ("read bandwidth", round(8 / 0.15, 1)), found
found = StepWork(2048, 10**9, 4e12, 0.05).limit(ceilings, "int8")
assert (found["limit"], found["int8 products ms"]) == ("int8 products", 20_000.0), found
assert StepWork(1, 10**6, 1e6, 0.05).limit(ceilings, "bf16")["limit"] == "attention"
kinds = [kind_of_products(*each, ceilings) for each in (("avx512_bf16", "none"), ("avx512", "none"), ("avx2", "int4"))]
assert kinds == ["bf16", "fp32", "int8"], kinds
"""


def test_the_largest_part_of_a_step_is_what_limits_it() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITS], cwd=BENCHMARKS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_benchmark_can_be_imported() -> None:
    names = [path.removesuffix(".py") for path in SCRIPTS]
    done = subprocess.run([sys.executable, "-c", IMPORTS, *names], cwd=BENCHMARKS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
