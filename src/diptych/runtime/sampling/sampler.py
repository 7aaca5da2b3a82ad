"""Picks tokens: a pure function of a row of logits, the request's parameters, its seed and its position.

A row never sees another row, and nothing here remembers anything, so a request that moves to another batch or another
worker continues the very same stream. Runs on the host in numpy: on CPUs it is 10 times faster than the same in torch.
``batch_sampler`` picks the same tokens for all rows of a step at once, on the device that computed them.
The definitions of the parameters are vLLM's: penalties on logits, then temperature, then min_p, top_k and top_p.
Softmax weights are whole numbers (``whole_weights``), so that every sum here is exact.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from diptych.control.request import SamplingParams
from diptych.control.step import TokenLogprobs
from diptych.runtime.sampling.whole_weights import ONE, depth_factor, depths, least_depth, whole_weights

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

GREEDY_BELOW = 1e-5  # temperature
BLOCK = 512  # of the two-level inverse CDF
NUCLEUS_CANDIDATES = (64, 512)  # how many of the best top_p looks at before it cuts by histogram
NUCLEUS_BINS = 4096
NUCLEUS_DEPTH = 32.0  # in units of the temperature: what lies deeper is less likely than e**-32 of the best
BF16_INFINITY = 0x7F80
NOTHING_TO_PICK = "the model computed a logit that is not a number, or every token is masked"


class SamplingError(ValueError):
    """A row that no token can be picked from."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """What sampling one row depends on besides its logits.

    uniform: from ``uniforms(seed, position)``, where the position is the number of tokens so far. token_ids: prompt
    and output so far. stop_ids: masked while fewer than min_tokens are out.
    """

    params: SamplingParams
    uniform: float
    token_ids: npt.NDArray[np.int32]
    num_prompt_tokens: int
    stop_ids: tuple[int, ...] = ()


def sample_greedy(logits: torch.Tensor) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Per row of [rows, vocab]: the most likely token (the lowest id among equals), and whether its logit is finite."""
    if logits.device.type != "cpu":
        values, ids = logits.max(dim=-1)
        return ids.cpu().numpy(), torch.isfinite(values).cpu().numpy()
    rows = np.arange(logits.shape[0])
    if logits.dtype is torch.float32:
        matrix = logits.numpy()
        best = matrix.argmax(axis=1)
        return best, np.isfinite(matrix[rows, best])
    # positive bfloat16 numbers are ordered like the integers that have the same bits
    bits = logits.view(torch.int16).numpy()
    best = bits.argmax(axis=1)
    values_as_bits = bits[rows, best]
    is_finite = values_as_bits < BF16_INFINITY
    for row in np.flatnonzero(values_as_bits <= 0):  # the best logit is not positive
        exact = row_as_float32(logits, int(row))
        best[row] = exact.argmax()
        is_finite[row] = np.isfinite(exact[best[row]])
    return best, is_finite


def row_as_float32(logits: torch.Tensor, row: int) -> Floats:
    """A copy of one row in fp32, exact."""
    if logits.device.type == "cpu" and logits.dtype is torch.bfloat16:
        bits = logits[row].view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        return np.left_shift(bits, 16, out=bits).view(np.float32)
    return logits[row].float().cpu().numpy().copy()


def sample_row(logits: Floats, row: RowSampling) -> int:
    """Pick the next token. ``logits`` [vocab] fp32 is overwritten. Raises SamplingError when nothing can be picked."""
    params = row.params
    adjust_logits(logits, row)
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        raise SamplingError(NOTHING_TO_PICK)
    if params.temperature < GREEDY_BELOW:
        return best
    factor = depth_factor(params.temperature)
    if 0 < params.top_k < len(logits):
        kept = _best_tokens(logits, params, factor)
        kept.sort()
        return int(kept[_draw(whole_weights(logits[kept], logits[best], factor), row.uniform)])
    weights = whole_weights(logits, logits[best], factor)
    likely = _likely(logits, logits[best], factor, params.min_p)
    if params.top_p < 1.0:
        mass = weights.sum(dtype=np.float64) if likely is None else weights[likely].sum(dtype=np.float64)
        likely = _nucleus(logits, weights, params.top_p * float(mass), params.temperature)
        likely.sort()
    if likely is None:
        return _draw(weights, row.uniform)
    return int(likely[_draw(weights[likely], row.uniform)])


def adjust_logits(logits: Floats, row: RowSampling) -> None:
    """Apply min_tokens, logit_bias and the three penalties in place."""
    params = row.params
    outputs = row.token_ids[row.num_prompt_tokens :]
    if len(outputs) < params.min_tokens and row.stop_ids:
        logits[list(row.stop_ids)] = -np.inf
    for token, bias in params.logit_bias.items():
        logits[token] += np.float32(bias)
    if params.repetition_penalty != 1.0:
        seen = np.unique(row.token_ids)
        values = logits[seen]
        penalty = np.float32(params.repetition_penalty)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.frequency_penalty or params.presence_penalty:
        tokens, counts = np.unique(outputs, return_counts=True)
        logits[tokens] -= (counts * params.frequency_penalty + params.presence_penalty).astype(np.float32)


