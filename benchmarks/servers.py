"""Servers that are measured one after another on one port, and ``diptych bench`` against them."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from engine import vllm_environment

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
    """A server process that is ready when its health page answers. As a context it ends with its block."""

    def __init__(self, command: list[str], env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            command, env={**os.environ, **(env or {})}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that whoever ends this ends the server too
        try:
            self._wait("/health" if Path(command[0]).name == "vllm" else "/ready")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, path: str) -> None:
        end = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(URL + path, timeout=2).close()
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


def diptych_server(model: Path, *options: str) -> Server:
    """``diptych serve`` of a model."""
    return Server([PROGRAM, "serve", "--model", str(model), "--port", str(PORT), *options])


def vllm_server(venv: Path, model: Path, *options: str) -> Server:
    """vLLM's CPU build from the environment that ``scripts/bench-peers`` makes."""
    command = [str(venv / "bin/vllm"), "serve", str(model), "--dtype", "bfloat16", "--port", str(PORT)]
    command += ["--host", "127.0.0.1", "--served-model-name", model.name, *options]
    return Server(command, vllm_environment(venv))


def vllm_version(venv: Path) -> str:
    """Of that environment."""
    code = "from importlib.metadata import version; print(version('vllm'))"
    return subprocess.run([str(venv / "bin/python"), "-c", code], capture_output=True, text=True).stdout.strip()


def bench(url: str, *options: str) -> dict[str, Any]:
    """What ``diptych bench`` measured; its progress goes to standard error. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        command = [PROGRAM, "bench", "--url", url, "--output", str(path), *options]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        found: dict[str, Any] = json.loads(path.read_text())
        return found
