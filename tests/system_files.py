"""Which test files need not be read, because no test in them can be among those that -m asks for.

The unit tests and the system tests run one part after the other, each in several processes, and each process imports
and collects what it reads: three quarters of the files hold no system test, and some hold nothing else.
"""

import ast
import itertools
import re
from functools import cache
from pathlib import Path

# Fixtures that start processes.
STARTED = frozenset({"server", "fake", "fake_with_keys", "url", "narrow_url", "split", "guide", "browser"})
_PARAMETER = rf"[(,]\s*({'|'.join(sorted(STARTED))})\s*[,:)=]"
_SIGN = re.compile(rf"mark\.system|usefixtures|{_PARAMETER}")
_WHOLE = re.compile(r"^pytestmark = .*\bmark\.system\b", re.MULTILINE)


@cache
def may_hold_system_tests(path: Path) -> bool:
    """Whether something in the text of a test file can make one of its tests a system test."""
    return _SIGN.search(path.read_text()) is not None


def is_left_out(path: Path, expression: str) -> bool:
    """Whether no test of this file can be among those that the expression of -m asks for."""
    text = path.read_text()
    if _WHOLE.search(text):
        return not can_hold(expression, is_system=True)
    return not may_hold_system_tests(path) and not can_hold(expression, is_system=False)


@cache
def can_hold(expression: str, *, is_system: bool) -> bool:
    """Whether the expression can be true of a test that is a system test, or is none, whatever other marks it has. True
    where it has another form than names, and, or, not."""
    try:
        tree = ast.parse(expression.strip() or "True", mode="eval")
    except SyntaxError:
        return True
    nodes = list(ast.walk(tree))
    allowed = (ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.Name, ast.Load, ast.Constant)
    if not all(isinstance(node, allowed) for node in nodes):
        return True
    others = sorted({node.id for node in nodes if isinstance(node, ast.Name)} - {"system"})
    return any(
        _value(tree.body, {**dict(zip(others, values, strict=True)), "system": is_system})
        for values in itertools.product((False, True), repeat=len(others))
    )


def _value(node: ast.expr, names: dict[str, bool]) -> bool:
    if isinstance(node, ast.BoolOp):
        combine = all if isinstance(node.op, ast.And) else any
        return combine(_value(value, names) for value in node.values)
    if isinstance(node, ast.UnaryOp):
        return not _value(node.operand, names)
    return names[node.id] if isinstance(node, ast.Name) else bool(getattr(node, "value", True))
