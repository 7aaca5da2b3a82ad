"""A worker process: one loop that reads the clock, ends a step, takes messages, begins a step and executes it.

Owns the replica's core, its executor and the worker's end of the socket. Must never look at text, HTTP or the wall
clock (beyond one monotonic reading per turn), and never wait while there is work.
"""

import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import zmq

from diptych.control.errors import DiptychError, RequestError, WorkerError
from diptych.control.events import Event, RequestAdmitted, RequestFinished
from diptych.control.kvcache.prefix_cache import hash_blocks
from diptych.control.replica import ReplicaCore
from diptych.control.request import FinishReason, Request, SamplingParams
from diptych.control.slo import NS_PER_MS, LatencyBreakdown
from diptych.control.step import SchedulerOutput, StepResult
from diptych.serving.options import EngineOptions, parse_cores
from diptych.serving.recording import close_recording, make_core
from diptych.serving.wire import (
    Abort,
    Failed,
    Finished,
    Loading,
    Ready,
    Shutdown,
    Stats,
    Submit,
    TokenLogprobs,
    Tokens,
    WireError,
    WireRequest,
    WorkerMessage,
    decode_from_frontend,
    encode,
    pack_error,
    pack_events,
    unpack_tokens,
)

if TYPE_CHECKING:
    from diptych.runtime.model_runner import ModelRunner

logger = logging.getLogger(__name__)

Report = Callable[..., None]  # (stage, fraction=None)

DEFAULT_KV_BYTES, DEFAULT_FULL_SEQUENCES = 2 * 2**30, 32
STATS_INTERVAL_NS = 200 * NS_PER_MS


