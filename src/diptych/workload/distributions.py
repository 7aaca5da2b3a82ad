"""Random numbers that are the same on every platform.

Owns log, exp and the distributions of a workload, made of IEEE 754 ``+ - * /``, ``math.frexp``, ``math.ldexp`` and
``math.sqrt`` alone: each of these has one correct result, so the same seed gives the same workload bit for bit. Must
never call the C library's ``log`` or ``exp``, whose last bit differs between platforms.
"""

import math
import random
from hashlib import blake2b

LN2_HIGH = 0.6931471803691238  # ln 2 to 32 bits: its product with an exponent is exact
LN2_LOW = 1.9082149292705877e-10  # the rest
LOG2_E = 1.4426950408889634
SQRT_HALF = 0.7071067811865476
SMALLEST = 2.0**-54  # half of the smallest step of a uniform number


def log(x: float) -> float:
    """Natural logarithm of a positive finite number; within 1e-15 of the true value, relative.

    x = m * 2**e with m in [sqrt(1/2), sqrt(2)); log m = 2 artanh((m - 1) / (m + 1)), a series in a square below 0.0295.
    """
    mantissa, exponent = math.frexp(x)
    if mantissa < SQRT_HALF:
        mantissa += mantissa
        exponent -= 1
    if mantissa <= 0.0:
        raise ValueError(f"log of {x}; it must be positive")
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    z = ratio * ratio
    tail = z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13 + z * (1 / 15 + z * (
        1 / 17 + z * (1 / 19 + z / 21)))))))))  # fmt: skip
    twice = ratio + ratio
    return exponent * LN2_HIGH + (exponent * LN2_LOW + (twice * tail + twice))


def exp(x: float) -> float:
    """e to the x, within 1e-15 of the true value, relative; OverflowError above about 709.78.

    x = k ln 2 + r with abs(r) <= ln 2 / 2; Taylor's series of r to the 13th power.
    """
    if x < -745.2:
        return 0.0
    k = math.floor(x * LOG2_E + 0.5)
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    series = 1.0 + r * (1 + r * (1 / 2 + r * (1 / 6 + r * (1 / 24 + r * (1 / 120 + r * (1 / 720 + r * (1 / 5040 + r * (
        1 / 40320 + r * (1 / 362880 + r * (1 / 3628800 + r * (1 / 39916800 + r * (1 / 479001600
        + r / 6227020800))))))))))))  # fmt: skip
    return math.ldexp(series, k)


class Stream:
    """One stream of random numbers, named: what one part of a workload draws never moves what another part draws.

    Uniform numbers are Python's Mersenne Twister (53 bits), whose sequence is part of the language's documentation.
    """

    __slots__ = ("uniform",)

    def __init__(self, seed: int, name: str) -> None:
        digest = blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
        self.uniform = random.Random(int.from_bytes(digest, "little")).random  # in [0, 1)

    def integer(self, low: int, high: int) -> int:
        """Uniform over low .. high, both included (high - low below 2**53)."""
        return low + int(self.uniform() * (high - low + 1))

    def exponential(self) -> float:
        """Mean 1, by inversion."""
        return -log(1.0 - self.uniform())

    def normal(self) -> float:
        """Mean 0, variance 1: ratio of uniforms with the quadratic bounds of Leva, ACM TOMS 18(4), 1992 (alg. 712)."""
        uniform = self.uniform
        while True:
            u = uniform() or SMALLEST
            v = 1.7156 * (uniform() - 0.5)
            x = u - 0.449871
            y = abs(v) + 0.386595
            q = x * x + y * (0.19600 * y - 0.25472 * x)
            if q < 0.27597 or (q <= 0.27846 and v * v <= -4.0 * u * u * log(u)):
                return v / u

    def gamma(self, shape: float) -> float:
        """Mean and variance ``shape``: Marsaglia and Tsang, ACM TOMS 26(3), 2000; shapes below 1 by its section 6."""
        if shape < 1.0:
            boost = exp(log(self.uniform() or SMALLEST) / shape)
            return self.gamma(shape + 1.0) * boost
        d = shape - 1.0 / 3.0
        c = 1.0 / math.sqrt(9.0 * d)
        while True:
            x = self.normal()
            v = 1.0 + c * x
            if v <= 0.0:
                continue
            v = v * v * v
            u = self.uniform() or SMALLEST
            if u < 1.0 - 0.0331 * (x * x) * (x * x) or log(u) < 0.5 * x * x + d * (1.0 - v + log(v)):
                return d * v
