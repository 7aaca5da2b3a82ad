"""The worker process that an agent runs, one after the other, and what of its words belongs to the present front end.

Owns the process. Must never know how the front end is reached.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from diptych.serving.failures.failure_recording import default_folder, error_words, leave_alone
from diptych.serving.failures.watched_tasks import start_watched
from diptych.serving.fleet.exit_status import count_oom_kills, in_words, is_crash
from diptych.serving.fleet.worker_process import WorkerProcess
from diptych.serving.join.join_messages import Ended, Vital
from diptych.serving.link.engine_options import EngineOptions
from diptych.serving.link.messages import Failed, Ready, Shutdown, StartOver, WorkerMessage, decode_from_worker, encode

logger = logging.getLogger(__name__)

END_S = 5.0  # for a process that is asked to end


class HostedWorker:
    """At most one worker process on this host. on_data gets its messages, on_ended its end unless it was asked for
    here. Both are called in the loop."""

    def __init__(
        self, command: Sequence[str], on_data: Callable[[bytes], None], on_ended: Callable[[Ended], None]
    ) -> None:
        self.options: EngineOptions | None = None  # of the process that runs
        self._command = command
        self._on_data = on_data
        self._on_ended = on_ended
        self._process: WorkerProcess | None = None
        self._running: asyncio.Task[None] | None = None
        self._is_loading = False
        self._life: int | None = None  # of a StartOver that is not answered: what comes before is of the past

    @property
    def is_running(self) -> bool:
        """Whether there is a process."""
        return self._running is not None

    def start(self, options: EngineOptions) -> None:
        """Start a process; there must be none."""
        assert self._running is None, "started twice"
        self.options, self._life, self._is_loading = options, None, True
        self._process = WorkerProcess(options, self._command, self._take)
        self._running = start_watched(self._run(self._process), "worker process", self._on_defect)

    def start_over(self, life: int) -> None:
        """Drop all attempts, and say nothing more before the Ready of this life."""
        if self._process is not None:
            self._life = life
            self._process.send(encode(StartOver(life)))

    def send(self, data: bytes) -> None:
        """Pass a message to the process."""
        if self._process is not None:
            self._process.send(data)

    def vital(self) -> Vital:
        """The process's newest heartbeat, as durations."""
        pulse = self._process.pulse() if self._process is not None else None
        now = time.monotonic_ns()
        if pulse is None:
            return Vital(now_ns=now)
        busy_ns = max(1, now - pulse.busy_since_ns) if pulse.busy_since_ns else 0
        return Vital(pulse.age_ns(now), pulse.num_turns, busy_ns, pulse.predicted_ns, now)

    def kill(self, because: str) -> None:
        """End a process that does not answer; ``on_ended`` is called."""
        if self._process is not None and self._process.kill(because):
            logger.error("%s; killing the worker process", because)

    async def end(self) -> None:
        """End the process, if there is one: ask, then terminate, then kill. ``on_ended`` is not called."""
        running, process, self._running, self._process = self._running, self._process, None, None
        self.options = None
        if running is None or process is None:
            return
        process.send(encode(Shutdown()))
        await process.end(END_S, is_listening=True)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    async def _run(self, process: WorkerProcess) -> None:
        oom_kills = count_oom_kills()
        try:
            status = await process.run()
        except OSError as error:
            ended = Ended(f"the worker process cannot be run: {error}", False)
        else:
            oom_kills = count_oom_kills() - oom_kills
            because = process.killed_because
            words = in_words(status, killed_because=because, oom_kills=oom_kills)
            crashed = is_crash(status, killed_by_us=bool(because), oom_kills=oom_kills)
            ended = Ended(f"the worker process ended unexpectedly ({words})", crashed)
        if self._process is process:
            self._process = self._running = self.options = None
            self._on_ended(ended)

    def _on_defect(self, error: BaseException) -> None:
        """The process cannot be followed any more, and was killed: the front end learns why, and another is started."""
        core = "what follows the worker process"
        logger.critical("%s has failed", core, exc_info=error)
        recording = leave_alone(default_folder(), core, error)
        self._process = self._running = self.options = None
        self._on_ended(Ended(f"{core} has failed: {error_words(error)}", False, True, recording))

    def _take(self, data: bytes) -> None:
        if self._is_loading or self._life is not None:
            with contextlib.suppress(msgspec.DecodeError):  # the front end reads it too, and says so
                self._look_at(decode_from_worker(data))
        if self._life is None:
            self._on_data(data)

    def _look_at(self, message: WorkerMessage) -> None:
        if isinstance(message, Failed):
            logger.error("the worker cannot start: %s", message.error.exception().message)
        elif isinstance(message, Ready):
            self._is_loading = False
            if message.life == self._life:
                self._life = None
