"""A pytest plugin for scripts/mutants: which functions of the product each test calls, and running chosen tests alone.

Settings are environment variables, since pytest runs as a process of its own:

    MUTANTS_RECORD    write here, as JSON: {test: [outcome, seconds, ["file:qualified name", ...]]}
    MUTANTS_SOURCE    the folder whose files count; the names of files are relative to it
    MUTANTS_CHOSEN    a file with the ids of the tests to run, a line each, in the order of their files

Only calls are traced, not lines, which makes the tests about twice as slow. What a test starts as a process of its own
is not seen, nor what an earlier test has left in a cache.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest

_SOURCE = os.environ.get("MUTANTS_SOURCE", "") + os.sep
_called: dict[int, CodeType] = {}  # by identity: the hash of a code object is slow
_record: dict[str, tuple[str, float, list[str]]] = {}


def _trace(frame: FrameType, event: str, argument: object) -> None:
    code = frame.f_code
    if id(code) not in _called:
        _called[id(code)] = code


def _names() -> list[str]:
    """What was called, as "file:qualified name"."""
    codes = [code for code in _called.values() if code.co_filename.startswith(_SOURCE)]
    return sorted({f"{code.co_filename[len(_SOURCE) :]}:{code.co_qualname}" for code in codes})


if "MUTANTS_RECORD" in os.environ:

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
        """Trace one test with its fixtures."""
        _called.clear()
        _record[item.nodeid] = ("passed", 0.0, [])
        threading.settrace(_trace)
        sys.settrace(_trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            outcome, seconds, _ = _record[item.nodeid]
            _record[item.nodeid] = (outcome, seconds, _names())

    def pytest_runtest_logreport(report: pytest.TestReport) -> None:
        """Note how a phase of a test ended, and how long it took."""
        outcome, seconds, names = _record[report.nodeid]
        worst = report.outcome if outcome == "passed" else outcome
        _record[report.nodeid] = (worst, seconds + report.duration, names)

    def pytest_sessionfinish() -> None:
        """Write the record."""
        Path(os.environ["MUTANTS_RECORD"]).write_text(json.dumps(_record))


if os.environ.get("MUTANTS_CHOSEN"):

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave the tests that were not chosen out. Names that no test has any more are no error."""
        chosen = set(Path(os.environ["MUTANTS_CHOSEN"]).read_text().splitlines())
        dropped = [item for item in items if item.nodeid not in chosen]
        items[:] = [item for item in items if item.nodeid in chosen]
        if dropped:
            config.hook.pytest_deselected(items=dropped)
