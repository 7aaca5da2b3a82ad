"""The INT8 codec of KV on a GPU: all layers in one launch, a program for each tile of 16 tokens of one head.

The bytes are those of torch_codec.py, which has the rules, bit for bit. Caches are read and written as the bits of
their numbers, so that the interpreter, which knows no bfloat16, runs the very same code.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from diptych.runtime.transfer.codec.torch_codec import INFINITY_BITS, NAN_BITS, SMALLEST_SCALE_BITS
from diptych.runtime.transfer.codec.wire_format import TILE_TOKENS, V_GROUP, WireEncoding

TOKENS = tl.constexpr(TILE_TOKENS)
GROUP = tl.constexpr(V_GROUP)
INFINITY = tl.constexpr(INFINITY_BITS)
NAN = tl.constexpr(NAN_BITS)
SMALLEST = tl.constexpr(SMALLEST_SCALE_BITS)
TOP = tl.constexpr(float(WireEncoding.INT8.top))
ROUNDER = tl.constexpr(1.5 * 2.0**23)  # added to a small number and taken away again, it rounds to even

Cache = tuple[torch.Tensor, torch.Tensor]


def encode(caches: Sequence[Cache], slots: torch.Tensor, wire: torch.Tensor) -> None:
    """K and V of some layers, [num_blocks, block_size, num_kv_heads, head_dim] each, at ``slots`` [num_tokens], to
    ``wire``: uint8 on the same device, laid out as kv_codec.py says."""
    _launch(_encode, caches, slots, wire)


def decode(caches: Sequence[Cache], slots: torch.Tensor, wire: torch.Tensor) -> None:
    """The inverse."""
    _launch(_decode, caches, slots, wire)


def _launch(kernel: "triton.JITFunction", caches: Sequence[Cache], slots: torch.Tensor, wire: torch.Tensor) -> None:
    first = caches[0][0]
    heads, dim = first.shape[2:]
    num_tokens, tiles = len(slots), triton.cdiv(len(slots), TILE_TOKENS)
    if not num_tokens:
        return
    addresses = torch.tensor([cache.data_ptr() for pair in caches for cache in pair], dtype=torch.int64)
    kernel[(tiles, heads, 2 * len(caches))](
        addresses.to(first.device), slots, wire, wire.view(torch.int16), num_tokens, tiles, heads, DIM=dim,
        WIDTH=max(V_GROUP, triton.next_power_of_2(dim)), GROUPS=triton.cdiv(dim, V_GROUP),
        IS_BF16=first.dtype == torch.bfloat16, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _place(tiles, heads, DIM: tl.constexpr, GROUPS: tl.constexpr):
    """Place of the program's tile: its first byte on the wire, and how many bytes its scales take."""
    tile, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    k_scales: tl.constexpr = 2 * DIM
    v_scales: tl.constexpr = 2 * TOKENS * GROUPS
    codes: tl.constexpr = TOKENS * DIM
    pair = (k_scales + v_scales + 2 * codes) * tiles * heads
    begin = (part // 2) * pair
    scales = k_scales
    if part % 2:
        begin += (k_scales + codes) * tiles * heads
        scales = v_scales
    return begin + (tile * heads + head) * (scales + codes), scales


@triton.jit
def _elements(slots, num_tokens, heads, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Where the values of the tile lie in the cache, [16, WIDTH], and which of them there are."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.arange(0, WIDTH)
    slot = tl.load(slots + token, mask=token < num_tokens, other=0)
    at = (slot[:, None] * heads + tl.program_id(1)) * DIM + channel[None, :]
    return at, (token < num_tokens)[:, None] & (channel < DIM)[None, :]


@triton.jit
def _codes_at(IS_K: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """The place of each code behind the scales, [16, WIDTH]."""
    token, channel = tl.arange(0, TOKENS)[:, None], tl.arange(0, WIDTH)[None, :]
    if IS_K:
        at = (channel // 2) * (2 * TOKENS) + token * 2 + channel % 2
    else:
        at = (token // 2) * (2 * DIM) + channel * 2 + token % 2
    return at


@triton.jit
def _scale_bits(maxima):
    """Bits for groups with these largest magnitudes: those of their scales, and whether they hold no number."""
    bits = (maxima.to(tl.float32, bitcast=True) * (1.0 / TOP)).to(tl.int32, bitcast=True)
    bits = (bits + 0xFFFF) & -0x10000
    is_broken = maxima >= INFINITY
    return tl.where(is_broken, SMALLEST, tl.maximum(bits, SMALLEST)), is_broken


@triton.jit
def _encode_tile(
    bits, wire, scales_out, begin, num_scales_bytes, IS_K: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    magnitudes = bits & 0x7FFFFFFF
    token, channel = tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    if IS_K:
        scale, is_broken = _scale_bits(tl.max(magnitudes, 0))
        out = tl.where(is_broken, NAN, scale) >> 16
        tl.store(scales_out + begin // 2 + channel, out.to(tl.int16), mask=channel < DIM)
        spread = tl.broadcast_to(scale[None, :], (TOKENS, WIDTH))
        broken = tl.broadcast_to(is_broken.to(tl.int32)[None, :], (TOKENS, WIDTH))
    else:
        grouped = tl.reshape(magnitudes, (TOKENS, WIDTH // GROUP, GROUP))
        scale, is_broken = _scale_bits(tl.max(grouped, 2))
        out = tl.where(is_broken, NAN, scale) >> 16
        group = tl.arange(0, WIDTH // GROUP)
        at = (token // 2)[:, None] * (2 * GROUPS) + group[None, :] * 2 + (token % 2)[:, None]
        is_group = tl.broadcast_to((group < GROUPS)[None, :], (TOKENS, WIDTH // GROUP))
        tl.store(scales_out + begin // 2 + at, out.to(tl.int16), mask=is_group)
        spread = tl.reshape(tl.broadcast_to(scale[:, :, None], (TOKENS, WIDTH // GROUP, GROUP)), (TOKENS, WIDTH))
        broken = tl.reshape(
            tl.broadcast_to(is_broken.to(tl.int32)[:, :, None], (TOKENS, WIDTH // GROUP, GROUP)), (TOKENS, WIDTH)
        )
    inverse = tl.div_rn(1.0, spread.to(tl.float32, bitcast=True))
    values = tl.where(broken != 0, 0, bits).to(tl.float32, bitcast=True)
    codes = ((values * inverse + ROUNDER) - ROUNDER).to(tl.int8)
    is_channel = tl.broadcast_to((channel < DIM)[None, :], (TOKENS, WIDTH))
    tl.store(
        wire + begin + num_scales_bytes + _codes_at(IS_K, DIM, WIDTH), codes.to(tl.uint8, bitcast=True), mask=is_channel
    )


@triton.jit
def _encode(
    caches, slots, wire, wire_scales, num_tokens, tiles, heads, DIM: tl.constexpr, WIDTH: tl.constexpr,
    GROUPS: tl.constexpr, IS_BF16: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(2)
    begin, scales = _place(tiles, heads, DIM, GROUPS)
    at, is_value = _elements(slots, num_tokens, heads, DIM, WIDTH)
    address = tl.load(caches + part)
    if IS_BF16:
        bits = tl.load(address.to(tl.pointer_type(tl.int16)) + at, mask=is_value, other=0).to(tl.int32) << 16
    else:
        bits = tl.load(address.to(tl.pointer_type(tl.int32)) + at, mask=is_value, other=0)
    if part % 2 == 0:
        _encode_tile(bits, wire, wire_scales, begin, scales, True, DIM, WIDTH, GROUPS)
    else:
        _encode_tile(bits, wire, wire_scales, begin, scales, False, DIM, WIDTH, GROUPS)


@triton.jit
def _decoded(
    wire, scales_in, begin, num_scales_bytes, is_value, IS_K: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    token, channel = tl.arange(0, TOKENS)[:, None], tl.arange(0, WIDTH)[None, :]
    if IS_K:
        scale_at = tl.broadcast_to(channel, (TOKENS, WIDTH))
    else:
        scale_at = (token // 2) * (2 * GROUPS) + (channel // GROUP) * 2 + token % 2
    scale = tl.load(scales_in + begin // 2 + scale_at, mask=is_value, other=0).to(tl.int32) << 16
    code_at = begin + num_scales_bytes + _codes_at(IS_K, DIM, WIDTH)
    codes = tl.load(wire + code_at, mask=is_value, other=0).to(tl.int8, bitcast=True)
    return codes.to(tl.float32) * scale.to(tl.float32, bitcast=True)


@triton.jit
def _decode(
    caches, slots, wire, wire_scales, num_tokens, tiles, heads, DIM: tl.constexpr, WIDTH: tl.constexpr,
    GROUPS: tl.constexpr, IS_BF16: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(2)
    begin, scales = _place(tiles, heads, DIM, GROUPS)
    at, is_value = _elements(slots, num_tokens, heads, DIM, WIDTH)
    address = tl.load(caches + part)
    if part % 2 == 0:
        values = _decoded(wire, wire_scales, begin, scales, is_value, True, DIM, WIDTH, GROUPS)
    else:
        values = _decoded(wire, wire_scales, begin, scales, is_value, False, DIM, WIDTH, GROUPS)
    bits = values.to(tl.int32, bitcast=True)
    if IS_BF16:
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        rounded = tl.where(values != values, NAN, rounded) >> 16
        tl.store(address.to(tl.pointer_type(tl.int16)) + at, rounded.to(tl.int16), mask=is_value)
    else:
        tl.store(address.to(tl.pointer_type(tl.int32)) + at, bits, mask=is_value)
