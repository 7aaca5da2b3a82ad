"""Lays the work of one step out as the flat InputBatch that a forward pass reads."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from diptych.control.step import ScheduledPrefill
from diptych.runtime.attention.input_batch import InputBatch
from diptych.runtime.device.host_copies import ToDevice
from diptych.runtime.step.decode_rows import DecodeRows
from diptych.runtime.step.request_state import RequestState

Ints = npt.NDArray[np.int64]
TABLE_COLUMNS = 16  # block tables on a device have a multiple of these


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """One prefill of the step. ``scores``: positions [first, last) whose rows are wanted besides the sampled one: for
    the probability of the next token, or for the mean of all."""

    plan: ScheduledPrefill
    state: RequestState
    scores: range


@dataclass(frozen=True, slots=True)
class DecodeRowsOfStep:
    """The rows of decode sequences, member by member: of each its input, then the offered tokens that the plan takes.

    slots: of whom each row is. places: 0 for the input, then 1, 2, ... A row is computed like a decode sequence of its
    own whose cache holds the rows before it: they all write their K and V before any of them attends.
    """

    slots: Ints
    places: Ints
    positions: Ints
    token_ids: Ints


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Sequences are the slots from ``first_slot``; those before ``last_slot`` sample a token, or several.

    The rows of ``batch.sample_rows``: those of the sampling slots in slot order, then the scored rows of each chunk.
    first_rows: per sampling slot, and then their number. extra: tokens besides the input, by slot, where there are any.
    """

    batch: InputBatch
    first_slot: int
    last_slot: int
    chunks: tuple[PromptChunk, ...]
    first_rows: Ints
    extra: dict[int, int]

    @property
    def num_members(self) -> int:
        """Slots before this one decode, or rest; those behind it belong to prompts."""
        return self.last_slot - sum([chunk.plan.is_last for chunk in self.chunks])

    @property
    def num_samples(self) -> int:
        """Rows that a token may be sampled from."""
        return int(self.first_rows[-1])


@dataclass(frozen=True, slots=True)
class _Arrays:
    """What becomes the tensors of an InputBatch. tables: which rows of the block tables."""

    token_ids: Ints
    positions: Ints
    slot_mappings: list[Ints]
    query_start: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    sample_rows: Ints
    tables: Ints | slice


def scored_positions(state: RequestState, plan: ScheduledPrefill) -> range:
    """Positions of a PromptChunk that are scored; those done before do not count. The last token of a prompt has no
    next one."""
    if state.params.pooling == "mean":
        last = state.num_prompt_tokens
    elif state.params.prompt_logprobs is not None:
        last = state.num_prompt_tokens - 1
    else:
        return range(0)
    first = max(plan.start, state.num_scored_tokens)
    return range(first, max(first, min(plan.start + plan.num_tokens, last)))


def rows_of_decodes(batch: DecodeRows, num_decodes: int, extra: dict[int, int]) -> DecodeRowsOfStep:
    """extra: offered tokens that members compute besides their inputs, by slot; the batch holds them behind these."""
    if not extra:
        slots = np.arange(num_decodes)
        places = np.zeros(num_decodes, dtype=np.int64)
        return DecodeRowsOfStep(slots, places, batch.positions[:num_decodes], batch.inputs[:num_decodes])
    counts = np.ones(num_decodes, dtype=np.int64)
    counts[list(extra)] += list(extra.values())
    slots = np.repeat(np.arange(num_decodes), counts)
    places = np.arange(len(slots)) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = batch.positions[slots] + places
    return DecodeRowsOfStep(slots, places, positions, batch.token_ids[slots, positions].astype(np.int64))


def lay_out_decodes(batch: DecodeRows, extra: dict[int, int], to_device: ToDevice) -> StepLayout:
    """A step in which every member of the decode batch computes a token, or several, and nothing else."""
    count = len(batch)
    decodes = rows_of_decodes(batch, count, extra)
    rows = np.arange(len(decodes.slots) + 1, dtype=np.int32)
    arrays = _Arrays(
        token_ids=decodes.token_ids,
        positions=decodes.positions,
        slot_mappings=batch.slot_mappings(decodes.slots, decodes.positions),
        query_start=rows,
        context_lens=(decodes.positions + 1).astype(np.int32),
        sample_rows=rows[:-1].astype(np.int64),
        tables=decodes.slots if extra else slice(count),
    )
    tensors = _input_batch(arrays, batch, to_device, len(decodes.slots), max_query_len=1)
    return StepLayout(tensors, 0, count, (), _first_rows(decodes, 0), extra)


def lay_out_ahead(batch: DecodeRows, token_ids: torch.Tensor, to_device: ToDevice) -> StepLayout:
    """A step in which every member of the decode batch computes the token behind its input, before the host knows it.
    token_ids: these tokens on the device, by slot; a negative one is none, and the row is computed for nothing."""
    count = len(batch)
    slots, positions = np.arange(count), batch.positions[:count] + 1
    rows = np.arange(count + 1, dtype=np.int32)
    arrays = _Arrays(
        token_ids=np.zeros(count, dtype=np.int64),
        positions=positions,
        slot_mappings=batch.slot_mappings(slots, positions),
        query_start=rows,
        context_lens=(positions + 1).astype(np.int32),
        sample_rows=rows[:-1].astype(np.int64),
        tables=slice(count),
    )
    tensors = _input_batch(arrays, batch, to_device, count, max_query_len=1)
    tensors.token_ids.copy_(token_ids.clamp_min(0))
    return StepLayout(tensors, 0, count, (), np.arange(count + 1), {})


