"""Attention over the paged KV cache: one interface, one file per backend."""

import torch

from diptych.control.errors import ConfigError
from diptych.runtime.attention.interface import AttentionBackend, AttentionShape
from diptych.runtime.attention.torch_cpu import TorchCpuAttention


def make_attention(shape: AttentionShape, device: torch.device, native: bool | None = None) -> AttentionBackend:
    """The backend for a device. native: None uses the kernels when they are built and cover the shape; True insists;
    False takes plain torch."""
    if device.type != "cpu":
        raise ConfigError(f"device is {device}; supported: cpu", param="device")
    if native:
        raise ConfigError("native kernels are not built", param="native")
    return TorchCpuAttention(shape)
