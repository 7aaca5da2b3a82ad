"""The front end's end of worker sockets, for tests that send orders themselves."""

import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from fake_connector import FakeConnector
from fake_worker import FakeRunner

from diptych.control.commands import (
    AskKVSnapshot,
    Drop,
    ForgetPeer,
    Prefill,
    Release,
    Renew,
    Reserve,
    Serve,
    WorkerCommand,
)
from diptych.control.compute_share import ComputeShare
from diptych.control.config import BudgetConfig, CacheConfig, EngineConfig, SchedulerConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.recording import RecordingEngineCore
from diptych.control.engine.reports import LoadReport
from diptych.control.engine.worker_core import WorkerCore
from diptych.control.errors import ConfigError
from diptych.control.events import Event, HandoffExpired, HandoffReleased, HandoffReserved, RequestFinished
from diptych.control.request import DEFAULT_OPTIONS, BlockTables, FinishReason, RequestOptions, SamplingParams
from diptych.control.step import TokenLogprobs
from diptych.runtime.step.step_pipeline import StepPipeline
from diptych.runtime.transfer.connector import KVConnector
from diptych.serving.fleet.private_directory import private_directory
from diptych.serving.link.channel import Channel, accept, listen
from diptych.serving.link.engine_options import EngineOptions
from diptych.serving.link.messages import (
    AttemptTokens,
    FrontendMessage,
    Order,
    Orders,
    Ready,
    Shutdown,
    StepReport,
    WorkerMessage,
    decode_from_worker,
    encode,
    pack_command,
    pack_token_ids,
    unpack_events,
)
from diptych.serving.link.recorder import Recorder, record_engine
from diptych.serving.worker.worker_loop import Worker

Happened = TypeVar("Happened", bound=Event)
PATIENCE_S = 60


@dataclass(frozen=True)
class Attempt:
    """What the tests send: an attempt with its tokens."""

    attempt_id: str
    prompt: list[int]
    output: list[int]
    sampling: SamplingParams
    options: RequestOptions = DEFAULT_OPTIONS

    @property
    def tokens(self) -> AttemptTokens:
        return AttemptTokens(pack_token_ids(self.prompt), self.sampling, pack_token_ids(self.output), self.options)


def attempt(
    attempt_id: str,
    prompt: Sequence[int],
    output: Sequence[int] = (),
    options: RequestOptions = DEFAULT_OPTIONS,
    **sampling: Any,
) -> Attempt:
    """A greedy one."""
    params = SamplingParams(**({"max_tokens": 8, "temperature": 0.0} | sampling))
    return Attempt(attempt_id, list(prompt), list(output), params, options)


