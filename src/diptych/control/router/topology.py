"""The fleet as the front end knows it: each worker's role, memory and place, and what lies between two of them.

Must never know load or content; that is in scorers.py and prefix_index.py.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_S

Role = Literal["prefill", "decode", "both"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "both")


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker. pool: the shared memory that its blocks lie in; equal pools hand off without bytes (None: memory of
    its own). island: the NVLink domain. is_long_pool: meant for long prompts; takes short ones only when idle."""

    number: int
    role: Role
    num_blocks: int
    block_size: int
    host: str = "local"
    pool: int | None = None
    island: str = ""
    is_long_pool: bool = False

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(f"role is {self.role!r}; one of {', '.join(ROLES)}", param="role")
        for name in ("num_blocks", "block_size"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1", param=name)


class Level(IntEnum):
    """How near two workers are; nearer is less."""

    POOL = 0  # blocks change owner, nothing travels
    HOST = 1
    ISLAND = 2
    NETWORK = 3


def level(a: WorkerInfo, b: WorkerInfo) -> Level:
    """The nearest thing that two workers share."""
    if a.pool is not None and a.pool == b.pool:
        return Level.POOL
    if a.host == b.host:
        return Level.HOST
    return Level.ISLAND if a.island and a.island == b.island else Level.NETWORK


@dataclass(frozen=True, slots=True)
class LinkCost:
    """One level: bytes_per_s that a transfer gets, and what its end costs after the last byte."""

    bytes_per_s: int
    latency_ns: int

    def __post_init__(self) -> None:
        if self.bytes_per_s < 1 or self.latency_ns < 0:
            raise ConfigError(
                f"a link of {self.bytes_per_s} bytes/s and {self.latency_ns} ns; at least 1 and 0",
                param="bytes_per_s",
            )


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """What handing KV over costs, per level. bytes_per_token: KV of one token (0: not known, only latencies count).
    chunk_tokens: transfers follow the prefill in pieces of so many; the last piece cannot overlap with it."""

    bytes_per_token: int = 0
    chunk_tokens: int = 512
    pool_latency_ns: int = 1_000_000
    host: LinkCost = field(default_factory=lambda: LinkCost(5_000_000_000, 2_000_000))
    island: LinkCost = field(default_factory=lambda: LinkCost(300_000_000_000, 2_000_000))
    network: LinkCost = field(default_factory=lambda: LinkCost(1_150_000_000, 3_000_000))

    def __post_init__(self) -> None:
        if self.bytes_per_token < 0 or self.chunk_tokens < 1 or self.pool_latency_ns < 0:
            raise ConfigError(
                f"bytes_per_token is {self.bytes_per_token}, chunk_tokens {self.chunk_tokens}, pool_latency_ns "
                f"{self.pool_latency_ns}; at least 0, 1 and 0",
                param="bytes_per_token",
            )

    def transfer_ns(self, at: Level, num_tokens: int) -> int:
        """Time on the wire of the KV of so many tokens, without latency."""
        if at is Level.POOL:
            return 0
        link = (self.host, self.island, self.network)[at - 1]
        return -(-num_tokens * self.bytes_per_token * NS_PER_S // link.bytes_per_s)

    def exposed_ns(self, at: Level, num_tokens: int, prefill_ns: int) -> int:
        """What is left of the transfer when a prefill of ``prefill_ns`` ends: at least its last piece, and what the
        link could not carry meanwhile."""
        if at is Level.POOL:
            return self.pool_latency_ns
        link = (self.host, self.island, self.network)[at - 1]
        scale = self.bytes_per_token * NS_PER_S  # (as in transfer_ns, which costs too much where this is asked)
        last_ns = -(-min(num_tokens, self.chunk_tokens) * scale // link.bytes_per_s)
        return link.latency_ns + max(last_ns, -(-num_tokens * scale // link.bytes_per_s) - prefill_ns)
