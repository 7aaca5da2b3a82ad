"""Loads from disk into host blocks: what is on disk, which requests wait for which load, and what a block costs.

A load is begun where it is faster than computing by a margin: by the measured time of a block, and what is ahead of it
in the queue of the disk. A request waits for it no longer than computing would have taken from then on.
"""

from collections.abc import Callable, Iterable, Sequence

from diptych.control.config import CacheConfig
from diptych.control.engine.kvcache.block_pool import BlockPool
from diptych.control.engine.kvcache.disk_journal import DiskJournal
from diptych.control.engine.kvcache.tier_records import CancelLoad, DiskContents, LoadBlocks, RunLoaded, TierAction
from diptych.control.request import Request, Standing

MARGIN = 2  # a load is to take at most one part in so many of the time of computing
LEARN_SHARE = 4  # a measured load changes the price of a block by one part in so many of the difference
SLOW_LOADS = 4  # so many in a row that were slower than computing: the disk is left alone for SLOW_REST_NS
SLOW_REST_NS = 30_000_000_000

WorkNs = Callable[[int, int], int]  # (start, num_tokens) -> predicted nanoseconds of computing them


class _DiskLoad:
    """One load under way. deadline_ns: when its requests are computed instead."""

    __slots__ = ("deadline_ns", "hashes", "host_blocks", "is_over", "requests")

    def __init__(self, hashes: tuple[bytes, ...], host_blocks: list[int], deadline_ns: int) -> None:
        self.hashes = hashes
        self.host_blocks = host_blocks
        self.deadline_ns = deadline_ns
        self.requests: dict[str, Request] = {}
        self.is_over = False  # nobody waits for it any more: it was cancelled


