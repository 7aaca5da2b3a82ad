"""The tests of the repository that need a GPU, and those of the Triton kernels, compiled."""

import re
import subprocess
import sys

from benchmarks.gpu_parts.models import row

FILES = ("tests/runtime/test_cuda.py", "tests/runtime/test_triton_kernels.py", "tests/runtime/test_multiprocessors.py",
         "tests/runtime/test_codec.py", "tests/runtime/test_triton_codec.py",
         "tests/runtime/test_batch_sampler.py")  # fmt: skip


def main() -> int:
    """Print how many passed, and the name of each that did not."""
    command = [sys.executable, "-m", "pytest", *FILES, "-q", "-m", "cuda or not slow", "-p", "no:cacheprovider", "-rf"]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout[-4000:], done.stderr[-2000:], file=sys.stderr)
    lines = done.stdout.splitlines()
    for line in lines:
        if line.startswith("FAILED "):
            row(failed=line.removeprefix("FAILED "))
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])}
    row(what="tests", **counts)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
