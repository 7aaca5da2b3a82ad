"""Servers that are measured one after another on one port, and ``diptych bench`` against them."""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import vllm_environment
from tokenizers import Tokenizer

from diptych.base.processor import read_processor

READY_TIMEOUT_S = 600.0


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


PORT = free_port()
URL = f"http://127.0.0.1:{PORT}"
PROGRAM = str(Path(sys.executable).parent / "diptych")


class Server:
    """A server process that is ready when ``ready`` answers with success at ``url``. As a context it ends with its
    block."""

    def __init__(
        self, command: list[str], env: dict[str, str] | None = None, *, ready: str = "/health", url: str = URL
    ) -> None:
        self.process = subprocess.Popen(
            command, env={**os.environ, **(env or {})}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that whoever ends this ends the server too
        try:
            self._wait(url + ready)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, url: str) -> None:
        end = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(url, timeout=2).close()
                return
            except OSError:
                if self.process.poll() is not None:
                    raise RuntimeError(f"the server ended with code {self.process.returncode}") from None
                time.sleep(0.5)
        raise RuntimeError(f"the server was not ready within {READY_TIMEOUT_S:g} s")

    def close(self) -> None:
        """Stop the server and whatever it started."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def metric(name: str, url: str = URL) -> float:
    """The sum of the samples whose lines begin so, of the server at ``url``. Raises OSError."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def diptych_server(model: Path, *options: str) -> Server:
    """``diptych serve`` of a model."""
    return Server([PROGRAM, "serve", "--model", str(model), "--port", str(PORT), *options], ready="/ready")


def vllm_server(
    venv: Path, case: str, model: Path, *, slots: int, slot_tokens: int, options: Sequence[str] = ()
) -> Server:
    """vLLM's CPU build from the environment that ``scripts/bench-peers`` makes, as ``case`` says: ``vllm``, or with
    ``:N`` the most tokens of a step. slots: requests at once, each of at most ``slot_tokens``. options: more of vLLM's
    own, which win."""
    command = [str(venv / "bin/vllm"), "serve", str(model), "--dtype", "bfloat16", "--port", str(PORT)]
    command += ["--host", "127.0.0.1", "--served-model-name", model.name]
    command += ["--max-model-len", str(slot_tokens), "--max-num-seqs", str(slots)]
    if step_tokens := case.partition(":")[2]:
        command += ["--max-num-batched-tokens", step_tokens]
    return Server([*command, *options], vllm_environment(venv))


def vllm_version(venv: Path) -> str:
    """The version of vLLM in that environment."""
    code = "from importlib.metadata import version; print(version('vllm'))"
    return subprocess.run([str(venv / "bin/python"), "-c", code], capture_output=True, text=True).stdout.strip()


def llamacpp_server(folder: Path, case: str, model: Path, *, slots: int, slot_tokens: int) -> Server:
    """llama.cpp's server from the folder that ``scripts/bench-peers`` makes, as ``case`` says: ``llama.cpp``, with bf16
    weights; ``llama.cpp-q8_0``, with 8 bits a weight; either with ``:N``, the most tokens of a step (2,048 otherwise).

    slots: requests at once, each with a context of its own of ``slot_tokens``. Tokens that are no whole character are
    never chosen: llama.cpp keeps them back, and a model with random weights that repeats one would say nothing at all.
    Everything else is left as it comes: continuous batching, reuse of prefixes, KV in fp16.
    """
    kind, _, step_tokens = case.partition(":")
    weights = folder / f"{model.name}-{kind.partition('-')[2] or 'bf16'}.gguf"
    if not weights.exists():
        raise FileNotFoundError(f"{weights} is missing: scripts/bench-peers {folder.parent} {model} makes it")
    threads = str(read_processor().num_threads)
    command = [str(folder / "build/bin/llama-server"), "--model", str(weights), "--alias", model.name]
    command += ["--host", "127.0.0.1", "--port", str(PORT), "--threads", threads, "--threads-batch", threads]
    command += ["--parallel", str(slots), "--ctx-size", str(slots * slot_tokens)]
    if step_tokens:
        command += ["--batch-size", step_tokens, "--ubatch-size", step_tokens]
    for token in partial_characters(model):
        command += ["--logit-bias", f"{token}-1000"]
    return Server(command)


def partial_characters(model: Path) -> list[int]:
    """The tokens of a model whose bytes are no whole UTF-8 characters."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = tokenizer.decode_batch([[token] for token in range(tokenizer.get_vocab_size())], skip_special_tokens=False)
    return [token for token, text in enumerate(texts) if "\ufffd" in text]


def llamacpp_version(folder: Path) -> str:
    """The release of llama-cpp-python whose sources these are, and what llama.cpp says of itself."""
    release = re.search(r"^Version: (.+)$", (folder / "src/PKG-INFO").read_text(), re.MULTILINE)
    command = [str(folder / "build/bin/llama-server"), "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    own = re.search(r"version: (.+)", said.stdout + said.stderr)
    return f"llama-cpp-python {release[1] if release else '?'}, {own[1] if own else '?'}"


@dataclass(frozen=True)
class Peers:
    """Where the servers are that Diptych is measured beside, as scripts/bench-peers installs them; None: left out.
    vllm: its virtual environment. llamacpp: the folder with its binary and its models."""

    vllm: Path | None = None
    llamacpp: Path | None = None

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """--vllm and --llamacpp."""
        parser.add_argument("--vllm", type=Path, help="vLLM's virtual environment, to measure it too")
        parser.add_argument("--llamacpp", type=Path, help="the folder of llama.cpp's server, to measure it too")

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Peers":
        """What was given for these options."""
        return cls(options.vllm, options.llamacpp)

    def have(self, case: str) -> bool:
        """Whether there is what a case needs."""
        if case.startswith("vllm"):
            return self.vllm is not None
        return self.llamacpp is not None or not case.startswith("llama.cpp")

    def versions(self) -> dict[str, str]:
        """The versions of the peers that are measured."""
        found = {}
        if self.vllm is not None:
            found["vllm"] = vllm_version(self.vllm)
        if self.llamacpp is not None:
            found["llama.cpp"] = llamacpp_version(self.llamacpp)
        return found


def bench(url: str, *options: str) -> dict[str, Any]:
    """What ``diptych bench`` measured; its progress goes to standard error. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        command = [PROGRAM, "bench", "--url", url, "--output", str(path), *options]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        found: dict[str, Any] = json.loads(path.read_text())
        return found
