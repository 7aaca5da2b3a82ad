"""The executor's decode batch: one slot per member in arrays that a step treats as wholes.

Members fill the slots from 0 without gaps; the last member takes the slot of one that leaves. The slots behind the
members are scratch room for the prefills of a step. The plan decides which requests are members.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from diptych.control.request import BlockTables
from diptych.runtime.step.request_state import RequestState, adjusts_logits, penalizes


class DecodeRows:
    """Per slot: tokens so far, the input of the next step, its position, a block table for each group of layers, and
    flags for sampling. What a block table says of blocks that have expired is arbitrary."""

    def __init__(self, capacity: int, max_model_len: int, block_size: int, num_groups: int = 1) -> None:
        self.block_size = block_size
        self.request_ids: list[str] = []
        self.states: list[RequestState] = []
        self._slot_of: dict[str, int] = {}
        max_blocks = -(-max_model_len // block_size) + 1
        # [slots, max_model_len + 2] int32: all tokens, the newest sampled one included
        self.token_ids = np.zeros((capacity, max_model_len + 2), dtype=np.int32)
        # by group of layers, [slots, max_blocks]; each by itself, so that a step takes its rows without a copy
        self.block_tables = [np.zeros((capacity, max_blocks), dtype=np.int32) for _ in range(num_groups)]
        self.inputs = np.zeros(capacity, dtype=np.int64)  # [slots] the token that the next step computes
        self.positions = np.zeros(capacity, dtype=np.int64)  # [slots] its position: tokens in the KV cache before it
        self.num_blocks = np.zeros((capacity, num_groups), dtype=np.int64)  # [slots, groups], with the expired ones
        self.is_plain = np.zeros(capacity, dtype=np.bool_)  # [slots] greedy and nothing else
        self.ignores_eos = np.zeros(capacity, dtype=np.bool_)  # [slots]
        self.has_stop_ids = np.zeros(capacity, dtype=np.bool_)  # [slots] stop token ids besides end-of-sequence
        # how tokens are sampled, [slots] each; see SamplingParams
        self.seeds = np.zeros(capacity, dtype=np.int64)
        self.temperatures = np.zeros(capacity, dtype=np.float64)
        self.top_ks = np.zeros(capacity, dtype=np.int64)
        self.top_ps = np.zeros(capacity, dtype=np.float64)
        self.min_ps = np.zeros(capacity, dtype=np.float64)
        self.num_logprobs = np.zeros(capacity, dtype=np.int64)  # -1: none are wanted
        self.is_adjusted = np.zeros(capacity, dtype=np.bool_)  # logits are changed before they are sampled from
        self.is_penalized = np.zeros(capacity, dtype=np.bool_)  # ... by what was there before
        self.is_constrained = np.zeros(capacity, dtype=np.bool_)

    def __len__(self) -> int:
        return len(self.states)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slot_of

    def reserve(self, num_slots: int) -> None:
        """Make room for ``num_slots`` members and scratch slots together."""
        if num_slots <= len(self.inputs):
            return
        capacity = max(num_slots, 2 * len(self.inputs))
        # All arrays grow together: a slot is an index into each of them.
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                setattr(self, name, _grown(array, capacity))
        self.block_tables = [_grown(table, capacity) for table in self.block_tables]

    def join(
        self, state: RequestState, position: int, block_tables: BlockTables, first_blocks: Sequence[int] = ()
    ) -> None:
        """A new member whose token at ``position`` (its newest) is the input of the next step. first_blocks: as in
        ResumedDecode."""
        slot = len(self.states)
        self.reserve(slot + 1)
        self._slot_of[state.request_id] = slot
        self.request_ids.append(state.request_id)
        self.states.append(state)
        self.token_ids[slot, : position + 1] = state.token_ids[: position + 1]
        self.inputs[slot] = state.token_ids[position]
        self.positions[slot] = position
        self.num_blocks[slot] = self.set_block_tables(slot, block_tables, first_blocks)
        self.is_plain[slot] = state.is_plain
        self.ignores_eos[slot] = state.params.ignore_eos
        self.has_stop_ids[slot] = state.has_stop_ids
        params = state.params
        self.seeds[slot] = state.sampling_seed
        self.temperatures[slot] = params.temperature
        self.top_ks[slot] = min(params.top_k, np.iinfo(np.int64).max)
        self.top_ps[slot], self.min_ps[slot] = params.top_p, params.min_p
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.is_adjusted[slot] = adjusts_logits(params)
        self.is_penalized[slot] = penalizes(params)
        self.is_constrained[slot] = state.constraint is not None

    def leave(self, request_id: str, *, keep_tokens: bool) -> None:
        """Take a member out; the last member moves into its slot. Ids that are not members are ignored."""
        slot = self._slot_of.pop(request_id, None)
        if slot is None:
            return
        # A copy: the row is given to another member below.
        if keep_tokens:
            self.states[slot].token_ids = self.tokens_of(slot).copy()
        last = len(self.states) - 1
        moved_id, moved = self.request_ids.pop(), self.states.pop()
        if slot == last:
            return
        self.request_ids[slot], self.states[slot] = moved_id, moved
        self._slot_of[moved_id] = slot
        length = self.positions[last] + 1
        self.token_ids[slot, :length] = self.token_ids[last, :length]
        for table, blocks in zip(self.block_tables, self.num_blocks[last], strict=True):
            table[slot, :blocks] = table[last, :blocks]
        for array in self._columns():
            array[slot] = array[last]

    def _columns(self) -> list[npt.NDArray[Any]]:
        """The arrays of which a member that moves takes its whole entry along: all but those of tokens and blocks."""
        arrays = [array for array in vars(self).values() if isinstance(array, np.ndarray)]
        return [array for array in arrays if array is not self.token_ids]

    def set_block_tables(self, slot: int, block_tables: BlockTables, first_blocks: Sequence[int] = ()) -> list[int]:
        """Write whole block tables (of a member, or of a prefill in a scratch slot), each from its first block on.
        Where they end, by group."""
        firsts = first_blocks or (0,) * len(block_tables)
        ends = []
        for table, first, block_ids in zip(self.block_tables, firsts, block_tables, strict=True):
            ends.append(first + len(block_ids))
            table[slot, first : ends[-1]] = block_ids
        return ends

    def add_block(self, request_id: str, group: int, block_id: int) -> None:
        """One of the member's block tables grows by one."""
        slot = self._slot_of[request_id]
        self.block_tables[group][slot, self.num_blocks[slot, group]] = block_id
        self.num_blocks[slot, group] += 1

    def tokens_of(self, slot: int, num_ahead: int = 0) -> npt.NDArray[np.int32]:
        """All tokens of a member up to the input of the next step, and ``num_ahead`` behind it (a view, valid until the
        batch changes)."""
        return self.token_ids[slot, : self.positions[slot] + 1 + num_ahead]

    def slot_mappings(
        self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> list[npt.NDArray[np.int64]]:
        """Where K and V of these positions of these slots go, by group: block id * block_size + offset."""
        blocks, offsets = np.divmod(positions, self.block_size)
        return [table[slots, blocks].astype(np.int64) * self.block_size + offsets for table in self.block_tables]

    def write_drafts(self, request_id: str, token_ids: Sequence[int]) -> int:
        """Put tokens that may come next behind the input of a member. Returns its slot."""
        slot = self._slot_of[request_id]
        first = self.positions[slot] + 1
        self.token_ids[slot, first : first + len(token_ids)] = token_ids
        return slot

    def accept(self, slot: int, num_tokens: int) -> None:
        """Keep ``num_tokens`` tokens behind the input: they were right, and are computed. ``advance`` brings the one
        after them."""
        self.positions[slot] += num_tokens

    def advance(self, first: int, last: int, token_ids: npt.NDArray[np.int64]) -> None:
        """Slots [first, last) computed their inputs and sampled ``token_ids``, which are the next inputs."""
        self.positions[first:last] += 1
        self.token_ids[np.arange(first, last), self.positions[first:last]] = token_ids
        self.inputs[first:last] = token_ids


def _grown(array: npt.NDArray[np.generic], capacity: int) -> npt.NDArray[Any]:
    """The array with ``capacity`` rows, zeros behind those that it has."""
    grown = np.zeros((capacity, *array.shape[1:]), dtype=array.dtype)
    grown[: len(array)] = array
    return grown
