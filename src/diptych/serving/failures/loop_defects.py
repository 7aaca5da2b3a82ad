"""What nobody has caught in an event loop: an exception of a callback, or of a task whose end nobody reads.

Each is counted beside the failures of cores, and the log gets its traceback, once a minute of each kind. What has
failed stays as the code left it: who can mend more catches its own exceptions (see watched_tasks.py).
"""

import asyncio
import logging
from typing import Any

from diptych.base.limited_log import LimitedLog, kind_of
from diptych.serving.failures.failure_board import FailureBoard

logger = logging.getLogger(__name__)

LOOP = "the event loop"


class LoopDefects:
    """The exception handler of one loop. board: where defects are counted."""

    def __init__(self, board: FailureBoard) -> None:
        self._board = board
        self._log = LimitedLog(logger)

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Take in what the loop has caught, as its exception handler."""
        error, words = context.get("exception"), context.get("message", "")
        if isinstance(error, OSError):  # a connection that broke is no defect of this program
            self._log.warning(kind_of(error), "%s: %s", words, error)
            return
        self._board.counts[LOOP] += 1
        kind = words if error is None else kind_of(error)
        self._log.error(kind, "not caught in the event loop: %s", words, error=error)