def lay_out_step(
    batch: DecodeRows, num_decodes: int, extra: dict[int, int], prefills: Sequence[ScheduledPrefill],
    states: Sequence[RequestState], to_device: ToDevice,
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
            batch.join(chunk.state, end - 1, chunk.plan.block_tables, chunk.plan.first_blocks)
        else:
            batch.set_block_tables(slot, chunk.plan.block_tables, chunk.plan.first_blocks)
    last_slot = len(batch)
    decodes = rows_of_decodes(batch, num_decodes, extra)
    num_rows = len(decodes.slots)
    lengths = np.array([1] * num_rows + [chunk.plan.num_tokens for chunk in chunks], dtype=np.int32)
    query_start = np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(lengths, dtype=np.int32)])
    ends = [chunk.plan.start + chunk.plan.num_tokens for chunk in chunks]
    context_lens = np.concatenate([decodes.positions + 1, ends]).astype(np.int32)
    num_samples = num_rows + last_slot - members
    sampled_rows = query_start[1 : 1 + num_samples].astype(np.int64) - 1
    scored_rows = [
        np.arange(chunk.scores.start, chunk.scores.stop) - chunk.plan.start + query_start[num_rows + index]
        for index, chunk in enumerate(chunks)
    ]
    end_slot = members + len(chunks)
    tables: Ints | slice = slice(first_slot, end_slot)
    if extra:
        tables = np.concatenate([decodes.slots, np.arange(members, end_slot)])
    arrays = _Arrays(
        token_ids=_token_ids(decodes, chunks),
        positions=_positions(decodes, chunks),
        slot_mappings=_slot_mappings(batch, decodes, chunks),
        query_start=query_start,
        context_lens=context_lens,
        sample_rows=np.concatenate([sampled_rows, *scored_rows]).astype(np.int64),
        tables=tables,
    )
    tensors = _input_batch(arrays, batch, to_device, num_rows, max_query_len=int(lengths.max()))
    first_rows = _first_rows(decodes, last_slot - members)
    return StepLayout(tensors, first_slot, last_slot, tuple(chunks), first_rows, extra)


def _first_rows(decodes: DecodeRowsOfStep, num_more: int) -> Ints:
    """The first row of each sampling slot, and the number of rows. num_more: prompts that end in the step."""
    num_rows = len(decodes.slots)
    return np.concatenate([np.flatnonzero(decodes.places == 0), np.arange(num_rows, num_rows + num_more + 1)])


def _token_ids(decodes: DecodeRowsOfStep, chunks: Sequence[PromptChunk]) -> Ints:
    parts = [chunk.state.token_ids[chunk.plan.start : chunk.plan.start + chunk.plan.num_tokens] for chunk in chunks]
    return np.concatenate([decodes.token_ids, *parts]).astype(np.int64)


def _positions(decodes: DecodeRowsOfStep, chunks: Sequence[PromptChunk]) -> Ints:
    parts = [np.arange(chunk.plan.start, chunk.plan.start + chunk.plan.num_tokens) for chunk in chunks]
    return np.concatenate([decodes.positions, *parts]).astype(np.int64)


def _slot_mappings(batch: DecodeRows, decodes: DecodeRowsOfStep, chunks: Sequence[PromptChunk]) -> list[Ints]:
    parts = [[slots] for slots in batch.slot_mappings(decodes.slots, decodes.positions)]
    for chunk in chunks:
        positions = np.arange(chunk.plan.start, chunk.plan.start + chunk.plan.num_tokens)
        blocks, offsets = positions // batch.block_size, positions % batch.block_size
        firsts = chunk.plan.first_blocks or (0,) * len(parts)
        for slots, first, block_ids in zip(parts, firsts, chunk.plan.block_tables, strict=True):
            slots.append(np.array(block_ids, dtype=np.int64)[blocks - first] * batch.block_size + offsets)
    return [np.concatenate(slots) for slots in parts]


def _input_batch(
    arrays: _Arrays, batch: DecodeRows, to_device: ToDevice, num_decodes: int, max_query_len: int
) -> InputBatch:
    """The arrays on the device, in one copy: what a layer reads of all sequences first, then their block tables."""
    max_context_len = int(arrays.context_lens.max())
    tables = [table[arrays.tables] for table in batch.block_tables]
    if to_device.copies:  # as many columns as the longest sequence has blocks, rounded up: shapes are few
        width = -(-max_context_len // batch.block_size)
        tables = [table[:, : -(-width // TABLE_COLUMNS) * TABLE_COLUMNS] for table in tables]
    num_groups = len(tables)
    small = (arrays.token_ids, arrays.positions, arrays.query_start, arrays.context_lens, arrays.sample_rows)
    copied = to_device.copy([*small, *arrays.slot_mappings, *tables])
    token_ids, positions, query_start, context_lens, sample_rows, *by_group = copied.tensors
    return InputBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mappings=tuple(by_group[:num_groups]),
        query_start=query_start,
        context_lens=context_lens,
        block_tables=tuple(by_group[num_groups:]),
        sample_rows=sample_rows,
        num_decodes=num_decodes,
        max_query_len=max_query_len,
        max_context_len=max_context_len,
        packed=copied.packed(len(small) + num_groups),
    )
