"""What a worker tells a router about itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a worker says of itself.

    backlog_ns: prompt work of all that wait or are half done there, as its step-time model sees it. token_ns, pair_ns,
    fixed_ns, sequence_ns, context_ns: that model's prices of a prompt token, of a (query, key) pair, of a step, of a
    decoding sequence and of a token of its context. output_tokens: generated so far by the requests that are there now.
    tpot_ns: how long a step may take while streams run there (0: whatever it takes).
    """

    time_ns: int
    backlog_ns: int
    num_blocks: int
    used_blocks: int
    token_ns: float
    pair_ns: float
    fixed_ns: float = 0.0
    sequence_ns: float = 0.0
    context_ns: float = 0.0
    output_tokens: int = 0
    tpot_ns: int = 0
