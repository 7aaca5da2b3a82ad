"""One worker process, from its start to its exit status: its private directory (mode 0700) and the socket in it.

Messages are passed as bytes. Must never know what they say, or why a process is started: supervisor.py and
worker_agent.py do.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from diptych.base.private_files import write_private
from diptych.serving.fleet.descriptor_reserve import DescriptorReserve
from diptych.serving.fleet.private_directory import locked_directory
from diptych.serving.link.channel import Channel, accept, listen
from diptych.serving.link.engine_options import EngineOptions
from diptych.serving.link.heartbeat import FILE_NAME, Pulse, read_pulse

RESERVED_DESCRIPTORS = 6  # what a start needs at once: lock, socket, and two pipes or pairs of sockets to the process
WORKER_DESCRIPTORS = 5 + RESERVED_DESCRIPTORS  # while it runs: lock, socket, standard input, channel, host blocks


class WorkerProcess:
    """``run`` it once. The command gets one argument: the private directory, with options.json and the socket "worker"
    in it. The process ends when its standard input does, so that it never outlives this one. on_data: takes each of its
    messages. pass_fds: file descriptors that it inherits under the same numbers. reserve: kept full while it runs."""

    def __init__(
        self,
        options: EngineOptions,
        command: Sequence[str],
        on_data: Callable[[bytes], None],
        *,
        pass_fds: Sequence[int] = (),
        reserve: DescriptorReserve | None = None,
    ) -> None:
        self.killed_because = ""
        self.has_started = False
        self._options = options
        self._command = tuple(command)
        self._on_data = on_data
        self._pass_fds = tuple(pass_fds)
        self._reserve = reserve or DescriptorReserve(RESERVED_DESCRIPTORS)
        self._directory: Path | None = None
        self._channel: Channel | None = None  # from when it has connected
        self._process: asyncio.subprocess.Process | None = None
        self._has_connected = False
        self._early: list[bytes] = []  # to be sent when it has connected
        self._defect: Exception | None = None  # of who takes its messages: the process is ended, and ``run`` raises it

    @property
    def pid(self) -> int | None:
        """Id of the process while it runs."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def run(self) -> int:
        """The exit status, negative for a signal. Raises OSError when the process cannot be started, and what
        taking its messages has raised, when the process is ended."""
        self._reserve.release()
        directory, lock = locked_directory()
        loop = asyncio.get_running_loop()
        listener: socket.socket | None = None
        try:
            write_private(directory / "options.json", msgspec.json.encode(self._options))
            listener = listen(directory / "worker")
            self._directory = directory
            loop.add_reader(listener.fileno(), self._guarded, self._accept, listener)
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                str(directory),
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,
                pass_fds=self._pass_fds,
            )
            self.has_started = True
            self._reserve.fill()
            if self._defect is not None:
                self._signal(signal.SIGKILL)
            status = await self._process.wait()
            if self._defect is None:
                self._accept(listener)  # one that was quick
                self._receive()  # its last words
            if self._defect is not None:
                raise self._defect
            return status
        finally:
            self._signal(signal.SIGKILL)
            if listener is not None:
                loop.remove_reader(listener.fileno())
                listener.close()
            self._hang_up()
            self._directory = None
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)

    def send(self, data: bytes) -> None:
        """Hand a message to the process, as soon as it has connected; silently nothing when it is gone."""
        channel = self._channel
        if channel is not None:
            channel.send(data)
            if channel.has_unsent:
                asyncio.get_running_loop().add_writer(channel.fileno(), self._guarded, self._flush, channel)
        elif not self._has_connected:
            self._early.append(data)

    def pulse(self) -> Pulse | None:
        """The newest sign of life in its heartbeat file."""
        with contextlib.suppress(OSError):  # no descriptor is free: nothing is known now
            return read_pulse(self._directory / FILE_NAME) if self._directory is not None else None
        return None

    def kill(self, because: str) -> bool:
        """End it even when it is stopped. False when it has ended, or was killed before."""
        if self.pid is None or self.killed_because:
            return False
        self.killed_because = because
        self._signal(signal.SIGKILL)
        return True

    async def end(self, timeout_s: float, *, is_listening: bool) -> None:
        """Wait for its end, then terminate, then kill. is_listening: it reads messages, and was asked to leave."""
        if self._process is None:
            return
        if not is_listening:
            self._signal(signal.SIGTERM)
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                await asyncio.wait_for(self._process.wait(), timeout_s)
                break
            except TimeoutError:
                self._signal(number)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _guarded(self, act: Callable[..., None], *arguments: Any) -> None:
        """What the loop calls. An error, which it would log, ends the process and ``run``: a message may be lost."""
        try:
            act(*arguments)
        except Exception as error:
            self._defect = self._defect or error
            self._hang_up()
            self._signal(signal.SIGKILL)

    def _accept(self, listener: socket.socket) -> None:
        """The process connects, once."""
        self._reserve.release()
        try:
            channel = accept(listener) if self._channel is None else None
        finally:
            self._reserve.fill()
        if channel is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener.fileno())
            loop.add_reader(channel.fileno(), self._guarded, self._receive)
            self._channel, self._has_connected = channel, True
            for data in self._early:
                self.send(data)
            self._early.clear()

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
            self._on_data(data)
        if channel.is_closed:
            asyncio.get_running_loop().remove_reader(channel.fileno())
