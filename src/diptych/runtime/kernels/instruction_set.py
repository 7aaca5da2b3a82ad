"""Which instructions the native kernels compute with; decided only here.

A set of kernels is named after the instructions that it needs; ``torch`` stands for no native kernel at all. Sets
without instructions for bfloat16 widen it to fp32 in registers. Two sets may differ in the last bits of a result, so a
worker uses one of them from its start to its end.
"""

import torch

from diptych.control.errors import ConfigError
from diptych.runtime.kernels.native import load_native

AUTO = "auto"
TORCH = "torch"
# the code of amx over tiles in plain C++, for tests: slow, never chosen by auto, and no option of a command
AMX_EMULATED = "amx_emulated"

NATIVE_SETS = {  # the fastest first
    torch.float32: ("avx512", "avx2"),
    torch.bfloat16: ("amx", "avx512_bf16", "avx512", "avx2"),
}


def available(dtype: torch.dtype) -> tuple[str, ...]:
    """The sets that compute in ``dtype`` on this processor, the fastest first."""
    library = load_native()
    features = library.features if library else ()
    return (*(name for name in NATIVE_SETS.get(dtype, ()) if name in features), TORCH)


def choose(dtype: torch.dtype, wish: str = AUTO) -> str:
    """The set to compute with: ``wish``, or the fastest. Raises ConfigError for a set that is not available."""
    names = available(dtype)
    if wish == AUTO:
        return names[0]
    if wish == AMX_EMULATED and dtype == torch.bfloat16 and load_native() is not None:
        return wish
    if wish not in names:
        raise ConfigError(
            f"instruction_set is {wish!r}; available for {dtype} on this processor: {', '.join(names)}",
            param="instruction_set",
        )
    return wish
