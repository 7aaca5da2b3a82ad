"""Which tests are system tests: those that say so, and whatever asks for a running server or a browser."""

import gc

import pytest

from tests.laws import pytest_addoption, pytest_configure

__all__ = ["pytest_addoption", "pytest_configure"]  # the options and the seeds of laws

STARTED = {"server", "fake", "url", "narrow_url", "split", "guide", "browser"}  # fixtures that start processes


@pytest.hookimpl(tryfirst=True)  # before pytest selects by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of these fixtures, so that nobody has to think of it."""
    for item in items:
        if isinstance(item, pytest.Function) and STARTED.intersection(item.fixturenames):
            item.add_marker(pytest.mark.system)


def pytest_collection_finish() -> None:
    """Take the thousands of tests and what they import out of the garbage collector's sight: a run of it takes half a
    second otherwise, and the load generator and the loader of weights each ask for one."""
    gc.collect()
    gc.freeze()
