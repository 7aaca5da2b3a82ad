"""Picks the tokens of all rows of a step at once, on the device that computed their logits.

The same tokens as ``sampler`` picks row by row on the host, whatever the device is and whichever rows are beside one
another: weights are whole numbers, their sums are exact, and everything else is single operations of IEEE 754. The host
gets token ids, and for rows whose log probabilities are wanted the few numbers that these are made of, in one copy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from diptych.control.request import SamplingParams
from diptych.control.step import TokenLogprobs
from diptych.runtime.device.host_copies import DeviceMemory, FromDevice, ToDevice
from diptych.runtime.sampling.sampler import GREEDY_BELOW, Ints, logprobs_of
from diptych.runtime.sampling.token_counts import PROMPT, CountedTokens, TokenCounts
from diptych.runtime.sampling.whole_weights import (
    LOG2_E,
    depth_factor,
    depths_torch,
    least_depth,
    whole_weights_torch,
)

NOT_FINITE = -1  # in place of a token: the model computed a logit that is not a number
NOTHING_LEFT = -2  # ... or every token is masked
ROWS_AT_ONCE = 64  # of what is computed over whole rows: some 10 MB each for a large vocabulary
LOWER_HALF = 0xFFFFFFFF

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Adjustment:
    """What changes the logits of a row before anything else. allowed: see TokenConstraint.allowed. masked: tokens that
    may not be picked. tokens: what the penalties of ``params`` look at; None without penalties."""

    params: SamplingParams
    allowed: bytes | None = None
    masked: tuple[int, ...] = ()
    tokens: CountedTokens | None = None


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows to pick a token from; arrays are [num_rows], and say what SamplingParams and RowSampling do.

    rows: which of the logits. forced: the token of a row that has no choice, -1 otherwise. num_logprobs: -1 where none
    are wanted. adjustments: by place among these rows.
    """

    rows: Ints
    temperatures: Doubles
    top_ks: Ints
    top_ps: Doubles
    min_ps: Doubles
    uniforms: Doubles
    forced: Ints
    num_logprobs: Ints
    adjustments: dict[int, Adjustment] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PickOptions:
    """How to pick from some rows, tensors [rows] on the device. has_filters: whether any row has top_k or top_p. most:
    how many of the likeliest tokens these may need."""

    factors: torch.Tensor  # float32, see depth_factor
    top_ks: torch.Tensor  # int64; rows without one have the size of the vocabulary
    top_ps: torch.Tensor  # float64
    least_depths: torch.Tensor  # float32, see least_depth
    uniforms: torch.Tensor  # float64
    has_filters: bool
    most: int

    def of(self, rows: slice) -> "PickOptions":
        """Those of some of the rows."""
        return PickOptions(
            self.factors[rows], self.top_ks[rows], self.top_ps[rows], self.least_depths[rows], self.uniforms[rows],
            self.has_filters, self.most,
        )  # fmt: skip


# (logits [n, vocab], which rows of it [rows] (None: all), the largest logit of each of these rows) -> tokens [rows]
Pick = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, PickOptions], torch.Tensor]


class PendingTokens:
    """The tokens of a RowBatch, which may still be on their way to the host. num_top: of each row that wants log
    probabilities, by place in the batch."""

    def __init__(self, token_ids: torch.Tensor, packed: FromDevice, num_top: dict[int, int], most: int) -> None:
        self.token_ids = token_ids  # on the device, [rows] int64; NOT_FINITE or NOTHING_LEFT where there is none
        self._packed = packed
        self._num_top = num_top
        self._most = most

    def result(self) -> tuple[Ints, dict[int, TokenLogprobs]]:
        """Token ids as on the device, and log probabilities by place. Waits for them."""
        packed = self._packed.numpy().astype(np.int64, copy=False)
        num_rows, count, most = len(self.token_ids), len(self._num_top), self._most
        token_ids = packed[:num_rows]
        if not count:
            return token_ids, {}
        columns = packed[num_rows:].reshape(3 + 2 * most, count)
        peaks, totals, chosen, *tops = columns.view(np.float64)
        logprobs = {}
        for index, (place, num_top) in enumerate(self._num_top.items()):
            if token_ids[place] < 0:
                continue
            top_ids = [int(columns[3 + number, index]) for number in range(num_top)]
            top_values = [float(tops[most + number][index]) for number in range(num_top)]
            logprobs[place] = logprobs_of(
                int(token_ids[place]), float(chosen[index]), (top_ids, top_values), float(peaks[index]),
                float(totals[index]),
            )  # fmt: skip
        return token_ids, logprobs


