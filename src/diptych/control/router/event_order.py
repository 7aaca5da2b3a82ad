"""Which reports of a worker's cache were received: numbered from 1, and whether some are missing in between."""


class EventOrder:
    """Whether the reports of workers 0, 1, ... are complete. A worker with a missing report is not until a snapshot
    comes."""

    def __init__(self) -> None:
        self._last: list[int] = []
        self._is_complete: list[bool] = []

    def add_worker(self) -> None:
        """One more, with the next number."""
        self._last.append(0)
        self._is_complete.append(True)

    def is_complete(self, worker: int) -> bool:
        """Whether no report of this worker is missing."""
        return self._is_complete[worker]

    def take(self, worker: int, sequence: int) -> bool:
        """Whether this report comes next. If not, it came before, or reports before it are missing from now on."""
        if sequence <= self._last[worker]:
            return False
        if sequence != self._last[worker] + 1:
            self._is_complete[worker] = False
        if self._is_complete[worker]:
            self._last[worker] = sequence
        return self._is_complete[worker]

    def begin_at(self, worker: int, sequence: int) -> bool:
        """Whether a snapshot as of this report is not older than what is known; the reports after it come next."""
        if sequence < self._last[worker]:
            return False
        self._last[worker], self._is_complete[worker] = sequence, True
        return True

    def begin_again(self, worker: int) -> None:
        """A later worker of this number begins with report 1."""
        self._last[worker], self._is_complete[worker] = 0, True
