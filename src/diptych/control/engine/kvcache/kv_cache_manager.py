"""The KV cache of one worker: admission, growth, prefix reuse, release and swapping, in blocks.

Decides and accounts; never touches tensors. Admission takes the blocks of the whole prompt at once and looks at the
expected peak of all that is admitted, so that a half-prefilled prompt can always finish.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from diptych.control.config import CacheConfig
from diptych.control.engine.kvcache.block_pool import BlockPool
from diptych.control.engine.kvcache.boundaries import Boundaries
from diptych.control.engine.kvcache.demand import future_peak_blocks
from diptych.control.engine.kvcache.prefix_cache import Hit, page_key
from diptych.control.engine.kvcache.tier_loads import WorkNs
from diptych.control.engine.kvcache.tiers import Tiers
from diptych.control.errors import BrokenInvariantError
from diptych.control.request import NO_BLOCK, BlockTables, Request

Demands = Callable[[], Iterable[tuple[int, int]]]


class KVCacheManager:
    """Owner of every block id that a request holds."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.layout = config.layout
        self.block_size = config.block_size
        self.is_dense = self.layout.is_dense
        self._finds_hits = config.enable_prefix_cache
        self._own_range = range(config.first_block, config.first_block + config.num_blocks)  # from the start on
        # Groups that keep all blocks of a sequence.
        self._full_groups = [number for number, group in enumerate(self.layout.groups) if not group.window_tokens]
        self.longest_chunk = self.layout.longest_chunk(config.window_chunk)  # of one prompt, in a step
        self._charged_chunk = config.charged_chunk
        self.capacity_tokens = config.capacity_tokens
        self.boundaries = Boundaries()  # of models with windows
        self.pool = BlockPool(
            config.num_blocks,
            enable_prefix_cache=config.enable_prefix_cache,
            first_block=config.first_block,
            names_evictors=config.names_evictors,
            boundaries=None if self.is_dense else self.boundaries,
        )
        self.tiers = Tiers(config, self.pool)
        self.host = self.tiers.host
        self.queried_tokens = 0  # prompt tokens looked up at admission
        self.hit_tokens = 0
        self._num_reserved = 0  # sum of num_reserved_blocks over the holders of blocks
        self._in_progress: dict[bytes, int] = {}  # hashes that admitted prefills are about to compute
        self._computing: dict[bytes, Request] = {}  # with windows: hashes that an admitted prompt is about to compute

    def shrink(self, num_blocks: int) -> None:
        """Have ``num_blocks`` blocks from now on, fewer than before, once those that hold the others release them."""
        self.config = replace(self.config, num_blocks=num_blocks)
        self.capacity_tokens = self.config.capacity_tokens
        self.pool.shrink(num_blocks)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return self.pool.num_used / self.pool.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of this many tokens is charged."""
        if self.is_dense:
            return -(-num_tokens // self.block_size)
        return self.layout.peak_pages(num_tokens, self._charged_chunk)

    def num_new_blocks(self, request: Request, hit: Hit) -> int:
        """Blocks that a request which finds the ``hit`` takes at admission, besides those that it shares."""
        if self.is_dense:
            return self.num_blocks_for(request.num_tokens) - len(hit.blocks)
        return len(hit.below) + sum(self._counts_beside(request, hit))

    def num_borrowed_beside(self, request: Request) -> int:
        """Blocks of this worker that a prompt takes which is computed into those of another worker: what its windows
        leave behind before the prompt ends lies here."""
        return 0 if self.is_dense else sum(self._new_counts(request, request.num_remote_tokens))

    def _new_counts(self, request: Request, num_hit_tokens: int) -> list[int]:
        """By group. A window gets as many blocks as if nothing were shared: shared ones cannot be used again. Of a
        prompt that two workers share, one gets what is read when it ends, the other what windows leave before."""
        num_tokens, hit = request.num_tokens, num_hit_tokens // self.block_size
        last = -(-num_tokens // self.block_size)
        groups, handed_over = self.layout.groups, self._handed_over(request)
        if request.awaits_kv:
            return [last - max(hit, first) for first in handed_over]
        ends = handed_over if request.remote_block_tables else [last] * len(groups)
        return [
            min(max(0, end - hit), group.peak_pages(num_tokens, self._charged_chunk))
            for group, end in zip(groups, ends, strict=True)
        ]

    def _counts_beside(self, request: Request, hit: Hit) -> list[int]:
        """By group, the blocks that a request takes besides those of the ``hit``. Those that are copied up for it are
        its own, and used again like others."""
        counts = self._new_counts(request, self.num_cached_tokens(request, hit))
        if hit.below and not request.awaits_kv:
            for number, group in enumerate(self.layout.groups):
                most = group.peak_pages(request.num_tokens, self._charged_chunk) - hit.tables[number].count(NO_BLOCK)
                if group.window_tokens:
                    counts[number] = max(0, min(counts[number], most))
        return counts

    def window_growth(self, request: Request, num_tokens: int, hit: Hit | None = None) -> int:
        """Blocks that those windows of a request get which are not full yet, until it has ``num_tokens`` tokens more
        than its blocks hold. Blocks that other requests read, too, are not used again, and do not count. hit: that of
        a request which is not admitted."""
        if request.remote_block_tables:
            return 0
        growth, tables, references = 0, request.block_tables, self.pool.references
        counts = [] if tables else self._own_counts(request, hit or Hit([], 0))
        for index, group in enumerate(self.layout.groups):
            if group.window_tokens:
                held = sum([references(block_id) == 1 for block_id in tables[index]]) if tables else counts[index]
                growth += max(0, group.peak_pages(request.num_slots + num_tokens, 1) - held)
        return growth

    def _own_counts(self, request: Request, hit: Hit) -> list[int]:
        counts = self._counts_beside(request, hit)
        for number, block_ids in enumerate(hit.tables if hit.below else ()):
            counts[number] += block_ids.count(NO_BLOCK)
        return counts

    def admission_hit(self, request: Request, work_ns: WorkNs) -> Hit:
        """What a prompt finds that is computed here, or into blocks of this worker. Of layers in several groups, with
        what lies below, where copying it up pays: there it counts only up to where all that is needed can be found, on
        the device or below."""
        hit = self.longest_hit(request)
        is_elsewhere = request.remote_block_tables or (request.awaits_kv and not request.is_remote_prefill)
        if self.is_dense or is_elsewhere or not self.tiers.has_host_content(request):
            return hit
        return self._deeper_hit(request, hit, work_ns)

    def _deeper_hit(self, request: Request, hit: Hit, work_ns: WorkNs) -> Hit:
        host, device = self.host.prefix_cache, self.pool.prefix_cache
        count = self.deepest_boundary(
            request, hit.num_tokens // self.block_size, lambda key: device.get(key) is None and host.get(key) is None
        )
        if self._tokens(count) <= hit.num_tokens:
            return hit
        tables, below = list[list[int]](), list[tuple[bytes, int]]()
        for keys in self._live_keys(request.block_hashes[:count]):
            tables.append([])
            for key in keys:
                block_id, host_block = device.get(key), host.get(key)
                if block_id is None and host_block is not None:
                    below.append((key, host_block))
                tables[-1].append(NO_BLOCK if block_id is None else block_id)
        blocks = [block_id for block_ids in tables for block_id in block_ids if block_id != NO_BLOCK]
        num_there = hit.num_tokens if below else self._tokens(count)  # (windows of a token need nothing)
        found = Hit(blocks, self._tokens(count), tuple(tables), below, num_there)
        if len(below) * self.config.tiers.copy_block_ns >= work_ns(hit.num_tokens, found.num_tokens - hit.num_tokens):
            return hit
        room = self.pool.num_blocks - self.config.watermark_blocks
        return found if len(blocks) + self.num_new_blocks(request, found) <= room else hit

    def deepest_boundary(self, request: Request, least: int, lacks: Callable[[bytes], bool]) -> int:
        """How many leading blocks of a prompt can be reached, more than ``least``, or that. lacks: whether a block, by
        its name in its group, can be found nowhere."""
        limit = min((request.num_tokens - 1) // self.block_size, len(request.block_hashes))
        hashes, reached = request.block_hashes, 0
        while reached < limit and not any(lacks(page_key(hashes[reached], number)) for number in self._full_groups):
            reached += 1
        windows = [(number, group) for number, group in enumerate(self.layout.groups) if group.window_tokens]
        while reached > least:
            # No boundary has a block in its window that is missing: the next one to be tried ends before it.
            missing = next(
                (
                    index
                    for number, group in windows
                    for index in range(reached - 1, group.first_live(self._tokens(reached)) - 1, -1)
                    if lacks(page_key(hashes[index], number))
                ),
                None,
            )
            if missing is None:
                return reached
            reached = missing
        return least

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
        enough for the prompt to fit beside them; or the place where it leaves what was computed before, if nothing has
        needed the memory of the windows there yet."""
        hashes = request.block_hashes[:limit] if len(self.boundaries) else []
        room = self.pool.num_blocks - self.config.watermark_blocks
        parting = self._parting(hashes)
        for count in range(len(hashes), 0, -1):
            is_boundary = hashes[count - 1] in self.boundaries
            if is_boundary or count == parting:
                tables = self._boundary_tables(hashes[:count])
                if tables is None:
                    if is_boundary:
                        self.pool.end_boundary(hashes[count - 1])  # what was evicted does not come back by itself
                    continue
                blocks = [block_id for block_ids in tables for block_id in block_ids]
                if len(blocks) + sum(self._new_counts(request, self._tokens(count))) <= room:
                    return Hit(blocks, self._tokens(count), tables)
        return Hit([], 0)

    def _parting(self, hashes: list[bytes]) -> int:
        """How many of these blocks, from the first on, were computed before, and are still there in a group that keeps
        all tokens."""
        get, count = self.pool.prefix_cache.get, 0
        if not self._full_groups:  # windows alone: up to the deepest that can be found
            known = (count for count in range(len(hashes), 0, -1) if get(page_key(hashes[count - 1], 0)) is not None)
            return next(known, 0)
        while count < len(hashes) and get(page_key(hashes[count], self._full_groups[0])) is not None:
            count += 1
        return count

    def _boundary_tables(self, hashes: list[bytes]) -> tuple[list[int], ...] | None:
        """By group, the blocks that a sequence needs which goes on behind these hashes; None where one is missing."""
        get, tables = self.pool.prefix_cache.get, []
        for keys in self._live_keys(hashes):
            found = [get(key) for key in keys]
            block_ids = [block_id for block_id in found if block_id is not None]
            if len(block_ids) < len(keys):
                return None
            tables.append(block_ids)
        return tuple(tables)

    def _live_keys(self, hashes: Sequence[bytes]) -> Iterator[list[bytes]]:
        """By group, the names of the blocks that a sequence needs which goes on behind these hashes."""
        for number, group in enumerate(self.layout.groups):
            first = group.first_live(self._tokens(len(hashes)))
            yield [page_key(block_hash, number) for block_hash in hashes[first:]]

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
            return [host_block for _, host_block in hit.below]
        return self.tiers.worth_copying(request, self.num_cached_tokens(request, hit) // self.block_size, work_ns)

    def num_found_tokens(self, request: Request, hit: Hit, below: list[int]) -> int:
        """Tokens of the prompt that need not be computed once what lies ``below`` is copied up."""
        num_cached = self.num_cached_tokens(request, hit)
        return num_cached + len(below) * self.block_size if self.is_dense else num_cached

    def still_holds(self, hit: Hit) -> bool:
        """Whether what lies below of a ``hit`` is still there."""
        get = self.host.prefix_cache.get
        return all(get(key) == host_block for key, host_block in hit.below)

    def num_ready_tokens(self, request: Request) -> int:
        """Tokens of the request's prompt that need not be computed, on the device or on the host."""
        num_cached = self.num_cached_tokens(request)
        below = self.tiers.host_prefix(request, num_cached // self.block_size)
        return num_cached + len(below) * self.block_size

    def fetch(self, request: Request, work_ns: WorkNs, now: int) -> bool:
        """Whether the request waits for a load from now on."""
        if not self.is_dense:
            return self._fetch_groups(request, work_ns, now)
        return self.tiers.fetch(request, self.num_cached_tokens(request) // self.block_size, work_ns, now)

    def _fetch_groups(self, request: Request, work_ns: WorkNs, now: int) -> bool:
        """``fetch``: what is read from disk is what a boundary lacks that is deeper than any on device and host."""
        tiers = self.tiers
        if not tiers.reads_disk(request, now) or request.remote_block_tables:
            return False
        host, device, on_disk = self.host.prefix_cache.get, self.pool.prefix_cache.get, tiers.loads.holds
        first = self.longest_hit(request).num_tokens // self.block_size
        first = self.deepest_boundary(request, first, lambda key: device(key) is None and host(key) is None)
        count = self.deepest_boundary(
            request, first, lambda key: device(key) is None and host(key) is None and not on_disk(key)
        )
        if count == first:
            return False
        needed, held = list[bytes](), list[int]()
        for keys in self._live_keys(request.block_hashes[:count]):
            for key in keys:
                host_block = host(key)
                if device(key) is None and host_block is not None:
                    held.append(host_block)
                elif device(key) is None:
                    needed.append(key)
        span = self._tokens(first), self._tokens(count - first)
        return tiers.loads.begin_pages(request, span, tuple(needed), held, work_ns, tiers.actions, now)

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
        full, get = self._full_groups, self.pool.prefix_cache.get
        return bool(full) and get(page_key(block_hash, full[0])) is not None

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
        if request.remote_block_tables and self.is_dense:
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
        if request.remote_block_tables and self.is_dense:
            return True
        # The sum of all expectations bounds their peak: where even that fits, the costly question is not asked.
        total = self._num_reserved - given_up[1] + self._charged_blocks(request, request.num_tokens + expected_tokens)
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
        if request.remote_block_tables and not self.is_dense:
            return self._admit_borrowed(request, hit)
        if request.remote_block_tables:
            self._hold(request, [list(block_ids) for block_ids in request.remote_block_tables])
            request.num_hashed_blocks = request.num_shared_blocks = request.num_blocks
            first = request.num_remote_tokens // self.block_size
            request.num_computed_tokens = request.num_scheduled_tokens = self.num_cached_tokens(request, hit)
            return list(zip(hit.blocks[first:], request.block_tables[0][first:], strict=False))
        self._reserve(request, request.num_tokens + expected_tokens)
        self.pool.taker = request.request_id
        if not self.is_dense:
            if request.awaits_kv:
                self._admit_incoming(request, hit)
            else:
                self._admit_groups(request, hit)
            self.queried_tokens += request.num_tokens
            self.hit_tokens += hit.num_device_tokens
            return []
        # Before ``allocate``: it evicts cached blocks that no request holds, which these still are.
        self.pool.share(hit.blocks)
        total = self.num_blocks_for(request.num_tokens)
        self._hold(request, [hit.blocks + self.pool.allocate(total - len(hit.blocks))])
        request.num_hashed_blocks = request.num_shared_blocks = len(hit.blocks)
        request.num_computed_tokens = request.num_scheduled_tokens = hit.num_tokens
        self.queried_tokens += request.num_tokens
        self.hit_tokens += request.num_computed_tokens
        for block_hash in request.block_hashes[len(hit.blocks) :]:
            self._in_progress[block_hash] = self._in_progress.get(block_hash, 0) + 1
        return []

    def _admit_groups(self, request: Request, hit: Hit) -> None:
        """``admit`` for a model whose layers are of several groups."""
        counts = self._counts_beside(request, hit)
        found = hit.tables or tuple([list[int]() for _ in counts])
        self.pool.share(hit.blocks)
        if hit.below:
            found = self._make_places(request, hit)
        request.first_blocks = tuple([group.first_live(hit.num_tokens) for group in self.layout.groups])
        self._hold(
            request, [block_ids + self.pool.allocate(count) for block_ids, count in zip(found, counts, strict=True)]
        )
        num_hit_blocks = hit.num_tokens // self.block_size
        num_there = hit.num_device_tokens // self.block_size
        request.num_hashed_blocks = num_there
        request.num_shared_blocks = num_there * self.layout.num_growing
        request.num_computed_tokens = request.num_scheduled_tokens = hit.num_device_tokens
        request.boundary_blocks = self._boundaries_of(request, num_hit_blocks)
        if num_hit_blocks:
            self._note_boundary(request.block_hashes[:num_hit_blocks])
            self.boundaries.use(request.block_hashes[num_hit_blocks - 1])
        self._expect(request)

    def _make_places(self, request: Request, hit: Hit) -> tuple[list[int], ...]:
        """The tables of a ``hit`` with blocks for what is copied up."""
        places = request.raise_targets = self.pool.allocate(len(hit.below))
        request.num_raised_tokens, left = hit.num_tokens, iter(places)
        return tuple(
            [[next(left) if block_id == NO_BLOCK else block_id for block_id in block_ids] for block_ids in hit.tables]
        )

    def _admit_incoming(self, request: Request, hit: Hit) -> None:
        """``_admit_groups`` for a prompt that another worker computes: blocks for what is read when it ends. Blocks of
        the hit that windows leave before are lent to a worker that computes into these blocks."""
        counts = self._new_counts(request, hit.num_tokens)
        request.first_blocks = self._handed_over(request)
        found, tables, lent = hit.tables or tuple([list[int]() for _ in counts]), [], []
        if request.is_remote_prefill:
            self.pool.share(hit.blocks)
            found = self._make_places(request, hit) if hit.below else found
        for group, block_ids, first in zip(self.layout.groups, found, request.first_blocks, strict=True):
            num_left = first - group.first_live(hit.num_tokens)
            tables.append(block_ids[num_left:])
            lent.append(block_ids[:num_left] if request.is_remote_prefill else [])
            if not request.is_remote_prefill:
                self.pool.share(tables[-1])
        request.lent_tables = lent
        tables = [block_ids + self.pool.allocate(count) for block_ids, count in zip(tables, counts, strict=True)]
        self._hold(request, tables)
        request.num_hashed_blocks = hit.num_device_tokens // self.block_size
        request.num_shared_blocks = request.num_hashed_blocks * self.layout.num_growing
        request.num_computed_tokens = request.num_scheduled_tokens = hit.num_device_tokens
        end = self.layout.last_boundary(request.num_prompt_tokens) // self.block_size
        is_found = self._finds_hits and 0 < end <= len(request.block_hashes)
        request.boundary_blocks = (end,) if is_found else ()

    def reserved_tables(self, request: Request) -> BlockTables:
        """What a worker that computes a reserved prompt is to know: all blocks that it may read or write here, from the
        first that is read behind what is cached; NO_BLOCK where it has blocks of its own."""
        if self.is_dense or not request.is_remote_prefill:
            return request.tables
        tables = []
        for number, group in enumerate(self.layout.groups):
            lent = request.lent_tables[number]
            first = group.first_live(request.num_cached_tokens)
            num_own = request.first_blocks[number] - first - len(lent)
            tables.append((*lent, *[NO_BLOCK] * num_own, *request.block_tables[number]))
        return tuple(tables)

    def take_back_lent(self, request: Request) -> None:
        """The worker that computes a reserved prompt reads nothing here any more."""
        for block_ids in request.lent_tables:
            self.pool.release(block_ids)
        request.lent_tables = []

    def _admit_borrowed(self, request: Request, hit: Hit) -> list[tuple[int, int]]:
        """``admit`` for a prompt that is computed into the blocks of another worker. Until windows reach these, what
        they read lies in blocks that the other worker lends, or that were found here, and then in blocks of its own
        here."""
        size, pool, num_remote = self.block_size, self.pool, request.num_remote_tokens
        self._reserve(request, request.num_tokens)
        pool.taker = request.request_id
        start = self.num_cached_tokens(request, hit)
        counts, is_found_here = self._new_counts(request, start), start > num_remote
        found, copies = [], list[tuple[int, int]]()
        request.first_blocks = tuple([group.first_live(start) for group in self.layout.groups])
        for number, group in enumerate(self.layout.groups):
            lent, first = request.remote_block_tables[number], request.first_blocks[number]
            begin, cut = group.first_live(num_remote), max(0, self._handed_over(request)[number] - first)
            if is_found_here:
                here = hit.tables[number]
                pool.share(here[:cut])
                copied = range(max(first + cut, num_remote // size), start // size)
                copies += [(here[index - first], lent[index - begin]) for index in copied]
                found.append(here[:cut])
            else:
                found.append(list(lent[: min(cut, start // size - begin)]))
        tables = [block_ids + pool.allocate(count) for block_ids, count in zip(found, counts, strict=True)]
        self._hold_borrowed(request, tables)
        request.num_hashed_blocks = len(request.block_hashes)  # nothing of it is kept here
        request.num_computed_tokens = request.num_scheduled_tokens = start
        return copies

    def _hold_borrowed(self, request: Request, tables: list[list[int]]) -> None:
        """``_hold`` for a prompt that is computed into blocks of another worker: these follow its own."""
        for number, handed_over in enumerate(self._handed_over(request)):
            if request.first_blocks[number] + len(tables[number]) == handed_over:
                begin = self.layout.groups[number].first_live(request.num_remote_tokens)
                tables[number] += request.remote_block_tables[number][handed_over - begin :]
        self._hold(request, tables)
        request.num_shared_blocks = request.num_blocks - sum([len(self._own(block_ids)) for block_ids in tables])

    def _handed_over(self, request: Request) -> tuple[int, ...]:
        """By group, the first block that a worker gets which decodes what another one has computed."""
        return self.layout.first_handed_over(request.num_prompt_tokens)

    def _own(self, block_ids: Iterable[int]) -> list[int]:
        """Those of these blocks that are this worker's."""
        return [block_id for block_id in block_ids if block_id in self._own_range]

    def _charged_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks of this worker that a request is charged which has ``num_tokens`` tokens in the end."""
        if request.remote_block_tables:
            return self.num_borrowed_beside(request)
        return self.num_blocks_for(num_tokens)

    def _boundaries_of(self, request: Request, num_hit_blocks: int) -> tuple[int, ...]:
        """Where others may go on once the prompt is computed so far, in blocks: where it leaves a prompt that was
        computed before (what parts here once will part here again), and its end."""
        if not self._finds_hits:
            return ()
        end = min((request.num_tokens - 1) // self.block_size, len(request.block_hashes))
        parting = self._parting(request.block_hashes[:end])
        return tuple(sorted({count for count in (parting, end) if count > num_hit_blocks}))

    def begin_chunk(self, request: Request) -> None:
        """The next chunk of an admitted prompt is planned: blocks of windows that have expired hold what is computed
        next."""
        if self.is_dense:
            return
        num_committed = min(request.num_computed_tokens, self.layout.last_boundary(request.num_tokens))
        self._expire(request, num_committed, request.num_tokens)

    def end_prompt(self, request: Request) -> None:
        """The prompt is computed: blocks of its windows that have expired are free for others. What another worker is
        to get of it stays."""
        if self.is_dense:
            return
        num_tokens = num_committed = request.num_computed_tokens
        if request.hands_off:
            num_committed = self.layout.last_boundary(request.num_prompt_tokens)
        self._expire(request, num_committed, num_tokens)

    def _expire(self, request: Request, num_committed: int, num_tokens: int) -> None:
        """Blocks that no token behind ``num_committed`` reads are used again, as far as the first ``num_tokens`` tokens
        need them, and given up. As long as there is memory that nothing is in, others take their place, so that they
        can be found: until that memory is needed, a prompt may be gone on from anywhere."""
        last, firsts = -(-num_tokens // self.block_size), list(request.first_blocks)
        left, holds = list[int](), self.pool.prefix_cache.holds
        is_borrowed = bool(request.remote_block_tables)
        ends = self._handed_over(request) if is_borrowed else (last,) * len(firsts)
        for index, group in enumerate(self.layout.groups):
            block_ids, first = request.block_tables[index], firsts[index]
            num_expired = min(group.first_live(num_committed) - first, len(block_ids))
            if num_expired > 0:
                expired, block_ids = block_ids[:num_expired], block_ids[num_expired:]
                num_needed = max(0, ends[index] - first - len(expired) - len(block_ids))
                firsts[index] = first + num_expired
                if is_borrowed:
                    expired = self._own(expired)
                # What others may find is not overwritten: for such a block another one was taken when it was shared, or
                # when it became findable.
                kept = [block_id for block_id in expired if holds(block_id)]
                fresh = [] if is_borrowed else self._leave_findable(request, index, expired, first, num_needed, left)
                expired = [block_id for block_id in expired if not holds(block_id)]
                self.pool.release(kept)
                request.block_tables[index] = block_ids + expired[:num_needed] + fresh
                self.pool.release(expired[num_needed:])
        request.first_blocks = tuple(firsts)
        if is_borrowed:
            self._hold_borrowed(request, request.block_tables)
        else:
            self._hold(request, request.block_tables)
        self.pool.release(left)
        self.pool.evict_first(left)

    def _leave_findable(
        self, request: Request, number: int, expired: list[int], first: int, num_needed: int, left: list[int]
    ) -> list[int]:
        """Make what expires in a window findable, as far as there is memory that nothing is in: ``left`` gets these
        blocks. expired: blocks from the index ``first`` on, of which ``num_needed`` would be used again. Returns those
        that take their place."""
        pool, hashes = self.pool, request.block_hashes[first:] if self._finds_hits else []
        found = []
        for block_hash, block_id in zip(hashes, expired, strict=False):
            key = page_key(block_hash, number)
            if not pool.prefix_cache.holds(block_id) and pool.prefix_cache.get(key) is None:
                found.append((key, block_id))
        num_others = sum([not pool.prefix_cache.holds(block_id) for block_id in expired]) - len(found)
        num_reused = max(0, min(num_needed - num_others, len(found)))
        num_fresh = min(num_reused, max(0, pool.num_free - self.config.watermark_blocks))
        for key, block_id in found[num_reused - num_fresh :]:
            pool.remember(key, block_id)
            left.append(block_id)
        pool.taker = request.request_id
        return pool.allocate(num_fresh)

    def raise_blocks(self, request: Request, count: int) -> list[tuple[int, int]]:
        """The next ``count`` (host, device) copies of an admitted prompt. What they hold need not be computed."""
        if not self.is_dense:
            return self._raise_pages(request, count)
        copies = self.tiers.raise_blocks(request, count)
        request.num_scheduled_tokens += count * self.block_size
        request.num_computed_tokens = request.num_scheduled_tokens
        self.remember_computed(request, request.num_computed_tokens)
        return copies

    def _raise_pages(self, request: Request, count: int) -> list[tuple[int, int]]:
        """``raise_blocks``: only when all are there can computing go on behind them."""
        targets, request.raise_targets = request.raise_targets[:count], request.raise_targets[count:]
        copies = list(zip(self.tiers.take_blocks(request, count), targets, strict=True))
        if not request.host_block_ids:
            self.tiers.host_hit_tokens += request.num_raised_tokens - request.num_computed_tokens
            request.num_computed_tokens = request.num_scheduled_tokens = request.num_raised_tokens
            self.remember_computed(request, request.num_raised_tokens)
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
        for number in self._full_groups:
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
        self._note_boundary(request.block_hashes[:num_blocks])

    def _note_boundary(self, hashes: list[bytes]) -> None:
        """Sequences may go on behind these blocks, if what this takes is on the device and can be found."""
        if hashes[-1] in self.boundaries:
            return
        window_pages, last_pages = [], []
        for number, group in enumerate(self.layout.groups):
            if group.window_tokens:
                first = group.first_live(self._tokens(len(hashes)))
                window_pages += [page_key(block_hash, number) for block_hash in hashes[first:]]
            else:
                last_pages.append(page_key(hashes[-1], number))
        pages = (*window_pages, *last_pages)
        # Of a request that was swapped out, others may have taken the memory of what leads there; what is copied up is
        # not there yet; and windows of a token need nothing.
        if not pages or any(self.pool.prefix_cache.get(key) is None for key in pages):
            return
        self.boundaries.add(hashes[-1], window_pages, last_pages)
        self.pool.report_boundary(hashes[-1])

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
            if request.first_blocks:
                for block_ids in request.block_tables:
                    self.pool.release(self._own(block_ids))
                request.first_blocks = ()
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
            self.take_back_lent(request)
            for block_ids in request.block_tables:
                self.pool.release(block_ids)
            if not self.is_dense and self._finds_hits:
                self._age(request)
            request.first_blocks = ()
            request.raise_targets = []
            self._hold(request, [])
        self._num_reserved -= request.num_reserved_blocks
        request.num_reserved_blocks = 0
        if request.host_block_ids:
            self.host.release(request.host_block_ids)
            request.host_block_ids = []

    def _age(self, request: Request) -> None:
        """Order what can be found of a request that has given up its blocks, for eviction: from the deepest boundary to
        the first one, and of each what leads to it from the one before, then its windows. A boundary is of no use
        without its windows, nor these without the rest. Of those that other requests have made, only those count that
        sequences have in common."""
        boundaries, hashes, get = self.boundaries, request.block_hashes, self.pool.prefix_cache.get
        end = request.num_hashed_blocks
        own = request.num_shared_blocks // max(1, self.layout.num_growing)  # where it began
        counts = [count for count in range(1, end + 1) if hashes[count - 1] in boundaries]
        while counts:
            count = counts.pop()
            first = counts[-1] if counts else 0
            keys = [
                page_key(hashes[at], number) for number in self._full_groups for at in range(count - 1, first - 1, -1)
            ]
            if count >= own or boundaries.is_shared(hashes[count - 1]):
                keys += boundaries.window_pages(hashes[count - 1])
            found = [get(key) for key in keys]
            self.pool.evict_last([block_id for block_id in found if block_id is not None])

    def swap_out(self, request: Request, num_tokens: int) -> list[tuple[int, int]] | None:
        """Move the KV of ``num_tokens`` tokens to the host: (device, host) copies, or None without room."""
        firsts = request.first_blocks
        last = -(-num_tokens // self.block_size)
        blocks = [
            block_id
            for first, block_ids in zip(firsts or (0,), request.block_tables, strict=True)
            for block_id in block_ids[: last - first]
        ]
        if not blocks or len(blocks) > self.host.num_available:
            return None
        # Paired before ``release``: this plan may give the device blocks to others, since executors copy out first.
        copies = list(zip(blocks, host_blocks := self.host.allocate(len(blocks)), strict=True))
        self.release(request)
        request.host_block_ids, request.first_blocks = host_blocks, firsts
        return copies

    def can_swap_in(self, request: Request, *, alone: bool) -> bool:
        """Whether the request fits again, with the token that it computes next."""
        spare = 0 if alone else self.config.watermark_blocks
        needed = len(request.host_block_ids) + self._num_missing(request, request.num_scheduled_tokens)
        return needed + spare <= self.pool.num_available

    def _num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that a request of ``num_tokens`` tokens needs of the pool for its next one."""
        if num_tokens % self.block_size:
            return 0
        firsts = zip(self.layout.groups, request.first_blocks or (0,), strict=True)
        return sum([group.first_live(num_tokens) == first for group, first in firsts])

    def swap_in(self, request: Request, expected_tokens: int) -> list[tuple[int, int]]:
        """Bring a swapped request back: (host, device) copies; the caller has asked ``can_swap_in``."""
        self.pool.taker = request.request_id
        last = -(-request.num_scheduled_tokens // self.block_size)
        self._hold(request, [self.pool.allocate(last - first) for first in request.first_blocks or (0,)])
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
        ends = [first + len(block_ids) for first, block_ids in zip(request.first_blocks or (0,), tables, strict=False)]
        request.num_slots = min(ends, default=0) * self.block_size

    def _reserve(self, request: Request, num_tokens: int) -> None:
        request.num_reserved_blocks = self._charged_blocks(request, num_tokens)
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
