"""Prompts from the identities of a workload: equal identities give equal tokens, so that prefixes are really shared.

Token ids (or words) are a function of (salt, identity), and of (salt, request number) for the part that is not shared.
Each run has its own salt, so that a server that still has the last run's prompts cached does not look too fast.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import shake_128
from struct import unpack

from diptych.control.errors import ConfigError
from diptych.workload.spec import RequestSpec

BLOCKS_REMEMBERED = 1 << 16
# Common words; with a space before it each is a single token of most vocabularies.
_TEXT = (
    "the of and to in is that for it was on are as with his they at be this have from or one had by but not what all "
    "were we when your can said there use an each which she do how their if will up other about out many then them "
    "these so some her would make like him into time has look two more write go see number no way could people my than "
    "first water been call who its now find long down day did get come made may part over new sound take only little "
    "work know place year live me back give most very after thing our just name good man think say great where help "
    "through much before line right too mean old any same tell boy follow came want show also around form three small "
    "set put end does another well large must big even such because turn here why ask went men read need land home us "
    "move try kind hand again change off play air away house point page letter answer found study still learn should"
)
WORDS = tuple(_TEXT.split())


class PromptMaker:
    """Units (token ids, or numbers of words) of the prompts of a run.

    low, high: units are in [low, high). tokens_per_unit: 1 for token ids; for words, what was measured.
    overhead_tokens: tokens that the server adds to every prompt (a chat template).
    """

    def __init__(
        self, salt: str, low: int, high: int, *, tokens_per_unit: float = 1.0, overhead_tokens: float = 0.0
    ) -> None:
        if not 0 <= low < high <= 2**32:
            raise ConfigError(f"token_ids is {low}:{high}; expected LOW:HIGH with LOW below HIGH", param="token_ids")
        self._salt = salt
        self._low = low
        self._span = high - low
        self._tokens_per_unit = tokens_per_unit
        self._overhead = overhead_tokens
        self._block = lru_cache(BLOCKS_REMEMBERED)(self._draw)

    def units(self, spec: RequestSpec, number: int) -> list[int]:
        """The prompt of the ``number``-th request."""
        count = max(1, round((spec.prompt_tokens - self._overhead) / self._tokens_per_unit))
        width = spec.hash_block_tokens / self._tokens_per_unit
        units: list[int] = []
        for place, identity in enumerate(spec.hash_ids, start=1):
            if len(units) >= count:
                break
            units += self._block(f"block/{identity}", int(place * width) - len(units))
        del units[count:]
        if len(units) < count:
            units += self._draw(f"request/{number}", count - len(units))
        return units

    def fresh(self, name: str, num_tokens: int) -> list[int]:
        """A prompt that shares nothing, for warm-ups and probes."""
        return list(self._draw(name, max(1, round((num_tokens - self._overhead) / self._tokens_per_unit))))

    def words(self, name: str, num_tokens: float) -> list[int]:
        """A part of ``num_tokens`` in the middle of a prompt; at least a single unit."""
        return list(self._draw(name, max(1, round(num_tokens / self._tokens_per_unit))))

    def _draw(self, name: str, count: int) -> tuple[int, ...]:
        """Uniform to within 2**-32 of the span, from a hash: equal on every platform."""
        raw = shake_128(f"{self._salt}/{name}".encode()).digest(4 * count)
        low, span = self._low, self._span
        return tuple([low + (word * span >> 32) for word in unpack(f"<{count}I", raw)])


def as_text(units: Sequence[int]) -> str:
    """Units as words."""
    number = len(WORDS)
    return " ".join([WORDS[unit % number] for unit in units])
