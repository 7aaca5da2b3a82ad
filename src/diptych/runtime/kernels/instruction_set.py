"""Which kernels compute; decided only here.

On a CPU a set of kernels is named after the instructions that it needs, and sets without instructions for bfloat16
widen it to fp32 in registers. On a GPU ``triton`` stands for the project's own kernels. ``torch`` stands for none of
them. Two sets may differ in the last bits of a result, so a worker uses one of them from its start to its end.
"""

import torch

from diptych.control.errors import ConfigError
from diptych.runtime.kernels.native import load_native
from diptych.runtime.kernels.triton_kernels import has_triton

AUTO = "auto"
TORCH = "torch"
TRITON = "triton"
# the code of amx over tiles in plain C++, for tests: slow, never chosen by auto, and no option of a command
AMX_EMULATED = "amx_emulated"

NATIVE_SETS = {  # the fastest first
    torch.float32: ("avx512", "avx2"),
    torch.bfloat16: ("amx", "avx512_bf16", "avx512", "avx2"),
}


def available(dtype: torch.dtype, device: str = "cpu") -> tuple[str, ...]:
    """The sets that compute in ``dtype`` on this machine's ``device``, the first choice first."""
    if device != "cpu":
        return (TRITON, TORCH) if has_triton() else (TORCH,)
    library = load_native()
    features = library.features if library else ()
    return (*(name for name in NATIVE_SETS.get(dtype, ()) if name in features), TORCH)


def choose(dtype: torch.dtype, wish: str = AUTO, device: str = "cpu") -> str:
    """The set to compute with: ``wish``, or the first that is available, which gives a row the same bits in any batch
    where any set does. Raises ConfigError for a set that is not available."""
    names = available(dtype, device)
    if wish == AUTO:
        return names[0]
    if wish == AMX_EMULATED and dtype == torch.bfloat16 and device == "cpu" and load_native() is not None:
        return wish
    if wish not in names:
        where = "this processor" if device == "cpu" else device
        raise ConfigError(
            f"instruction_set is {wish!r}; available for {dtype} on {where}: {', '.join(names)}",
            param="instruction_set",
        )
    return wish
