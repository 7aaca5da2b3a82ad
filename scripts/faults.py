"""One-line faults of Python source text, as a slip of the programmer would make them: scripts/mutants puts them in.

A fault is found on the syntax tree and made by editing the one line of text that its node stands on, so that whatever
surrounds it stays as it is. Left alone is what no test of behaviour can see: docstrings, annotations, assertions (also
``strict=True`` of zip), error messages, lines of the log, ``__repr__``, and the checks that a class has for its tests.
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
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
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
STATUS = {
    200: 201, 201: 200, 204: 200, 400: 500, 401: 403, 403: 401, 404: 400, 405: 404, 408: 504, 409: 400, 411: 400,
    413: 400, 415: 400, 422: 400, 429: 503, 431: 400, 499: 500, 500: 400, 502: 500, 503: 500, 504: 500, 529: 500,
}  # fmt: skip
RELEASES = ("close", "cancel", "release", "abort", "discard", "unlink", "kill", "terminate", "shutdown", "join")
LIMIT = re.compile(r"_?([A-Z0-9]+_)*(MAX|MIN|MOST|LIMIT|LARGEST|LONGEST|BYTES|TOKENS|LINES)(_[A-Z0-9]+)*")
UNLIMITED = re.compile(r"timeout(_s)?|deadline(_s)?|limit|max_\w+")  # an argument that may be left out
LOG = re.compile(r"logger\.|(self\.)?_log\.")
QUERY = re.compile(rb"\b\w+ (?:=|<|>|<=|>=) \?")  # a condition of SQL


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
    """``number`` faults, spread evenly over all places in these files where one can be made (a longer file gets more).

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
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._returns = node.returns
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST):
                    self.visit(child)
        self._returns = around

    def _is_left_alone(self, node: ast.AST) -> bool:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return node.name in ("__repr__", "__str__") or FOR_TESTS in (ast.get_docstring(node) or "")
        if isinstance(node, ast.keyword):
            return node.arg == "strict"  # of zip: an assertion that both are of one length
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return True  # a docstring, or the ``...`` of a protocol
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            return LOG.match(self.text_of(node.value.func)) is not None
        if isinstance(node, ast.Call):
            name = self.text_of(node.func)
            return name.endswith(("Error", "ErrorRecord", "ErrorRecord.of")) or LOG.match(name) is not None
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
        edges = (rb"\b", rb"\b") if word[0].isalpha() else (rb"(?<![<>=!])", rb"(?![<>=])")
        found = re.search(re.escape(word.encode()).join(edges), text)
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


def _key(file: Places, node: ast.Compare) -> Iterator[Edit]:
    """A part of a key is not compared: ``(a, b) == (c, d)`` without b and d."""
    left, right = node.left, node.comparators[0]
    if not (isinstance(left, ast.Tuple) and isinstance(right, ast.Tuple) and len(left.elts) == len(right.elts)):
        return
    line, begin, end = span(node)
    if line and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq | ast.NotEq):
        sign = "==" if isinstance(node.ops[0], ast.Eq) else "!="
        for at in range(len(left.elts)):
            rest = [
                "".join(f"{file.text_of(item)}, " for place, item in enumerate(side.elts) if place != at)
                for side in (left, right)
            ]
            yield line, begin, end, f"({rest[0]}) {sign} ({rest[1]})"


def _constant(file: Places, node: ast.Constant) -> Iterator[Edit]:
    line, begin, end = span(node)
    text = file.text_of(node)
    if type(node.value) is int and text.isdigit():
        if node.value in STATUS:
            yield line, begin, end, str(STATUS[node.value])
            return
        yield line, begin, end, str(node.value + 1)
        yield line, begin, end, str(node.value - 1) if node.value else "(-1)"


def _mode(file: Places, node: ast.Constant) -> Iterator[Edit]:
    """Others may read a file that was its owner's alone."""
    line, begin, end = span(node)
    if type(node.value) is int and re.fullmatch(r"0o[0-7]+00", file.text_of(node)):
        yield line, begin, end, oct(node.value | (node.value >> 3 & 0o50) | (node.value >> 6 & 0o5))


