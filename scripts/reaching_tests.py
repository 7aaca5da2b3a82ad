"""Which tests can notice a fault, the likeliest first: scripts/mutants runs these.

Two sources. The record of a run without a fault (scripts/reached_functions.py) has which functions each test calls; a
fault in a function concerns the tests that call it. The imports of all modules, followed backwards from the faulty one,
have which test files depend on it, and over how many steps; they order what the record does not: faults outside of
functions, and functions that only run once and whose result is kept.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path("src/diptych")
UNREACHABLE = 99  # imports: more steps than there are


@dataclass(frozen=True, slots=True)
class Passed:
    """A test that passes without a fault. functions: that it calls, as "file:qualified name"."""

    name: str
    seconds: float
    functions: frozenset[str]

    @property
    def file(self) -> str:
        """Its file, from the root of the repository."""
        return self.name.partition("::")[0]


def imports_of(path: Path, module: str) -> Iterator[str]:
    """The modules, or names within them, that a file imports, wherever in it. module: its own name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            around = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*around, node.module])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


class ImportGraph:
    """Which files import which module of ours, over how many steps."""

    def __init__(self, root: Path) -> None:
        modules: dict[str, Path] = {}
        for path in sorted((root / SOURCE).rglob("*.py")):
            parts = path.relative_to(root / "src").with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        for path in sorted((root / "tests").rglob("*.py")):
            modules[path.stem] = path  # helpers of tests are found by their names; test files are imported by none
            modules[".".join(path.relative_to(root).with_suffix("").parts)] = path
        self._importers: dict[Path, set[Path]] = defaultdict(set)
        self._imported: dict[Path, set[Path]] = defaultdict(set)
        for module, path in modules.items():
            for name in imports_of(path, module):
                if (imported := modules.get(name)) is not None and imported != path:
                    self._importers[imported.relative_to(root)].add(path.relative_to(root))
                    self._imported[path.relative_to(root)].add(imported.relative_to(root))

    def distances(self, path: Path) -> Mapping[str, int]:
        """For each test file that depends on this file: over how many imports."""
        found, edge, steps = {path: 0}, [path], 0
        while edge:
            steps += 1
            edge = sorted({file for known in edge for file in self._importers[known]} - found.keys())
            found |= dict.fromkeys(edge, steps)
        return {str(file): steps for file, steps in found.items() if file.name.startswith("test_")}

    def behind(self, path: Path) -> set[Path]:
        """A file, and all that it imports, directly or not."""
        found, edge = {path}, {path}
        while edge:
            edge = {file for known in edge for file in self._imported[known]} - found
            found |= edge
        return found


def function_at(source: str, line: int) -> str:
    """The qualified name of the innermost function, or else class, around a line, as Python's code objects have it;
    empty for a line of the module itself. A class ends with a dot."""
    found, node, inside = "", ast.parse(source), True
    while inside:
        inside = False
        for child in ast.walk(node):
            if child is node or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            if first <= line <= (child.end_lineno or line):
                around = f"{found}.<locals>." if found and not found.endswith(".") else found
                found = f"{around}{child.name}" + ("." if isinstance(child, ast.ClassDef) else "")
                node, inside = child, True
                break
    return found


def nearness(test_file: str, path: Path) -> int:
    """0: the test file has the name of the faulty one; more for those of its folders, from the innermost."""
    names = [path.stem, *reversed(path.relative_to(SOURCE).parent.parts)]
    test = Path(test_file)
    mirrored = (test.stem.removeprefix("test_"), *test.parent.parts[1:])
    return min((at for at, name in enumerate(names) if name in mirrored), default=len(names))


def order_of_files(path: Path, function: str, test_files: Sequence[str], graph: ImportGraph) -> list[str]:
    """Test files that depend on a file: first those that name the function at fault, its class or the module, then the
    nearest by their own names and by imports."""
    distances = graph.distances(path)
    names = {part for part in function.split(".") if part and not part.startswith(("<", "__"))} | {path.stem}

    def order(file: str) -> tuple[int, int, int, str]:
        text = Path(file).read_text()
        num_named = sum(re.search(rf"\b{re.escape(name)}\b", text) is not None for name in names)
        return -num_named, nearness(file, path), distances[file], file

    return sorted((file for file in test_files if file in distances), key=order)


def reaching(
    path: Path, source: str, line: int, passed: list[Passed], distances: Mapping[str, int]
) -> tuple[list[Passed], list[Passed]]:
    """The tests that reach a line, and the others that may notice what is wrong with it; each file by file, in the
    order in which they should run."""
    relative, function = path.relative_to(SOURCE), function_at(source, line)
    is_class = function.endswith(".") or not function

    def reaches(test: Passed) -> bool:
        prefix = f"{relative}:{function}"
        if is_class:  # a default, a constant: whatever uses the class or the module
            return any(name.startswith(prefix) for name in test.functions)
        return any(name == prefix or name.startswith(f"{prefix}.<locals>") for name in test.functions)

    found = [test for test in passed if reaches(test)]
    names = {test.name for test in found}
    others = [test for test in passed if test.name not in names and distances.get(test.file, UNREACHABLE) < UNREACHABLE]
    own = defaultdict(float)
    for test in passed:
        own[test.file] += test.seconds

    def order(test: Passed) -> tuple[int, int, float, str]:
        distance = distances.get(test.file, UNREACHABLE)
        return nearness(test.file, path) if distance < UNREACHABLE else UNREACHABLE, distance, own[test.file], test.file

    return sorted(found, key=order), sorted(others, key=lambda test: order(test)[1:])
