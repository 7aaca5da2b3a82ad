"""Samples a step on the device that computed its logits: as StepSampling does, with the logits left where they are.

All rows whose tokens do not depend on one another are sampled at once: one row of each slot, and all rows of slots that
verify drafts. A slot whose rows depend on the tokens picked before them (by a constraint, or by penalties) and that
verifies drafts takes a round for each of these tokens that is not forced.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from diptych.control.step import TokenLogprobs
from diptych.runtime.sampling.batch_sampler import (
    NOT_FINITE,
    Adjustment,
    BatchSampler,
    PendingTokens,
    RowBatch,
)
from diptych.runtime.sampling.sampler import NOTHING_TO_PICK, SamplingError, uniforms
from diptych.runtime.sampling.step_sampling import NOT_A_NUMBER, Masks, Sampled, StepSampling, mask_of
from diptych.runtime.sampling.token_counts import CountedTokens
from diptych.runtime.step.decode_rows import DecodeRows
from diptych.runtime.step.request_state import RequestState, penalizes
from diptych.runtime.step.step_layout import StepLayout


class _OpenAnswer:
    """A slot that gets its tokens one after the other: what was picked, and which row comes next."""

    def __init__(self, state: RequestState, slot: int, rows: range, offered: Sequence[int]) -> None:
        self.state = state
        self.slot = slot
        self.rows = rows
        self.offered = offered
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.is_done = False
        self.first_number = 0  # of its rows in the present round
        self.error: ValueError | None = None
        self.depends = state.constraint is not None or penalizes(state.params)

    @property
    def open_rows(self) -> range:
        """Rows that can be sampled now, all of them or the next."""
        place = len(self.tokens)
        return self.rows[place : place + 1] if self.depends else self.rows[place:]

    def take(self, token_id: int, logprobs: TokenLogprobs | None, *, is_end: bool) -> None:
        """The next token. is_end: it ends the answer. Raises ValueError for one that could not be picked, and what the
        constraint raises."""
        if token_id < 0:
            raise error_of(token_id)
        place = len(self.tokens)
        self.tokens.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if not is_end and self.state.constraint is not None:
            self.state.constraint.accept([token_id])
        self.is_done = is_end or place == len(self.offered) or token_id != self.offered[place]


class _Round:
    """Rows that are sampled at once: which of the logits, whose slot, and how many right drafts lie before each."""

    def __init__(self, rows: Sequence[int] = (), slots: Sequence[int] = (), place: int = 0) -> None:
        self.rows, self.slots = list(rows), list(slots)
        self.places = [place] * len(rows)
        self.forced: dict[int, int] = {}
        self.adjustments: dict[int, Adjustment] = {}

    def add(self, row: int, slot: int, place: int) -> int:
        """Its number in the round."""
        self.rows.append(row)
        self.slots.append(slot)
        self.places.append(place)
        return len(self.rows) - 1


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step whose slots get one token each, which may still be on their way to the host."""

    first_slot: int
    num_slots: int
    tokens: PendingTokens


