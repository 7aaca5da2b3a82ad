"""Published agents get through a tool loop of three steps: Codex, Claude Code, opencode and the AI SDK from npm.

The server, its prompts and its readers of answers are real; only what the model says is written beforehand.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from agents import AGENTS, WORDS, AgentServer, agent_server, expected_answer, run_agent, why_not, words_of_results

pytestmark = pytest.mark.system


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


def test_versions_are_locked() -> None:
    package = (Path(__file__).parent / "package.json").read_text()
    versions = re.findall(r'"[@\w/-]+": "([^"]*\d[^"]*)"', package)
    assert len(versions) == 8 and all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions)
