"""A request as the runner knows it: its tokens and how to sample, which the control code never sees."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

from diptych.control.constraint import TokenConstraint
from diptych.control.engine.kvcache.prefix_cache import hash_block, hash_blocks, root_hash
from diptych.control.errors import InvalidRequestError
from diptych.control.request import SamplingParams
from diptych.runtime.step.ngram_proposer import NgramProposer


class RequestState:
    """One request from ``add_request`` until the plan that says it finished.

    While it is a member of the decode batch, the batch holds its tokens and ``token_ids`` is stale.
    """

    __slots__ = (
        "block_size",
        "constraint",
        "drafted",
        "has_stop_ids",
        "hash_parent",
        "is_plain",
        "lookup",
        "next_look",
        "num_forced",
        "num_hashed_blocks",
        "num_prompt_tokens",
        "num_scored_tokens",
        "params",
        "pooled",
        "request_id",
        "sampling_seed",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        params: SamplingParams,
        constraint: TokenConstraint | None = None,
    ) -> None:
        self.request_id = request_id
        self.token_ids: npt.NDArray[np.int32] = np.array(token_ids, dtype=np.int32)
        self.num_prompt_tokens = num_prompt_tokens
        self.params = params
        self.sampling_seed = seed_of(request_id) if params.seed is None else params.seed
        self.stop_ids: tuple[int, ...] = ()
        self.has_stop_ids = bool(params.stop_token_ids)
        self.is_plain = _is_plain(params) and constraint is None
        self.constraint = constraint
        self.drafted: tuple[int, ...] = ()  # tokens that may follow the newest one
        self.num_forced = 0  # of these, at the front
        self.lookup: NgramProposer | None = None  # where drafts come from, once its answer has begun
        self.next_look = 0  # how many tokens it has when they are looked up again; until then nothing is guessed
        self.num_scored_tokens = 0  # prompt tokens whose rows were used for prompt_logprobs or for the mean
        self.pooled: torch.Tensor | None = None  # the sum of these rows, for the mean
        self.block_size = 1
        self.hash_parent = b""
        self.num_hashed_blocks = 0

    def start_hashing(self, block_size: int, salt: str | None, block_hashes: Sequence[bytes] | None) -> None:
        """Begin the chain of block hashes after those that control knows: ``block_hashes``, or (None) those of all full
        blocks so far. The two differ by one where a prompt was computed elsewhere and its first token fills a block."""
        self.block_size = block_size
        if block_hashes is None:
            block_hashes = hash_blocks(self.token_ids.tolist(), block_size, salt)
        self.num_hashed_blocks = len(block_hashes)
        self.hash_parent = block_hashes[-1] if block_hashes else root_hash(salt)

    def hash_through(self, num_computed: int, token_ids: npt.NDArray[np.int32]) -> list[tuple[str, bytes]]:
        """(request_id, hash) of blocks that are full now that ``num_computed`` of ``token_ids`` are computed, and
        that were not reported before."""
        full = []
        size = self.block_size
        while self.num_hashed_blocks < num_computed // size:
            start = self.num_hashed_blocks * size
            self.hash_parent = hash_block(self.hash_parent, token_ids[start : start + size].tolist())
            self.num_hashed_blocks += 1
            full.append((self.request_id, self.hash_parent))
        return full


def seed_of(request_id: str) -> int:
    """The seed of a request that has none: a function of its id, so that every worker agrees on it."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little", signed=True)


def check_tokens(token_ids: Sequence[int], params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequestError when a token id is not in the vocabulary."""
    for param, ids in (("prompt", token_ids), ("logit_bias", params.logit_bias)):
        if len(ids) and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise InvalidRequestError(
                f"{param} holds token ids from {min(ids)} to {max(ids)}; the vocabulary has 0 to {vocab_size - 1}",
                param=param,
            )


def _is_plain(params: SamplingParams) -> bool:
    """Whether the most likely token is all that is asked for."""
    return params.temperature == 0 and params.logprobs is None and not adjusts_logits(params)


def adjusts_logits(params: SamplingParams) -> bool:
    """Whether logits are changed before a token is picked."""
    return bool(params.logit_bias or params.min_tokens) or penalizes(params)


def penalizes(params: SamplingParams) -> bool:
    """Whether tokens that were there before are less likely, or more."""
    return params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)
