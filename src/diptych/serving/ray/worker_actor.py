"""The Ray actor beside one worker: it holds the worker's cores or GPU, runs it as its child, and ends with it.

Runs on the worker's host. Imports nothing but the standard library, so that an actor is small.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence

LINGER_S = 10.0  # for the front end to read how the child has ended


class WorkerActor:
    """``begin`` once, then ``wait``. When the actor ends, however it does, its end of the child's standard input is
    closed, and the child ends (``diptych worker --end-with-stdin``)."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, arguments: Sequence[str]) -> int:
        """Start Python with these arguments; the process id."""
        self._process = subprocess.Popen([sys.executable, *arguments], stdin=subprocess.PIPE)
        return self._process.pid

    def wait(self) -> int:
        """The child's exit status, once it has ended. The actor ends soon after."""
        assert self._process is not None, "there is no child yet"
        status = self._process.wait()
        timer = threading.Timer(LINGER_S, self.leave)
        timer.daemon = True
        timer.start()
        return status

    def leave(self) -> None:
        """End the process of the actor, so that what it holds is free."""
        os._exit(0)
