"""A make-believe server for the load generator's tests."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FAKE = Path(__file__).parent.parent.parent / "benchmarks" / "fake_sse_server.py"


class FakeServer:
    """A server that streams at the pace that requests name."""

    def __init__(self, *options: str) -> None:
        self._process = subprocess.Popen([sys.executable, str(FAKE), *options], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url: str = re.findall(r"http\S+", self._process.stdout.readline())[0]

    def kill(self) -> None:
        """It is gone at once."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Gone, and nothing of it is left."""
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def fake_sse_server(*options: str) -> Iterator[str]:
    """Its address, while it runs."""
    server = FakeServer(*options)
    try:
        yield server.url
    finally:
        server.close()


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
