"""How long answers will be, learned as requests end, from what is known of a request before its answer.

Requests belong to groups, each within its parent: all requests, those of a service class, of an octave of prompt sizes
in it, of a quarter of that octave, and families, which begin with the same 1, 2, 4, 8 ... blocks. A group estimates a
survival curve over bands of lengths. In band b, of those that came so far, the share that ends there is

    hazard(b) = (ended(b) + WEIGHT * hazard of the parent(b)) / (at risk(b) + WEIGHT)

which is the posterior mean under a beta process around the parent's curve (Hjort, Nonparametric Bayes estimators based
on beta processes in models for life history data, Annals of Statistics 18(3), 1990); WEIGHT is the credibility constant
of Buehlmann (Experience rating and credibility, ASTIN Bulletin 4(3), 1967). Without a parent and with WEIGHT 0 it is
the estimator of Kaplan and Meier (1958). An answer that was cut off, by its limit or by its client, was at risk up to
there and ended nowhere, so that it does not make answers look shorter than they are.

Old observations lose weight: half in HALF_LIFE observations of the same group. Observations take effect in batches, so
that a curve is a function of what has ended, and not of when somebody asked. Arithmetic is + - * / alone, the same on
every machine.

LengthErrorStats says how far off expected lengths are, beside the static expectation: what learning is worth.
"""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from diptych.control.class_hints import mypyc_attr

DEFAULT_TOKENS = 256  # the mean of all before any has ended
WEIGHT = 2.0  # of the parent's curve, in observations
HALF_LIFE = 1024  # observations
BATCH = 16  # observations that take effect together, at most; fewer while there are few
MAX_FAMILIES = 2048  # the least recently seen are forgotten
QUANTILE = 0.8  # of ``high``
LONGEST = 1 << 20  # tokens; longer answers count as this long
_GROWTH = 1 / (1 - 0.6931471805599453 / HALF_LIFE)  # of the weight of each observation over the one before: ln 2
_LARGE = 1e12


def band_of(num_tokens: int) -> int:
    """The band of a length: each length below 8 is one, and each octave from there on has four of equal width."""
    octave = num_tokens.bit_length() - 3
    return num_tokens if octave <= 0 else 4 * octave + (num_tokens >> octave)


def _begin_of(band: int) -> int:
    """The least length of a band."""
    octave = band // 4 - 1
    return band if octave <= 0 else (4 + band % 4) << octave


NUM_BANDS = band_of(LONGEST) + 1
_BEGINS = [_begin_of(band) for band in range(NUM_BANDS + 1)]


def _prior_hazards(first_band: int) -> "array[float]":
    """Pareto's distribution with shape 2 from a band on: whatever there is so far, as much again is expected."""
    shares = [_BEGINS[band] / _BEGINS[band + 1] for band in range(first_band, NUM_BANDS)]
    return array("d", [0.0] * first_band + [1 - share * share for share in shares])


