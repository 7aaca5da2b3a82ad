"""What all prefills were spent on, and the places at which prompts leave what was cached, with what that costs.

Counts since the start; memory is bounded: of the places, those that cost the most are kept.
"""

from collections import Counter
from dataclasses import dataclass

from diptych.control.misses.prefix_miss import MissReason, PrefixMiss

MAX_PLACES = 64


@dataclass(slots=True)
class MissPlace:
    """Prompts that leave an earlier conversation, and then go on with text that was computed before: with the same
    text, so that what differs is likely the same thing each time (a time stamp, an id).

    first_token, last_token: between which positions they leave it. num_differing_tokens: about how many tokens differ,
    at most. example: the newest request.
    """

    num_requests: int = 0
    num_again_tokens: int = 0
    first_token: int = 0
    last_token: int = 0
    num_differing_tokens: int = 0
    example: str = ""

    def add(self, miss: PrefixMiss) -> None:
        """One more."""
        at = miss.num_seen_tokens
        self.first_token = min(self.first_token, at) if self.num_requests else at
        self.last_token = max(self.last_token, at)
        self.num_requests += 1
        self.num_again_tokens += dict(miss.spent).get(MissReason.DIFFERS, 0)
        self.num_differing_tokens = max(self.num_differing_tokens, miss.num_differing_tokens or 0)
        self.example = miss.request_id


class MissSummary:
    """All prompts since the start. requests: by reason; tokens: that were computed, by what for."""

    def __init__(self) -> None:
        self.requests: Counter[MissReason] = Counter()
        self.tokens: Counter[str] = Counter()
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._places: dict[bytes, MissPlace] = {}

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that were computed: the sum of ``tokens``."""
        return self.num_prompt_tokens - self.num_cached_tokens

    @property
    def num_requests(self) -> int:
        """All that were explained."""
        return self.requests.total()

    @property
    def places(self) -> dict[bytes, MissPlace]:
        """Places by group, the costliest first."""
        return dict(sorted(self._places.items(), key=lambda item: (-item[1].num_again_tokens, item[0])))

    def add(self, miss: PrefixMiss) -> None:
        """A prompt was explained."""
        self.requests[miss.reason] += 1
        self.num_prompt_tokens += miss.num_prompt_tokens
        self.num_cached_tokens += miss.num_cached_tokens
        for cause, count in miss.spent:
            self.tokens[cause] += count
        if not miss.group:
            return
        if miss.group not in self._places and len(self._places) >= MAX_PLACES:
            del self._places[min(self._places, key=lambda group: self._places[group].num_again_tokens)]
        self._places.setdefault(miss.group, MissPlace()).add(miss)
