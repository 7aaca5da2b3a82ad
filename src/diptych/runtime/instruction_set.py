"""Which instructions the native kernels compute with: the one place that decides it.

A set of kernels is named after the instructions that it needs; ``torch`` stands for no native kernel at all. Two sets
may differ in the last bits of a result, so a worker uses one of them from its start to its end.
"""

import torch

from diptych.control.errors import ConfigError
from diptych.runtime.native import NativeLibrary, load_native

AUTO = "auto"
TORCH = "torch"


def available(dtype: torch.dtype) -> tuple[str, ...]:
    """The sets that compute in ``dtype`` on this processor, the fastest first."""
    library = load_native()
    return (*(_native_sets(library, dtype) if library else ()), TORCH)


def choose(dtype: torch.dtype, wish: str = AUTO) -> str:
    """The set to compute with: ``wish``, or the fastest. Raises ConfigError for a set that is not available."""
    names = available(dtype)
    if wish == AUTO:
        return names[0]
    if wish not in names:
        raise ConfigError(
            f"instruction_set is {wish!r}; available for {dtype} on this processor: {', '.join(names)}",
            param="instruction_set",
        )
    return wish


def _native_sets(library: NativeLibrary, dtype: torch.dtype) -> tuple[str, ...]:
    if dtype == torch.float32:
        return ("avx512",)
    return ("avx512_bf16",) if dtype == torch.bfloat16 and library.has_bf16 else ()
