"""The waiting queue: a heap for short prompts and one for long ones, so that a cap on long prompts skips them all at
once and the short ones behind them are never blocked."""

from collections.abc import Iterator
from heapq import heappop, heappush

from diptych.control.engine.scheduler.order import OrderKey
from diptych.control.request import Request


class WaitingQueue:
    """Requests without blocks, by order key. Removal is lazy: an entry counts only while it is the newest."""

    def __init__(self) -> None:
        self._heaps: tuple[list[tuple[OrderKey, int, Request]], list[tuple[OrderKey, int, Request]]] = ([], [])
        self._entry_of: dict[str, tuple[int, bool]] = {}  # request id -> (entry number, is long)
        self._num_entries = 0

    def __len__(self) -> int:
        return len(self._entry_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entry_of

    def push(self, request: Request, *, is_long: bool) -> None:
        """Queue the request under its ``order_key``."""
        self._num_entries += 1
        self._entry_of[request.request_id] = (self._num_entries, is_long)
        heappush(self._heaps[is_long], (request.order_key, self._num_entries, request))

    def remove(self, request: Request) -> None:
        """Take the request out, wherever it stands."""
        # Its entry stays in the heap, and no longer counts: searching a heap would cost a look at everything that
        # waits.
        del self._entry_of[request.request_id]

    def head(self, *, skip_long: bool = False) -> Request | None:
        """The first request, or the first short one."""
        short = self._first(0)
        long = None if skip_long else self._first(1)
        if short is None or (long is not None and long[:2] < short[:2]):
            return long[2] if long else None
        return short[2]

    def __iter__(self) -> Iterator[Request]:
        """All that wait, in no particular order that means anything (but always the same)."""
        entry_of = self._entry_of
        for heap in self._heaps:
            for _, entry, request in heap:
                if entry_of.get(request.request_id, (0, False))[0] == entry:
                    yield request

    def requests(self) -> list[Request]:
        """All that wait, in order (for reports and tests; O(n log n))."""
        live = [
            item
            for heap in self._heaps
            for item in heap
            if self._entry_of.get(item[2].request_id, (0, False))[0] == item[1]
        ]
        return [request for _, _, request in sorted(live, key=lambda item: item[:2])]

    def _first(self, which: int) -> tuple[OrderKey, int, Request] | None:
        heap = self._heaps[which]
        while heap:
            item = heap[0]
            if self._entry_of.get(item[2].request_id, (0, False))[0] == item[1]:
                return item
            heappop(heap)
        return None
