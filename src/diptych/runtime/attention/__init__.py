"""Attention over the paged KV cache: one interface, one file per backend."""

import torch

from diptych.control.errors import ConfigError
from diptych.runtime.attention.attention_backend import AttentionBackend, AttentionShape
from diptych.runtime.attention.cuda_attention import CudaAttention
from diptych.runtime.attention.native_attention import NativeCpuAttention
from diptych.runtime.attention.torch_attention import TorchCpuAttention
from diptych.runtime.instruction_set import TORCH
from diptych.runtime.native import load_native


def make_attention(shape: AttentionShape, device: torch.device, instruction_set: str = TORCH) -> AttentionBackend:
    """The backend for a device. On the cpu: the kernels of ``instruction_set`` (see instruction_set.choose) where they
    cover the shape, else plain torch."""
    if device.type == "cuda":
        return CudaAttention(shape, device)
    if device.type != "cpu":
        raise ConfigError(f"device is {device}; supported: cpu, cuda", param="device")
    library = load_native() if instruction_set != TORCH else None
    if library is not None and NativeCpuAttention.covers(shape):
        return NativeCpuAttention(library, shape)
    return TorchCpuAttention(shape)
