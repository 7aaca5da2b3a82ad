"""Which tests are system tests: those that say so, and whatever asks for a running server or a browser."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.laws import pytest_addoption, pytest_configure
from tests.system_files import STARTED, is_left_out, may_hold_system_tests

__all__ = ["pytest_addoption", "pytest_configure"]  # the options and the seeds of laws


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a test that -m asks for, unless they are named."""
    if not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    named = {Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args}
    if collection_path.resolve() in named:
        return None
    return is_left_out(collection_path, config.option.markexpr) or None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of these fixtures, so that nobody has to think of it. Raises UsageError for one that is a system
    test in a file that would be left out when only such are asked for."""
    for item in items:
        if isinstance(item, pytest.Function) and STARTED.intersection(item.fixturenames):
            item.add_marker(pytest.mark.system)
        if item.get_closest_marker("system") and not may_hold_system_tests(item.path):
            raise pytest.UsageError(f"{item.nodeid} is a system test, which the text of its file does not show")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Collect without looks for garbage, and take the thousands of tests and what they import out of the collector's
    sight: a run of it takes half a second otherwise, and the load generator and the loader of weights each ask for
    one."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
