"""A request that has not ended, as the simulated front end and its client know it."""

from dataclasses import dataclass, replace

from diptych.control.events import RequestFinished
from diptych.control.request import FinishReason
from diptych.control.slo import LatencyBreakdown, Slo
from diptych.workload.spec import RequestSpec


@dataclass(eq=False, slots=True)
class OpenRequest:
    """num_tokens: of the answer, that the client had when the current attempt began. has_token: the first token of this
    attempt has come. is_taken_over: the front end has heard that the decode worker goes on with it. num_final: the
    attempt has ended at its worker after so many tokens, and the word of it is on its way. first_token_ns: of all
    attempts. worker: where its tokens come from.
    """

    number: int
    spec: RequestSpec
    attempt_id: str
    client: int = -1
    worker: int = -1
    prefill: int = -1
    num_attempts: int = 0
    num_tokens: int = 0
    num_kept: int = 0  # as num_tokens, when the next attempt begins
    has_token: bool = False
    is_taken_over: bool = False
    num_final: int = 0
    first_token_ns: int = -1

    @property
    def is_handoff(self) -> bool:
        """Whether two workers share the current attempt."""
        return self.prefill != self.worker

    def attempt_spec(self) -> RequestSpec:
        """What is left to do: what the client has been given belongs to the prompt."""
        done, spec = self.num_tokens, self.spec
        if not done:
            return spec
        return replace(
            spec,
            prompt_tokens=spec.prompt_tokens + done,
            output_tokens=spec.output_tokens - done,
            max_tokens=(spec.max_tokens or spec.output_tokens) - done,
        )

    def begin_attempt(self, attempt_id: str) -> None:
        """Another attempt."""
        self.num_tokens = max(self.num_kept, self.num_tokens + self.has_token)
        self.attempt_id = attempt_id
        self.has_token = self.is_taken_over = False
        self.num_final = 0
        self.worker = self.prefill = -1

    def token_came(self, time_ns: int) -> None:
        """The first one of this attempt."""
        if not self.has_token:
            self.has_token = True
            if self.first_token_ns < 0:
                self.first_token_ns = time_ns

    def keep(self, worker: int, tokens: dict[str, int], num_lost: int, max_model_len: int) -> int:
        """That worker died: how many tokens of the answer the client has (``tokens``: what each attempt had been given
        there, of which the last ``num_lost`` may never have left)."""
        count = int(self.has_token)
        is_here = worker == self.worker and (not self.is_handoff or self.is_taken_over)
        if is_here and count:
            # The last one comes together with the word of the end.
            most = min(self.spec.output_tokens, max_model_len - self.spec.prompt_tokens) - self.num_tokens
            given = min((self.num_final or most) - 1, tokens.get(self.attempt_id, most))
            count = max(1, given - num_lost)
        self.num_kept = self.num_tokens + count
        return self.num_kept

    def seen(self, event: RequestFinished, default: Slo) -> RequestFinished:
        """The end as its client sees it: from sending the request to having the last token, over all attempts."""
        latency, spec = event.latency, self.spec
        unseen_ns = event.time_ns - latency.total_ns - spec.arrival_ns  # before the worker heard of it
        if not unseen_ns and not self.num_attempts:
            return event
        if self.num_attempts and self.first_token_ns >= 0:
            decode_ns = event.time_ns - self.first_token_ns
            queue_ns = self.first_token_ns - spec.arrival_ns
            latency = LatencyBreakdown(queue_ns, 0, decode_ns, self.num_tokens + latency.num_output_tokens)
        elif event.reason is not FinishReason.ERROR:
            latency = replace(latency, queue_ns=latency.queue_ns + unseen_ns)
        slo_met = event.slo_met
        if slo_met is not None and event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            slo_met = (spec.slo or Slo()).or_else(default).is_met(latency)
        num_cached = min(event.num_cached_tokens, spec.prompt_tokens - 1)
        return replace(
            event, latency=latency, slo_met=slo_met, num_prompt_tokens=spec.prompt_tokens, num_cached_tokens=num_cached
        )

    def ended_here(self, now: int, reason: FinishReason, message: str, default: Slo) -> RequestFinished:
        """The terminal event of a request that no worker ends."""
        spec = self.spec
        count = max(self.num_kept, self.num_tokens + self.has_token)
        latency = LatencyBreakdown(now - spec.arrival_ns, 0, 0, count)
        has_objective = spec.slo is not None or default != Slo()
        slo_met = False if has_objective else None
        return RequestFinished(now, str(self.number), reason, spec.prompt_tokens, 0, 0, latency, slo_met, message)
