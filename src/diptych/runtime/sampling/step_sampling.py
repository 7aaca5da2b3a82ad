"""Picks the tokens of a step: one for each sampling slot, and more where offered tokens turn out to be right.

A slot with extra rows has logits behind its input and behind each offered token that was computed. Its tokens are
picked one after the other, each from its own row with the number of its own position, as in steps of one token: the row
behind an offered token counts only while all picks so far were the offered tokens.

What the constraint of a slot allows for its first row is computed in a thread while the model computes the logits.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from diptych.control.errors import GrammarLimitError
from diptych.control.step import TokenLogprobs
from diptych.runtime.sampling.sampler import (
    Floats,
    Ints,
    RowSampling,
    SamplingError,
    row_as_float32,
    sample_greedy,
    sample_row,
    token_logprobs,
    uniforms,
)
from diptych.runtime.step.decode_rows import DecodeRows
from diptych.runtime.step.request_state import RequestState
from diptych.runtime.step.step_layout import StepLayout

NOT_A_NUMBER = "the model computed a logit that is not a number"


@dataclass(slots=True)
class Sampled:
    """What the sampling slots of a step got, by their place in the step.

    token_ids: the newest token of each. before: those before the newest, of slots that got several. is_silent: slots
    that failed, now or in an earlier step, or whose requests want no token. beyond_grammar: of the failed requests,
    those whose grammar was too much to follow. logprobs: of all tokens of a slot, where they are wanted.
    """

    token_ids: npt.NDArray[np.int64]
    is_silent: npt.NDArray[np.bool_]
    before: dict[int, list[int]] = field(default_factory=dict)
    failed: list[tuple[str, str]] = field(default_factory=list)
    beyond_grammar: set[str] = field(default_factory=set)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)

    @classmethod
    def of(cls, num_slots: int) -> "Sampled":
        """A record of slots that have got nothing yet."""
        return cls(np.zeros(num_slots, dtype=np.int64), np.zeros(num_slots, dtype=np.bool_))

    def fail(self, request_id: str, error: ValueError) -> None:
        """A request has failed, by what its constraint or its logits raised."""
        self.failed.append((request_id, str(error)))
        if isinstance(error, GrammarLimitError):
            self.beyond_grammar.add(request_id)

    def silence(self, places: Sequence[int], failed: Sequence[tuple[str, str]]) -> None:
        """These slots get no token after all, and ``failed`` of their requests have failed."""
        self.is_silent[list(places)] = True
        known = {request_id for request_id, _ in self.failed}
        self.failed += [failure for failure in failed if failure[0] not in known]


Masks = dict[str, bytes | ValueError | None]  # by request; an error is that of its constraint


@dataclass(frozen=True, slots=True)
class _Picked:
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class _Rows:
    """The sampling rows of a step. best: the most likely token of each. numbers: the random number of each. masks: what
    is allowed behind the inputs."""

    logits: torch.Tensor
    best: npt.NDArray[np.int64]
    is_finite: npt.NDArray[np.bool_]
    numbers: npt.NDArray[np.float64]
    masks: Masks

    def most_likely(self, row: int) -> _Picked:
        """Pick the most likely token, for requests that want nothing else."""
        if not self.is_finite[row]:
            raise SamplingError(NOT_A_NUMBER)
        return _Picked(int(self.best[row]))


class StepSampling:
    """Sampling of one runner's steps. ends_sequence: [vocab_size], the end-of-sequence tokens."""

    def __init__(self, batch: DecodeRows, ends_sequence: npt.NDArray[np.bool_]) -> None:
        self._batch = batch
        self._ends_sequence = ends_sequence
        self._pool = ThreadPoolExecutor(1, "masks")  # its thread starts with the first mask
        self._masks_ahead: Future[Masks] | None = None

    def begin(self, layout: StepLayout) -> None:
        """The model is about to compute the logits of this step."""
        if self._masks_ahead is not None:  # of a step that was broken off: a constraint is used by one thread at a time
            self._masks_ahead.result()
        slots = range(layout.first_slot, layout.last_slot)
        states = [state for state in self._batch.states[slots.start : slots.stop] if state.constraint is not None]
        self._masks_ahead = self._pool.submit(_masks_of, states) if states else None

    def take_masks(self) -> Masks:
        """What the constraints of the step's slots allow behind their inputs, once it is known."""
        ahead, self._masks_ahead = self._masks_ahead, None
        return ahead.result() if ahead is not None else {}

    def sample(self, layout: StepLayout, logits: torch.Tensor) -> Sampled:
        """logits: of the sampling rows, [layout.num_samples, vocab_size]."""
        batch, first, last = self._batch, layout.first_slot, layout.last_slot
        best, is_finite = self.most_likely(layout, logits)
        first_rows = layout.first_rows[:-1]
        sampled = Sampled(best[first_rows], ~is_finite[first_rows])
        for place in np.flatnonzero(sampled.is_silent).tolist():
            sampled.failed.append((batch.request_ids[first + place], NOT_A_NUMBER))
        is_alone = batch.is_plain[first:last] & (np.diff(layout.first_rows) == 1)
        picked = np.flatnonzero(~is_alone & ~sampled.is_silent)
        if not len(picked):
            return sampled
        masks = self.take_masks()
        numbers = self._numbers(layout)
        for place in picked.tolist():
            rows = range(int(layout.first_rows[place]), int(layout.first_rows[place + 1]))
            state = batch.states[first + place]
            try:
                tokens = self._pick(state, first + place, _Rows(logits, best, is_finite, numbers, masks), rows)
            except ValueError as error:
                sampled.fail(state.request_id, error)
                sampled.is_silent[place] = True
                continue
            sampled.token_ids[place] = tokens[-1].token_id
            if len(tokens) > 1:
                sampled.before[place] = [picked.token_id for picked in tokens[:-1]]
            if state.params.logprobs is not None:
                sampled.logprobs[place] = [picked.logprobs for picked in tokens if picked.logprobs is not None]
        return sampled

    def most_likely(self, layout: StepLayout, logits: torch.Tensor) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Run sample_greedy over the logits of the layout's sampling rows."""
        return sample_greedy(logits)

    def score(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Log probabilities of one token of each row of [rows, vocab], see sampler.token_logprobs."""
        return [
            token_logprobs(row_as_float32(logits, row), int(token_id), num_top)
            for row, token_id in enumerate(token_ids)
        ]

    def ends_answer(self, slot: int, token_id: int) -> bool:
        """Whether the token is the last of the slot's request."""
        batch = self._batch
        if self._ends_sequence[token_id] and not batch.ignores_eos[slot]:
            return True
        return bool(batch.has_stop_ids[slot]) and token_id in batch.states[slot].stop_ids

    def _numbers(self, layout: StepLayout) -> npt.NDArray[np.float64]:
        """The random number of each sampling row: that of its position."""
        batch, counts = self._batch, np.diff(layout.first_rows)
        slots = np.repeat(np.arange(layout.first_slot, layout.last_slot), counts)
        places = np.arange(len(slots)) - np.repeat(layout.first_rows[:-1], counts)
        seeds = np.array([batch.states[slot].sampling_seed for slot in slots], dtype=np.int64)
        return uniforms(seeds, batch.positions[slots] + 1 + places)

    def _pick(self, state: RequestState, slot: int, rows: _Rows, of_slot: range) -> list[_Picked]:
        """The tokens of a slot: at least one, and one more for each offered token that was right. Raises ValueError
        when none can be picked."""
        offered = self._batch.tokens_of(slot, len(of_slot) - 1)[-len(of_slot) :].tolist()[1:]
        picked: list[_Picked] = []
        for place, row in enumerate(of_slot):
            token = rows.most_likely(row) if state.is_plain else self._sample(state, slot, rows, row, place)
            picked.append(token)
            if self.ends_answer(slot, token.token_id):
                break
            if state.constraint is not None:
                state.constraint.accept([token.token_id])
            if place == len(offered) or token.token_id != offered[place]:
                break
        return picked

    def _sample(self, state: RequestState, slot: int, rows: _Rows, row: int, num_ahead: int) -> _Picked:
        """num_ahead: tokens of the slot behind its input, which are right."""
        params, constraint = state.params, state.constraint
        forced = constraint.forced(1) if constraint is not None else ()
        if forced and params.logprobs is None:
            return _Picked(forced[0])
        values = row_as_float32(rows.logits, row)
        raw = values.copy() if params.logprobs is not None else values
        if forced:
            token_id = forced[0]
        else:
            allowed = None
            if constraint is not None:
                is_known = not num_ahead and state.request_id in rows.masks
                allowed = mask_of(rows.masks[state.request_id]) if is_known else constraint.allowed()
            if allowed is not None:
                mask_out(values, allowed)
            tokens = self._batch.tokens_of(slot, num_ahead)
            number = float(rows.numbers[row])
            token_id = sample_row(values, RowSampling(params, number, tokens, state.num_prompt_tokens, state.stop_ids))
        if params.logprobs is None:
            return _Picked(token_id)
        return _Picked(token_id, token_logprobs(raw, token_id, params.logprobs))


def mask_out(logits: Floats, allowed: bytes) -> None:
    """Make impossible what a constraint does not allow (see TokenConstraint.allowed). ``logits`` [vocab] fp32."""
    forbidden = np.unpackbits(~np.frombuffer(allowed, dtype=np.uint8), bitorder="little").view(np.bool_)
    np.copyto(logits[: len(forbidden)], -np.inf, where=forbidden[: len(logits)])
    logits[len(forbidden) :] = -np.inf


def _masks_of(states: Sequence[RequestState]) -> Masks:
    """What may follow now, of requests that have a choice."""
    masks: Masks = {}
    for state in states:
        assert state.constraint is not None
        try:
            if not state.constraint.forced(1):
                masks[state.request_id] = state.constraint.allowed()
        except ValueError as error:
            masks[state.request_id] = error
    return masks


def mask_of(mask: bytes | ValueError | None) -> bytes | None:
    """A mask; raises what the constraint has raised instead."""
    if isinstance(mask, ValueError):
        raise mask
    return mask
