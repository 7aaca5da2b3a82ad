"""What a checkpoint says of one tensor before its values are read, and how one matrix of several in it is named."""

from dataclasses import dataclass, replace
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

    def matrix(self) -> "StoredTensor":
        """One of the matrices that a tensor of three dimensions holds."""
        return replace(self, shape=self.shape[1:], num_bytes=self.num_bytes // self.shape[0])


def weight_name(name: str) -> str:
    """The whole name of the weight of a layer: a name with an index is whole."""
    return name if name.endswith("]") else f"{name}.weight"


def split_index(name: str) -> tuple[str, int | None]:
    """``tensor[3]`` to the tensor's name and 3; a name without an index is that of a matrix (None)."""
    if not name.endswith("]"):
        return name, None
    tensor, _, index = name[:-1].rpartition("[")
    return tensor, int(index)


def matrix_range(start: int, end: int, shape: tuple[int, ...], index: int | None) -> tuple[int, int]:
    """Where one matrix lies of a tensor of this shape in bytes [start, end); the whole tensor for None."""
    if index is None:
        return start, end
    size = (end - start) // shape[0]
    return start + index * size, start + (index + 1) * size