class Runner(Protocol):
    """The executor of a worker: ModelRunner, or a test double."""

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        salt: str | None = None,
        block_hashes: Sequence[bytes] | None = None,
    ) -> None:
        """Learn the tokens of a request that plans will name. Raises RequestError when it cannot be computed."""
        ...

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Run one step (see diptych.control.step.Executor); the payload is a StepTokens."""
        ...


class Worker:
    """The loop of one replica. ``socket`` is connected to the front end."""

    def __init__(
        self,
        core: ReplicaCore,
        runner: Runner,
        socket: "zmq.Socket[bytes]",
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._core = core
        self._runner = runner
        self._socket = socket
        self._clock = clock
        self._block_size = core.config.cache.block_size
        self._refusals: dict[str, RequestError] = {}
        self._unreported: list[Event] = []
        self._is_changed = True
        self._next_stats_ns = 0
        self._is_running = True

    def run(self) -> None:
        """Turn until a Shutdown message comes."""
        core, runner = self._core, self._runner
        result: StepResult | None = None
        while self._is_running:
            now = self._clock()  # the only clock reading of the turn
            if result is not None:
                events = core.end_step(result, now)
                self._publish(events, result.payload)
                result = None
            self._take_messages(now)
            self._send_stats(now)
            output = core.begin_step(now)
            if output is not None:
                result = runner.execute(output)
            elif self._is_running:
                self._publish(core.take_events())
                self._wait(now)

    def _take_messages(self, now: int) -> None:
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = decode_from_frontend(data)
            self._is_changed = True
            if isinstance(message, Submit):
                events = [event for request in message.requests for event in self._add(request, now)]
                self._publish(events)
            elif isinstance(message, Abort):
                for request_id in message.request_ids:
                    self._publish(self._core.abort(request_id, now, message.reason))
            elif isinstance(message, Shutdown):
                self._is_running = False

    def _add(self, wire: WireRequest, now: int) -> list[Event]:
        """Make a request known to the executor and to the core, or refuse it with its terminal event."""
        token_ids = unpack_tokens(wire.prompt)
        hashes = hash_blocks(token_ids, self._block_size, wire.cache_salt)
        request = Request(
            wire.request_id,
            len(token_ids),
            wire.sampling.max_tokens,
            block_hashes=hashes,
            priority=wire.priority,
            slo=wire.slo,
            reads_prefix_cache=wire.sampling.prompt_logprobs is None,
        )
        try:
            self._core.check_request(request)
            self._runner.add_request(
                wire.request_id, token_ids, wire.sampling, salt=wire.cache_salt, block_hashes=hashes
            )
        except RequestError as error:
            self._refusals[wire.request_id] = error
            latency = LatencyBreakdown(0, 0, 0, 0)
            slo_met = False if wire.slo else None
            return [
                RequestFinished(
                    now, wire.request_id, FinishReason.ERROR, len(token_ids), 0, 0, latency, slo_met, error.message
                )
            ]
        return self._core.add_request(request, now)

    def _publish(self, events: Sequence[Event], payload: Any = None) -> None:
        """One record for what a step gave and who ended."""
        if events:
            self._unreported.extend(events)
            self._is_changed = True
        finished = [
            pack_finished(event, self._refusals.pop(event.request_id, None))
            for event in events
            if isinstance(event, RequestFinished)
        ]
        cached = {
            event.request_id: event.num_cached_tokens
            for event in events
            if isinstance(event, RequestAdmitted) and event.is_first and event.num_cached_tokens
        }
        if payload is not None and (payload.request_ids or payload.prompt_logprobs):
            self._send(
                Tokens(
                    payload.request_ids,
                    payload.token_ids,
                    finished,
                    cached,
                    {request_id: pack_logprobs(entry) for request_id, entry in payload.logprobs.items()},
                    {
                        request_id: (first, [pack_logprobs(entry) for entry in entries])
                        for request_id, (first, entries) in payload.prompt_logprobs.items()
                    },
                )
            )
        elif finished or cached:
            self._send(Tokens([], [], finished, cached))

    def _send_stats(self, now: int) -> None:
        if self._is_changed and now >= self._next_stats_ns:
            self._send(Stats(msgspec.to_builtins(self._core.stats()), pack_events(self._unreported)))
            self._unreported.clear()
            self._is_changed = False
            self._next_stats_ns = now + STATS_INTERVAL_NS

    def _wait(self, now: int) -> None:
        """Sleep until a message comes, or until statistics that have changed may be sent."""
        timeout_ms = None
        if self._is_changed:
            timeout_ms = max(1, (self._next_stats_ns - now + NS_PER_MS - 1) // NS_PER_MS)
        self._socket.poll(timeout_ms)

    def _send(self, message: WorkerMessage) -> None:
        self._socket.send(encode(message), zmq.NOBLOCK)


def pack_finished(event: RequestFinished, refusal: RequestError | None = None) -> Finished:
    """The terminal event for the wire; ``refusal``: the error behind it, where there was one."""
    error = None
    if event.reason is FinishReason.ERROR:
        error = pack_error(refusal) if refusal else WireError(WorkerError.__name__, event.message)
    return Finished(
        event.request_id,
        event.reason,
        event.num_prompt_tokens,
        event.num_cached_tokens,
        event.num_preemptions,
        event.latency,
        event.slo_met,
        error,
    )


def pack_logprobs(entry: Any) -> TokenLogprobs:
    """The executor's record for the wire."""
    return TokenLogprobs(entry.token_id, entry.logprob, list(entry.top))


def connect(directory: Path) -> "zmq.Socket[bytes]":
    """The worker's end of the socket in the private directory."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(f"ipc://{directory}/worker")
    return socket


def die_with_parent(directory: Path) -> None:
    """End this process when its standard input does: the front end holds the other end of that pipe. Whoever is last
    removes the private directory."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def serve(directory: Path, load: Callable[[EngineOptions, Report], tuple[ReplicaCore, Runner, Ready]]) -> int:
    """Load what ``load(options, report)`` builds, say so, and run its loop. Returns the exit status."""
    options = msgspec.json.decode((directory / "options.json").read_bytes(), type=EngineOptions)
    socket = connect(directory)

    def report(stage: str, fraction: float | None = None) -> None:
        socket.send(encode(Loading(stage, fraction)), zmq.NOBLOCK)

    try:
        core, runner, ready = load(options, report)
    except DiptychError as error:
        socket.send(encode(Failed(pack_error(error))))
        socket.close()
        return 1
    socket.send(encode(ready))
    try:
        Worker(core, runner, socket).run()
    finally:
        close_recording(core)
    socket.close()
    return 0


