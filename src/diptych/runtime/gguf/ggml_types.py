"""The types of tensors in GGUF files: one table for their numbers, their names, the sizes of their blocks, and the
formats that hold their values.

A type packs ``values`` neighbouring values of a row into ``num_bytes`` bytes. Types that cannot be read have an entry,
too, so that they can be refused by name. gguf_decoding.py says how the bytes are packed.
"""

from dataclasses import dataclass

from diptych.runtime.weights.weight_format import WeightFormat


@dataclass(frozen=True, slots=True)
class GgmlType:
    """values: in one block. num_bytes: of one block; None: cannot be read. format: of a type of whole numbers."""

    name: str
    values: int = 1
    num_bytes: int | None = None
    format: WeightFormat | None = None


_BITS_8, _BITS_8_MINS = WeightFormat(8, 32), WeightFormat(8, 32, has_mins=True)
_BITS_4, _BITS_4_MINS = WeightFormat(4, 32), WeightFormat(4, 32, has_mins=True)

GGML_TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18, _BITS_4),
    3: GgmlType("Q4_1", 32, 20, _BITS_4_MINS),
    6: GgmlType("Q5_0", 32, 22, _BITS_8),
    7: GgmlType("Q5_1", 32, 24, _BITS_8_MINS),
    8: GgmlType("Q8_0", 32, 34, _BITS_8),
    9: GgmlType("Q8_1"),
    10: GgmlType("Q2_K", 256, 84, _BITS_8),
    11: GgmlType("Q3_K", 256, 110, _BITS_8),
    12: GgmlType("Q4_K", 256, 144, _BITS_4_MINS),
    13: GgmlType("Q5_K", 256, 176, _BITS_8_MINS),
    14: GgmlType("Q6_K", 256, 210, _BITS_8),
    15: GgmlType("Q8_K"),
    16: GgmlType("IQ2_XXS"),
    17: GgmlType("IQ2_XS"),
    18: GgmlType("IQ3_XXS"),
    19: GgmlType("IQ1_S"),
    20: GgmlType("IQ4_NL", 32, 18, _BITS_8),
    21: GgmlType("IQ3_S"),
    22: GgmlType("IQ2_S"),
    23: GgmlType("IQ4_XS", 256, 136, _BITS_8),
    24: GgmlType("I8"),
    25: GgmlType("I16"),
    26: GgmlType("I32"),
    27: GgmlType("I64"),
    28: GgmlType("F64"),
    29: GgmlType("IQ1_M"),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0"),
    35: GgmlType("TQ2_0"),
    39: GgmlType("MXFP4", 32, 17, _BITS_8),
    40: GgmlType("NVFP4"),
    41: GgmlType("Q1_0"),
}
READABLE = tuple(kind.name for kind in GGML_TYPES.values() if kind.num_bytes is not None)
