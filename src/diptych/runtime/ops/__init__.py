"""Fused element-wise operations and prepacked linear layers: one interface, a native and a torch implementation."""

import torch

from diptych.control.errors import ConfigError
from diptych.runtime.ops.interface import Ops
from diptych.runtime.ops.torch_ops import TorchOps


def make_ops(device: torch.device, dtype: torch.dtype, native: bool | None = None) -> Ops:
    """The operations for a device and dtype. native: None uses the kernels when they are built and cover the dtype;
    True insists; False takes plain torch."""
    if native:
        raise ConfigError("native kernels are not built", param="native")
    return TorchOps()
