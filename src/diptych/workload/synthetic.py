"""Requests drawn from a description: classes, lengths, shared prefixes and conversations, one at a time.

Owns the drawing. Every noun draws from a stream of its own, so that a change of lengths does not move the arrivals.
Holds no list of requests: only the conversations that are under way. Blocks of text that requests share are numbered: a
system prompt's negative, a conversation's positive, so that they never meet.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, islice

from diptych.control.slo import NS_PER_MS, NS_PER_S, Slo
from diptych.workload.arrivals import arrival_times
from diptych.workload.description import ClassConfig, PrefixConfig, WorkloadConfig
from diptych.workload.distributions import Stream, exp, log
from diptych.workload.lengths import LengthTables, PairSampler, pair_sampler
from diptych.workload.spec import RequestSpec

Chooser = Callable[[], tuple[int, ...]]
BLOCKS_PER_TEXT = 2**24
PROMPTS_PER_CLASS = 2**20


def prefix_chooser(config: PrefixConfig, class_index: int, block_tokens: int, stream: Stream) -> Chooser:
    """Draws a system prompt: the identities of its full blocks of ``block_tokens`` tokens (the rest is not shared)."""
    count, num_blocks = config.prompts, config.tokens // block_tokens
    if count == 0:
        return lambda: ()
    texts: dict[int, tuple[int, ...]] = {}

    def identities(prompt: int) -> tuple[int, ...]:
        if prompt not in texts:
            base = (class_index * PROMPTS_PER_CLASS + prompt) * BLOCKS_PER_TEXT
            texts[prompt] = tuple(-1 - base - block for block in range(num_blocks))
        return texts[prompt]

    uniform = stream.uniform
    if config.choice == "uniform":
        return lambda: identities(int(uniform() * count))
    limits = list(accumulate(exp(-config.exponent * log(rank)) for rank in range(1, count + 1)))
    return lambda: identities(min(bisect_right(limits, uniform() * limits[-1]), count - 1))


def conversation_ids(system: tuple[int, ...], session: int, num_tokens: int, block_tokens: int) -> tuple[int, ...]:
    """Identities of the full blocks in the first ``num_tokens`` tokens of a conversation after a system prompt."""
    base = (session + 1) * BLOCKS_PER_TEXT
    return system + tuple(range(base + len(system), base + num_tokens // block_tokens))


DEFAULT_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class RequestClass:
    """One class, ready to draw from."""

    kind: str
    priority: int
    slo: Slo | None
    patience_ns: int | None
    lengths: PairSampler
    prefix: Chooser
    prefix_tokens: int
    service_class: str


class RequestSource:
    """Draws classes and their lengths in the order of arrival."""

    def __init__(self, config: WorkloadConfig, seed: int, tables: LengthTables) -> None:
        self._config = config
        mix = config.classes or (ClassConfig(kind=""),)
        self._classes = [self._class(index, class_config, seed, tables) for index, class_config in enumerate(mix)]
        self._limits = list(accumulate(class_config.share for class_config in mix))
        self._uniform = Stream(seed, "classes").uniform

    def pick(self) -> RequestClass:
        """The class of the next request or conversation."""
        if len(self._classes) == 1:
            return self._classes[0]
        index = bisect_right(self._limits, self._uniform() * self._limits[-1])
        return self._classes[min(index, len(self._classes) - 1)]

    def _class(self, index: int, class_config: ClassConfig, seed: int, tables: LengthTables) -> RequestClass:
        config = self._config
        prefix = class_config.prefix or config.prefix
        return RequestClass(
            class_config.kind,
            class_config.priority,
            (class_config.slo or config.slo).to_slo(),
            None if class_config.patience_s is None else round(class_config.patience_s * NS_PER_S),
            pair_sampler(class_config.lengths or config.lengths, tables, Stream(seed, f"lengths/{index}")),
            prefix_chooser(prefix, index, config.hash_block_tokens, Stream(seed, f"prefixes/{index}")),
            prefix.tokens if prefix.prompts else 0,
            class_config.service_class,
        )


class Conversation:
    """One conversation; turn after turn its prompt is all that was said before and a new prompt."""

    __slots__ = ("_config", "_context", "_drawn", "_is_single", "_session", "_system", "_turns_left", "chosen")

    def __init__(self, config: WorkloadConfig, session: int, chosen: RequestClass, num_turns: int) -> None:
        self.chosen = chosen
        self._config = config
        self._session = session
        self._system = chosen.prefix()
        self._context = chosen.prefix_tokens  # tokens said so far
        self._turns_left = num_turns
        self._drawn = chosen.lengths()
        self._is_single = config.sessions.max_turns == 1

    def next_turn(self, arrival_ns: int) -> RequestSpec:
        """The request of the next turn; the caller has asked ``is_over``."""
        new_tokens, output = self._drawn
        prompt = self._context + new_tokens
        self._context = prompt + output
        self._turns_left -= 1
        if self._turns_left > 0:
            self._drawn = self.chosen.lengths()
        width = self._config.hash_block_tokens
        identities = self._system
        if not self._is_single:
            identities = conversation_ids(self._system, self._session, self._context, width)
        return RequestSpec(
            arrival_ns=arrival_ns,
            prompt_tokens=prompt,
            output_tokens=output,
            hash_ids=identities,
            hash_block_tokens=width,
            priority=self.chosen.priority,
            slo=self.chosen.slo,
            kind=self.chosen.kind,
            session=-1 if self._is_single else self._session,
            abort_after_ns=self.chosen.patience_ns,
            service_class=self.chosen.service_class,
        )

    @property
    def is_over(self) -> bool:
        """No turns left, or the next one would not fit in the context."""
        limit = self._config.sessions.max_context_tokens
        return self._turns_left == 0 or (limit is not None and self._context + sum(self._drawn) > limit)


class SyntheticWorkload:
    """An open loop. Nothing is kept between iterations but the tables of empirical lengths."""

    def __init__(self, config: WorkloadConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._num_requests = config.num_requests or DEFAULT_REQUESTS
        self._tables = LengthTables()
        RequestSource(config, seed, self._tables)  # reads the files, so that what is wrong shows here

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[RequestSpec]:
        source = RequestSource(self._config, self._seed, self._tables)
        endless = self._single(source) if self._config.sessions.max_turns == 1 else self._conversations(source)
        return islice(endless, self._num_requests)

    def _arrivals(self, thinning: float) -> Iterator[int]:
        config = self._config
        return arrival_times(config.arrivals, config.rate or 1.0, Stream(self._seed, "arrivals"), thinning=thinning)

    def _single(self, source: RequestSource) -> Iterator[RequestSpec]:
        width = self._config.hash_block_tokens
        pick = source.pick
        for arrival_ns in self._arrivals(1.0):
            chosen = pick()
            prompt, output = chosen.lengths()
            yield RequestSpec(
                arrival_ns=arrival_ns,
                prompt_tokens=chosen.prefix_tokens + prompt,
                output_tokens=output,
                hash_ids=chosen.prefix(),
                hash_block_tokens=width,
                priority=chosen.priority,
                slo=chosen.slo,
                kind=chosen.kind,
                abort_after_ns=chosen.patience_ns,
                service_class=chosen.service_class,
            )

    def _conversations(self, source: RequestSource) -> Iterator[RequestSpec]:
        """Turns of all conversations in order of arrival; ties: the older conversation first."""
        sessions = self._config.sessions
        draw = Stream(self._seed, "sessions")
        under_way: list[tuple[int, int, Conversation]] = []  # (time of the next turn, session, conversation)
        for session, start_ns in enumerate(self._arrivals(sessions.mean_turns)):
            while under_way and under_way[0][0] < start_ns:
                arrival_ns, number, conversation = heappop(under_way)
                spec = conversation.next_turn(arrival_ns)
                if not conversation.is_over:
                    pause = think_ns(sessions.think_s, sessions.random_think, draw)
                    answer = int(spec.output_tokens * sessions.token_ms * NS_PER_MS)
                    heappush(under_way, (arrival_ns + answer + pause, number, conversation))
                yield spec
            turns = draw.integer(sessions.min_turns, sessions.max_turns)
            heappush(under_way, (start_ns, session, Conversation(self._config, session, source.pick(), turns)))


def think_ns(mean_s: float, is_random: bool, draw: Stream) -> int:
    """Nanoseconds between an answer and the next question."""
    return int(mean_s * (draw.exponential() if is_random else 1.0) * NS_PER_S) if mean_s else 0
