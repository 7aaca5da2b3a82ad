"""A request that has not ended, as its simulated client and the front end know it: which tokens the client has got,
which a front end must know when a worker is lost."""

from dataclasses import dataclass, replace

from diptych.control.errors import ErrorRecord
from diptych.control.events import RequestFinished
from diptych.control.request import FinishReason, RequestOptions
from diptych.control.slo import LatencyBreakdown, Slo, objectives
from diptych.workload.spec import RequestSpec


@dataclass(eq=False, slots=True)
class ClientRequest:
    """submitted_ns: when the front end began with it. num_tokens: of the answer, that the client had when the current
    attempt began. has_token: the first token of this attempt has come. is_taken_over: the front end knows that the
    decode worker has taken it over. num_final: the attempt has ended at its worker after this many tokens, and the
    report is on its way. first_token_ns: of all attempts. worker: where its tokens come from. num_losses: front ends
    that have died with it.
    """

    number: int
    spec: RequestSpec
    attempt_id: str
    options: RequestOptions
    submitted_ns: int
    client: int = -1
    worker: int = -1
    prefill: int = -1
    num_tokens: int = 0
    has_token: bool = False
    is_taken_over: bool = False
    num_final: int = 0
    first_token_ns: int = -1
    num_losses: int = 0

    @property
    def request_id(self) -> str:
        """The id by which the present front end knows the request."""
        return self.attempt_id.partition("~")[0]

    @property
    def is_handoff(self) -> bool:
        """Whether two workers share the current attempt."""
        return self.prefill != self.worker

    def begin_attempt(self, attempt_id: str, num_tokens: int) -> None:
        """Another attempt, after ``num_tokens`` tokens of the answer."""
        self.attempt_id, self.num_tokens = attempt_id, num_tokens
        self.has_token = self.is_taken_over = False
        self.num_final = 0
        self.worker = self.prefill = -1

    def token_came(self, time_ns: int) -> None:
        """The first one of this attempt."""
        if not self.has_token:
            self.has_token = True
            if self.first_token_ns < 0:
                self.first_token_ns = time_ns

    def kept(self, worker: int, tokens: dict[str, int], num_lost: int, max_model_len: int) -> int:
        """Tokens of the answer that the client keeps when a worker died (``tokens``: what each attempt had been given
        there, of which the last ``num_lost`` may never have left)."""
        count = int(self.has_token)
        is_here = worker == self.worker and (not self.is_handoff or self.is_taken_over)
        if is_here and count:
            # The last one comes together with the report of the end.
            most = min(self.spec.output_tokens, max_model_len - self.spec.prompt_tokens) - self.num_tokens
            given = min((self.num_final or most) - 1, tokens.get(self.attempt_id, most))
            count = max(1, given - num_lost)
        return self.num_tokens + count

    def seen(self, event: RequestFinished, default: Slo) -> RequestFinished:
        """The end as its client sees it: the time before the front end began with the request is queueing, too."""
        before_ns = self.submitted_ns - self.spec.arrival_ns
        if not before_ns or event.reason is FinishReason.ERROR:
            return event
        latency = event.latency.queued_for(before_ns)
        slo_met = event.slo_met
        if slo_met is not None and event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            slo_met = objectives(self.spec.slo, default).is_met(latency)
        return replace(event, latency=latency, slo_met=slo_met)

    def abandoned(self, now: int, account: LatencyBreakdown | None, default: Slo) -> RequestFinished:
        """The client goes away. account: the split of its time so far, by the worker that has the request."""
        total_ns, count = now - self.spec.arrival_ns, int(self.has_token)
        latency = LatencyBreakdown(total_ns, 0, 0, self.num_tokens + count)
        if account is not None:
            queue_ns = account.queue_ns + total_ns - account.total_ns
            count = max(count, account.num_output_tokens)
            latency = replace(account, queue_ns=queue_ns, num_output_tokens=self.num_tokens + count)
        return self._end(now, FinishReason.ABORT, latency, default)

    def failed(self, now: int, error: ErrorRecord, default: Slo) -> RequestFinished:
        """The front end gives the request up."""
        latency = LatencyBreakdown(now - self.spec.arrival_ns, 0, 0, self.num_tokens + self.has_token)
        return self._end(now, FinishReason.ERROR, latency, default, error)

    def _end(
        self,
        now: int,
        reason: FinishReason,
        latency: LatencyBreakdown,
        default: Slo,
        error: ErrorRecord | None = None,
    ) -> RequestFinished:
        slo_met = False if self.spec.slo is not None or default != Slo() else None
        return RequestFinished(now, str(self.number), reason, self.spec.prompt_tokens, 0, 0, latency, slo_met, error)


def attempt_spec(spec: RequestSpec, num_output_tokens: int) -> RequestSpec:
    """What is left to do after this many tokens of the answer: they belong to the prompt now."""
    if not num_output_tokens:
        return spec
    return replace(
        spec,
        prompt_tokens=spec.prompt_tokens + num_output_tokens,
        output_tokens=spec.output_tokens - num_output_tokens,
        max_tokens=(spec.max_tokens or spec.output_tokens) - num_output_tokens,
        is_running=False,
    )
