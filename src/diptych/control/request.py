"""A request as the control code sees it: counts, times and block hashes, never token ids.

SamplingParams   how its tokens are picked
RequestOptions   what else it asks for: one record, passed on whole
Submission       the request as the fleet knows it (cluster, admission queue, router)
Request          one attempt at it, on one worker (engine)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Literal, get_args

from diptych.control.errors import InvalidRequestError
from diptych.control.length_predictor import LengthGroup
from diptych.control.slo import Slo

MAX_LOGPROBS = 20
Pooling = Literal["last", "mean"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
ServiceClass = Literal["interactive", "standard", "batch"]
SERVICE_CLASSES: tuple[str, ...] = get_args(ServiceClass)
BlockTables = tuple[tuple[int, ...], ...]  # by group of layers: where the KV of a sequence lies, a block id for each
# block of its tokens; a model whose layers are all alike has one group
NO_BLOCK = -1  # in tables that a worker lends: blocks that the one which computes them has of its own
MAX_SEED = 2**63 - 1


def only_table(tables: BlockTables) -> tuple[int, ...]:
    """The block table of a model whose layers are one group. Raises ValueError for any other."""
    (block_ids,) = tables
    return block_ids


class FinishReason(StrEnum):
    """Why a request ended; each request ends exactly once."""

    STOP = "stop"  # end-of-sequence or a stop token id or a stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # the client went away or asked to stop
    ERROR = "error"  # it could not be served; the event carries the message


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to pick tokens. The names and defaults are those of the OpenAI API and of vLLM.

    temperature 0 is greedy. top_k 0 or -1 keeps all. logprobs/prompt_logprobs: number of alternatives per position
    (0: only the chosen token). seed None: one is drawn per request by the front end. grammar: that the answer follows,
    in Lark ("": none). forces_tokens: tokens of which the grammar leaves no choice are not sampled. thinking_budget:
    tokens of reasoning after which its closing mark (thinking_end) follows; thinking_begin: the opening mark, where the
    prompt does not end with it. pooling: no token is wanted but an embedding of the prompt, from the hidden state of
    its last token or the mean of those of all tokens; such a request counts one token, its last. predicted:
    tokens that the answer may well repeat, for speculation; they change no token.
    include_stop_str_in_output: the text ends with the stop string, or the text of the stop token, instead of before it.
    Raises InvalidRequestError naming the field, the value and the limit.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""
    forces_tokens: bool = True
    thinking_budget: int | None = None
    thinking_begin: tuple[int, ...] = ()
    thinking_end: tuple[int, ...] = ()
    pooling: Pooling | None = None
    predicted: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        else:
            object.__setattr__(self, "stop", tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _check_range("max_tokens", self.max_tokens, 1, math.inf)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("top_k", self.top_k, -1, math.inf)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_range("n", self.n, 1, 128)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_range(name, value, 0, MAX_LOGPROBS)
        if self.thinking_budget is not None:
            _check_range("thinking_budget", self.thinking_budget, 0, math.inf)
            if not self.thinking_end:
                raise InvalidRequestError("thinking_budget needs thinking_end, which is empty", param="thinking_end")
        if self.pooling is not None:
            _check_pooling(self)
        if self.seed is not None:
            _check_range("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        for bias in self.logit_bias.values():
            _check_range("logit_bias", bias, -100.0, 100.0)
        if any(not text for text in self.stop):
            raise InvalidRequestError("stop holds an empty string; each must have at least one character", param="stop")

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether tokens of the prompt may be left out that are in the cache: not where each of them gives a part of
        the result."""
        return self.prompt_logprobs is None and self.pooling != "mean"

    @property
    def hands_off(self) -> bool:
        """Whether one worker may begin it and another go on: not where the prompt gives a part of the result."""
        return self.prompt_logprobs is None and self.pooling is None


def _check_pooling(sampling: SamplingParams) -> None:
    if sampling.pooling not in POOLINGS:
        message = f"pooling is {sampling.pooling!r}; one of {', '.join(POOLINGS)}"
        raise InvalidRequestError(message, param="pooling")
    for name, value, only in (
        ("max_tokens", sampling.max_tokens, 1),
        ("n", sampling.n, 1),
        ("logprobs", sampling.logprobs, None),
        ("prompt_logprobs", sampling.prompt_logprobs, None),
        ("grammar", sampling.grammar, ""),
        ("thinking_budget", sampling.thinking_budget, None),
    ):
        if value != only:
            raise InvalidRequestError(f"{name} is {value!r}; with pooling it must be {only!r}", param=name)


