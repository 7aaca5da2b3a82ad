"""Server processes and certificates for the load generator's tests."""

import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from .loopback import FAKE


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
def fake_sse_server(*options: str) -> Iterator[FakeServer]:
    """A server process, until the end."""
    server = FakeServer(*options)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """A server without a limit."""
    with fake_sse_server() as server:
        yield server.url


@pytest.fixture(scope="session")
def narrow_url() -> Iterator[str]:
    """A server that works on two requests at once."""
    with fake_sse_server("--slots", "2") as server:
        yield server.url


@dataclass(frozen=True)
class Certificate:
    """A certificate of the name localhost, signed by itself."""

    file: Path
    key: Path

    @property
    def server(self) -> ssl.SSLContext:
        """What a server needs to use it."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.file, self.key)
        return context


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A new certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    made = Certificate(folder / "certificate.pem", folder / "key.pem")
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(made.key), "-out", str(made.file)]
    subprocess.run(["openssl", *words.split(), *names], check=True, capture_output=True)
    return made
