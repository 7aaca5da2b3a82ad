"""A worker process: one loop that reads the clock, ends a step, takes messages, begins a step and executes it.

Owns the order of a turn (see WorkerCore), the executor and the worker's end of the socket. It sees no text and
waits only when there is no work. Steps run on this thread, and nothing else touches the executor: when a message is
taken, no step is running, so what the worker reports (an attempt has ended, a peer is forgotten) is true of its memory,
too.

A prompt may be computed before its decode worker has blocks for it. Its first token is held back until then: no client
gets one before the stream has a place to go on.
"""

import contextlib
import ctypes
import logging
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from diptych.base.stop_signals import leave_terminal_to_parent
from diptych.control.commands import Drop, Prefill, Reserve, Resize, Serve, WorkerCommand
from diptych.control.engine.outgoing import SendChunk
from diptych.control.engine.worker_core import Outbox, WorkerCore
from diptych.control.errors import ConfigError, CoreFailedError, DiptychError, ErrorRecord
from diptych.control.events import StepBegun
from diptych.control.request import DEFAULT_OPTIONS
from diptych.control.slo import NS_PER_MS
from diptych.control.step import SchedulerOutput, StepBrokenOff, StepResult, StepTokens, TokenLogprobs
from diptych.runtime.device.compute_device import ComputeDevice, UndividedDevice
from diptych.runtime.device.garbage import leave_alone_what_is_loaded, without_collections
from diptych.runtime.device.thread_limits import switch_often
from diptych.runtime.tiers.tier_io import TierDriver
from diptych.runtime.transfer.connector import KVConnector
from diptych.serving.failures.failure_recording import error_words, folder_of
from diptych.serving.failures.recorded_cores import engine_failure
from diptych.serving.link.channel import Channel, connect
from diptych.serving.link.engine_options import EngineOptions
from diptych.serving.link.heartbeat import FILE_NAME, Heartbeat
from diptych.serving.link.messages import (
    Failed,
    Loading,
    Order,
    Orders,
    Ready,
    Shutdown,
    StartOver,
    StepReport,
    decode_from_frontend,
    encode,
    pack_events,
    unpack_command,
)
from diptych.serving.worker.awaited_grammars import AwaitedGrammars
from diptych.serving.worker.connector_driver import ConnectorDriver
from diptych.serving.worker.load_engine import LoadedEngine, Report, connect_peers, load_engine
from diptych.serving.worker.request_intake import RequestIntake, Runner

if TYPE_CHECKING:
    from diptych.runtime.sampling.grammar import Grammars
    from diptych.runtime.step.step_pipeline import StepPipeline

TASKS = Path("/proc/self/task")


def cpu_wait_ns(tasks: Path = TASKS) -> int:
    """Nanoseconds of the thread that waited longest: a step is as late as its last thread. 0 where the kernel does not
    count it. Reads a line for each thread (some 10 us each). The second field of schedstat, see proc(5)."""
    longest = 0
    try:
        for task in tasks.iterdir():
            try:
                longest = max(longest, int((task / "schedstat").read_text().split()[1]))
            except (OSError, IndexError):  # the thread has ended meanwhile, or nothing is counted
                continue
    except OSError:
        return 0
    return longest


