"""y = x W^T + bias with one order of sums for every number of rows.

A program computes a tile of ROWS x COLUMNS results. Inner columns are added in steps of INNER within parts of equal
length, and the parts of a result are then added in their order, beginning with zero. How many parts there are depends
on the layer's shape alone: enough for a single tile of rows to keep a GPU busy. With few rows each part is computed by
a program of its own and ``_add_parts`` follows; with many, one program computes all parts of its tile. The sums are the
same ones, so a row has the same bits alone and in any batch. (A library that chooses its kernel by the number of rows
promises no such thing.)
"""

import torch
import triton
import triton.language as tl

ROWS = 64  # of a tile: see paged_attention.ROWS
COLUMNS = 128
INNER = 64
MIN_PART = 512  # inner columns
WANTED_PROGRAMS = 256  # about two for each multiprocessor of a large GPU
ROW_TILES_TOGETHER = 8  # neighbouring programs read the same weights


def part_length(columns: int, inner: int) -> int:
    """Inner columns of a part: a multiple of INNER, by the shape of the weight [columns, inner]."""
    wanted = max(1, min(WANTED_PROGRAMS // triton.cdiv(columns, COLUMNS), inner // MIN_PART))
    return triton.cdiv(triton.cdiv(inner, wanted), INNER) * INNER


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [rows, inner], its rows perhaps apart, and weight [columns, inner], contiguous, of one dtype -> [rows, columns]
    in it. bias [columns] is added before the result is rounded."""
    rows, inner = x.shape
    columns = weight.shape[0]
    y = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if not rows:
        return y
    part = part_length(columns, inner)
    num_parts = triton.cdiv(inner, part)
    row_tiles, column_tiles = triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS)
    is_split = num_parts > 1 and row_tiles * column_tiles < WANTED_PROGRAMS
    parts = torch.empty(num_parts, rows, columns, dtype=torch.float32, device=x.device) if is_split else y
    has_bias = bias is not None
    _multiply[(row_tiles * column_tiles, num_parts if is_split else 1)](
        x, weight, bias if has_bias else weight, y, parts, rows, columns, inner, x.stride(0), PART=part, ROWS_=ROWS,
        COLUMNS_=COLUMNS, INNER_=INNER, TOGETHER=ROW_TILES_TOGETHER, HAS_BIAS=has_bias, IS_SPLIT=is_split,
        IEEE=x.dtype == torch.float32, num_warps=4, num_stages=4, enable_fp_fusion=False,
    )  # fmt: skip
    if is_split:
        width = 512
        _add_parts[(rows, triton.cdiv(columns, width))](
            parts, bias if has_bias else weight, y, columns, num_parts, WIDTH=width, HAS_BIAS=has_bias,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y


@triton.jit
def _multiply(
    x, weight, bias, y, parts, rows, columns, inner, x_stride, PART: tl.constexpr, ROWS_: tl.constexpr,
    COLUMNS_: tl.constexpr, INNER_: tl.constexpr, TOGETHER: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_SPLIT: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    row_tiles, column_tiles = tl.cdiv(rows, ROWS_), tl.cdiv(columns, COLUMNS_)
    band = tl.program_id(0) // (TOGETHER * column_tiles)  # of TOGETHER row tiles: what is near in time reads alike
    in_band = tl.minimum(row_tiles - band * TOGETHER, TOGETHER)
    place = tl.program_id(0) % (TOGETHER * column_tiles)
    row = (band * TOGETHER + place % in_band) * ROWS_ + tl.arange(0, ROWS_)
    column = place // in_band * COLUMNS_ + tl.arange(0, COLUMNS_)
    is_row, is_column = row < rows, column < columns
    x_row = x + row[:, None].to(tl.int64) * x_stride
    w_row = weight + column[None, :].to(tl.int64) * inner
    total = tl.zeros([ROWS_, COLUMNS_], tl.float32)
    first, last = 0, inner
    if IS_SPLIT:
        first = tl.program_id(1) * PART
        last = tl.minimum(first + PART, inner)
    for begin in range(first, last, PART):
        part = tl.zeros([ROWS_, COLUMNS_], tl.float32)
        for step in range(begin, tl.minimum(begin + PART, last), INNER_):
            k = step + tl.arange(0, INNER_)
            is_k = k < inner
            left = tl.load(x_row + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0)
            right = tl.load(w_row + k[:, None], mask=is_column[None, :] & is_k[:, None], other=0.0)
            if IEEE:
                part = tl.dot(left, right, part, input_precision="ieee")
            else:
                part = tl.dot(left, right, part)
        total += part
    mask = is_row[:, None] & is_column[None, :]
    places = row[:, None].to(tl.int64) * columns + column[None, :]
    if IS_SPLIT:
        tl.store(parts + tl.program_id(1).to(tl.int64) * rows * columns + places, total, mask=mask)
    else:
        if HAS_BIAS:
            total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        tl.store(y + places, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _add_parts(parts, bias, y, columns, num_parts, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr):
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_column = column < columns
    place = tl.program_id(0).to(tl.int64) * columns + column
    size = tl.num_programs(0).to(tl.int64) * columns
    total = tl.zeros([WIDTH], tl.float32)
    for part in range(0, num_parts):
        total += tl.load(parts + part * size + place, mask=is_column, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(y + place, total.to(y.dtype.element_ty), mask=is_column)