class Peer:
    """One worker, as its front end sees it: everything that it has reported, by kind."""

    def __init__(self, channel: Channel, address: str = "") -> None:
        self.channel = channel
        self.address = address  # of its connector; a process tells it when it is ready
        self.said: list[WorkerMessage] = []
        self.events: list[Event] = []
        self.tokens: dict[str, list[int]] = {}
        self.first_tokens: dict[str, tuple[int, TokenLogprobs | None]] = {}
        self.finished: dict[str, RequestFinished] = {}
        self.loads: list[LoadReport] = []

    # -- orders -------------------------------------------------------------------------------------------------------

    def send(self, *messages: FrontendMessage) -> None:
        """Any message."""
        for message in messages:
            self.channel.send(encode(message))

    def order(self, command: WorkerCommand, tokens: AttemptTokens | None = None, address: str = "") -> None:
        """One command."""
        self.send(Orders([Order(pack_command(command), tokens, address)]))

    def serve(self, *requests: Attempt) -> None:
        """Prefill and decode here."""
        orders = [
            Order(pack_command(Serve(0, one.attempt_id, one.attempt_id, len(one.output))), one.tokens)
            for one in requests
        ]
        self.send(Orders(orders))

    def reserve(self, request: Attempt, lease_ns: int = 0, *, borrowed: bool = False) -> None:
        """Hold blocks."""
        name, count = request.attempt_id, len(request.output)
        self.order(Reserve(0, name, name, count, lease_ns, borrowed), request.tokens)

    def prefill(
        self,
        request: Attempt,
        address: str,
        num_cached_tokens: int = 0,
        block_tables: BlockTables = (),
        lease_ns: int = 0,
        target: int = 0,
    ) -> None:
        """Prefill for another worker, whose connector is at ``address``."""
        name, count = request.attempt_id, len(request.output)
        command = Prefill(0, name, name, count, target, num_cached_tokens, block_tables, lease_ns)
        self.order(command, request.tokens, address)

    def release(self, attempt_id: str) -> None:
        """Its KV is there."""
        self.order(Release(0, attempt_id))

    def drop(self, attempt_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End it."""
        self.order(Drop(0, attempt_id, reason))

    def renew(self, *attempt_ids: str) -> None:
        """They are wanted."""
        self.order(Renew(0, attempt_ids))

    def ask_snapshot(self) -> None:
        """All that the prefix cache holds."""
        self.order(AskKVSnapshot(0))

    def forget_peer(self, peer: int) -> None:
        """That worker is gone."""
        self.order(ForgetPeer(0, peer))

    # -- reports ------------------------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], Any]) -> Any:
        """Read until ``condition()`` is true, and return it."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := condition()):
            assert time.monotonic() < deadline, f"it never happened; it said {self.said[-5:]}"
            self.read(0.1)
        return value

    def read(self, seconds: float = 0.0) -> None:
        """Take what it has said, or what it says first within ``seconds``."""
        self.channel.flush()
        select.select([self.channel], [], [], seconds)
        for data in self.channel.receive():
            self._take(decode_from_worker(data))

    def of_kind(self, kind: type[Happened]) -> list[Happened]:
        """All events of a kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def event(self, kind: type[Happened], attempt_id: str) -> Happened | None:
        """The first event of this kind about this attempt, if there is one."""
        return next((event for event in self.of_kind(kind) if getattr(event, "request_id", "") == attempt_id), None)

    def wait_event(self, kind: type[Happened], attempt_id: str) -> Happened:
        """The first event of this kind about this attempt."""
        found: Happened = self.until(lambda: self.event(kind, attempt_id))
        return found

    def wait_end(self, attempt_id: str) -> RequestFinished:
        """The end of an attempt."""
        end: RequestFinished = self.until(lambda: self.finished.get(attempt_id))
        return end

    def has_let_go(self, attempt_id: str) -> bool:
        """Whether the worker has reported that it holds nothing of the attempt any more."""
        kinds = (HandoffReleased, HandoffExpired)
        return attempt_id in self.finished or any(self.event(kind, attempt_id) for kind in kinds)

    def _take(self, message: WorkerMessage) -> None:
        self.said.append(message)
        if isinstance(message, Ready):
            self.address = message.address
        elif isinstance(message, StepReport):
            events = unpack_events(message.events)
            self.events += events
            self.finished |= {event.request_id: event for event in events if isinstance(event, RequestFinished)}
            self.first_tokens |= message.first_tokens
            if message.load is not None:
                self.loads.append(message.load)
            if message.tokens is not None:
                for request_id, token_id in zip(message.tokens.request_ids, message.tokens.token_ids, strict=True):
                    self.tokens.setdefault(request_id, []).append(token_id)


def hand_off(prefill: Peer, decode: Peer, request: Attempt, *, borrowed: bool) -> HandoffReserved:
    """Reserve on one worker, then prefill on the other one. Returns what was reserved."""
    decode.reserve(request, borrowed=borrowed)
    reserved = decode.wait_event(HandoffReserved, request.attempt_id)
    tables = reserved.block_tables if borrowed else ()
    prefill.prefill(request, decode.address, reserved.num_cached_tokens, tables)
    return reserved


class FourCores:
    """A ComputeDevice of four cores. A step on it takes as long as on any other."""

    def __init__(self) -> None:
        self.share = ComputeShare((0, 1, 2, 3), 4)

    @property
    def num_units(self) -> int:
        """Threads."""
        return self.share.num_threads

    def resize(self, share: ComputeShare) -> None:
        if not set(share.cpus) <= {0, 1, 2, 3}:
            raise ConfigError(f"cores is {share.cpus}; there are four", param="cores")
        self.share = share


class ThreadPeer(Peer):
    """A Worker on a thread of this process."""

    def __init__(
        self,
        engine: EngineCore,
        runner: Any,
        connector: KVConnector,
        recorder: Recorder | None = None,
        pipeline: StepPipeline | None = None,
    ) -> None:
        here, there = map(Channel, socket.socketpair())
        super().__init__(here, connector.address)
        self.engine, self.runner, self.connector, self.recorder = engine, runner, connector, recorder
        self.core = WorkerCore(engine)
        self._there = there
        worker = Worker(self.core, runner, there, connector=connector, device=FourCores(), pipeline=pipeline)
        runner.on_layer = worker.on_layer
        self._thread = threading.Thread(target=worker.run, name=connector.address)
        self._thread.start()

    def stop(self) -> None:
        """End the loop; then this thread may look at the core."""
        self.send(Shutdown())
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if self.recorder is not None:
            self.recorder.close()

    def check_empty(self) -> None:
        """Assert that nothing is left here: no request, no block, no lease, no tokens. After ``stop``."""
        engine = self.engine
        assert not engine.requests
        assert engine.kv.pool.num_used == 0
        engine.kv.pool.check()
        assert engine.next_expiry_ns is None
        while (output := engine.begin_step(0)) is not None:  # the executor learns who has left
            engine.end_step(self.runner.execute(output), 0)
        assert not self.runner.num_requests
        assert self.core.is_idle

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
    config = EngineConfig(cache, scheduler, max_model_len=4096)
    recorder = record_engine(Path(f"{path}.jsonl"), config)
    return ThreadPeer(RecordingEngineCore(config, recorder.write), FakeRunner(0.001), FakeConnector(path), recorder)


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

    def _ready(self) -> Ready | None:
        return next((message for message in self.said if isinstance(message, Ready)), None)

    def ready(self) -> Ready:
        """Its first sign that it serves."""
        ready: Ready = self.until(self._ready)
        return ready

    def kill(self) -> None:
        """As a crash ends it."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it, if it lives."""
        assert self.process.stdin is not None
        if self.process.poll() is None and self._ready() is None:  # it reads no messages yet
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
