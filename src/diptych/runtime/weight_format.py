"""The format of a weight in whole numbers of 8 or 4 bits: all that is known of it before its values are read.

Free of torch: the front end and the readers of headers need it. quantized_weight.py says what the values mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass

BITS = (8, 4)
MIN_GROUP = 32  # columns that share a scale, unless all do


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """bits: 8 or 4. group_size: columns of a row that share a scale (None: all); a multiple of 32 that divides the
    number of columns. has_mins: each group has a constant that is subtracted, and values count from 0."""

    bits: int
    group_size: int | None = None
    has_mins: bool = False

    @property
    def offset(self) -> int:
        """What a stored value of 0 stands for, negated: the middle of the range where groups have no constant."""
        return 0 if self.has_mins else 1 << (self.bits - 1)

    def num_groups(self, columns: int) -> int:
        """Groups of a row."""
        return 1 if self.group_size is None else columns // self.group_size


def common_format(formats: Sequence[WeightFormat]) -> WeightFormat:
    """The smallest format that holds weights of all of these formats."""
    sizes = [f.group_size for f in formats if f.group_size is not None]
    return WeightFormat(
        bits=max(f.bits for f in formats),
        group_size=min(sizes) if sizes else None,
        has_mins=any(f.has_mins for f in formats),
    )
