"""What an Executor gets (SchedulerOutput) and gives back (StepResult).

A plan names only what changes. The executor keeps its own decode batch: every member of it computes one token in each
step whose ``num_decodes`` is not 0; a plan says which requests joined, which left, and which blocks were appended. A
steady decode step is therefore described by a plan of constant size, however large the batch is.

A member may compute more than one token in a step. The executor may know what comes next in its answer: tokens that a
constraint forces, or a draft that it found in the prompt (a DraftProposal). The plan of the next step takes as many of
them as it wants (a VerifyRows), and the step computes them as if they had been sampled. The model's own choices at
these positions say how many were right; only these, and the choice that follows them, are tokens of the answer.

The records of plans and results are replaced, never changed. (They are not frozen only because some are made in every
step, and a frozen one takes four times as long to make.)
"""

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Protocol

from diptych.control.request import BlockTables, FinishReason


@dataclass(slots=True)
class ScheduledPrefill:
    """One chunk of one prompt.

    Tokens [start, start + num_tokens) are computed; KV of [0, start) lies in the leading blocks already.
    ``block_tables`` are those of the request, whole. With ``is_last`` the chunk ends the prompt: one token is sampled
    from its last row and the request is a member of the decode batch from the next step on (unless the plan of that
    step says it left). ``first_blocks``: for each table, the index of its first block; those before it have expired,
    which no token reads any more ((): none has, in any).
    """

    request_id: str
    start: int
    num_tokens: int
    block_tables: BlockTables
    is_last: bool
    first_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ResumedDecode:
    """A request joins the decode batch without a prefill: its KV of ``num_tokens`` tokens lies in ``block_tables``.

    Its newest sampled token (position num_tokens) is the input of its first step.
    """

    request_id: str
    num_tokens: int
    block_tables: BlockTables
    first_blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """A member of the decode batch computes ``num_tokens`` (>= 1) of the tokens of its last DraftProposal besides its
    newest one. Its blocks hold them all."""

    request_id: str
    num_tokens: int


