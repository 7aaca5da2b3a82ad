"""The tiers below a worker's KV blocks: host memory, and a disk. What goes down, what comes up, and when that pays.

Knows content by chain hashes and places by block ids; moves no bytes. Three movements:

- Down to the host: cached blocks that will be evicted next are copied ahead of it, a few in each step, so that an
  eviction itself costs nothing and needs no order with transfers that come into the block.
- Down to the disk: the full blocks of a prompt when it is computed, and those of an answer when it ends, in extents of
  up to EXTENT_BLOCKS. They pass through host blocks, from where the driver writes them beside the steps.
- Up from the disk: when a request arrives, what only the disk holds is read into host blocks while the request waits
  outside the queue. It is queued at once when the load is over, or when computing would have been faster.
- Across from the host memory of another worker of the host (a peer), where a router knows that it holds what comes
  next: in the same way. Allocation stays each worker's own: a peer is read, never asked, and what it had may be gone.
- Up from the host: in the steps of an admitted prompt, before its first chunk (see Scheduler).

A host block that a step or a load or a store uses is held by a reference, so that it is not given away meanwhile.
"""

from collections import deque
from collections.abc import Sequence

from diptych.control.config import CacheConfig
from diptych.control.engine.kvcache.block_pool import BlockPool
from diptych.control.engine.kvcache.prefix_cache import page_key
from diptych.control.engine.kvcache.tier_loads import TierLoads, WorkNs
from diptych.control.engine.kvcache.tier_records import (
    DiskContents,
    DiskState,
    RunLoaded,
    RunStored,
    ShareBlocks,
    StoreBlocks,
    TierAction,
    TierEvent,
)
from diptych.control.request import Request

EXTENT_BLOCKS = 64  # of one chain, written and read together
MAX_WANTED_BLOCKS = 8192  # that wait to be copied for the disk; what comes beyond is not stored
LEAST_SHARE, MOST_SHARE = 10, 200  # of a step that computes, what copying down may take, in thousandths: the least
HIT_SHARE = 4  # while nothing is found below; more by 1 / HIT_SHARE of the share of tokens that are
IDLE_COPY_NS = 2_000_000  # where nothing is computed, it may take so long at a time
UNPRICED_COPIES = 64  # in a step, where a copy costs no time


