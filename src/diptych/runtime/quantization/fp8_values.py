"""The values of weights in FP8: each value times the scale of its block, in fp32, some rows at a time."""

import torch

from diptych.runtime.quantization.fp8_weight import Fp8Weight

VALUES_AT_ONCE = 1 << 18  # whose fp32, 1 MiB, stays in the processor's cache


def read_fp8(
    weight: Fp8Weight, values: torch.Tensor, scale: torch.Tensor, target: torch.Tensor, first_row: int = 0
) -> None:
    """Fill ``target`` [n, columns] with the rows from ``first_row`` on, rounded to its dtype once. values: as they are
    stored. scale: likewise, of any shape that Fp8Weight takes; of E8M0 the exponents as uint8."""
    block_rows, block_columns = weight.block
    scales = _fp32(scale).reshape(-(-weight.rows // block_rows), -(-weight.columns // block_columns))
    step = max(1, VALUES_AT_ONCE // weight.columns)
    for part in torch.split(target, step):
        rows = torch.arange(first_row, first_row + len(part))
        wide = values[first_row : first_row + len(part)].float()
        _scale(wide, scales[rows // block_rows], block_columns)
        part.copy_(wide)
        first_row += len(part)


def _scale(wide: torch.Tensor, scales: torch.Tensor, block_columns: int) -> None:
    """Multiply rows [n, columns] by scales [n, blocks] in place; the last block may be a shorter one."""
    whole = wide.shape[1] // block_columns
    if whole:
        wide[:, : whole * block_columns].view(len(wide), whole, block_columns).mul_(scales[:, :whole].unsqueeze(-1))
    wide[:, whole * block_columns :] *= scales[:, whole:]


def _fp32(scale: torch.Tensor) -> torch.Tensor:
    if scale.dtype is not torch.uint8:
        return scale.float()
    exponents = scale.int()  # 2 ** (exponent - 127)
    return torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)
