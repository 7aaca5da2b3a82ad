"""The pages of an engine's metrics: what one rank says in them, and the newest, for its diagnosis: a few of the last
minute, at even distances.

They also tell whether another process answers at the engine's address: when it was started is one of the metrics.
"""

import re
from collections import deque

from diptych.control.slo import NS_PER_S
from diptych.serving.front.engine_spec import EngineSpec
from diptych.timeline.watched_server import WatchedEngine

DIAGNOSED_KINDS = ("vllm", "sglang")  # whose metrics have histograms
NUM_PAGES = 8
PAUSE_NS = 8 * NS_PER_S  # between two pages that are kept
FEWEST_NS = 2 * NS_PER_S  # from the first page to the last


def page_of_rank(page: bytes, rank: int | None) -> bytes:
    """The lines of this rank on a metrics page of several ranks of data parallelism (label ``engine``), and those of no
    rank (None: the whole page)."""
    if rank is None:
        return page
    mine = b'engine="%d"' % rank
    return b"\n".join(line for line in page.split(b"\n") if b'engine="' not in line or mine in line)


class EnginePages:
    """Memory: at most NUM_PAGES pages, and the newest."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=NUM_PAGES - 1)
        self._newest: tuple[int, bytes] | None = None

    def clear(self) -> None:
        """The engine has come up: its counters begin again."""
        self._kept.clear()
        self._newest = None

    def add(self, page: bytes, now: int) -> None:
        """A page came."""
        self._newest = now, page
        if not self._kept or now - self._kept[-1][0] >= PAUSE_NS:
            self._kept.append(self._newest)

    def watched(self, spec: EngineSpec, version: str) -> WatchedEngine | None:
        """The pages, with seconds; None, where they say too little."""
        if self._newest is None or self._newest[0] - self._kept[0][0] < FEWEST_NS:
            return None
        pages = [*self._kept] if self._kept[-1] is self._newest else [*self._kept, self._newest]
        timed = [(time_ns / NS_PER_S, page) for time_ns, page in pages]
        return WatchedEngine(name=spec.url if spec.rank is None else spec.name, version=version, pages=timed)


_STARTED = re.compile(rb"process_start_time_seconds(?:\{[^}\n]*\})?[ \t]+([0-9.eE+]{1,32})(?=[ \t\r\n]|$)")
CLOCK_S = 1.0  # by which the times of one process may differ: its host's clock is adjusted


class EngineProcess:
    """One engine's, through all its lives. Where several processes answer in turn, nothing is concluded any more."""

    def __init__(self) -> None:
        self._newest_s: float | None = None
        self._is_awaited = True  # the engine has come up, and has not said yet when it was started
        self._are_several = False

    def begin(self) -> None:
        """The engine has come up: whatever process it is now, it is known."""
        self._is_awaited = True

    def is_another(self, page: bytes) -> bool:
        """Whether this page of its metrics is of a later process than those since ``begin``."""
        started_s, before_s = started_of(page), self._newest_s
        if started_s is None or self._are_several:
            return False
        was_awaited, self._is_awaited = self._is_awaited, False
        if before_s is None or started_s > before_s + CLOCK_S:
            self._newest_s = started_s
            return before_s is not None and not was_awaited
        self._are_several = started_s < before_s - CLOCK_S
        return False


def started_of(page: bytes) -> float | None:
    """Seconds since the epoch; None where a page says nothing, or several things."""
    values: set[float] = set()
    for found in _STARTED.finditer(page):
        if found.start() == 0 or page[found.start() - 1 : found.start()] == b"\n":
            try:
                values.add(float(found[1]))
            except ValueError:
                return None
    return values.pop() if len(values) == 1 else None
