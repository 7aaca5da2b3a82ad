"""What library users get back: vLLM's names for requests, completions and log-probabilities.

Plain records.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from diptych.control.slo import NS_PER_S, LatencyBreakdown
from diptych.control.step import TokenLogprobs


@dataclass(slots=True)
class Logprob:
    """One alternative at one position. rank 1 is the most likely token; None: below the alternatives asked for."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsAtPosition = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One answer. finish_reason is None while it grows; stop_reason names the stop string or stop token id."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobsAtPosition] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether this answer has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Where the time of a request went, in seconds; the parts sum to ``total_s`` (exactly, in nanoseconds)."""

    latency: LatencyBreakdown
    num_preemptions: int = 0
    slo_met: bool | None = None

    @property
    def queue_s(self) -> float:
        """Arrival to the first step that computed some of it."""
        return self.latency.queue_ns / NS_PER_S

    @property
    def prefill_s(self) -> float:
        """Seconds from the end of the queue to the first token."""
        return self.latency.prefill_ns / NS_PER_S

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        return (self.latency.handoff_ns + self.latency.decode_ns) / NS_PER_S

    @property
    def total_s(self) -> float:
        """End to end."""
        return self.latency.total_ns / NS_PER_S

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.latency.ttft_ns / NS_PER_S


@dataclass(slots=True)
class RequestOutput:
    """A request and its answers so far. metrics belongs to the slowest of the answers, once all have ended."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[LogprobsAtPosition | None] | None = None
    metrics: RequestMetrics | None = None


def logprobs_at(entry: TokenLogprobs, text_of: Callable[[int], str]) -> LogprobsAtPosition:
    """A wire record as vLLM's mapping: the best alternatives, and the token itself wherever it ranks."""
    position = {
        token_id: Logprob(logprob, rank, text_of(token_id))
        for rank, (token_id, logprob) in enumerate(entry.top, start=1)
    }
    if entry.token_id not in position:
        position[entry.token_id] = Logprob(entry.logprob, None, text_of(entry.token_id))
    return position
