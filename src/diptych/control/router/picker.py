"""Picking a worker by load: round robin, fewest outstanding requests, or the better of two drawn at random.

Owns the front end's own count of what it has sent where; never asks a worker. Randomness is a seeded sequence of its
own, so that equal histories give equal picks.
"""

from heapq import heappop, heappush
from typing import Literal

from diptych.control.errors import ConfigError

PickerName = Literal["round_robin", "least_loaded", "power_of_two"]
PICKERS: tuple[PickerName, ...] = ("round_robin", "least_loaded", "power_of_two")
_MASK = 2**64 - 1


class Picker:
    """Workers 0 .. num_workers - 1, each with the requests that it was given and has not ended."""

    def __init__(self, kind: PickerName, num_workers: int, seed: int = 0) -> None:
        if kind not in PICKERS:
            raise ConfigError(f"routing is {kind!r}; one of {', '.join(PICKERS)}", param="routing")
        self._kind = kind
        self._state = seed & _MASK
        self._next = 0
        self.outstanding = [0] * num_workers
        self.is_up = [True] * num_workers
        self._heap = [(0, index) for index in range(num_workers)]  # lazily updated (outstanding, worker)

    def pick(self, avoid: frozenset[int] = frozenset()) -> int | None:
        """The worker for the next request (None: none is up); counts the request as sent. ``avoid``: as if they were
        down."""
        if self._kind == "round_robin":
            choice = self._in_turn(avoid)
        elif self._kind == "least_loaded":
            choice = self._least_loaded_but(avoid) if avoid else self._least_loaded()
        else:
            choice = self._better_of_two(avoid)
        if choice is not None:
            self._change(choice, 1)
        return choice

    def sent(self, worker: int) -> None:
        """A request was sent there that nobody picked here."""
        self._change(worker, 1)

    def ended(self, worker: int) -> None:
        """A request of this worker ended."""
        self._change(worker, -1)

    def set_up(self, worker: int, is_up: bool) -> None:
        """The worker came or went."""
        self.is_up[worker] = is_up
        if is_up:
            heappush(self._heap, (self.outstanding[worker], worker))

    def _change(self, worker: int, by: int) -> None:
        self.outstanding[worker] += by
        if self._kind == "least_loaded":
            heappush(self._heap, (self.outstanding[worker], worker))

    def _in_turn(self, avoid: frozenset[int]) -> int | None:
        for _ in self.outstanding:
            choice = self._next
            self._next = (choice + 1) % len(self.outstanding)
            if self.is_up[choice] and choice not in avoid:
                return choice
        return None

    def _least_loaded_but(self, avoid: frozenset[int]) -> int | None:
        best, least = None, 0
        for worker, load in enumerate(self.outstanding):
            if self.is_up[worker] and worker not in avoid and (best is None or load < least):
                best, least = worker, load
        return best

    def _least_loaded(self) -> int | None:
        heap = self._heap
        while heap:
            load, worker = heap[0]
            if self.is_up[worker] and self.outstanding[worker] == load:
                return worker
            heappop(heap)
        return None

    def _better_of_two(self, avoid: frozenset[int]) -> int | None:
        up = [worker for worker, is_up in enumerate(self.is_up) if is_up and worker not in avoid]
        if not up:
            return None
        first, second = up[self._draw(len(up))], up[self._draw(len(up))]
        return min(first, second, key=lambda worker: (self.outstanding[worker], worker))

    def _draw(self, limit: int) -> int:
        """Below ``limit``: SplitMix64 (Steele, Lea and Flood 2014)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return (mixed ^ (mixed >> 31)) % limit
