"""Draws a token from each row of logits: one program for a row, which reads it several times and writes nothing else.

The token is bit for bit that of ``sampling.sampler``: weights are the same whole numbers, and whole numbers have one
sum. What top_k and top_p keep is found without sorting: the kept tokens are those whose logit lies above a bound, and
the first few of those at the bound, and the bound is found from its highest bits down, two a reading.
"""

import torch
import triton
import triton.language as tl

from diptych.runtime.sampling.batch_sampler import PickOptions
from diptych.runtime.sampling.whole_weights import COEFFICIENTS, LOWEST, ROUNDER

BLOCK = 4096  # tokens at once
WARPS = 16
C5, C4, C3, C2, C1, C0 = (tl.constexpr(value) for value in COEFFICIENTS)
CUT = tl.constexpr(LOWEST)
ROUND = tl.constexpr(ROUNDER)
WHOLE_ABOVE = tl.constexpr(2.0**23)  # floats from here on have no fraction


def pick_triton(
    logits: torch.Tensor, rows: torch.Tensor | None, peaks: torch.Tensor, options: PickOptions
) -> torch.Tensor:
    """Draw a token from each row. See batch_sampler.Pick."""
    count, vocab_size = len(peaks), logits.shape[1]
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count:
        if rows is None:
            rows = torch.arange(count, device=logits.device)
        _pick[(count,)](
            logits, rows, peaks, options.factors, options.top_ks, options.top_ps, options.least_depths,
            options.uniforms, tokens, logits.stride(0), vocab_size,
            BLOCK_=min(BLOCK, triton.next_power_of_2(vocab_size)), num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return tokens


@triton.jit
def _load(row, first, vocab_size, BLOCK_: tl.constexpr):
    """Logits of a block, and which of its places are tokens."""
    at = first + tl.arange(0, BLOCK_)
    is_token = at < vocab_size
    return tl.load(row + at, mask=is_token, other=0.0).to(tl.float32), is_token


@triton.jit
def _depths(values, peak, factor):
    return (values - peak) * factor


@triton.jit
def _weights(values, peak, factor):
    """Weights of one tile, as ``whole_weights`` has them."""
    x = tl.maximum(_depths(values, peak, factor), CUT)
    whole = x + ROUND
    x = x - (whole - ROUND)
    power = x * C5
    power = (power + C4) * x
    power = (power + C3) * x
    power = (power + C2) * x
    power = (power + C1) * x
    power = power + C0
    bits = power.to(tl.int32, bitcast=True) + (whole.to(tl.int32, bitcast=True) << 23)
    power = bits.to(tl.float32, bitcast=True)
    rounded = (power + WHOLE_ABOVE) - WHOLE_ABOVE
    return tl.where(power < WHOLE_ABOVE, rounded, power).to(tl.int64)


@triton.jit
def _keys(values):
    """Whole numbers that are ordered like the logits; both zeros are equal."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _bound(row, vocab_size, peak, factor, wanted, BY_WEIGHT: tl.constexpr, BLOCK_: tl.constexpr):
    """The highest key such that the tokens with this key or a higher one reach ``wanted``: in number, or in weight."""
    bound = tl.cast(-2147483648, tl.int64)
    step = tl.cast(1073741824, tl.int64)
    for _ in range(16):
        first_sum = tl.zeros([BLOCK_], tl.int64)
        second_sum = tl.zeros([BLOCK_], tl.int64)
        third_sum = tl.zeros([BLOCK_], tl.int64)
        for first in range(0, vocab_size, BLOCK_):
            values, is_token = _load(row, first, vocab_size, BLOCK_)
            keys = _keys(values)
            if BY_WEIGHT:
                amounts = tl.where(is_token, _weights(values, peak, factor), 0)
            else:
                amounts = is_token.to(tl.int64)
            first_sum += tl.where(keys >= bound + step, amounts, 0)
            second_sum += tl.where(keys >= bound + 2 * step, amounts, 0)
            third_sum += tl.where(keys >= bound + 3 * step, amounts, 0)
        reached = (tl.sum(first_sum, 0) >= wanted).to(tl.int64)
        reached += (tl.sum(second_sum, 0) >= wanted).to(tl.int64)
        reached += (tl.sum(third_sum, 0) >= wanted).to(tl.int64)
        bound += reached * step
        step = step // 4
    return bound


@triton.jit
def _mass(row, vocab_size, peak, factor, least, bound, BLOCK_: tl.constexpr):
    """Sums over likely tokens: the weight of those above the bound; of those at the bound together, and their number.
    Then the number of all tokens above the bound."""
    above = tl.zeros([BLOCK_], tl.int64)
    at_bound = tl.zeros([BLOCK_], tl.int64)
    ties = tl.zeros([BLOCK_], tl.int64)
    number = tl.zeros([BLOCK_], tl.int64)
    for first in range(0, vocab_size, BLOCK_):
        values, is_token = _load(row, first, vocab_size, BLOCK_)
        keys = _keys(values)
        weights = _weights(values, peak, factor)
        is_likely = is_token & (_depths(values, peak, factor) >= least)
        above += tl.where(is_likely & (keys > bound), weights, 0)
        at_bound += tl.where(is_likely & (keys == bound), weights, 0)
        ties += (is_likely & (keys == bound)).to(tl.int64)
        number += (is_token & (keys > bound)).to(tl.int64)
    return tl.sum(above, 0), tl.sum(at_bound, 0), tl.sum(ties, 0), tl.sum(number, 0)


@triton.jit
def _pick(
    logits, row_ids, peaks, factors, top_ks, top_ps, least_depths, uniforms, tokens, stride, vocab_size,
    BLOCK_: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = logits + tl.load(row_ids + program).to(tl.int64) * stride
    peak = tl.load(peaks + program).to(tl.float32)
    factor = tl.load(factors + program)
    least = tl.load(least_depths + program)
    top_k, top_p = tl.load(top_ks + program), tl.load(top_ps + program)

    # what is kept: likely tokens above the bound, and the first ``room`` tokens at the bound
    bound = tl.cast(-2147483649, tl.int64)
    room = tl.cast(0, tl.int64)
    if top_k < vocab_size:
        bound = _bound(row, vocab_size, peak, factor, top_k, False, BLOCK_)
        above, at_bound, ties, number = _mass(row, vocab_size, peak, factor, least, bound, BLOCK_)
        room = top_k - number
    above, at_bound, ties, number = _mass(row, vocab_size, peak, factor, least, bound, BLOCK_)
    weight = at_bound // tl.maximum(ties, 1)
    room = tl.minimum(room, ties)
    total = above + room * weight
    if top_p < 1.0:
        reach = top_p * total.to(tl.float64)
        wanted = reach.to(tl.int64)
        wanted = tl.maximum(wanted + (wanted.to(tl.float64) < reach).to(tl.int64), 1)
        bound = _bound(row, vocab_size, peak, factor, wanted, True, BLOCK_)
        above, at_bound, ties, number = _mass(row, vocab_size, peak, factor, least, bound, BLOCK_)
        weight = at_bound // tl.maximum(ties, 1)
        room = (wanted - above + weight - 1) // tl.maximum(weight, 1)
        total = above + room * weight

    target = (tl.load(uniforms + program) * total.to(tl.float64)).to(tl.int64)
    target = tl.minimum(target, total - 1)
    passed = tl.cast(0, tl.int64)  # weight before the block
    ties = tl.cast(0, tl.int64)  # tokens at the bound before the block
    token = tl.cast(0, tl.int64)
    for first in range(0, vocab_size, BLOCK_):
        values, is_token = _load(row, first, vocab_size, BLOCK_)
        keys = _keys(values)
        is_likely = is_token & (_depths(values, peak, factor) >= least)
        is_tie = (is_likely & (keys == bound)).to(tl.int64)
        is_kept = (is_likely & (keys > bound)) | ((is_tie > 0) & (ties + tl.cumsum(is_tie, 0) <= room))
        weights = tl.where(is_kept, _weights(values, peak, factor), 0)
        cumulative = passed + tl.cumsum(weights, 0)
        token += tl.sum((is_token & (cumulative <= target)).to(tl.int64), 0)
        passed += tl.sum(weights, 0)
        ties += tl.sum(is_tie, 0)
    tl.store(tokens + program, token)