def token_logprobs(logits: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    """Log probability of ``token_id`` and of the ``num_top`` most likely tokens under raw ``logits`` [vocab]."""
    peak, total = logits.max(), math.nan
    if np.isfinite(peak):
        total = float(whole_weights(logits, peak, depth_factor(1.0)).sum(dtype=np.float64))
    top = top_tokens(logits, num_top) if num_top else np.zeros(0, dtype=np.int64)
    return logprobs_of(token_id, float(logits[token_id]), (top.tolist(), logits[top].tolist()), float(peak), total)


def logprobs_of(
    token_id: int, logit: float, top: tuple[list[int], list[float]], peak: float, total: float
) -> TokenLogprobs:
    """What is reported of a token. top: token ids and their logits. peak: the largest logit. total: the sum of all
    whole weights at temperature 1; NaN where there is none."""
    log_total = peak + math.log(total / ONE)
    return TokenLogprobs(
        token_id,
        logit - log_total,
        tuple((token, value - log_total) for token, value in zip(*top, strict=True)),
    )


def top_tokens(logits: Floats, count: int) -> Ints:
    """The ``count`` largest entries' indices, largest first, the lower index first among equals."""
    size = len(logits)
    if count * 8 >= size:
        return np.argsort(-logits, kind="stable")[:count]
    width = min(BLOCK, size // (2 * count))
    # the count-th largest of the blocks' maxima is a bound that at least ``count`` entries reach
    maxima = np.maximum.reduceat(logits, np.arange(0, size, width))
    bound = np.partition(maxima, len(maxima) - count)[len(maxima) - count]
    candidates = np.flatnonzero(logits >= bound)
    order = np.argsort(-logits[candidates], kind="stable")[:count]
    return candidates[order]


def _best_tokens(logits: Floats, params: SamplingParams, factor: float) -> Ints:
    """The tokens that top_k, min_p and top_p leave, best first. Each keeps a prefix of the tokens in falling order of
    probability."""
    tokens = top_tokens(logits, params.top_k)
    best = logits[tokens[0]]
    if params.min_p > 0:
        is_likely = depths(logits[tokens], best, factor) >= np.float32(least_depth(params.min_p))
        tokens = tokens[: int(np.count_nonzero(is_likely))]
    if params.top_p < 1.0:
        mass = np.cumsum(whole_weights(logits[tokens], best, factor), dtype=np.float64)
        tokens = tokens[: int(np.searchsorted(mass, params.top_p * mass[-1])) + 1]
    return tokens


def _likely(logits: Floats, best: np.float32, factor: float, min_p: float) -> Ints | None:
    """The tokens that min_p leaves; None for all."""
    if min_p <= 0:
        return None
    return np.flatnonzero(depths(logits, best, factor) >= np.float32(least_depth(min_p)))


def _nucleus(logits: Floats, weights: Floats, wanted: float, temperature: float) -> Ints:
    """The smallest set of most likely tokens whose weights reach ``wanted``. A few candidates are enough for most
    rows; a flat row is cut by a histogram of its logits, of which only the bin at the boundary is sorted."""
    for count in NUCLEUS_CANDIDATES:
        if count * 8 < len(logits):
            tokens = top_tokens(logits, count)
            mass = np.cumsum(weights[tokens], dtype=np.float64)
            if mass[-1] >= wanted:
                return tokens[: int(np.searchsorted(mass, wanted)) + 1]
    depth = logits.max() - logits
    bins = np.minimum(depth * (NUCLEUS_BINS / (NUCLEUS_DEPTH * temperature)), NUCLEUS_BINS).astype(np.int32)
    mass = np.cumsum(np.bincount(bins, weights=weights))
    edge = min(int(np.searchsorted(mass, wanted)), len(mass) - 1)
    at_edge = np.flatnonzero(bins == edge)
    at_edge = at_edge[np.argsort(-logits[at_edge], kind="stable")]
    missing = wanted - (mass[edge - 1] if edge else 0.0)
    count = int(np.searchsorted(np.cumsum(weights[at_edge], dtype=np.float64), missing)) + 1
    return np.concatenate([np.flatnonzero(bins < edge), at_edge[:count]])


def _draw(weights: Floats, uniform: float) -> int:
    """The index at which the cumulative weight passes ``uniform`` of the total (inverse CDF in index order)."""
    first = 0
    if len(weights) > 2 * BLOCK:
        sums = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), BLOCK), dtype=np.float64))
        target = _target(uniform, sums[-1])
        block = int(np.searchsorted(sums, target, side="right"))
        first = block * BLOCK
        weights = weights[first : first + BLOCK]
        target -= sums[block - 1] if block else 0.0
        cumulative = np.cumsum(weights, dtype=np.float64)
    else:
        cumulative = np.cumsum(weights, dtype=np.float64)
        target = _target(uniform, cumulative[-1])
    return first + int(np.searchsorted(cumulative, target, side="right"))


def _target(uniform: float, total: float) -> float:
    """The cumulative weight that a draw must pass, a whole number below the total."""
    return min(float(np.floor(uniform * total)), total - 1.0)


def uniforms(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in (0, 1) per (seed, position): splitmix64 (Steele et al. 2014) of the one, then of the other."""
    state = _splitmix64(seeds.astype(np.int64).view(np.uint64))
    state = _splitmix64(state + positions.astype(np.uint64))
    return ((state >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _splitmix64(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
