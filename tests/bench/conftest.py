"""A make-believe server for the load generator's tests."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FAKE = Path(__file__).parent.parent.parent / "benchmarks" / "fake_sse_server.py"


@contextmanager
def fake_sse_server(*options: str) -> Iterator[str]:
    """The address of a server that streams at the pace that requests name."""
    process = subprocess.Popen([sys.executable, str(FAKE), *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield re.findall(r"http\S+", process.stdout.readline())[0]
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """A server without a limit."""
    with fake_sse_server() as address:
        yield address


@pytest.fixture(scope="session")
def narrow_url() -> Iterator[str]:
    """A server that works on two requests at once."""
    with fake_sse_server("--slots", "2") as address:
        yield address
