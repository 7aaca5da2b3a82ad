"""The tensors of a checkpoint that together are one quantised weight, in each layout.

A weight [rows, columns] of a module ``m`` is, with words of 32 bits that hold 32 / bits values, the first one lowest:

    gptq, gptq_v2    m.qweight [columns, rows] packed down the columns, m.qzeros [groups, rows] packed along the rows,
                     m.scales [groups, rows]
    awq              the same three, but qweight packed along the rows, with a word's values in another order
    pack-quantized   m.weight_packed [rows, columns] packed along the columns, m.weight_scale [rows, groups];
                     asymmetric: m.weight_zero_point [rows, groups] packed down the rows
    int-quantized    m.weight [rows, columns] int8, m.weight_scale [rows, groups]; asymmetric: m.weight_zero_point int8
    mxfp4            m_blocks [experts, rows, groups, 16] uint8, each with two values of E2M1, the first one lowest;
                     m_scales [experts, rows, groups] uint8: exponents of 2, counted from -127 (OCP Microscaling Formats
                     1.0); a weight for each expert, whose name is m

GPTQ and compressed-tensors may add the group of each column (g_idx), which must be in order. Imports no torch.
"""

import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from diptych.control.errors import ConfigError, UnsupportedModelError
from diptych.runtime.dtypes import DTYPES_BY_CODE
from diptych.runtime.quantization.quantization_config import QuantizationConfig
from diptych.runtime.weights.safetensors_file import SafetensorsFile

