"""Norms with a residual, gates, rotary embeddings with the cache write: one program for a row, or for a row's head.

Norms, gates and rotations are computed in float32 and rounded where the torch reference rounds, in this order.
"""

import torch
import triton
import triton.language as tl

from diptych.runtime.ops.ops import Activation

GATE_WIDTH = 1024  # columns of a program


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    multiplier: float = 1.0,
) -> torch.Tensor:
    """x [rows, dim] -> its norm times weight [dim], in x's dtype. With a residual [rows, dim], contiguous: it becomes
    residual + multiplier * x, rounded, and the norm is that of this sum. A weight in x's dtype is multiplied with the
    rounded norm; one in float32 with the norm as it is."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    rows, dim = x.shape
    y = torch.empty(rows, dim, dtype=x.dtype, device=x.device)
    if rows:
        has_residual = residual is not None
        _rms_norm[(rows,)](
            x, residual if has_residual else x, weight, y, x.stride(0), dim, eps, multiplier,
            ROUNDS=weight.dtype == x.dtype, WIDTH=triton.next_power_of_2(dim),
            HAS_RESIDUAL=has_residual, num_warps=8 if dim >= 4096 else 4, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def activate_and_mul(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """gate_up [rows, 2 * dim], contiguous -> activation(gate) * up [rows, dim]."""
    rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, dim, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(dim, GATE_WIDTH))
        _activate_and_mul[grid](
            gate_up, y, dim, IS_GELU=activation == "gelu_tanh", WIDTH=GATE_WIDTH, num_warps=4, enable_fp_fusion=False
        )
    return y


def rope_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Rotate queries and keys, normed head by head before where there are norms, and write K and V into the cache.

    qkv [rows, (num_heads + 2 * num_kv_heads) * head_dim], contiguous: its queries are rotated in place, its keys are
    left. cos_sin [max_positions, head_dim] float32: cosines, then sines. Caches [num_blocks, block_size, num_kv_heads,
    head_dim]. Returns the queries, [rows, num_heads, head_dim], a view of qkv.
    """
    rows, head_dim = qkv.shape[0], cos_sin.shape[1]
    num_kv_heads = k_cache.shape[2]
    heads = qkv.view(rows, -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    if rows:
        _rope_and_cache[(rows, heads.shape[1])](
            qkv, positions, cos_sin, slots, k_cache, v_cache, qkv if q_norm is None else q_norm,
            qkv if k_norm is None else k_norm, eps, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
            HALF=head_dim // 2, WIDTH=triton.next_power_of_2(head_dim // 2), HAS_Q_NORM=q_norm is not None,
            HAS_K_NORM=k_norm is not None, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return heads[:, :num_heads]


@triton.jit
def _rms_norm(
    x, residual, weight, y, x_stride, dim, eps, multiplier, ROUNDS: tl.constexpr, WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    is_column = column < dim
    values = tl.load(x + row * x_stride + column, mask=is_column, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual + row * dim + column
        rounded = (tl.load(at, mask=is_column, other=0.0).to(tl.float32) + values * multiplier).to(y.dtype.element_ty)
        tl.store(at, rounded, mask=is_column)
        values = rounded.to(tl.float32)
    mean = tl.sum(values * values, 0) / dim
    normed = values * (1.0 / tl.sqrt_rn(mean + eps))
    if ROUNDS:
        normed = normed.to(y.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(y + row * dim + column, scaled.to(y.dtype.element_ty), mask=is_column)


@triton.jit
def _activate_and_mul(gate_up, y, dim, IS_GELU: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_column = column < dim
    gate = tl.load(gate_up + row * 2 * dim + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * dim + dim + column, mask=is_column, other=0.0).to(tl.float32)
    # x sigmoid(x), and x (1 + tanh(u)) / 2 = x sigmoid(2 u)
    inner = gate
    if IS_GELU:
        inner = 2.0 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    small = tl.exp(-tl.abs(inner))  # never overflows
    share = tl.where(inner >= 0, 1.0, small) / (1.0 + small)
    activated = (gate * share).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * dim + column, (activated * up).to(y.dtype.element_ty), mask=is_column)


@triton.jit
def _normed(first, second, weight, eps, at, is_dim, HALF: tl.constexpr, like):
    """Both halves of a head, normed and rounded."""
    mean = (tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF)
    factor = 1.0 / tl.sqrt_rn(mean + eps)
    first = (first * factor).to(like).to(tl.float32) * tl.load(weight + at, mask=is_dim, other=0.0).to(tl.float32)
    second = (second * factor).to(like).to(tl.float32) * tl.load(weight + HALF + at, mask=is_dim, other=0.0).to(
        tl.float32
    )
    return first.to(like).to(tl.float32), second.to(like).to(tl.float32)


@triton.jit
def _rope_and_cache(
    qkv, positions, cos_sin, slots, k_cache, v_cache, q_norm, k_norm, eps, NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, WIDTH)
    is_dim = at < HALF
    like = qkv.dtype.element_ty
    place = qkv + (row * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * (2 * HALF) + at
    first = tl.load(place, mask=is_dim, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=is_dim, other=0.0).to(tl.float32)
    is_query, is_value = head < NUM_HEADS, head >= NUM_HEADS + NUM_KV_HEADS
    if HAS_Q_NORM:
        if is_query:
            first, second = _normed(first, second, q_norm, eps, at, is_dim, HALF, like)
    if HAS_K_NORM:
        if (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS):
            first, second = _normed(first, second, k_norm, eps, at, is_dim, HALF, like)
    if head < NUM_HEADS + NUM_KV_HEADS:
        turn = cos_sin + tl.load(positions + row) * (2 * HALF) + at
        cosine = tl.load(turn, mask=is_dim, other=0.0)
        sine = tl.load(turn + HALF, mask=is_dim, other=0.0)
        first, second = first * cosine - second * sine, second * cosine + first * sine
    if is_query:
        tl.store(place, first.to(like), mask=is_dim)
        tl.store(place + HALF, second.to(like), mask=is_dim)
    else:
        slot = tl.load(slots + row) * NUM_KV_HEADS
        if is_value:
            kept = v_cache + (slot + head - NUM_HEADS - NUM_KV_HEADS) * (2 * HALF) + at
            tl.store(kept, first.to(like), mask=is_dim)
            tl.store(kept + HALF, second.to(like), mask=is_dim)
        else:
            kept = k_cache + (slot + head - NUM_HEADS) * (2 * HALF) + at
            tl.store(kept, first.to(like), mask=is_dim)
            tl.store(kept + HALF, second.to(like), mask=is_dim)
