"""A worker process: one loop that reads the clock, ends a step, takes messages, begins a step and executes it.

Owns the worker's core, its executor and the worker's end of the socket. Must never look at text, HTTP or the wall
clock (beyond one monotonic reading per turn), and never wait while there is work.

Steps run on this thread, and nothing else touches the executor: when a message is taken, no step is running, so what
the worker answers (an attempt has ended, a peer is forgotten) is true of its memory, too.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from diptych.control.engine.engine_core import EngineCore
from diptych.control.errors import DiptychError
from diptych.control.events import (
    Event,
    FirstToken,
    HandoffExpired,
    HandoffReleased,
    HandoffReserved,
    RequestAdmitted,
    RequestFinished,
)
from diptych.control.slo import NS_PER_MS
from diptych.control.step import SchedulerOutput, StepBrokenOff, StepResult
from diptych.runtime.transfer.connector import KVConnector
from diptych.serving.link.channel import Channel, connect
from diptych.serving.link.engine_options import EngineOptions
from diptych.serving.link.heartbeat import FILE_NAME, Heartbeat
from diptych.serving.link.messages import (
    Abort,
    AskBlocks,
    Blocks,
    DropAttempts,
    Failed,
    ForgetPeer,
    FrontendMessage,
    Happened,
    Loading,
    PeerForgotten,
    PrefillAttempt,
    Ready,
    ReleaseAttempts,
    RenewAttempts,
    ReserveAttempt,
    Shutdown,
    Stats,
    Submit,
    TokenLogprobs,
    Tokens,
    TransferLost,
    WorkerMessage,
    decode_from_frontend,
    encode,
    pack_error,
    pack_events,
    pack_finished,
)
from diptych.serving.worker.kv_event_publisher import KVEventPublisher
from diptych.serving.worker.load_engine import Report, connect_peers, load_engine
from diptych.serving.worker.recorder import close_recording
from diptych.serving.worker.request_intake import RequestIntake, Runner
from diptych.serving.worker.worker_handoff import Handoffs

logger = logging.getLogger(__name__)

STATS_INTERVAL_NS = 200 * NS_PER_MS
LINGER_S = 1.0
PR_SET_PDEATHSIG = 1  # of prctl(2): which signal the parent's end sends

# What the cluster's decisions need at once; FirstToken only of attempts that are handed off.
_URGENT = (RequestAdmitted, HandoffReserved, HandoffReleased, HandoffExpired)

Load = Callable[[EngineOptions, Report], tuple[EngineCore, Runner, Ready]]
Connect = Callable[[EngineOptions, Any, Path], KVConnector | None]


class Worker:
    """The loop of one worker. ``channel`` leads to the front end; ``connector``: to the other workers (None: it
    takes no part in handoffs); ``publishes_blocks``: it says what enters and leaves the prefix cache."""

    def __init__(
        self,
        core: EngineCore,
        runner: Runner,
        channel: Channel,
        clock: Callable[[], int] = time.monotonic_ns,
        connector: KVConnector | None = None,
        heartbeat: Heartbeat | None = None,
        publishes_blocks: bool = False,
    ) -> None:
        self._core = core
        self._runner = runner
        self._channel = channel
        self._clock = clock
        self._intake = RequestIntake(core, runner)
        self._handoffs = Handoffs(core, self._intake, connector, self._send) if connector else None
        self._heartbeat = heartbeat or Heartbeat()
        self._publisher = KVEventPublisher() if publishes_blocks else None
        self._poller = select.poll()
        self._poller.register(channel, select.POLLIN)
        if connector:
            self._poller.register(connector.fileno(), select.POLLIN)
        self._unreported: list[Event] = []
        self._is_changed = True
        self._next_stats_ns = 0
        self._is_running = True
        self._inbox: deque[FrontendMessage] = deque()
        self._step: SchedulerOutput | None = None  # the one that is executed

    def run(self) -> None:
        """Turn until a Shutdown message comes."""
        core, runner, heartbeat = self._core, self._runner, self._heartbeat
        output: SchedulerOutput | None = None
        result: StepResult | None = None
        while self._is_running:
            arrived = self._handoffs.poll() if self._handoffs else ()
            now = self._clock()  # the only clock reading of the turn
            heartbeat.begin_turn(now)
            if output is not None and result is not None:
                self._end_step(output, result, now)
            elif output is not None:
                self._end_broken_step(output, now)
            if self._handoffs and arrived:
                self._publish(self._handoffs.on_transfers(arrived, now))
            self._take_messages(now)
            if (expiry_ns := core.next_expiry_ns) is not None and expiry_ns <= now:
                self._publish(core.expire(now))
            self._send_stats(now)
            output, result = core.begin_step(now), None
            self._publish(core.take_events())  # before the step, which may take long
            if output is not None:
                heartbeat.begin_step(output.predicted_ns)
                self._step = output
                if self._handoffs:
                    self._handoffs.begin_step(output)
                with contextlib.suppress(StepBrokenOff):
                    result = runner.execute(output)
            elif self._is_running:
                self._wait(now)

    def on_layer(self, num_layers: int) -> None:
        """Called in the middle of a step, when the KV of so many layers is there: send it to where it is wanted. Raises
        StepBrokenOff when nobody wants the step any more."""
        self._break_off()
        if self._handoffs and num_layers:
            self._handoffs.on_layer(num_layers)

    def _break_off(self) -> None:
        """Raises StepBrokenOff when the client of every prompt in the step has left, and nothing else is in it. Whoever
        comes next need not wait for its end."""
        if self._step is None or self._step.num_decodes:
            return
        leaving: set[str] = set()
        self._inbox.extend(self._receive())
        for message in self._inbox:
            if isinstance(message, DropAttempts):
                leaving.update(message.attempt_ids)
            elif isinstance(message, Abort):
                leaving.update(message.request_ids)
        if leaving and leaving.issuperset(chunk.request_id for chunk in self._step.prefills):
            raise StepBrokenOff

    def _end_broken_step(self, output: SchedulerOutput, now: int) -> None:
        """First those leave for whom it was computed."""
        self._take_messages(now)
        self._publish(self._core.end_step(StepResult(output.step_id), now, num_steps=0))

    def _end_step(self, output: SchedulerOutput, result: StepResult, now: int) -> None:
        """Tell what the step gave, first of all the tokens; then send its KV to where it is wanted."""
        events = self._core.end_step(result, now)
        tokens = self._publish(events, result.payload)
        if self._handoffs:
            self._handoffs.after_step(output, events, tokens)
        if self._publisher and (changes := self._publisher.on_events(events)):
            self._send(changes)

    def _take_messages(self, now: int) -> None:
        self._inbox.extend(self._receive())
        while self._inbox:
            self._is_changed = True
            self._take(self._inbox.popleft(), now)

    def _receive(self) -> Iterator[FrontendMessage]:
        channel = self._channel
        if not channel.is_closed:
            yield from map(decode_from_frontend, channel.receive())
            if channel.is_closed:  # the front end has ended, and so will this process (die_with_parent)
                self._poller.unregister(channel)

    def _take(self, message: FrontendMessage, now: int) -> None:
        core = self._core
        match message:
            case Submit(requests):
                self._publish([event for request in requests for event in self._intake.add(request, now)])
            case Abort(request_ids, reason):
                for request_id in request_ids:
                    self._publish(core.abort(request_id, now, reason))
            case ReserveAttempt() | PrefillAttempt():
                self._take_attempt(message, now)
            case ReleaseAttempts(attempt_ids):
                self._publish([event for attempt_id in attempt_ids for event in core.release(attempt_id, now)])
            case DropAttempts(attempt_ids):
                self._publish([event for attempt_id in attempt_ids for event in core.drop(attempt_id, now)])
            case RenewAttempts(attempt_ids):
                core.renew(attempt_ids, now)
            case AskBlocks():
                self._send(self._publisher.snapshot() if self._publisher else Blocks(0, [], [], is_snapshot=True))
            case ForgetPeer(worker):
                if self._handoffs:
                    self._publish(self._handoffs.forget_peer(worker, now))
                self._send(PeerForgotten(worker))
            case Shutdown():
                self._is_running = False

    def _take_attempt(self, message: ReserveAttempt | PrefillAttempt, now: int) -> None:
        is_sender = isinstance(message, PrefillAttempt)
        if self._handoffs is None:
            self._send(TransferLost(message.request.request_id, is_sender, "this worker takes no part in handoffs"))
        elif isinstance(message, PrefillAttempt):
            self._publish(self._handoffs.prefill(message, now))
        else:
            self._publish(self._handoffs.reserve(message, now))

    def _publish(self, events: Sequence[Event], payload: Any = None) -> Tokens | None:
        """One record for what a step gave and who ended, one for what the cluster waits for."""
        if events:
            self._unreported.extend(events)
            self._is_changed = True
            self._intake.forget_ended(events)
            if self._handoffs:
                self._handoffs.on_events(events)
        tokens = self._record(events, payload)
        if tokens:
            self._send(tokens)
        if urgent := [event for event in events if self._is_urgent(event)]:
            self._send(Happened(pack_events(urgent)))
        return tokens

    def _record(self, events: Iterable[Event], payload: Any) -> Tokens | None:
        finished = [
            pack_finished(event, self._intake.take_refusal(event.request_id))
            for event in events
            if isinstance(event, RequestFinished)
        ]
        cached = {
            event.request_id: event.num_cached_tokens
            for event in events
            if isinstance(event, RequestAdmitted) and event.is_first and event.num_cached_tokens
        }
        if payload is not None and (payload.request_ids or payload.prompt_logprobs):
            return Tokens(
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
        return Tokens([], [], finished, cached) if finished or cached else None

    def _is_urgent(self, event: Event) -> bool:
        if isinstance(event, FirstToken):
            request = self._core.requests.get(event.request_id)
            return request is not None and request.hands_off
        return isinstance(event, _URGENT)

    def _send_stats(self, now: int) -> None:
        if self._is_changed and now >= self._next_stats_ns:
            worker = msgspec.to_builtins(self._core.stats())
            self._send(Stats(worker, pack_events(self._unreported), self._core.load(now)))
            self._unreported.clear()
            self._is_changed = False
            self._next_stats_ns = now + STATS_INTERVAL_NS

    def _wait(self, now: int) -> None:
        """Sleep until a message or KV comes, a lease runs out, or statistics that have changed may be sent."""
        times = [self._next_stats_ns] if self._is_changed else []
        if (expiry_ns := self._core.next_expiry_ns) is not None:
            times.append(expiry_ns)
        timeout_ms = max(1, (min(times) - now + NS_PER_MS - 1) // NS_PER_MS) if times else None
        self._heartbeat.rest()
        self._channel.flush()
        if not self._channel.is_closed:
            wanted = select.POLLIN | select.POLLOUT if self._channel.has_unsent else select.POLLIN
            self._poller.modify(self._channel, wanted)
        self._poller.poll(timeout_ms)

    def _send(self, message: WorkerMessage) -> None:
        self._channel.send(encode(message))


def pack_logprobs(entry: Any) -> TokenLogprobs:
    """The executor's record for the wire."""
    return TokenLogprobs(entry.token_id, entry.logprob, list(entry.top))


