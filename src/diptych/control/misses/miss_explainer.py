"""MissExplainer: from prompts and KV events to a reason for each prompt that was not found in a cache.

A state machine without a clock, sockets or tokens; the live server (serving.misses) and the simulator drive the same
class. What it is given, in order, decides everything it says.

    on_arrived      a request comes in
    on_events       what a worker reports; returns the misses of the prompts whose computation began
    on_gone         a request is over: its answer belongs to the conversation
    on_worker_up, on_worker_down
"""

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.control.events import Event, KVEvents, KVSnapshot, RequestAdmitted
from diptych.control.misses.block_residency import BlockResidency
from diptych.control.misses.miss_summary import MissSummary
from diptych.control.misses.prefix_history import Match, Origin, PrefixHistory, PromptTokens, SeenChunks
from diptych.control.misses.prefix_miss import NEW, REPEATED, ROUNDING, MissReason, PrefixMiss

HISTORY_TOKENS = 2**20  # that are remembered at least
CACHES_REMEMBERED = 4  # and this factor times what the caches hold
CHUNKS_PER_BLOCK = 2  # of text, that are remembered
RESYNC_TOKENS = 512  # before a change, from where text is cut into chunks again


@dataclass(slots=True)
class _OpenPrompt:
    """A request that has not ended."""

    prompt: PromptTokens
    origin: Origin
    reads_cache: bool
    is_explained: bool = False


@dataclass(frozen=True, slots=True)
class _Missing:
    """Why blocks that were seen are not in the cache of the worker."""

    reason: MissReason
    holders: tuple[int, ...] = ()
    lost_ns: int | None = None
    lost_worker: int | None = None
    evicted_for: str = ""


