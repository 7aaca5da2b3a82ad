"""The process that computes panels, seen from the process that serves them.

Owns that process: one at most, started by the first call, started again when it has ended, killed when it takes too
long. A caller waits in a thread that only reads a pipe, so that the event loop stays free.
"""

import atexit
import contextlib
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import IO

import anyio.to_thread
import msgspec
from anyio import CapacityLimiter, Lock

from diptych.web import panel_wire
from diptych.web.panel_wire import Call, Reply, receive, send


class PanelHost:
    """is_background: the process runs only on cores that no other process wants. Safe to build anywhere; ``ask``
    belongs to one event loop."""

    def __init__(self, *, is_background: bool = False) -> None:
        self._is_background = is_background
        self._process: subprocess.Popen[bytes] | None = None
        self._has_ended = False
        self._turn = Lock()
        self._threads = CapacityLimiter(1)

    async def ask(self, call: Call, is_gone: Callable[[], Awaitable[bool]] | None = None) -> Reply:
        """The reply to a call: 503 when too many wait, or when the process ended or was killed before it answered.
        is_gone: whether the client has left, asked when it is this call's turn."""
        if self._turn.statistics().tasks_waiting >= panel_wire.MOST_CALLS:
            return _unavailable("Too many panels are being computed. Try again in a moment.")
        async with self._turn:
            if is_gone is not None and await is_gone():
                return _unavailable("The client has left.")
            if self._has_ended:
                return _unavailable("The server is shutting down.")
            return await anyio.to_thread.run_sync(self._exchange, call, limiter=self._threads)

    def end(self) -> None:
        """Answer this call and all later ones with 503, so that no client keeps a server from ending."""
        self._has_ended = True
        process = self._process  # (the thread that waits for it may let go of it meanwhile)
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):  # what was not sent yet is lost with the process
                    pipe.close()
            self._process = None

    def _exchange(self, call: Call) -> Reply:
        try:
            stdin, stdout = self._pipes()
        except OSError as error:  # no descriptors, or no memory
            return _unavailable(f"The process that computes panels cannot be started ({error.strerror}). Try again.")
        process = self._process
        assert process is not None
        if self._has_ended:  # while it was started
            process.kill()
        killing = threading.Timer(panel_wire.ANSWER_S, process.kill)
        killing.daemon = True
        killing.start()
        try:
            send(stdin, call)
            return receive(stdout, Reply)
        except (BrokenPipeError, EOFError):
            self.close()
            return _unavailable("The process that computes panels ended or took too long. Try again.")
        finally:
            killing.cancel()

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            # A process group of its own: Ctrl+C is for the server, which ends this one. (No session of its own: where
            # the kernel shares time among sessions first, a low priority would mean nothing.)
            command = [sys.executable, "-m", "diptych.web.panel_worker"] + ["background"] * self._is_background
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=-1, process_group=0
            )
            atexit.register(self.close)
        assert self._process.stdin is not None and self._process.stdout is not None
        return self._process.stdin, self._process.stdout


def _unavailable(message: str) -> Reply:
    return Reply(status=503, body=msgspec.json.encode({"error": {"message": message, "param": None}}))
