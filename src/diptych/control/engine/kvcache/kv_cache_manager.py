"""The KV cache of one worker: admission, growth, prefix reuse, release and swapping, in blocks.

Decides and accounts; never touches tensors. Admission takes the blocks of the whole prompt at once and looks at the
expected peak of all that is admitted, so that a half-prefilled prompt can always finish.
"""

from collections.abc import Callable, Iterable

from diptych.control.config import CacheConfig
from diptych.control.engine.kvcache.block_pool import BlockPool
from diptych.control.engine.kvcache.demand import future_peak_blocks
from diptych.control.engine.kvcache.prefix_cache import Hit, page_key
from diptych.control.engine.kvcache.tier_loads import WorkNs
from diptych.control.engine.kvcache.tiers import Tiers
from diptych.control.errors import BrokenInvariantError
from diptych.control.request import Request

Demands = Callable[[], Iterable[tuple[int, int]]]


class KVCacheManager:
    """Owner of every block id that a request holds."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.layout = config.layout
        self.block_size = config.block_size
        self.is_dense = self.layout.is_dense
        self._finds_hits = config.enable_prefix_cache
        full = [number for number, group in enumerate(self.layout.groups) if not group.window_tokens]
        self._full_group = full[0] if full else None  # one that keeps all blocks of a sequence
        self.longest_chunk = self.layout.longest_chunk(config.window_chunk)  # of one prompt, in a step
        room = config.num_blocks - config.watermark_blocks
        self.capacity_tokens = self.layout.capacity_tokens(room, self.longest_chunk)  # of a sequence that is alone
        self.pool = BlockPool(
            config.num_blocks,
            enable_prefix_cache=config.enable_prefix_cache,
            first_block=config.first_block,
            names_evictors=config.names_evictors,
            reports_changes=self.is_dense,
        )
        self.tiers = Tiers(config, self.pool)
        self.host = self.tiers.host
        self.queried_tokens = 0  # prompt tokens looked up at admission
        self.hit_tokens = 0
        self._num_reserved = 0  # sum of num_reserved_blocks over the holders of blocks
        self._in_progress: dict[bytes, int] = {}  # hashes that admitted prefills are about to compute
        # Of models with windows: the last hashes of prefixes behind which computing may go on, as long as all the
        # blocks that it needs can be found.
        self._boundaries: dict[bytes, None] = {}
        self._computing: dict[bytes, Request] = {}  # likewise: hashes that an admitted prompt is about to compute

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return self.pool.num_used / self.pool.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of this many tokens is charged."""
        if self.is_dense:
            return -(-num_tokens // self.block_size)
        return self.layout.peak_pages(num_tokens, self.longest_chunk)

    def num_new_blocks(self, request: Request, hit: Hit) -> int:
        """Blocks that a request which finds the ``hit`` takes at admission, besides those that it shares."""
        if self.is_dense:
            return self.num_blocks_for(request.num_tokens) - len(hit.blocks)
        return sum(self._new_counts(request.num_tokens, hit.num_tokens))

    def _new_counts(self, num_tokens: int, num_hit_tokens: int) -> list[int]:
        """By group. A window gets as many blocks as if nothing were shared: shared ones cannot be used again."""
        left = -(-num_tokens // self.block_size) - num_hit_tokens // self.block_size
        return [min(left, group.peak_pages(num_tokens, self.longest_chunk)) for group in self.layout.groups]

    def window_growth(self, request: Request, num_tokens: int, hit: Hit | None = None) -> int:
        """Blocks that those windows of a request get which are not full yet, until it has ``num_tokens`` tokens more
        than its blocks hold. Blocks that other requests read, too, are not used again, and do not count. hit: that of
        a request which is not admitted."""
        growth, tables, references = 0, request.block_tables, self.pool.references
        counts = [] if tables else self._new_counts(request.num_tokens, hit.num_tokens if hit is not None else 0)
        for index, group in enumerate(self.layout.groups):
            if group.window_tokens:
                held = sum([references(block_id) == 1 for block_id in tables[index]]) if tables else counts[index]
                growth += max(0, group.peak_pages(request.num_slots + num_tokens, 1) - held)
        return growth

    def longest_hit(self, request: Request) -> Hit:
        """The longest prefix of the request's prompt that is cached, leaving at least one token to compute."""
        if not self._finds_hits or not request.reads_prefix_cache:
            return Hit([], 0)
        limit = (request.num_tokens - 1) // self.block_size
        if not self.is_dense:
            return self._longest_boundary(request, limit)
        blocks = self.pool.prefix_cache.longest_prefix(request.block_hashes[:limit])
        return Hit(blocks, len(blocks) * self.block_size)

    def _longest_boundary(self, request: Request, limit: int) -> Hit:
        """The deepest boundary in the first ``limit`` blocks of a prompt whose blocks can all be found, and are few
        enough for the prompt to fit beside them."""
        hashes = request.block_hashes[:limit] if self._boundaries else []
        room = self.pool.num_blocks - self.config.watermark_blocks
        for count in range(len(hashes), 0, -1):
            if hashes[count - 1] in self._boundaries:
                tables = self._boundary_tables(hashes[:count])
                if tables is None:
                    del self._boundaries[hashes[count - 1]]  # what was evicted does not come back by itself
                    continue
                blocks = [block_id for block_ids in tables for block_id in block_ids]
                if len(blocks) + sum(self._new_counts(request.num_tokens, self._tokens(count))) <= room:
                    return Hit(blocks, self._tokens(count), tables)
        return Hit([], 0)

    def _boundary_tables(self, hashes: list[bytes]) -> tuple[list[int], ...] | None:
        """By group, the blocks that a sequence needs which goes on behind these hashes; None where one is missing."""
        get, tables = self.pool.prefix_cache.get, []
        for number, group in enumerate(self.layout.groups):
            live = hashes[group.first_live(self._tokens(len(hashes))) :]
            found = [get(page_key(block_hash, number)) for block_hash in live]
            block_ids = [block_id for block_id in found if block_id is not None]
            if len(block_ids) < len(live):
                return None
            tables.append(block_ids)
        return tuple(tables)

    def _tokens(self, num_blocks: int) -> int:
        return num_blocks * self.block_size

    def num_cached_tokens(self, request: Request, hit: Hit | None = None) -> int:
        """Tokens of the request's prompt that need not be computed: those of the ``hit`` (None: that of now), or what
        lies in the blocks of another worker that it is computed into."""
        if hit is None:
            hit = self.longest_hit(request)
        return max(request.num_remote_tokens, hit.num_tokens)

    def blocks_below(self, request: Request, hit: Hit, work_ns: WorkNs) -> list[int]:
        """The host blocks that continue the ``hit`` of a prompt, where copying them up pays."""
        if not self.is_dense:
            return []
        return self.tiers.worth_copying(request, self.num_cached_tokens(request, hit) // self.block_size, work_ns)

    def num_ready_tokens(self, request: Request) -> int:
        """Tokens of the request's prompt that need not be computed, on the device or on the host."""
        num_cached = self.num_cached_tokens(request)
        below = self.tiers.host_prefix(request, num_cached // self.block_size)
        return num_cached + len(below) * self.block_size

    def fetch(self, request: Request, work_ns: WorkNs, now: int) -> bool:
        """Whether the request waits for a load from now on."""
        if not self.is_dense:
            return False
        return self.tiers.fetch(request, self.num_cached_tokens(request) // self.block_size, work_ns, now)

    def awaits_sibling(self, request: Request, num_blocks: int) -> bool:
        """Whether an admitted prefill is about to compute the next block of this prompt, of which ``num_blocks`` are in
        reach (then waiting is cheaper)."""
        if not self._finds_hits or not request.reads_prefix_cache or request.remote_block_tables:
            return False
        if not self.is_dense:
            return self._awaits_boundary(request, num_blocks)
        if not self._in_progress:
            return False
        index = num_blocks
        full_blocks = (request.num_tokens - 1) // self.block_size
        return index < min(len(request.block_hashes), full_blocks) and request.block_hashes[index] in self._in_progress

    def _awaits_boundary(self, request: Request, num_blocks: int) -> bool:
        """Whether an admitted prompt is about to compute more of this one than is in reach. It gets a boundary where
        the two part."""
        computing, hashes = self._computing, request.block_hashes
        end = min((request.num_tokens - 1) // self.block_size, len(hashes)) if computing else 0
        parting = num_blocks
        while parting < end and self._is_known_or_computed(hashes[parting]):
            parting += 1
        sibling = computing.get(hashes[parting - 1]) if parting > num_blocks else None
        if sibling is None:
            return False
        if parting not in sibling.boundary_blocks:
            sibling.boundary_blocks = tuple(sorted((*sibling.boundary_blocks, parting)))
        return True

    def _is_known_or_computed(self, block_hash: bytes) -> bool:
        """Whether a block is about to be computed, or was, by a prompt that goes on behind it."""
        if block_hash in self._computing:
            return True
        number = self._full_group
        return number is not None and self.pool.prefix_cache.get(page_key(block_hash, number)) is not None

    def _expect(self, request: Request) -> None:
        """A prompt is about to compute the blocks that it has not computed."""
        for block_hash in request.block_hashes[request.num_hashed_blocks :] if self._finds_hits else ():
            self._computing[block_hash] = request

    def _expect_no_more(self, request: Request, end: int | None = None) -> None:
        """A prompt has computed its blocks before ``end``, or (None) computes none any more."""
        computing = self._computing
        for block_hash in request.block_hashes[request.num_hashed_blocks : end] if computing else ():
            if computing.get(block_hash) is request:
                del computing[block_hash]

    def stop_progress(self, request: Request) -> None:
        """A prompt that is half computed is set aside: others that begin alike need not wait for it."""
        if not self.is_dense:
            self._expect_no_more(request)
            return
        for block_hash in request.block_hashes[request.num_hashed_blocks :] if not request.remote_block_tables else ():
            self._forget_in_progress(block_hash)

    def resume_progress(self, request: Request) -> None:
        """Set the request aside no longer."""
        if not self.is_dense:
            self._expect(request)
            return
        for block_hash in request.block_hashes[request.num_hashed_blocks :] if not request.remote_block_tables else ():
            self._in_progress[block_hash] = self._in_progress.get(block_hash, 0) + 1

    def fits_now(self, request: Request, hit: Hit, *, alone: bool, given_up: int = 0) -> bool:
        """Whether there are blocks for the whole prompt if other requests release ``given_up`` blocks (``alone``:
        nothing else is admitted, all blocks may be used)."""
        if request.remote_block_tables:
            return True
        new_blocks = self.num_new_blocks(request, hit)
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
        growth_of_windows: Callable[[], int] | None = None,
    ) -> bool:
        """Whether the expected peak of all that is admitted and this one fits. given_up: blocks, and blocks reserved,
        of requests that are not among the others and give way to this one.

        others: gives (blocks held alone, tokens to come) of every admitted request. It is only called when the sum of
        all expectations does not fit, so that admission costs nothing while memory is plentiful. growth_of_windows:
        what their windows will get until these are full.
        """
        if request.remote_block_tables:
            return True
        # The sum of all expectations bounds their peak: where even that fits, the costly question is not asked.
        total = self._num_reserved - given_up[1] + self.num_blocks_for(request.num_tokens + expected_tokens)
        if self.config.admission == "greedy" or total + self.config.watermark_blocks <= self.pool.num_blocks:
            return True
        new_blocks = self.num_new_blocks(request, hit)
        demands = [*others(), (new_blocks, expected_tokens)]
        held = sum(blocks for blocks, _ in demands) - new_blocks
        used = self.pool.num_used - given_up[0]
        shared = used + self.pool.num_idle(hit.blocks) - held  # not owned by one request alone
        peak = shared + future_peak_blocks(demands, self.block_size, self.layout.num_growing)
        if not self.is_dense and growth_of_windows is not None:
            peak += growth_of_windows() + self.window_growth(request, request.num_tokens + expected_tokens, hit)
        return peak + self.config.watermark_blocks <= self.pool.num_blocks

    def admit(self, request: Request, hit: Hit, expected_tokens: int) -> list[tuple[int, int]]:
        """Take the blocks of the whole prompt; the caller has asked ``fits_now``. A prompt that is computed into the
        blocks of another worker takes those, and nothing of it is kept here. Returns the (cached block, block) copies
        that it needs: what is cached here, and not there."""
        if request.remote_block_tables:
            self._hold(request, [list(block_ids) for block_ids in request.remote_block_tables])
            request.num_hashed_blocks = request.num_shared_blocks = request.num_blocks
            first = request.num_remote_tokens // self.block_size
            request.num_computed_tokens = request.num_scheduled_tokens = self.num_cached_tokens(request, hit)
            return list(zip(hit.blocks[first:], request.block_tables[0][first:], strict=False))
        self._reserve(request, request.num_tokens + expected_tokens)
        # Before ``allocate``: it evicts cached blocks that no request holds, which these still are.
        self.pool.share(hit.blocks)
        self.pool.taker = request.request_id
        if not self.is_dense:
            return self._admit_groups(request, hit)
        total = self.num_blocks_for(request.num_tokens)
        self._hold(request, [hit.blocks + self.pool.allocate(total - len(hit.blocks))])
        request.num_hashed_blocks = request.num_shared_blocks = len(hit.blocks)
        request.num_computed_tokens = request.num_scheduled_tokens = hit.num_tokens
        self.queried_tokens += request.num_tokens
        self.hit_tokens += request.num_computed_tokens
        for block_hash in request.block_hashes[len(hit.blocks) :]:
            self._in_progress[block_hash] = self._in_progress.get(block_hash, 0) + 1
        return []

    def _admit_groups(self, request: Request, hit: Hit) -> list[tuple[int, int]]:
        """``admit`` for a model whose layers are of several groups."""
        counts = self._new_counts(request.num_tokens, hit.num_tokens)
        found = hit.tables or tuple([list[int]() for _ in counts])
        request.first_blocks = tuple([group.first_live(hit.num_tokens) for group in self.layout.groups])
        self._hold(
            request, [block_ids + self.pool.allocate(count) for block_ids, count in zip(found, counts, strict=True)]
        )
        num_hit_blocks = hit.num_tokens // self.block_size
        request.num_hashed_blocks = num_hit_blocks
        request.num_shared_blocks = num_hit_blocks * self.layout.num_growing
        request.num_computed_tokens = request.num_scheduled_tokens = hit.num_tokens
        request.boundary_blocks = self._boundaries_of(request, num_hit_blocks)
        self._expect(request)
        self.queried_tokens += request.num_tokens
        self.hit_tokens += hit.num_tokens
        return []

    def _boundaries_of(self, request: Request, num_hit_blocks: int) -> tuple[int, ...]:
        """Where others may go on once the prompt is computed so far, in blocks: where it leaves a prompt that was
        computed before (what parts here once will part here again), and its end."""
        if not self._finds_hits:
            return ()
        end = min((request.num_tokens - 1) // self.block_size, len(request.block_hashes))
        number, parting = self._full_group, 0
        if number is not None:
            get = self.pool.prefix_cache.get
            while parting < end and get(page_key(request.block_hashes[parting], number)) is not None:
                parting += 1
        return tuple(sorted({count for count in (parting, end) if count > num_hit_blocks}))

    def begin_chunk(self, request: Request) -> None:
        """The next chunk of an admitted prompt is planned: blocks of windows that have expired hold what is computed
        next."""
        self._expire(request, request.num_computed_tokens, request.num_tokens)

    def end_prompt(self, request: Request) -> None:
        """The prompt is computed: blocks of its windows that have expired are free for others."""
        self._expire(request, request.num_computed_tokens, request.num_computed_tokens)

    def _expire(self, request: Request, num_committed: int, num_tokens: int) -> None:
        """Blocks that no token behind ``num_committed`` reads are used again, as far as the first ``num_tokens`` tokens
        need them, and given up."""
        last, firsts = -(-num_tokens // self.block_size), list(request.first_blocks)
        for index, group in enumerate(self.layout.groups):
            block_ids, first = request.block_tables[index], firsts[index]
            num_expired = min(group.first_live(num_committed) - first, len(block_ids))
            if num_expired > 0:
                expired, block_ids = block_ids[:num_expired], block_ids[num_expired:]
                num_needed = max(0, last - first - len(expired) - len(block_ids))
                firsts[index] = first + num_expired
                # What others may find is not overwritten: for such a block another one was taken when it was shared, or
                # when it became findable.
                kept = [block_id for block_id in expired if self.pool.prefix_cache.holds(block_id)]
                if kept:
                    expired = [block_id for block_id in expired if not self.pool.prefix_cache.holds(block_id)]
                    self.pool.release(kept)
                request.block_tables[index] = block_ids + expired[:num_needed]
                self.pool.release(expired[num_needed:])
        request.first_blocks = tuple(firsts)
        self._hold(request, request.block_tables)

    def raise_blocks(self, request: Request, count: int) -> list[tuple[int, int]]:
        """The next ``count`` (host, device) copies of an admitted prompt. What they hold need not be computed."""
        copies = self.tiers.raise_blocks(request, count)
        request.num_scheduled_tokens += count * self.block_size
        request.num_computed_tokens = request.num_scheduled_tokens
        self.remember_computed(request, request.num_computed_tokens)
        return copies

    def grow(
        self,
        request: Request,
        new_blocks: list[tuple[str, int, int]] | None = None,
        num_committed: int | None = None,
    ) -> bool:
        """One more block for a decode, in each of its tables; False when there are not enough. new_blocks: gets what a
        plan says of them. num_committed: tokens that stay, whatever becomes of drafts (None: all that it has blocks
        for, which is so when it needs the next one)."""
        self.pool.taker = request.request_id
        if not self.is_dense:
            return self._grow_groups(request, new_blocks, request.num_slots if num_committed is None else num_committed)
        block_id = self.pool.take_one()
        if block_id is None:
            return False
        request.block_tables[0].append(block_id)
        request.num_blocks += 1
        request.num_slots += self.block_size
        request.frozen_tables = None
        if new_blocks is not None:
            new_blocks.append((request.request_id, 0, block_id))
        return True

    def _grow_groups(self, request: Request, new_blocks: list[tuple[str, int, int]] | None, num_committed: int) -> bool:
        """A window takes its own expired block, or one of the pool while it is not full or where others may find what
        is in it; but memory that streams need comes before what may be found."""
        pool, firsts, tables = self.pool, list(request.first_blocks), request.block_tables
        expired = [
            group.first_live(num_committed) > first for group, first in zip(self.layout.groups, firsts, strict=True)
        ]
        kept = {
            index
            for index, has_expired in enumerate(expired)
            if has_expired and pool.prefix_cache.holds(tables[index][0])
        }
        num_needed = expired.count(False) + len(kept)
        for index in sorted(kept) if num_needed > pool.num_available else ():
            if pool.references(tables[index][0]) == 1:
                pool.forget(tables[index][0])
                kept.remove(index)
                num_needed -= 1
        if num_needed > pool.num_available:
            return False
        for index, has_expired in enumerate(expired):
            block_ids = tables[index]
            if has_expired:
                block_id = block_ids.pop(0)
                firsts[index] += 1
                if index in kept:
                    pool.release([block_id])
                    block_id = pool.allocate(1)[0]
            else:
                block_id = pool.allocate(1)[0]
            block_ids.append(block_id)
            if new_blocks is not None:
                new_blocks.append((request.request_id, index, block_id))
        request.first_blocks = tuple(firsts)
        self._hold(request, request.block_tables)
        return True

    def remember_computed(self, request: Request, num_computed_tokens: int) -> None:
        """Offer every block that is full, computed and hashed to the prefix cache."""
        if not self.is_dense:
            self._remember_groups(request, num_computed_tokens)
            return
        full = min(num_computed_tokens // self.block_size, len(request.block_hashes))
        for index in range(request.num_hashed_blocks, full):
            block_hash = request.block_hashes[index]
            self.pool.remember(block_hash, request.block_tables[0][index])
            self._forget_in_progress(block_hash)
        request.num_hashed_blocks = max(request.num_hashed_blocks, full)

    def _remember_groups(self, request: Request, num_computed_tokens: int) -> None:
        """``remember_computed``: blocks of groups that attend to everything, and boundaries that were passed."""
        full = min(num_computed_tokens // self.block_size, len(request.block_hashes))
        self._expect_no_more(request, full)
        for number, group in enumerate(self.layout.groups):
            if not group.window_tokens:
                for index in range(request.num_hashed_blocks, full):
                    key = page_key(request.block_hashes[index], number)
                    self.pool.remember(key, request.block_tables[number][index])
        request.num_hashed_blocks = max(request.num_hashed_blocks, full)
        passed = [count for count in request.boundary_blocks if count <= full]
        if passed:
            request.boundary_blocks = request.boundary_blocks[len(passed) :]
            for count in passed:
                self._keep_boundary(request, count, goes_on=num_computed_tokens < request.num_tokens)

    def _keep_boundary(self, request: Request, num_blocks: int, *, goes_on: bool) -> None:
        """Let others go on behind the first blocks of a request: the blocks of its windows can be found from now on.
        goes_on: its prompt is not computed, and cannot use them again: it gets others in their place, now, or there is
        no boundary."""
        live = []  # by window: group, and where the last window lies in its block table
        for number, group in enumerate(self.layout.groups):
            if group.window_tokens:
                first = request.first_blocks[number]
                start = group.first_live(self._tokens(num_blocks)) - first
                if start < 0:
                    return
                live.append((number, start, num_blocks - first))
        if goes_on and not self._replace(request, [(number, stop - start) for number, start, stop in live]):
            return
        for number, start, stop in live:
            first = request.first_blocks[number]
            hashes = request.block_hashes[first + start : num_blocks]
            for block_hash, block_id in zip(hashes, request.block_tables[number][start:stop], strict=True):
                self.pool.remember(page_key(block_hash, number), block_id)
        self._boundaries[request.block_hashes[num_blocks - 1]] = None
        if len(self._boundaries) > 2 * self.config.num_blocks:
            numbers, get = range(len(self.layout.groups)), self.pool.prefix_cache.get
            for block_hash in list(self._boundaries):
                if all(get(page_key(block_hash, number)) is None for number in numbers):
                    del self._boundaries[block_hash]

    def _replace(self, request: Request, counts: list[tuple[int, int]]) -> bool:
        """Append at most these blocks to tables of a request, as (group, count), as far as its prompt needs them;
        whether there is memory."""
        last = -(-request.num_tokens // self.block_size)
        ends = {number: request.first_blocks[number] + len(request.block_tables[number]) for number, _ in counts}
        missing = [(number, min(count, last - ends[number])) for number, count in counts]
        if sum([count for _, count in missing]) + self.config.watermark_blocks > self.pool.num_available:
            return False
        self.pool.taker = request.request_id
        for number, count in missing:
            request.block_tables[number] += self.pool.allocate(max(0, count))
        self._hold(request, request.block_tables)
        return True

    def release(self, request: Request) -> None:
        """Give up everything that the request holds, on the device and on the host."""
        if request.remote_block_tables:
            self._hold(request, [])
        elif request.block_tables:
            # It computes these no more: prompts that begin alike need not wait for them.
            for block_hash in request.block_hashes[request.num_hashed_blocks :]:
                self._forget_in_progress(block_hash)
            if not self.is_dense and self._finds_hits:
                self._expect_no_more(request)
                num_known = min(request.num_hashed_blocks, request.num_computed_tokens // self.block_size)
                if num_known:  # the next turn of a conversation goes on here
                    self._keep_boundary(request, num_known, goes_on=False)
                request.boundary_blocks = ()
            for block_ids in request.block_tables:
                self.pool.release(block_ids)
            request.first_blocks = ()
            self._hold(request, [])
            self._num_reserved -= request.num_reserved_blocks
            request.num_reserved_blocks = 0
        if request.host_block_ids:
            self.host.release(request.host_block_ids)
            request.host_block_ids = []

    def swap_out(self, request: Request, num_tokens: int) -> list[tuple[int, int]] | None:
        """Move the KV of ``num_tokens`` tokens to the host: (device, host) copies, or None without room."""
        firsts = request.first_blocks or (0,)
        last = -(-num_tokens // self.block_size)
        blocks = [
            block_id
            for first, block_ids in zip(firsts, request.block_tables, strict=True)
            for block_id in block_ids[: last - first]
        ]
        if not blocks or len(blocks) > self.host.num_available:
            return None
        # Paired before ``release``: this plan may give the device blocks to others, since executors copy out first.
        copies = list(zip(blocks, host_blocks := self.host.allocate(len(blocks)), strict=True))
        self.release(request)
        request.host_block_ids = host_blocks
        if not self.is_dense:
            request.first_blocks = firsts
        return copies

    def can_swap_in(self, request: Request, *, alone: bool) -> bool:
        """Whether the request fits again, with the token that it computes next."""
        spare = 0 if alone else self.config.watermark_blocks
        needed = self.num_blocks_for(request.num_scheduled_tokens + 1)
        if not self.is_dense:
            needed = len(request.host_block_ids) + self._num_missing(request, request.num_scheduled_tokens)
        return needed + spare <= self.pool.num_available

    def _num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that a request of ``num_tokens`` tokens needs of the pool for its next one."""
        if num_tokens % self.block_size:
            return 0
        firsts = zip(self.layout.groups, request.first_blocks, strict=True)
        return sum([group.first_live(num_tokens) == first for group, first in firsts])

    def swap_in(self, request: Request, expected_tokens: int) -> list[tuple[int, int]]:
        """Bring a swapped request back: (host, device) copies; the caller has asked ``can_swap_in``."""
        self.pool.taker = request.request_id
        counts = [len(request.host_block_ids)]
        if not self.is_dense:
            last = -(-request.num_scheduled_tokens // self.block_size)
            counts = [last - first for first in request.first_blocks]
        self._hold(request, [self.pool.allocate(count) for count in counts])
        request.num_shared_blocks = 0
        self._reserve(request, request.num_slots + expected_tokens)
        blocks = [block_id for block_ids in request.block_tables for block_id in block_ids]
        copies = list(zip(request.host_block_ids, blocks, strict=True))
        self.tiers.use_in_step(request.host_block_ids)
        request.host_block_ids = []
        request.num_hashed_blocks = len(request.block_hashes)  # its old blocks may still be known under these hashes
        return copies

    def _hold(self, request: Request, tables: list[list[int]]) -> None:
        """From now on these are the blocks of the request."""
        request.block_tables, request.frozen_tables = tables, None
        request.num_blocks = sum(map(len, tables))
        if not self.is_dense:
            ends = [first + len(block_ids) for first, block_ids in zip(request.first_blocks, tables, strict=False)]
            request.num_slots = min(ends, default=0) * self.block_size
        else:
            request.num_slots = request.num_blocks * self.block_size

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
        return not self._num_reserved and not self._in_progress and not self._computing

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