def die_with_parent(directory: Path) -> None:
    """End this process when its standard input does: the front end holds the other end of that pipe. Whoever is last
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
    """Load what ``load(options, report)`` builds, connect it to the other workers, say so, and run its loop. Returns
    the exit status."""
    heartbeat = Heartbeat(directory / FILE_NAME)
    options = msgspec.json.decode((directory / "options.json").read_bytes(), type=EngineOptions)
    channel = connect(directory / "worker")

    def report(stage: str, fraction: float | None = None) -> None:
        channel.send(encode(Loading(stage, fraction)))

    try:
        core, runner, ready = load(options, report)
        connector = connect_to_peers(options, runner, directory)
    except DiptychError as error:
        channel.send(encode(Failed(pack_error(error))))
        channel.close(LINGER_S)
        return 1
    cache = core.config.cache
    address = connector.address if connector else ""
    ready = msgspec.structs.replace(ready, address=address, num_blocks=cache.num_blocks, block_size=cache.block_size)
    channel.send(encode(ready))
    publishes_blocks = options.place is not None and options.place.publishes_blocks
    worker = Worker(core, runner, channel, connector=connector, heartbeat=heartbeat, publishes_blocks=publishes_blocks)
    runner.on_layer = worker.on_layer
    try:
        worker.run()
    finally:
        close_recording(core)
        if connector:
            connector.close()
        heartbeat.close()
    channel.close(LINGER_S)
    return 0


def main() -> int:
    """``python -m diptych.serving.worker DIRECTORY``: started by the supervisor."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s worker %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front end decides when to stop
    directory = Path(sys.argv[1])
    die_with_parent(directory)
    return serve(directory, load_engine, connect_peers)