VALUES = {  # the suffix of the tensor that holds the values
    "gptq": "qweight",
    "gptq_v2": "qweight",
    "awq": "qweight",
    "pack-quantized": "weight_packed",
    "int-quantized": "weight",
}
BLOCKS, SCALES, MXFP4_BYTES = "blocks", "scales", 16  # of MXFP4: the ends of names, and bytes of 32 values
GROUP_INDICES = ("g_idx", "weight_g_idx")


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [rows, columns]. path: of its values. parts: the names of its tensors by their suffixes. count: of
    weights that lie in these tensors one after the other (None: one, without a dimension of its own)."""

    quantization: QuantizationConfig
    path: Path
    rows: int
    columns: int
    parts: Mapping[str, str]
    count: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight, or of all weights."""
        return (self.rows, self.columns) if self.count is None else (self.count, self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class _Part:
    """What a tensor must be. dtypes: codes of a safetensors header."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    is_optional: bool = False


def find_packed_weights(
    files: Mapping[str, SafetensorsFile], quantization: QuantizationConfig
) -> dict[str, PackedWeight]:
    """Every quantised weight of the tensors in ``files``, under the name that it would have in floating point.

    Raises ConfigError for a tensor that is missing or not what its layout asks for, UnsupportedModelError for columns
    whose groups are not in order.
    """
    if quantization.layout == "mxfp4":
        return _find_mxfp4(files, quantization)
    suffix = VALUES[quantization.layout]
    found = {}
    for name, file in files.items():
        module, _, last = name.rpartition(".")
        if last != suffix or (suffix == "weight" and file.entries[name].dtype != "I8"):
            continue
        shape = file.entries[name].shape
        if len(shape) != 2:
            raise ConfigError(f"{file.path}: tensor {name} has shape {list(shape)}; two dimensions make a weight")
        rows, columns = _rows_and_columns(quantization, shape)
        group_size = quantization.format.group_size
        if group_size is not None and columns % group_size:
            raise UnsupportedModelError(
                f"{file.path}: tensor {name} has {columns} columns; supported: a multiple of group_size ({group_size})",
                param="group_size",
            )
        parts = {}
        for part, wanted in _parts(quantization, rows, columns).items():
            tensor = f"{module}.{part}"
            if tensor in files or not wanted.is_optional:
                _check(files, tensor, wanted, name)
                parts[part] = tensor
        packed = PackedWeight(quantization, file.path, rows, columns, parts)
        _check_group_index(files, packed)
        found[f"{module}.weight"] = packed
    return found


def _find_mxfp4(files: Mapping[str, SafetensorsFile], quantization: QuantizationConfig) -> dict[str, PackedWeight]:
    found = {}
    for name, file in files.items():
        if not name.endswith(f"_{BLOCKS}"):
            continue
        entry, base = file.entries[name], name.removesuffix(f"_{BLOCKS}")
        if entry.dtype != "U8" or len(entry.shape) != 4 or entry.shape[3] != MXFP4_BYTES:
            raise ConfigError(
                f"{file.path}: tensor {name} is {entry.dtype} {list(entry.shape)}; it must be U8 [experts, rows, "
                f"groups, {MXFP4_BYTES}]",
                param="model",
            )
        count, rows, groups, _ = entry.shape
        scales = f"{base}_{SCALES}"
        _check(files, scales, _Part(("U8",), (count, rows, groups)), name)
        parts = {BLOCKS: name, SCALES: scales}
        found[base] = PackedWeight(quantization, file.path, rows, groups * 2 * MXFP4_BYTES, parts, count)
    return found


def _rows_and_columns(quantization: QuantizationConfig, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the weight whose packed values have this shape."""
    per_word = 32 // quantization.format.bits
    if quantization.layout == "awq":
        return shape[1] * per_word, shape[0]
    if quantization.layout in ("gptq", "gptq_v2"):
        return shape[1], shape[0] * per_word
    return shape[0], shape[1] * (per_word if quantization.layout == "pack-quantized" else 1)


def _parts(quantization: QuantizationConfig, rows: int, columns: int) -> dict[str, _Part]:
    per_word, groups = 32 // quantization.format.bits, quantization.format.num_groups(columns)
    words, floats = ("I32",), tuple(DTYPES_BY_CODE)
    if quantization.layout in ("gptq", "gptq_v2", "awq"):
        values = (columns, rows // per_word) if quantization.layout == "awq" else (columns // per_word, rows)
        parts = {
            "qweight": _Part(words, values),
            "qzeros": _Part(words, (groups, -(-rows // per_word))),
            "scales": _Part(floats, (groups, rows)),
        }
        return parts if quantization.layout == "awq" else parts | {"g_idx": _Part(words, (columns,), is_optional=True)}
    is_packed = quantization.layout == "pack-quantized"
    parts = {"weight_scale": _Part(floats, (rows, groups))}
    if is_packed:
        parts["weight_packed"] = _Part(words, (rows, columns // per_word))
        parts["weight_shape"] = _Part(("I64", "I32"), (2,), is_optional=True)
    else:
        parts["weight"] = _Part(("I8",), (rows, columns))
    if quantization.format.has_mins:
        zeros = _Part(words, (-(-rows // per_word), groups)) if is_packed else _Part(("I8",), (rows, groups))
        parts["weight_zero_point"] = zeros
    return parts | {"weight_g_idx": _Part(words, (columns,), is_optional=True)}


def _check(files: Mapping[str, SafetensorsFile], name: str, wanted: _Part, values: str) -> None:
    if name not in files:
        raise ConfigError(
            f"{files[values].path}: tensor {name} is missing in the checkpoint, which holds {values}", param="model"
        )
    entry = files[name].entries[name]
    if entry.dtype not in wanted.dtypes or entry.shape != wanted.shape:
        raise ConfigError(
            f"{files[name].path}: tensor {name} is {entry.dtype} {list(entry.shape)}; beside {values} and by "
            f"quantization_config it must be {' or '.join(wanted.dtypes)} {list(wanted.shape)}",
            param="model",
        )


def _check_group_index(files: Mapping[str, SafetensorsFile], packed: PackedWeight) -> None:
    """Refuse columns that were quantised in another order than they lie in (desc_act, actorder)."""
    size = packed.quantization.format.group_size or packed.columns
    for part in GROUP_INDICES:
        if (name := packed.parts.get(part)) is None:
            continue
        in_order = array.array("i", [column // size for column in range(packed.columns)]).tobytes()
        if bytes(files[name].data(name)) != in_order:
            raise UnsupportedModelError(
                f"{files[name].path}: tensor {name} puts columns into groups out of order (desc_act or actorder); "
                f"supported: groups of {size} adjacent columns",
                param="desc_act",
            )
