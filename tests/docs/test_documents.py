"""What the documents say exists: commands parse, links lead somewhere, code is valid, generated pages are current."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from diptych.cli import main as cli
from diptych.cli.other_names import INSTEAD, SAME
from diptych.serving.api.bodies import ignored_fields
from diptych.serving.api.messages_request import MessagesBody
from diptych.serving.api.protocol import ChatBody, CompletionBody
from diptych.serving.api.responses_request import ResponsesBody
from diptych.simulation.settings import settings_from
from tests.docs.documents import PAGES, ROOT, SHELL, Block, anchors, blocks, commands, links, spans

COMMANDS: dict[str, Any] = get_command(cli.app).commands  # type: ignore[attr-defined]
SERVES = ("scripts/serve",)  # what passes its arguments on to `diptych serve`
# Options of other programs that the text names.
FOREIGN = {
    *("--cpus", "--cpuset-cpus"),  # docker
    *("--metrics", "--enable-metrics", "--continuous-batching"),  # llama.cpp, SGLang, transformers
    *("--local-dir", "--no-deps", "--extra-index-url"),  # hf download, pip, pip
    *("--scheduler-cls", "--enable-scale-out"),  # vLLM
    *("--enable-forward-pass-metrics", "--forward-pass-metrics-ipc-name"),  # SGLang
}
FOREIGN_PAGES = ("docs/migrating.md", "benchmarks/README.md", "docs/testing.md")  # options of vLLM and of scripts
BODIES = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
}
METRIC = re.compile(r"\b(?:vllm|diptych):([a-z_]+)")
SUFFIXES = re.compile(r"_(total|sum|count|bucket)$")


def command_of(words: Sequence[str]) -> tuple[Any, list[str]]:
    """The command that the words name, of a group of commands too, and the words after its name."""
    command, rest = COMMANDS[words[0]], list(words[1:])
    while rest and rest[0] in getattr(command, "commands", ()):
        command = command.commands[rest.pop(0)]
    return command, rest


def all_commands(commands: Mapping[str, Any]) -> Iterator[Any]:
    for command in commands.values():
        yield command
        yield from all_commands(getattr(command, "commands", {}))


def names_of(command: Any) -> set[str]:
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)}


KNOWN_OPTIONS = {name for command in all_commands(COMMANDS) for name in names_of(command)}


def named(found: Iterator[Block]) -> Any:
    return [pytest.param(block, id=block.name) for block in found]


def calls() -> Iterator[tuple[str, list[str]]]:
    """(where, the words after `diptych`) of every command in the documents."""
    for block in blocks(*SHELL):
        for words in commands(block):
            if Path(words[0]).name == "diptych" and words[1:]:
                yield block.name, words[1:]
            elif words[0] in SERVES:
                yield block.name, ["serve", *words[1:]]
    for block in blocks("ini"):
        for line in re.findall(r"^ExecStart=(.+)$", block.text, re.MULTILINE):
            yield block.name, line.split()[1:]


CALLS = [pytest.param(words, id=f"{where} {' '.join(words)[:50]}") for where, words in calls()]


@pytest.mark.parametrize("words", CALLS)
def test_every_command_in_the_documents_parses(words: list[str]) -> None:
    if words[0] in ("--version", "--help", "-h"):
        return
    assert words[0] in COMMANDS
    command, rest = command_of(words)
    if rest and "--help" not in rest:
        given = [word for word in rest if word != "..."]
        assert {word.partition("=")[0] for word in given if word.startswith("--")} <= names_of(command)  # whole names
        command.make_context(words[0], given)  # raises for an unknown option, or a value of the wrong kind


def test_there_are_commands_to_check() -> None:
    assert len(CALLS) > 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_the_text_names_has_its_options(page: Path) -> None:
    for span in spans(page):
        words = span.split()
        if words[0] == "diptych" and len(words) > 1 and words[1].isalpha() and words[1].islower():
            given = {word for word in words if word.startswith("--")}
            assert given - names_of(command_of(words[1:])[0]) - {"--help"} == set(), span


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_option_that_the_text_names_exists(page: Path) -> None:
    if str(page.relative_to(ROOT)) in FOREIGN_PAGES:
        return
    found = {name for span in spans(page) for name in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", span)}
    assert found - KNOWN_OPTIONS - FOREIGN - SAME.keys() - INSTEAD.keys() - {"--help", "--version"} == set()


def test_options_of_vllm_are_those_that_the_command_line_knows_and_ours_exist() -> None:
    table = (ROOT / "docs/migrating.md").read_text().partition("## Options of the server")[2].partition("## ")[0]
    ours = {name for option in COMMANDS["serve"].params for name in (*option.opts, *option.secondary_opts)}
    known, wrong = ours | SAME.keys() | INSTEAD.keys(), []
    for row in table.splitlines():
        if row.startswith("| `--"):
            theirs, here = (set(re.findall(r"--[a-z][a-z0-9-]*", cell)) for cell in row.split("|")[1:3])
            wrong += [*(theirs - known), *(here - ours)]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    wrong = []
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


@pytest.mark.parametrize("block", named(blocks(*SHELL)))
def test_scripts_that_are_called_exist(block: Block) -> None:
    words = [word for command in commands(block) for word in command[:2]]
    missing = [word for word in words if word.startswith(("scripts/", "benchmarks/")) and not (ROOT / word).exists()]
    assert missing == []


@pytest.mark.parametrize("block", named(blocks("python")))
def test_python_blocks_compile(block: Block) -> None:
    compile(block.text, block.name, "exec")


@pytest.mark.parametrize("block", named(blocks("json")))
def test_json_blocks_are_json(block: Block) -> None:
    json.loads(block.text)


@pytest.mark.parametrize("block", named(blocks("yaml")))
def test_yaml_blocks_are_yaml(block: Block) -> None:
    assert yaml.safe_load(block.text)


@pytest.mark.parametrize("block", named(blocks("toml")))
def test_toml_blocks_are_settings(block: Block) -> None:
    data = tomllib.loads(block.text)
    if any(name in data for name in ("pools", "workload")):
        settings_from(data)


def bodies() -> Iterator[Any]:
    for block in blocks(*SHELL):
        for words in commands(block):
            paths = [path for path in BODIES for word in words if word.endswith(path)]
            if words[0] == "curl" and paths and "-d" in words:
                yield pytest.param(paths[0], words[words.index("-d") + 1], id=block.name)


@pytest.mark.parametrize(("path", "text"), list(bodies()))
def test_requests_that_are_sent_have_only_known_fields(path: str, text: str) -> None:
    assert ignored_fields(BODIES[path].model_validate(json.loads(text))) == []


@cache
def sources_of_metrics() -> str:
    texts = [path.read_text() for path in (ROOT / "src/diptych/serving").rglob("*.py")]
    return "".join(text for text in texts if "metric" in text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_metric_that_is_named_exists(page: Path) -> None:
    sources = sources_of_metrics()
    names = {SUFFIXES.sub("", name) for name in METRIC.findall(page.read_text())}
    assert sorted(name for name in names if SUFFIXES.sub("", name.removesuffix("_seconds")) not in sources) == []


def test_generated_pages_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from document_site import generated

    stale = [str(path.relative_to(ROOT)) for path, text in generated().items() if path.read_text() != text]
    assert stale == [], "run: scripts/docs tables"


def test_every_page_is_in_the_site_and_in_the_list_of_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from document_site import navigation, sources

    listed = [page for pages in navigation().values() for page in pages.values()]
    assert sorted(listed) == sorted(sources())
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in links(ROOT / "README.md")}
    assert [name for name, path in sources().items() if path != ROOT / "README.md" and path not in linked] == []
