"""Lays the work of one step out as the flat InputBatch that a forward pass reads."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from diptych.control.step import ScheduledPrefill
from diptych.runtime.decode_rows import DecodeRows
from diptych.runtime.input_batch import InputBatch
from diptych.runtime.request_state import RequestState


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """One prefill of the step. ``scores``: positions [first, last) whose next token's probability is asked for."""

    plan: ScheduledPrefill
    state: RequestState
    scores: range


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Sequences are the slots from ``first_slot``; those before ``last_slot`` sample a token.

    The rows of ``batch.sample_rows``: one per sampling slot in slot order, then the scored rows of each chunk.
    """

    batch: InputBatch
    first_slot: int
    last_slot: int
    chunks: tuple[PromptChunk, ...]

    @property
    def num_samples(self) -> int:
        """Rows that a token is sampled from."""
        return self.last_slot - self.first_slot


def scored_positions(state: RequestState, plan: ScheduledPrefill) -> range:
    """Positions of a chunk whose logits say how likely the next prompt token was, not counting those done before."""
    if state.params.prompt_logprobs is None:
        return range(0)
    first = max(plan.start, state.num_scored_tokens)
    return range(first, max(first, min(plan.start + plan.num_tokens, state.num_prompt_tokens - 1)))


def lay_out_decodes(batch: DecodeRows, device: torch.device) -> StepLayout:
    """A step in which every member of the decode batch computes one token, and nothing else."""
    count = len(batch)
    context_lens = (batch.positions[:count] + 1).astype(np.int32)
    rows = np.arange(count + 1, dtype=np.int32)
    tensors = InputBatch(
        token_ids=_tensor(batch.inputs[:count], device),
        positions=_tensor(batch.positions[:count], device),
        slot_mapping=_tensor(batch.slot_mapping(0, count), device),
        query_start=_tensor(rows, device),
        context_lens=_tensor(context_lens, device),
        block_tables=_tensor(batch.block_tables[:count], device),
        sample_rows=_tensor(rows[:count].astype(np.int64), device),
        num_decodes=count,
        max_query_len=1,
        max_context_len=int(context_lens.max()),
    )
    return StepLayout(tensors, 0, count, ())


def lay_out_step(
    batch: DecodeRows, num_decodes: int, prefills: Sequence[ScheduledPrefill], states: Sequence[RequestState],
    device: torch.device,
) -> StepLayout:  # fmt: skip
    """A step with prefills. Prompts that end here join the decode batch first; the others use scratch slots."""
    members = len(batch)
    first_slot = 0 if num_decodes else members
    chunks = [
        PromptChunk(plan, state, scored_positions(state, plan)) for plan, state in zip(prefills, states, strict=True)
    ]
    chunks.sort(key=lambda chunk: not chunk.plan.is_last)
    batch.reserve(members + len(chunks))
    for slot, chunk in enumerate(chunks, start=members):
        end = chunk.plan.start + chunk.plan.num_tokens
        if chunk.plan.is_last:
            batch.join(chunk.state, end - 1, chunk.plan.block_ids)
        else:
            batch.set_block_table(slot, chunk.plan.block_ids)
    last_slot = len(batch)
    lengths = np.array([1] * num_decodes + [chunk.plan.num_tokens for chunk in chunks], dtype=np.int32)
    query_start = np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(lengths, dtype=np.int32)])
    ends = [chunk.plan.start + chunk.plan.num_tokens for chunk in chunks]
    context_lens = np.concatenate([batch.positions[:num_decodes] + 1, ends]).astype(np.int32)
    sampled_rows = query_start[1 : 1 + last_slot - first_slot].astype(np.int64) - 1
    scored_rows = [
        np.arange(chunk.scores.start, chunk.scores.stop) - chunk.plan.start + query_start[num_decodes + index]
        for index, chunk in enumerate(chunks)
    ]
    tensors = InputBatch(
        token_ids=_tensor(_token_ids(batch, num_decodes, chunks), device),
        positions=_tensor(_positions(batch, num_decodes, chunks), device),
        slot_mapping=_tensor(_slot_mapping(batch, num_decodes, chunks), device),
        query_start=_tensor(query_start, device),
        context_lens=_tensor(context_lens, device),
        block_tables=_tensor(batch.block_tables[first_slot : members + len(chunks)], device),
        sample_rows=_tensor(np.concatenate([sampled_rows, *scored_rows]).astype(np.int64), device),
        num_decodes=num_decodes,
        max_query_len=int(lengths.max()),
        max_context_len=int(context_lens.max()),
    )
    return StepLayout(tensors, first_slot, last_slot, tuple(chunks))


def _token_ids(batch: DecodeRows, num_decodes: int, chunks: Sequence[PromptChunk]) -> npt.NDArray[np.int64]:
    parts = [chunk.state.token_ids[chunk.plan.start : chunk.plan.start + chunk.plan.num_tokens] for chunk in chunks]
    return np.concatenate([batch.inputs[:num_decodes], *parts]).astype(np.int64)


def _positions(batch: DecodeRows, num_decodes: int, chunks: Sequence[PromptChunk]) -> npt.NDArray[np.int64]:
    parts = [np.arange(chunk.plan.start, chunk.plan.start + chunk.plan.num_tokens) for chunk in chunks]
    return np.concatenate([batch.positions[:num_decodes], *parts]).astype(np.int64)


def _slot_mapping(batch: DecodeRows, num_decodes: int, chunks: Sequence[PromptChunk]) -> npt.NDArray[np.int64]:
    parts = [batch.slot_mapping(0, num_decodes)]
    for chunk in chunks:
        positions = np.arange(chunk.plan.start, chunk.plan.start + chunk.plan.num_tokens)
        block_ids = np.array(chunk.plan.block_ids, dtype=np.int64)
        parts.append(block_ids[positions // batch.block_size] * batch.block_size + positions % batch.block_size)
    return np.concatenate(parts)


def _tensor(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array on the device; on CPUs without a copy."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=False)
