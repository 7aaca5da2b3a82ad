"""The load of an engine: the requests that it has of ours, its own gauges, and what its time costs, as learned.

Where an engine reports its steps, the same model of their times is fitted to them as in workers of ours. Else a prompt
token's price is learned from how long prompts took while any was waited for; a token's, from the gaps between tokens. A
reply that comes whole shows neither: ReplyTimes fits both, and its prompt is taken to be computed when the engine
has counted as many first tokens as there were requests before it. Gauges that are due and do not come mean that the
engine is busy: it counts as saturated until they do. Asks nothing, waits for nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from diptych.control.engine.reports import EngineStats, LoadReport
from diptych.control.engine.scheduler.step_time import StepTimeModel
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.control.step import StepFeatures
from diptych.timeline.records import split_attempt_id

FIRST_TOKEN_PRICE_NS = 100_000.0  # of a prompt token, before any was seen: 10,000 a second
FIRST_GAP_NS = 20.0 * NS_PER_MS
PRIOR_TOKENS = 2048.0  # that the first price counts as
MEMORY = 0.98  # of what was learned before, at each request
GROWING_SHARE = 0.2  # of a step's time is taken to grow with the batch: assumed, not measured
MOST_EARLY = 64  # first tokens that may have been seen here before the engine's count has them
OTHERS = 20.0  # replies of all engines that count beside an engine's own
PRIOR_PROMPT, PRIOR_ANSWER = 256.0, 4.0  # tokens of the two replies that the prior counts as
LEAST_SHARE = 0.01  # of a price assumed, that is believed
SATURATED_NS = 60 * NS_PER_S  # of work, at an engine that does not say how busy it is


@dataclass(slots=True)
class ReplySums:
    """Sums over recent replies: how many, and the sums of squares and products of prompt tokens, answer tokens and
    time."""

    count: float = 0.0
    prompt2: float = 0.0
    both: float = 0.0
    answer2: float = 0.0
    prompt_ns: float = 0.0
    answer_ns: float = 0.0

    def add(self, num_prompt: int, num_answer: int, duration_ns: int) -> None:
        """A reply."""
        self.count = self.count * MEMORY + 1
        self.prompt2 = self.prompt2 * MEMORY + num_prompt * num_prompt
        self.both = self.both * MEMORY + num_prompt * num_answer
        self.answer2 = self.answer2 * MEMORY + num_answer * num_answer
        self.prompt_ns = self.prompt_ns * MEMORY + num_prompt * duration_ns
        self.answer_ns = self.answer_ns * MEMORY + num_answer * duration_ns


class ReplyTimes:
    """token_ns, gap_ns: of one engine, assumed at first, then fitted. all_sums: of all engines."""

    def __init__(self, token_ns: float, gap_ns: float, all_sums: ReplySums) -> None:
        self.token_ns, self.gap_ns = token_ns, gap_ns
        self._least = LEAST_SHARE * token_ns, LEAST_SHARE * gap_ns
        self._prior = token_ns * PRIOR_PROMPT**2, gap_ns * PRIOR_ANSWER**2
        self._own, self._all = ReplySums(), all_sums

    def observe(self, num_prompt: int, num_answer: int, duration_ns: int) -> None:
        """Learn from a reply that took ``duration_ns`` and computed ``num_prompt`` prompt tokens."""
        own, every = self._own, self._all
        own.add(num_prompt, num_answer, duration_ns)
        every.add(num_prompt, num_answer, duration_ns)
        share = OTHERS / max(OTHERS, every.count)
        both = own.both + share * every.both
        prompt2 = own.prompt2 + share * every.prompt2 + PRIOR_PROMPT**2
        answer2 = own.answer2 + share * every.answer2 + PRIOR_ANSWER**2
        prompt_ns = own.prompt_ns + share * every.prompt_ns + self._prior[0]
        answer_ns = own.answer_ns + share * every.answer_ns + self._prior[1]
        determinant = prompt2 * answer2 - both * both  # above 0: the prior's two replies are not alike
        token_ns = (prompt_ns * answer2 - answer_ns * both) / determinant
        gap_ns = (answer_ns * prompt2 - prompt_ns * both) / determinant
        if gap_ns < self._least[1]:
            gap_ns = self._least[1]
            token_ns = (prompt_ns - gap_ns * both) / prompt2
        elif token_ns < self._least[0]:
            gap_ns = (answer_ns - self._least[0] * both) / answer2
        self.token_ns, self.gap_ns = max(self._least[0], token_ns), max(self._least[1], gap_ns)


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """What an engine says of itself. kv_usage: 0 to 1 (None: it does not say). num_first_tokens: of all requests that
    it has ever had (None: it does not say)."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float | None = None
    num_preemptions: int = 0
    num_first_tokens: int | None = None


