"""The dtypes of weights and caches: their names, their codes in safetensors headers, and their sizes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DTypeInfo:
    """name: in config.json and in torch. code: in the header of a safetensors file. itemsize: bytes of one value."""

    name: str
    code: str
    itemsize: int


_TABLE = (DTypeInfo("bfloat16", "BF16", 2), DTypeInfo("float32", "F32", 4), DTypeInfo("float16", "F16", 2))
DTYPES = {dtype.name: dtype for dtype in _TABLE}
DTYPES_BY_CODE = {dtype.code: dtype for dtype in _TABLE}
_INTEGERS = (
    DTypeInfo("int8", "I8", 1),
    DTypeInfo("uint8", "U8", 1),
    DTypeInfo("int32", "I32", 4),
    DTypeInfo("int64", "I64", 8),
)
FP8, E8M0 = "F8_E4M3", "F8_E8M0"
_OF_FP8 = (DTypeInfo("float8_e4m3fn", FP8, 1), DTypeInfo("uint8", E8M0, 1))  # E8M0: read as its exponents
# Those of parts of quantised weights, too.
STORED_DTYPES_BY_CODE = DTYPES_BY_CODE | {dtype.code: dtype for dtype in (*_INTEGERS, *_OF_FP8)}
COMPUTE_DTYPES = ("bfloat16", "float32")  # weights in float16 are converted when they are loaded
INT8, SCALE_BYTES = "int8", 4  # of a KV cache in whole numbers: values of 8 bits, and a scale for each token of a head
KV_DTYPES = (*COMPUTE_DTYPES, INT8)


def kv_row_bytes(head_dim: int, dtype: str) -> int:
    """Bytes of K or V of one token in one head. dtype: one of KV_DTYPES."""
    return head_dim + SCALE_BYTES if dtype == INT8 else head_dim * DTYPES[dtype].itemsize
