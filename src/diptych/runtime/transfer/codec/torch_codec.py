"""Tiles of KV to wire bytes and back in plain torch: what kv_codec.py does without kernels, on any device.

The same bytes as kernels/codec.cpp writes, bit for bit, and the reference that it is tested against. Knows rows of
tokens, [num_tokens, num_kv_heads, head_dim]; never blocks or layouts. The format is described in kv_codec.py.
"""

import torch
import torch.nn.functional as F

from diptych.runtime.transfer.codec.wire_format import TILE_TOKENS, V_GROUP, WireEncoding

SMALLEST_SCALE_BITS = 0x00800000  # 2^-126: its inverse is finite, and products with it are never subnormal
NAN_BITS = 0x7FC00000
INFINITY_BITS = 0x7F800000


def encode_rows(rows: torch.Tensor, is_k: bool, encoding: WireEncoding) -> torch.Tensor:
    """[num_tokens, num_kv_heads, head_dim] of bf16 or fp32 to uint8 [num_tiles, num_kv_heads, tile bytes]."""
    tiles = F.pad(rows.float(), (0, 0, 0, 0, 0, -len(rows) % TILE_TOKENS))
    tiles = torch.unflatten(tiles, 0, (-1, TILE_TOKENS)).transpose(1, 2)  # [num_tiles, num_kv_heads, 16, head_dim]
    if encoding is WireEncoding.FP32:
        return _to_wire_order(tiles, is_k, 1).contiguous().view(torch.uint8)
    if encoding is WireEncoding.BF16:
        return _to_wire_order(_round_to_bf16(tiles), is_k, 2).contiguous().view(torch.uint8)
    scale, maxima = _scales(tiles, is_k, encoding.top)
    codes = (tiles * _spread(1.0 / scale, is_k, tiles.shape[3])).round()
    is_broken = maxima >= INFINITY_BITS
    codes = codes.masked_fill(_spread(is_broken, is_k, tiles.shape[3]), 0.0).to(torch.int8)
    scale_bits = scale.view(torch.int32).masked_fill(is_broken, NAN_BITS) >> 16
    if not is_k:
        scale_bits = torch.unflatten(scale_bits, 2, (-1, 2)).transpose(3, 4).flatten(2)
    codes = _to_wire_order(codes, is_k, 2)
    if encoding is WireEncoding.INT4:
        pairs = torch.unflatten(codes, 2, (-1, 2))
        codes = (pairs[..., 0] & 15) | (pairs[..., 1] << 4)
    return torch.cat((scale_bits.to(torch.int16).contiguous().view(torch.uint8), codes.view(torch.uint8)), dim=2)


def decode_rows(
    wire: torch.Tensor, num_tokens: int, head_dim: int, is_k: bool, encoding: WireEncoding, dtype: torch.dtype
) -> torch.Tensor:
    """The inverse of encode_rows: uint8 [num_tiles, num_kv_heads, tile bytes] to [num_tokens, num_kv_heads, head_dim]
    of ``dtype`` (bf16 or fp32; FP32 only to fp32)."""
    if encoding is WireEncoding.FP32:
        tiles = _from_wire_order(wire.contiguous().view(torch.float32), head_dim, is_k, 1)
    elif encoding is WireEncoding.BF16:
        tiles = _from_wire_order(wire.contiguous().view(torch.bfloat16), head_dim, is_k, 2).to(dtype)
    else:
        num_scales = head_dim if is_k else TILE_TOKENS * -(-head_dim // V_GROUP)
        scale_bits = wire[..., : 2 * num_scales].contiguous().view(torch.int16).int() << 16
        if not is_k:
            scale_bits = torch.unflatten(scale_bits, 2, (TILE_TOKENS // 2, -1, 2)).transpose(3, 4).flatten(2, 3)
        codes = wire[..., 2 * num_scales :].contiguous().view(torch.int8)
        if encoding is WireEncoding.INT4:
            codes = torch.stack(((codes << 4) >> 4, codes >> 4), dim=-1).flatten(2)
        tiles = _from_wire_order(codes, head_dim, is_k, 2).float()
        tiles = tiles * _spread(scale_bits.view(torch.float32), is_k, head_dim)
        if dtype == torch.bfloat16:
            tiles = _round_to_bf16(tiles).view(torch.bfloat16)
    return tiles.transpose(1, 2).flatten(0, 1)[:num_tokens]


def _scales(tiles: torch.Tensor, is_k: bool, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and bits of the largest magnitude of each group: K [.., head_dim], V [.., 16, groups]."""
    magnitudes = tiles.contiguous().view(torch.int32) & 0x7FFFFFFF
    if is_k:
        maxima = magnitudes.amax(2)
    else:
        padded = F.pad(magnitudes, (0, -magnitudes.shape[3] % V_GROUP))
        maxima = torch.unflatten(padded, 3, (-1, V_GROUP)).amax(4)
    one_over_top = torch.ones((), device=tiles.device) / top
    bits = ((maxima.view(torch.float32) * one_over_top).view(torch.int32) + 0xFFFF) & -0x10000
    finite = maxima < INFINITY_BITS
    bits = torch.where(finite, bits.clamp_min(SMALLEST_SCALE_BITS), SMALLEST_SCALE_BITS)
    return bits.view(torch.float32), maxima


def _spread(per_group: torch.Tensor, is_k: bool, head_dim: int) -> torch.Tensor:
    """Values of groups as something that broadcasts against [num_tiles, num_kv_heads, 16, head_dim]."""
    return per_group[:, :, None] if is_k else per_group.repeat_interleave(V_GROUP, dim=3)[..., :head_dim]


def _round_to_bf16(values: torch.Tensor) -> torch.Tensor:
    """Bits of bf16 as int16: to nearest even, every NaN the same one on every device."""
    bits = values.contiguous().view(torch.int32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded.masked_fill(values.isnan(), NAN_BITS) >> 16).to(torch.int16)


def _to_wire_order(tiles: torch.Tensor, is_k: bool, lanes: int) -> torch.Tensor:
    """[num_tiles, num_kv_heads, 16, head_dim] to the CPU layout with this many lanes, flat per tile and head."""
    if is_k:
        return torch.unflatten(tiles, 3, (-1, lanes)).transpose(2, 3).flatten(2)
    return torch.unflatten(tiles, 2, (-1, lanes)).transpose(3, 4).flatten(2)


def _from_wire_order(flat: torch.Tensor, head_dim: int, is_k: bool, lanes: int) -> torch.Tensor:
    """The inverse of _to_wire_order."""
    if is_k:
        return torch.unflatten(flat, 2, (head_dim // lanes, TILE_TOKENS, lanes)).transpose(2, 3).flatten(3)
    return torch.unflatten(flat, 2, (TILE_TOKENS // lanes, head_dim, lanes)).transpose(3, 4).flatten(2, 3)
