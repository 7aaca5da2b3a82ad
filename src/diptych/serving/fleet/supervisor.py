"""The life of one worker process: start it, talk to it, notice its end, start it again with growing pauses.

Owns the process, the private directory (mode 0700) and the socket in it. Must never know requests or other workers:
messages are handed to a callback, and so is the loss of the worker.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from diptych.control.errors import DiptychError, WorkerError
from diptych.serving.fleet.descriptor_reserve import DescriptorReserve
from diptych.serving.fleet.exit_status import Loss, count_oom_kills, in_words, is_crash
from diptych.serving.fleet.private_directory import locked_directory
from diptych.serving.fleet.worker_port import WorkerListener, WorkerState
from diptych.serving.link.channel import Channel, accept, listen
from diptych.serving.link.engine_options import EngineOptions
from diptych.serving.link.heartbeat import FILE_NAME, Pulse, read_pulse
from diptych.serving.link.messages import (
    Failed,
    FrontendMessage,
    Ready,
    Shutdown,
    decode_from_worker,
    encode,
)

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S, HEALTHY_S = 0.5, 30.0, 60.0
RESERVED_DESCRIPTORS = 6  # what a start needs at once: lock, socket, and two pipes or pairs of sockets to the process
WORKER_DESCRIPTORS = 4 + RESERVED_DESCRIPTORS  # while it runs: lock, socket, standard input and channel


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """Workers are processes of this host, started with ``command``."""

    command: tuple[str, ...] = (sys.executable, "-m", "diptych.serving.worker")

    def launch(self, number: int, options: EngineOptions, pass_fds: Sequence[int]) -> "Supervisor":
        """See Launcher."""
        return Supervisor(number, options, self.command, pass_fds=pass_fds)


class Supervisor:
    """A WorkerPort: worker ``number`` as a child process, one after the other.

    The command gets one argument: the private directory, with options.json and the socket "worker" in it. The worker
    ends when its standard input does, so that it never outlives this process. pass_fds: file descriptors that it
    inherits under the same numbers.
    """

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
        self.directory: Path | None = None  # of the present process
        self.ready: asyncio.Future[Ready] | None = None  # of the first start
        self._options = options
        self._command = tuple(command)
        self._pass_fds = tuple(pass_fds)
        self._listener: WorkerListener | None = None
        self._channel: Channel | None = None  # from when it has connected
        self._process: asyncio.subprocess.Process | None = None
        self._life: asyncio.Task[None] | None = None
        self._failure: DiptychError | None = None
        self._killed_because = ""
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
        self._life = asyncio.create_task(self._live(), name=f"supervisor-{self.number}")

    @property
    def worker_pid(self) -> int | None:
        """The process id of the running worker."""
        return self._process.pid if self._process and self._process.returncode is None else None

    def send(self, message: FrontendMessage) -> None:
        """Hand a message to the worker; silently nothing when it is gone (its loss is reported on its own)."""
        channel = self._channel
        if channel is not None:
            channel.send(encode(message))
            if channel.has_unsent:
                asyncio.get_running_loop().add_writer(channel.fileno(), self._flush, channel)

    def pulse(self) -> Pulse | None:
        """The newest sign of life in the heartbeat file of the present process."""
        with contextlib.suppress(OSError):  # no descriptor is free: nothing is known now
            return read_pulse(self.directory / FILE_NAME) if self.directory is not None else None
        return None

    def kill(self, because: str) -> None:
        """End a worker that does not answer (even when it is stopped); its loss is reported as any other."""
        if self._process is not None and self._process.returncode is None and not self._killed_because:
            self._killed_because = because
            logger.error("worker %d: %s; killing it", self.number, because)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def stop(self, timeout_s: float = 5.0) -> None:
        """End the worker: ask, then terminate, then kill."""
        if self._life is None:
            return
        is_loading, self.state = self.state is WorkerState.STARTING, WorkerState.STOPPED
        self.send(Shutdown())
        process = self._process
        if process is not None:
            if is_loading and process.returncode is None:  # it reads no messages yet
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
            for signal_it in (process.terminate, process.kill):
                try:
                    await asyncio.wait_for(process.wait(), timeout_s)
                    break
                except TimeoutError:
                    with contextlib.suppress(ProcessLookupError):
                        signal_it()
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
            self._failure = self._process = None
            self._killed_because = ""
            self._reserve.release()
            oom_kills = count_oom_kills()
            try:
                status = await self._run_once()
            except OSError as cause:
                status, self._failure = 0, WorkerError(f"worker process {self.number} cannot be run: {cause}")
            if self.state is WorkerState.STOPPED:
                return
            loss = self._loss(status, count_oom_kills() - oom_kills)
            self._reserve.fill()
            if self.ready and not self.ready.done():
                self.state = WorkerState.STOPPED
                self.ready.set_exception(loss.error)
                return
            if self._ready_at and loop.time() - self._ready_at > HEALTHY_S:
                pause_s = FIRST_PAUSE_S
            self._ready_at = 0.0
            self.state = WorkerState.LOST
            if self._process is None:  # no process ran: nothing more is lost, and a longer pause would not help
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

    def _loss(self, status: int, oom_kills: int) -> Loss:
        because = self._killed_because
        words = in_words(status, killed_because=because, oom_kills=oom_kills)
        error = self._failure or WorkerError(f"worker process {self.number} ended unexpectedly ({words})")
        return Loss(error, is_crash(status, killed_by_us=bool(because), oom_kills=oom_kills))

    async def _run_once(self) -> int:
        """One life of the process, from start to exit status."""
        directory, lock = locked_directory()
        loop = asyncio.get_running_loop()
        listener: socket.socket | None = None
        try:
            (directory / "options.json").write_bytes(msgspec.json.encode(self._options))
            listener = listen(directory / "worker")
            self.directory = directory
            loop.add_reader(listener.fileno(), self._accept, listener)
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                str(directory),
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,
                pass_fds=self._pass_fds,
            )
            self._reserve.fill()
            status = await self._process.wait()
            self._accept(listener)  # one that was quick
            self._receive()  # its last words
            return status
        finally:
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(signal.SIGKILL)
            if listener is not None:
                loop.remove_reader(listener.fileno())
                listener.close()
            self._hang_up()
            self.directory = None
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)

    def _accept(self, listener: socket.socket) -> None:
        """The worker connects, once."""
        self._reserve.release()
        try:
            channel = accept(listener) if self._channel is None else None
        finally:
            self._reserve.fill()
        if channel is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener.fileno())
            loop.add_reader(channel.fileno(), self._receive)
            self._channel = channel

    def _flush(self, channel: Channel) -> None:
        channel.flush()
        if not channel.has_unsent:
            asyncio.get_running_loop().remove_writer(channel.fileno())

    def _hang_up(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(channel.fileno())
            loop.remove_writer(channel.fileno())
            channel.close()

    def _receive(self) -> None:
        """Take every message that is there."""
        channel = self._channel
        if channel is None:
            return
        for data in channel.receive():
            self._take(data)
        if channel.is_closed:
            asyncio.get_running_loop().remove_reader(channel.fileno())

    def _take(self, data: bytes) -> None:
        assert self._listener is not None
        try:
            message = decode_from_worker(data)
        except msgspec.DecodeError:
            logger.exception("worker %d sent something unreadable", self.number)
            return
        if isinstance(message, Ready):
            self.state = WorkerState.READY
            self._ready_at = asyncio.get_running_loop().time()
        elif isinstance(message, Failed):
            self._failure = message.error.exception()
        try:
            self._listener.on_message(self.number, message)
        except Exception:  # one bad record must not leave those behind it unread
            logger.exception("a message of worker %d could not be handled", self.number)
        if isinstance(message, Ready) and self.ready and not self.ready.done():
            self.ready.set_result(message)
