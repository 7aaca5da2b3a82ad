"""Softmax weights as whole numbers: the likeliest token weighs 2**32, and what is less than half a unit weighs nothing.

Sums of whole numbers below 2**53 are exact in double precision in any order, and the weights themselves are made of
single additions, multiplications and roundings of IEEE 754. So a sampler in NumPy, one in torch and one in a kernel,
which each add up in an order of their own, pick the same token on any machine. (Exponentials of libraries differ in
their last bits: by library, by processor, by device.) A vocabulary may have 2**20 tokens.

2**x is c0 + c1 f + ... + c5 f**5 times 2**n, where n is x rounded and f the rest: within 1e-7 of the true value.
"""

import math

import numpy as np
import numpy.typing as npt
import torch

from diptych.runtime.kernels.native import load_native

ONE = 2.0**32  # the weight of the likeliest token
LOG2_E = 1.0 / math.log(2.0)
LOWEST = -64.0  # depths below this one are cut: their weights are 0 as well
ROUNDER = 1.5 * 2.0**23 + 32.0  # added to a depth, it leaves the depth's whole part + 32 in the lowest bits
COEFFICIENTS = (  # c5, c4 ... c0; minimax for f in [-1/2, 1/2], in float32
    0.0013264717999845743,
    0.009671512991189957,
    0.05550733953714371,
    0.24022242426872253,
    0.6931470036506653,
    1.0,
)
CHUNK = 32768  # tokens at once, so that all steps find them in a cache

Floats = npt.NDArray[np.float32]


def depth_factor(temperature: float) -> float:
    """What a difference of logits is multiplied with to be a depth, which is in powers of two."""
    return LOG2_E / temperature


def least_depth(min_p: float) -> float:
    """The depth of tokens whose probability is ``min_p`` of the likeliest one's; -inf for 0."""
    return math.log2(min_p) if min_p > 0 else -math.inf


def depths(logits: Floats, best: np.float32, factor: float) -> Floats:
    """How far each of ``logits`` lies below the ``best``, in powers of two: 0 or less."""
    with np.errstate(over="ignore"):
        below = np.subtract(logits, best)
        below *= np.float32(factor)
    return below


def whole_weights(logits: Floats, best: np.float32, factor: float) -> Floats:
    """The weights of ``logits`` [vocab], contiguous, of which ``best`` is the largest and finite."""
    library = load_native()
    if library is None:
        return whole_weights_numpy(logits, best, factor)
    weights = np.empty_like(logits)
    library.functions.diptych_whole_weights(
        logits.ctypes.data, weights.ctypes.data, len(logits), float(best), float(np.float32(factor))
    )
    return weights


def whole_weights_numpy(logits: Floats, best: np.float32, factor: float) -> Floats:
    """As ``whole_weights``, where no native library is built: in a few hundred microseconds more."""
    weights = np.empty_like(logits)
    for first in range(0, len(logits), CHUNK):
        x = depths(logits[first : first + CHUNK], best, factor)
        np.maximum(x, np.float32(LOWEST), out=x)
        whole = x + np.float32(ROUNDER)
        x -= whole - np.float32(ROUNDER)
        power = weights[first : first + CHUNK]
        np.multiply(x, np.float32(COEFFICIENTS[0]), out=power)
        for coefficient in COEFFICIENTS[1:-1]:
            power += np.float32(coefficient)
            power *= x
        power += np.float32(COEFFICIENTS[-1])
        bits, exponents = power.view(np.int32), whole.view(np.int32)
        exponents <<= 23
        bits += exponents
        np.rint(power, out=power)
    return weights


def whole_weights_torch(logits: torch.Tensor, best: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The weights of ``logits`` [rows, vocab] float32, the same bits as ``whole_weights``. best, factors: [rows]."""
    x = depths_torch(logits, best, factors).clamp_(min=LOWEST)
    whole = x + ROUNDER
    x -= whole - ROUNDER
    power = x * COEFFICIENTS[0]
    for coefficient in COEFFICIENTS[1:-1]:
        power += coefficient
        power *= x
    power += COEFFICIENTS[-1]
    power.view(torch.int32).add_(whole.view(torch.int32) << 23)
    return power.round_()


def depths_torch(logits: torch.Tensor, best: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """As ``depths``, of [rows, vocab]."""
    return (logits - best[:, None]).mul_(factors[:, None])
