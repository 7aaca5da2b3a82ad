"""A request between its arrival and its one end, as the cluster keeps it: what its client has, when to stop trying, and
the final RequestFinished."""

from dataclasses import dataclass, replace

from diptych.control.cluster.attempts import Attempt
from diptych.control.cluster.cluster_config import OnFailure
from diptych.control.commands import Command, Restarted, attempt_id_of
from diptych.control.errors import DiptychError, WorkerError
from diptych.control.events import RequestFinished
from diptych.control.length_predictor import LengthGroup, LengthPredictor
from diptych.control.request import FinishReason, Submission
from diptych.control.slo import Slo, breakdown_from_times, objectives

MAX_SUSPICIONS = 2  # workers that died while they computed this prompt, before it is refused
MAX_DEATHS = 5  # workers that died while they held this request, likewise


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A request that has not ended. Times are the front end's; num_tokens: of the answer, before the current attempt
    (while ``is_stopping``: in all); num_given: of these, from a front end of before; num_cached_tokens: of the prompt,
    found in caches before there was a token."""

    submission: Submission
    arrival_ns: int
    length_group: LengthGroup
    num_expected: int  # tokens of the answer, as of its arrival
    first_step_ns: int | None = None
    first_token_ns: int | None = None
    num_cached_tokens: int = 0
    attempt: Attempt | None = None
    epoch: int = -1
    num_tokens: int = 0
    num_given: int = 0
    num_fruitless: int = 0  # attempts in a row that gave the client no token
    num_suspicions: int = 0
    num_deaths: int = 0
    last_crash: str = ""
    must_stay_whole: bool = False
    awaits_first_token: bool = False  # sent to a worker, no token of this attempt yet
    is_computing: bool = False  # its prompt is being computed
    is_stopping: bool = False  # the client has a complete answer; only the worker's RequestFinished is missing
    avoid: frozenset[int] = frozenset()
    failed_path: tuple[int, int] | None = None  # prefill and decode worker of the last transfer that failed

    @classmethod
    def arrived(cls, submission: Submission, now: int, lengths: LengthPredictor, num_given: int = 0) -> "OpenRequest":
        """A new request, or one that resumes after ``num_given`` tokens."""
        group = lengths.group(submission.options.service_class, submission.num_prompt_tokens, submission.hashes)
        expected = lengths.mean(group, num_given, submission.max_tokens)
        return cls(submission, now, group, expected, num_tokens=num_given, num_given=num_given)

    def restarted(self) -> list[Command]:
        """What the front end must know between two attempts, once."""
        if self.epoch < 0:
            return []
        request_id = self.submission.request_id
        return [Restarted(request_id, attempt_id_of(request_id, self.epoch + 1), self.num_tokens)]

    def on_admitted(self, num_cached_tokens: int, now: int) -> None:
        """Take in that the prompt begins to be computed."""
        self.is_computing = self.awaits_first_token
        if self.first_step_ns is None:
            self.first_step_ns = now
        self.on_reserved(num_cached_tokens)

    def on_first_token(self, now: int) -> None:
        """The first token of this attempt came."""
        self.is_computing = False
        if self.first_token_ns is None:
            self.first_token_ns = now
            if self.first_step_ns is None:  # its RequestAdmitted is late
                self.first_step_ns = now

    def on_reserved(self, num_cached_tokens: int) -> None:
        """A worker found this many tokens of it in its cache."""
        if not self.num_tokens:
            self.num_cached_tokens = max(self.num_cached_tokens, num_cached_tokens)

    def blame(self, worker: int, why: str) -> None:
        """This worker crashed while it held the request."""
        self.last_crash = why
        assert self.attempt is not None
        self.num_suspicions += self.is_computing and worker == self.attempt.prefill
        self.num_deaths += 1

    def lose_attempt(self, num_tokens: int | None) -> None:
        """The attempt is over without an end. num_tokens: of the answer that the client has; None: at most the first
        one of this attempt."""
        had = self.num_tokens
        if num_tokens is not None:
            self.num_tokens = max(had, num_tokens)
        elif not self.awaits_first_token:
            self.num_tokens += 1
        self.num_fruitless = 1 if self.num_tokens > had else self.num_fruitless + 1
        self.attempt, self.is_computing = None, False

    def withdraw_attempt(self, num_tokens: int = 0) -> None:
        """The attempt is over and was not lost: its blocks were needed, or the request goes on elsewhere. num_tokens:
        of the answer that the client has."""
        if num_tokens > self.num_tokens:
            self.num_tokens, self.num_fruitless = num_tokens, 0
        self.attempt, self.is_computing = None, False

    def verdict(self, why: str, on_failure: OnFailure, max_attempts: int) -> DiptychError | None:
        """The error with which the request ends after a loss, or None to try again."""
        if self.is_poison:
            deaths = max(self.num_suspicions, self.num_deaths)
            message = f"{deaths} workers died while they computed this request; it is not tried again"
            message += f" (the last: {self.last_crash})" if self.last_crash else ""
            return WorkerError(message, code="poison_request")
        if on_failure == "fail":
            return WorkerError(f"the request was lost ({why}) and on_failure is fail")
        if self.num_tokens and not self.submission.is_resumable:
            message = f"the request was lost ({why}) in the middle of its answer, and no other worker can continue it"
            return WorkerError(message, code="answer_lost")
        if self.num_fruitless >= max_attempts:
            return WorkerError(f"{self.num_fruitless} attempts in a row were lost, the last one: {why}")
        return None

    @property
    def is_poison(self) -> bool:
        """Whether too many workers crashed while they held it."""
        return self.num_suspicions >= MAX_SUSPICIONS or self.num_deaths >= MAX_DEATHS

    def account(self, event: RequestFinished, now: int, default: Slo) -> RequestFinished:
        """The end of the current attempt as the end of the request: from its arrival to now, over all attempts. The
        worker's own split of the time is kept where there was one attempt; time that the worker did not see counts as
        queueing."""
        submission, latency = self.submission, event.latency
        if self.is_stopping:
            num_tokens = self.num_tokens
            latency = replace(latency, num_output_tokens=num_tokens)
        else:
            num_tokens = self.num_tokens + latency.num_output_tokens
        if self.epoch or self.num_given:
            latency = breakdown_from_times(self.arrival_ns, self.first_step_ns, self.first_token_ns, now, num_tokens)
        elif event.reason is not FinishReason.ERROR:
            unseen_ns = now - self.arrival_ns - latency.total_ns
            if unseen_ns > 0:
                latency = latency.queued_for(unseen_ns)
        num_cached = self.num_cached_tokens
        if not (self.epoch or self.num_given):
            num_cached = max(num_cached, event.num_cached_tokens)
        slo_met = event.slo_met
        if slo_met is not None and event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            here = replace(latency, num_output_tokens=num_tokens - self.num_given)
            slo_met = objectives(submission.options.slo, default).is_met(here)
        return RequestFinished(
            event.time_ns,
            submission.request_id,
            event.reason,
            submission.num_prompt_tokens,
            num_cached,
            event.num_preemptions,
            latency,
            slo_met,
            event.error,
        )

    def complete(self, reason: FinishReason, now: int, default: Slo) -> RequestFinished:
        """The request's end when all its tokens have come and no worker reports the end."""
        slo = objectives(self.submission.options.slo, default)
        latency = breakdown_from_times(self.arrival_ns, self.first_step_ns, self.first_token_ns, now, self.num_tokens)
        return RequestFinished(
            now,
            self.submission.request_id,
            reason,
            self.submission.num_prompt_tokens,
            self.num_cached_tokens,
            0,
            latency,
            slo.is_met(latency) if slo != Slo() else None,
        )