class BatchSampler:
    """The sampler of a device. pick: draws tokens from adjusted logits; ``pick_torch`` on any device."""

    def __init__(self, device: torch.device, memory: DeviceMemory | None, pick: Pick | None = None) -> None:
        self._device = device
        self._memory = memory
        self._to_device = ToDevice(memory)
        self._pick = pick or pick_torch
        self._counts = TokenCounts(device)

    def greedy(self, logits: torch.Tensor) -> PendingTokens:
        """The most likely token of each row of [rows, vocab], the lowest id among equals."""
        values, ids = logits.max(dim=-1)
        token_ids = torch.where(torch.isfinite(values), ids, NOT_FINITE)
        return PendingTokens(token_ids, FromDevice(token_ids, self._memory), {}, 0)

    def sample(self, logits: torch.Tensor, batch: RowBatch) -> PendingTokens:
        """logits: [n, vocab], of which the batch names rows."""
        vocab_size = logits.shape[1]
        is_drawn = (batch.forced < 0) & (batch.temperatures >= GREEDY_BELOW)
        adjusted = np.array(sorted(batch.adjustments), dtype=np.int64)
        adjusted = adjusted[batch.forced[adjusted] < 0]
        is_adjusted = np.zeros(len(batch.rows), dtype=np.bool_)
        is_adjusted[adjusted] = True
        raw_places, adjusted_drawn = np.flatnonzero(is_drawn & ~is_adjusted), np.flatnonzero(is_drawn[adjusted])
        wanted = np.flatnonzero(batch.num_logprobs >= 0)
        options = self._host_options(batch, vocab_size)
        rows, forced, adjusted_on, raw_on, drawn_on, wanted_on, *columns = self._to_device.copy(
            [batch.rows, batch.forced, adjusted, raw_places, adjusted_drawn, wanted, *options]
        ).tensors

        def of(places: npt.NDArray[np.intp], on_device: torch.Tensor) -> PickOptions:
            needed = _num_needed(batch, vocab_size)[places]
            factors, top_ks, top_ps, least_depths, numbers = [column[on_device] for column in columns]
            most = int(needed.max(initial=1))
            return PickOptions(factors, top_ks, top_ps, least_depths, numbers, bool(needed.any()), most)

        values, ids = logits.max(dim=-1)
        peaks = values[rows].float()
        token_ids = ids[rows]
        if len(raw_places):
            token_ids[raw_on] = self._pick(logits, rows[raw_on], peaks[raw_on], of(raw_places, raw_on))
        if len(adjusted):
            changed = self._adjusted(logits, batch, adjusted, rows[adjusted_on])
            best, best_ids = changed.max(dim=-1)
            is_left = torch.isfinite(best)
            if len(adjusted_drawn):
                places = adjusted_on[drawn_on]
                best_ids[drawn_on] = self._pick(changed, drawn_on, best[drawn_on], of(adjusted[adjusted_drawn], places))
            token_ids[adjusted_on] = torch.where(is_left, best_ids, NOTHING_LEFT)
        token_ids = torch.where(forced >= 0, forced, token_ids)
        token_ids = torch.where(torch.isfinite(peaks), token_ids, NOT_FINITE)
        return self._pending(logits, batch, rows, peaks, token_ids, (wanted, wanted_on))

    def logprobs(self, logits: torch.Tensor, token_ids: Ints, num_top: int) -> list[TokenLogprobs]:
        """Log probabilities of one token of each row of [rows, vocab], as sampler.token_logprobs gives them."""
        (chosen,) = self._to_device.copy([token_ids]).tensors
        peaks = logits.max(dim=-1).values.float()
        columns = _logprob_columns(logits, None, peaks, chosen, num_top)
        packed = FromDevice(torch.cat((chosen, columns)), self._memory)
        pending = PendingTokens(chosen, packed, dict.fromkeys(range(len(token_ids)), num_top), num_top)
        return list(pending.result()[1].values())

    def _host_options(self, batch: RowBatch, vocab_size: int) -> list[npt.NDArray[Any]]:
        """Columns of PickOptions, as arrays."""
        has_top_k = _has_top_k(batch, vocab_size)
        least = np.full(len(batch.rows), -np.inf, dtype=np.float32)
        for place in np.flatnonzero(batch.min_ps):
            least[place] = least_depth(float(batch.min_ps[place]))
        return [
            (LOG2_E / np.maximum(batch.temperatures, GREEDY_BELOW)).astype(np.float32),
            np.where(has_top_k, batch.top_ks, vocab_size),
            batch.top_ps,
            least,
            batch.uniforms,
        ]

    def _adjusted(self, logits: torch.Tensor, batch: RowBatch, places: Ints, rows: torch.Tensor) -> torch.Tensor:
        """The logits of these rows with their adjustments, [places, vocab] float32."""
        changed = logits[rows].float()
        vocab_size = changed.shape[1]
        adjustments = [batch.adjustments[place] for place in places.tolist()]
        masks = [(index, entry.allowed) for index, entry in enumerate(adjustments) if entry.allowed is not None]
        stops = [(index, token) for index, entry in enumerate(adjustments) for token in entry.masked]
        biases = [
            (index, token, bias)
            for index, entry in enumerate(adjustments)
            for token, bias in entry.params.logit_bias.items()
        ]
        penalized = [(index, entry) for index, entry in enumerate(adjustments) if entry.tokens is not None]
        if masks:
            self._mask(changed, masks)
        arrays: list[npt.NDArray[np.generic]] = [
            np.array([index * vocab_size + token for index, token in stops], dtype=np.int64),
            np.array([index * vocab_size + token for index, token, _ in biases], dtype=np.int64),
            np.array([bias for _, _, bias in biases], dtype=np.float32),
        ]
        flat, (stop_at, bias_at, bias_values) = changed.view(-1), self._to_device.copy(arrays).tensors
        if stops:
            flat[stop_at] = -torch.inf
        if biases:
            flat[bias_at] += bias_values  # a token has one bias
        if penalized:  # room for all of them: else the pieces would take each other's rows, and all be counted anew
            self._counts.reserve(len(penalized), vocab_size)
        for first in range(0, len(penalized), ROWS_AT_ONCE):
            self._penalize(changed, penalized[first : first + ROWS_AT_ONCE])
        return changed

    def _mask(self, changed: torch.Tensor, masks: Sequence[tuple[int, bytes]]) -> None:
        """Make impossible what constraints do not allow. Masks travel as bits."""
        vocab_size = changed.shape[1]
        bits = np.zeros((len(masks), -(-vocab_size // 8)), dtype=np.uint8)
        for number, (_, allowed) in enumerate(masks):
            part = np.frombuffer(allowed, dtype=np.uint8)[: bits.shape[1]]
            bits[number, : len(part)] = part
        on_device, places = self._to_device.copy(
            [bits, np.array([index for index, _ in masks], dtype=np.int64)]
        ).tensors
        shifts = torch.arange(8, dtype=torch.uint8, device=changed.device)
        for first in range(0, len(masks), ROWS_AT_ONCE):
            some = slice(first, first + ROWS_AT_ONCE)
            is_allowed = (on_device[some, :, None] >> shifts) & 1
            is_forbidden = is_allowed.flatten(1)[:, :vocab_size] == 0
            changed[places[some]] = changed[places[some]].masked_fill_(is_forbidden, -torch.inf)

    def _penalize(self, changed: torch.Tensor, penalized: Sequence[tuple[int, Adjustment]]) -> None:
        """Apply the penalties of some rows."""
        counted = [entry.tokens for _, entry in penalized if entry.tokens is not None]
        counts = self._counts.rows(counted, changed.shape[1], self._to_device)
        params = [entry.params for _, entry in penalized]
        places, repetition, frequency, presence = self._to_device.copy(
            [
                np.array([index for index, _ in penalized], dtype=np.int64),
                np.array([[entry.repetition_penalty] for entry in params], dtype=np.float32),
                np.array([[entry.frequency_penalty] for entry in params], dtype=np.float64),
                np.array([[entry.presence_penalty] for entry in params], dtype=np.float64),
            ]
        ).tensors
        values = changed[places]
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(counts != 0, repeated, values)
        outputs = counts & (PROMPT - 1)
        amounts = (outputs.double() * frequency + presence).float()
        changed[places] = torch.where(outputs != 0, values - amounts, values)

    def _pending(
        self, logits: torch.Tensor, batch: RowBatch, rows: torch.Tensor, peaks: torch.Tensor,
        token_ids: torch.Tensor, wanted: tuple[npt.NDArray[np.intp], torch.Tensor],
    ) -> PendingTokens:  # fmt: skip
        places, on_device = wanted
        num_top = {int(place): min(int(batch.num_logprobs[place]), logits.shape[1]) for place in places}
        most = max(num_top.values(), default=0)
        packed = token_ids
        if num_top:
            of_rows = (rows[on_device], peaks[on_device], token_ids[on_device].clamp_min(0))
            packed = torch.cat((token_ids, _logprob_columns(logits, *of_rows, most)))
        return PendingTokens(token_ids, FromDevice(packed, self._memory), num_top, most)


def _has_top_k(batch: RowBatch, vocab_size: int) -> npt.NDArray[np.bool_]:
    return (batch.top_ks > 0) & (batch.top_ks < vocab_size)


def _num_needed(batch: RowBatch, vocab_size: int) -> Ints:
    """How many of the likeliest tokens each row may need to be filtered: without top_k, top_p may need all. 0: none."""
    needed = np.where(batch.top_ps < 1.0, vocab_size, 0)
    return np.where(_has_top_k(batch, vocab_size), batch.top_ks, needed)


def pick_torch(
    logits: torch.Tensor, rows: torch.Tensor | None, peaks: torch.Tensor, options: PickOptions
) -> torch.Tensor:
    """Draw a token from each row, in plain torch. See Pick."""
    picked = []
    for first in range(0, len(peaks), ROWS_AT_ONCE):
        some = slice(first, first + ROWS_AT_ONCE)
        values = (logits[some] if rows is None else logits[rows[some]]).float()
        picked.append(_pick_some(values, peaks[some].float(), options.of(some)))
    return torch.cat(picked)


def _pick_some(values: torch.Tensor, peaks: torch.Tensor, options: PickOptions) -> torch.Tensor:
    weights = whole_weights_torch(values, peaks, options.factors)
    is_likely = depths_torch(values, peaks, options.factors) >= options.least_depths[:, None]
    if options.has_filters:
        is_likely = _kept(values, weights, is_likely, options)
    cumulative = (weights * is_likely).double().cumsum(dim=-1)
    totals = cumulative[:, -1:]
    targets = torch.minimum((options.uniforms[:, None] * totals).floor(), totals - 1.0)
    return (cumulative <= targets).sum(dim=-1).clamp_(max=values.shape[1] - 1)


def _kept(values: torch.Tensor, weights: torch.Tensor, is_likely: torch.Tensor, options: PickOptions) -> torch.Tensor:
    """Which tokens top_k, min_p and top_p leave: each keeps a prefix of the tokens in falling order."""
    order = best_tokens(values, options.most)
    places = torch.arange(options.most, device=values.device)
    has_order = ((options.top_ks < values.shape[1]) | (options.top_ps < 1.0))[:, None]
    count = ((places < options.top_ks[:, None]) & is_likely.gather(1, order)).sum(dim=-1, keepdim=True)
    mass = weights.gather(1, order).double().cumsum(dim=-1)
    wanted = options.top_ps[:, None] * mass.gather(1, (count - 1).clamp_(min=0))
    nucleus = (mass < wanted).sum(dim=-1, keepdim=True) + 1
    count = torch.where(options.top_ps[:, None] < 1.0, torch.minimum(nucleus, count), count)
    kept = torch.zeros_like(is_likely).scatter_(1, order, places < count)
    return torch.where(has_order, kept, is_likely)


def best_tokens(values: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` largest entries' indices of each row [rows, vocab] float32, largest first, the lower index first
    among equals."""
    bits = torch.where(values == 0, 0.0, values).view(torch.int32)  # both zeros are equal
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    places = LOWER_HALF - torch.arange(values.shape[1], device=values.device)
    keys = (ordered << 32) | places
    best = keys.topk(count).values if count < values.shape[1] else keys.sort(descending=True).values
    return LOWER_HALF - (best & LOWER_HALF)


def _logprob_columns(
    logits: torch.Tensor, rows: torch.Tensor | None, peaks: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> torch.Tensor:
    """What log probabilities are made of, flat int64: peaks, totals and chosen logits as doubles, then by rank the
    likeliest tokens, then their logits as doubles."""
    parts: list[list[torch.Tensor]] = []
    factor = depth_factor(1.0)
    for first in range(0, len(peaks), ROWS_AT_ONCE):
        some = slice(first, first + ROWS_AT_ONCE)
        values = (logits[some] if rows is None else logits[rows[some]]).float()
        factors = torch.full_like(peaks[some], factor)
        totals = whole_weights_torch(values, peaks[some], factors).double().sum(dim=-1)
        totals = torch.where(torch.isfinite(peaks[some]), totals, torch.nan)
        chosen = values.gather(1, token_ids[some, None])[:, 0]
        top = best_tokens(values, num_top).T if num_top else token_ids.new_empty(0, len(values))
        top_values = values.gather(1, top.T).T.double().contiguous().view(torch.int64)
        doubles = [column.double().view(torch.int64)[None] for column in (peaks[some], totals, chosen)]
        parts.append([*doubles, top, top_values])
    return torch.cat([torch.cat(column, dim=1) for column in zip(*parts, strict=True)]).flatten()
