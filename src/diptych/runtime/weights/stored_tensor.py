"""What a checkpoint says of one tensor before its values are read."""

from dataclasses import dataclass
from pathlib import Path

from diptych.runtime.weights.weight_format import WeightFormat


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor, or one weight in whole numbers that several tensors of the file make up.

    path: the file that holds it. dtype: how its values are stored, in the words of the file. shape: of the values, not
    of the packed words. num_bytes: all that is stored of it. format: None for floating point.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    format: WeightFormat | None = None
