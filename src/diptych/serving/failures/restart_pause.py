"""How long to wait before what has failed begins again: longer each time, until it has been well for a while."""

import time
from collections.abc import Callable

FIRST_PAUSE_S, LONGEST_PAUSE_S, HEALTHY_S = 0.5, 30.0, 60.0


class RestartPause:
    """The pauses before restarts of one thing that fails and is replaced. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause_s = FIRST_PAUSE_S
        self._begun_s = clock()

    def begun(self) -> None:
        """Note that it runs from now on."""
        self._begun_s = self._clock()

    def next_s(self) -> float:
        """The pause after another failure, in seconds."""
        pause_s = FIRST_PAUSE_S if self._clock() - self._begun_s > HEALTHY_S else self._pause_s
        self._pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return pause_s
