"""What KV looks like on a wire: encodings, their sizes, and which one two sides should use.

Knows no tensors (and no torch): kv_codec.py does the work, and describes the layout of the bytes.
"""

import enum
import math
from collections.abc import Collection, Sequence

from diptych.control.errors import ConfigError
from diptych.runtime.dtypes import INT8, kv_row_bytes
from diptych.runtime.transfer.kv_format import KVFormat

TILE_TOKENS = 16
V_GROUP = 32  # channels of V that share a scale
CODECS = ("none", "int8", "int4")  # from exact to coarse
PIECE_BYTES = 1 << 20  # of KV that the stages of a pipeline hand on at once
MIN_SAVING = 0.1  # of the time, for which accuracy may be given up


class WireEncoding(enum.Enum):
    """RAW: whole blocks as they lie in memory. The others: tiles, the same for every block size, dtype and layout."""

    BF16 = 0  # the numbers are those of kernels/codec.cpp
    FP32 = 1
    INT8 = 2
    INT4 = 3
    RAW = 4

    @property
    def top(self) -> int:
        """The largest code of the integer encodings."""
        return {WireEncoding.INT8: 127, WireEncoding.INT4: 7}[self]


def wire_encoding(codec: str, sender: KVFormat, receiver: KVFormat) -> WireEncoding:
    """How ``codec`` ("none", "int8", "int4") puts this sender's KV on the wire for this receiver.

    "none" never loses what the receiver could hold: whole blocks where both formats are the same, else tiles of the
    narrower dtype. Raises ConfigError for another codec, where the two hold different models, and where tiles are
    needed and cannot be made (block sizes that 16 does not divide, odd head_dims).
    """
    if codec not in CODECS:
        raise ConfigError(f"codec is {codec!r}; one of {', '.join(CODECS)}", param="codec")
    sender.check_compatible(receiver)
    if codec == "none" and sender == receiver and sender.layout == "cpu":
        return WireEncoding.RAW
    check_tiles(sender)
    check_tiles(receiver)
    if codec != "none":
        return WireEncoding[codec.upper()]
    exact = ("float32", INT8)  # whole numbers times a scale of fp32
    return WireEncoding.FP32 if sender.dtype in exact and receiver.dtype in exact else WireEncoding.BF16


def check_tiles(kv_format: KVFormat) -> None:
    """Raises ConfigError when blocks of this format cannot be made of tiles."""
    if kv_format.block_size % TILE_TOKENS:
        raise ConfigError(
            f"block_size is {kv_format.block_size}; the codec takes multiples of {TILE_TOKENS}", param="block_size"
        )
    if kv_format.head_dim % 2:
        raise ConfigError(f"head_dim is {kv_format.head_dim}; the codec takes even ones", param="head_dim")


def tile_bytes(head_dim: int, is_k: bool, encoding: WireEncoding) -> int:
    """Bytes of one tile (16 tokens of one head) of K or of V; not for RAW."""
    values = TILE_TOKENS * head_dim
    if encoding in (WireEncoding.FP32, WireEncoding.BF16):
        return values * (4 if encoding is WireEncoding.FP32 else 2)
    scales = head_dim if is_k else TILE_TOKENS * -(-head_dim // V_GROUP)
    return 2 * scales + (values if encoding is WireEncoding.INT8 else values // 2)


def wire_bytes(kv_format: KVFormat, encoding: WireEncoding, num_tokens: int, num_layers: int | None = None) -> int:
    """Bytes on the wire of ``num_tokens`` tokens in ``num_layers`` layers (None: all). Whole tiles or, RAW, blocks."""
    layers = kv_format.num_layers if num_layers is None else num_layers
    if encoding is WireEncoding.RAW:
        return 2 * layers * -(-num_tokens // kv_format.block_size) * kv_format.bytes_per_layer_block
    per_tile = sum(tile_bytes(kv_format.head_dim, is_k, encoding) for is_k in (True, False))
    return layers * -(-num_tokens // TILE_TOKENS) * kv_format.num_kv_heads * per_tile


def wire_share(codec: str, dtype: str = "bfloat16", head_dim: int = 64) -> float:
    """Bytes on the wire per byte of KV in a cache of ``dtype`` (scales included)."""
    if codec == "none":
        return 1.0
    encoding = WireEncoding[codec.upper()]
    per_pair = sum(tile_bytes(head_dim, is_k, encoding) for is_k in (True, False))
    return per_pair / (2 * TILE_TOKENS * kv_row_bytes(head_dim, dtype))


def transfer_seconds(
    link_bytes_per_s: float, kv_bytes: int, share: float, coding_bytes_per_s: Sequence[float] = ()
) -> float:
    """Seconds until the last of ``kv_bytes`` has passed the link and the coding stages, which work at the same time.

    share: bytes on the wire per byte of KV. Each stage takes t_i = bytes / rate (coding rates are in bytes of KV, the
    link's in bytes on the wire). The slowest is busy all the time; the others add what the first piece and the last
    take in them: max(t) + (sum(t) - max(t)) * min(1, PIECE_BYTES / kv_bytes). What fits in one piece takes the sum.
    """
    times = [kv_bytes * share / link_bytes_per_s, *(kv_bytes / rate for rate in coding_bytes_per_s)]
    slowest = max(times)
    return slowest + (math.fsum(times) - slowest) * min(1.0, PIECE_BYTES / max(1, kv_bytes))


def choose_codec(
    link_bytes_per_s: float,
    kv_bytes: int,
    encode_bytes_per_s: float,
    decode_bytes_per_s: float,
    allowed: Collection[str] = CODECS,
    *,
    dtype: str = "bfloat16",
    head_dim: int = 64,
) -> str:
    """The codec for ``kv_bytes`` of KV: the most exact one of ``allowed``, unless a coarser one saves time.

    Compared are transfer_seconds: "none" is the link alone; the others pass encoder, link and decoder (rates in bytes
    of KV, as measure_rates gives them). A coarser codec must take at least MIN_SAVING less time than the one before
    it. dtype and head_dim: of the sender's cache. Raises ConfigError for unknown names, and when nothing is allowed.
    """
    if not allowed or not set(allowed) <= set(CODECS):
        raise ConfigError(f"codecs allowed are {sorted(allowed)}; some of {', '.join(CODECS)}", param="codec")
    if min(link_bytes_per_s, encode_bytes_per_s, decode_bytes_per_s) <= 0:
        raise ConfigError("rates of link, encoder and decoder must be above 0", param="link_bytes_per_s")
    chosen, best = "", math.inf
    for codec in CODECS:
        if codec not in allowed:
            continue
        coding = () if codec == "none" else (encode_bytes_per_s, decode_bytes_per_s)
        seconds = transfer_seconds(link_bytes_per_s, kv_bytes, wire_share(codec, dtype, head_dim), coding)
        if not chosen or seconds < (1 - MIN_SAVING) * best:
            chosen, best = codec, seconds
    return chosen
