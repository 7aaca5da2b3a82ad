"""What an answer may look like, token by token: how a grammar reaches the sampler.

A request may bring one TokenConstraint to its executor (``ModelRunner.add_request(..., constraint=)``). The scheduler
never sees it: to the scheduler, tokens that are forced are tokens whose chance is 1 (see ``step.DraftProposal``).

The text of an answer must not depend on how many tokens a step computes. So a forced token *is* the next token, also
in a step that computes one token: it is not sampled, whatever the logits are.
"""

from collections.abc import Sequence
from typing import Protocol


class TokenConstraint(Protocol):
    """The state of one answer under its constraint, after the tokens that it has accepted.

    Made for one attempt on one worker, and used by one thread at a time. It keeps nothing that the tokens do not say:
    after a handoff or a crash another worker makes a new one, and ``accept`` replays the answer so far. Every method
    raises ConstraintError (or any ValueError) with a sentence for the client; that request alone then fails.
    """

    def forced(self, limit: int) -> Sequence[int]:
        """The tokens that must follow now, at most ``limit`` of them; empty where there is a choice.

        The same answer until ``accept`` or ``rollback``, but for the limit. For every n, after ``accept`` of the first
        n of them the others are still forced.
        """
        ...

    def allowed(self) -> bytes | None:
        """The tokens that may follow now: bit ``i % 8`` of byte ``i // 8`` says it for token i. Tokens behind the end
        of the mask may not follow. None: every token may. At least one may, if only the end of sequence."""
        ...

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens may follow, one after the other, up to the first that may not. Changes nothing."""
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """These tokens follow: forced ones, or allowed ones. The token that ends the answer is not given to it."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo ``accept`` of the last ``num_tokens`` tokens: they were drafts that the model rejected."""
        ...
