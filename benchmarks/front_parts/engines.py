"""Engines of others as processes, for the benchmarks of ``diptych front``: started, killed and stopped."""

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from engine import vllm_environment
from servers import free_port

READY_S = 600.0
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def family(pid: int) -> list[int]:
    """A process and all that descend from it, the oldest first."""
    found = [pid]
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += family(int(child))
    except OSError:  # gone meanwhile
        pass
    return found


@dataclass
class Engine:
    """One engine. option: how ``diptych front --engine`` names it. environment: beside that of this process."""

    kind: str
    port: int
    command: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    kv_port: int = 0  # of its KV events; the next one is that of their replay
    process: "subprocess.Popen[bytes] | None" = None
    killed: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    @property
    def url(self) -> str:
        """The address of its server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def kv_events(self) -> str:
        """Where it publishes what its cache holds."""
        return f"tcp://127.0.0.1:{self.kv_port}"

    @property
    def kv_replay(self) -> str:
        """Where it repeats that."""
        return f"tcp://127.0.0.1:{self.kv_port + 1}"

    def option(self, *, reads_events: bool) -> str:
        """The value of ``diptych front --engine`` for it."""
        events = f",kv_events={self.kv_events},kv_replay={self.kv_replay}" if reads_events else ""
        return f"{self.kind}={self.url}{events}"

    def start(self) -> None:
        """Start it; it is not ready yet."""
        environment = {**os.environ, **self.environment, "PYTHONSAFEPATH": "1"}  # (or it would import files of ours)
        environment.pop("PYTHONPATH", None)
        self.process = subprocess.Popen(self.command, env=environment, start_new_session=True, **QUIET)

    def wait_ready(self) -> None:
        """Until it answers. Raises RuntimeError."""
        assert self.process is not None
        end = time.monotonic() + READY_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.2)
        why = f"was not ready within {READY_S:g} s" if self.process.poll() is None else "ended before it was ready"
        raise RuntimeError(f"{' '.join(self.command)} {why}")

    def signal(self, number: int) -> None:
        """Send a signal to each of its processes."""
        assert self.process is not None
        for pid in family(self.process.pid):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()

    def end(self) -> None:
        """Stop it, in whatever state it is."""
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()


def vllm_engine(
    venv: Path, model: Path, core: int, *, dtype: str, max_len: int, options: Sequence[str] | None = None
) -> Engine:
    """vLLM's CPU build on one core, with the cached tokens in its usage. options: instead of those with which it
    publishes KV events."""
    port, kv_port = free_port(), free_port()
    events = (
        f'{{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:{kv_port}", '
        f'"replay_endpoint": "tcp://127.0.0.1:{kv_port + 1}"}}'
    )
    command = [str(venv / "bin/vllm"), "serve", str(model), "--dtype", dtype, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--served-model-name", model.name, "--max-model-len", str(max_len)]
    command += ["--max-num-seqs", "64", "--enable-prompt-tokens-details"]
    command += ["--kv-events-config", events] if options is None else options
    environment = {**vllm_environment(venv), "VLLM_CPU_OMP_THREADS_BIND": str(core)}
    return Engine("vllm", port, command, environment, kv_port)


def llamacpp_engine(folder: Path, weights: Path) -> Engine:
    """llama.cpp's server with one thread."""
    port = free_port()
    command = [str(folder / "build/bin/llama-server"), "--model", str(weights), "--alias", weights.stem]
    command += ["--host", "127.0.0.1", "--port", str(port), "--threads", "1", "--threads-batch", "1"]
    command += ["--parallel", "8", "--ctx-size", "8192"]
    return Engine("llamacpp", port, command)


@contextmanager
def running(engines: Sequence[Engine]) -> Iterator[Sequence[Engine]]:
    """All of them, ready."""
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready()
        yield engines
    finally:
        for engine in engines:
            engine.end()
