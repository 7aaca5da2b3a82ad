"""The values of GGUF tensors: blocks of packed bytes to whole numbers with scales (QuantizedWeight), or to fp32.

A block of 32 values is one group of a WeightFormat, and a block of 256 values is eight. Its ``GgmlType.format`` holds
every type exactly, but for those of FINE: their scales are for 16 values, so as a QuantizedWeight they are quantised
again, to 8 bits in groups of 32. As fp32 they are exact, too.

The 4 bits of IQ4_NL, IQ4_XS and MXFP4 are places in a table of whole numbers of 8 bits.

Decoding works on some rows at a time, so that its temporary memory is bounded.
"""

from collections.abc import Callable

import torch

from diptych.runtime.gguf.ggml_types import GgmlType
from diptych.runtime.weights.quantized_weight import E2M1_VALUES, QuantizedWeight, quantize, stack

VALUES_AT_ONCE = 1 << 18  # decoded together: their temporary fp32, 1 MiB, stays in the processor's cache
GROUP = 32

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What the 16 values of IQ4 stand for, counted from -128: the nearest to normally distributed weights.
IQ4_VALUES = torch.tensor([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], dtype=torch.uint8)
_SHIFTS = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)  # of the values of 2 bits in a byte
Groups = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # values, scales and mins of blocks: see _GROUPS


def read_float(kind: GgmlType, data: memoryview, columns: int) -> torch.Tensor:
    """The rows of a tensor: a view of ``data`` where it is floating point, else fp32."""
    if kind.name in FLOATS:
        return torch.frombuffer(data, dtype=FLOATS[kind.name]).view(-1, columns)
    blocks = _blocks(kind, data)
    target = torch.empty(len(blocks), kind.values)
    step = VALUES_AT_ONCE // kind.values
    for part, some in zip(torch.split(target, step), torch.split(blocks, step), strict=True):
        part.copy_(FINE[kind.name](some) if kind.name in FINE else _weight(kind, some, kind.values).dequantize())
    return target.view(-1, columns)


def read_quantized(kind: GgmlType, data: memoryview, columns: int) -> QuantizedWeight:
    """The rows of a tensor of whole numbers."""
    blocks_of_row = columns // kind.values
    step = max(1, VALUES_AT_ONCE // columns) * blocks_of_row
    return stack([_weight(kind, some, columns) for some in torch.split(_blocks(kind, data), step)])


def _blocks(kind: GgmlType, data: memoryview) -> torch.Tensor:
    """[num_blocks, num_bytes of a block] uint8."""
    assert kind.num_bytes is not None
    return torch.frombuffer(data, dtype=torch.uint8).view(-1, kind.num_bytes)


def _weight(kind: GgmlType, blocks: torch.Tensor, columns: int) -> QuantizedWeight:
    """Blocks of whole rows."""
    assert kind.format is not None
    if kind.name in FINE:
        return quantize(FINE[kind.name](blocks).view(-1, columns), kind.format)
    values, scales, mins = _GROUPS[kind.name](blocks)
    groups = columns // GROUP
    mins = None if mins is None else mins.reshape(-1, groups)
    return QuantizedWeight(kind.format, values.reshape(-1, columns), scales.reshape(-1, groups), mins)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The fp16 at byte ``at`` of each block, [num_blocks, 1] fp32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., n] bytes -> [..., 2n]: all low halves, then all high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """[..., n] bytes -> [..., n, 8]: the bits of each, lowest first."""
    return packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1


def _q8_0(blocks: torch.Tensor) -> Groups:
    return blocks[:, 2:] ^ 128, _half(blocks, 0), None  # signed bytes, counted from -128


def _q4_0(blocks: torch.Tensor) -> Groups:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> Groups:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), -_half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> Groups:
    values = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]).flatten(1) << 4
    return values + (128 - 16), _half(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> Groups:
    values = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]).flatten(1) << 4
    return values, _half(blocks, 0), -_half(blocks, 2)


def _q4_k(blocks: torch.Tensor) -> Groups:
    return _nibbles(blocks[:, 16:].view(-1, 4, GROUP)), *_k_scales(blocks)


