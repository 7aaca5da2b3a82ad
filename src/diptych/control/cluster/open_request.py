"""A request between its arrival and its one end, as the cluster keeps it, and when to stop trying."""

from dataclasses import dataclass
from typing import Literal

from diptych.control.cluster.attempt import Attempt
from diptych.control.cluster.cluster_events import Submission
from diptych.control.errors import DiptychError, WorkerError
from diptych.control.events import RequestFinished
from diptych.control.request import FinishReason
from diptych.control.slo import LatencyBreakdown

OnFailure = Literal["retry", "local", "fail"]
MAX_SUSPICIONS = 2  # workers that died while they computed this prompt, before it is refused
MAX_DEATHS = 5  # workers that died while they held this request, likewise


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A request that has not ended. ``num_tokens``: of the answer, before the current attempt."""

    submission: Submission
    attempt: Attempt | None = None
    epoch: int = -1
    num_tokens: int = 0
    num_fruitless: int = 0  # attempts in a row that gave the client nothing
    num_suspicions: int = 0
    num_deaths: int = 0
    must_stay_whole: bool = False
    is_untouched: bool = False  # sent to a worker, no token of this attempt yet
    is_computing: bool = False  # its prompt is being computed
    avoid: frozenset[int] = frozenset()

    def blame(self, worker: int) -> None:
        """This worker crashed while it held the request."""
        assert self.attempt is not None
        self.num_suspicions += self.is_computing and worker == self.attempt.prefill
        self.num_deaths += 1

    def lose_attempt(self, num_tokens: int | None) -> None:
        """The attempt is over without an end. num_tokens: of the answer that the client has; None: at most the first
        one of this attempt."""
        had = self.num_tokens
        if num_tokens is not None:
            self.num_tokens = max(had, num_tokens)
        elif not self.is_untouched:
            self.num_tokens += 1
        self.num_fruitless = 1 if self.num_tokens > had else self.num_fruitless + 1
        self.attempt, self.is_computing = None, False

    def verdict(self, why: str, on_failure: OnFailure, max_attempts: int) -> DiptychError | None:
        """After a loss: the error with which the request ends, or None to try again."""
        if self.is_poison:
            deaths = max(self.num_suspicions, self.num_deaths)
            message = f"{deaths} workers died while they computed this request; it is not tried again"
            return WorkerError(message, code="poison_request")
        if on_failure == "fail":
            return WorkerError(f"the request was lost ({why}) and on_failure is fail")
        if self.num_fruitless >= max_attempts:
            return WorkerError(f"{self.num_fruitless} attempts in a row were lost, the last one: {why}")
        return None

    @property
    def is_poison(self) -> bool:
        """Whether workers keep dying of it."""
        return self.num_suspicions >= MAX_SUSPICIONS or self.num_deaths >= MAX_DEATHS

    def complete(self, now: int) -> RequestFinished:
        """Its end, when its last token arrived although the word of its end did not: an attempt without a token."""
        one, latency = self.submission, LatencyBreakdown(0, 0, 0, 0)
        return RequestFinished(now, one.request_id, FinishReason.LENGTH, one.num_prompt_tokens, 0, 0, latency, None)
