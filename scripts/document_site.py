"""What scripts/docs does: the generated documents, and the folder that mkdocs makes the site of.

usage: document_site.py tables | stage
    tables: write docs/supported.md, docs/settings.md, the tables in README.md and docs/security.md, and llms.txt
    stage: copy every page to build/pages under the name that it has in mkdocs.yml, with links between them changed
"""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "pages"
MARKS = ("<!-- The table is written by scripts/docs tables. -->\n\n", "\n<!-- End of the table. -->\n")
OTHER_PAGES = {  # pages that are not in docs, by the name that they have in the site
    "index.md": "README.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "benchmarks.md": "benchmarks/README.md",
    "bundled-model.md": "src/diptych/bundled/stdlib-python/README.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
ENTRY = re.compile(r"^- \[[^\]]+\]\(([^)]+)\): (.+(?:\n  .+)*)", re.MULTILINE)
SUMMARY = "An LLM serving system in Python that is built around the split of prefill and decode, with a simulator that "
SUMMARY += "runs the same scheduling code."


def sources() -> dict[str, Path]:
    """The file behind each page of the site, by its name there."""
    pages = {path.name: path for path in sorted((ROOT / "docs").glob("*.md"))}
    return pages | {name: ROOT / path for name, path in OTHER_PAGES.items()}


def navigation() -> dict[str, dict[str, str]]:
    """Section to title to page, as in mkdocs.yml."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    return {
        section: {title: page for entry in entries for title, page in entry.items()}
        for part in nav
        for section, entries in part.items()
    }


def generated() -> dict[Path, str]:
    """The text of every generated file."""
    from document_limits import limits_table
    from document_settings import settings_page
    from document_support import readme_table, supported_page

    readme, security = ROOT / "README.md", ROOT / "docs" / "security.md"
    return {
        ROOT / "docs" / "supported.md": supported_page(),
        ROOT / "docs" / "settings.md": settings_page(),
        security: _with_table(security.read_text(), limits_table()),
        readme: _with_table(readme.read_text(), readme_table()),
        ROOT / "llms.txt": llms(readme.read_text()),
    }


def _with_table(text: str, table: str) -> str:
    before, rest = text.split(MARKS[0])
    return before + MARKS[0] + table + MARKS[1] + rest.split(MARKS[1])[1]


def llms(readme: str) -> str:
    """The pages for a language model, in the format of llmstxt.org; what each is about is in the README's list."""
    about = {(ROOT / target).resolve(): " ".join(text.split()) for target, text in ENTRY.findall(readme)}
    files = sources()
    lines = ["# Diptych", "", f"> {SUMMARY}", ""]
    for section, pages in navigation().items():
        lines += [f"## {section}", ""]
        for title, page in pages.items():
            path = files.get(page, ROOT / "docs" / page)
            words = about.get(path.resolve(), "")
            lines.append(f"- [{title}]({path.relative_to(ROOT).as_posix()})" + (f": {words}" if words else ""))
        lines.append("")
    return "\n".join(lines)


def stage(folder: Path = PAGES) -> None:
    """Fill the folder that mkdocs reads."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs" / "images", folder / "images")
    shutil.copy(ROOT / "docs" / "site.css", folder)
    files = sources()
    names = {path.resolve(): name for name, path in files.items()}
    for name, path in files.items():
        (folder / name).write_text(_relinked(path, names))
    links = {path.relative_to(ROOT).as_posix(): name for name, path in files.items()}
    text = LINK.sub(lambda link: f"[{link[2]}]({links.get(link[3], link[3])})", (ROOT / "llms.txt").read_text())
    (folder / "llms.txt").write_text(text)


def _relinked(path: Path, names: dict[Path, str]) -> str:
    """The text of a page with its links as the site has them; links to other files of the repository become text."""

    def changed(link: re.Match[str]) -> str:
        mark, words, target = link.groups()
        if target.startswith(("#", "http:", "https:")):
            return link[0]
        file, hash_sign, anchor = target.partition("#")
        place = (path.parent / file).resolve()
        if place in names:
            return f"{mark}[{words}]({names[place]}{hash_sign}{anchor})"
        if (ROOT / "docs" / "images") in place.parents:
            return f"{mark}[{words}](images/{place.name})"
        return f"{words} (`{place.relative_to(ROOT)}`)" if words.strip("`") != place.name else f"`{place.name}`"

    return "".join(part if is_code else LINK.sub(changed, part) for is_code, part in _parts(path.read_text()))


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """The text in pieces, and whether each is a block of code."""
    for number, part in enumerate(re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)):
        yield number % 2 == 1, part


def main(arguments: list[str]) -> int:
    """Run one of the commands that the module names. Returns the exit status."""
    if arguments == ["tables"]:
        for path, text in generated().items():
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
                print(f"written: {path.relative_to(ROOT)}")
        return 0
    if arguments == ["stage"]:
        stage()
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
