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

    def __str__(self) -> str:
        return f"int{self.bits}" if self.group_size is None else f"int{self.bits} in groups of {self.group_size}"

    @property
    def offset(self) -> int:
        """What a stored value of 0 stands for, negated: the middle of the range where groups have no constant."""
        return 0 if self.has_mins else 1 << (self.bits - 1)

    def num_groups(self, columns: int) -> int:
        """Groups of a row."""
        return 1 if self.group_size is None else columns // self.group_size

    def num_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a weight as kernels keep it: scales and mins are fp32, or fp16 where a row has several groups."""
        groups = self.num_groups(columns)
        return rows * (columns * self.bits // 8 + groups * (4 if groups == 1 else 2) * (2 if self.has_mins else 1))


@dataclass(frozen=True, slots=True)
class Quantization:
    """What becomes of weights in floating point. layers: the format of linear layers; vocabulary: of embeddings and
    lm_head. None: they stay."""

    layers: WeightFormat | None = None
    vocabulary: WeightFormat | None = None

    def format_of(self, columns: int, *, is_vocabulary: bool) -> WeightFormat | None:
        """Format of a weight with ``columns`` columns: 8 bits where groups do not divide them."""
        wanted = self.vocabulary if is_vocabulary else self.layers
        return PER_ROW if wanted and wanted.group_size and columns % wanted.group_size else wanted


PER_ROW = WeightFormat(8)
NO_QUANTIZATION = Quantization()
QUANTIZATIONS = {  # by the names of --quantize
    "none": NO_QUANTIZATION,
    "int8": Quantization(PER_ROW, PER_ROW),
    "int4": Quantization(WeightFormat(4, MIN_GROUP), PER_ROW),
}


def common_format(formats: Sequence[WeightFormat]) -> WeightFormat:
    """The smallest format that holds weights of all of these formats."""
    sizes = [f.group_size for f in formats if f.group_size is not None]
    return WeightFormat(
        bits=max(f.bits for f in formats),
        group_size=min(sizes) if sizes else None,
        has_mins=any(f.has_mins for f in formats),
    )
