"""Do published agents and frameworks for them get through a tool loop of three steps, unchanged and streamed?

    python benchmarks/clients.py agents --folder FOLDER [--only NAME ...] [--json agent_loops.json]

The server is real, and so are its prompts and its readers of answers; only what the model says is written beforehand
(tests/clients): it calls a tool that reads a file, then another, and then says what both have brought. The programs in
``clients/loop_*.py`` are written as the documents of each framework show it, and run with nothing of Diptych in reach.

FOLDER gets a virtual environment for each package of Python that has none there yet. Agents of node are those of
tests/clients (scripts/clients install); without them they are left out. Prints a table: ok, or FAILED and then the
error.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import HERE, ROOT, report

sys.path.insert(0, str(ROOT / "tests" / "clients"))

from agents import AGENTS, API_KEY, MODEL_NAME, Agent, AgentServer, agent_server, expected_answer, run_agent, why_not

SCRIPTS = HERE / "clients"


@dataclass(frozen=True)
class Framework:
    """A package of Python with a program for it. ways: what the program can be told to use, if anything. answer_tool:
    see Agent."""

    name: str
    packages: tuple[str, ...]
    script: str
    ways: tuple[str, ...] = ("",)
    answer_tool: str = ""

    def agents(self, folder: Path) -> list[Agent]:
        """One for each way, in the environment of its package."""
        return [self._agent(folder / self.name, way) for way in self.ways]

    def _agent(self, place: Path, way: str) -> Agent:
        name = f"{self.name}-{way}" if way else self.name
        return Agent(
            name,
            self.packages,
            lambda folder: [("read_file", {"path": "first.txt"}), ("count_lines", {"path": "second.txt"})],
            lambda prompt: (str(place / "bin/python"), str(SCRIPTS / self.script), *filter(None, (way,))),
            lambda url: {
                "AGENT_URL": url,
                "AGENT_KEY": API_KEY,
                "AGENT_MODEL": MODEL_NAME,
                "AGENT_PROMPT": f"[task of {name}] Which words are in the files?",
                "PYTHONDONTWRITEBYTECODE": "1",
                "CREWAI_DISABLE_TELEMETRY": "true",
                "OTEL_SDK_DISABLED": "true",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            },
            answer_tool=self.answer_tool,
        )

    def install(self, folder: Path) -> None:
        """Install it where it is not there yet."""
        place = folder / self.name
        if (place / "installed").exists():
            return
        print(f"installing {', '.join(self.packages)} ...", file=sys.stderr)
        subprocess.run((sys.executable, "-m", "venv", str(place)), check=True)
        subprocess.run((place / "bin/pip", "install", "--quiet", *self.packages), check=True)
        (place / "installed").touch()

    def version(self, folder: Path) -> str:
        """The version of its first package."""
        name = self.packages[0].partition("[")[0]
        code = f"from importlib.metadata import version; print(version({name!r}))"
        done = subprocess.run((folder / self.name / "bin/python", "-c", code), capture_output=True, text=True)
        return done.stdout.strip()


FRAMEWORKS = (
    Framework("openai", ("openai",), "loop_with_openai.py", ("chat", "responses")),
    Framework("anthropic", ("anthropic",), "loop_with_anthropic.py"),
    Framework("openai-agents", ("openai-agents",), "loop_with_openai_agents.py", ("responses", "chat")),
    Framework(
        "pydantic-ai",
        ("pydantic-ai-slim[openai,anthropic]",),
        "loop_with_pydantic_ai.py",
        ("chat", "responses", "anthropic"),
    ),
    Framework("langgraph", ("langgraph", "langchain", "langchain-openai"), "loop_with_langgraph.py"),
    Framework("crewai", ("crewai",), "loop_with_crewai.py"),
    Framework("smolagents", ("smolagents[openai]",), "loop_with_smolagents.py", answer_tool="final_answer"),
)


def outcome(server: AgentServer, agent: Agent) -> str:
    """Nothing where an agent gets through, else what went wrong."""
    try:
        done = run_agent(server, agent)
    except subprocess.TimeoutExpired:
        return "it did not end"
    refused = [entry["reply"][:300] for entry in server.requests(agent) if entry["status"] != 200]
    if done.returncode or expected_answer() not in done.stdout:
        return refused[0] if refused else (done.stderr or done.stdout).strip()[-600:]
    return ""


def row_of(server: AgentServer, agent: Agent, version: str) -> Mapping[str, Any]:
    """Run an agent: a row of the table, with its error."""
    begin = time.monotonic()
    wrong = outcome(server, agent)
    requests = server.requests(agent)
    return {
        "agent": agent.name,
        "version": version,
        "routes": ", ".join(sorted({entry["path"] for entry in requests})),
        "requests": len(server.prompts(agent)),
        "loop": "FAILED" if wrong else "ok",
        "seconds": round(time.monotonic() - begin, 1),
        "error": wrong,
    }


def chosen(only: Sequence[str] | None, folder: Path) -> list[tuple[Agent, str]]:
    """The agents that are asked for, installed, with their versions."""
    found = []
    for framework in FRAMEWORKS:
        if only is None or framework.name in only:
            framework.install(folder)
            version = framework.version(folder)
            found += [(agent, version) for agent in framework.agents(folder)]
    if not why_not():
        found += [(agent, agent.version) for agent in AGENTS.values() if only is None or agent.name in only]
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument(
        "--folder", type=Path, required=True, help="where packages of Python are, or will be, installed"
    )
    names = [*(framework.name for framework in FRAMEWORKS), *AGENTS]
    parser.add_argument("--only", nargs="+", choices=names, help="these")


def main(options: argparse.Namespace) -> None:
    """Install, serve, run, report."""
    agents = chosen(options.only, options.folder.resolve())
    left_out = list(AGENTS) if why_not() else []
    with TemporaryDirectory() as folder, agent_server(Path(folder), [agent for agent, _ in agents]) as server:
        rows = []
        for agent, version in agents:
            print(agent.name, file=sys.stderr)
            rows.append(row_of(server, agent, version))
    errors = {row["agent"]: row["error"] for row in rows if row["error"]}
    table = [{name: value for name, value in row.items() if name != "error"} for row in rows]
    report("Agents and a tool loop of three steps", table, options.json, errors=errors, left_out=left_out)
    print(json.dumps(errors, indent=1) if errors else f"{len(rows)} of {len(rows)} got through")
    if left_out:
        print(f"left out: {', '.join(left_out)}: {why_not()}")