class MissExplainer:
    """All requests and all workers of one front end, whose caches have blocks of ``block_size`` tokens."""

    def __init__(self, block_size: int, max_tokens: int = HISTORY_TOKENS) -> None:
        max_blocks = max(1, max_tokens // block_size)
        self.block_size = block_size
        self.history = PrefixHistory(block_size, max_blocks)
        self.chunks = SeenChunks(CHUNKS_PER_BLOCK * max_blocks)
        self.residency = BlockResidency(max_blocks)
        self.summary = MissSummary()
        self._open: dict[str, _OpenPrompt] = {}
        self._num_blocks: dict[int, int] = {}  # of each worker's cache
        self._at_boundaries: set[int] = set()  # workers that report boundaries alone

    def on_arrived(self, request_id: str, prompt: PromptTokens, tenant: str = "", *, reads_cache: bool = True) -> None:
        """A request comes in. reads_cache: whether it may be answered from cached prefixes."""
        self._open[request_id] = _OpenPrompt(prompt, Origin(request_id, tenant), reads_cache)

    def on_gone(self, request_id: str, conversation: PromptTokens | None = None) -> None:
        """A request is over. conversation: its prompt with its answer, as far as it was computed."""
        entry = self._open.pop(request_id, None)
        if entry is None or conversation is None or not entry.is_explained:
            return
        self.history.add(conversation, entry.origin)
        self.chunks.add(conversation.chunks(max(0, entry.prompt.num_tokens - RESYNC_TOKENS)))

    def on_worker_up(self, worker: int, num_blocks: int, *, has_windows: bool = False) -> None:
        """Begin with an empty cache of ``num_blocks`` blocks for a worker that serves now: more than the caches hold is
        remembered. has_windows: what it reports are boundaries, where computing may go on."""
        self._num_blocks[worker] = num_blocks
        if has_windows:
            self._at_boundaries.add(worker)
        else:
            self._at_boundaries.discard(worker)
        enough = CACHES_REMEMBERED * sum(self._num_blocks.values())
        self.history.max_blocks = max(self.history.max_blocks, enough)
        self.chunks.max_chunks = max(self.chunks.max_chunks, CHUNKS_PER_BLOCK * enough)
        self.residency.max_losses = max(self.residency.max_losses, enough)

    def on_worker_down(self, worker: int, now: int) -> None:
        """A worker has ended, or was stopped."""
        self.residency.on_worker_down(worker, now)

    def on_events(self, worker: int, events: Sequence[Event], now: int) -> list[PrefixMiss]:
        """What a worker reports of one turn. What it evicted was gone when its prompts were looked up; what it stored
        came after that."""
        misses = []
        for event in events:
            if type(event) is KVEvents and event.tier == "device" and event.evicted:
                evicted_for = [(self._request_id(name), count) for name, count in event.evicted_for]
                self.residency.on_evicted(worker, event.evicted, evicted_for, now)
        for event in events:
            if type(event) is RequestAdmitted and event.is_first:
                entry = self._open.get(self._request_id(event.request_id))
                if entry is not None and not entry.is_explained:
                    misses.append(self._explain(entry, worker, event.num_cached_tokens, now))
        for event in events:
            if type(event) is KVEvents and event.tier == "device":
                self.residency.on_stored(worker, event.stored)
            elif type(event) is KVSnapshot and event.tier == "device":
                self.residency.on_snapshot(worker, event.hashes, now)
        return misses

    def _request_id(self, attempt_id: str) -> str:
        """The request of an attempt; attempts after the first have a number at the end."""
        return attempt_id if attempt_id in self._open else attempt_id.rpartition("~")[0] or attempt_id

    def _explain(self, entry: _OpenPrompt, worker: int, num_cached: int, now: int) -> PrefixMiss:
        prompt, origin = entry.prompt, entry.origin
        match = self.history.match(prompt)
        miss = self._reason(entry, match, worker, num_cached, now)
        entry.is_explained = True
        self.history.add(prompt, origin)
        self.chunks.add(prompt.chunks(max(0, match.num_tokens - RESYNC_TOKENS)))
        self.summary.add(miss)
        return miss

    def _reason(self, entry: _OpenPrompt, match: Match, worker: int, num_cached: int, now: int) -> PrefixMiss:
        """Go through the tokens that were computed, from the first one on: each was computed for one cause."""
        prompt, size = entry.prompt, self.block_size
        most = (prompt.num_tokens - 1) // size * size  # that a cache can give
        spent: list[tuple[str, int]] = []
        done, missing = num_cached, None
        seen = min(match.num_tokens, most) // size * size
        if done < seen:
            missing = self._missing(entry, self._lacking(prompt, done // size, seen // size, worker), worker)
            spent.append((missing.reason, seen - done))
            done = seen
        others = min(match.num_other_blocks * size, most)
        if is_other := others > done:
            spent.append((MissReason.OTHER_SALT, others - done))
            done = others
        if match.num_tokens > done:
            spent.append((ROUNDING, match.num_tokens - done))
            done = match.num_tokens
        again, num_differing, group = self._computed_again(prompt, match, done)
        spent += [(MissReason.DIFFERS if match.goes_on else REPEATED, again), (NEW, prompt.num_tokens - done - again)]
        if missing is None:
            is_complete = num_cached >= most and (
                match.num_tokens >= prompt.num_tokens or match.num_tokens < num_cached
            )
            missing = _Missing(self._unmissed(match, is_complete, is_other, again))
        first = num_cached
        if missing.reason in (MissReason.DIFFERS, MissReason.NEVER_SEEN):
            first = max(first, match.num_tokens)
        nearest = match.other if missing.reason is MissReason.OTHER_SALT else match.nearest
        return PrefixMiss(
            time_ns=now,
            request_id=entry.origin.request_id,
            tenant=entry.origin.tenant,
            worker=worker,
            num_prompt_tokens=prompt.num_tokens,
            num_cached_tokens=num_cached,
            reason=missing.reason,
            first_token=None if missing.reason is MissReason.NONE else first,
            num_seen_tokens=match.num_tokens,
            block_size=size,
            spent=tuple((str(cause), count) for cause, count in spent if count),
            nearest=nearest.request_id if nearest else "",
            nearest_tenant=nearest.tenant if nearest else "",
            holders=missing.holders,
            lost_ns=missing.lost_ns,
            lost_worker=missing.lost_worker,
            evicted_for=missing.evicted_for,
            num_differing_tokens=num_differing,
            group=group if match.goes_on else b"",
            key=match.key,
        )

    def _unmissed(self, match: Match, is_complete: bool, is_other: bool, again: int) -> MissReason:
        """The reason where every block that was seen under this salt was found. A conversation that shares only the
        first words of a chat template, and nothing later, is another one."""
        if is_complete:
            return MissReason.NONE
        if is_other:
            return MissReason.OTHER_SALT
        if match.goes_on and (match.num_blocks or again):
            return MissReason.DIFFERS
        return MissReason.NEVER_SEEN

    def _lacking(self, prompt: PromptTokens, first: int, end: int, worker: int) -> bytes:
        """The block, of those from ``first`` on that were seen, for the lack of which these were computed: the first,
        or where a cache can be gone on from at boundaries alone, the deepest boundary that some cache had."""
        if worker in self._at_boundaries:
            for at in range(end - 1, first, -1):
                if self.residency.holders(prompt.hashes[at]) or self.residency.loss(prompt.hashes[at]):
                    return prompt.hashes[at]
        return prompt.hashes[first]

    def _missing(self, entry: _OpenPrompt, block_hash: bytes, worker: int) -> _Missing:
        """Why the worker has to compute a block that was seen."""
        if not entry.reads_cache:
            return _Missing(MissReason.CACHE_NOT_READ)
        holders = self.residency.holders(block_hash)
        if elsewhere := tuple(holder for holder in holders if holder != worker):
            return _Missing(MissReason.ROUTED_ELSEWHERE, elsewhere)
        loss = self.residency.loss(block_hash)
        if holders:  # it came after the prompt was looked up
            return _Missing(MissReason.BEING_COMPUTED, holders)
        if loss is not None:
            reason = MissReason.WORKER_LOST if loss.is_crash else MissReason.EVICTED
            return _Missing(reason, (), loss.time_ns, loss.worker, loss.evicted_for)
        origin = self.history.origin(block_hash)
        is_open = origin is not None and origin.request_id in self._open
        return _Missing(MissReason.BEING_COMPUTED if is_open else MissReason.NOT_KEPT)

    def _computed_again(self, prompt: PromptTokens, match: Match, start: int) -> tuple[int, int | None, bytes]:
        """Summarise the tokens from ``start`` on: how many lie in chunks that were seen behind another beginning, about
        how many differ before the first of these, and its digest."""
        again, num_differing, group = 0, None, b""
        for first, count, digest in prompt.chunks(max(0, start - RESYNC_TOKENS)):
            if first >= start and digest in self.chunks:
                again += count
                if num_differing is None:
                    num_differing, group = first - match.num_tokens, digest
        return again, num_differing, group
