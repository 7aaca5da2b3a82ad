"""Grammars in a worker: compiled in a thread of low priority, and the state of each answer that follows one.

Owns the tokenizer as llguidance sees it. Compiling gives up the GIL, so steps go on meanwhile; the front end has tried
every grammar before (serving/answers/grammar), which bounds how long it takes. Needs the extra [structured].
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance

from diptych.control.errors import ConstraintError, GrammarLimitError
from diptych.control.request import SamplingParams
from diptych.runtime.device.thread_limits import lower_priority

MAX_COMPILED = 128
LONG = 1 << 14  # bytes of a grammar from which on it may take more than some milliseconds to compile
NICENESS = 10
LONG_NICENESS = 19

# Of the computation of a single mask: what takes more than a millisecond or two ends its own request. Masks of usual
# schemas take less than a tenth of it.
MASK_LIMITS = llguidance.LLParserLimits(step_lexer_fuel=30_000, step_max_items=8_000, verbose_errors=False)


class Grammars:
    """The grammars of one model. ``on_compiled`` is called in another thread whenever a grammar is ready."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self.on_compiled: Callable[[], None] = lambda: None
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None
        )
        self._compiled: OrderedDict[str, Future[llguidance.LLMatcher]] = OrderedDict()
        self._pool = ThreadPoolExecutor(1, "grammars", lower_priority, (NICENESS,))
        self._pool_of_long = ThreadPoolExecutor(1, "long-grammars", lower_priority, (LONG_NICENESS,))

    def prepare(self, text: str) -> bool:
        """Begin to compile a grammar. Returns whether it is ready, or has failed."""
        future = self._compiled.get(text)
        if future is None:
            while len(self._compiled) >= MAX_COMPILED:
                self._compiled.popitem(last=False)
            future = self._compiled[text] = self._pool_for(text).submit(self._compile, text)
            future.add_done_callback(lambda _: self.on_compiled())
        else:
            self._compiled.move_to_end(text)
        return future.done()

    def constraint(self, text: str, *, forces: bool = True) -> "GrammarConstraint":
        """The state of an answer that begins; waits until the grammar is compiled. forces: tokens that are certain are
        not sampled. Raises ConstraintError."""
        self.prepare(text)
        try:
            matcher = self._compiled[text].result()
        except ConstraintError:
            raise
        except Exception as failure:  # no word about the grammar: the next request tries it again
            del self._compiled[text]
            raise ConstraintError(f"the grammar was not compiled: {failure!r}"[:300]) from failure
        return GrammarConstraint(matcher.deep_copy(), self.eos_token_ids, forces=forces)

    def constraint_of(self, sampling: SamplingParams) -> "GrammarConstraint":
        """The same as a request wants it. Where log probabilities are wanted, every token is sampled."""
        return self.constraint(sampling.grammar, forces=sampling.forces_tokens and sampling.logprobs is None)

    def _pool_for(self, text: str) -> ThreadPoolExecutor:
        """Long grammars hold up neither the others nor the streams."""
        return self._pool if len(text) < LONG else self._pool_of_long

    def _compile(self, text: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=MASK_LIMITS)
        if matcher.is_error():
            raise ConstraintError(f"the grammar does not compile: {matcher.get_error()[:500]}")
        matcher.compute_bitmask()  # the first mask takes the longest; where it fails, so does each answer
        return matcher


class GrammarConstraint:
    """The TokenConstraint of one answer: a matcher, and the ends of sequence that it has accepted."""

    def __init__(self, matcher: llguidance.LLMatcher, eos_token_ids: frozenset[int], *, forces: bool) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._forces = forces
        self._num_ends = 0  # accepted ends of sequence; the matcher does not know of them
        self._forced: list[int] | None = None

    def forced(self, limit: int) -> Sequence[int]:
        if not self._forces or self._num_ends:
            return ()
        if self._forced is None:
            self._forced = self._matcher.compute_ff_tokens()
        return self._forced[:limit]

    def allowed(self) -> bytes | None:
        mask = self._matcher.compute_bitmask()
        self._check()
        return mask

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        if self._num_ends:
            return 0
        return self._matcher.validate_tokens(list(token_ids))

    def accept(self, token_ids: Sequence[int]) -> None:
        forced, self._forced = self._forced, None
        consumed = [token for token in token_ids if token not in self._eos_token_ids]
        self._num_ends += len(token_ids) - len(consumed)
        if consumed and not self._matcher.consume_tokens(consumed):
            self._check()
            raise ConstraintError("a token that its grammar does not allow")
        if forced and len(forced) > len(consumed) and forced[: len(consumed)] == consumed == list(token_ids):
            self._forced = forced[len(consumed) :]

    def rollback(self, num_tokens: int) -> None:
        self._forced = None
        num_ends = min(num_tokens, self._num_ends)
        self._num_ends -= num_ends
        if num_tokens > num_ends and not self._matcher.rollback(num_tokens - num_ends):
            self._check()
            raise ConstraintError("the grammar cannot go back")

    def _check(self) -> None:
        if self._matcher.is_error():
            said = self._matcher.get_error().split("<state>")[0].removesuffix("<non-verbose/>").strip()
            raise GrammarLimitError(f"the grammar cannot go on: {said[:300]}")
