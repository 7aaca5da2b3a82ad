"""Texts and bytes that are kept and grow: each ``+=`` on an attribute copies all that came before it, so that an answer
or a body in pieces costs its square. A list is joined at its end, and a bytearray grows in place."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src" / "diptych"
PLACES = ("bench", "http1", "runtime/transfer", "serving")
MAY_GROW = re.compile(r"\bself\.\w+ \+= ")
# What is read off at its front as it grows: serving/test_linear_answers.py counts what is copied of it.
SHORT = {"serving/answers/response/tagged_calls.py": {"_text"}, "serving/answers/response/whole_calls.py": {"_text"}}


def is_empty(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value in ("", b"") and not isinstance(value.value, int)


def grown(text: str) -> Iterator[str]:
    """Attributes of a class that begin as an empty text or as no bytes, and are added to."""
    for found in ast.walk(ast.parse(text)):
        if not isinstance(found, ast.ClassDef):
            continue
        nodes = list(ast.walk(found))
        assigned = [(target, node.value) for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
        assigned += [(node.target, node.value) for node in nodes if isinstance(node, ast.AnnAssign)]
        empty = {
            target.attr if isinstance(target, ast.Attribute) else target.id
            for target, value in assigned
            if isinstance(target, ast.Attribute | ast.Name) and is_empty(value)
        }
        added = [node.target for node in nodes if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)]
        yield from (target.attr for target in added if isinstance(target, ast.Attribute) and target.attr in empty)


def test_no_text_that_is_kept_is_copied_with_each_piece() -> None:
    found: dict[str, set[str]] = {}
    for place in PLACES:
        for path in sorted((SOURCES / place).rglob("*.py")):
            if MAY_GROW.search(text := path.read_text()) and (names := set(grown(text))):
                found[str(path.relative_to(SOURCES))] = names
    assert found == SHORT, "keep pieces in a list, or bytes in a bytearray"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("class A:\n def b(self):\n  self.text = ''\n def c(self, x):\n  self.text += x", ["text"]),
        ("class A:\n data: bytes = b''\n def c(self, x):\n  self.data += x", ["data"]),
        ("class A:\n def b(self):\n  self.data = bytearray()\n def c(self, x):\n  self.data += x", []),
        ("class A:\n def b(self):\n  self.count = 0\n def c(self, x):\n  self.count += x", []),
    ],
)
def test_a_text_that_grows_is_found(text: str, names: list[str]) -> None:
    assert list(grown(text)) == names
