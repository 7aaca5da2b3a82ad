"""A place that blocks are loaded from: the disk of a worker, or the host memories of the other workers of its host.

Owns what a block from there costs, as measured, how many are being read, and whether loads keep up with computing.
"""

LEARN_SHARE = 4  # a measured load changes the price of a block by 1 / LEARN_SHARE of the difference
SLOW_LOADS = 4  # loads in a row slower than computing, after which the source is left alone for SLOW_REST_NS
SLOW_REST_NS = 30_000_000_000


class LoadSource:
    """One of them. load_block_ns: reading one block. loaded_blocks, missed_blocks: that came, and that were asked for
    and were not there."""

    __slots__ = (
        "_num_ahead",
        "_rests_until_ns",
        "_slow_in_row",
        "is_on",
        "load_block_ns",
        "loaded_blocks",
        "missed_blocks",
    )

    def __init__(self, load_block_ns: int, *, is_on: bool) -> None:
        self.load_block_ns = load_block_ns
        self.is_on = is_on
        self.loaded_blocks = 0
        self.missed_blocks = 0
        self._num_ahead = 0
        self._slow_in_row = 0
        self._rests_until_ns = 0

    def is_used(self, now: int) -> bool:
        """Whether a load may begin."""
        return self.is_on and now >= self._rests_until_ns

    def price_at(self, now: int) -> int:
        """Nanoseconds of reading one block; 0: nothing is read now."""
        return max(1, self.load_block_ns) if self.is_used(now) else 0

    @property
    def wait_ns(self) -> int:
        """How long a load that is begun now waits for those before it."""
        return self._num_ahead * self.load_block_ns

    def begun(self, num_blocks: int) -> None:
        """Count a load of ``num_blocks`` blocks that begins."""
        self._num_ahead += num_blocks

    def given_up(self, num_blocks: int) -> None:
        """Discount a load of ``num_blocks`` blocks that no request waits for any more."""
        self._num_ahead -= num_blocks

    def ended(self, num_blocks: int, num_missed: int) -> None:
        """A load that was waited for is over. num_missed: of its ``num_blocks``."""
        self._num_ahead -= num_blocks
        self.missed_blocks += num_missed
        self._slow_in_row = 0

    def measured(self, num_blocks: int, duration_ns: int) -> None:
        """Learn from a load: ``num_blocks`` blocks arrived in ``duration_ns``."""
        self.loaded_blocks += num_blocks
        if num_blocks:
            self.load_block_ns += (duration_ns // num_blocks - self.load_block_ns) // LEARN_SHARE

    def was_late(self) -> None:
        """A load took longer than computing."""
        self._slow_in_row += 1

    def rest_if_slow(self, now: int) -> None:
        """Begin a rest after too many late loads in a row."""
        if self._slow_in_row >= SLOW_LOADS:
            self._slow_in_row, self._rests_until_ns = 0, now + SLOW_REST_NS
