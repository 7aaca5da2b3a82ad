"""What a replica tells a router about itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a replica says of itself. backlog_ns: prompt work of all that wait or are half done there, as its
    step-time model sees it. token_ns, pair_ns: that model's prices of a prompt token and of a (query, key) pair."""

    time_ns: int
    backlog_ns: int
    num_blocks: int
    used_blocks: int
    token_ns: float
    pair_ns: float
