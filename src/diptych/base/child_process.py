"""Programs that this process has started, and their end."""

import subprocess
from typing import Any


def end_process(process: "subprocess.Popen[Any]", timeout_s: float = 30.0) -> None:
    """Ask it to end, and kill it when it has not after ``timeout_s``. It is gone afterwards."""
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
