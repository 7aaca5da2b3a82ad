"""Leases on the blocks that a worker holds for another worker.

Owns expiry times, on this worker's own clock. A lease ends when it has not been renewed for its length; EngineCore then
frees the blocks.
"""

from collections.abc import Iterable
from heapq import heappop, heappush


class Leases:
    """Leases by attempt id. Renewing is O(1): the calendar is corrected when an entry comes up."""

    def __init__(self) -> None:
        self._leases: dict[str, tuple[int, int]] = {}  # attempt id -> (length, expiry), ns
        self._calendar: list[tuple[int, str]] = []  # at most one entry per lease that counts, never after its expiry

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, attempt_id: str, length_ns: int, now: int) -> None:
        """A new lease; a length of 0 never expires and is not kept."""
        if length_ns:
            self._leases[attempt_id] = (length_ns, now + length_ns)
            heappush(self._calendar, (now + length_ns, attempt_id))

    def renew(self, attempt_ids: Iterable[str], now: int) -> None:
        """These leases begin again; ids without a lease are ignored."""
        for attempt_id in attempt_ids:
            if lease := self._leases.get(attempt_id):
                self._leases[attempt_id] = (lease[0], now + lease[0])

    def end(self, attempt_id: str) -> None:
        """The lease is not needed any more."""
        self._leases.pop(attempt_id, None)

    @property
    def next_expiry_ns(self) -> int | None:
        """No lease expires before then; None without leases."""
        calendar, leases = self._calendar, self._leases
        while calendar:
            expiry, attempt_id = calendar[0]
            lease = leases.get(attempt_id)
            if lease is not None and lease[1] <= expiry:
                return expiry
            heappop(calendar)
            if lease is not None:
                heappush(calendar, (lease[1], attempt_id))
        return None

    def take_expired(self, now: int) -> list[str]:
        """End the leases that have expired, in order of their expiry."""
        expired = []
        while (expiry := self.next_expiry_ns) is not None and expiry <= now:
            attempt_id = heappop(self._calendar)[1]
            self._leases.pop(attempt_id, None)
            expired.append(attempt_id)
        return expired