class Tiers:
    """Owner of the host blocks and of what is known of the disk. device: the pool whose content goes down."""

    def __init__(self, config: CacheConfig, device: BlockPool) -> None:
        self.config = config.tiers
        self._block_size = config.block_size
        self._device = device
        self._layout = config.layout
        self._reads = config.enable_prefix_cache
        self._has_chains = config.layout.is_dense  # else a block is found by its name in its group of layers
        self.host = BlockPool(config.num_host_blocks, enable_prefix_cache=config.enable_prefix_cache)
        self.loads = TierLoads(config, self.host)
        self.actions: list[TierAction] = []  # for the driver, in order
        self.host_hit_tokens = 0  # computed before, and copied up instead of computed again
        self._admitted_tokens = 0
        self.num_stored_blocks = 0
        self.num_unstored_blocks = 0  # that were wanted on disk, and are not there
        self._wanted: deque[tuple[bytes, ...]] = deque()  # runs for the disk, oldest first
        self._num_wanted = 0
        self._is_wanted: set[bytes] = set()  # in ``_wanted``, or on their way to the disk
        self._stores: dict[int, tuple[tuple[bytes, ...], tuple[int, ...]]] = {}
        self._num_stores = 0
        self._in_step: list[int] = []  # host blocks that copies of this step read or write
        self._after_step: list[TierAction] = []
        self._copied: list[tuple[bytes, int]] = []  # down, in this step, where others may read them
        self._seen_version = -1
        self._num_seen = 0  # of the blocks that are evicted next, in that version: each is copied once at most
        self._clean_version = -1  # of the device pool, when all that is evicted next had a copy

    @property
    def has_disk(self) -> bool:
        """Whether a disk is used."""
        return self.loads.disk.is_on

    @property
    def has_moves(self) -> bool:
        """Whether blocks wait to be copied down, and can be."""
        return self.host.num_available > 0 and (bool(self._wanted) or not self._is_clean)

    @property
    def is_storing(self) -> bool:
        """Whether anything is on its way to the disk."""
        return bool(self._wanted or self._stores)

    @property
    def num_watched_blocks(self) -> int:
        """The number of free device blocks below which each that is given out may cause a copy."""
        return self.config.clean_blocks if self.host.num_blocks else 0

    @property
    def _is_clean(self) -> bool:
        """Whether all that is evicted next has a copy."""
        return self._clean_version == self._device.version or self._device.num_free >= self.config.clean_blocks

    # -- up from the host ---------------------------------------------------------------------------------------------

    def host_prefix(self, request: Request, first: int) -> list[int]:
        """The host blocks that continue a prompt whose first ``first`` blocks are on the device; at least one token is
        left to compute."""
        if not self._has_chains or not self.has_host_content(request):
            return []
        # The last token is computed in any case: its logits give the first token of the answer.
        limit = (request.num_tokens - 1) // self._block_size
        return self.host.prefix_cache.longest_prefix(request.block_hashes[first:limit])

    def has_host_content(self, request: Request) -> bool:
        """Whether anything is on the host that a request may find."""
        return len(self.host.prefix_cache) > 0 and request.reads_prefix_cache and self._reads

    def reads_disk(self, request: Request, now: int) -> bool:
        """Whether a request may wait for what is on disk."""
        return self.loads.disk.is_used(now) and request.reads_prefix_cache and self._reads

    def worth_copying(self, request: Request, first: int, work_ns: WorkNs) -> list[int]:
        """``host_prefix``, where copying it up takes less time than computing it."""
        blocks = self.host_prefix(request, first)
        if not blocks:
            return []
        gain_ns = work_ns(first * self._block_size, len(blocks) * self._block_size)
        return blocks if len(blocks) * self.config.copy_block_ns < gain_ns else []

    def attach(self, request: Request, blocks: Sequence[int]) -> None:
        """The request was admitted and will have these copied up; what it held while it waited is given back."""
        self._admitted_tokens += request.num_tokens
        # Before ``release``: these may be the same blocks, which must not become free in between.
        self.host.share(blocks)
        if request.host_block_ids:
            self.host.release(request.host_block_ids)
        request.host_block_ids = list(blocks)

    def raise_blocks(self, request: Request, count: int) -> list[tuple[int, int]]:
        """The next ``count`` (host, device) copies of an admitted request."""
        first = request.num_scheduled_tokens // self._block_size
        blocks = self.take_blocks(request, count)
        self.host_hit_tokens += count * self._block_size
        return list(zip(blocks, request.block_tables[0][first : first + count], strict=True))

    def take_blocks(self, request: Request, count: int) -> list[int]:
        """The next ``count`` host blocks of an admitted request, which are copied up in this step."""
        blocks, request.host_block_ids = request.host_block_ids[:count], request.host_block_ids[count:]
        self._in_step += blocks
        return blocks

    def use_in_step(self, blocks: Sequence[int]) -> None:
        """Give these host blocks back when the copies of the step are done."""
        self._in_step += blocks

    # -- down ---------------------------------------------------------------------------------------------------------

    def want(self, request: Request, work_ns: WorkNs) -> None:
        """The full, computed blocks of this request that are new: write them to disk, if it would pay to read them."""
        first, end = request.num_wanted_blocks, min(request.num_hashed_blocks, len(request.block_hashes))
        request.num_wanted_blocks = end
        if not self.has_disk or not self._reads or first >= end:
            return
        names = request.block_hashes[first:end]
        if not self._has_chains:
            names = self._page_keys(request, first, end)
        if self.loads.pays(first, end - first, work_ns, len(names)):
            self._want(names)

    def _page_keys(self, request: Request, first: int, end: int) -> list[bytes]:
        """Names of the blocks from ``first`` to ``end`` of a request, and of windows those that one needs which goes on
        behind the last boundary: at the end of its prompt, before which a token is left, or of its answer."""
        keys, boundary = list[bytes](), end
        if not request.num_output_tokens:
            boundary = min(end, self._layout.last_boundary(request.num_tokens) // self._block_size)
        for number, group in enumerate(self._layout.groups):
            wanted = request.block_hashes[first:end]
            if group.window_tokens:
                wanted = request.block_hashes[group.first_live(boundary * self._block_size) : boundary]
            keys += [page_key(block_hash, number) for block_hash in wanted]
        return keys

    def copy_down(self, predicted_ns: int, step_id: int) -> list[tuple[int, int]]:
        """(device, host) copies for the end of a plan: nothing is allocated in it any more. predicted_ns: what the step
        takes without them (0: it computes nothing)."""
        if not self.host.num_blocks:
            return []
        allowed = self._allowed(predicted_ns, step_id)
        copies: list[tuple[int, int]] = []
        while self._wanted and len(copies) < allowed and self._store_next(copies):
            pass
        if len(copies) < allowed and not self._is_clean:
            self._clean(copies, allowed)
        return copies

    def step_ended(self) -> None:
        """The copies of the last plan are done."""
        if self._in_step:
            self.host.release(self._in_step)
            self.loads.forget_copies(self._in_step)
            self._in_step.clear()
        if self._copied:
            hashes, blocks = zip(*self._copied, strict=True)
            self.actions.append(ShareBlocks(hashes, blocks))
            self._copied.clear()
        if self._after_step:
            self.actions += self._after_step
            self._after_step.clear()

    def _want(self, hashes: Sequence[bytes]) -> None:
        run: list[bytes] = []
        for block_hash in [*hashes, b""]:  # the end closes the last run
            is_new = block_hash != b"" and not self.loads.holds(block_hash) and block_hash not in self._is_wanted
            if run and (not is_new or len(run) == EXTENT_BLOCKS):
                self._wanted.append(tuple(run))
                run = []
            if is_new:
                if self._num_wanted >= MAX_WANTED_BLOCKS:
                    self.num_unstored_blocks += 1
                    continue
                run.append(block_hash)
                self._is_wanted.add(block_hash)
                self._num_wanted += 1

    def _allowed(self, predicted_ns: int, step_id: int) -> int:
        """Copies that this step may do: where one copy takes more than its share of a step, one every N steps."""
        share = LEAST_SHARE + 1000 * self.host_hit_tokens // (HIT_SHARE * max(1, self._admitted_tokens))
        price, share_ns = self.config.copy_block_ns, max(1, predicted_ns * min(share, MOST_SHARE) // 1000)
        if not price:
            return UNPRICED_COPIES
        if not predicted_ns:
            return max(1, IDLE_COPY_NS // price)
        return share_ns // price if share_ns >= price else int(step_id % -(-price // share_ns) == 0)

    def _store_next(self, copies: list[tuple[int, int]]) -> bool:
        """Copy the next run for the disk, as far as it is still here. Whether there was room for it."""
        run = self._wanted[0]
        missing = [block_hash for block_hash in run if self.host.prefix_cache.get(block_hash) is None]
        if len(missing) > self.host.num_available:
            if not self._stores and not self.loads.num_loading:  # it would never fit
                self._drop_run()
                return True
            return False
        hashes: list[bytes] = []
        blocks: list[int] = []
        for block_hash in run:
            host_block = self._copy(block_hash, copies)
            if host_block is None:
                break
            hashes.append(block_hash)
            blocks.append(host_block)
        self._drop_run(num_kept=len(hashes))
        if hashes:
            self._num_stores += 1
            self._stores[self._num_stores] = (tuple(hashes), tuple(blocks))
            self._is_wanted.update(hashes)
            self._after_step.append(StoreBlocks(self._num_stores, tuple(hashes), tuple(blocks)))
        return True

    def _drop_run(self, num_kept: int = 0) -> None:
        run = self._wanted.popleft()
        self._num_wanted -= len(run)
        self._is_wanted.difference_update(run)
        self.num_unstored_blocks += len(run) - num_kept

    def _copy(self, block_hash: bytes, copies: list[tuple[int, int]]) -> int | None:
        """A host block with this content, held once more; None when it is neither here nor can be copied."""
        host_block = self.host.prefix_cache.get(block_hash)
        if host_block is not None:
            self.host.share((host_block,))
            return host_block
        device_block = self._device.prefix_cache.get(block_hash)
        if device_block is None:
            return None
        host_block = self.host.take_one()
        if host_block is not None:
            self.host.remember(block_hash, host_block)
            copies.append((device_block, host_block))
            if self.config.shares_host:
                self._copied.append((block_hash, host_block))
        return host_block

    def _clean(self, copies: list[tuple[int, int]], allowed: int) -> None:
        """Copies of the blocks that are evicted next, as many as the longest prompt would take. The beginnings of
        prompts first (they are evicted last): without them the rest cannot be found."""
        device = self._device
        if self._seen_version != device.version:
            self._seen_version, self._num_seen = device.version, 0
        wanted = min(self.config.clean_blocks, self.host.num_blocks) - device.num_free
        hashes = device.oldest_cached(max(0, wanted) if self._reads else 0)
        for block_hash in reversed(hashes[: len(hashes) - self._num_seen]):
            if self.host.prefix_cache.get(block_hash) is None:
                if len(copies) >= allowed:
                    return
                host_block = self._copy(block_hash, copies)
                if host_block is None:
                    return
                self._in_step.append(host_block)
            self._num_seen += 1
        self._clean_version = device.version

    # -- what the driver reports --------------------------------------------------------------------------------------

    def on_event(self, event: TierEvent, now: int) -> list[Request]:
        """Take in an event of the disk. Returns the requests that need not wait for it any more."""
        if isinstance(event, RunLoaded):
            return self.loads.end(event, self.actions, now)
        if isinstance(event, RunStored):
            self._end_store(event)
        elif isinstance(event, DiskContents):
            self.loads.change(event)
        elif isinstance(event, DiskState):
            self.loads.disk.is_on = event.is_on
            if not event.is_on:
                while self._wanted:
                    self._drop_run()
        return []

    def _end_store(self, event: RunStored) -> None:
        hashes, blocks = self._stores.pop(event.store_id)
        self.host.release(blocks)
        self._is_wanted.difference_update(hashes)
        self.num_stored_blocks += event.num_blocks
        self.num_unstored_blocks += len(hashes) - event.num_blocks

    def fetch(self, request: Request, first: int, work_ns: WorkNs, now: int) -> bool:
        """Whether the request, whose first ``first`` blocks need not be computed, waits for a load from now on."""
        if not self._reads or not request.reads_prefix_cache:
            return False
        if not self.has_disk and request.peer_run is None and not self.loads.num_loading:
            return False
        host = self.host_prefix(request, first)
        return self.loads.begin(request, first, host, work_ns, self.actions, now)

    def leave(self, request: Request) -> bool:
        """The request ends, if it waits for a load."""
        return self.loads.leave(request, self.actions)

    def expire(self, now: int) -> list[Request]:
        """The requests whose loads have taken as long as computing would have."""
        return self.loads.expire(now, self.actions)

    def take_actions(self) -> list[TierAction]:
        """What the driver is to do since the last call."""
        actions, self.actions = self.actions, []
        return actions

    def check(self) -> None:
        """Assert the accounting invariants (for tests)."""
        self.host.check()
        assert self._num_wanted == sum(len(run) for run in self._wanted)
