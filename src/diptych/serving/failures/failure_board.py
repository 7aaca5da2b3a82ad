"""Which cores of a server have failed by a defect, and which of them have no replacement yet: what /health says.

Owns the memory of failures, and their lines in the log. Decides nothing: the drivers of the cores report, and replace.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from diptych.control.errors import CoreFailedError
from diptych.serving.fleet.exit_status import Loss

logger = logging.getLogger(__name__)

MAX_KEPT = 16
SHOWN_S = 600.0  # for how long /health names a failure that is mended
ELSEWHERE_S = 30.0  # for how long at most /health fails over what has failed on another host


@dataclass(frozen=True, slots=True)
class CoreFailure:
    """core: in words, such as "the cluster core". recording: path of what it leaves behind ("": none). at_s: of the
    monotonic clock. is_elsewhere: on another host, so that another process in place of this one would not mend it."""

    core: str
    error: str
    recording: str
    at_s: float
    is_elsewhere: bool = False

    @property
    def words(self) -> str:
        """One line for people."""
        where = f" (recording: {self.recording})" if self.recording else ""
        return f"{self.core} has failed: {self.error}{where}"

    @property
    def words_for_clients(self) -> str:
        """The same without a path of this machine."""
        return f"{self.core} has failed by a defect of the server: {self.error}"

    def exception(self) -> CoreFailedError:
        """What a client gets whose request has ended with it."""
        return CoreFailedError(self.words_for_clients)


class FailureBoard:
    """The failures of one server. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.recent: deque[CoreFailure] = deque(maxlen=MAX_KEPT)
        self.counts: Counter[str] = Counter()  # by core
        self.final: CoreFailure | None = None  # of what cannot be replaced in this process
        self.ended = asyncio.Event()  # set with ``final``
        self._down: dict[str, CoreFailure] = {}  # without a replacement
        self._clock = clock

    def report(
        self, core: str, error: str, recording: str = "", *, is_final: bool = False, is_elsewhere: bool = False
    ) -> CoreFailure:
        """A core has failed. is_final: only another process can replace it. is_elsewhere: see CoreFailure."""
        failure = CoreFailure(core, error, recording, self._clock(), is_elsewhere)
        logger.critical("%s", failure.words)
        self.recent.append(failure)
        self.counts[core] += 1
        self._down[core] = failure
        if is_final and self.final is None:
            self.final = failure
            self.ended.set()
        return failure

    def on_loss(self, worker: int, loss: Loss) -> None:
        """A worker has ended; it may have failed."""
        if loss.failed_core:
            self.report(f"worker {worker}", loss.error.message, loss.recording, is_elsewhere=loss.is_elsewhere)

    def replaced(self, core: str) -> None:
        """Note that a failed core's replacement has begun, or is wanted no more."""
        self._down.pop(core, None)

    @property
    def down(self) -> CoreFailure | None:
        """A core that has failed and is not replaced, the gravest first. One of another host counts for ELSEWHERE_S:
        who looks after this process must not end it for what that could not mend."""
        oldest_s = self._clock() - ELSEWHERE_S
        waits = (each for each in self._down.values() if not each.is_elsewhere or each.at_s > oldest_s)
        return self.final or next(waits, None)

    def health(self) -> tuple[int, dict[str, str | None]]:
        """Status and content of the reply of /health: 503 while a failed core has no replacement. What was mended
        lately is named."""
        if (failure := self.down) is not None:
            return 503, {"status": "failed", "detail": failure.words}
        if self.recent and (age_s := self._clock() - self.recent[-1].at_s) < SHOWN_S:
            last = self.recent[-1]
            becomes = "it has not come back yet" if last.core in self._down else "it was replaced"
            return 200, {"status": "ok", "detail": f"{age_s:.0f} s ago {last.words}; {becomes}"}
        return 200, {"status": "ok", "detail": None}
