"""Attention over the paged KV cache: one interface, one file per backend."""

import torch

from diptych.control.errors import ConfigError
from diptych.runtime.attention.attention_backend import AttentionBackend
from diptych.runtime.attention.cuda_attention import CudaAttention, paged_attention
from diptych.runtime.attention.native_attention import NativeCpuAttention
from diptych.runtime.attention.torch_attention import TorchCpuAttention
from diptych.runtime.kernels.instruction_set import TORCH, TRITON
from diptych.runtime.kernels.native import load_native
from diptych.runtime.kv_cache.kv_geometry import KVGeometry
from diptych.runtime.kv_cache.layer_groups import LayerGroups
from diptych.runtime.models.model_config import AttentionConfig


def make_attention(
    config: AttentionConfig,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    instruction_set: str = TORCH,
    layers: LayerGroups | None = None,
    kv_dtype: str = "auto",
) -> AttentionBackend:
    """The backend for a device, with the kernels that instruction_set.choose has named. On a CPU plain torch takes what
    the native kernels do not cover. dtype: of queries. layers: how they share blocks (None: each has its place in all
    of them). kv_dtype: of the cache, auto (as dtype) or int8."""
    cache_dtype = str(dtype).removeprefix("torch.") if kv_dtype == "auto" else kv_dtype
    geometry = KVGeometry.of(config, block_size, cache_dtype, layers)
    if instruction_set == TRITON:
        from diptych.runtime.attention.triton_attention import TritonAttention  # half a second, where it is used

        return TritonAttention(geometry, device)
    if device.type == "cuda":
        return CudaAttention(geometry, config.layers, device, paged_attention())
    if device.type != "cpu":
        raise ConfigError(f"device is {device}; supported: cpu, cuda", param="device")
    library = load_native() if instruction_set != TORCH else None
    if library is not None and NativeCpuAttention.covers(geometry):
        return NativeCpuAttention(library.kernels(instruction_set, dtype), config.num_heads, geometry)
    return TorchCpuAttention(geometry)
