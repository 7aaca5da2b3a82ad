"""Weights in whole numbers of 8 or 4 bits: what they mean, and how a weight in floating point becomes one.

Every source of such weights (a bf16 checkpoint with ``--quantize``, GGUF, GPTQ, AWQ, compressed-tensors) gives
QuantizedWeight, and every implementation of a linear layer takes it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from diptych.runtime.weights.weight_format import WeightFormat, common_format

# Twice what the 16 values of E2M1 stand for (a sign, two bits of exponent, one of mantissa), counted from -128.
E2M1_VALUES = torch.tensor(
    [128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116], dtype=torch.uint8
)
ROWS_AT_ONCE = 1024  # while a weight is quantised: bounds the temporary fp32


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """weight[row, column] = scales[row, group] * (values[row, column] - format.offset) - mins[row, group].

    values: [rows, columns] uint8, below 2 ** bits. scales, mins: [rows, num_groups] fp32; mins None without has_mins.
    """

    format: WeightFormat
    values: torch.Tensor
    scales: torch.Tensor
    mins: torch.Tensor | None = None

    def dequantize(self) -> torch.Tensor:
        """The weight it stands for, [rows, columns] fp32."""
        rows, columns = self.values.shape
        grouped = self.values.view(rows, self.format.num_groups(columns), -1).float() - self.format.offset
        grouped *= self.scales.unsqueeze(-1)
        if self.mins is not None:
            grouped -= self.mins.unsqueeze(-1)
        return grouped.view(rows, columns)


@dataclass(frozen=True, slots=True)
class QuantizedSource:
    """A weight whose format and shape are known before its values are read. read: called at most once."""

    format: WeightFormat
    rows: int
    columns: int
    read: Callable[[], QuantizedWeight]


def stack(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Weights of the same columns, one below the other, in their common format. No value changes."""
    wanted = common_format([weight.format for weight in weights])
    return _concatenated([_in_format(weight, wanted) for weight in weights])


def _in_format(weight: QuantizedWeight, wanted: WeightFormat) -> QuantizedWeight:
    """The same weight in a format that common_format gave for it."""
    own, columns = weight.format, weight.values.shape[1]
    repeats = wanted.num_groups(columns) // own.num_groups(columns)
    scales = weight.scales.repeat_interleave(repeats, dim=1)
    if not wanted.has_mins:
        return QuantizedWeight(wanted, weight.values + (wanted.offset - own.offset), scales)
    mins = scales * own.offset if weight.mins is None else weight.mins.repeat_interleave(repeats, dim=1)
    return QuantizedWeight(wanted, weight.values, scales, mins)


def quantize(weight: torch.Tensor, wanted: WeightFormat) -> QuantizedWeight:
    """weight [rows, columns] to the nearest whole numbers. With mins a group's smallest value is 0 and its largest the
    end of the range. Without mins the largest magnitude of a group is the end of the range: of 8 bits at +-127; of 4
    bits at -8, which is a step longer than the other end at +7 (the scale has the sign that this needs).

    Scales and mins of groups are rounded to fp16, as they are kept, before the values are.
    """
    rows, columns = weight.shape
    return quantize_parts([weight], rows, columns, wanted)


def quantize_parts(parts: Iterable[torch.Tensor], rows: int, columns: int, wanted: WeightFormat) -> QuantizedWeight:
    """``quantize`` of a weight [rows, columns] whose rows come in parts, so that only one of them need be in memory."""
    groups = wanted.num_groups(columns)
    values, scales = torch.empty(rows, columns, dtype=torch.uint8), torch.empty(rows, groups)
    mins = torch.empty(rows, groups) if wanted.has_mins else None
    start = 0
    for part in parts:
        for some in torch.split(part, ROWS_AT_ONCE):
            made, end = _quantize(some.float(), wanted), start + len(some)
            values[start:end], scales[start:end] = made.values, made.scales
            if mins is not None and made.mins is not None:
                mins[start:end] = made.mins
            start = end
    return QuantizedWeight(wanted, values, scales, mins)


def _concatenated(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Weights of one format, one below the other."""
    mins = [part.mins for part in parts if part.mins is not None]
    values, scales = torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts])
    return QuantizedWeight(parts[0].format, values, scales, torch.cat(mins) if mins else None)


def _quantize(weight: torch.Tensor, wanted: WeightFormat) -> QuantizedWeight:
    rows, columns = weight.shape
    groups = weight.view(rows, wanted.num_groups(columns), -1)
    top, kept = (1 << wanted.bits) - 1, torch.float32 if wanted.group_size is None else torch.float16
    if wanted.has_mins:
        mins = (-groups.amin(-1).clamp(max=0.0)).to(kept).float()
        scales = ((groups.amax(-1).clamp(min=0.0) + mins) / top).to(kept).float()
        shifted = groups + mins.unsqueeze(-1)
    else:
        mins, shifted = None, groups
        scales = (groups.abs().amax(-1) / 127 if wanted.bits == 8 else _ends(groups) / -8).to(kept).float()
    steps = torch.where(scales != 0, 1.0 / scales, 0.0).unsqueeze(-1)
    values = (shifted * steps).round_().add_(wanted.offset).clamp_(0, top)
    return QuantizedWeight(wanted, values.to(torch.uint8).view(rows, columns), scales, mins)


def _ends(groups: torch.Tensor) -> torch.Tensor:
    """The value of the largest magnitude of each group: [rows, groups, columns] -> [rows, groups]."""
    return torch.where(groups.amax(-1) > -groups.amin(-1), groups.amax(-1), groups.amin(-1))
