"""Attention over the paged KV cache: one interface, one file per backend."""

import torch

from diptych.control.errors import ConfigError
from diptych.runtime.attention.attention_backend import AttentionBackend, AttentionShape
from diptych.runtime.attention.cuda_attention import CudaAttention
from diptych.runtime.attention.native_attention import NativeCpuAttention
from diptych.runtime.attention.torch_attention import TorchCpuAttention
from diptych.runtime.native import load_native


def make_attention(shape: AttentionShape, device: torch.device, native: bool | None = None) -> AttentionBackend:
    """The backend for a device. native: None uses the kernels when they are built and cover the shape; True insists;
    False takes plain torch."""
    if device.type == "cuda":
        return CudaAttention(shape, device)
    if device.type != "cpu":
        raise ConfigError(f"device is {device}; supported: cpu, cuda", param="device")
    library = load_native() if native is not False else None
    if library is not None and NativeCpuAttention.covers(library, shape):
        return NativeCpuAttention(library, shape)
    if native:
        raise ConfigError(f"native kernels are not built, or do not cover {shape} on this processor", param="native")
    return TorchCpuAttention(shape)