class DiskLoads:
    """Owner of the set of hashes on disk and of the loads under way."""

    def __init__(self, config: CacheConfig, host: BlockPool) -> None:
        self._block_size = config.block_size
        self._host = host
        self._copy_block_ns = config.tiers.copy_block_ns
        self.load_block_ns = config.tiers.load_block_ns
        self.is_on = config.tiers.has_disk
        self.loaded_blocks = 0
        self.missed_blocks = 0  # that were asked for, and could not be read
        self.num_cancelled = 0
        self._on_disk: dict[bytes, None] = {}
        self.journal = DiskJournal()  # of ``_on_disk``
        self._loads: dict[int, _DiskLoad] = {}
        self._load_of: dict[bytes, int] = {}  # hashes that are being loaded -> the load
        self._waits_for: dict[str, int] = {}  # requests -> the load
        self._num_loads = 0
        self._slow_in_row = 0
        self._rests_until_ns = 0

    @property
    def num_loading(self) -> int:
        """Loads that are not answered yet."""
        return len(self._loads)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a load."""
        return len(self._waits_for)

    @property
    def num_on_disk(self) -> int:
        """Blocks known to be on disk."""
        return len(self._on_disk)

    @property
    def hashes(self) -> Iterable[bytes]:
        """Of the blocks known to be on disk."""
        return self._on_disk

    def price_at(self, now: int) -> int:
        """Nanoseconds of reading one block; 0: nothing is read now."""
        return max(1, self.load_block_ns) if self.is_on and now >= self._rests_until_ns else 0

    @property
    def wait_ns(self) -> int:
        """How long a load that is begun now waits for those before it."""
        return self._num_ahead * self.load_block_ns

    def holds(self, block_hash: bytes) -> bool:
        """Whether the disk has this content."""
        return block_hash in self._on_disk

    def change(self, contents: DiskContents) -> None:
        """What can be found on disk has changed."""
        for block_hash in contents.removed:
            self._lose(block_hash)
        for block_hash in contents.added:
            if block_hash not in self._on_disk:
                self._on_disk[block_hash] = None
                self.journal.add(block_hash)

    def pays(self, start: int, num_blocks: int, work_ns: WorkNs) -> bool:
        """Whether reading so many blocks of a prompt, from the block ``start`` on, would pay if nothing else was
        read."""
        price_ns = num_blocks * (self.load_block_ns + self._copy_block_ns)
        return MARGIN * price_ns < work_ns(start * self._block_size, num_blocks * self._block_size)

    def requests(self) -> list[Request]:
        """Those that wait, in no order that means anything (but always the same)."""
        return [request for load in self._loads.values() for request in load.requests.values()]

    def begin(
        self, request: Request, first: int, host: list[int], work_ns: WorkNs, actions: list[TierAction], now: int
    ) -> bool:
        """Whether the request waits for a load from now on. Its first ``first`` blocks are on the device, the next ones
        in the ``host`` blocks, which it then holds."""
        start = first + len(host)
        limit = (request.num_tokens - 1) // self._block_size
        if start >= limit or now < self._rests_until_ns:
            return False
        wanted = request.block_hashes[start:limit]
        if (load_id := self._load_of.get(wanted[0])) is not None and not self._loads[load_id].is_over:
            self._wait(request, load_id, host)
            return True
        run = self._run(wanted, self._host.num_available - self._host.num_idle(host))
        gain_ns = work_ns(start * self._block_size, len(run) * self._block_size)
        if not run or gain_ns <= MARGIN * self._price_ns(len(run)):
            return False
        self._num_loads += 1
        load_id = self._num_loads
        self._hold(request, host)
        blocks = self._host.allocate(len(run))
        self._loads[load_id] = _DiskLoad(run, blocks, now + gain_ns)
        self._load_of.update(dict.fromkeys(run, load_id))
        self._wait(request, load_id, [])
        request.cached_tokens_at_arrival = (start + len(run)) * self._block_size
        actions.append(LoadBlocks(load_id, run, tuple(blocks)))
        return True

    def leave(self, request: Request, actions: list[TierAction]) -> bool:
        """The request ends, if it waits here. A load that nobody waits for is cancelled."""
        load_id = self._waits_for.pop(request.request_id, None)
        if load_id is None:
            return False
        load = self._loads[load_id]
        del load.requests[request.request_id]
        if not load.requests:
            self._cancel(load_id, actions)
        return True

    def end(self, event: RunLoaded, actions: list[TierAction], now: int) -> list[Request]:
        """A load was answered: what came of it can be found. Returns the requests that waited for it."""
        load = self._loads.pop(event.load_id)
        count = event.num_blocks
        for block_hash, block in zip(load.hashes[:count], load.host_blocks[:count], strict=True):
            self._host.remember(block_hash, block)
        for block_hash in load.hashes:
            if self._load_of.get(block_hash) == event.load_id:
                del self._load_of[block_hash]
        if not load.is_over:  # else it was cut short, and says nothing of what is on disk
            for block_hash in load.hashes[count:]:
                self._lose(block_hash)
            self.missed_blocks += len(load.hashes) - count
            self._slow_in_row = 0
        self.loaded_blocks += count
        if count:
            self.load_block_ns += (event.duration_ns // count - self.load_block_ns) // LEARN_SHARE
        requests = list(load.requests.values())
        for request in requests:
            self._release(request, [*request.host_block_ids, *load.host_blocks[:count]])
        self._host.release(load.host_blocks)
        return requests

    def next_deadline_ns(self) -> int | None:
        """When a load will have taken as long as computing."""
        return min((load.deadline_ns for load in self._loads.values() if not load.is_over), default=None)

    def expire(self, now: int, actions: list[TierAction]) -> list[Request]:
        """Cancel the loads that have taken as long as computing would have; their requests are returned."""
        late: list[Request] = []
        for load_id, load in self._loads.items():
            if not load.is_over and load.deadline_ns <= now:
                requests = list(load.requests.values())
                for request in requests:
                    self._release(request, request.host_block_ids)
                late += requests
                load.requests.clear()
                self._cancel(load_id, actions)
                self._slow_in_row += 1
        if self._slow_in_row >= SLOW_LOADS:
            self._slow_in_row, self._rests_until_ns = 0, now + SLOW_REST_NS
        return late

    def _run(self, wanted: Sequence[bytes], room: int) -> tuple[bytes, ...]:
        run: list[bytes] = []
        for block_hash in wanted[: max(0, room)]:
            if block_hash not in self._on_disk or block_hash in self._load_of:
                break
            run.append(block_hash)
        return tuple(run)

    def _price_ns(self, num_blocks: int) -> int:
        """Until so many more blocks are on the device, after the loads that were begun before."""
        return self.wait_ns + num_blocks * (self.load_block_ns + self._copy_block_ns)

    @property
    def _num_ahead(self) -> int:
        """Blocks of the loads that were begun."""
        return sum(len(load.hashes) for load in self._loads.values() if not load.is_over)

    def _lose(self, block_hash: bytes) -> None:
        if block_hash in self._on_disk:
            del self._on_disk[block_hash]
            self.journal.remove(block_hash)

    def _wait(self, request: Request, load_id: int, host: list[int]) -> None:
        self._hold(request, host)
        self._waits_for[request.request_id] = load_id
        self._loads[load_id].requests[request.request_id] = request

    def _hold(self, request: Request, host: list[int]) -> None:
        """Hold these, too, so that they are still there when the load is over."""
        self._host.share(host)
        request.host_block_ids = [*request.host_block_ids, *host]

    def _release(self, request: Request, blocks: list[int]) -> None:
        """The request waits no longer; it holds ``blocks`` until it is admitted. It has waited: it goes before new
        ones."""
        self._host.share(blocks[len(request.host_block_ids) :])
        request.host_block_ids = list(blocks)
        if request.standing_at_arrival is Standing.NEW:
            request.standing_at_arrival = Standing.RETURNING
        del self._waits_for[request.request_id]

    def _cancel(self, load_id: int, actions: list[TierAction]) -> None:
        self._loads[load_id].is_over = True
        self.num_cancelled += 1
        actions.append(CancelLoad(load_id))
