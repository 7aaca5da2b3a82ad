"""The documents as the tests read them: pages, blocks of code, commands, links."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
)
SHELL = ("sh", "bash", "")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_SEPARATORS = ("|", ">", ">>", "&&", ";", "&")


@dataclass(frozen=True, slots=True)
class Block:
    """One block of code. line: of its first line."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        """For the names of tests."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> Iterator[Block]:
    """All blocks in these languages."""
    for page in PAGES:
        text = page.read_text()
        for found in _BLOCK.finditer(text):
            if found[1] in languages:
                yield Block(page, text.count("\n", 0, found.start()) + 2, found[1], found[2])


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return _BLOCK.sub("", page.read_text())


def spans(page: Path) -> list[str]:
    """What is set as code within the prose."""
    return _SPAN.findall(prose(page))


def links(page: Path) -> list[str]:
    """The targets of its links to other files and places of the repository."""
    return [link for link in _LINK.findall(prose(page)) if not link.startswith(("http:", "https:", "mailto:"))]


def anchors(page: Path) -> set[str]:
    """The names under which its headings can be reached."""
    titles = (re.sub(r"[`*]|\]\([^)]*\)|\[", "", title) for title in _HEADING.findall(prose(page)))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of a shell block, without variables, pipes and redirections."""
    for line in block.text.replace("\\\n", " ").splitlines():
        yield from _split(line.removeprefix("$ "))


def _split(line: str) -> Iterator[list[str]]:
    """The words of each command of a line; nothing for a line that is no shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|>&;")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # an open quotation mark: a text of several lines
        return
    command: list[str] = []
    for word in [*words, ";"]:
        if word in _SEPARATORS:
            if command:
                yield command
            command = []
        elif command or "=" not in word:
            command.append(word)
