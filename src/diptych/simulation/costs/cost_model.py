"""The seam of cost models: a plan becomes a duration, in integer nanoseconds.

Pure decode steps follow a line: with the batch unchanged, each step attends to one token more per sequence, and its
duration is a linear function of that number. Lines are held in fixed point, so that the sum over many steps is exact
and equal on every platform, whether the steps are taken one by one or all at once.
"""

from dataclasses import dataclass
from typing import Protocol

from diptych.control.step import SchedulerOutput

FRACTION_BITS = 20
UNBOUNDED = 2**62


@dataclass(frozen=True, slots=True)
class DecodeLine:
    """Duration of a pure decode step with a given number of sequences, as a function of the context.

    step_ns(context) = floor((intercept + slope * context) / 2**FRACTION_BITS) >= 1, for contexts (the sum over the
    sequences of the tokens each attends to) below ``until_context``. Both coefficients are integers, the slope >= 0;
    the intercept of a steep piece of a table, which holds far from 0 only, may be negative.
    """

    intercept: int
    slope: int
    until_context: int = UNBOUNDED

    @classmethod
    def of(cls, intercept_ns: float, slope_ns: float, until_context: int = UNBOUNDED) -> "DecodeLine":
        """A line from nanoseconds and nanoseconds per context token (at least 1 ns a step)."""
        scale = 1 << FRACTION_BITS
        intercept = round(intercept_ns * scale)
        return cls(
            max(scale, intercept) if intercept >= 0 else intercept, max(0, round(slope_ns * scale)), until_context
        )

    def step_ns(self, context: int) -> int:
        """Duration of one step."""
        return (self.intercept + self.slope * context) >> FRACTION_BITS

    def total_ns(self, context: int, num_seqs: int, num_steps: int) -> int:
        """Exact sum over ``num_steps`` steps, the first at ``context``, each later one ``num_seqs`` tokens further."""
        if num_steps == 1:
            return (self.intercept + self.slope * context) >> FRACTION_BITS
        return floor_sum(num_steps, 1 << FRACTION_BITS, self.slope * num_seqs, self.intercept + self.slope * context)


class CostModel(Protocol):
    """Prices the steps of one worker. Stateless: equal arguments give equal answers, in any order of calls."""

    @property
    def name(self) -> str:
        """What reports call it."""
        ...

    def decode_line(self, num_seqs: int, context: int) -> DecodeLine:
        """The line that holds for pure decode steps of ``num_seqs`` sequences from ``context`` on (>= 1 each).

        ``until_context`` must exceed ``context``.
        """
        ...

    def step_ns(self, output: SchedulerOutput) -> int:
        """Duration of any step (>= 1). Without prefills it must be ``decode_line(...).step_ns(decode_context)``.

        ``output.prefills`` holds the chunks (start, num_tokens), ``output.features`` the sums over the step.
        """
        ...


def floor_sum(n: int, modulus: int, a: int, b: int) -> int:
    """sum(floor((a * i + b) / modulus) for i in range(n)), exactly, in O(log) steps (the Euclid-like algorithm of
    Graham, Knuth and Patashnik, Concrete Mathematics, section 3.5); a, b >= 0."""
    total = 0
    while True:
        quotient, a = divmod(a, modulus)
        total += quotient * (n * (n - 1) // 2)
        quotient, b = divmod(b, modulus)
        total += quotient * n
        top = a * n + b
        if top < modulus:
            return total
        n, b = divmod(top, modulus)
        modulus, a = a, modulus
