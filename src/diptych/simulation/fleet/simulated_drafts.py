"""Which tokens of simulated answers are guessed, and which guesses are right: an acceptance model without text.

Behind a share of all tokens there is a guess (``coverage``), and each of its tokens is right with the probability
``acceptance`` when those before it are. Both are functions of the request and the place in its answer, so what could
have been guessed does not depend on how many tokens a step computes.
"""

from dataclasses import dataclass, field
from hashlib import blake2b

MAX_GUESS = 16  # as runtime/step/draft_tokens.py
LEAST_CHANCE = 0.02
MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SimulatedDrafts:
    """coverage, acceptance: 0 to 1. chances: of the tokens of a guess."""

    coverage: float
    acceptance: float
    chances: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        powers = [round(self.acceptance**count, 4) for count in range(1, MAX_GUESS + 1)]
        object.__setattr__(self, "chances", tuple(chance for chance in powers if chance >= LEAST_CHANCE))

    def exists(self, number: int, place: int) -> bool:
        """Whether the token after the first ``place`` of an answer is guessed. number: see number_of."""
        return _uniform(number, 2 * place) < self.coverage

    def num_right(self, number: int, place: int, count: int) -> int:
        """How many of ``count`` guessed tokens after the first ``place`` are right, up to the first that is not."""
        for right in range(count):
            if _uniform(number, 2 * (place + right) + 1) >= self.acceptance:
                return right
        return count


def number_of(request_id: str) -> int:
    """A number for a request; attempts (ID~EPOCH) at the same one have the same."""
    return int.from_bytes(blake2b(request_id.partition("~")[0].encode(), digest_size=8).digest(), "little")


def _uniform(number: int, index: int) -> float:
    """One number in [0, 1) per pair: splitmix64 (Steele et al. 2014)."""
    state = (number + index * 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return float((state ^ (state >> 31)) >> 11) * 2.0**-53
