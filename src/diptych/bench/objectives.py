"""Latency objectives of a request (TTFT, TPOT, ITL, E2E), and which of them a measured request missed.

TTFT and TPOT are known to the server too (``control.slo``); gaps between tokens and the end-to-end time are measured by
the client alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from diptych.control.errors import ConfigError
from diptych.control.slo import Slo

NO_ANSWER = "no answer"  # what a request missed whose answer did not come whole


@dataclass(frozen=True, slots=True)
class LatencyObjectives:
    """Nanoseconds; ``None`` means no objective.

    ttft_ns: intended sending to the first token. tpot_ns: mean time per token after the first. itl_ns: the 99th
    percentile of the request's own gaps between events with tokens (with few gaps nearly the longest of them).
    e2e_ns: intended sending to the last token.
    """

    ttft_ns: int | None = None
    tpot_ns: int | None = None
    itl_ns: int | None = None
    e2e_ns: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.items():
            if value <= 0:
                raise ConfigError(f"the objective {name} is {value} ns; it must be positive", param="slo")

    def items(self) -> Iterator[tuple[str, int]]:
        """(name, nanoseconds) of those that are set."""
        pairs = (("ttft", self.ttft_ns), ("tpot", self.tpot_ns), ("itl", self.itl_ns), ("e2e", self.e2e_ns))
        return ((name, value) for name, value in pairs if value is not None)

    @property
    def has_any(self) -> bool:
        """Whether any is set."""
        return any(True for _ in self.items())

    def or_else(self, default: "LatencyObjectives") -> "LatencyObjectives":
        """These objectives, and the default's where none is set."""
        return LatencyObjectives(
            self.ttft_ns or default.ttft_ns,
            self.tpot_ns or default.tpot_ns,
            self.itl_ns or default.itl_ns,
            self.e2e_ns or default.e2e_ns,
        )

    def for_request(self, own: Slo | None) -> "LatencyObjectives":
        """The objectives of a request that may have some of its own; these come first."""
        return LatencyObjectives(own.ttft_ns, own.tpot_ns).or_else(self) if own is not None else self

    def missed(self, measured: Mapping[str, float | None]) -> tuple[str, ...]:
        """Names of the objectives that these times (by name, in nanoseconds) exceed; None: there is no such time."""
        return tuple(name for name, limit in self.items() if (time := measured[name]) is not None and time > limit)

    def overdue(self, waited_ns: int, *, has_token: bool) -> tuple[str, ...]:
        """Names of the objectives that a request missed already that was due ``waited_ns`` ago and has not ended."""
        limits = {"ttft": None if has_token else self.ttft_ns, "e2e": self.e2e_ns}
        return tuple(name for name, limit in limits.items() if limit is not None and waited_ns > limit)
