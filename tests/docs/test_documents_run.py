"""The commands of the documents are run: simulations with few requests, and the tutorial against a live server."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diptych.cli import main as cli
from diptych.serving.link.engine_options import BUNDLED_MODEL
from diptych.workload.traces import load_trace
from tests.docs.documents import ROOT, SHELL, Block, blocks, commands

FEW = 40  # requests of a simulation
DIPTYCH = (sys.executable, "-c", "from diptych.cli.main import main; main()")


def block_with(page: str, language: str, mark: str) -> str:
    """The text of the block of a page in which something stands."""
    [found] = [each.text for each in blocks(language) if each.page == ROOT / page and mark in each.text]
    return found


def simulations() -> list[list[str]]:
    """The words of every `diptych simulate` in the documents, each once."""
    found = {
        tuple(words[1:])
        for block in blocks(*SHELL)
        for words in commands(block)
        if words[:2] == ["diptych", "simulate"] and "..." not in words and "machine.json" not in words
    }
    return [list(words) for words in sorted(found)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the documents speak of."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-box.toml").write_text(block_with("docs/simulation.md", "toml", "[my-box]"))
    (tmp_path / "fleet.toml").write_text(block_with("docs/simulation.md", "toml", "[pools.prefill]"))
    (tmp_path / "settings.toml").write_text(block_with("docs/simulation.md", "toml", "[workload.arrivals]"))
    for name in ("trace.jsonl", "access.jsonl"):
        (tmp_path / name).write_text(block_with("docs/formats.md", "json", "arrival_s"))
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("images", "*.md"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("words", simulations(), ids=" ".join)
def test_simulations_of_the_documents_run(words: list[str], folder: Path) -> None:
    limits = ["--num-requests", str(FEW)]
    if "--find-goodput" in words or "--fewest-devices" in words:
        limits += ["--probe", "2s", "--attainment", "0.5"]
    result = CliRunner().invoke(cli.app, [*words, *limits])
    assert result.exit_code == 0, result.output


def test_the_example_traces_are_traces(tmp_path: Path) -> None:
    text = block_with("docs/formats.md", "csv", "arrival_s")
    (tmp_path / "trace.csv").write_text(text)
    (tmp_path / "trace.jsonl").write_text(block_with("docs/formats.md", "json", "arrival_s"))
    assert len(load_trace(str(tmp_path / "trace.csv"))) == text.count("\n") - 1
    [request] = load_trace(str(tmp_path / "trace.jsonl"))
    assert request.session == 7


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """(address, access log) of a server of the bundled model."""
    log = tmp_path_factory.mktemp("server") / "access.jsonl"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("serve", "--port", str(port), "--threads", "1", "--access-log", str(log))
    process = subprocess.Popen((*DIPTYCH, *words), stdout=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None
            try:
                urllib.request.urlopen(f"{address}/ready", timeout=5)
                break
            except OSError:
                time.sleep(0.2)
        yield address, log
    finally:
        process.terminate()
        process.wait(60)


def run(words: Sequence[str], address: str, folder: Path) -> str:
    """The output of a command, with the server's address in place of the one that documents name."""
    given = [word.replace("http://127.0.0.1:8000", address) for word in words]
    if given[0] == "diptych":
        given = [*DIPTYCH, *given[1:]]
    return subprocess.run(given, cwd=folder, capture_output=True, text=True, check=True, timeout=280).stdout


def commands_of(page: str, *programs: str) -> list[list[str]]:
    """The commands of a page that begin with one of these words."""
    return [
        words
        for block in blocks(*SHELL)
        if block.page == ROOT / page
        for words in commands(block)
        if " ".join(words).startswith(programs)
    ]


@pytest.mark.slow
@pytest.mark.system
def test_the_tutorial_against_a_live_server(server: tuple[str, Path], folder: Path) -> None:
    address, log = server
    first, *_ = commands_of("docs/tutorial.md", "curl")
    assert shutil.which("curl"), "curl is needed to run the documents"
    assert json.loads(run(first, address, folder))["choices"][0]["text"]
    load, interference = commands_of("docs/tutorial.md", "diptych bench")
    assert "TTFT" in run([*load, "--rate", "8", "--num-requests", "24", "--output-tokens", "16"], address, folder)
    assert "gap" in run([*interference, "--long-tokens", "500", "--repetitions", "1"], address, folder).lower()
    [diagnose] = commands_of("docs/tutorial.md", "diptych diagnose")
    assert run(diagnose, address, folder)
    shutil.copy(log, folder / "access.jsonl")
    [simulate] = commands_of("docs/monitoring.md", "diptych simulate")
    assert "TTFT" in run(simulate, address, folder)


@pytest.mark.slow
def test_alerts_are_written(folder: Path) -> None:
    os.mkdir("monitoring")
    [words] = commands_of("docs/monitoring.md", "diptych alerts")
    assert CliRunner().invoke(cli.app, words[1:]).exit_code == 0
    assert sorted(path.name for path in (folder / "monitoring").iterdir()) == [
        "diptych-dashboard.json",
        "diptych-rules.yml",
    ]


def python_blocks(mark: str) -> list[Any]:
    """The Python blocks in which something stands."""
    return [pytest.param(block, id=block.name) for block in blocks("python") if mark in block.text]


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("block", python_blocks("LLM("))
def test_python_without_a_server_runs(block: Block, folder: Path) -> None:
    text = re.sub(r'"/path/to/[^"]*"', repr(str(BUNDLED_MODEL)), block.text)
    assert run((sys.executable, "-c", text), "", folder)


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("block", python_blocks("127.0.0.1:8000"))
def test_python_against_a_live_server_runs(block: Block, server: tuple[str, Path], folder: Path) -> None:
    text = block.text.replace("http://127.0.0.1:8000", server[0]).replace("Qwen2.5-0.5B-Instruct", BUNDLED_MODEL.name)
    assert run((sys.executable, "-c", text.replace("num_requests=100", "num_requests=5")), "", folder)