def _q5_k(blocks: torch.Tensor) -> Groups:
    low = _nibbles(blocks[:, 48:].view(-1, 4, GROUP)).view(-1, 8, GROUP)
    high = _bits(blocks[:, 16:48]).transpose(1, 2)  # bit g of byte i: of value i in group g
    return low | high << 4, *_k_scales(blocks)


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and mins of the eight groups of Q4_K and Q5_K, [num_blocks, 8] fp32: two fp16 times whole numbers of 6
    bits. Of those numbers, 4 + 4 lie in the low bits of eight bytes; of the other 4 + 4, the upper two bits in the high
    bits of these bytes and the lower four in the halves of four more."""
    first, last = blocks[:, 4:12].view(-1, 2, 4), blocks[:, 12:16].unsqueeze(1)
    rest = torch.cat((last & 15, last >> 4), dim=1) | (first >> 6) << 4
    scales, mins = torch.cat((first & 63, rest), dim=2).float().unbind(1)
    return _half(blocks, 0) * scales, _half(blocks, 2) * mins


def _iq4_nl(blocks: torch.Tensor) -> Groups:
    return _looked_up(IQ4_VALUES, _nibbles(blocks[:, 2:])), _half(blocks, 0), None


def _iq4_xs(blocks: torch.Tensor) -> Groups:
    """The scale of each group is an fp16 times a whole number from -32 to 31: its upper two bits lie in bytes 2 and 3,
    those of the first group lowest, its lower four in the halves of bytes 4 to 7."""
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).flatten(1)
    high = (blocks[:, 2:4].unsqueeze(-1) >> _SHIFTS & 3).flatten(1)
    scales = _half(blocks, 0) * ((low | high << 4).float() - 32)
    return _looked_up(IQ4_VALUES, _nibbles(blocks[:, 8:].view(-1, 8, GROUP // 2))), scales, None


def _mxfp4(blocks: torch.Tensor) -> Groups:
    """The first byte is the exponent of the scale, 2 ** (byte - 128): the table has the values of E2M1 doubled."""
    exponents = blocks[:, :1].int()
    bits = torch.where(exponents < 2, (exponents + 1) << 21, (exponents - 1) << 23)  # below 2: subnormal
    return _looked_up(E2M1_VALUES, _nibbles(blocks[:, 1:])), bits.view(torch.float32), None


def _looked_up(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The whole numbers at these places of a table, counted from -128."""
    return table[places.int()]


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    """[num_blocks, 256] fp32. Each 16 values have a scale in the lower half of a byte and a minimum in the upper."""
    values = (blocks[:, 16:80].view(-1, 2, 1, GROUP) >> _SHIFTS.view(4, 1) & 3).reshape(-1, 16, 16).float()
    scales = _half(blocks, 80) * (blocks[:, :16] & 15).float()
    mins = _half(blocks, 82) * (blocks[:, :16] >> 4).float()
    return (values * scales.unsqueeze(-1) - mins.unsqueeze(-1)).flatten(1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """[num_blocks, 256] fp32. Two bits of each value lie together; the third one says that 4 is not to be subtracted.
    Of the sixteen scales from -32 to 31, the lower four bits lie in the halves of eight bytes, first the lower halves,
    and the upper two in four more bytes."""
    low = blocks[:, 32:96].view(-1, 2, 1, GROUP) >> _SHIFTS.view(4, 1) & 3
    high = _bits(blocks[:, :32]).transpose(1, 2).reshape(-1, 2, 4, GROUP)  # bit g of byte i: of value i in group g
    values = (low | high << 2).view(-1, 16, 16).float() - 4
    last = (blocks[:, 104:108].unsqueeze(1) >> _SHIFTS.view(4, 1) & 3).flatten(1)
    scales = _half(blocks, 108) * ((_nibbles(blocks[:, 96:104]) | last << 4).float() - 32)
    return (values * scales.unsqueeze(-1)).flatten(1)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """[num_blocks, 256] fp32."""
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, GROUP)
    high = blocks[:, 128:192].view(-1, 2, 1, GROUP) >> _SHIFTS.view(4, 1) & 3
    values = (low | high << 4).view(-1, 16, 16).float() - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (values * scales.unsqueeze(-1)).flatten(1)


# Blocks [num_blocks, num_bytes] to values [num_blocks, values] uint8, and scales and mins [num_blocks, groups] fp32.
_GROUPS: dict[str, Callable[[torch.Tensor], Groups]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
# Types with a scale for each 16 values: blocks [num_blocks, num_bytes] to [num_blocks, values] fp32.
FINE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q6_K": _q6_k}