def _check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    too_low = value <= low if open_low else value < low
    if not math.isfinite(value) or too_low or value > high:
        bracket = "(" if open_low else "["
        raise InvalidRequestError(f"{name} is {value}; it must be in {bracket}{low}, {high}]", param=name)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """What a request asks for besides its tokens and how they are sampled.

    One record that is passed on whole: from the HTTP body to the admission queue, the router, the scheduler, the
    recording and the timeline. priority: smaller goes first. service_class: interactive, standard or batch. tenant: the
    owner, for fairness ("": none). deadline_ns: from its arrival until its first token is of no more use. cache_salt:
    requests of different salts share no prefix. metadata: the client's own labels, which decide nothing.
    best_effort_ns: of class batch: for how long after its arrival on a worker it gives way to other classes (None:
    without limit).
    """

    priority: int = 0
    slo: Slo | None = None
    service_class: str = "standard"
    tenant: str = ""
    deadline_ns: int | None = None
    cache_salt: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    best_effort_ns: int | None = None

    def __post_init__(self) -> None:
        if self.service_class not in SERVICE_CLASSES:
            known = ", ".join(SERVICE_CLASSES)
            raise InvalidRequestError(f"service_class is {self.service_class!r}; one of {known}", param="service_class")
        if self.best_effort_ns is not None:
            _check_range("best_effort_ns", self.best_effort_ns, 0, math.inf)

    @property
    def is_best_effort(self) -> bool:
        """Whether it is computed only where requests of other classes have nothing to do."""
        return self.service_class == "batch" and self.best_effort_ns != 0


