"""Published agents get through a tool loop of three steps: Codex, Claude Code, opencode and the AI SDK from npm.

The server, its prompts and its readers of answers are real; only what the model says is written beforehand.
"""

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from agents import (
    AGENTS,
    API_KEY,
    MODEL_NAME,
    WORDS,
    AgentServer,
    agent_server,
    expected_answer,
    run_agent,
    why_not,
    words_of_results,
)

pytestmark = pytest.mark.system
MODEL_IN_PAGE, KEY_IN_PAGE = "qwen3-coder", "KEY"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentServer]:
    if reason := why_not():
        pytest.skip(reason)
    with agent_server(tmp_path_factory.mktemp("agents"), list(AGENTS.values())) as running:
        yield running


@pytest.mark.parametrize("name", sorted(AGENTS))
def test_a_published_agent_gets_through_a_tool_loop(name: str, server: AgentServer) -> None:
    agent = AGENTS[name]
    done = run_agent(server, agent)
    requests = server.requests(agent)
    refused = [(entry["path"], entry["reply"][:500]) for entry in requests if entry["status"] != 200]
    assert refused == [], "what the server refused"
    assert done.returncode == 0 and expected_answer() in done.stdout, (done.stdout[-3000:], done.stderr[-3000:])
    assert {entry["headers"]["content-type"].partition(";")[0] for entry in requests} == {"text/event-stream"}
    seen = [words_of_results(prompt) for prompt in server.prompts(agent)]
    words = list(WORDS.values())
    assert [result for number, result in enumerate(seen) if result not in seen[:number]] == [[], words[:1], words]


PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
URL = "http://127.0.0.1:8000"  # of the server in the page


def block(language: str, word: str) -> str:
    """The block of code in the page that has this word."""
    found = [
        text for text in re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) if word in text
    ]
    assert len(found) == 1, word
    return str(found[0])


def without(settings: Any, *names: str) -> Any:
    """The settings without those of these names, at any depth, and without the names of model and key."""
    if not isinstance(settings, dict):
        return "" if settings in (MODEL_NAME, API_KEY, MODEL_IN_PAGE, KEY_IN_PAGE) else settings
    kept = {name.replace(MODEL_IN_PAGE, MODEL_NAME): value for name, value in settings.items() if name not in names}
    return {name: without(value, *names) for name, value in kept.items()}


def test_what_the_page_says_is_what_is_tried() -> None:
    codex = tomllib.loads(next(iter(AGENTS["codex"].files(URL).values())))
    said = tomllib.loads(block("toml", "wire_api"))
    quiet = ("check_for_update_on_startup", "analytics", "feedback")
    assert without(codex, *quiet) == without(said, "model_context_window", "stream_idle_timeout_ms")
    opencode = json.loads(next(iter(AGENTS["opencode"].files(URL).values())))
    quiet = ("permission", "autoupdate", "share", "name", "limit", "model", "small_model")
    said = json.loads(block("json", "@ai-sdk/openai-compatible"))
    assert without(opencode, *quiet) == without(said, *quiet, "$schema", "headerTimeout", "chunkTimeout")
    claude = AGENTS["claude-code"].settings(URL)
    said = dict(re.findall(r"export (\w+)=(\S+)", block("sh", "ANTHROPIC_BASE_URL")))
    switches = {name for name in claude if name.startswith("DISABLE_")}  # all of them by the last of those in the page
    assert {name: without(value) for name, value in claude.items() if name not in switches}.items() <= without(
        said
    ).items()


TITLES = {
    "Codex CLI": "@openai/codex",
    "Claude Code": "@anthropic-ai/claude-code",
    "opencode": "opencode-ai",
    "AI SDK": "ai",
}


@pytest.mark.parametrize("title", TITLES)
def test_versions_of_the_page_are_those_that_are_tried(title: str) -> None:
    package = json.loads((Path(__file__).parent / "package.json").read_text())["dependencies"]
    version = re.escape(package[TITLES[title]])
    assert re.search(rf"^\| \[{title}\].*\| {version}, in continuous integration \|$", PAGE, re.MULTILINE)


def test_versions_are_locked() -> None:
    package = (Path(__file__).parent / "package.json").read_text()
    versions = re.findall(r'"[@\w/-]+": "([^"]*\d[^"]*)"', package)
    assert len(versions) == 8 and all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions)
