"""Accounting of the host-memory tier: which host block holds a swapped request. Moves no bytes."""

from collections.abc import Sequence


class HostTier:
    """Owner of host block ids 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_available(self) -> int:
        """Host blocks that ``allocate`` can hand out."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """``count`` host blocks; the caller has checked ``num_available``."""
        assert count <= len(self._free)
        blocks = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give host blocks back."""
        self._free.extend(reversed(blocks))
        assert len(self._free) <= self.num_blocks
