"""The pages of an engine's metrics: what one rank says in them, and the newest, for its diagnosis: a few of the last
minute, at even distances."""

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
