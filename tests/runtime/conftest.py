"""Fixtures of tests of the runtime. Tiny models compute in one thread: on a shared machine the barriers of two cost
more than they save."""

from collections.abc import Iterator

import pytest
import torch

from tests.runtime.transfer_parts import Clock


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """One thread for torch during the session."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that stands until the test moves it."""
    made = Clock()
    monkeypatch.setattr("time.monotonic_ns", made)
    return made
