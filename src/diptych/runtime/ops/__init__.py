"""Fused element-wise operations and prepacked linear layers: one interface, a native and a torch implementation."""

import torch

from diptych.control.errors import ConfigError
from diptych.runtime.native import load_native
from diptych.runtime.ops.native_ops import NativeOps
from diptych.runtime.ops.ops import Ops
from diptych.runtime.ops.torch_ops import TorchOps


def make_ops(device: torch.device, dtype: torch.dtype, native: bool | None = None) -> Ops:
    """The operations for a device and dtype. native: None uses the kernels when they are built and cover the dtype;
    True insists; False takes plain torch."""
    library = load_native() if device.type == "cpu" and native is not False else None
    if library is not None and library.supports(dtype):
        return NativeOps(library, dtype)
    if native:
        raise ConfigError(f"native kernels are not built, or do not cover {dtype} on this processor", param="native")
    return TorchOps()