class BatchedStepSampling(StepSampling):
    """Sampling of one runner's steps, on a device."""

    def __init__(self, batch: DecodeRows, ends_sequence: npt.NDArray[np.bool_], sampler: BatchSampler) -> None:
        super().__init__(batch, ends_sequence)
        self._sampler = sampler

    def sample(self, layout: StepLayout, logits: torch.Tensor) -> Sampled:
        batch, first, last = self._batch, layout.first_slot, layout.last_slot
        is_alone = (np.diff(layout.first_rows) == 1) & ~batch.is_constrained[first:last]
        if is_alone.all():
            return self.finish(self.start(layout, logits))
        alone = np.flatnonzero(is_alone)
        first_round = self._round_of(layout.first_rows[alone], first + alone)
        answers = []
        for place in np.flatnonzero(~is_alone).tolist():
            rows = range(int(layout.first_rows[place]), int(layout.first_rows[place + 1]))
            offered = batch.tokens_of(first + place, len(rows) - 1)[-len(rows) :].tolist()[1:]
            answers.append(_OpenAnswer(batch.states[first + place], first + place, rows, offered))
        masks = self.take_masks()
        token_ids, logprobs = self._round(logits, first_round, answers, masks)
        while any(not answer.is_done for answer in answers):
            self._round(logits, _Round(), answers, {})
        sampled = self._of_alone(Sampled.of(last - first), first, alone, token_ids[: len(alone)], logprobs)
        for answer in answers:
            self._conclude(answer, sampled, answer.slot - first)
        return sampled

    def may_start(self, layout: StepLayout) -> bool:
        """Whether no slot of the step verifies drafts or has a constraint."""
        first, last = layout.first_slot, layout.last_slot
        return not layout.extra and not self._batch.is_constrained[first:last].any()

    def start(self, layout: StepLayout, logits: torch.Tensor, num_ahead: int = 0) -> PendingStep:
        """Have the device sample such a step; ``finish`` waits for it. num_ahead: 1 if the host does not know the
        tokens of the step before yet; then no slot may have penalties, which look at them."""
        batch, first, last = self._batch, layout.first_slot, layout.last_slot
        if batch.is_plain[first:last].all():
            return PendingStep(first, last - first, self._sampler.greedy(logits))
        rows = self._round_of(layout.first_rows[:-1], np.arange(first, last), num_ahead)
        return PendingStep(first, last - first, self._sampler.sample(logits, self._row_batch(rows)))

    def finish(self, pending: PendingStep) -> Sampled:
        """What the slots of a step got that was started."""
        token_ids, logprobs = pending.tokens.result()
        places = np.arange(pending.num_slots)
        return self._of_alone(Sampled.of(pending.num_slots), pending.first_slot, places, token_ids, logprobs)

    def _round_of(self, rows: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], num_ahead: int = 0) -> _Round:
        """A round of slots that get one token each."""
        batch = self._batch
        found = _Round(rows.tolist(), slots.tolist(), num_ahead)
        for number in np.flatnonzero(batch.is_adjusted[slots]).tolist():
            slot = found.slots[number]
            found.adjustments[number] = self._adjustment(batch.states[slot], slot, num_ahead, None)
        return found

    def score(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        return self._sampler.logprobs(logits, np.array(token_ids, dtype=np.int64), num_top)

    def _of_alone(
        self, sampled: Sampled, first: int, places: npt.NDArray[np.intp], token_ids: npt.NDArray[np.int64],
        logprobs: dict[int, TokenLogprobs],
    ) -> Sampled:  # fmt: skip
        """Write down what slots at these places got, one token each."""
        sampled.token_ids[places] = np.maximum(token_ids, 0)
        sampled.is_silent[places] = token_ids < 0
        for number in np.flatnonzero(token_ids < 0).tolist():
            sampled.fail(self._batch.request_ids[first + places[number]], error_of(int(token_ids[number])))
        for number, place in enumerate(places.tolist() if logprobs else ()):
            if number in logprobs:
                sampled.logprobs[place] = [logprobs[number]]
        return sampled

    def _round(
        self, logits: torch.Tensor, rows: _Round, answers: Sequence[_OpenAnswer], masks: Masks
    ) -> tuple[npt.NDArray[np.int64], dict[int, TokenLogprobs]]:
        """Sample ``rows``, which get one token, and the open rows of the answers. Returns the tokens of all."""
        waiting = [answer for answer in answers if not answer.is_done]
        for answer in waiting:
            self._open(answer, rows, masks)
        waiting = [answer for answer in waiting if not answer.is_done]
        if not rows.rows:
            return np.zeros(0, dtype=np.int64), {}
        token_ids, logprobs = self._sampler.sample(logits, self._row_batch(rows)).result()
        for answer in waiting:
            try:
                for number, _ in enumerate(answer.open_rows, answer.first_number):
                    token_id = int(token_ids[number])
                    is_end = token_id >= 0 and self.ends_answer(answer.slot, token_id)
                    answer.take(token_id, logprobs.get(number), is_end=is_end)
                    if answer.is_done:
                        break
            except ValueError as error:
                answer.error, answer.is_done = error, True
        return token_ids, logprobs

    def _open(self, answer: _OpenAnswer, rows: _Round, masks: Masks) -> None:
        """Add its open rows to a round, past tokens that are forced."""
        state, slot, constraint = answer.state, answer.slot, answer.state.constraint
        answer.first_number = len(rows.rows)
        try:
            while not answer.is_done:
                place = len(answer.tokens)
                forced = constraint.forced(1) if constraint is not None else ()
                if forced and place and state.params.logprobs is None:
                    answer.take(forced[0], None, is_end=self.ends_answer(slot, forced[0]))
                    continue
                allowed = None
                if constraint is not None and not forced:
                    is_known = not place and state.request_id in masks
                    allowed = mask_of(masks[state.request_id]) if is_known else constraint.allowed()
                for ahead, row in enumerate(answer.open_rows, place):
                    adjustment = self._adjustment(state, slot, ahead, allowed)
                    number = rows.add(row, slot, ahead)
                    if forced:
                        rows.forced[number] = forced[0]
                    else:
                        rows.adjustments[number] = adjustment
                return
        except ValueError as error:
            answer.error, answer.is_done = error, True

    def _conclude(self, answer: _OpenAnswer, sampled: Sampled, place: int) -> None:
        if answer.error is not None:
            sampled.fail(answer.state.request_id, answer.error)
            sampled.is_silent[place] = True
            return
        sampled.token_ids[place] = answer.tokens[-1]
        if len(answer.tokens) > 1:
            sampled.before[place] = answer.tokens[:-1]
        if answer.state.params.logprobs is not None:
            sampled.logprobs[place] = answer.logprobs

    def _adjustment(self, state: RequestState, slot: int, num_ahead: int, allowed: bytes | None) -> Adjustment:
        """What changes the row behind the input of a slot and ``num_ahead`` right tokens."""
        params = state.params
        num_output = int(self._batch.positions[slot]) + 1 + num_ahead - state.num_prompt_tokens
        tokens = None
        if penalizes(params):
            tokens = CountedTokens(state, self._batch.tokens_of(slot, num_ahead), state.num_prompt_tokens)
        return Adjustment(params, allowed, state.stop_ids if num_output < params.min_tokens else (), tokens)

    def _row_batch(self, rows: _Round) -> RowBatch:
        batch, slots = self._batch, np.array(rows.slots, dtype=np.int64)
        forced = np.full(len(slots), -1, dtype=np.int64)
        for number, token_id in rows.forced.items():
            forced[number] = token_id
        return RowBatch(
            rows=np.array(rows.rows, dtype=np.int64),
            temperatures=batch.temperatures[slots],
            top_ks=batch.top_ks[slots],
            top_ps=batch.top_ps[slots],
            min_ps=batch.min_ps[slots],
            uniforms=uniforms(batch.seeds[slots], batch.positions[slots] + 1 + np.array(rows.places, dtype=np.int64)),
            forced=forced,
            num_logprobs=batch.num_logprobs[slots],
            adjustments=rows.adjustments,
        )


def error_of(token_id: int) -> SamplingError:
    """Why there is no token: NOT_FINITE or NOTHING_LEFT."""
    return SamplingError(NOT_A_NUMBER if token_id == NOT_FINITE else NOTHING_TO_PICK)