class HeldBackTokens:
    """Tokens of one worker that are computed and not given yet."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self._tokens: dict[str, tuple[int, TokenLogprobs | None]] = {}

    def hold_back(self, tokens: StepTokens | None) -> StepTokens | None:
        """The tokens of a step that may be given now; the others stay here."""
        held = {name for name in tokens.request_ids if self._core.is_held_back(name)} if tokens else set()
        if tokens is None or not held:
            return tokens
        given = StepTokens([], [], prompt_logprobs=tokens.prompt_logprobs, embeddings=tokens.embeddings)
        for index, (name, token_id) in enumerate(zip(tokens.request_ids, tokens.token_ids, strict=True)):
            logprobs = tokens.logprobs.get(index)
            if name in held:
                self._tokens[name] = (token_id, logprobs)
            else:
                _give(given, name, token_id, logprobs)
        return given

    def release(self) -> StepTokens | None:
        """The tokens that may be given since the last call; what became of dropped attempts is forgotten."""
        free = [name for name in self._tokens if not self._core.is_held_back(name)]
        released = StepTokens([], [])
        for name in free:
            token_id, logprobs = self._tokens.pop(name)
            if name in self._core.engine.requests:
                _give(released, name, token_id, logprobs)
        return released if released.request_ids else None


def _give(tokens: StepTokens, name: str, token_id: int, logprobs: TokenLogprobs | None) -> None:
    if logprobs is not None:
        tokens.logprobs[len(tokens.token_ids)] = logprobs
    tokens.request_ids.append(name)
    tokens.token_ids.append(token_id)


logger = logging.getLogger(__name__)

STATS_INTERVAL_NS = 200 * NS_PER_MS
ANNOUNCED_STEP_NS = 100 * NS_PER_MS  # a step that should take so long is reported when it begins, too
LINGER_S = 1.0
FAILED_STATUS = 70  # of a process that ends by a defect (EX_SOFTWARE of sysexits.h)
PR_SET_PDEATHSIG = 1  # of prctl(2): which signal the parent's end sends

Load = Callable[[EngineOptions, Report], LoadedEngine[Any]]
Connect = Callable[[EngineOptions, Any, Path], KVConnector | None]


class Worker:
    """The loop of one worker. ``channel`` leads to the front end; ``connector``: to the other workers (None: it takes
    no part in handoffs). device: what steps are computed on. ready: what was said to the front end before ``run``.
    tiers: the driver of what lies below the host blocks and beside them, if there is anything. pipeline: launches steps
    before the result of the one before is known (None: one at a time)."""

    def __init__(
        self,
        core: WorkerCore,
        runner: Runner,
        channel: Channel,
        clock: Callable[[], int] = time.monotonic_ns,
        connector: KVConnector | None = None,
        heartbeat: Heartbeat | None = None,
        device: ComputeDevice | None = None,
        grammars: "Grammars | None" = None,
        ready: Ready | None = None,
        tiers: TierDriver | None = None,
        pipeline: "StepPipeline | None" = None,
    ) -> None:
        self._core = core
        self._pipeline = pipeline
        self.doing = "the engine core"  # what runs now, for a message
        self._ready = ready
        self._runner = runner
        self._channel = channel
        self._clock = clock
        self._intake = RequestIntake(core, runner, grammars)
        self._awaited = AwaitedGrammars(grammars) if grammars is not None else None
        self._transfers = ConnectorDriver(core, self._intake, connector)
        self._heartbeat = heartbeat or Heartbeat()
        self._device = device or UndividedDevice()
        self._poller = select.poll()
        self._poller.register(channel, select.POLLIN)
        if (fileno := self._transfers.fileno()) is not None:
            self._poller.register(fileno, select.POLLIN)
        if self._awaited is not None:
            self._poller.register(self._awaited, select.POLLIN)
        self._inbox: deque[Order | StartOver | Shutdown] = deque()
        self._tiers = tiers
        if tiers is not None:
            self._poller.register(tiers, select.POLLIN)
        self._step: SchedulerOutput | None = None  # the one that is executed
        self._chunks: list[SendChunk] = []  # what is sent of it
        self._is_preemptible = False  # it may be broken off for a newcomer
        self._held_back = HeldBackTokens(core)
        self._has_stats = True  # that were not reported
        self._next_stats_ns = 0
        self._is_running = True

    def run(self) -> None:
        """Turn until a Shutdown message comes."""
        core, heartbeat = self._core, self._heartbeat
        output: SchedulerOutput | None = None
        result: StepResult | None = None
        while self._is_running:
            arrived, moved = self._transfers.poll(), self._tiers.poll() if self._tiers is not None else ()
            now = self._clock()  # the turn reads the clock only here
            heartbeat.begin_turn(now)
            if output is not None:
                self._end_step(output, result, now)
            for event in arrived:
                self._transfers.on_event(event, now)
            for change in moved:
                core.on_tier(change, now)
                self._has_stats = True
            self._take_messages(now)
            core.end_turn(now)
            self._flush(now, self._held_back.release())
            output, result = self._next_step(now) if self._is_running else None, None
            self._flush(now)  # before the step, which may take long
            if output is not None:
                heartbeat.begin_step(output.predicted_ns)
                result = self._execute(output, now)
            elif self._is_running:
                self._wait(now)

    def on_layer(self, num_layers: int) -> None:
        """Called in the middle of a step, when the KV of ``num_layers`` layers is computed: send it to the decode
        workers. Raises StepBrokenOff when every request of the step was dropped, or gives way to one that has come."""
        self._break_off()
        if num_layers:
            for chunk in self._chunks:
                self._transfers.send(chunk, num_layers)

    def _begin_step(self, now: int) -> SchedulerOutput | None:
        output = self._core.begin_step(now)
        if output is not None and output.is_compute and output.predicted_ns >= ANNOUNCED_STEP_NS:
            chunks = tuple((chunk.request_id, chunk.start, chunk.num_tokens) for chunk in output.prefills)
            self._core.note([StepBegun(now, output.step_id, chunks, output.num_decodes, output.predicted_ns)])
        return output

    def _next_step(self, now: int) -> SchedulerOutput | None:
        """The step that was launched ahead, or a new one."""
        under_way = self._pipeline.under_way if self._pipeline is not None else None
        return under_way if under_way is not None else self._begin_step(now)

    def _execute(self, output: SchedulerOutput, now: int) -> StepResult | None:
        """The result; None when the step was broken off."""
        self._step = output
        self._chunks = self._core.chunks_of(output)
        self._is_preemptible = self._core.engine.is_preemptible_by(DEFAULT_OPTIONS)
        self.doing = "the step"
        result: StepResult | None = None
        with contextlib.suppress(StepBrokenOff):  # our own sign; the result is None
            if self._pipeline is None:
                result = self._runner.execute(output)
            else:
                result = self._pipeline.execute(output, partial(self._core.begin_step, now))
        self.doing = "the engine core"
        return result

    def _break_off(self) -> None:
        """Raises StepBrokenOff when every prompt in the step is to be dropped and the step has no decodes, or when all
        of the step gives way to a request that has come: this need not wait for its end."""
        step = self._step
        if step is None or (step.num_decodes and not self._is_preemptible):
            return
        self._inbox.extend(self._receive())
        if self._is_preemptible and any(_is_newcomer(message) for message in self._inbox):
            raise StepBrokenOff
        if step.num_decodes:
            return
        leaving = {
            order.command[1]["attempt_id"]
            for order in self._inbox
            if isinstance(order, Order) and order.command[0] == Drop.__name__
        }
        if leaving and leaving.issuperset(chunk.request_id for chunk in step.prefills):
            raise StepBrokenOff

    def _end_step(self, output: SchedulerOutput, result: StepResult | None, now: int) -> None:
        """Take in what was computed and report it, the tokens first. When the step was broken off, those of its
        requests that are not wanted any more are dropped first."""
        self._has_stats = True
        if result is None:
            self._take_messages(now)
            self._core.end_step(output, StepResult(output.step_id), now, num_steps=0)
            return
        tokens = result.payload
        if self._pipeline is not None and tokens is not None:
            tokens = tokens.of_open(self._core.engine.requests)
        self._core.end_step(output, result, now)
        self._flush(now, self._held_back.hold_back(tokens))

    def _flush(self, now: int, tokens: StepTokens | None = None) -> None:
        """Carry out the actions of the core and report the events, also those that the actions cause."""
        if tokens is not None and tokens.is_empty:
            tokens = None
        while not (outbox := self._core.take_outbox()).is_empty or tokens is not None or self._is_stats_time(now):
            for action in outbox.before:
                self._transfers.act(action, tokens, now)
            self._report(outbox, tokens, now)
            for action in outbox.after:
                self._transfers.act(action, tokens, now)
            if self._tiers is not None:
                for move in outbox.tiers:
                    self._tiers.act(move)
            tokens = None

    def _report(self, outbox: Outbox, tokens: StepTokens | None, now: int) -> None:
        stats = None
        if self._is_stats_time(now):
            stats = replace(self._core.engine.stats(), cpu_wait_ns=cpu_wait_ns())
            if self._tiers is not None and (disk := self._tiers.disk) is not None:
                damaged, used = disk.store.counts.damaged_blocks, disk.used_bytes
                stats = replace(stats, tiers=replace(stats.tiers, damaged_blocks=damaged, disk_bytes=used))
            self._has_stats, self._next_stats_ns = False, now + STATS_INTERVAL_NS
        if outbox.events or tokens is not None or outbox.load is not None or stats is not None:
            self._intake.forget_ended(outbox.events)
            first_tokens, self._transfers.first_tokens = self._transfers.first_tokens, {}
            report = StepReport(pack_events(outbox.events), tokens, first_tokens, outbox.load, stats)
            self._channel.send(encode(report))

    def _is_stats_time(self, now: int) -> bool:
        return self._has_stats and now >= self._next_stats_ns

    def _take_messages(self, now: int) -> None:
        self._inbox.extend(self._receive())
        while self._inbox:
            self._has_stats = True
            message = self._inbox.popleft()
            if isinstance(message, Shutdown):
                self._is_running = False
                continue
            if isinstance(message, StartOver):
                self._start_over(message.life, now)
                continue
            command = unpack_command(message.command)
            if self._awaited is None or not self._awaited.holds(message, command):
                self._take(message, command, now)
        if self._awaited is not None:
            for order, command in self._awaited.released():
                self._take(order, command, now)

    def _start_over(self, life: int, now: int) -> None:
        """No attempt of before is wanted: end them all, and introduce this worker again."""
        if self._awaited is not None:
            self._awaited.clear()
        self._core.drop_all(now)
        self._flush(now)
        if self._ready is not None:
            ready = msgspec.structs.replace(self._ready, share=self._device.share, life=life)
            self._channel.send(encode(ready))
        self._core.introduce(now)

    def _receive(self) -> Iterator[Order | StartOver | Shutdown]:
        channel = self._channel
        if channel.is_closed:
            return
        for data in channel.receive():
            message = decode_from_frontend(data)
            if isinstance(message, Orders):
                yield from message.orders
            else:
                yield message
        if channel.is_closed:  # the front end has ended, and so will this process (die_with_parent)
            self._poller.unregister(channel)

    def _take(self, order: Order, command: WorkerCommand, now: int) -> None:
        if isinstance(command, Serve | Reserve | Prefill):
            assert order.tokens is not None, "an attempt without tokens"
            if isinstance(command, Prefill):
                self._transfers.set_address(command.attempt_id, order.address)
            self._intake.begin(command, order.tokens, now)
        elif isinstance(command, Resize):
            self._resize(command, now)
        else:
            self._core.handle(command, now)

    def _resize(self, command: Resize, now: int) -> None:
        """Compute on another share from the next step on; when that cannot be, on the same as before."""
        num_units, message = self._device.num_units, ""
        try:
            self._device.resize(command.share)
        except ConfigError as error:
            message = error.message
        logger.warning("computing on %s from now on%s", self._device.share, f" ({message})" if message else "")
        self._core.on_resized(self._device.share, num_units / self._device.num_units, now, message)

    def _wait(self, now: int) -> None:
        """Sleep until a message or KV comes, the core wants a turn, or statistics may be reported."""
        times = [due_ns for due_ns in (self._core.next_wake_ns,) if due_ns is not None]
        if self._has_stats:
            times.append(self._next_stats_ns)
        timeout_ms = max(1, (min(times) - now + NS_PER_MS - 1) // NS_PER_MS) if times else None
        self._heartbeat.rest()
        self._channel.flush()
        if not self._channel.is_closed:
            wanted = select.POLLIN | select.POLLOUT if self._channel.has_unsent else select.POLLIN
            self._poller.modify(self._channel, wanted)
        self._poller.poll(timeout_ms)


def _is_newcomer(message: Order | StartOver | Shutdown) -> bool:
    """Whether this is a request that others give way to."""
    if not isinstance(message, Order) or message.tokens is None or message.command[0] == Reserve.__name__:
        return False
    return not message.tokens.options.is_best_effort


def die_with_parent(directory: Path) -> None:
    """End this process when its standard input does: the front end holds the other end of that pipe. The last to leave
    removes the private directory. A stopped process is continued (by Linux), so that it can see the end."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def serve(directory: Path, load: Load, connect_to_peers: Connect) -> int:
    """Load what ``load(options, report)`` builds, connect it to the other workers, report Ready, and run its loop.
    Returns the exit status."""
    heartbeat = Heartbeat(directory / FILE_NAME)
    options = msgspec.json.decode((directory / "options.json").read_bytes(), type=EngineOptions)
    channel = connect(directory / "worker")

    def report(stage: str, fraction: float | None = None) -> None:
        channel.send(encode(Loading(stage, fraction)))

    try:
        with without_collections():
            loaded = load(options, report)
            connector = connect_to_peers(options, loaded.runner, directory)
    except DiptychError as error:
        channel.send(encode(Failed(ErrorRecord.of(error))))
        channel.close(LINGER_S)
        return 1
    engine, runner = loaded.engine, loaded.runner
    cache = engine.config.cache
    address = connector.address if connector else ""
    ready = msgspec.structs.replace(
        loaded.ready, address=address, num_blocks=cache.num_blocks, block_size=cache.block_size
    )
    leave_alone_what_is_loaded()
    channel.send(encode(ready))
    publishes_kv = options.explains_misses or (options.place is not None and options.place.publishes_blocks)
    worker = Worker(
        WorkerCore(engine, publishes_kv=publishes_kv),
        runner,
        channel,
        connector=connector,
        heartbeat=heartbeat,
        device=loaded.device,
        grammars=loaded.grammars,
        ready=ready,
        tiers=loaded.tiers,
        pipeline=loaded.pipeline,
    )
    runner.on_layer = worker.on_layer
    status = 0
    try:
        worker.run()
    except Exception as error:  # a defect: what this process holds cannot be relied on; another one replaces it
        channel.send(encode(_leave_behind(error, worker, loaded, options)))
        status = FAILED_STATUS
    finally:
        if loaded.recorder:
            loaded.recorder.close()
        if connector:
            connector.close()
        if loaded.tiers:
            loaded.tiers.close()
        heartbeat.close()
    channel.close(LINGER_S)
    return status


def _leave_behind(error: Exception, worker: Worker, loaded: LoadedEngine[Any], options: EngineOptions) -> Failed:
    """The last word of a worker that fails by a defect, after its recording is written."""
    number = options.place.number if options.place is not None else 0
    core = f"{worker.doing} of worker {number}"
    logger.critical("%s has failed", core, exc_info=error)
    recording = engine_failure(folder_of(options.failures), core, error, loaded.engine.config, loaded.recent)
    return Failed(ErrorRecord.of(CoreFailedError(f"{core} has failed: {error_words(error)}")), recording)


def main() -> int:
    """``python -m diptych.serving.worker DIRECTORY``: started by the supervisor."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s worker %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    leave_terminal_to_parent()
    directory = Path(sys.argv[1])
    die_with_parent(directory)
    switch_often()
    return serve(directory, load_engine, connect_peers)
