"""How often each token was there, on the device, for rows with penalties: counted once, then token by token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from diptych.runtime.device.host_copies import ToDevice

PROMPT = 1 << 30  # set for tokens of the prompt; below it is the number of times in the answer


@dataclass(frozen=True, slots=True)
class CountedTokens:
    """The tokens of one answer so far. owner: whose they are, the same object in each step. token_ids: prompt and
    output; they only grow."""

    owner: object
    token_ids: npt.NDArray[np.int32]
    num_prompt_tokens: int


@dataclass(slots=True)
class _Counted:
    owner: object
    num_tokens: int


class TokenCounts:
    """A row of counts for each answer that was asked for lately, as many as ever were in one step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts: torch.Tensor | None = None  # [rows, vocab] int32
        self._rows: dict[int, int] = {}  # by id of the owner, least recently used first
        self._counted: list[_Counted | None] = []

    def rows(self, answers: Sequence[CountedTokens], vocab_size: int, to_device: ToDevice) -> torch.Tensor:
        """The counts of these answers, [answers, vocab_size] int32, a copy."""
        counts = self.reserve(len(answers), vocab_size)
        rows = self._assign(answers)
        fresh, prompt, output = [], [], []
        for row, answer in zip(rows, answers, strict=True):
            counted = self._counted[row]
            if counted is None:
                counted = self._counted[row] = _Counted(answer.owner, 0)
                fresh.append(row)
                prompt.append(row * vocab_size + answer.token_ids[: answer.num_prompt_tokens].astype(np.int64))
            first = max(counted.num_tokens, answer.num_prompt_tokens)
            output.append(row * vocab_size + answer.token_ids[first:].astype(np.int64))
            counted.num_tokens = len(answer.token_ids)
        empty = np.zeros(0, dtype=np.int64)
        fresh_on, prompt_on, output_on, rows_on = to_device.copy(
            [
                np.array(fresh, dtype=np.int64),
                np.concatenate([empty, *prompt]),
                np.concatenate([empty, *output]),
                np.array(rows, dtype=np.int64),
            ]
        ).tensors
        flat = counts.view(-1)
        if fresh:
            counts[fresh_on] = 0
            flat[prompt_on] = PROMPT
        flat.index_add_(0, output_on, torch.ones_like(output_on, dtype=torch.int32))
        return counts[rows_on]

    def reserve(self, num_rows: int, vocab_size: int) -> torch.Tensor:
        """Have room for as many answers, which ``rows`` may be asked for in pieces; the counts, those of all rows."""
        if self._counts is None or len(self._counts) < num_rows:
            size = max(num_rows, 2 * len(self._counted))
            grown = torch.zeros(size, vocab_size, dtype=torch.int32, device=self._device)
            if self._counts is not None:
                grown[: len(self._counts)] = self._counts
            self._counts = grown
            self._counted += [None] * (size - len(self._counted))
        return self._counts

    def _assign(self, answers: Sequence[CountedTokens]) -> list[int]:
        """A row for each; what was not used for longest makes room."""
        rows = {}
        for answer in answers:
            row = self._rows.pop(id(answer.owner), None)
            if row is not None:
                counted = self._counted[row]
                if counted is None or counted.owner is not answer.owner or counted.num_tokens > len(answer.token_ids):
                    self._counted[row] = None
                rows[id(answer.owner)] = row
        used = {*rows.values(), *self._rows.values()}
        free = [row for row in range(len(self._counted)) if row not in used]
        for answer in answers:
            if id(answer.owner) not in rows:
                if not free:
                    oldest = next(iter(self._rows))
                    free.append(self._rows.pop(oldest))
                row = free.pop()
                self._counted[row] = None
                rows[id(answer.owner)] = row
        self._rows.update(rows)
        return [rows[id(answer.owner)] for answer in answers]
