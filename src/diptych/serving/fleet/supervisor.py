"""The life of one worker on this host: start its process, notice its end, start it again with growing pauses.

Must never know requests or other workers: messages are handed to a callback, and so is the loss of the worker.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from diptych.control.errors import CoreFailedError, DiptychError, WorkerError
from diptych.serving.failures.watched_tasks import start_watched
from diptych.serving.fleet.descriptor_reserve import DescriptorReserve
from diptych.serving.fleet.exit_status import Loss, count_oom_kills, in_words, is_crash
from diptych.serving.fleet.worker_handle import WorkerListener, WorkerSite, WorkerState, hand_over
from diptych.serving.fleet.worker_process import RESERVED_DESCRIPTORS, WorkerProcess
from diptych.serving.link.engine_options import EngineOptions
from diptych.serving.link.heartbeat import Pulse
from diptych.serving.link.messages import Failed, FrontendMessage, Ready, Shutdown, decode_from_worker, encode

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S, HEALTHY_S = 0.5, 30.0, 60.0


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """A Launcher whose workers are processes of this host, started with ``command``."""

    command: tuple[str, ...] = (sys.executable, "-m", "diptych.serving.worker")

    async def open(self, join_port: int) -> None:
        """Do nothing: this host is there."""

    async def close(self) -> None:
        """Do nothing: workers end with their supervisors."""

    def launch(self, number: int, options: EngineOptions, pass_fds: Sequence[int]) -> "Supervisor":
        return Supervisor(number, options, self.command, pass_fds=pass_fds)


class Supervisor:
    """A WorkerHandle: worker ``number`` as a child process, one after the other. command, pass_fds: see
    WorkerProcess."""

    def __init__(
        self,
        number: int,
        options: EngineOptions,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.number = number
        self.state = WorkerState.STOPPED
        self.num_restarts = 0
        self.site = WorkerSite()
        self.ready: asyncio.Future[Ready] | None = None  # of the first start
        self._options = options
        self._command = tuple(command)
        self._pass_fds = tuple(pass_fds)
        self._listener: WorkerListener | None = None
        self._process: WorkerProcess | None = None
        self._life: asyncio.Task[None] | None = None
        self._failure: DiptychError | None = None
        self._recording = ""
        self._ready_at = 0.0
        self._reserve = DescriptorReserve(RESERVED_DESCRIPTORS)

    def start(self, listener: WorkerListener) -> None:
        """Start the worker and keep it alive; returns at once. ``ready`` tells how the first start went."""
        assert self._life is None, "started twice"
        self._listener = listener
        self.ready = asyncio.get_running_loop().create_future()
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.state = WorkerState.STARTING
        self._reserve.fill()
        name = f"the supervisor of worker {self.number}"
        self._life = start_watched(self._live(), name, partial(listener.on_defect, name))

    @property
    def worker_pid(self) -> int | None:
        """The process id of the running worker."""
        return self._process.pid if self._process else None

    def send(self, message: FrontendMessage) -> None:
        """Hand a message to the worker; silently nothing when it is gone (its loss is reported on its own)."""
        if self._process is not None:
            self._process.send(encode(message))

    def pulse(self) -> Pulse | None:
        """The newest sign of life in the heartbeat file of the present process."""
        return self._process.pulse() if self._process is not None else None

    def kill(self, because: str) -> None:
        """End a worker that does not answer (even when it is stopped); its loss is reported as any other."""
        if self._process is not None and self._process.kill(because):
            logger.error("worker %d: %s; killing it", self.number, because)

    async def stop(self, timeout_s: float = 5.0, *, is_removed: bool = False) -> None:
        """End the worker: ask, then terminate, then kill."""
        if self._life is None:
            return
        is_loading, self.state = self.state is WorkerState.STARTING, WorkerState.STOPPED
        self.send(Shutdown())
        if self._process is not None:
            await self._process.end(timeout_s, is_listening=not is_loading)
        self._life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._life
        self._life = None
        self._reserve.release()
        if self.ready and not self.ready.done():
            self.ready.set_exception(WorkerError("stopped before the worker was ready"))

    async def _live(self) -> None:
        pause_s, shortage = FIRST_PAUSE_S, False
        loop = asyncio.get_running_loop()
        assert self._listener is not None
        while self.state is not WorkerState.STOPPED:
            self.state = WorkerState.STARTING
            self._failure = None
            process = self._process = WorkerProcess(
                self._options, self._command, self._take, pass_fds=self._pass_fds, reserve=self._reserve
            )
            oom_kills = count_oom_kills()
            try:
                status = await process.run()
            except OSError as cause:
                status, self._failure = 0, WorkerError(f"worker process {self.number} cannot be run: {cause}")
            if self.state is WorkerState.STOPPED:
                return
            loss = self._loss(status, process.killed_because, count_oom_kills() - oom_kills)
            self._reserve.fill()
            if self.ready and not self.ready.done():
                self.state = WorkerState.STOPPED
                self.ready.set_exception(loss.error)
                return
            if self._ready_at and loop.time() - self._ready_at > HEALTHY_S:
                pause_s = FIRST_PAUSE_S
            self._ready_at = 0.0
            self.state = WorkerState.LOST
            if not process.has_started:  # no process ran: nothing more is lost, and a longer pause would not help
                if not shortage:
                    logger.error("%s; trying again until it can", loss.error.message)
                shortage = True
                await asyncio.sleep(FIRST_PAUSE_S)
                continue
            shortage = False
            logger.error("%s; starting it again in %.1f s", loss.error.message, pause_s)
            self._listener.on_lost(self.number, loss)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            self.num_restarts += 1

    def _loss(self, status: int, because: str, oom_kills: int) -> Loss:
        words = in_words(status, killed_because=because, oom_kills=oom_kills)
        crashed = is_crash(status, killed_by_us=bool(because), oom_kills=oom_kills)
        if isinstance(self._failure, CoreFailedError):
            return Loss(self._failure, crashed, True, self._recording)
        return Loss(self._failure or WorkerError(f"worker process {self.number} ended unexpectedly ({words})"), crashed)

    def _take(self, data: bytes) -> None:
        assert self._listener is not None
        try:
            message = decode_from_worker(data)
        except msgspec.DecodeError as error:
            self.kill(f"it sent something unreadable: {error}")
            return
        if isinstance(message, Ready):
            self.state = WorkerState.READY
            self._ready_at = asyncio.get_running_loop().time()
        elif isinstance(message, Failed):
            self._failure, self._recording = message.error.exception(), message.recording
        hand_over(self._listener, self.number, message)
        if isinstance(message, Ready) and self.ready and not self.ready.done():
            self.ready.set_result(message)
