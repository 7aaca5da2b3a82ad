"""How much was used in the last minute, or day: exact in whole numbers, with a fixed amount of memory.

Owns one count over a period that slides. Time is divided into slots, and a slot leaves as a whole, when the last moment
of it is older than the period: what is counted is never less than what the period really saw, and at most a slot more.
"""

from collections import deque

NUM_SLOTS = 60  # of a period; one more is counted, which is partly older


class RateWindow:
    """Units that were used in any ``period_ns``. ``now`` must not go back."""

    def __init__(self, period_ns: int) -> None:
        assert period_ns % NUM_SLOTS == 0
        self.period_ns = period_ns
        self._slot_ns = period_ns // NUM_SLOTS
        self._slots: deque[tuple[int, int]] = deque()  # (number, units), oldest first; none is empty
        self._total = 0

    def charge(self, now: int, units: int) -> None:
        """Count ``units`` as used now."""
        if units <= 0:
            return
        self._forget(now)
        slot = now // self._slot_ns
        self._total += units
        if self._slots and self._slots[-1][0] == slot:
            units += self._slots.pop()[1]
        self._slots.append((slot, units))

    def used(self, now: int) -> int:
        """Units in the period that ends now."""
        self._forget(now)
        return self._total

    def wait_ns(self, now: int, most: int) -> int:
        """How long until at most ``most`` units are counted, if no more are used."""
        left = self.used(now)
        if left <= most:
            return 0
        for slot, units in self._slots:
            left -= units
            if left <= most:
                return self._leaves_ns(slot) - now
        raise AssertionError("most is negative")

    def reset_ns(self, now: int) -> int:
        """How long until nothing is counted, if no more is used."""
        self._forget(now)
        return self._leaves_ns(self._slots[-1][0]) - now if self._slots else 0

    def _leaves_ns(self, slot: int) -> int:
        return (slot + NUM_SLOTS + 1) * self._slot_ns

    def _forget(self, now: int) -> None:
        while self._slots and self._leaves_ns(self._slots[0][0]) <= now:
            self._total -= self._slots.popleft()[1]
