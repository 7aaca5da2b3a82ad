"""Published clients against a server: which of their calls work?

    python benchmarks/clients.py calls --folder FOLDER [--only NAME ...] [--json clients.json]

FOLDER gets a virtual environment or a folder of node for each client, installed by its name (0.8 GB in all), where it
has none yet; the table names the versions. The server is ``diptych serve --prefill 1 --decode 1`` of the bundled model,
with an API key and with a chat template that takes tools. The model is far too small to choose a tool or to follow a
schema by itself: calls are forced (``tool_choice``), and forms are grammars. Of an abort the server must know within a
second.

Prints a table of clients and calls: ok, FAILED, or nothing where the client has no such call, and then each error. The
scripts in ``clients/`` make the calls; each is run with nothing of Diptych in reach. Needs npm and node 20 or newer for
the clients of node; without them those are left out.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import HERE, ROOT, report
from servers import URL, diptych_server

sys.path.insert(0, str(ROOT))
from tests.serving import tool_model

SCRIPTS = HERE / "clients"
KEY = "key-of-the-clients"
PAGE = "http://localhost:3000"  # of a web page that calls the server
TIMEOUT_S = 300
CALLS = (
    *("models", "chat", "stream", "completions", "n", "logprobs", "tools", "structured", "responses", "embeddings"),
    *("abort", "request id", "too long", "CORS"),
)


@dataclass(frozen=True)
class Client:
    """What is installed and which script calls it. packages: by their names; the first one's version is shown."""

    name: str
    script: str
    packages: tuple[str, ...] = ()

    @property
    def is_of_node(self) -> bool:
        """Whether it is a client of node's."""
        return self.script.endswith(".mjs")


CLIENTS = (
    Client("openai-python", "with_openai.py", ("openai",)),
    Client("openai-node", "openai.mjs", ("openai", "zod")),
    Client("ai", "ai.mjs", ("ai", "@ai-sdk/openai-compatible", "zod")),
    Client("langchain-openai", "with_langchain.py", ("langchain-openai",)),
    Client("litellm", "with_litellm.py", ("litellm",)),
    Client("llm", "with_llm.py", ("llm",)),
    Client("anthropic-python", "with_anthropic.py", ("anthropic",)),
    Client("plain calls", "plain.py"),
)


class Installed:
    """The clients, in a folder. Each of Python's has an environment of its own: some want other versions of the same
    packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, client: Client) -> None:
        """Install one that is not there yet."""
        place = self.place(client)
        if not client.packages or (place / "installed").exists():
            return
        print(f"installing {', '.join(client.packages)} ...", file=sys.stderr)
        place.mkdir(parents=True, exist_ok=True)
        if client.is_of_node:
            subprocess.run(("npm", "install", "--silent", "--no-progress", *client.packages), cwd=place, check=True)
        else:
            subprocess.run((sys.executable, "-m", "venv", str(place)), check=True)
            subprocess.run((place / "bin/pip", "install", "--quiet", *client.packages), check=True)
        (place / "installed").touch()

    def place(self, client: Client) -> Path:
        """The folder in which a client is installed."""
        return self.folder / client.name.replace(" ", "-")

    def version(self, client: Client) -> str:
        """The version of its first package; "" for plain calls."""
        if not client.packages:
            return ""
        if client.is_of_node:
            text = (self.place(client) / "node_modules" / client.packages[0] / "package.json").read_text()
            return str(json.loads(text)["version"])
        code = f"from importlib.metadata import version; print(version({client.packages[0]!r}))"
        done = subprocess.run((self.place(client) / "bin/python", "-c", code), capture_output=True, text=True)
        return done.stdout.strip()

    def command(self, client: Client) -> tuple[str, ...]:
        """Its calls. A script of node's finds packages beside itself, so it is copied there."""
        if not client.is_of_node:
            python = self.place(client) / "bin/python" if client.packages else Path(sys.executable)
            return (str(python), str(SCRIPTS / client.script))
        for name in ("calls.mjs", client.script):
            shutil.copy(SCRIPTS / name, self.place(client) / name)
        return ("node", str(self.place(client) / client.script))


def model_in(folder: Path) -> Path:
    """The bundled model with a chat template that takes tools and knows no reasoning: a model as small as this
    would reason until its tokens are used up."""
    path = tool_model.tool_model(folder) / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = re.sub(r"{% if enable_thinking %}.*?{% endif %}", "", config["chat_template"], flags=re.S)
    path.write_text(json.dumps(config))
    return folder


def environment(model: str) -> dict[str, str]:
    """What the scripts are given: nothing of this Python's packages, no proxy, no files from elsewhere."""
    given = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    told = {"CLIENTS_URL": URL, "CLIENTS_MODEL": model, "CLIENTS_KEY": KEY, "PYTHONDONTWRITEBYTECODE": "1"}
    return {**given, **told, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else litellm asks GitHub for prices


def calls_of(command: Sequence[str], model: str) -> dict[str, str]:
    """The outcome of each call that a script makes. One that ends early has a call "script"."""
    found: dict[str, str] = {}
    try:
        done = subprocess.run(command, env=environment(model), capture_output=True, text=True, timeout=TIMEOUT_S)
        printed, wrong = done.stdout, done.stderr.strip()[-600:] if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        wrong = f"not over after {TIMEOUT_S} s"
    for line in printed.splitlines():
        if line.startswith('{"call"'):
            call = json.loads(line)
            found[call["call"]] = call["outcome"]
    return found | ({"script": wrong} if wrong else {})


def row_of(client: Client, version: str, outcomes: dict[str, str]) -> dict[str, Any]:
    """The client's row of the table."""
    cells = {call: {"ok": "ok", "": ""}.get(outcomes.get(call, ""), "FAILED") for call in CALLS}
    return {"client": client.name, "version": version, **cells}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    parser.add_argument("--folder", type=Path, required=True, help="where the clients are, or will be, installed")
    parser.add_argument("--only", nargs="+", choices=[client.name for client in CLIENTS], help="these clients")


def main(options: argparse.Namespace) -> None:
    """Install, serve, call, report."""
    installed = Installed(options.folder.resolve())
    has_node = all(shutil.which(name) for name in ("node", "npm"))
    clients = [client for client in CLIENTS if not options.only or client.name in options.only]
    left_out = [client.name for client in clients if client.is_of_node and not has_node]
    clients = [client for client in clients if client.name not in left_out]
    for client in clients:
        installed.add(client)
    rows, errors = [], {}
    with tempfile.TemporaryDirectory() as folder:
        model = model_in(Path(folder) / "stdlib-python-tools")
        shape = ("--prefill", "1", "--decode", "1", "--api-key", KEY, "--cors-origin", PAGE)
        with diptych_server(model, *shape):
            for client in clients:
                print(client.name, file=sys.stderr)
                outcomes = calls_of(installed.command(client), model.name)
                rows.append(row_of(client, installed.version(client), outcomes))
                errors |= {f"{client.name}, {call}": said for call, said in outcomes.items() if said != "ok"}
    report("Published clients and their calls", rows, options.json, errors=errors, left_out=left_out)
    for where, said in errors.items():
        print(f"{where}: {said}")
    if left_out:
        print(f"left out, since node or npm is missing: {', '.join(left_out)}")
