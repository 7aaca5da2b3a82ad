"""Loads into host blocks, from disk or from the host memory of another worker of the host: which requests wait for
which load, and what is on disk.

A load is begun where it is faster than computing by a margin: by the measured time of a block, and what is ahead of it
in the queue of its source. Where both sources have what comes next, the one that saves more time is asked. A request
waits for a load no longer than computing would have taken from then on.

What a peer holds is known from a router, as of when it sent the request. So a peer is asked once for each request; what
it no longer has is a miss.
"""

from collections.abc import Callable, Iterable, Sequence

from diptych.control.config import CacheConfig
from diptych.control.engine.kvcache.block_pool import BlockPool
from diptych.control.engine.kvcache.disk_journal import DiskJournal
from diptych.control.engine.kvcache.load_source import LoadSource
from diptych.control.engine.kvcache.tier_records import (
    NO_PEER,
    CancelLoad,
    DiskContents,
    LoadBlocks,
    RunLoaded,
    ShareBlocks,
    TierAction,
)
from diptych.control.errors import BrokenInvariantError
from diptych.control.request import Request, WaitClass

MARGIN = 2  # computing must take at least this factor longer than a load

WorkNs = Callable[[int, int], int]  # (start, num_tokens) -> predicted nanoseconds of computing them


class _HostLoad:
    """One load under way. deadline_ns: when its requests are computed instead."""

    __slots__ = ("deadline_ns", "hashes", "host_blocks", "is_over", "requests", "source")

    def __init__(self, source: LoadSource, hashes: tuple[bytes, ...], host_blocks: list[int], deadline_ns: int) -> None:
        self.source = source
        self.hashes = hashes
        self.host_blocks = host_blocks
        self.deadline_ns = deadline_ns
        self.requests: dict[str, Request] = {}
        self.is_over = False  # nobody waits for it any more: it was cancelled


