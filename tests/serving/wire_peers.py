"""The front end's end of worker sockets, for tests that speak wire messages themselves."""

import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from fake_connector import FakeConnector
from fake_worker import FakeRunner

from diptych.control.config import BudgetConfig, CacheConfig, EngineConfig, SchedulerConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.events import Event, HandoffReserved
from diptych.control.request import SamplingParams
from diptych.runtime.transfer.connector import KVConnector
from diptych.serving.fleet.private_directory import private_directory
from diptych.serving.link.channel import Channel, accept, listen
from diptych.serving.link.engine_options import EngineOptions
from diptych.serving.link.messages import (
    Finished,
    FrontendMessage,
    Happened,
    PrefillAttempt,
    Ready,
    ReserveAttempt,
    Shutdown,
    Tokens,
    WireRequest,
    WorkerMessage,
    decode_from_worker,
    encode,
    pack_tokens,
    unpack_events,
)
from diptych.serving.worker.recorder import make_core
from diptych.serving.worker.worker_loop import Worker

Message = TypeVar("Message", bound=WorkerMessage)
PATIENCE_S = 60


def attempt(attempt_id: str, prompt: Sequence[int], output: Sequence[int] = (), **sampling: Any) -> WireRequest:
    """A greedy request."""
    params = SamplingParams(**({"max_tokens": 8, "temperature": 0.0} | sampling))
    return WireRequest(attempt_id, pack_tokens(prompt), params, output=pack_tokens(output))


class Peer:
    """One worker, as its front end sees it: everything that it has said, by kind."""

    def __init__(self, channel: Channel, address: str = "") -> None:
        self.channel = channel
        self.address = address  # of its connector; a process tells it when it is ready
        self.said: list[WorkerMessage] = []
        self.events: list[Event] = []  # that it told at once
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, Finished] = {}

    def send(self, *messages: FrontendMessage) -> None:
        """Tell it."""
        for message in messages:
            self.channel.send(encode(message))

    def until(self, condition: Callable[[], Any]) -> Any:
        """Listen until ``condition()`` is true, and return it."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := condition()):
            assert time.monotonic() < deadline, f"it never happened; it said {self.said[-5:]}"
            self.channel.flush()
            select.select([self.channel], [], [], 0.1)
            for data in self.channel.receive():
                self._take(decode_from_worker(data))
        return value

    def wait(self, kind: type[Message], attempt_id: str | None = None) -> Message:
        """The first message of this kind (about this attempt)."""
        return self.until(lambda: self.first(kind, attempt_id))

    def first(self, kind: type[Message], attempt_id: str | None = None) -> Message | None:
        """See ``wait``; None when there is none so far."""
        return next(
            (
                one
                for one in self.said
                if isinstance(one, kind) and attempt_id in (None, getattr(one, "attempt_id", None))
            ),
            None,
        )

    def wait_event(self, kind: type[Any], attempt_id: str) -> Any:
        """The first event of this kind about this attempt."""
        return self.until(
            lambda: next((one for one in self.events if isinstance(one, kind) and one.request_id == attempt_id), None)
        )

    def wait_end(self, attempt_id: str) -> Finished:
        """The end of an attempt."""
        return self.until(lambda: self.finished.get(attempt_id))

    def _take(self, message: WorkerMessage) -> None:
        self.said.append(message)
        if isinstance(message, Ready):
            self.address = message.address
        elif isinstance(message, Tokens):
            for request_id, token_id in zip(message.request_ids, message.token_ids, strict=True):
                self.tokens.setdefault(request_id, []).append(token_id)
            self.finished |= {end.request_id: end for end in message.finished}
        elif isinstance(message, Happened):
            self.events += unpack_events(message.events)


def hand_off(prefill: Peer, decode: Peer, request: WireRequest, address: str, *, borrowed: bool) -> HandoffReserved:
    """Reserve on one worker, then prefill on the other one. Returns what was reserved."""
    decode.send(ReserveAttempt(request, 0, borrowed))
    reserved = decode.wait_event(HandoffReserved, request.request_id)
    assert isinstance(reserved, HandoffReserved)
    block_ids = list(reserved.block_ids) if borrowed else []
    prefill.send(PrefillAttempt(request, address, reserved.num_cached_tokens, block_ids, 0))
    return reserved


class ThreadPeer(Peer):
    """A Worker on a thread of this process."""

    def __init__(self, core: EngineCore, runner: Any, connector: KVConnector) -> None:
        here, there = map(Channel, socket.socketpair())
        super().__init__(here, connector.address)
        self.core, self.runner, self.connector = core, runner, connector
        self._there = there
        worker = Worker(core, runner, there, connector=connector, publishes_blocks=True)
        runner.on_layer = worker.on_layer
        self._thread = threading.Thread(target=worker.run, name=connector.address)
        self._thread.start()

    def stop(self) -> None:
        """End the loop; then this thread may look at the core."""
        self.send(Shutdown())
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def check_empty(self) -> None:
        """Assert that nothing is left here: no request, no block, no lease, no tokens. After ``stop``."""
        core = self.core
        assert not core.requests
        assert core.kv.pool.num_used == 0
        core.kv.pool.check()
        assert core.next_expiry_ns is None
        while (output := core.begin_step(0)) is not None:  # the executor hears who has left
            core.end_step(self.runner.execute(output), 0)
        assert not self.runner.num_requests

    def close(self) -> None:
        """Stop and let go of the sockets."""
        if self._thread.is_alive():
            self.stop()
        self.connector.close()
        self.channel.close()
        self._there.close()


def fake_peer(path: Path, *, first_block: int = 0) -> ThreadPeer:
    """A worker with the make-believe model; its connector listens at ``path``, and it is recorded beside that."""
    cache = CacheConfig(num_blocks=128, block_size=32, first_block=first_block)
    budget = BudgetConfig(kind="fixed", max_batched_tokens=64)
    scheduler = SchedulerConfig(order="fcfs", budget=budget, max_num_seqs=16)
    core = make_core(EngineConfig(cache, scheduler, max_model_len=4096), f"{path}.jsonl")
    return ThreadPeer(core, FakeRunner(0.001), FakeConnector(path))


class ProcessPeer(Peer):
    """A real worker process."""

    def __init__(self, options: EngineOptions, pass_fds: Sequence[int] = ()) -> None:
        self.directory = private_directory()
        listener = listen(self.directory / "worker")
        (self.directory / "options.json").write_bytes(msgspec.json.encode(options))
        command = (sys.executable, "-m", "diptych.serving.worker", str(self.directory))
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=pass_fds)
        select.select([listener], [], [], PATIENCE_S)
        channel = accept(listener)
        assert channel is not None
        listener.close()
        super().__init__(channel)

    def ready(self) -> Ready:
        """Its first sign that it serves."""
        return self.wait(Ready)

    def kill(self) -> None:
        """As a crash ends it."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it, if it lives."""
        assert self.process.stdin is not None
        if self.process.poll() is None and self.first(Ready) is None:  # it reads no messages yet
            self.kill()
        try:
            if self.process.poll() is None:
                self.send(Shutdown())
                assert self.process.wait(PATIENCE_S) == 0
        finally:
            self.kill()
            self.process.stdin.close()
            self.channel.close()
            shutil.rmtree(self.directory, ignore_errors=True)