@dataclass(slots=True)
class SchedulerOutput:
    """The plan of one step. Executors apply it in this order: finished, paused, swap_out, block_copies, swap_in,
    resumed, new_blocks, then compute prefills and decodes together.

    finished: requests that ended; forget everything. paused: requests that left the decode batch but will come back
    (keep their tokens). swap_out / swap_in: (device block, host block) / (host block, device block) copies.
    block_copies: (cached block here, block of another worker of the same memory that a prefill is computed into).
    new_blocks: (request_id, group, block id) appended to one of the block tables of a decode member. num_decodes:
    members of the decode batch that compute a token in this step (0: the decode batch rests). max_repeats: if no
    message arrives, this many steps (>= 1) in a row decide nothing: the batch stays, no request ends before the last of
    them, and the blocks that members need meanwhile are there. A live executor runs one step of it and asks again; a
    simulated one may take them at once and say so to ``EngineCore.end_step``. verify_rows: members of the decode batch
    that compute more than one token; the features count each of these tokens as a decode. num_blocks: the executor
    keeps the first that many blocks of the KV cache and may give up the memory of the others (0: all that it has).
    """

    step_id: int
    prefills: tuple[ScheduledPrefill, ...] = ()
    num_decodes: int = 0
    finished: tuple[str, ...] = ()
    paused: tuple[str, ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    resumed: tuple[ResumedDecode, ...] = ()
    new_blocks: tuple[tuple[str, int, int], ...] = ()
    features: "StepFeatures" = field(default_factory=lambda: StepFeatures())
    predicted_ns: int = 0
    max_repeats: int = 1
    block_copies: tuple[tuple[int, int], ...] = ()
    verify_rows: tuple[VerifyRows, ...] = ()
    num_blocks: int = 0

    @property
    def is_compute(self) -> bool:
        """Whether the step computes anything (otherwise it only carries bookkeeping to the executor)."""
        return bool(self.prefills) or self.num_decodes > 0


@dataclass(slots=True)
class StepFeatures:
    """What the duration of a step depends on (the regressors of the step-time model).

    prefill_attention: sum over chunks of the (query, key) pairs: n*start + n*(n+1)/2.
    decode_seqs: rows of decode sequences: one for each, and its extra rows.
    decode_context: sum over these of the tokens that each attends to.
    """

    prefill_tokens: int = 0
    prefill_attention: int = 0
    decode_seqs: int = 0
    decode_context: int = 0


def chunk_attention(start: int, num_tokens: int) -> int:
    """(query, key) pairs of a causal chunk of ``num_tokens`` after ``start`` tokens of context."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities under the model's own distribution (before penalties and temperature).

    top: the most likely tokens, best first, as (token id, log probability).
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


PromptLogprobs = dict[str, tuple[int, list[TokenLogprobs]]]


@dataclass(slots=True)
class StepTokens:
    """The tokens of one step, for the driver: request_ids[i] got token_ids[i]. A request that got several is there
    several times in a row, in the order of its tokens.

    logprobs: by index of the token; only of requests that asked. prompt_logprobs: (position of the first, one entry per
    prompt position) of the chunk that was computed; a prompt's first token has none, nor have tokens found in the
    prefix cache. embeddings: of requests with pooling, whose prompts end in the step and which get no token: the vector
    of length 1, little-endian float32.
    """

    request_ids: list[str]
    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: PromptLogprobs = field(default_factory=dict)
    embeddings: dict[str, bytes] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """True if the step produced no tokens."""
        return not (self.request_ids or self.prompt_logprobs or self.embeddings)

    def is_last(self, index: int) -> bool:
        """Whether this token is the last that its request got in the step."""
        return index + 1 == len(self.request_ids) or self.request_ids[index + 1] != self.request_ids[index]

    def of_open(self, requests: Container[str]) -> "StepTokens":
        """Those of ``requests``: without those of requests that ended while the step was under way."""
        if all(request_id in requests for request_id in self.request_ids):
            return self
        kept = StepTokens([], [], prompt_logprobs=self.prompt_logprobs, embeddings=self.embeddings)
        for index, (request_id, token_id) in enumerate(zip(self.request_ids, self.token_ids, strict=True)):
            if request_id in requests:
                if index in self.logprobs:
                    kept.logprobs[len(kept.token_ids)] = self.logprobs[index]
                kept.request_ids.append(request_id)
                kept.token_ids.append(token_id)
        return kept


@dataclass(frozen=True, slots=True)
class DraftProposal:
    """The executor knows what may follow the newest token of a request, at least one token.

    chances[i]: the probability that the first i + 1 of these tokens will all be right, as measured so far; falling. A
    token that is forced has that of the token before it (1 for the first).
    """

    request_id: str
    chances: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What came of a member's VerifyRows. num_tokens: how many were computed. num_accepted: how many of these are
    tokens of its answer, so that it got one more than these. num_forced: how many of the computed were forced."""

    request_id: str
    num_tokens: int
    num_accepted: int
    num_forced: int = 0


@dataclass(slots=True)
class StepResult:
    """What the executor reports. Each decode member and each last prefill chunk of the step sampled one token; a member
    with extra rows, as many more as its VerifyResult says.

    stopped: requests whose sampled token ends them (end-of-sequence, stop token id).
    full_blocks: (request_id, hash) of blocks of *output* that became full and computed in this step, in order.
    failed: requests that the executor could not compute, with the message for their client.
    beyond_grammar: those of the failed whose own grammar was too much to follow.
    extra: one for each of the plan's verify_rows, but for those that failed.
    proposals: what may come next. An proposal stands for the next step in which its request decodes.
    payload: the tokens themselves, for the driver; the control code never looks at them.
    is_out_of_memory: the step took more memory than there was, and computed nothing; its requests are among the failed.
    num_blocks: blocks that the KV cache shall have from now on, fewer than before (0: as many).
    """

    step_id: int
    stopped: tuple[tuple[str, FinishReason], ...] = ()
    full_blocks: tuple[tuple[str, bytes], ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    payload: StepTokens | None = None
    extra: tuple[VerifyResult, ...] = ()
    proposals: tuple[DraftProposal, ...] = ()
    beyond_grammar: frozenset[str] = frozenset()
    is_out_of_memory: bool = False
    num_blocks: int = 0


class StepBrokenOff(Exception):
    """Raised inside ``execute`` by a driver when all requests of the step were dropped: they are to be ended before
    ``EngineCore.end_step`` is called with num_steps 0."""


class Executor(Protocol):
    """Turns plans into results: ModelRunner (torch), SimulatedExecutor (a cost model).

    Plans arrive in step order, each exactly once, and are executed in that order.
    """

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Run one step. Must not raise for the fault of a single request (report it in ``failed``)."""
        ...
