"""The requests that decode: a token each per decode step, with bookkeeping that a steady step does not touch.

Time here is counted in ticks: the number of decode steps handed out so far. A member's counts follow from the tick at
which it joined, and whatever will happen to it (it needs a block, it reaches its length limit) is written in a calendar
under the tick at which it happens. A step therefore costs what changes in it, not what runs in it.

After a step that gave it n > 1 tokens, a member joins again with its new length.
"""

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from diptych.control.errors import BrokenInvariantError
from diptych.control.request import Request

UNLIMITED = 2**62


class _Stay:
    """One stay of a request in the batch."""

    __slots__ = ("joined_tick", "outputs_at_join", "request", "tokens_at_join")

    def __init__(self, request: Request, joined_tick: int, tokens_at_join: int, outputs_at_join: int) -> None:
        self.request = request
        self.joined_tick = joined_tick
        self.tokens_at_join = tokens_at_join  # KV length before its first step here
        self.outputs_at_join = outputs_at_join


class DecodeBatch:
    """Owner of the decode counts of its members."""

    def __init__(self) -> None:
        self._stays: dict[str, _Stay] = {}
        self._block_due: dict[int, list[_Stay]] = {}
        self._end_due: dict[int, list[_Stay]] = {}  # by the tick of the member's last step
        self._block_ticks: list[int] = []  # heaps of the calendars' ticks
        self._end_ticks: list[int] = []
        self._tpot_counts: dict[int, int] = {}
        self.ticks_scheduled = 0
        self.ticks_completed = 0
        self.context = 0  # tokens that the members attend to in the next step
        self.num_best_effort = 0  # members that do
        self._outputs_before = 0  # sum over the members: sampled tokens less decode steps, when they joined

    def __len__(self) -> int:
        return len(self._stays)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._stays

    def __iter__(self) -> Iterator[Request]:
        return (stay.request for stay in self._stays.values())

    def tpot_objectives(self) -> list[int]:
        """The distinct TPOT objectives of the members (0: none), ascending."""
        return sorted(self._tpot_counts)

    def join(self, request: Request, num_tokens: int, num_outputs: int) -> None:
        """Add a request whose KV holds ``num_tokens`` and which has ``num_outputs`` sampled tokens (one of them not
        in the KV yet: the input of its first step here)."""
        if num_outputs >= request.max_tokens:
            raise BrokenInvariantError(
                f"{request.request_id} decodes with {num_outputs} of {request.max_tokens} tokens"
            )
        stay = _Stay(request, self.ticks_scheduled, num_tokens, num_outputs)
        request.last_resume_tick = self.ticks_scheduled
        self._stays[request.request_id] = stay
        last_tick = stay.joined_tick + request.max_tokens - num_outputs - 1
        self._note(self._end_due, self._end_ticks, last_tick, stay)
        self._schedule_block(stay)
        tpot = (request.slo.tpot_ns if request.slo else None) or 0
        self._tpot_counts[tpot] = self._tpot_counts.get(tpot, 0) + 1
        self.num_best_effort += request.is_best_effort
        self.context += num_tokens + 1
        self._outputs_before += num_outputs - stay.joined_tick

    def leave(self, request: Request) -> None:
        """Take a member out. Its counts become what they are when the step under way, if there is one, is done."""
        stay = self._stays.pop(request.request_id)
        self.num_best_effort -= request.is_best_effort
        ticks = self.ticks_scheduled - stay.joined_tick
        self.context -= stay.tokens_at_join + ticks + 1
        self._outputs_before -= stay.outputs_at_join - stay.joined_tick
        request.num_computed_tokens = request.num_scheduled_tokens = stay.tokens_at_join + ticks
        request.num_output_tokens = stay.outputs_at_join + ticks
        tpot = (request.slo.tpot_ns if request.slo else None) or 0
        self._tpot_counts[tpot] -= 1
        if not self._tpot_counts[tpot]:
            del self._tpot_counts[tpot]

    def member(self, request_id: str) -> Request:
        """The member of this id."""
        return self._stays[request_id].request

    def take_block_due(self) -> list[Request]:
        """Members that need one more block before the next step, in joining order; each is asked for once."""
        due = self._block_due.pop(self.ticks_scheduled, None)
        if not due:
            return []
        # Stays that were replaced or ended are still in the calendar: they are passed over here, never searched for.
        return [stay.request for stay in due if self._is_current(stay)]

    def block_came_early(self, request: Request) -> None:
        """The member got a block before it was due."""
        self._begin_again(self._stays[request.request_id], 0)

    def got_more(self, request: Request, num_tokens: int) -> bool:
        """Count ``num_tokens`` tokens beyond the one that the completed decode step gives each member. Returns whether
        they end its answer."""
        stay = self._stays[request.request_id]
        self.context += num_tokens
        self._outputs_before += num_tokens
        self._begin_again(stay, num_tokens)
        num_outputs = self.num_outputs(request)
        if num_outputs > request.max_tokens:
            raise BrokenInvariantError(f"{request.request_id} has {num_outputs} of {request.max_tokens} tokens")
        return num_outputs == request.max_tokens

    def block_added(self, request: Request) -> None:
        """The member got its block: note when it will need the one after it."""
        self._schedule_block(self._stays[request.request_id])

    def advance_scheduled(self) -> None:
        """A decode step was handed out."""
        self.ticks_scheduled += 1
        self.context += len(self._stays)

    def take_back_scheduled(self) -> None:
        """The decode step that was handed out last was not done: it will be handed out again."""
        self.ticks_scheduled -= 1
        self.context -= len(self._stays)

    def advance_completed(self) -> list[Request]:
        """A decode step is done. Returns the members whose last step it was."""
        last = self._end_due.pop(self.ticks_completed, ())
        self.ticks_completed += 1
        return [stay.request for stay in last if self._is_current(stay)]

    def steps_until_end(self) -> int:
        """Steps, counted from the one just handed out, up to and with the first that is a member's last."""
        while self._end_ticks and self._end_ticks[0] < self.ticks_scheduled - 1:
            heappop(self._end_ticks)
        return 2 + self._end_ticks[0] - self.ticks_scheduled if self._end_ticks else 1

    def steps_until_block(self) -> int:
        """Steps, counted from the one just handed out, before a member needs a block."""
        while self._block_ticks and self._block_ticks[0] < self.ticks_scheduled:
            heappop(self._block_ticks)
        return 1 + self._block_ticks[0] - self.ticks_scheduled if self._block_ticks else UNLIMITED

    def skip(self, num_steps: int, grow: Callable[[Request], bool]) -> None:
        """Hand out ``num_steps`` more steps, in which no member joins or leaves; ``grow`` gives blocks and cannot
        fail."""
        last = self.ticks_scheduled + num_steps
        self.context += len(self._stays) * num_steps
        self.ticks_completed += num_steps
        while self._block_ticks and self._block_ticks[0] < last:
            self.ticks_scheduled = max(self.ticks_scheduled, heappop(self._block_ticks))
            for request in self.take_block_due():
                if not grow(request):
                    raise BrokenInvariantError("a plan was repeated further than it allows")
                self.block_added(request)
        self.ticks_scheduled = last

    @property
    def output_tokens(self) -> int:
        """Sampled tokens of all members, confirmed steps only."""
        return self._outputs_before + len(self._stays) * self.ticks_completed

    def num_outputs(self, request: Request) -> int:
        """Sampled tokens of a member, confirmed steps only."""
        stay = self._stays[request.request_id]
        return stay.outputs_at_join + self.ticks_completed - stay.joined_tick

    def num_computed(self, request: Request) -> int:
        """Tokens of a member in the KV cache, confirmed steps only."""
        stay = self._stays[request.request_id]
        return stay.tokens_at_join + self.ticks_completed - stay.joined_tick

    def _is_current(self, stay: _Stay) -> bool:
        return self._stays.get(stay.request.request_id) is stay

    def _begin_again(self, old: _Stay, num_more: int) -> None:
        """Replace a stay, so that what the calendars say of it is void, by one of ``num_more`` tokens more."""
        stay = _Stay(old.request, old.joined_tick, old.tokens_at_join + num_more, old.outputs_at_join + num_more)
        self._stays[stay.request.request_id] = stay
        last_tick = stay.joined_tick + stay.request.max_tokens - stay.outputs_at_join - 1
        # Else this was its last step: the caller ends the request, and nothing may become due for it.
        if last_tick >= self.ticks_completed:
            self._note(self._end_due, self._end_ticks, last_tick, stay)
            self._schedule_block(stay)

    def _schedule_block(self, stay: _Stay) -> None:
        # A tick that has passed is possible where a stay begins again behind several tokens: then the block is due now.
        due = stay.joined_tick + stay.request.num_slots - stay.tokens_at_join
        last_tick = stay.joined_tick + stay.request.max_tokens - stay.outputs_at_join - 1
        # No block for a token that the answer cannot have.
        if due <= last_tick:
            self._note(self._block_due, self._block_ticks, max(due, self.ticks_scheduled), stay)

    @staticmethod
    def _note(calendar: dict[int, list[_Stay]], ticks: list[int], tick: int, stay: _Stay) -> None:
        entries = calendar.get(tick)
        if entries is None:
            calendar[tick] = [stay]
            heappush(ticks, tick)
        else:
            entries.append(stay)