_DEFAULT_BAND = band_of(DEFAULT_TOKENS // 2)
_PRIOR_HAZARDS = _prior_hazards(_DEFAULT_BAND)
_PRIOR_LENGTHS = array("d", [(_BEGINS[band] + _BEGINS[band + 1] - 1) / 2 for band in range(NUM_BANDS)])


class LengthGroup:
    """Requests that are expected to be alike: what ended in each band, and the curve that follows from it."""

    def __init__(self, parent: "LengthGroup | None") -> None:
        self.parent = parent
        self.num_observed = 0
        self._scale = 1.0  # the weight of the next observation
        self._ended: dict[int, float] = {}  # band -> weight of those that ended there
        self._tokens: dict[int, float] = {}  # band -> the same times their lengths
        self._cut: dict[int, float] = {}  # band -> weight of those that were cut off there
        self._epoch = -1
        self._hazards = _PRIOR_HAZARDS
        self._lengths = _PRIOR_LENGTHS  # band -> mean length of what ends there
        self._gone = _PRIOR_HAZARDS  # band -> share that has ended after it
        self._before = _PRIOR_LENGTHS  # band -> tokens of those that ended before it, per request of the group

    def add(self, num_tokens: int, *, is_cut: bool) -> None:
        """An answer ended after this many tokens (at least 1), or was cut off there."""
        band = min(band_of(num_tokens), NUM_BANDS - 1)
        weight = self._scale
        if is_cut:
            self._cut[band] = self._cut.get(band, 0.0) + weight
        else:
            self._ended[band] = self._ended.get(band, 0.0) + weight
            self._tokens[band] = self._tokens.get(band, 0.0) + weight * num_tokens
        self.num_observed += 1
        self._scale = weight * _GROWTH
        if self._scale > _LARGE:
            self._rescale()

    def update(self, epoch: int) -> None:
        """Make the curve as of this epoch: what was added, and the parent's curve of that time."""
        if self._epoch == epoch:
            return
        self._epoch = epoch
        hazards, lengths = _PRIOR_HAZARDS, _PRIOR_LENGTHS
        if self.parent is None and self._ended:
            hazards = _prior_hazards(min(max(self._ended) + 1, _DEFAULT_BAND))
        elif self.parent is not None:
            self.parent.update(epoch)
            hazards, lengths = self.parent._hazards, self.parent._lengths
        if self.num_observed:
            hazards, lengths = self._posterior(hazards, lengths)
        self._hazards, self._lengths = hazards, lengths
        left, tokens = 1.0, 0.0
        gone, before = array("d"), array("d")
        for band in range(NUM_BANDS):
            before.append(tokens)
            ends = left * hazards[band]
            tokens += ends * lengths[band]
            left -= ends
            gone.append(1.0 - left)
        self._gone, self._before = gone, before

    def mean(self, num_generated: int, max_tokens: int) -> int:
        """Expected tokens still to come, at least 1, at most what the limit leaves, by the curve as of ``update``."""
        first, last = self._bands(num_generated, max_tokens)
        left = 1.0 - self._gone[first - 1]
        most = max_tokens - num_generated
        if left <= 0.0:
            return max(1, min(most, num_generated))
        tokens = self._before[last] - self._before[first] + (1.0 - self._gone[last - 1]) * max_tokens
        return max(1, min(most, int(tokens / left - num_generated + 0.5)))

    def high(self, num_generated: int, max_tokens: int) -> int:
        """Like ``mean``, but the tokens that are enough for QUANTILE of such requests."""
        first, last = self._bands(num_generated, max_tokens)
        most = max_tokens - num_generated
        enough = 1.0 - (1.0 - QUANTILE) * (1.0 - self._gone[first - 1])
        band = bisect_left(self._gone, enough, first, last)
        return most if band == last else max(1, min(most, int(self._lengths[band] - num_generated + 0.5)))

    def _bands(self, num_generated: int, max_tokens: int) -> tuple[int, int]:
        """The bands of the next token and of the last one that is allowed."""
        first = min(band_of(num_generated + 1), NUM_BANDS - 1)
        return first, max(first, min(band_of(max_tokens), NUM_BANDS - 1))

    def _posterior(self, hazards: "array[float]", lengths: "array[float]") -> "tuple[array[float], array[float]]":
        """The parent's hazards and lengths, and what was observed here."""
        hazards, lengths = hazards[:], lengths[:]
        prior = WEIGHT * self._scale
        at_risk, above = 0.0, NUM_BANDS
        for band in sorted({*self._ended, *self._cut}, reverse=True):
            _shrink(hazards, band + 1, above, prior / (at_risk + prior))
            ended = self._ended.get(band, 0.0)
            at_risk += ended + self._cut.get(band, 0.0)
            hazards[band] = (ended + prior * hazards[band]) / (at_risk + prior)
            if ended:
                lengths[band] = self._tokens[band] / ended
            above = band
        _shrink(hazards, 0, above, prior / (at_risk + prior))
        return hazards, lengths

    def _rescale(self) -> None:
        for weights in (self._ended, self._tokens, self._cut):
            for band in list(weights):
                weights[band] /= self._scale
        self._scale = 1.0


def _shrink(hazards: "array[float]", begin: int, end: int, factor: float) -> None:
    """Bands in which none ended."""
    for band in range(begin, end):
        hazards[band] *= factor


@mypyc_attr(allow_interpreted_subclasses=True)
class LengthPredictor:
    """Owner of the groups, and of the observations that have not taken effect yet."""

    def __init__(self) -> None:
        self._all = LengthGroup(None)
        self._sizes: dict[tuple[str, int, int], LengthGroup] = {}
        self._families: dict[tuple[str, int, bytes], LengthGroup] = {}  # the least recently seen first
        self._waiting: list[tuple[LengthGroup, int, bool]] = []
        self._num_observed = 0
        self._epoch = 0

    def group(self, service_class: str, num_prompt_tokens: int, hashes: Sequence[bytes] = ()) -> LengthGroup:
        """The smallest group of a request with these leading blocks. A family comes to be when a request begins with
        all of the family that is half as long, so that families are as deep as prompts are alike."""
        group = self._all
        octave, quarter = num_prompt_tokens.bit_length(), band_of(num_prompt_tokens)
        for size in ((service_class, -1, -1), (service_class, octave, -1), (service_class, octave, quarter)):
            known = self._sizes.get(size)
            if known is None:
                known = self._sizes[size] = LengthGroup(group)
            group = known
        families, depth = self._families, 1
        while depth <= len(hashes):
            name = (service_class, depth, hashes[depth - 1])
            family = families.pop(name, None)
            families[name] = found = family or LengthGroup(group)
            group = found
            if family is None:
                if len(families) > MAX_FAMILIES:
                    del families[next(iter(families))]
                break
            depth *= 2
        return group

    def mean(self, group: LengthGroup, num_generated: int, max_tokens: int) -> int:
        """Tokens that a request of the group with ``num_generated`` so far is expected to generate yet, at least 1."""
        group.update(self._epoch)
        return group.mean(num_generated, max_tokens)

    def high(self, group: LengthGroup, num_generated: int, max_tokens: int) -> int:
        """Like ``mean``, but the tokens that are enough for QUANTILE of such requests."""
        group.update(self._epoch)
        return group.high(num_generated, max_tokens)

    def observe(self, group: LengthGroup, num_tokens: int, *, is_cut: bool = False) -> None:
        """An answer of the group ended after ``num_tokens`` in all, or (is_cut) was stopped there by something else
        than itself: its limit, its client, an error."""
        if num_tokens < 1:
            return
        self._waiting.append((group, num_tokens, is_cut))
        if len(self._waiting) < min(BATCH, 1 + self._num_observed // BATCH):
            return
        self._num_observed += len(self._waiting)
        self._epoch += 1
        for member, length, cut in self._waiting:
            ancestor: LengthGroup | None = member
            while ancestor is not None:
                ancestor.add(length, is_cut=cut)
                ancestor = ancestor.parent
        self._waiting.clear()


WINDOW = 256  # answers that are looked at


class LengthErrorStats:
    """Sums of |expected - actual| tokens."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int, int]] = deque()  # wrong tokens: learned, static; actual tokens
        self._learned = 0
        self._static = 0
        self._actual = 0

    @property
    def errors(self) -> dict[str, float]:
        """Mean absolute errors as shares of the mean actual length (0 before any answer). learned: of what was
        expected; static: of DEFAULT_TOKENS for every answer, or its limit, where that is less."""
        actual = max(1, self._actual)
        return {"learned": self._learned / actual, "static": self._static / actual}

    def observe(self, expected: int, max_tokens: int, actual: int) -> None:
        """Compare an answer that ended with the length that was expected on its arrival, all in tokens."""
        static = min(DEFAULT_TOKENS, max_tokens)
        self._add(abs(expected - actual), abs(static - actual), actual, 1)
        self._recent.append((abs(expected - actual), abs(static - actual), actual))
        if len(self._recent) > WINDOW:
            self._add(*self._recent.popleft(), -1)

    def _add(self, learned: int, static: int, actual: int, sign: int) -> None:
        self._learned += sign * learned
        self._static += sign * static
        self._actual += sign * actual