class TierLoads:
    """Owner of the set of hashes on disk and of the loads under way. disk, peers: where they come from."""

    def __init__(self, config: CacheConfig, host: BlockPool) -> None:
        self._block_size = config.block_size
        self._host = host
        self._copy_block_ns = config.tiers.copy_block_ns
        self._shares_host = config.tiers.shares_host
        self.disk = LoadSource(config.tiers.load_block_ns, is_on=config.tiers.has_disk)
        self.peers = LoadSource(config.tiers.peer_block_ns, is_on=config.tiers.shares_host)
        self.num_cancelled = 0
        self._on_disk: dict[bytes, None] = {}
        self.journal = DiskJournal()  # of ``_on_disk``
        self._loads: dict[int, _HostLoad] = {}
        self._load_of: dict[bytes, int] = {}  # hashes that are being loaded -> the load
        self._waits_for: dict[str, int] = {}  # requests -> the load
        self._num_loads = 0
        self._copies: dict[int, bytes] = {}  # host blocks with what a peer holds, too -> what that was

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
        """Hashes of the blocks known to be on disk."""
        return self._on_disk

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

    def pays(self, start: int, num_blocks: int, work_ns: WorkNs, num_read: int) -> bool:
        """Whether reading ``num_blocks`` blocks of a prompt from disk, from block ``start`` on, pays if nothing else is
        read. num_read: how many these are in all groups of layers."""
        price_ns = num_read * (self.disk.load_block_ns + self._copy_block_ns)
        return MARGIN * price_ns < work_ns(start * self._block_size, num_blocks * self._block_size)

    def requests(self) -> list[Request]:
        """The requests that wait, in no order that means anything (but always the same)."""
        return [request for load in self._loads.values() for request in load.requests.values()]

    def begin(
        self, request: Request, first: int, host: list[int], work_ns: WorkNs, actions: list[TierAction], now: int
    ) -> bool:
        """Whether the request waits for a load from now on. Its first ``first`` blocks are on the device, the next ones
        in the ``host`` blocks, which it then holds."""
        start = first + len(host)
        limit = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))  # not all may be known
        if start >= limit:
            return False
        wanted = request.block_hashes[start:limit]
        if (load_id := self._load_of.get(wanted[0])) is not None:
            load = self._loads[load_id]
            if not load.is_over and load.source.is_used(now):
                self._wait(request, load_id, host)
                return True
        room = max(0, self._host.num_available - self._host.num_idle(host))
        from_disk = self._disk_run(wanted[:room]) if self.disk.is_used(now) else ()
        from_peer = self._peer_run(request, start, wanted[:room]) if self.peers.is_used(now) else ()
        disk_ns = self._saved_ns(self.disk, start, from_disk, work_ns)
        peer_ns = self._saved_ns(self.peers, start, from_peer, work_ns)
        if not disk_ns and not peer_ns:
            return False
        self._hold(request, host)
        if disk_ns >= peer_ns:
            self._begin(request, self.disk, NO_PEER, start, from_disk, work_ns, actions, now)
        else:
            peer_run, request.peer_run = request.peer_run, None
            if peer_run is None:
                raise BrokenInvariantError("a load of blocks of no peer")
            self._begin(request, self.peers, peer_run.peer, start, from_peer, work_ns, actions, now)
        return True

    def begin_pages(
        self,
        request: Request,
        span: tuple[int, int],
        run: tuple[bytes, ...],
        host: list[int],
        work_ns: WorkNs,
        actions: list[TierAction],
        now: int,
    ) -> bool:
        """``begin``, where layers are of several groups: with the blocks of the ``run``, which are on disk, and those
        of ``host``, the request need not compute the ``span``, (first token, how many)."""
        for name in run:
            if (load_id := self._load_of.get(name)) is not None:
                if self._loads[load_id].is_over:
                    return False
                self._wait(request, load_id, host)
                return True
        room = self._host.num_available - self._host.num_idle(host)
        price_ns = self.disk.wait_ns + len(run) * (self.disk.load_block_ns + self._copy_block_ns)
        if not run or len(run) > room or work_ns(*span) <= MARGIN * price_ns:
            return False
        self._hold(request, host)
        self._load(request, self.disk, NO_PEER, span, run, work_ns, actions, now)
        return True

    def _begin(
        self,
        request: Request,
        source: LoadSource,
        peer: int,
        start: int,
        run: tuple[bytes, ...],
        work_ns: WorkNs,
        actions: list[TierAction],
        now: int,
    ) -> None:
        span = start * self._block_size, len(run) * self._block_size
        self._load(request, source, peer, span, run, work_ns, actions, now)

    def _load(
        self,
        request: Request,
        source: LoadSource,
        peer: int,
        span: tuple[int, int],
        run: tuple[bytes, ...],
        work_ns: WorkNs,
        actions: list[TierAction],
        now: int,
    ) -> None:
        self._num_loads += 1
        load_id = self._num_loads
        blocks = self._host.allocate(len(run))
        gain_ns = work_ns(*span)
        self._loads[load_id] = _HostLoad(source, run, blocks, now + gain_ns)
        self._load_of.update(dict.fromkeys(run, load_id))
        self._wait(request, load_id, [])
        source.begun(len(run))
        request.cached_tokens_at_arrival = sum(span)
        actions.append(LoadBlocks(load_id, run, tuple(blocks), peer))

    def leave(self, request: Request, actions: list[TierAction]) -> bool:
        """Take out a request that ends, if it waits here. A load that no request waits for is cancelled."""
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
        source, count = load.source, event.num_blocks
        for block_hash, block in zip(load.hashes[:count], load.host_blocks[:count], strict=True):
            self._host.remember(block_hash, block)
        for block_hash in load.hashes:
            if self._load_of.get(block_hash) == event.load_id:
                del self._load_of[block_hash]
        if not load.is_over:  # else it was cut short, and says nothing of what is there
            if source is self.disk:
                for block_hash in load.hashes[count:]:
                    self._lose(block_hash)
            source.ended(len(load.hashes), len(load.hashes) - count)
        source.measured(count, event.duration_ns)
        if source is self.peers:
            self._copies.update(zip(load.host_blocks[:count], load.hashes[:count], strict=True))
        if count and self._shares_host:
            actions.append(ShareBlocks(load.hashes[:count], tuple(load.host_blocks[:count])))
        requests = list(load.requests.values())
        for request in requests:
            self._release(request, [*request.host_block_ids, *load.host_blocks[:count]])
        self._host.release(load.host_blocks)
        return requests

    def forget_copies(self, blocks: Sequence[int]) -> None:
        """These host blocks were used. Of what a peer holds, too, one copy on the host is enough: this one goes."""
        if not self._copies:
            return
        here, spare = self._host.prefix_cache, []
        for block in blocks:
            block_hash = self._copies.pop(block, None)
            if block_hash is not None and here.get(block_hash) == block:  # else it was given out again
                spare.append(block)
        self._host.evict_first(spare)

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
                load.source.was_late()
        self.disk.rest_if_slow(now)
        self.peers.rest_if_slow(now)
        return late

    def _disk_run(self, wanted: Sequence[bytes]) -> tuple[bytes, ...]:
        """What the disk has of these, up to the first that it has not, or that is being loaded."""
        run: list[bytes] = []
        for block_hash in wanted:
            if block_hash not in self._on_disk or block_hash in self._load_of:
                break
            run.append(block_hash)
        return tuple(run)

    def _peer_run(self, request: Request, start: int, wanted: Sequence[bytes]) -> tuple[bytes, ...]:
        """What a peer may have of these, which are the blocks of the prompt from ``start`` on: up to the first that is
        here, or is being loaded."""
        known = request.peer_run
        if known is None or not known.first_block <= start < known.first_block + known.num_blocks:
            return ()
        here = self._host.prefix_cache
        run: list[bytes] = []
        for block_hash in wanted[: known.first_block + known.num_blocks - start]:
            if here.get(block_hash) is not None or block_hash in self._load_of:
                break
            run.append(block_hash)
        return tuple(run)

    def _saved_ns(self, source: LoadSource, start: int, run: tuple[bytes, ...], work_ns: WorkNs) -> int:
        """What reading these blocks saves, after the loads that were begun before; 0 where it does not pay."""
        if not run:
            return 0
        gain_ns = work_ns(start * self._block_size, len(run) * self._block_size)
        price_ns = source.wait_ns + len(run) * (source.load_block_ns + self._copy_block_ns)
        return gain_ns - price_ns if gain_ns > MARGIN * price_ns else 0

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
        if request.wait_class_at_arrival is WaitClass.NEW:
            request.wait_class_at_arrival = WaitClass.RETURNING
        del self._waits_for[request.request_id]

    def _cancel(self, load_id: int, actions: list[TierAction]) -> None:
        load = self._loads[load_id]
        load.is_over = True
        load.source.given_up(len(load.hashes))
        self.num_cancelled += 1
        actions.append(CancelLoad(load_id))
