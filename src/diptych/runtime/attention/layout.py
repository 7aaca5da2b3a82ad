"""Moving K and V between rows of tokens and the layouts of attention_backend.py. Plain torch: correct, not fast.

A cache of whole numbers is torch.int8 [num_blocks, num_kv_heads, block_size, head_dim + 4]: a shape that says how large
it is, not where a value lies (``_numbers`` and ``_scales`` do).
"""

import torch

from diptych.runtime.device.memory import large_empty
from diptych.runtime.dtypes import SCALE_BYTES

GROUP = 16  # tokens of K that lie side by side


def allocate_cpu(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeroed K and V of one layer in the CPU layout."""
    row = head_dim + SCALE_BYTES if dtype is torch.int8 else head_dim
    count = num_blocks * num_kv_heads * block_size * row
    k, v = large_empty(count, dtype).zero_(), large_empty(count, dtype).zero_()
    return lay_out_cpu(k, v, num_kv_heads, block_size, head_dim)


def lay_out_cpu(
    k: torch.Tensor, v: torch.Tensor, num_kv_heads: int, block_size: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """1-d memory as K and V of one layer in the CPU layout; the number of blocks is what fits."""
    if k.dtype is torch.int8:
        shape = (-1, num_kv_heads, block_size, head_dim + SCALE_BYTES)
        return k.view(shape), v.view(shape)
    lanes = 4 // k.dtype.itemsize
    k_cache = k.view(-1, num_kv_heads, block_size // GROUP, head_dim // lanes, GROUP, lanes)
    return k_cache, v.view(-1, num_kv_heads, block_size // lanes, head_dim, lanes)


def head_shape_cpu(k_cache: torch.Tensor) -> tuple[int, int]:
    """(num_kv_heads, head_dim) of K in the CPU layout."""
    is_int8 = k_cache.dtype is torch.int8
    return k_cache.shape[1], k_cache.shape[3] - SCALE_BYTES if is_int8 else k_cache.shape[3] * k_cache.shape[5]


def block_size_cpu(k_cache: torch.Tensor) -> int:
    """Tokens of a block of K in the CPU layout."""
    return k_cache.shape[2] if k_cache.dtype is torch.int8 else k_cache.shape[2] * GROUP


def write_cpu(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """k, v [num_tokens, num_kv_heads, head_dim] to ``slots`` of the CPU layout."""
    block_size = block_size_cpu(k_cache)
    block, offset = slots // block_size, slots % block_size
    rows, heads, dim = k.shape
    if k_cache.dtype is torch.int8:
        for rows_of, cache in ((k, k_cache), (v, v_cache)):
            _scales(cache)[block, :, offset], numbers = to_numbers(rows_of)
            if cache is k_cache:
                _numbers(cache, is_k=True)[block, :, offset // GROUP, :, offset % GROUP] = numbers.view(
                    rows, heads, -1, 2
                )
            else:
                _numbers(cache, is_k=False)[block, :, offset // 2, :, offset % 2] = numbers
        return
    lanes = k_cache.shape[5]
    k_cache[block, :, offset // GROUP, :, offset % GROUP] = k.reshape(rows, heads, dim // lanes, lanes)
    v_cache[block, :, offset // lanes, :, offset % lanes] = v


def read_cpu(k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V at ``slots``, [len(slots), num_kv_heads, head_dim] each; of whole numbers as fp32."""
    block_size = block_size_cpu(k_cache)
    block, offset = slots // block_size, slots % block_size
    if k_cache.dtype is torch.int8:
        k = _numbers(k_cache, is_k=True)[block, :, offset // GROUP, :, offset % GROUP].flatten(2)
        v = _numbers(v_cache, is_k=False)[block, :, offset // 2, :, offset % 2]
        scales = [_scales(cache)[block, :, offset].unsqueeze(-1) for cache in (k_cache, v_cache)]
        return k * scales[0], v * scales[1]
    lanes = k_cache.shape[5]
    k = k_cache[block, :, offset // GROUP, :, offset % GROUP]
    return k.reshape(k.shape[0], k.shape[1], -1), v_cache[block, :, offset // lanes, :, offset % lanes]


def to_numbers(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales [..., heads] fp32, whole numbers from -127 to 127 [..., heads, head_dim] int8) of K or V [..., heads,
    head_dim]. The scale of a row that is not finite is not a number."""
    wide = rows.float()
    largest = wide.abs().amax(-1)
    top = torch.full_like(largest, 127.0)  # of a number, torch would multiply the reciprocal, which rounds twice
    steps = torch.where(largest > 1e-30, top / largest, 0.0)
    numbers = (wide * steps.unsqueeze(-1)).round().nan_to_num(0.0).clamp(-128, 127).to(torch.int8)
    return largest / 127.0 + (wide * 0.0).sum(-1), numbers


def _numbers(cache: torch.Tensor, *, is_k: bool) -> torch.Tensor:
    """The values of a cache of whole numbers in the order of bf16, a view: K [num_blocks, heads, block_size / 16,
    dim / 2, 16, 2], V [num_blocks, heads, block_size / 2, dim, 2]."""
    block_size, dim = cache.shape[2], cache.shape[3] - SCALE_BYTES
    shape = (block_size // GROUP, dim // 2, GROUP, 2) if is_k else (block_size // 2, dim, 2)
    return torch.unflatten(cache.flatten(2)[:, :, : block_size * dim], 2, shape)


def _scales(cache: torch.Tensor) -> torch.Tensor:
    """The scale of each token in such a cache, a view: [num_blocks, heads, block_size]."""
    block_size, dim = cache.shape[2], cache.shape[3] - SCALE_BYTES
    return cache.flatten(2)[:, :, block_size * dim :].view(torch.float32)


def write_cuda(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """k, v [num_tokens, num_kv_heads, head_dim] to ``slots`` of the CUDA layout."""
    k_cache.view(-1, *k_cache.shape[2:])[slots] = k
    v_cache.view(-1, *v_cache.shape[2:])[slots] = v


def read_cuda(k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V at ``slots``, [len(slots), num_kv_heads, head_dim] each."""
    return k_cache.view(-1, *k_cache.shape[2:])[slots], v_cache.view(-1, *v_cache.shape[2:])[slots]
