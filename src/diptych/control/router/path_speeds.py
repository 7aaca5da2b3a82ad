"""How fast KV travels from one worker to another, as handoffs have measured it.

What workers say of their place (host, rack) gives the first guess of a path's speed; what was measured replaces it
where the two differ. Owns the moving estimates and which of them count. Must never choose: pairing.py does.
"""

from dataclasses import dataclass

from diptych.control.router.topology import LinkCost
from diptych.control.slo import NS_PER_S

Path = tuple[int, int]  # prefill worker, decode worker

LEAST_BYTES = 65_536  # what is shorter measures something else
KEPT = 8  # of the sums, all but this part stays at each measurement
NOTABLE = 4  # an estimate counts when it differs by more than this part from what counted before
MEMORY_NS = 60 * NS_PER_S  # a path that was not used for so long gets another chance
MAX_PATHS = 16_384


@dataclass(slots=True)
class _Estimate:
    num_bytes: int = 0
    wire_ns: int = 0
    until_ns: int = 0

    @property
    def bytes_per_s(self) -> int:
        """Long transfers weigh more than short ones."""
        return max(1, self.num_bytes * NS_PER_S // max(1, self.wire_ns))


class PathSpeeds:
    """The estimates. ``measured``: bytes per second, of the paths whose speed is notably another than was guessed."""

    def __init__(self) -> None:
        self.measured: dict[Path, int] = {}
        self.next_ns: int | None = None  # when one may be too old
        self._estimates: dict[Path, _Estimate] = {}  # the oldest first

    def link(self, path: Path, guessed: LinkCost) -> LinkCost:
        """What a path costs."""
        speed = self.measured.get(path) if self.measured else None
        return guessed if speed is None else LinkCost(speed, guessed.latency_ns)

    def observe(self, path: Path, guessed: LinkCost, num_bytes: int, wire_ns: int, now: int) -> bool:
        """A handoff's bytes were coming in for ``wire_ns``. Whether ``measured`` has changed."""
        if num_bytes < LEAST_BYTES or wire_ns < 1:
            return False
        estimate = self._estimates.pop(path, None) or _Estimate()
        self._estimates[path] = estimate
        estimate.num_bytes += num_bytes - estimate.num_bytes // KEPT
        estimate.wire_ns += wire_ns - estimate.wire_ns // KEPT
        estimate.until_ns = now + MEMORY_NS
        if self.next_ns is None:
            self.next_ns = estimate.until_ns
        has_changed = self._count(path, estimate, guessed)
        if len(self._estimates) > MAX_PATHS:
            has_changed = self._forget([next(iter(self._estimates))]) or has_changed
        return has_changed

    def expire(self, now: int) -> bool:
        """Forget what is too old. Whether ``measured`` has changed."""
        if self.next_ns is None or now < self.next_ns:
            return False
        old = [path for path, estimate in self._estimates.items() if estimate.until_ns <= now]
        has_changed = self._forget(old)
        self.next_ns = min((estimate.until_ns for estimate in self._estimates.values()), default=None)
        return has_changed

    def forget(self, worker: int) -> bool:
        """Forget a worker's paths when its process has ended: the next may be reached otherwise. Returns whether
        ``measured`` has changed."""
        return self._forget([path for path in self._estimates if worker in path])

    def _forget(self, paths: list[Path]) -> bool:
        has_changed = False
        for path in paths:
            del self._estimates[path]
            has_changed = self.measured.pop(path, None) is not None or has_changed
        return has_changed

    def _count(self, path: Path, estimate: _Estimate, guessed: LinkCost) -> bool:
        """Small changes are noise, and each that counts means that all workers are placed again."""
        speed, before = estimate.bytes_per_s, self.measured.get(path)
        if not _differs(speed, guessed.bytes_per_s):
            return self.measured.pop(path, None) is not None
        if before is not None and not _differs(speed, before):
            return False
        self.measured[path] = speed
        return True


def _differs(speed: int, other: int) -> bool:
    return NOTABLE * abs(speed - other) > other