DEFAULT_OPTIONS = RequestOptions()


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as the cluster knows it: counts and hashes, never tokens. The admission queue and the router read this
    very record.

    hashes: of the full blocks of the prompt. hands_off: whether two workers may share it (False: one must serve it
    whole). is_resumable: whether another worker can continue the answer after its first token (False: the answer ends
    where it began, or not at all).
    """

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    hashes: tuple[bytes, ...] = ()
    options: RequestOptions = DEFAULT_OPTIONS
    hands_off: bool = True
    is_resumable: bool = True


class WaitClass(IntEnum):
    """What waiting costs the client of a request: wherever requests wait, lower goes first."""

    STREAM = 0  # it has a part of the answer, and sees a gap in the middle of it
    RETURNING = 1  # it has waited before, for an attempt that was lost or recalled
    NEW = 2


@dataclass(frozen=True, slots=True)
class PeerRun:
    """Blocks of a prompt that lie in the host memory of another worker of the host, the ``peer``, as far as the router
    knows: ``num_blocks`` from the block ``first_block`` on."""

    peer: int
    first_block: int
    num_blocks: int


class Request:
    """One request on one worker: the mutable record that the scheduler owns.

    Two counts move apart while a step runs: ``num_scheduled_tokens`` (handed to the executor) and
    ``num_computed_tokens`` (confirmed by ``end_step``). While a request decodes, both are derived from the decode
    batch's counters, so that a steady step touches no request at all (see scheduler/decode_batch.py).
    """

    __slots__ = (
        "arrival_ns",
        "awaits_kv",
        "block_hashes",
        "block_tables",
        "boundary_blocks",
        "cached_tokens_at_arrival",
        "first_blocks",
        "first_step_ns",
        "first_token_ns",
        "frozen_tables",
        "handoff_end_ns",
        "hands_off",
        "host_block_ids",
        "is_best_effort",
        "is_early_prefill",
        "is_long",
        "is_remote_prefill",
        "last_resume_tick",
        "lease_ns",
        "length_group",
        "lent_tables",
        "max_tokens",
        "num_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_hashed_blocks",
        "num_output_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_raised_tokens",
        "num_remote_tokens",
        "num_reserved_blocks",
        "num_scheduled_tokens",
        "num_shared_blocks",
        "num_slots",
        "num_tier_tokens",
        "num_wanted_blocks",
        "number",
        "options",
        "order_key",
        "peer_run",
        "raise_targets",
        "reads_prefix_cache",
        "remote_block_tables",
        "request_id",
        "slo",
        "wait_class_at_arrival",
    )

    def __init__(
        self,
        request_id: str,
        num_prompt_tokens: int,
        max_tokens: int,
        *,
        block_hashes: tuple[bytes, ...] = (),
        options: RequestOptions = DEFAULT_OPTIONS,
        reads_prefix_cache: bool = True,
    ) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.block_hashes: list[bytes] = list(block_hashes)
        self.options = options
        self.is_best_effort = options.is_best_effort  # until its time for that is over
        self.slo = options.slo  # and the engine's own objectives where it has none
        self.reads_prefix_cache = reads_prefix_cache
        self.wait_class_at_arrival = WaitClass.NEW
        self.number = -1  # arrival number on this worker: the tie-breaker of every order
        self.order_key: tuple[int, ...] = ()
        self.arrival_ns = 0
        self.first_step_ns: int | None = None
        self.first_token_ns: int | None = None
        self.hands_off = False  # after the first token another worker decodes it
        self.is_early_prefill = False  # with hands_off: that worker has no blocks for it yet
        self.awaits_kv = False  # another worker computes its prompt
        self.is_remote_prefill = False  # that one computes it into the blocks that it is given here
        self.lent_tables: list[list[int]] = []  # by group, blocks that it reads meanwhile, before those of its table
        self.peer_run: PeerRun | None = None  # that was not asked for yet
        self.remote_block_tables: BlockTables = ()  # of the worker that will decode it: computed into directly
        self.num_remote_tokens = 0  # leading tokens whose KV these blocks hold already
        self.lease_ns = 0  # with hands_off: how long its blocks are kept without a renewal (0: without limit)
        self.handoff_end_ns: int | None = None  # when this worker took it over from the one that prefilled it
        self.block_tables: list[list[int]] = []  # by group; empty: it holds no blocks
        self.frozen_tables: BlockTables | None = None  # the same, once something has asked for ``tables``
        self.first_blocks: tuple[int, ...] = ()  # by group, the index of the first block in its table; (): 0
        self.boundary_blocks: tuple[int, ...] = ()  # block counts of its prompt where others may go on, once computed
        self.num_blocks = 0  # in all tables
        self.num_slots = 0  # tokens that they hold, those of expired blocks included
        self.host_block_ids: list[int] = []  # its KV when it is swapped out; before that, what is to be copied up
        self.raise_targets: list[int] = []  # with layers of several groups: the blocks that ``host_block_ids`` go to
        self.num_raised_tokens = 0  # and the tokens that need not be computed when they are there
        self.num_hashed_blocks = 0  # leading blocks already offered to the prefix cache
        self.num_shared_blocks = 0  # leading blocks that were found in the prefix cache at the last admission
        self.num_reserved_blocks = 0  # blocks held plus growth expected, as of the last admission
        self.num_wanted_blocks = 0  # leading blocks that were offered to the disk
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_output_tokens = 0
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache when first admitted
        self.num_tier_tokens = 0  # those of them found in the tiers below, where another worker computes the rest
        self.cached_tokens_at_arrival = 0
        self.num_preemptions = 0
        self.last_resume_tick = 0
        self.length_group: LengthGroup | None = None  # requests whose answers tell how long its own will be
        self.is_long = False  # by the caps' threshold, decided when it is queued and again when it is admitted

    @classmethod
    def for_sampling(
        cls,
        request_id: str,
        num_prompt_tokens: int,
        sampling: SamplingParams,
        *,
        num_output_tokens: int = 0,
        block_hashes: tuple[bytes, ...] = (),
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> "Request":
        """The request that ``sampling`` asks for. num_output_tokens: sampled by another worker already; here they are
        the end of the prompt."""
        return cls(
            request_id,
            num_prompt_tokens + num_output_tokens,
            sampling.max_tokens - num_output_tokens,
            block_hashes=block_hashes,
            options=options,
            reads_prefix_cache=sampling.reads_prefix_cache,
        )

    @property
    def num_tokens(self) -> int:
        """Prompt plus sampled tokens (while decoding: ask the decode batch, which counts for its members)."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def tables(self) -> BlockTables:
        """Its block tables as they are now, for plans and messages: one record, until it gets or loses a block."""
        tables = self.frozen_tables
        if tables is None:
            tables = self.frozen_tables = tuple(map(tuple, self.block_tables))
        return tables

    @property
    def wait_class(self) -> WaitClass:
        """The request's present wait class."""
        return WaitClass.STREAM if self.num_output_tokens else self.wait_class_at_arrival

    @property
    def is_stream(self) -> bool:
        """Whether its client has a part of the answer."""
        return self.num_output_tokens > 0 or self.wait_class_at_arrival is WaitClass.STREAM

    @property
    def is_handed_off(self) -> bool:
        """Whether all that is to be done here is done, and its blocks wait for another worker to have them."""
        return self.hands_off and self.num_output_tokens > 0

    @property
    def priority(self) -> int:
        """Smaller goes first."""
        return self.options.priority

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, prompt={self.num_prompt_tokens})"