@dataclass(slots=True)
class _Held:
    """A request of ours at the engine."""

    num_tokens: int  # of its prompt
    begun_ns: int
    num_computed: int  # prompt tokens of other whole replies, before it was sent
    is_whole: bool  # its reply comes at once
    least_ns: int  # when its prompt is computed at the earliest
    is_computed: bool = False  # its prompt is
    num_output_tokens: int = 0


@dataclass(slots=True)
class LearnedPrices:
    """What the engine costs that has last reported what it has learned: assumed of an engine that has learned nothing,
    so that a new one is neither shunned nor flooded. Names as in LoadReport. replies: whole ones, of all engines."""

    token_ns: float = FIRST_TOKEN_PRICE_NS
    pair_ns: float = 0.0
    fixed_ns: float = FIRST_GAP_NS * (1 - GROWING_SHARE)
    sequence_ns: float = FIRST_GAP_NS * GROWING_SHARE
    context_ns: float = 0.0
    replies: ReplySums = field(default_factory=ReplySums)


class EngineLoad:
    """num_blocks, block_size: of its KV cache. gauges_due_ns: after which gauges that do not come are stale (0: it has
    none). shared: of all engines of the front."""

    def __init__(
        self, num_blocks: int, block_size: int, gauges_due_ns: int, now: int, shared: LearnedPrices | None = None
    ) -> None:
        self._shared = shared or LearnedPrices()
        self._has_learned = False
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._due_ns = gauges_due_ns
        self._gauges_ns = now
        self._gauges = EngineGauges()
        self._held: dict[str, _Held] = {}
        self._num_pending = 0  # streams without a first token
        self._whole = ReplyTimes(FIRST_TOKEN_PRICE_NS, FIRST_GAP_NS, self._shared.replies)
        self._num_computed = 0  # prompt tokens of whole replies
        self._num_first_tokens: int | None = None  # by the engine's count
        self._num_seen = 0  # first tokens that were seen here, or must have been, since it was asked
        self._busy_since_ns = 0
        self._busy_ns = FIRST_TOKEN_PRICE_NS * PRIOR_TOKENS
        self._computed = PRIOR_TOKENS
        self._gap_ns = FIRST_GAP_NS
        self._mean_prompt = 512.0
        self._queried = 0
        self._hit = 0
        self._refused_ns = 0
        self._steps = StepTimeModel()
        self._num_decode_steps = 0
        self._said_share = 1.0  # tokens that the engine counted, for each of our estimate

    @property
    def num_held(self) -> int:
        """Requests of ours."""
        return len(self._held)

    @property
    def token_ns(self) -> float:
        """Price of a prompt token that is computed, as the front counts them, in nanoseconds."""
        if not (self._has_learned or self._steps.is_trusted):
            return self._shared.token_ns
        if self._steps.is_trusted:
            return self._steps.coefficients[1] * self._said_share
        return self._busy_ns / self._computed

    def on_sent(self, attempt_id: str, num_tokens: int, now: int, *, is_whole: bool = False) -> None:
        """The engine gets a request. is_whole: its reply comes at once, when all of it is there."""
        work_ns = int(num_tokens * (1 - self._hit / max(1, self._queried)) * self.token_ns)
        self._held[attempt_id] = _Held(num_tokens, now, self._num_computed, is_whole, now + work_ns)
        if not is_whole:
            if not self._num_pending:
                self._busy_since_ns = now
            self._num_pending += 1
        self._mean_prompt += (num_tokens - self._mean_prompt) / 32

    def on_first_token(self, attempt_id: str, now: int) -> None:
        """Take in that an attempt's prompt is computed."""
        held = self._held.get(attempt_id)
        if held is not None and not (held.is_computed or held.is_whole):
            held.is_computed = True
            self._done_waiting(now)
            self._num_seen += 1

    def on_gaps(self, attempt_id: str, gaps: Mapping[float, int], num_tokens: int) -> None:
        """Tokens came. gaps: seconds since those before -> how often."""
        held = self._held.get(attempt_id)
        if held is not None:
            held.num_output_tokens += num_tokens
            mean_ns = sum(gap_s * count for gap_s, count in gaps.items()) * NS_PER_S / num_tokens
            self._gap_ns += (mean_ns - self._gap_ns) * min(1.0, sum(gaps.values()) / 64)

    def on_over(self, attempt_id: str, now: int) -> None:
        """The engine has it no longer."""
        held = self._held.pop(attempt_id, None)
        if held is None or held.is_computed:
            return
        if held.is_whole:
            self._num_seen += 1
        else:
            self._done_waiting(now)

    def on_whole(self, attempt_id: str, num_computed: int, num_tokens: int, now: int) -> None:
        """A whole reply came, before ``on_over``: prompt tokens that were computed, and tokens of the answer. It waited
        for all prompts that were computed meanwhile, and for its own tokens."""
        held = self._held.get(attempt_id)
        if held is None:
            return
        self._num_computed += num_computed
        self._whole.observe(self._num_computed - held.num_computed, num_tokens, now - held.begun_ns)
        if not self._num_pending:  # else the streams' own wait is measured
            self._busy_ns += int(num_computed * self._whole.token_ns)
        self._gap_ns += (self._whole.gap_ns - self._gap_ns) * min(1.0, num_tokens / 64)

    def on_prompt(self, num_tokens: int, num_cached: int | None, num_said: int = 0) -> None:
        """Record a prefill of ``num_tokens`` tokens, of which ``num_cached`` were cache hits (None: unknown). num_said:
        the engine's own count of all its prompt tokens (0: unknown)."""
        self._has_learned = True
        if num_said:
            self._said_share += (num_said / num_tokens - self._said_share) / 32
        if num_cached is not None:
            self._queried += num_tokens
            self._hit += num_cached
        self._busy_ns *= MEMORY
        self._computed = self._computed * MEMORY + max(1, num_tokens - (num_cached or 0))

    def on_step(self, features: StepFeatures, duration_ns: int) -> None:
        """The engine has reported a step."""
        self._num_decode_steps += features.prefill_tokens == 0
        if self._steps.wants(features, self._num_decode_steps):
            self._steps.observe(features, duration_ns)

    def on_gauges(self, gauges: EngineGauges, now: int) -> None:
        """The engine's own figures came."""
        self._gauges, self._gauges_ns = gauges, now
        count, before = gauges.num_first_tokens, self._num_first_tokens
        self._num_first_tokens = count
        if count is None or before is None or count < before:
            self._num_seen = 0
            return
        unseen = count - before - self._num_seen
        self._num_seen = min(MOST_EARLY, max(0, -unseen))
        for held in self._held.values():  # in the order in which they were sent
            if unseen > 0 and held.is_whole and not held.is_computed and held.least_ns <= now:
                held.is_computed = True
                unseen -= 1

    def on_refused(self, now: int) -> None:
        """Take in that the engine takes no more for the moment."""
        self._refused_ns = now

    def is_saturated(self, now: int) -> bool:
        """Whether it refused within the last second, or its gauges are stale."""
        is_stale = self._due_ns > 0 and now - self._gauges_ns > self._due_ns
        return is_stale or (self._refused_ns > 0 and now - self._refused_ns < NS_PER_S)

    def report(self, now: int) -> LoadReport:
        """The load for the router: what is there besides our own requests, which it counts itself."""
        held = list(self._held.values())
        computed = [name for name, known in self._held.items() if known.is_whole and known.is_computed]
        own_blocks = sum(-(-(known.num_tokens + known.num_output_tokens) // self._block_size) for known in held)
        prices, gauges = self._prices(), self._gauges
        token_ns = prices.token_ns
        used = max(0, int((gauges.kv_usage or 0.0) * self._num_blocks) - own_blocks)
        pending = self._num_pending + sum(known.is_whole and not known.is_computed for known in held)
        foreign = max(0, gauges.num_waiting - pending)
        backlog_ns = int(foreign * self._mean_prompt * token_ns)
        if self.is_saturated(now):
            backlog_ns, used = backlog_ns + SATURATED_NS, self._num_blocks
        return LoadReport(
            time_ns=now,
            backlog_ns=backlog_ns,
            num_blocks=self._num_blocks,
            used_blocks=min(used, self._num_blocks),
            token_ns=token_ns,
            pair_ns=prices.pair_ns,
            fixed_ns=prices.fixed_ns,
            sequence_ns=prices.sequence_ns,
            context_ns=prices.context_ns,
            output_tokens=sum(known.num_output_tokens for known in held),
            computed=tuple(split_attempt_id(name)[0] for name in computed),
        )

    def _prices(self) -> LearnedPrices:
        """The engine's own prices, which others may assume from now on; or theirs, while it has none."""
        shared = self._shared
        if self._steps.is_trusted:
            fixed_ns, _, pair_ns, sequence_ns, context_ns = self._steps.coefficients
            shared.pair_ns, shared.context_ns = pair_ns * self._said_share**2, context_ns
            shared.fixed_ns, shared.sequence_ns = fixed_ns, sequence_ns
        elif self._has_learned:
            growing_ns = self._gap_ns * GROWING_SHARE
            shared.pair_ns = shared.context_ns = 0.0
            shared.fixed_ns = self._gap_ns - growing_ns
            shared.sequence_ns = growing_ns / max(1, len(self._held) - self._num_pending)
        shared.token_ns = self.token_ns
        return shared

    def stats(self) -> EngineStats:
        """The engine's figures for metrics where it reports them, else those of our own requests there."""
        running = max(self._gauges.num_running, len(self._held) - self._gauges.num_waiting)
        prefilling = min(self._num_pending, running)  # (of whole replies it is not known)
        return EngineStats(
            num_waiting=self._gauges.num_waiting,
            num_prefilling=prefilling,
            num_decoding=max(0, running - prefilling),
            kv_usage=self._gauges.kv_usage or 0.0,
            prefix_queried_tokens=self._queried,
            prefix_hit_tokens=self._hit,
            num_preemptions=self._gauges.num_preemptions,
            step_time_error=self._steps.relative_error if self._steps.is_trusted else 0.0,
            step_time_coefficients=self._steps.coefficients if self._steps.is_trusted else (),
        )

    def _done_waiting(self, now: int) -> None:
        """One that was pending is not any more."""
        self._busy_ns += now - self._busy_since_ns
        self._busy_since_ns = now
        self._num_pending -= 1


def gauges_of(values: Mapping[str, float]) -> EngineGauges:
    """Gauges from the values read of a page; names are the fields of EngineGauges."""
    usage = values.get("kv_usage")
    return EngineGauges(
        num_running=int(values.get("num_running", 0)),
        num_waiting=int(values.get("num_waiting", 0)),
        kv_usage=None if usage is None else min(1.0, max(0.0, usage)),
        num_preemptions=int(values.get("num_preemptions", 0)),
        num_first_tokens=None if "num_first_tokens" not in values else int(values["num_first_tokens"]),
    )


# of older replies, at each new one
