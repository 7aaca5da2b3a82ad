"""The commands that the help shows: every command has some, they parse, and they run."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from diptych.cli import main as cli
from diptych.cli.batch_client import BatchClient
from diptych.cli.examples import EXAMPLES, SERVER
from diptych.diagnosis.adapters.http_get import Site
from diptych.serving.link.engine_options import BUNDLED_MODEL
from tests.fake_hub import FakeRepo, fake_hub

COMMANDS: dict[str, Any] = get_command(cli.app).commands  # type: ignore[attr-defined]
TRACE = Path(__file__).parent.parent / "docs" / "example-trace.csv"
GROUPS = ("batch", "cache", "keys")
ALL = COMMANDS | {f"{group} {name}": command for group in GROUPS for name, command in COMMANDS[group].commands.items()}
DIPTYCH = (sys.executable, "-c", "from diptych.cli.main import main; main()")
LIMITS = {  # so that each ends soon
    "bench": ("--warmup", "1", "--prompt-tokens", "30", "--output-tokens", "8"),
    "simulate": ("--num-requests", "40"),
    "plan": ("--num-requests", "40", "--probe", "2s"),
    "calibrate": ("--seconds", "8"),
    "generate": ("--threads", "1"),
}
SMALLER = {"--num-requests": "20", "--long-tokens": "300", "--probe": "1s", "--devices": "1", "--seconds": "8"}
LINE = '{"custom_id": "first", "method": "POST", "url": "/v1/completions", "body": {"prompt": "def ", "max_tokens": 4}}'
SERVES = ("serve", "front", "guide", "worker")


def in_words(name: str) -> list[str]:
    return [" ".join(example.split()) for example in EXAMPLES[name]]


@pytest.mark.parametrize("name", sorted(ALL))
def test_the_help_of_every_command_shows_its_examples_and_they_parse(name: str) -> None:
    shown = " ".join(CliRunner().invoke(cli.app, [*name.split(), "--help"]).output.split())
    for example in in_words(name):
        assert example in shown
        words = shlex.split(example)
        assert words.pop(0) == "diptych"
        command, called = COMMANDS[words[0]], words.pop(0)
        if called in GROUPS:
            command, called = command.commands[words[0]], words.pop(0)
        command.make_context(called, words)


def test_examples_are_of_commands_that_exist() -> None:
    assert EXAMPLES.keys() == ALL.keys()


def given(example: str, folder: Path, server: str) -> list[str]:
    """The words of an example, with this machine's own and little to do."""
    own = {
        "MODEL": str(BUNDLED_MODEL),
        "KEY": str(folder / "key"),
        "KEYS": str(folder / "keys.toml"),
        "FOLDER": str(folder / "kept"),
        SERVER: server,
    }
    words = [own.get(word, word) for word in shlex.split(example)[1:]]
    if words[0] == "advise":  # which simulates every shape on the whole trace
        words = [str(TRACE) if word == "azure-conv" else word for word in words]
    for at, word in enumerate(words[:-1]):
        if word in SMALLER and words[0] in ("bench", "plan", "advise", "calibrate"):
            words[at + 1] = SMALLER[word]
    limits = LIMITS.get(words[0], ())
    if words[0] in ("bench", "chat") and server not in words:
        words.insert(1, server)
    return words + [word for at in range(0, len(limits), 2) if limits[at] not in words for word in limits[at : at + 2]]


def is_answered(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


@contextmanager
def started(words: list[str], folder: Path, ready: str = "") -> Iterator[str]:
    """A command that serves until Ctrl-C: the address where it is, once that is answered at ``ready``."""
    port = free_port()
    if words[0] != "worker":
        words = [word for at, word in enumerate(words) if "--port" not in words[max(0, at - 1) : at + 1]]
        words = [*(word for word in words if word != "--open"), "--port", port]
    process = subprocess.Popen((*DIPTYCH, *words), cwd=folder)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while not is_answered(ready or url + ("/guide" if words[0] == "guide" else "/health")):
            assert process.poll() is None and time.monotonic() < deadline, words
            time.sleep(0.1)
        yield url
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 128 + signal.SIGINT), words
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    words = ["serve", "--threads", "1", "--kv-cache-memory", "64MiB", "--batch-dir", str(folder / "batches")]
    with started(words, folder) as url:
        while not is_answered(f"{url}/ready"):
            time.sleep(0.1)
        yield url


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where examples are run, with the files that they speak of."""
    (tmp_path / "key").write_text("k" * 32)
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "keys.toml").write_text('[[key]]\nname = "web"\nkey = "a-key-of-the-examples"\n')
    (tmp_path / "keys.toml").chmod(0o600)
    (tmp_path / "kept").mkdir()
    (tmp_path / "prompts.jsonl").write_text('"a prompt"\n')
    (tmp_path / "lines.jsonl").write_text(LINE + "\n")
    return tmp_path


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def open_batch(url: str, folder: Path) -> str:
    """The id of a batch that has a while to run."""
    lines = folder / "many.jsonl"
    lines.write_text("".join(LINE.replace('"first"', f'"{number}"') + "\n" for number in range(2000)))
    client = BatchClient(Site.of(url, None))
    return str(client.create(client.upload(lines), "/v1/completions", "24h")["id"])


def ask(url: str) -> None:
    """A request that leaves something to look at."""
    body = b'{"prompt": "def read(self):", "max_tokens": 4}'
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.status == 200


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_the_examples_of_the_help_run(
    name: str, server: str, folder: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "worker":
        front, worker = (given(example, folder, server) for example in EXAMPLES[name])
        join = f"127.0.0.1:{free_port()}"
        front, worker = ([join if word == "127.0.0.1:7000" else word for word in words] for words in (front, worker))
        with started(front, folder) as url, started(worker, folder, f"{url}/ready"):
            ask(url)
        return
    if name in ("diagnose", "advise"):
        for _ in range(12):
            ask(server)
    if name == "pull":
        files = {path.name: path.read_bytes() for path in BUNDLED_MODEL.iterdir() if path.is_file()}
        hub = stack.enter_context(fake_hub(**{"Qwen/Qwen3-0.6B": FakeRepo({"main": files})}))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(folder / "cache"))
    before = EXAMPLES["cache warm"] if name in ("cache ls", "cache verify", "cache clear") else ()
    for example in before + EXAMPLES[name]:
        words = given(example, folder, server)
        if "BATCH" in words:
            words[words.index("BATCH")] = open_batch(server, folder)
        if words[0] in SERVES:
            with started(words, folder) as url:
                if words[0] == "serve":
                    while not is_answered(f"{url}/ready"):
                        time.sleep(0.1)
                    ask(url)
            continue
        run = subprocess.run(
            (*DIPTYCH, *words), cwd=folder, input="import os\n", capture_output=True, text=True, timeout=280,
            env={**os.environ, "NO_COLOR": "1"},
        )  # fmt: skip
        assert run.returncode == 0, (words, run.stderr)
