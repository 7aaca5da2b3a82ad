"""Guesses what comes next in a sequence: what came next when its end was there before.

An answer that quotes its prompt, edits code or repeats itself has been written already, in part. The longest earlier
match of the sequence's end is followed until it fails (prompt lookup; suffix decoding of arXiv 2411.04975 is the same
idea over many requests). No model, no weights, no index: a look-up scans the tokens, a few microseconds for thousands.

How often a match of a given length goes on is counted for every token of an answer, guessed tokens that nobody computed
included: measuring costs nothing, so nothing has to be tried to know that it does not pay.

In a wide batch the look-ups themselves cost a part of the step, and guesses bring little. There, an answer in which
nothing is found that goes on is looked up more and more rarely, until a run of right guesses.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FEWEST = 2  # tokens that a match has at least
FEWEST_OF_MANY = 5  # where there are more than MAX_CANDIDATES matches, and some that are so long
MAX_CANDIDATES = 8  # matches that are compared, the latest ones
MAX_MATCH = 24  # how far back they are compared
LENGTHS = 16  # match lengths that are told apart; longer ones count as this
PRIOR = 4.0  # weight of all answers of the worker in what is expected of one
SHARED_PRIOR = 16.0
FORGET = 0.998  # of the worker's counts, per guess
LEAST_CHANCE = 0.02
LIKELY = 0.5  # the chance of a guess from which on the answer is looked up at every token
RUN = 3  # right guesses in a row after which it is, too
MAX_PAUSE = 32  # tokens

Tokens = Sequence[int] | npt.NDArray[np.int32]

_BACK = np.arange(MAX_MATCH)


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
        """Probabilities that the first 1, 2, ... ``count`` tokens after a match of this length are all right. Ends
        early where they hardly are."""
        chances: list[float] = []
        chance = 1.0
        for more in range(count):
            chance *= self.chance(length + more)
            if chance < LEAST_CHANCE:
                break
            chances.append(round(chance, 3))
        return chances


class NgramProposer:
    """The tokens of one sequence, and the place where its end was before."""

    def __init__(self, token_ids: Tokens, shared: MatchCounts) -> None:
        self._tokens = np.empty(max(64, 2 * len(token_ids)), dtype=np.int32)
        self._num_tokens = 0
        self._counts = MatchCounts(shared)
        self._source = 0  # the place whose token is guessed to come next (0: none)
        self._length = 0  # of the match before it
        self._run = 0  # right guesses in a row
        self._num_quiet = 0  # look-ups since the last run
        self._append(token_ids)
        self._search()

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence."""
        return self._num_tokens

    def extend(self, token_ids: Tokens) -> None:
        """These came next."""
        self._num_quiet += 1
        first = self._num_tokens
        self._append(token_ids)
        for place in range(first, self._num_tokens):
            if not self._source:
                break
            is_hit = bool(self._tokens[self._source] == self._tokens[place])
            self._counts.add(self._length, is_hit)
            self._source, self._length = (self._source + 1, self._length + 1) if is_hit else (0, 0)
            self._run = self._run + 1 if is_hit else 0
            if self._run >= RUN:
                self._num_quiet = 0
        if not self._source:
            self._search()

    def pause(self, num_streams: int) -> int:
        """Tokens that may come before the next look-up, beside ``num_streams`` streams: 1 while something likely is
        guessed."""
        longest = min(MAX_PAUSE, num_streams, 1 << min(self._num_quiet, 5))
        if longest > 1 and self._source and self._counts.chance(self._length) >= LIKELY:
            return 1
        return longest

    def guess(self, limit: int) -> tuple[list[int], list[float]]:
        """At most ``limit`` draft tokens, and for each the probability that it and all before it are right."""
        if not self._source:
            return [], []
        chances = self._counts.chances(self._length, limit)
        known = self._tokens[self._source : min(self._num_tokens, self._source + len(chances))].tolist()
        period = self._num_tokens - self._source  # a match that reaches the end repeats itself
        return [known[place % period] for place in range(len(chances))], chances

    def _append(self, token_ids: Tokens) -> None:
        end = self._num_tokens + len(token_ids)
        if end > len(self._tokens):
            grown = np.empty(2 * end, dtype=np.int32)
            grown[: self._num_tokens] = self._tokens[: self._num_tokens]
            self._tokens = grown
        self._tokens[self._num_tokens : end] = token_ids
        self._num_tokens = end

    def _search(self) -> None:
        """Find the longest match of the end among the latest ones."""
        self._source = self._length = 0
        tokens, end = self._tokens, self._num_tokens
        if end <= FEWEST:
            return
        newest = (tokens[1 : end - 1] == tokens[end - 1]).nonzero()[0]  # places of the first token of each pair
        places = newest[tokens[newest] == tokens[end - 2]]
        if len(places) > MAX_CANDIDATES:
            long = places[places >= FEWEST_OF_MANY - FEWEST]
            for back in range(1, FEWEST_OF_MANY - FEWEST + 1):
                long = long[tokens[long - back] == tokens[end - FEWEST - back]]
            places = (long if len(long) else places)[-MAX_CANDIDATES:]
        if not len(places):
            return
        places = places[::-1] + FEWEST  # behind the match, the latest first
        at = places[:, None] - 1 - _BACK
        is_same = (tokens[at] == tokens[end - 1 - _BACK]) & (at >= 0)  # beyond the front: some other token, left out
        lengths = np.where(is_same.all(axis=1), MAX_MATCH, is_same.argmin(axis=1))
        best = int(lengths.argmax())
        self._source, self._length = int(places[best]), int(lengths[best])
