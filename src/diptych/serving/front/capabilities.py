"""What an engine can do, as it was found out when it came up; and the protocol of the adapters that find it out.

An adapter is one file of adapters/ and one line in ADAPTERS. The rest of the front reads capabilities, never a kind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from diptych.control.compute_share import ComputeShare
from diptych.serving.front.engine_connection import ConnectionPool
from diptych.serving.front.engine_load import EngineGauges
from diptych.serving.front.engine_spec import EngineKind, EngineSpec
from diptych.serving.front.relay_request import RelayRequest
from diptych.serving.front.tokenized_prompt import TokenizedPrompt
from diptych.serving.link.messages import Ready

HandoffKind = Literal["", "nixl", "bootstrap"]
UNKNOWN_BLOCKS = 1 << 16  # of an engine that does not say how large its KV cache is
MAX_SEQS = 4096


class EngineNotReadyError(Exception):
    """The engine does not serve yet, or not as it must; the words say why."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """tokenizes: gives the token ids of a prompt. tokens_in: takes a chat as these tokens. tokens_out: names the tokens
    of its answers, so that another engine can continue them. cached_tokens: says how many prompt tokens it found in its
    cache. gauges: says how busy it is. kv_events: publishes what its cache holds. handoff: how a prompt goes from one
    such engine to another. step_times: says how long its steps take."""

    tokenizes: bool = False
    tokens_in: bool = False
    tokens_out: bool = False
    cached_tokens: bool = False
    gauges: bool = False
    kv_events: bool = False
    handoff: HandoffKind = ""
    step_times: bool = False


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine that serves. version: "" where it does not say. max_model_len, num_blocks, block_size: 0 where it does
    not say. degraded: capabilities that this kind of engine has and this one lacks, each with its reason. kv_sources:
    where it publishes what its cache holds, and repeats that ("": nowhere)."""

    kind: EngineKind
    version: str
    model: str
    max_model_len: int = 0
    num_blocks: int = 0
    block_size: int = 0
    capabilities: Capabilities = Capabilities()
    degraded: tuple[str, ...] = ()
    kv_sources: tuple[str, str] = ("", "")

    def num_blocks_of(self, block_size: int) -> int:
        """Size of the engine's KV cache, in blocks of ``block_size`` tokens."""
        if not self.num_blocks:
            return UNKNOWN_BLOCKS
        return max(1, self.num_blocks * max(1, self.block_size) // block_size)

    def ready(self, url: str, block_size: int) -> Ready:
        """What the fleet knows of the engine, in blocks of ``block_size`` tokens."""
        num_blocks = self.num_blocks_of(block_size)
        num_tokens = num_blocks * block_size
        return Ready(
            0,
            self.max_model_len or num_tokens,
            num_tokens,
            MAX_SEQS,
            MAX_SEQS,
            [],
            self.description,
            address=url,
            num_blocks=num_blocks,
            block_size=block_size,
            share=ComputeShare(),
        )

    @property
    def description(self) -> str:
        """One line for people."""
        parts = [f"{self.kind} {self.version or '(version not said)'}", self.model]
        if self.degraded:
            parts.append(f"degraded: {'; '.join(self.degraded)}")
        return ", ".join(parts)


def described(facts: EngineFacts | None) -> dict[str, Any]:
    """An engine for people; nulls while nothing is known of it."""
    if facts is None:
        return {"version": None, "model": None, "max_model_len": None, "capabilities": None, "degraded": []}
    return {
        "version": facts.version,
        "model": facts.model,
        "max_model_len": facts.max_model_len,
        "capabilities": asdict(facts.capabilities),
        "degraded": list(facts.degraded),
    }


class EngineAdapter(Protocol):
    """How one kind of engine is spoken to, besides OpenAI's API. gauge_path: of its metrics page ("": it has none)."""

    gauge_path: str

    async def look(self, pool: ConnectionPool, spec: EngineSpec) -> EngineFacts:
        """Ask for a real token, and for what the engine is. Raises EngineNotReadyError."""
        ...

    def changes(self, request: RelayRequest, facts: EngineFacts) -> dict[str, Any]:
        """Fields that are added to a request, besides the model."""
        ...

    def read_gauges(self, page: bytes) -> EngineGauges | None:
        """None where the page says nothing."""
        ...

    async def tokenize(self, pool: ConnectionPool, request: RelayRequest, facts: EngineFacts) -> TokenizedPrompt | None:
        """The prompt as the engine will see it; None where it cannot say. Raises ConnectionError or TimeoutError."""
        ...

    async def text_of(self, pool: ConnectionPool, token_ids: Sequence[int], model: str) -> str | None:
        """Text of tokens that the engine named; None where it cannot say. Raises ConnectionError or TimeoutError."""
        ...


def whole_number(value: Any, default: int = 0) -> int:
    """A count that an engine gave, or the default for anything else."""
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else default


def text_in(fields: Mapping[str, Any], *names: str) -> str:
    """The first of these fields that is text ("": none)."""
    return next((value for name in names if isinstance(value := fields.get(name), str)), "")
