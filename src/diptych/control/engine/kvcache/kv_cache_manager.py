"""The KV cache of one worker: admission, growth, prefix reuse, release and swapping, in blocks.

Decides and accounts; never touches tensors. Admission takes the blocks of the whole prompt at once and looks at the
expected peak of all that is admitted, so that a half-prefilled prompt can always finish.
"""

from collections.abc import Callable, Iterable

from diptych.control.config import CacheConfig
from diptych.control.engine.kvcache.block_pool import BlockPool
from diptych.control.engine.kvcache.demand import future_peak_blocks
from diptych.control.engine.kvcache.prefix_cache import Hit
from diptych.control.engine.kvcache.tier_loads import WorkNs
from diptych.control.engine.kvcache.tiers import Tiers
from diptych.control.errors import BrokenInvariantError
from diptych.control.kv_layout import KVLayout
from diptych.control.request import Request

Demands = Callable[[], Iterable[tuple[int, int]]]


class KVCacheManager:
    """Owner of every block id that a request holds."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.layout = KVLayout.dense(config.block_size)
        self.block_size = self.layout.hash_tokens
        self._is_dense = self.layout.is_dense
        self.capacity_tokens = self.layout.capacity_tokens(config.num_blocks - config.watermark_blocks)  # when alone
        self.pool = BlockPool(
            config.num_blocks,
            enable_prefix_cache=config.enable_prefix_cache,
            first_block=config.first_block,
            names_evictors=config.names_evictors,
        )
        self.tiers = Tiers(config, self.pool)
        self.host = self.tiers.host
        self.queried_tokens = 0  # prompt tokens looked up at admission
        self.hit_tokens = 0
        self._num_reserved = 0  # sum of num_reserved_blocks over the holders of blocks
        self._in_progress: dict[bytes, int] = {}  # hashes that admitted prefills are about to compute

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return self.pool.num_used / self.pool.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of this many tokens is charged."""
        if self._is_dense:
            return -(-num_tokens // self.block_size)
        return self.layout.peak_pages(num_tokens)

    def longest_hit(self, request: Request) -> Hit:
        """The longest prefix of the request's prompt that is cached, leaving at least one token to compute."""
        if not request.reads_prefix_cache or not self.config.enable_prefix_cache:
            return Hit([], 0)
        limit = (request.num_tokens - 1) // self.block_size
        blocks = self.pool.prefix_cache.longest_prefix(request.block_hashes[:limit])
        return Hit(blocks, len(blocks) * self.block_size)

    def num_cached_tokens(self, request: Request, hit: Hit | None = None) -> int:
        """Tokens of the request's prompt that need not be computed: those of the ``hit`` (None: that of now), or what
        lies in the blocks of another worker that it is computed into."""
        if hit is None:
            hit = self.longest_hit(request)
        return max(request.num_borrowed_tokens, hit.num_tokens)

    def blocks_below(self, request: Request, hit: Hit, work_ns: WorkNs) -> list[int]:
        """The host blocks that continue the ``hit`` of a prompt, where copying them up pays."""
        return self.tiers.worth_copying(request, self.num_cached_tokens(request, hit) // self.block_size, work_ns)

    def num_ready_tokens(self, request: Request) -> int:
        """Tokens of the request's prompt that need not be computed, on the device or on the host."""
        num_cached = self.num_cached_tokens(request)
        below = self.tiers.host_prefix(request, num_cached // self.block_size)
        return num_cached + len(below) * self.block_size

    def fetch(self, request: Request, work_ns: WorkNs, now: int) -> bool:
        """Whether the request waits for a load from now on."""
        return self.tiers.fetch(request, self.num_cached_tokens(request) // self.block_size, work_ns, now)

    def awaits_sibling(self, request: Request, num_blocks: int) -> bool:
        """Whether an admitted prefill is about to compute the next block of this prompt, of which ``num_blocks`` are in
        reach (then waiting is cheaper)."""
        if not self._in_progress or not request.reads_prefix_cache or not self.config.enable_prefix_cache:
            return False
        if request.borrowed_tables:
            return False
        index = num_blocks
        full_blocks = (request.num_tokens - 1) // self.block_size
        return index < min(len(request.block_hashes), full_blocks) and request.block_hashes[index] in self._in_progress

    def stop_progress(self, request: Request) -> None:
        """A prompt that is half computed is set aside: others that begin alike need not wait for it."""
        for block_hash in request.block_hashes[request.num_hashed_blocks :] if not request.borrowed_tables else ():
            self._forget_in_progress(block_hash)

    def resume_progress(self, request: Request) -> None:
        """Set the request aside no longer."""
        for block_hash in request.block_hashes[request.num_hashed_blocks :] if not request.borrowed_tables else ():
            self._in_progress[block_hash] = self._in_progress.get(block_hash, 0) + 1

    def fits_now(self, request: Request, hit: Hit, *, alone: bool, given_up: int = 0) -> bool:
        """Whether there are blocks for the whole prompt if other requests release ``given_up`` blocks (``alone``:
        nothing else is admitted, all blocks may be used)."""
        if request.borrowed_tables:
            return True
        new_blocks = self.num_blocks_for(request.num_tokens) - len(hit.blocks)
        spare = 0 if alone else self.config.watermark_blocks
        # Cached blocks that no request holds are available until this one shares them: they must not count twice.
        return new_blocks + spare <= self.pool.num_available - self.pool.num_idle(hit.blocks) + given_up

    def fits_later(
        self,
        request: Request,
        hit: Hit,
        expected_tokens: int,
        others: Demands,
        given_up: tuple[int, int] = (0, 0),
    ) -> bool:
        """Whether the expected peak of all that is admitted and this one fits. given_up: blocks, and blocks reserved,
        of requests that are not among the others and give way to this one.

        others: gives (blocks held alone, tokens to come) of every admitted request. It is only called when the sum of
        all expectations does not fit, so that admission costs nothing while memory is plentiful.
        """
        if request.borrowed_tables:
            return True
        # The sum of all expectations bounds their peak: where even that fits, the costly question is not asked.
        total = self._num_reserved - given_up[1] + self.num_blocks_for(request.num_tokens + expected_tokens)
        if self.config.admission == "greedy" or total + self.config.watermark_blocks <= self.pool.num_blocks:
            return True
        new_blocks = self.num_blocks_for(request.num_tokens) - len(hit.blocks)
        demands = [*others(), (new_blocks, expected_tokens)]
        held = sum(blocks for blocks, _ in demands) - new_blocks
        used = self.pool.num_used - given_up[0]
        shared = used + self.pool.num_idle(hit.blocks) - held  # not owned by one request alone
        peak = shared + future_peak_blocks(demands, self.block_size)
        return peak + self.config.watermark_blocks <= self.pool.num_blocks

    def admit(self, request: Request, hit: Hit, expected_tokens: int) -> list[tuple[int, int]]:
        """Take the blocks of the whole prompt; the caller has asked ``fits_now``. A prompt that is computed into the
        blocks of another worker takes those, and nothing of it is kept here. Returns the (cached block, block) copies
        that it needs: what is cached here, and not there."""
        if request.borrowed_tables:
            _hold(request, [list(block_ids) for block_ids in request.borrowed_tables])
            request.num_hashed_blocks = request.num_shared_blocks = request.num_blocks
            first = request.num_borrowed_tokens // self.block_size
            request.num_computed_tokens = request.num_scheduled_tokens = self.num_cached_tokens(request, hit)
            return list(zip(hit.blocks[first:], request.block_tables[0][first:], strict=False))
        self._reserve(request, request.num_tokens + expected_tokens)
        # Before ``allocate``: it evicts cached blocks that no request holds, which these still are.
        self.pool.share(hit.blocks)
        self.pool.taker = request.request_id
        total = self.num_blocks_for(request.num_tokens)
        _hold(request, [hit.blocks + self.pool.allocate(total - len(hit.blocks))])
        request.num_hashed_blocks = request.num_shared_blocks = len(hit.blocks)
        request.num_computed_tokens = request.num_scheduled_tokens = hit.num_tokens
        self.queried_tokens += request.num_tokens
        self.hit_tokens += request.num_computed_tokens
        for block_hash in request.block_hashes[len(hit.blocks) :]:
            self._in_progress[block_hash] = self._in_progress.get(block_hash, 0) + 1
        return []

    def raise_blocks(self, request: Request, count: int) -> list[tuple[int, int]]:
        """The next ``count`` (host, device) copies of an admitted prompt. What they hold need not be computed."""
        copies = self.tiers.raise_blocks(request, count)
        request.num_scheduled_tokens += count * self.block_size
        request.num_computed_tokens = request.num_scheduled_tokens
        self.remember_computed(request, request.num_computed_tokens)
        return copies

    def grow(self, request: Request) -> int | None:
        """One more block for a decode; None when there is none."""
        self.pool.taker = request.request_id
        block_id = self.pool.take_one()
        if block_id is not None:
            request.block_tables[0].append(block_id)
            request.num_blocks += 1
            request.frozen_tables = None
        return block_id

    def remember_computed(self, request: Request, num_computed_tokens: int) -> None:
        """Offer every block that is full, computed and hashed to the prefix cache."""
        full = min(num_computed_tokens // self.block_size, len(request.block_hashes))
        for index in range(request.num_hashed_blocks, full):
            block_hash = request.block_hashes[index]
            self.pool.remember(block_hash, request.block_tables[0][index])
            self._forget_in_progress(block_hash)
        request.num_hashed_blocks = max(request.num_hashed_blocks, full)

    def release(self, request: Request) -> None:
        """Give up everything that the request holds, on the device and on the host."""
        if request.borrowed_tables:
            _hold(request, [])
        elif request.block_tables:
            # It computes these no more: prompts that begin alike need not wait for them.
            for block_hash in request.block_hashes[request.num_hashed_blocks :]:
                self._forget_in_progress(block_hash)
            for block_ids in request.block_tables:
                self.pool.release(block_ids)
            _hold(request, [])
            self._num_reserved -= request.num_reserved_blocks
            request.num_reserved_blocks = 0
        if request.host_block_ids:
            self.host.release(request.host_block_ids)
            request.host_block_ids = []

    def swap_out(self, request: Request, num_tokens: int) -> list[tuple[int, int]] | None:
        """Move the KV of ``num_tokens`` tokens to the host: (device, host) copies, or None without room."""
        count = self.num_blocks_for(num_tokens)
        if count == 0 or count > self.host.num_available:
            return None
        # Paired before ``release``: this plan may give the device blocks to others, since executors copy out first.
        copies = list(zip(request.block_tables[0][:count], host_blocks := self.host.allocate(count), strict=True))
        self.release(request)
        request.host_block_ids = host_blocks
        return copies

    def can_swap_in(self, request: Request, *, alone: bool) -> bool:
        """Whether the request fits again, with the token that it computes next."""
        spare = 0 if alone else self.config.watermark_blocks
        return self.num_blocks_for(request.num_scheduled_tokens + 1) + spare <= self.pool.num_available

    def swap_in(self, request: Request, expected_tokens: int) -> list[tuple[int, int]]:
        """Bring a swapped request back: (host, device) copies; the caller has asked ``can_swap_in``."""
        self.pool.taker = request.request_id
        _hold(request, [self.pool.allocate(len(request.host_block_ids))])
        request.num_shared_blocks = 0
        self._reserve(request, request.num_blocks * self.block_size + expected_tokens)
        copies = list(zip(request.host_block_ids, request.block_tables[0], strict=True))
        self.tiers.use_in_step(request.host_block_ids)
        request.host_block_ids = []
        request.num_hashed_blocks = len(request.block_hashes)  # its old blocks may still be known under these hashes
        return copies

    def _reserve(self, request: Request, num_tokens: int) -> None:
        request.num_reserved_blocks = self.num_blocks_for(num_tokens)
        self._num_reserved += request.num_reserved_blocks

    def _forget_in_progress(self, block_hash: bytes) -> None:
        count = self._in_progress.get(block_hash, 0)
        if count > 1:
            self._in_progress[block_hash] = count - 1
        elif count == 1:
            del self._in_progress[block_hash]

    @property
    def is_unused(self) -> bool:
        """Whether nothing is reserved for a request, and no prompt is expected to be computed."""
        return not self._num_reserved and not self._in_progress

    def check_counts(self) -> None:
        """Raise BrokenInvariantError where a count of blocks cannot be right. O(1); the pool's are its own."""
        if self._num_reserved < 0:
            raise BrokenInvariantError(f"{self._num_reserved} blocks are reserved")
        if self.host.num_blocks:
            self.host.check_counts()

    def check(self) -> None:
        """Assert the accounting invariants (for tests)."""
        self.pool.check()
        self.tiers.check()
        self.check_counts()


def _hold(request: Request, tables: list[list[int]]) -> None:
    """From now on these are the blocks of the request."""
    request.block_tables, request.frozen_tables = tables, None
    request.num_blocks = sum(map(len, tables))
