"""Service-level objectives and the latency breakdown of a request, computed from event times alone."""

from dataclasses import dataclass

from diptych.control.errors import InvalidRequestError

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives of one request, in nanoseconds; ``None`` means no objective.

    ttft_ns: time from arrival to the first token. tpot_ns: mean time per output token after the first.
    """

    ttft_ns: int | None = None
    tpot_ns: int | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_ns", "tpot_ns"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InvalidRequestError(f"{name} is {value}; it must be positive", param=name)

    def or_else(self, default: "Slo") -> "Slo":
        """These objectives, and the default's where there is none."""
        return Slo(self.ttft_ns or default.ttft_ns, self.tpot_ns or default.tpot_ns)

    def is_met(self, breakdown: "LatencyBreakdown") -> bool:
        """Whether a finished request met every objective it has (a one-token answer has no TPOT)."""
        if self.ttft_ns is not None and breakdown.ttft_ns > self.ttft_ns:
            return False
        tpot_ns = breakdown.tpot_ns
        return self.tpot_ns is None or tpot_ns is None or tpot_ns <= self.tpot_ns


def objectives(own: Slo | None, default: Slo) -> Slo:
    """The objectives of a request that may have some of its own."""
    return default if own is None else own.or_else(default)


@dataclass(frozen=True, slots=True)
class LatencyBreakdown:
    """Where the time of one request went, in nanoseconds: queue + prefill + handoff + decode == total, exactly.

    queue: arrival to the start of the first step that computed some of it. prefill: from there to the first token.
    handoff: first token to the decode worker taking over (0 on one worker). decode: from there to the last token.
    A request that ends early (abort in the queue) has zeros for the parts that it never reached.
    """

    queue_ns: int
    prefill_ns: int
    decode_ns: int
    num_output_tokens: int
    handoff_ns: int = 0

    def queued_for(self, unseen_ns: int) -> "LatencyBreakdown":
        """The same request, which had been queued for so long before."""
        parts = (self.prefill_ns, self.decode_ns, self.num_output_tokens, self.handoff_ns)
        return LatencyBreakdown(self.queue_ns + unseen_ns, *parts)

    @property
    def total_ns(self) -> int:
        """End-to-end latency."""
        return self.queue_ns + self.prefill_ns + self.handoff_ns + self.decode_ns

    @property
    def ttft_ns(self) -> int:
        """Time to first token."""
        return self.queue_ns + self.prefill_ns

    @property
    def tpot_ns(self) -> int | None:
        """Mean time per output token after the first; ``None`` with fewer than two tokens."""
        if self.num_output_tokens < 2:
            return None
        return (self.handoff_ns + self.decode_ns) // (self.num_output_tokens - 1)


def breakdown_from_times(
    arrival_ns: int,
    first_step_ns: int | None,
    first_token_ns: int | None,
    end_ns: int,
    num_output_tokens: int,
    handoff_end_ns: int | None = None,
) -> LatencyBreakdown:
    """Split [arrival, end] at the event times in between; a part that was never reached takes no time."""
    start = end_ns if first_step_ns is None else first_step_ns
    token = end_ns if first_token_ns is None else first_token_ns
    taken_over = token if handoff_end_ns is None else handoff_end_ns
    return LatencyBreakdown(
        queue_ns=start - arrival_ns,
        prefill_ns=token - start,
        handoff_ns=taken_over - token,
        decode_ns=end_ns - taken_over,
        num_output_tokens=num_output_tokens,
    )
