"""One real server with the bundled model, and one with the make-believe model, for the whole session."""

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from servers import CLI, KEYS, RunningServer, end_of_shared_servers, running, shared_fake_server

__all__ = ["end_of_shared_servers"]


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """``diptych serve`` with the bundled model on a free port."""
    memory = ("--kv-cache-memory", "64MiB", "--explain-misses", "text")
    with running((*CLI, "serve", "--port", "0", *memory, "--threads", "1")) as one:
        yield one


@pytest.fixture
def fake() -> RunningServer:
    """A fast server whose tokens can be foretold, shared with other tests."""
    return shared_fake_server(step_ms=1)


@pytest.fixture
def fake_with_keys() -> RunningServer:
    """The same, which asks for one of KEYS."""
    return shared_fake_server(step_ms=1, serve={"api_keys": KEYS})


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """The official client, against the real server."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as one:
        yield one


@pytest.fixture
def limited() -> Iterator[None]:
    """This process may open 150 more files: a number that a test can use up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))  # earlier tests may hold some
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(highest + 150, soft), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
