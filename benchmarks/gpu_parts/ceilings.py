"""What this GPU gives: a copy, a product in bf16 by cuBLAS, and the same by the project's kernel."""

from statistics import median

import torch
from benchmarks.gpu_parts.models import DEVICE, DTYPE, ceilings, row, seconds_of

from diptych.runtime.kernels.instruction_set import TRITON, available


def main() -> None:
    """Print them, and what the same order of sums costs for each number of rows."""
    found = ceilings()
    row(what="copy", gb_s=round(found["copy_bytes_s"] / 1e9))
    row(what="product 8192 x 8192 x 8192", tflop_s=round(found["product_flop_s"] / 1e12, 1))
    if TRITON not in available(DTYPE, DEVICE.type):
        row(what="product by triton", reason="Triton is not installed")
        return
    from diptych.runtime.kernels.triton_kernels.linear import linear

    for columns, inner in ((4096, 4096), (28672, 4096), (4096, 14336)):
        weight = torch.empty(columns, inner, dtype=DTYPE, device=DEVICE).normal_()
        for rows in (1, 8, 32, 256, 2048):
            x = torch.empty(rows, inner, dtype=DTYPE, device=DEVICE).normal_()
            theirs = seconds_of(lambda x=x, w=weight: torch.nn.functional.linear(x, w), 20)
            ours = seconds_of(lambda x=x, w=weight: linear(x, w, None), 20)
            row(
                what=f"{rows} rows, {columns} x {inner}",
                cublas_us=round(1e6 * median(theirs), 1),
                triton_us=round(1e6 * median(ours), 1),
                ratio=round(median(ours) / median(theirs), 2),
            )


if __name__ == "__main__":
    main()
