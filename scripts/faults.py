"""One-line faults of Python source text, as a slip of the programmer would make them: scripts/mutants puts them in.

A fault is found on the syntax tree and made by editing the one line of text that its node stands on, so that whatever
surrounds it stays as it is. Left alone is what no test of behaviour can see: docstrings, annotations, assertions, error
messages, ``__repr__``, and the checks that a class has for its tests.
"""

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
}
EMPTY = {
    "bool": "False",
    "list": "[]",
    "tuple": "()",
    "dict": "{}",
    "set": "set()",
    "str": '""',
    "int": "0",
    "float": "0.0",
}
FOR_TESTS = "(for tests)"  # in a docstring: the method checks the object, and nothing else calls it


@dataclass(frozen=True)
class Fault:
    """``line`` (from 1) of ``path`` becomes ``text``, by a change of this kind."""

    path: Path
    line: int
    kind: str
    before: str
    text: str

    def apply(self, source: str) -> str:
        """The file's text with this fault in it."""
        lines = source.splitlines(keepends=True)
        lines[self.line - 1] = self.text
        return "".join(lines)


def choose(paths: list[Path], number: int, seed: int) -> list[Fault]:
    """So many faults, spread evenly over all places in these files where one can be made (a longer file gets more).

    Raises ValueError when there are fewer places than that."""
    places = [place for path in paths for place in Places(path).find()]
    if number > len(places):
        raise ValueError(f"{number} faults are asked for; there are {len(places)} places for one")
    rng = random.Random(seed)
    bounds = [at * len(places) // number for at in range(number + 1)]
    chosen: list[Fault] = []
    for low, high in pairwise(bounds):
        faults = (rng.choice(place) for place in rng.sample(places[low:high], high - low))
        chosen += islice(filter(is_program, faults), 1)
    return chosen


def is_program(fault: Fault) -> bool:
    """Whether Python takes the file with the fault for a program, and for another one than without."""
    source = fault.path.read_text()
    try:
        return ast.dump(ast.parse(fault.apply(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


class Places:
    """The places of one file: for each, the faults of which one may be made there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        source = path.read_text()
        self._lines = source.splitlines(keepends=True)
        self._tree = ast.parse(source)
        self._places: list[list[Fault]] = []
        self._here: list[Fault] = []
        self._returns: ast.expr | None = None  # annotation of the function around

    def find(self) -> list[list[Fault]]:
        """All places, from the first line to the last."""
        self.visit(self._tree)
        return sorted(self._places, key=lambda place: place[0].line)

    def visit(self, node: ast.AST) -> None:
        """One node and all within it, but for what is left alone."""
        if self._is_left_alone(node):
            return
        self._here = []
        for kind, made in edits(self, node):
            for line, begin, end, text in made:
                self._note(kind, line, begin, end, text)
        if self._here:
            self._places.append(self._here)
        around = self._returns
        if isinstance(node, ast.FunctionDef):
            self._returns = node.returns
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST):
                    self.visit(child)
        self._returns = around

    def _is_left_alone(self, node: ast.AST) -> bool:
        if isinstance(node, ast.FunctionDef):
            return node.name in ("__repr__", "__str__") or FOR_TESTS in (ast.get_docstring(node) or "")
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return True  # a docstring, or the ``...`` of a protocol
        if isinstance(node, ast.Call):
            return self.text_of(node.func).endswith(("Error", "ErrorRecord", "ErrorRecord.of"))
        return isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom)

    def _note(self, kind: str, line: int, begin: int, end: int, text: str) -> None:
        """Bytes ``begin`` to ``end`` of this line become ``text``."""
        before = self._lines[line - 1]
        data = before.encode()
        self._here.append(Fault(self._path, line, kind, before, (data[:begin] + text.encode() + data[end:]).decode()))

    def text_of(self, node: ast.AST) -> str:
        """The node as it stands in the file; empty when it is longer than a line."""
        line, begin, end = span(node)
        return self._lines[line - 1].encode()[begin:end].decode() if line else ""

    def between(self, left: ast.expr, right: ast.expr, word: str, instead: str) -> Iterator[tuple[int, int, int, str]]:
        """An operator between two operands of one line, replaced."""
        if left.end_lineno != right.lineno or left.end_col_offset is None:
            return
        text = self._lines[right.lineno - 1].encode()[left.end_col_offset : right.col_offset]
        found = re.search(rb"(?<![<>=!])" + re.escape(word.encode()) + rb"(?![<>=])", text)
        if found:
            begin = left.end_col_offset + found.start()
            yield right.lineno, begin, begin + len(word), instead

    @property
    def nothing(self) -> str:
        """An empty value of the type that the function around returns; None where it has none."""
        return EMPTY.get(self.text_of(self._returns).split("[")[0], "None") if self._returns else "None"


Edit = tuple[int, int, int, str]  # line, first byte, end, text


def span(node: ast.AST) -> tuple[int, int, int]:
    """Line and bytes of a node; line 0 when it is on several."""
    if not isinstance(node, ast.expr | ast.stmt) or node.lineno != node.end_lineno or node.end_col_offset is None:
        return 0, 0, 0
    return node.lineno, node.col_offset, node.end_col_offset


def _comparison(file: Places, node: ast.Compare) -> Iterator[Edit]:
    operands = [node.left, *node.comparators]
    for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
        if type(operator) in COMPARISONS:
            yield from file.between(left, right, *COMPARISONS[type(operator)])


def _constant(file: Places, node: ast.Constant) -> Iterator[Edit]:
    line, begin, end = span(node)
    if type(node.value) is int and file.text_of(node).isdigit():
        yield line, begin, end, str(node.value + 1)
        yield line, begin, end, str(node.value - 1) if node.value else "(-1)"


def _and_or(file: Places, node: ast.BoolOp) -> Iterator[Edit]:
    words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
    for left, right in zip(node.values, node.values[1:], strict=False):
        yield from file.between(left, right, *words)


def _not(file: Places, node: ast.UnaryOp) -> Iterator[Edit]:
    line, begin, _ = span(node)
    if line and isinstance(node.op, ast.Not):
        yield line, begin, begin + len("not "), ""


def _plus_minus(file: Places, node: ast.BinOp) -> Iterator[Edit]:
    texts = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple)
    for operand in (node.left, node.right):
        if isinstance(operand, texts) and not isinstance(getattr(operand, "value", None), int | float):
            return
    if isinstance(node.op, ast.Add | ast.Sub):
        signs = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
        yield from file.between(node.left, node.right, *signs)


def _min_max(file: Places, node: ast.Call) -> Iterator[Edit]:
    line, begin, end = span(node.func)
    if file.text_of(node.func) in ("min", "max"):
        yield line, begin, end, "max" if file.text_of(node.func) == "min" else "min"


def _statement(node: ast.stmt) -> Iterator[Edit]:
    line, begin, end = span(node)
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign):
        targets = [node.target]
    changes_state = any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets)
    if line and (changes_state or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))):
        yield line, begin, end, "pass"


def _augmented(file: Places, node: ast.AugAssign) -> Iterator[Edit]:
    if isinstance(node.op, ast.Add | ast.Sub):
        signs = ("+=", "-=") if isinstance(node.op, ast.Add) else ("-=", "+=")
        yield from file.between(node.target, node.value, *signs)


def _return(file: Places, node: ast.Return) -> Iterator[Edit]:
    if node.value is not None and span(node.value)[0]:
        yield (*span(node.value), "True" if file.text_of(node.value) == "False" else file.nothing)


def _loop(node: ast.Break | ast.Continue) -> Iterator[Edit]:
    yield (*span(node), "continue" if isinstance(node, ast.Break) else "break")


def edits(file: Places, node: ast.AST) -> Iterator[tuple[str, Iterator[Edit]]]:
    """The kinds of fault that can be made at this node, and how."""
    if isinstance(node, ast.Compare):
        yield "comparison", _comparison(file, node)
    elif isinstance(node, ast.Constant):
        yield "constant", _constant(file, node)
    elif isinstance(node, ast.BoolOp):
        yield "and/or", _and_or(file, node)
    elif isinstance(node, ast.UnaryOp):
        yield "not", _not(file, node)
    elif isinstance(node, ast.BinOp):
        yield "+/-", _plus_minus(file, node)
    elif isinstance(node, ast.Call):
        yield "min/max", _min_max(file, node)
    elif isinstance(node, ast.Return):
        yield "return", _return(file, node)
    elif isinstance(node, ast.Break | ast.Continue):
        yield "loop", _loop(node)
    elif isinstance(node, ast.stmt):
        yield "statement", _statement(node)
        if isinstance(node, ast.AugAssign):
            yield "+/-", _augmented(file, node)
