"""What a runner knows of the tokens that come next: those that constraints force, and those that look likely."""

import numpy as np
import numpy.typing as npt

from diptych.control.step import DraftProposal
from diptych.runtime.step.ngram_proposer import MatchCounts, NgramProposer
from diptych.runtime.step.request_state import RequestState

MAX_DRAFT = 16  # tokens of a guess
MAX_FORCED = 64


class DraftTokens:
    """The tokens that may come next in each request of a runner. drafts: whether tokens are guessed."""

    def __init__(self, *, drafts: bool) -> None:
        self.drafts = drafts
        self._counts = MatchCounts()

    def after(
        self, state: RequestState, token_ids: npt.NDArray[np.int32], room: int, num_streams: int = 1
    ) -> DraftProposal | None:
        """token_ids: of the request so far. room: how many may follow besides the one that is sampled next.
        num_streams: that decode together. Raises ValueError where its constraint cannot go on."""
        state.drafted, state.num_forced = (), 0
        lookup = None
        if self.drafts and len(token_ids) >= state.next_look:
            lookup = self._follow(state, token_ids)
            state.next_look = len(token_ids) + lookup.pause(num_streams)
        if room <= 0:
            return None
        if state.constraint is not None:
            forced = tuple(state.constraint.forced(min(room, MAX_FORCED)))
            if forced:
                state.drafted, state.num_forced = forced, len(forced)
                return DraftProposal(state.request_id, (1.0,) * len(forced))
        if lookup is None:
            return None
        draft, chances = lookup.guess(min(room, MAX_DRAFT))
        if draft and state.constraint is not None:
            draft = draft[: state.constraint.count_allowed(draft)]
        if not draft:
            return None
        state.drafted = tuple(draft)
        return DraftProposal(state.request_id, tuple(chances[: len(draft)]))

    def _follow(self, state: RequestState, token_ids: npt.NDArray[np.int32]) -> NgramProposer:
        lookup, predicted = state.lookup, state.params.predicted  # as if they stood before the prompt
        if lookup is None:
            lookup = state.lookup = NgramProposer(
                [*predicted, *token_ids.tolist()] if predicted else token_ids, self._counts
            )
        else:
            lookup.extend(token_ids[lookup.num_tokens - len(predicted) :])
        return lookup