def _flag(file: Places, node: ast.Constant) -> Iterator[Edit]:
    if type(node.value) is bool:
        yield (*span(node), str(not node.value))


def _query(file: Places, node: ast.Constant) -> Iterator[Edit]:
    """A condition of a query always holds. The number of its arguments stays."""
    line, begin, _ = span(node)
    if line and isinstance(node.value, str):
        for found in QUERY.finditer(file.text_of(node).encode()):
            yield line, begin + found.start(), begin + found.end(), "? IS NOT NULL"


def _and_or(file: Places, node: ast.BoolOp) -> Iterator[Edit]:
    words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
    for left, right in zip(node.values, node.values[1:], strict=False):
        yield from file.between(left, right, *words)


def _dropped(file: Places, node: ast.BoolOp) -> Iterator[Edit]:
    """One of the conditions is forgotten."""
    for operand in node.values:
        if span(operand)[0]:
            yield (*span(operand), "True" if isinstance(node.op, ast.And) else "False")


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


def _unlimited(file: Places, node: ast.Call) -> Iterator[Edit]:
    """Without the limit that the function called can have."""
    for keyword in node.keywords:
        if keyword.arg and UNLIMITED.fullmatch(keyword.arg) and file.text_of(keyword.value) not in ("", "None"):
            yield (*span(keyword.value), "None")


def _doubled(file: Places, node: ast.stmt) -> Iterator[Edit]:
    """A limit is twice as high: ``MAX_LINES = 500``, and ``MAX_LINES = _limit("MAX_LINES", 500, ...)``."""
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    if not isinstance(target, ast.Name) or not LIMIT.fullmatch(target.id):
        return
    if isinstance(value, ast.Call) and file.text_of(value.func) == "_limit" and len(value.args) > 1:
        value = value.args[1]
    if (
        isinstance(value, ast.Constant | ast.BinOp)
        and not isinstance(getattr(value, "value", 0), str)
        and span(value)[0]
    ):
        yield (*span(value), f"({file.text_of(value)}) * 2")


def _guard(file: Places, node: ast.If) -> Iterator[Edit]:
    """A case that ends here is never recognised: a limit, a check, a special case."""
    if isinstance(node.body[-1], ast.Raise | ast.Return | ast.Continue | ast.Break) and span(node.test)[0]:
        yield (*span(node.test), "False")


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


def _await(node: ast.Expr) -> Iterator[Edit]:
    line, begin, end = span(node)
    if line and isinstance(node.value, ast.Await):
        yield line, begin, end, "pass"
        yield line, begin, begin + len("await "), ""


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
        yield "key", _key(file, node)
    elif isinstance(node, ast.Constant):
        yield "status" if node.value in STATUS and type(node.value) is int else "constant", _constant(file, node)
        yield "mode", _mode(file, node)
        yield "flag", _flag(file, node)
        yield "query", _query(file, node)
    elif isinstance(node, ast.BoolOp):
        yield "and/or", _and_or(file, node)
        yield "condition", _dropped(file, node)
    elif isinstance(node, ast.UnaryOp):
        yield "not", _not(file, node)
    elif isinstance(node, ast.BinOp):
        yield "+/-", _plus_minus(file, node)
    elif isinstance(node, ast.Call):
        yield "min/max", _min_max(file, node)
        yield "unlimited", _unlimited(file, node)
    elif isinstance(node, ast.Return):
        yield "return", _return(file, node)
    elif isinstance(node, ast.Break | ast.Continue):
        yield "loop", _loop(node)
    elif isinstance(node, ast.If):
        yield "guard", _guard(file, node)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Await):
        yield "await", _await(node)
    elif isinstance(node, ast.stmt):
        is_release = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        is_release = is_release and file.text_of(node.value.func).rpartition(".")[2] in RELEASES
        yield "release" if is_release else "statement", _statement(node)
        yield "doubled", _doubled(file, node)
        if isinstance(node, ast.AugAssign):
            yield "+/-", _augmented(file, node)
