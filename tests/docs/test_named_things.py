"""What docstrings, comments and documents name exists: files, classes, commands, packages."""

import ast
import re
from functools import cache
from pathlib import Path

import typer

from diptych.cli.main import app

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "diptych"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("src", "tests", "benchmarks", "scripts", "docs", "deploy", "findings")

# Names of others, and parts of names that a reader is to replace.
FOREIGN_FILES = {"llama.cpp", "tcp.h", "sysexits.h", "_connector.py", "NAME_connector.py"}
FOREIGN_CLASSES = {
    "AlgorithmIdentifier", "CommonMark", "ContextTokens", "DeepSeek", "DeltaNet", "DistServe", "GeneratedTokens",
    "InfiniBand", "McKenzie", "MessagePack", "MetaPathFinder", "ModelOpt", "NumPy", "PanicException", "PyTorch",
    "SchedulerInterface", "SentencePiece", "WebSocket", "WireGuard",
}  # fmt: skip
OLD_NAMES = "\n## Names that changed\n"  # the last section of docs/architecture.md
FILE = re.compile(r"(?<![\w.])([A-Za-z_]\w*\.(?:py|cpp|h|js))\b")
CLASS = re.compile(r"\b((?:[A-Z][a-z]+[0-9]*){2,})\b")
COMMAND = re.compile(r"`(?:[^`\n]*? )??diptych ([a-z]+)\b(?! import)")


@cache
def files() -> frozenset[str]:
    """The names of all files of the repository."""
    return frozenset(
        path.name
        for path in (*ROOT.glob("*"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*")))
        if path.is_file()
    )


@cache
def read() -> tuple[frozenset[str], tuple[tuple[str, str], ...]]:
    """Every name that the code of the package uses or defines, and (where, text) of each docstring and comment."""
    names, texts = set(), []
    for path in sorted(SOURCE.rglob("*.py")):
        where, text = str(path.relative_to(SOURCE)), path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                texts.append((where, ast.get_docstring(node, clean=False) or ""))
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.alias):
                names |= {node.name.rpartition(".")[2], node.asname or ""}
        texts += [(where, line.partition("#")[2]) for line in text.splitlines() if "#" in line]
    return frozenset(names), tuple(texts)


def documented() -> list[tuple[str, str]]:
    """What people read: docstrings, comments and documents, but for the table of names that were."""
    return [*read()[1], *((path.name, path.read_text().partition(OLD_NAMES)[0]) for path in DOCUMENTS)]


def test_files_that_docstrings_and_documents_name_exist() -> None:
    unknown = {(where, name) for where, text in documented() for name in FILE.findall(text)}
    assert sorted(found for found in unknown if found[1] not in files() | FOREIGN_FILES) == []


def test_classes_that_docstrings_name_exist() -> None:
    unknown = {(where, name) for where, text in read()[1] for name in CLASS.findall(text)}
    known = read()[0] | FOREIGN_CLASSES
    assert sorted(found for found in unknown if not {found[1], found[1].removesuffix("s")} & known) == []


def test_commands_that_docstrings_and_documents_name_exist() -> None:
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    found = {(where, name) for where, text in documented() for name in COMMAND.findall(text)}
    assert sorted(each for each in found if each[1] not in commands) == []
    assert len({name for _, name in found}) > 15


def test_the_packages_of_the_architecture_are_those_of_the_tree() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = text.partition("```\nsrc/diptych/\n")[2].partition("tests/  ")[0]
    drawn: dict[str, set[str]] = {}
    for line in block.splitlines():
        if top := re.match(r"  (\w+)/", line):
            package = drawn.setdefault(top[1], set())
        elif inner := re.match(r"    (?:  )?((?:\w+/(?:, )?)+)", line):
            package |= set(re.findall(r"(\w+)/", inner[1]))
    real = {
        path.name: {inner.parent.name for inner in path.glob("**/*/__init__.py")}
        for path in SOURCE.iterdir()
        if path.is_dir() and not path.name.startswith("_")
    }
    assert drawn.keys() == real.keys()
    for name, inner in drawn.items():
        assert inner <= real[name], name
        assert name not in ("control", "runtime", "serving") or len(real[name] - inner) <= 4, (name, real[name] - inner)
