"""Guesses what comes next in a sequence: what came next when its end was there before.

An answer that quotes its prompt, edits code or repeats itself has been written already, in part. The longest earlier
match of the sequence's end is followed until it fails (prompt lookup; suffix decoding of arXiv 2411.04975 is the same
idea over many requests). No model, no weights: an index of a few entries per token.

How often a match of a given length goes on is counted for every token of an answer, guessed tokens that nobody computed
included: measuring costs nothing, so nothing has to be tried to know that it does not pay.

In a wide batch the look-ups themselves cost a part of the step, and guesses bring little. There, an answer in which
nothing is found that goes on is looked up more and more rarely, until a run of right guesses.
"""

from collections.abc import Sequence

SIZES = (5, 2)  # tokens of the ends that are looked up, the longer first
BITS = 24  # of a token in the code of an end, which is a single integer
MAX_CANDIDATES = 8  # earlier places that are compared, the latest first
MAX_MATCH = 24  # how far back two places are compared
INDEXED_AT_ONCE = 2048  # tokens of a long prompt that are indexed per step: 1 ms
LENGTHS = 16  # match lengths that are told apart; longer ones count as this
PRIOR = 4.0  # weight of all answers of the worker in what is expected of one
SHARED_PRIOR = 16.0
FORGET = 0.998  # of the worker's counts, per guess
LEAST_CHANCE = 0.02
RUN = 3  # right guesses in a row after which an answer is looked up at every token
LOOKS = 2  # without such a run, after which the pause between two look-ups is a token longer
MAX_PAUSE = 16  # tokens
STREAMS_PER_TOKEN = 2  # of a batch, for which the pause may be a token longer: none where one stream decodes

_LONG_MASK, _SHORT_MASK = ((1 << BITS * size) - 1 for size in SIZES)


class MatchCounts:
    """How often a match of each length went on for one more token. shared: those of all answers, where these are of
    one."""

    __slots__ = ("_hits", "_shared", "_tries")

    def __init__(self, shared: "MatchCounts | None" = None) -> None:
        self._shared = shared
        self._hits = [0.0] * (LENGTHS + 1)
        self._tries = [0.0] * (LENGTHS + 1)

    def add(self, length: int, is_hit: bool) -> None:
        """A match of this length went on, or not."""
        length = min(length, LENGTHS)
        if self._shared is not None:
            self._shared.add(length, is_hit)
        else:
            self._hits[length] *= FORGET
            self._tries[length] *= FORGET
        self._hits[length] += is_hit
        self._tries[length] += 1.0

    def chance(self, length: int) -> float:
        """The probability that a match of this length goes on."""
        length = min(length, LENGTHS)
        if self._shared is None:
            prior = length / (length + 3.0)
            return (self._hits[length] + SHARED_PRIOR * prior) / (self._tries[length] + SHARED_PRIOR)
        prior = self._shared.chance(length)
        return (self._hits[length] + PRIOR * prior) / (self._tries[length] + PRIOR)

    def chances(self, length: int, count: int) -> list[float]:
        """Of the first 1, 2, ... ``count`` tokens after a match of this length: that all of them are right. Ends early
        where they hardly are."""
        chances: list[float] = []
        chance = 1.0
        for more in range(count):
            chance *= self.chance(length + more)
            if chance < LEAST_CHANCE:
                break
            chances.append(round(chance, 3))
        return chances


class SuffixLookup:
    """The tokens of one sequence, and where their n-grams were."""

    def __init__(self, token_ids: Sequence[int], shared: MatchCounts) -> None:
        self._tokens = list(token_ids)
        self._counts = MatchCounts(shared)
        self._latest: dict[int, dict[int, int]] = {size: {} for size in SIZES}  # code -> the latest place behind it
        self._before: dict[int, list[int]] = {size: [] for size in SIZES}  # by place: the one before it (0: none)
        self._code = 0  # of the tokens before the next place that is indexed
        self._source = 0  # the place whose token is guessed to come next (0: none)
        self._length = 0  # of the match before it
        self._run = 0  # right guesses in a row
        self._num_quiet = 0  # look-ups since the last run
        self._index()
        self._search()

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence."""
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """These came next."""
        self._num_quiet += 1
        for token in token_ids:
            if self._source:
                is_hit = self._tokens[self._source] == token
                self._counts.add(self._length, is_hit)
                self._source, self._length = (self._source + 1, self._length + 1) if is_hit else (0, 0)
                self._run = self._run + 1 if is_hit else 0
                if self._run >= RUN:
                    self._num_quiet = 0
            self._tokens.append(token)
        self._index()
        if not self._source:
            self._search()

    def pause(self, num_streams: int) -> int:
        """Tokens that may come before the next look-up, beside so many streams: 1 while something is guessed."""
        longest = min(MAX_PAUSE, 1 + num_streams // STREAMS_PER_TOKEN)
        return 1 if self._source else min(longest, 1 + self._num_quiet // LOOKS)

    def guess(self, limit: int) -> tuple[list[int], list[float]]:
        """At most ``limit`` tokens that may come next, and the probabilities that the first so many are right."""
        if not self._source:
            return [], []
        chances = self._counts.chances(self._length, limit)
        tokens, source = self._tokens, self._source
        period = len(tokens) - source  # a match that reaches the end repeats itself
        return [tokens[source + place % period] for place in range(len(chances))], chances

    def _index(self) -> None:
        """Note where n-grams are. The end itself is not indexed before something follows it."""
        tokens, code = self._tokens, self._code
        (long, short), (before_long, before_short) = self._latest.values(), self._before.values()
        first = len(before_long)
        for place in range(first, min(len(tokens), first + INDEXED_AT_ONCE)):
            if place:
                code = (code << BITS | tokens[place - 1]) & _LONG_MASK
            end = code & _SHORT_MASK
            before_long.append(long.get(code, 0))
            before_short.append(short.get(end, 0))
            if place >= SIZES[0]:
                long[code] = place
            if place >= SIZES[1]:
                short[end] = place
        self._code = code

    def _search(self) -> None:
        """Find the longest match of the end."""
        tokens, best, longest = self._tokens, 0, 0
        for size in SIZES:
            if len(tokens) < size:
                continue
            code = 0
            for token in tokens[-size:]:
                code = code << BITS | token
            place = self._latest[size].get(code, 0)
            for _ in range(MAX_CANDIDATES):
                if not place:
                    break
                if (length := self._match(place)) > longest:
                    best, longest = place, length
                place = self._before[size][place]
            if best:
                break
        self._source, self._length = best, longest

    def _match(self, place: int) -> int:
        """How many tokens before ``place`` are those before the end."""
        tokens, length = self._tokens, 0
        end = len(tokens)
        while length < min(place, MAX_MATCH) and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length
