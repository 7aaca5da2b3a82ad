"""Which tests are system tests: those that say so, and whatever asks for a running server or a browser."""

import pytest

STARTED = {"server", "fake", "url", "narrow_url", "split", "guide", "browser"}  # fixtures that start processes


@pytest.hookimpl(tryfirst=True)  # before pytest selects by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of these fixtures, so that nobody has to think of it."""
    for item in items:
        if isinstance(item, pytest.Function) and STARTED.intersection(item.fixturenames):
            item.add_marker(pytest.mark.system)
