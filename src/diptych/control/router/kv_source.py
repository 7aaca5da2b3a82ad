"""The numbered event batches of one engine's cache: which count, which are missing, and how far the picture is to be
believed.

              batch number 0 comes, or is repeated, or the cache was cleared
    STARTING ---------------------------------------------------------------> EXACT
        |                                                                       |
        | batches are missing,                                                  | batches are missing,
        | and are not repeated                                                  | and are not repeated
        '------------------------> DEGRADED <-----------------------------------'
                                       '--- the cache was cleared ---> EXACT
    A restart, a lost connection: STARTING, and nothing is known.

EXACT: all that the engine holds is known. DEGRADED: what is known is held, but there may be more. A gap is asked for
once; when it cannot be filled, everything is forgotten, because what was removed meanwhile is not known either. A batch
that cannot be read is such a gap, and is not asked for again. A number that falls means that the engine was started
again. No sockets here: kv_events.py has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from diptych.control.router.kv_bridge import CacheCleared, EngineCacheEvent, KVBridge

MAX_HELD_BACK = 4096  # batches that wait for a replay
Batch = Sequence[EngineCacheEvent] | None  # None: it came, and cannot be read


class SourceState(StrEnum):
    """What is known of a source of KV events."""

    STARTING = "starting"
    EXACT = "exact"
    DEGRADED = "degraded"


@dataclass(frozen=True, slots=True)
class SourceChange:
    """What follows from a batch. stored, evicted: in our hashes (evicted first). replay_from: the number from which the
    engine is to repeat its batches (None: nothing is missing). is_empty: the engine's cache was, before what is stored.
    is_gap: what is evicted is not known any more, and may still be held."""

    stored: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()
    replay_from: int | None = None
    is_empty: bool = False
    is_gap: bool = False


class KVSource:
    """One engine's batches. can_replay: whether the engine repeats batches when it is asked."""

    def __init__(self, bridge: KVBridge, *, can_replay: bool) -> None:
        self.bridge = bridge
        self.state = SourceState.STARTING
        self.num_gaps = 0  # that were not filled
        self.num_restarts = 0
        self._can_replay = can_replay
        self._applied = -1  # number of the last batch that counts
        self._live = -1  # of the last that came by itself
        self._is_replaying = False
        self._held_back: dict[int, Batch] = {}

    def on_connected(self) -> SourceChange:
        """The engine publishes from now on: what it has published before is to be repeated."""
        if not self._can_replay:
            return SourceChange()
        self._is_replaying = True
        return SourceChange(replay_from=self._applied + 1)

    def on_batch(self, number: int, events: Batch) -> SourceChange:
        """The engine has published this."""
        change = SourceChange()
        if number <= self._live:  # it was started again
            self.num_restarts += 1
            change = SourceChange(evicted=self._begin_again(), is_empty=True)
        self._live = number
        if self._is_replaying:
            if len(self._held_back) >= MAX_HELD_BACK:
                self._held_back.clear()
            self._held_back[number] = events
            return change
        if number <= self._applied:
            return change
        if number == self._applied + 1:
            return self._joined(change, self._apply(number, events))
        if self._can_replay:
            self._is_replaying = True
            self._held_back = {number: events}
            return replace(change, replay_from=self._applied + 1)
        return self._joined(change, self._skip_to(number, events))

    def on_replayed(self, number: int, events: Batch) -> SourceChange:
        """The engine repeats this. (What lies before the number that was asked for does not count.)"""
        if not self._is_replaying or number <= self._applied:
            return SourceChange()
        if number == self._applied + 1:
            return self._apply(number, events)
        return self._skip_to(number, events)  # it does not reach back so far

    def on_replay_end(self) -> SourceChange:
        """The engine has repeated all that it has, or does not answer."""
        if not self._is_replaying:
            return SourceChange()
        self._is_replaying = False
        held_back, self._held_back = self._held_back, {}
        change = SourceChange()
        for number in sorted(held_back):
            if number <= self._applied:
                continue
            if number == self._applied + 1:
                change = self._joined(change, self._apply(number, held_back[number]))
            else:
                change = self._joined(change, self._skip_to(number, held_back[number]))
        return change

    def on_lost(self) -> SourceChange:
        """The connection was lost, or what came has no number: anything may have been missed."""
        self.num_gaps += 1
        return SourceChange(evicted=self._begin_again(), is_gap=True)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _apply(self, number: int, events: Batch) -> SourceChange:
        if events is None:
            return self._skip_to(number, None)
        stored, evicted = self.bridge.apply(events)
        is_cleared = any(isinstance(event, CacheCleared) for event in events)
        is_empty = is_cleared or (number == 0 and self.state is SourceState.STARTING)
        if is_empty:
            self.state = SourceState.EXACT
        self._applied = number
        if self.bridge.is_full:
            self.state = SourceState.DEGRADED
            lost = self.bridge.clear()
            stored_now = frozenset(stored)
            gone = (*evicted, *(block for block in lost if block not in stored_now))
            return SourceChange(evicted=gone, is_empty=is_empty, is_gap=True)
        return SourceChange(stored, evicted, is_empty=is_empty)

    def _skip_to(self, number: int, events: Batch) -> SourceChange:
        """Batches before this one are lost for good, or what it said is: start again with it."""
        if events is None or self.state is not SourceState.STARTING or self._applied >= 0:
            self.num_gaps += 1
        evicted = self.bridge.clear()
        self.state = SourceState.DEGRADED
        return self._joined(SourceChange(evicted=evicted, is_gap=True), self._apply(number, events or ()))

    def _begin_again(self) -> tuple[bytes, ...]:
        self.state, self._applied, self._live = SourceState.STARTING, -1, -1
        self._is_replaying = False
        self._held_back.clear()
        return self.bridge.clear()

    @staticmethod
    def _joined(first: SourceChange, second: SourceChange) -> SourceChange:
        """Both, one after the other, as one change: evictions count before what is stored."""
        is_empty, is_gap = first.is_empty or second.is_empty, first.is_gap or second.is_gap
        if not (first.stored or first.evicted):
            return replace(second, is_empty=is_empty, is_gap=is_gap)
        held = dict.fromkeys(first.stored)
        evicted = dict.fromkeys(first.evicted)
        for block in second.evicted:
            if block in held:
                del held[block]
            else:
                evicted[block] = None
        for block in second.stored:
            held[block] = None
        both = [block for block in held if block in evicted and block not in first.stored]
        for block in both:  # evicted and stored again: nothing has changed
            del evicted[block], held[block]
        return SourceChange(tuple(held), tuple(evicted), second.replay_from, is_empty, is_gap)
