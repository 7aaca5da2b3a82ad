"""Makes a QuantizedWeight of the tensors that packed_weight.py found.

With whole numbers v and z of n bits, weight = scale * (v - z) in every layout. Symmetric weights have z = 2 ** (n - 1)
throughout, which is WeightFormat.offset; else mins = scale * z.
"""

from collections.abc import Mapping

import torch

from diptych.control.errors import ConfigError, UnsupportedModelError
from diptych.runtime.quantization.packed_weight import BLOCKS, SCALES, PackedWeight
from diptych.runtime.weights.quantized_weight import E2M1_VALUES, QuantizedWeight

LARGEST_FP16_EXPONENT = 15
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word of AWQ the values of eight adjacent rows lie


def unpack_weight(packed: PackedWeight, parts: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    """parts: the tensors by their suffixes, as they are stored. Raises ConfigError for zero points that contradict
    the config."""
    if packed.quantization.layout == "mxfp4":
        return _mxfp4(packed, parts)
    if packed.quantization.layout == "int-quantized":
        return _int_quantized(packed, parts)
    if packed.quantization.layout == "pack-quantized":
        return _pack_quantized(packed, parts)
    return _gptq_or_awq(packed, parts)


def _mxfp4(packed: PackedWeight, parts: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    """Twice the values of E2M1 are whole numbers, so scales are 2 ** (exponent - 128). They are kept in fp16."""
    blocks, exponents = parts[BLOCKS], parts[SCALES].int()
    if (largest := int(exponents.max())) > 128 + LARGEST_FP16_EXPONENT:
        raise UnsupportedModelError(
            f"{packed.path}: tensor {packed.parts[SCALES]} holds {largest}; supported: at most "
            f"{128 + LARGEST_FP16_EXPONENT}, a weight of 2 ** {LARGEST_FP16_EXPONENT + 4}",
            param="model",
        )
    values = E2M1_VALUES[torch.stack((blocks & 15, blocks >> 4), dim=-1).int()].view(packed.rows, packed.columns)
    return QuantizedWeight(packed.quantization.format, values, torch.exp2((exponents - 128).float()))


def _int_quantized(packed: PackedWeight, parts: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    values = _from_signed(parts["weight"])
    zeros = _from_signed(parts["weight_zero_point"]) if packed.quantization.format.has_mins else None
    return _weight(packed, values, parts["weight_scale"], zeros)


def _pack_quantized(packed: PackedWeight, parts: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    bits = packed.quantization.format.bits
    values, zeros = unpack_words(parts["weight_packed"], bits), None
    if packed.quantization.format.has_mins:
        zeros = unpack_words(parts["weight_zero_point"].t(), bits)[:, : packed.rows].t()
    return _weight(packed, values, parts["weight_scale"], zeros)


def _gptq_or_awq(packed: PackedWeight, parts: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    layout, bits = packed.quantization.layout, packed.quantization.format.bits
    if layout == "awq":
        values, zeros = (_in_awq_order(unpack_words(parts[part], bits)).t() for part in ("qweight", "qzeros"))
        return _weight(packed, values, parts["scales"].t(), zeros)
    words = parts["qzeros"]
    if packed.quantization.format.has_mins and layout == "gptq":
        # v1 has subtracted 1 from each value, as a word: where a value was 0, the next one was borrowed from.
        words = words + 0x01010101 * (0x11 if bits == 4 else 1)
    zeros = unpack_words(words, bits)[:, : packed.rows]
    if not packed.quantization.format.has_mins:
        _check_symmetric(packed, zeros)
    return _weight(packed, unpack_words(parts["qweight"].t(), bits), parts["scales"].t(), zeros.t())


def _check_symmetric(packed: PackedWeight, zeros: torch.Tensor) -> None:
    """Some writers of "gptq" do not subtract 1: both are the middle."""
    middle = packed.quantization.format.offset
    first = int(zeros.flatten()[0]) if zeros.numel() else middle
    if first not in (middle - 1, middle) or bool((zeros != first).any()):
        raise ConfigError(
            f"{packed.path}: tensor {packed.parts['qzeros']} has zero points other than {middle - 1} and {middle}; "
            "quantization_config.sym says that there are none",
            param="model",
        )


def _weight(
    packed: PackedWeight, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
) -> QuantizedWeight:
    wide = scales.float().contiguous()
    mins = wide * zeros if zeros is not None and packed.quantization.format.has_mins else None
    return QuantizedWeight(packed.quantization.format, values.contiguous(), wide, mins)


def _from_signed(values: torch.Tensor) -> torch.Tensor:
    """int8 to uint8, with -128 at 0."""
    return values.view(torch.uint8) ^ 0x80


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, words] int32 to [n, words * 32 / bits] uint8, from the lowest bits of each word up."""
    values = words.contiguous().view(torch.uint8)
    return values if bits == 8 else torch.stack([values & 15, values >> 4], dim=-1).flatten(1)


def _in_awq_order(values: torch.Tensor) -> torch.Tensor:
    """[n, rows] as they lie in their words to [n, rows] in order."""
    return values.view(values.shape[0], -1, len(AWQ_PLACES))[:, :, list(AWQ_PLACES)].flatten(1)
