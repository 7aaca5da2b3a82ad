"""The agents of package.json as their users start them, each with a script for a server that answers by scripts.

An agent is started with an empty home, with telemetry and updates off, and with proxies that lead nowhere for all but
the loopback address. It works in a folder with two files, each with a word that only its content has; the script lets
it read one after the other and then say the words that its history held.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))
sys.path.insert(0, str(Path(__file__).parent))

from scripted_server import API_KEY, MODEL_NAME
from scripted_worker import TOOLS_OFFERED, written_call
from servers import running
from tool_model import tool_model

HERE = Path(__file__).parent
MODULES = HERE / "node_modules"
WORDS = {"first.txt": "word-apricot", "second.txt": "word-quince"}
WORD = r"word-\w+"
ANSWER = "All is read: {results}."
TOOL_RESULT = "<|im_start|>tool\n"  # as the chat template of tool_model.py writes it
TIMEOUT_S = 240.0  # far more than on a machine that has nothing else to do
NOWHERE = "http://127.0.0.1:9"  # a proxy that nothing listens at


@dataclass(frozen=True)
class Agent:
    """A client with tools of its own. packages: the first one's version is that of the agent. calls: what its script
    lets it call, from the folder that it works in. command: from the server's address and the prompt. settings: what it
    finds in its environment. files: in its home, from the server's address. answer_tool: a tool with which it wants its
    answer, in an argument "answer"; most want none."""

    name: str
    packages: tuple[str, ...]
    calls: Callable[[Path], Sequence[tuple[str, Mapping[str, Any]]]]
    command: Callable[[str], Sequence[str]]
    settings: Callable[[str], Mapping[str, str]] = lambda url: {}
    files: Callable[[str], Mapping[str, str]] = lambda url: {}
    answer_tool: str = ""

    @property
    def marker(self) -> str:
        """What tells its conversations from those of others."""
        return f"[task of {self.name}]"

    @property
    def prompt(self) -> str:
        """What its user types."""
        return f"{self.marker} Which words are in the files?"

    @property
    def answer(self) -> str:
        """What the model says in the end; see scripted_worker.py."""
        return written_call({"name": self.answer_tool, "arguments": {"answer": ANSWER}}) if self.answer_tool else ANSWER

    @property
    def version(self) -> str:
        """The version that is installed."""
        return str(json.loads((MODULES / self.packages[0] / "package.json").read_text())["version"])


def program(name: str) -> str:
    """A command of an installed package."""
    return str(MODULES / ".bin" / name)


def codex() -> Agent:
    """Codex CLI, which speaks /v1/responses."""

    def config(url: str) -> Mapping[str, str]:
        return {
            ".codex/config.toml": f"""\
model = "{MODEL_NAME}"
model_provider = "diptych"
check_for_update_on_startup = false

[analytics]
enabled = false

[feedback]
enabled = false