def load_engine(options: EngineOptions, report: Report) -> tuple[ReplicaCore, "ModelRunner", Ready]:
    """Load the checkpoint, size its cache, teach the step-time model. Raises ConfigError for what cannot be."""
    report("importing torch")
    import torch

    from diptych.runtime.engine import replica_config
    from diptych.runtime.model_runner import RunnerConfig, load_runner
    from diptych.runtime.threads import configure_threads
    from diptych.runtime.warm_up import warm_up

    device = options.device.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    cores = parse_cores(options.device.cores) if options.device.cores else None
    threads = configure_threads(options.device.threads, cores, bind=device == "cpu")
    memory = options.memory
    kv_bytes, num_host_blocks = _cache_sizes(options)
    config = RunnerConfig(
        model=options.model,
        dtype=options.device.dtype,
        device=device,
        block_size=memory.block_size,
        kv_bytes=kv_bytes,
        num_host_blocks=num_host_blocks,
        max_num_seqs=options.scheduler.max_num_seqs,
        max_model_len=options.max_model_len,
    )
    runner = load_runner(config, lambda done, total: report("loading weights", done / max(1, total)))
    replica = replica_config(runner, options.scheduler, enable_prefix_cache=memory.prefix_cache, slo=options.slo)
    core = make_core(replica, options.record)
    if options.warm_up:
        report("warming up")
        for features, duration_ns in warm_up(runner):
            core.observe(features, duration_ns)
    model, capacity = runner.model_config, core.kv.capacity_tokens
    where = f"{device}, {threads.num_threads} threads" if device == "cpu" else device
    description = f"{model.architecture}, {where}, KV cache of {capacity:,} tokens ({kv_bytes / 2**30:.2f} GiB)"
    ready = Ready(
        model.vocab_size,
        runner.max_model_len,
        capacity,
        options.scheduler.max_waiting,
        options.scheduler.max_num_seqs,
        list(model.eos_token_ids),
        f"{description}; {runner.note}" if runner.note else description,
    )
    return core, runner, ready


def _cache_sizes(options: EngineOptions) -> tuple[int, int]:
    """Bytes of the KV cache and blocks of the host tier. Without a wish: a quarter of the free memory, at most 2 GiB
    and at most what 32 sequences at full length use (touching memory for the first time takes long on some machines).
    """
    from diptych.runtime.loader import Checkpoint, resolve_dtype
    from diptych.runtime.model_config import read_model_config

    model, memory = read_model_config(options.model), options.memory
    dtype, _ = resolve_dtype(options.device.dtype, model, Checkpoint(model.path))
    heads = model.attention
    block_bytes = 2 * model.num_layers * memory.block_size * heads.num_kv_heads * heads.head_dim * dtype.itemsize
    kv_bytes = memory.kv_cache_bytes
    if kv_bytes is None:
        length = options.max_model_len or model.max_position_embeddings
        useful = DEFAULT_FULL_SEQUENCES * (length // memory.block_size + 2) * block_bytes
        kv_bytes = max(min(available_memory_bytes() // 4, DEFAULT_KV_BYTES, useful), 16 * block_bytes)
    return kv_bytes, memory.swap_bytes // block_bytes


def available_memory_bytes() -> int:
    """Memory that can be had without swapping, by the kernel's own estimate; 4 GiB where it gives none."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 4 * 2**30


def main() -> int:
    """``python -m diptych.serving.worker DIRECTORY``: started by the supervisor."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s worker %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front end decides when to stop
    directory = Path(sys.argv[1])
    die_with_parent(directory)
    return serve(directory, load_engine)


if __name__ == "__main__":
    sys.exit(main())
