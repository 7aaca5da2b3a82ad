"""Failures that are caught and go no further: each says at its place why silence is right."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src" / "diptych"
# What is no failure: it says that now is too early, that a wait is over, that what was to end has ended, or that
# somebody else was first.
NO_FAILURES = {
    "BlockingIOError",
    "InterruptedError",
    "ssl.SSLWantReadError",
    "queue.Empty",
    "TimeoutError",
    "asyncio.CancelledError",
    "FileNotFoundError",
    "FileExistsError",
    "ProcessLookupError",
}
LOGGERS = ("logger", "log", "_log")


def names_of(caught: ast.expr | None) -> set[str]:
    if caught is None:
        return {"BaseException"}
    return {ast.unparse(name) for name in (caught.elts if isinstance(caught, ast.Tuple) else [caught])}


def goes_on(statement: ast.stmt) -> bool:
    """Whether a statement says at most a line of the log, and tells nobody else."""
    if isinstance(statement, ast.Expr):
        call = statement.value
        is_logged = (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and ast.unparse(call.func.value).rpartition(".")[2] in LOGGERS
        )
        return is_logged or isinstance(call, ast.Constant)
    return isinstance(statement, ast.Pass | ast.Continue | ast.Break)


def silent_handlers(text: str) -> Iterator[int]:
    """Lines of handlers that drop a failure without a comment at the handler."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            caught = names_of(node.type)
            is_silent, last = all(map(goes_on, node.body)), node.body[-1].end_lineno or node.lineno
        elif isinstance(node, ast.With | ast.AsyncWith):
            calls = [item.context_expr for item in node.items]
            suppressed = [
                argument
                for call in calls
                if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == "suppress"
                for argument in call.args
            ]
            caught = {name for argument in suppressed for name in names_of(argument)}
            is_silent, last = bool(suppressed), node.body[0].lineno - 1
        else:
            continue
        place = lines[node.lineno - 1 : max(last, node.lineno)]
        if is_silent and caught - NO_FAILURES and not any("#" in line for line in place):
            yield node.lineno


@pytest.mark.parametrize(
    "text", ["except OSError:\n    pass", "except OSError as error:\n    self._log.error('x', error)"]
)
def test_a_handler_that_drops_a_failure_is_found_unless_it_says_why(text: str) -> None:
    assert list(silent_handlers(f"try:\n    work()\n{text}\n")) == [3]
    assert not list(silent_handlers(f"try:\n    work()\n{text.replace(':', ':  # it is gone already', 1)}\n"))
    assert not list(silent_handlers(f"try:\n    work()\n{text}\n    raise\n"))
    assert list(silent_handlers("with contextlib.suppress(OSError):\n    work()\n")) == [1]
    assert not list(silent_handlers("with suppress(OSError):  # it is gone already\n    work()\n"))
    assert not list(silent_handlers("with suppress(TimeoutError):\n    work()\n"))


def test_no_failure_is_dropped_without_a_word() -> None:
    found = [
        f"{path.relative_to(SOURCES)}:{line}"
        for path in sorted(SOURCES.rglob("*.py"))
        for line in silent_handlers(path.read_text())
    ]
    assert not found, f"say in a comment at the line why nothing has to happen, or mend it: {found}"
