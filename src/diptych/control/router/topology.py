"""The fleet as the router knows it: each worker's role, memory and place, and what lies between two of them.

Load and content are elsewhere: costs.py and prefix_index.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from diptych.control.compute_share import ComputeShare
from diptych.control.errors import ConfigError
from diptych.control.kv_layout import KVGroup, KVLayout
from diptych.control.slo import NS_PER_S

ANY_LENGTH = 2**62
Role = Literal["prefill", "decode", "both"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "both")


def has_both_phases(roles: Iterable[Role]) -> bool:
    """Whether workers with these roles can prefill and decode."""
    found = set(roles)
    return "both" in found or {"prefill", "decode"} <= found


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker, as it is when it comes up. memory_domain: the shared memory that its blocks lie in; workers of one
    domain hand off without moving bytes (None: memory of its own). share: what it computes on. max_model_len: the
    longest sequence that it takes, prompt and answer together (ANY_LENGTH: as long as its blocks hold). model_copy:
    workers of one copy of the model compute the same KV, and only they hand sequences to each other. host, rack: names,
    as the worker says ("": it does not). host_domain: workers of one such domain, and of one model copy, read each
    other's host blocks (None: nobody reads them). groups: of its model's layers, each with blocks of its own (none: all
    layers keep all tokens)."""

    number: int
    role: Role
    num_blocks: int
    block_size: int
    host: str = "local"
    memory_domain: int | None = None
    share: ComputeShare = field(default_factory=ComputeShare)
    max_model_len: int = ANY_LENGTH
    model_copy: int = 0
    rack: str = ""
    host_domain: int | None = None
    groups: tuple[KVGroup, ...] = ()

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(f"role is {self.role!r}; one of {', '.join(ROLES)}", param="role")
        for name, least in (("num_blocks", 1), ("block_size", 1), ("max_model_len", 1), ("model_copy", 0)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}", param=name)

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that fits into its context and its blocks."""
        if self.groups:
            if self.num_blocks_for(self.max_model_len) <= self.num_blocks:  # mostly; the other way is a search
                return self.max_model_len
            return KVLayout(self.groups).capacity_tokens(self.num_blocks)
        return min(self.max_model_len, self.num_blocks * self.block_size)

    @property
    def has_windows(self) -> bool:
        """Whether blocks are free that lie before a window, so that a prefix of a prompt can be gone on from at
        boundaries alone (see Hit)."""
        return any(group.window_tokens for group in self.groups)

    def num_blocks_for(self, num_tokens: int) -> int:
        """The blocks of a sequence of that many tokens."""
        if self.groups:
            return KVLayout(self.groups).peak_pages(num_tokens)
        return -(-num_tokens // self.block_size)


class Level(IntEnum):
    """How near two workers are; nearer is less."""

    MEMORY = 0  # blocks change owner, nothing travels
    HOST = 1
    NETWORK = 2
    FAR = 3  # in another rack


def level(a: WorkerInfo, b: WorkerInfo) -> Level:
    """The nearest thing that two workers share."""
    if a.memory_domain is not None and a.memory_domain == b.memory_domain:
        return Level.MEMORY
    if a.host == b.host:
        return Level.HOST
    return Level.FAR if a.rack and b.rack and a.rack != b.rack else Level.NETWORK


@dataclass(frozen=True, slots=True)
class LinkCost:
    """One path: bytes_per_s that a transfer gets, and what its end costs after the last byte."""

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
    """What handing KV over costs, per level, before anything was measured. bytes_per_token: KV of one token (0: not
    known, only latencies count). windows: of each of the groups of equally many layers that share these bytes, how many
    tokens it attends to (0: all): only the newest of these travel ((): all attend to all). chunk_tokens: transfers
    follow the prefill in pieces of this size; the last piece cannot overlap with it. memory_latency_ns: of a handoff
    within one memory domain, where only a commit travels. far: between racks (as if two transfers at a time shared what
    a card carries)."""

    bytes_per_token: int = 0
    chunk_tokens: int = 512
    memory_latency_ns: int = 1_000_000
    host: LinkCost = field(default_factory=lambda: LinkCost(5_000_000_000, 2_000_000))
    network: LinkCost = field(default_factory=lambda: LinkCost(1_150_000_000, 3_000_000))
    far: LinkCost = field(default_factory=lambda: LinkCost(575_000_000, 4_000_000))
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(window < 0 for window in self.windows):
            raise ConfigError(f"windows are {self.windows}; each must be at least 0", param="windows")
        if self.bytes_per_token < 0 or self.chunk_tokens < 1 or self.memory_latency_ns < 0:
            raise ConfigError(
                f"bytes_per_token is {self.bytes_per_token}, chunk_tokens {self.chunk_tokens}, memory_latency_ns "
                f"{self.memory_latency_ns}; at least 0, 1 and 0",
                param="bytes_per_token",
            )

    def link(self, at: Level) -> LinkCost | None:
        """Costs of a link at this level; None if nothing travels."""
        if at is Level.MEMORY:
            return None
        return self.host if at is Level.HOST else self.network if at is Level.NETWORK else self.far

    def kv_bytes(self, num_tokens: int) -> int:
        """KV of the newest ``num_tokens`` tokens of a prompt, as it travels when the prompt is computed."""
        if not self.windows:
            return num_tokens * self.bytes_per_token
        rows = sum([min(num_tokens, window) if window else num_tokens for window in self.windows])
        return rows * self.bytes_per_token // len(self.windows)

    def exposed_ns(self, link: LinkCost | None, num_tokens: int, prefill_ns: int) -> int:
        """Time that the transfer of ``num_tokens`` tokens takes beyond a prefill of ``prefill_ns``: at least its last
        piece, and what the link could not carry meanwhile."""
        if link is None:
            return self.memory_latency_ns
        last_ns, all_ns = [
            -(-self.kv_bytes(count) * NS_PER_S // link.bytes_per_s)
            for count in (min(num_tokens, self.chunk_tokens), num_tokens)
        ]
        return link.latency_ns + max(last_ns, all_ns - prefill_ns)
