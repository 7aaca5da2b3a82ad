"""The tensors of a checkpoint that together are one weight in FP8 (E4M3).

A weight [rows, columns] of a module ``m`` is m.weight times m.weight_scale_inv (DeepSeek, Mistral, transformers) or
m.weight_scale (compressed-tensors, ModelOpt, AutoFP8), which in spite of their names mean the same. The shape of the
scale says what shares one: all ([] or [1]), a row ([rows] or [rows, 1]), or a block.

Matrices of experts may lie in one tensor ``m`` [experts, rows, columns], whose scales are m_scale_inv (transformers) or
m_weight_scale, with the shape of each matrix's own behind the number of experts. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from diptych.control.errors import ConfigError, UnsupportedModelError
from diptych.runtime.dtypes import DTYPES_BY_CODE, E8M0, FP8
from diptych.runtime.quantization.quantization_config import Fp8Quantization
from diptych.runtime.weights.safetensors_file import SafetensorsFile

SCALES = ("weight_scale_inv", "weight_scale")
SCALES_OF_EXPERTS = ("scale_inv", "weight_scale_inv", "weight_scale", "scale")
SCALE_ENDS = ("_scale_inv", ".weight_scale", "_proj_weight_scale")  # of scales that have a weight beside them
SCALE_DTYPES = (*DTYPES_BY_CODE, E8M0)
# Scales of activations and of a KV cache in FP8, by the ends of their names in each writer: they round what these hold,
# and say nothing of weights.
UNUSED_SCALES = (
    "input_scale", "input_scale_ub", "input_zero_point", "activation_scale", "act_scale", "output_scale",
    "k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "prob_output_scale",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight [rows, columns], or several of them in one tensor. path: of its values. values, scale: the names of its
    tensors. block: the rows and columns that share a scale; those at the ends may be fewer."""

    path: Path
    rows: int
    columns: int
    values: str
    scale: str
    block: tuple[int, int]


def is_unused(name: str, weights: Mapping[str, Fp8Weight]) -> bool:
    """Whether a tensor of a checkpoint with these weights in FP8 is a scale that they do not need."""
    return name.rpartition(".")[2] in UNUSED_SCALES or any(
        name.endswith(f"_{scale}") and name.removesuffix(f"_{scale}") in weights for scale in UNUSED_SCALES
    )


def find_fp8_weights(files: Mapping[str, SafetensorsFile], quantization: Fp8Quantization) -> dict[str, Fp8Weight]:
    """Every weight in FP8 among the tensors in ``files``, by its name.

    Raises ConfigError for a scale that is missing, of another shape or dtype, or without a weight, and
    UnsupportedModelError for other tensors in FP8.
    """
    in_fp8 = [name for name, file in files.items() if file.entries[name].dtype == FP8]
    found = {name: _weight(files, name, quantization) for name in in_fp8}
    scales = {weight.scale for weight in found.values()}
    for name, file in files.items():
        if name.endswith(SCALE_ENDS) and name not in scales:
            raise ConfigError(f"{file.path}: tensor {name} has no weight in {FP8} beside it", param="model")
    return found


def _weight(files: Mapping[str, SafetensorsFile], name: str, quantization: Fp8Quantization) -> Fp8Weight:
    file = files[name]
    module, _, last = name.rpartition(".")
    shape = file.entries[name].shape
    is_matrix = last == "weight" and len(shape) == 2
    if not (is_matrix or (last != "bias" and len(shape) == 3)) or 0 in shape:
        raise UnsupportedModelError(
            f"{file.path}: tensor {name} is {FP8} {list(shape)}; supported: weights (.weight) of two dimensions, and "
            "experts of three",
            param="model",
        )
    names = [f"{module}.{part}" for part in SCALES] if is_matrix else [f"{name}_{part}" for part in SCALES_OF_EXPERTS]
    scale = next((scale for scale in names if scale in files), None)
    if scale is None:
        raise ConfigError(
            f"{file.path}: tensor {' or '.join(names)} is missing in the checkpoint, which holds {name} in {FP8}",
            param="model",
        )
    rows, columns = shape[-2:]
    return Fp8Weight(file.path, rows, columns, name, scale, _block(files[scale], scale, shape, quantization))


def _block(file: SafetensorsFile, scale: str, shape: tuple[int, ...], quantization: Fp8Quantization) -> tuple[int, int]:
    """The rows and columns that share one of these scales. shape: of all values."""
    rows, columns = shape[-2:]
    shapes: dict[tuple[int, ...], tuple[int, int]] = dict.fromkeys([(), (1,), (1, 1)], (rows, columns))
    shapes |= {(rows,): (1, columns), (rows, 1): (1, columns)}
    wanted = [[], [1], [rows], [rows, 1]]
    if quantization.block is not None:
        counts = -(-rows // quantization.block[0]), -(-columns // quantization.block[1])
        shapes |= {counts: quantization.block, (counts[0], 1, counts[1], 1): quantization.block}
        wanted.insert(0, list(counts))
    front = shape[:-2]
    entry = file.entries[scale]
    own = entry.shape[len(front) :]
    if entry.dtype not in SCALE_DTYPES or entry.shape[: len(front)] != front or own not in shapes:
        raise ConfigError(
            f"{file.path}: tensor {scale} is {entry.dtype} {list(entry.shape)}; for a weight {list(shape)} it must be "
            f"{' or '.join(SCALE_DTYPES)}, and {' or '.join(str([*front, *extents]) for extents in wanted)}",
            param="model",
        )
    return shapes[own]