[model_providers.diptych]
name = "Diptych"
base_url = "{url}/v1"
env_key = "DIPTYCH_API_KEY"
wire_api = "responses"
"""
        }

    return Agent(
        "codex",
        ("@openai/codex",),
        lambda folder: [("exec_command", {"cmd": f"cat {name}"}) for name in WORDS],
        # (the sandbox is another program, which not every machine lets it start)
        lambda prompt: (
            program("codex"), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt
        ),
        lambda url: {"DIPTYCH_API_KEY": API_KEY},
        config,
    )  # fmt: skip


def claude_code() -> Agent:
    """Claude Code, which speaks /v1/messages."""
    return Agent(
        "claude-code",
        ("@anthropic-ai/claude-code",),
        lambda folder: [
            ("Read", {"file_path": str(folder / "first.txt")}),
            ("Bash", {"command": "cat second.txt", "description": "Read the second file"}),
        ],
        lambda prompt: (program("claude"), "--print", prompt, "--allowedTools", "Bash,Read"),
        lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": API_KEY,
            "ANTHROPIC_MODEL": MODEL_NAME,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL_NAME,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_TELEMETRY": "1",
        },
    )


def opencode() -> Agent:
    """opencode, which speaks /v1/chat/completions."""

    def config(url: str) -> Mapping[str, str]:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Diptych",
            "options": {"baseURL": f"{url}/v1", "apiKey": API_KEY},
            "models": {MODEL_NAME: {"name": MODEL_NAME, "limit": {"context": 200_000, "output": 8192}}},
        }
        settings = {
            "provider": {"diptych": provider},
            "model": f"diptych/{MODEL_NAME}",
            "small_model": f"diptych/{MODEL_NAME}",
            "permission": "allow",
            "autoupdate": False,
            "share": "disabled",
        }
        return {".config/opencode/opencode.json": json.dumps(settings)}

    return Agent(
        "opencode",
        ("opencode-ai",),
        lambda folder: [
            ("read", {"filePath": str(folder / "first.txt")}),
            ("bash", {"command": "cat second.txt", "description": "Read the second file"}),
        ],
        lambda prompt: (program("opencode"), "run", prompt),
        lambda url: {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
        config,
    )


def ai_sdk(provider: str, *packages: str) -> Agent:
    """A program made with the AI SDK (ai_sdk.mjs) and one of its providers."""
    name = f"ai-sdk-{provider}"
    return Agent(
        name,
        ("ai", *packages, "zod"),
        lambda folder: [("read_file", {"path": "first.txt"}), ("search", {"path": "second.txt", "text": "word-"})],
        lambda prompt: ("node", str(HERE / "ai_sdk.mjs"), provider),
        lambda url: {
            "AGENT_URL": url,
            "AGENT_KEY": API_KEY,
            "AGENT_MODEL": MODEL_NAME,
            "AGENT_PROMPT": f"[task of {name}] Which words are in the files?",
            "AI_SDK_LOG_WARNINGS": "false",
        },
    )


AGENTS = {
    agent.name: agent
    for agent in (
        codex(),
        claude_code(),
        opencode(),
        ai_sdk("responses", "@ai-sdk/openai"),
        ai_sdk("chat", "@ai-sdk/openai"),
        ai_sdk("compatible", "@ai-sdk/openai-compatible"),
        ai_sdk("anthropic", "@ai-sdk/anthropic"),
    )
}


@dataclass
class AgentServer:
    """A server with the scripts of all agents. folder: see scripted_server.py; also has a folder for each agent."""

    folder: Path
    url: str

    def workspace(self, agent: Agent) -> Path:
        """Where an agent works."""
        return self.folder / agent.name / "work"

    def prompts(self, agent: Agent) -> list[str]:
        """What the model was given of an agent's conversation, but for requests that offer no tools."""
        found = [entry["prompt"] for entry in self._entries("prompts.jsonl")]
        return [prompt for prompt in found if agent.marker in prompt and TOOLS_OFFERED in prompt]

    def requests(self, agent: Agent) -> list[dict[str, Any]]:
        """The requests of its conversation, each with its reply."""
        return [entry for entry in self._entries("requests.jsonl") if agent.marker in entry["request"]]

    def _entries(self, name: str) -> Iterator[dict[str, Any]]:
        path = self.folder / name
        yield from map(json.loads, path.read_text().splitlines() if path.exists() else ())


@contextmanager
def agent_server(folder: Path, agents: Sequence[Agent]) -> Iterator[AgentServer]:
    """A server for these agents, in a new folder."""
    tool_model(folder / "model")
    server = AgentServer(folder, "")
    scripts = {}
    for agent in agents:
        workspace = server.workspace(agent)
        workspace.mkdir(parents=True)
        for name, word in WORDS.items():
            (workspace / name).write_text(f"The word here is {word}\n")
        calls = [{"name": name, "arguments": arguments} for name, arguments in agent.calls(workspace)]
        scripts[agent.marker] = {"calls": calls, "answer": agent.answer, "results": WORD}
    (folder / "scripts.json").write_text(json.dumps(scripts))
    command = (sys.executable, str(HERE / "scripted_server.py"), str(folder))
    with running(command, folder / "server.log") as process:
        server.url = process.url
        yield server


def run_agent(server: AgentServer, agent: Agent) -> "subprocess.CompletedProcess[str]":
    """Let an agent do its task to the end. Raises TimeoutExpired."""
    home = server.folder / agent.name / "home"
    for name, text in agent.files(server.url).items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    home.mkdir(exist_ok=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "HTTP_PROXY": NOWHERE,
        "HTTPS_PROXY": NOWHERE,
        "NO_PROXY": "127.0.0.1,localhost",
        **agent.settings(server.url),
    }
    return subprocess.run(
        agent.command(agent.prompt),
        cwd=server.workspace(agent),
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def expected_answer() -> str:
    """What an agent says whose history held the results of all its calls."""
    return ANSWER.replace("{results}", ", ".join(WORDS.values()))


def words_of_results(prompt: str) -> list[str]:
    """The words in the results of tools in a prompt, in their order."""
    return list(dict.fromkeys(re.findall(WORD, prompt.partition(TOOL_RESULT)[2])))


def why_not() -> str:
    """Why the agents cannot run here; nothing where they can."""
    done = subprocess.run((str(HERE.parents[1] / "scripts" / "clients"), "reason"), capture_output=True, text=True)
    return done.stdout.strip()
