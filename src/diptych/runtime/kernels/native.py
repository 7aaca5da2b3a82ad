"""The native library: found, loaded and described once per process. Owns the one handle; knows no tensors.

The library uses the OpenMP runtime that torch has loaded, so that ``torch.set_num_threads`` governs both and there is
one pool of threads.
"""

import ctypes
import functools
import importlib.machinery
from dataclasses import dataclass
from pathlib import Path

import torch  # its OpenMP runtime must be in the process first

ABI = 13
KERNELS = Path(__file__).parent.parent / "attention" / "kernels"
# by the bits of diptych_cpu_features; the first four are sets, of which each needs those before it, the last two are
# instructions for whole numbers that some processors with the set have
FEATURES = ("avx2", "avx512", "avx512_bf16", "amx", "avx512_vnni", "avx2_vnni")

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, list[type]] = {
    "diptych_pack": [_P, _P, _I, _I, _I, _I],
    "diptych_pack_quantized": [_P, _P, _P, _P, _I, _I, _I, _I, _I],
    "diptych_quantized_rows": [_P, _P, _P, _I, _I, _I],
    "diptych_linear": [_P, _P, _P, _P, _I, _I, _I, _I, _P],
    "diptych_wide_linear": [_P, _P, _P, _P, _I, _I, _I],
    "diptych_norm": [_P, _P, _P, _P, _I, _P, _I, _I, _F, _F],
    "diptych_add": [_P, _P, _P, _I, _I, _F],
    "diptych_activate": [_P, _P, _P, _I, _I, _P],
    "diptych_gate": [_P, _P, _P, _I, _I],
    "diptych_softcap": [_P, _P, _I, _I, _F],
    "diptych_rope_and_cache": [*[_P] * 10, *[_I] * 9, _F],
    "diptych_convolve": [_P, _P],
    "diptych_attention": [_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _F, _F, _P],
    "diptych_decode_step": [_P, _P],
    "diptych_choose": [_P, _P],
    "diptych_experts": [_P, _P],
    "diptych_kv_encode": [_P, _P, _P, _P, _I, _I],
    "diptych_kv_decode": [_P, _P, _P, _P, _I, _I],
    "diptych_whole_weights": [_P, _P, _I, _F, _F],
}


class NativeWeight(ctypes.Structure):
    """A packed weight as kernels.h has it. bits 0: in the dtype of the kernels. group: columns that share a scale."""

    _fields_ = [("weight", _P), ("bias", _P), ("bits", _I), ("group", _I), ("has_mins", _I)]


class NativeGate(ctypes.Structure):
    """What becomes of the results of a gate, as kernels.h has it. kind 0: there is none."""

    _fields_ = [("kind", _I), ("limit", _F), ("alpha", _F)]


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """The kernels of one instruction set in one dtype. handle: the first argument of the functions that compute."""

    functions: ctypes.CDLL
    handle: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The loaded library. features: those of FEATURES that the processor has; at least the first."""

    functions: ctypes.CDLL
    features: tuple[str, ...]

    def kernels(self, instruction_set: str, dtype: torch.dtype) -> NativeKernels:
        """The kernels that instruction_set.choose has named for ``dtype``."""
        vnni = f"{instruction_set}_vnni"
        name = vnni if vnni in self.features else instruction_set
        handle = self.functions.diptych_kernels(name.encode(), dtype == torch.bfloat16)
        assert handle, f"no kernels of {instruction_set} compute in {dtype}"
        return NativeKernels(self.functions, handle, dtype)


@functools.cache
def load_native() -> NativeLibrary | None:
    """The library, or None when it was not built or this processor has not even AVX2."""
    path = next((KERNELS / f"_native{s}" for s in importlib.machinery.EXTENSION_SUFFIXES if _exists(s)), None)
    if path is None:
        return None
    ctypes.CDLL(_openmp_runtime(), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    library.diptych_abi.restype = library.diptych_cpu_features.restype = _I
    if library.diptych_abi() != ABI:  # an old build beside new sources
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    library.diptych_bind_threads.argtypes, library.diptych_bind_threads.restype = [_P, _I], _I
    library.diptych_kernels.argtypes, library.diptych_kernels.restype = [ctypes.c_char_p, _I], _P
    for name, count in (("diptych_attention_workspace", 4), ("diptych_quantized_size", 6)):
        function = getattr(library, name)
        function.argtypes, function.restype = [_I] * count, _I
    bits = library.diptych_cpu_features()
    features = tuple(name for bit, name in enumerate(FEATURES) if bits >> bit & 1)
    return NativeLibrary(library, features) if features else None


def _exists(suffix: str) -> bool:
    return (KERNELS / f"_native{suffix}").exists()


def _openmp_runtime() -> str:
    """The OpenMP runtime that is in this process already (torch's), else the system's."""
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else []:
        name = line.rpartition("/")[2]
        if name.startswith(("libgomp", "libiomp5", "libomp")):
            return line[line.index("/") :]
    return "libgomp.so.1"
