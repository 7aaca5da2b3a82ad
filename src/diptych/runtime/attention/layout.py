"""Moving K and V between rows of tokens and the layouts of attention_backend.py. Plain torch: correct, not fast."""

import torch

from diptych.runtime.device.memory import large_empty

GROUP = 16  # tokens of K that lie side by side


def allocate_cpu(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeroed K and V of one layer in the CPU layout."""
    count = num_blocks * num_kv_heads * block_size * head_dim
    k, v = large_empty(count, dtype).zero_(), large_empty(count, dtype).zero_()
    return lay_out_cpu(k, v, num_kv_heads, block_size, head_dim)


def lay_out_cpu(
    k: torch.Tensor, v: torch.Tensor, num_kv_heads: int, block_size: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """1-d memory as K and V of one layer in the CPU layout; the number of blocks is what fits."""
    lanes = 4 // k.dtype.itemsize
    k_cache = k.view(-1, num_kv_heads, block_size // GROUP, head_dim // lanes, GROUP, lanes)
    return k_cache, v.view(-1, num_kv_heads, block_size // lanes, head_dim, lanes)


def head_shape_cpu(k_cache: torch.Tensor) -> tuple[int, int]:
    """(num_kv_heads, head_dim) of K in the CPU layout."""
    return k_cache.shape[1], k_cache.shape[3] * k_cache.shape[5]


def write_cpu(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """k, v [num_tokens, num_kv_heads, head_dim] to ``slots`` of the CPU layout."""
    lanes = k_cache.shape[5]
    block_size = k_cache.shape[2] * GROUP
    block, offset = slots // block_size, slots % block_size
    rows, heads, dim = k.shape
    k_cache[block, :, offset // GROUP, :, offset % GROUP] = k.reshape(rows, heads, dim // lanes, lanes)
    v_cache[block, :, offset // lanes, :, offset % lanes] = v


def read_cpu(k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V at ``slots``, [len(slots), num_kv_heads, head_dim] each."""
    lanes = k_cache.shape[5]
    block_size = k_cache.shape[2] * GROUP
    block, offset = slots // block_size, slots % block_size
    k = k_cache[block, :, offset // GROUP, :, offset % GROUP]
    return k.reshape(k.shape[0], k.shape[1], -1), v_cache[block, :, offset // lanes, :, offset % lanes]


def write_cuda(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """k, v [num_tokens, num_kv_heads, head_dim] to ``slots`` of the CUDA layout."""
    k_cache.view(-1, *k_cache.shape[2:])[slots] = k
    v_cache.view(-1, *v_cache.shape[2:])[slots] = v


def read_cuda(k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V at ``slots``, [len(slots), num_kv_heads, head_dim] each."""
    return k_cache.view(-1, *k_cache.shape[2:])[slots], v_cache.view(-1, *v_cache.shape[2:])[slots]
