"""Builds the native kernels when a C++ compiler is at hand. Without one the install succeeds and torch does the work.

With DIPTYCH_COMPILE=1 the control code and the simulator become machine code, too (mypyc;
diptych/base/compiled_modules.py says which modules, and why). Without it, or when that fails, they run as Python and
decide the same.

The library of kernels is plain C++ loaded through ctypes. It chooses its instructions at run time, so one build serves
every x86-64 machine. It is not linked against an OpenMP runtime: at load time it takes the one that torch has brought
into the process, so that there is one thread pool.
"""

import os
import platform
import runpy
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = "src/diptych/runtime/attention/kernels"
SETS = ("avx2", "avx512", "avx512_bf16", "amx", "amx_emulated")
QUANTIZED_SETS = tuple(f"quantized_{name}" for name in ("avx2", "avx2_vnni", "avx512", "avx512_vnni"))
SOURCES = ("cpu", "threads", "native", "pack", "codec", "sampling", *SETS, *QUANTIZED_SETS)
VECTORS = ("vector_avx2", "vector_avx512", "arithmetic", "exponential", "tiles", "amx_tiles", "emulated_tiles")
QUANTIZED = ("quantized_gemm", "quantized_tiles", "whole_numbers")
PARTS = ("gemm", "elementwise", "attention", "decode_step", "mixture", "routing", "experts", "barrier")
HEADERS = ("kernels", "kernel_set", *PARTS, *QUANTIZED, *VECTORS)


COMPILES = os.environ.get("DIPTYCH_COMPILE", "0") not in ("", "0")
MYPY = "mypy>=2.4,<3"  # brings mypyc


class OptionalBuild(build_ext):
    """A failing compiler is a warning, not an error."""

    modules: dict[str, Any]  # diptych/base/compiled_modules.py
    compiled: list[Extension]
    compiled_from: str  # the record of the sources as they were before mypyc read them

    def finalize_options(self) -> None:
        self.modules = runpy.run_path("src/diptych/base/compiled_modules.py")
        self.compiled_from = self.modules["record"](Path("src/diptych"))
        self.compiled = compiled_extensions(self.modules) if COMPILES else []
        kernels = [each for each in self.distribution.ext_modules or [] if not (self.inplace and is_built(each))]
        self.distribution.ext_modules = [*kernels, *self.compiled]
        super().finalize_options()

    def run(self) -> None:
        record = Path(self.get_ext_fullpath("diptych.folder")).parent / self.modules["RECORD"]
        libraries = [Path(self.get_ext_fullpath(extension.name)) for extension in self.compiled]
        for old in (record, *libraries) if libraries else ():
            old.unlink(missing_ok=True)
        try:
            super().run()
        except Exception as error:
            print(f"warning: native kernels were not built ({error}); torch will do the work, slower", file=sys.stderr)
        if libraries and all(library.exists() for library in libraries):
            record.write_text(self.compiled_from)
        elif libraries:
            print("warning: the control code was not compiled; it runs as Python, slower", file=sys.stderr)

    def build_extension(self, ext: Extension) -> None:
        """As many sources at a time as there are cores."""
        compile_in_turn = self.compiler.compile

        def compile_at_once(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(lambda source: compile_in_turn([source], **options), sources))
            return [name for names in objects for name in names]

        self.compiler.compile = compile_at_once
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_in_turn

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


def compiled_extensions(modules: dict[str, Any]) -> list[Extension]:
    """The modules that run as machine code. Nothing where mypyc is missing or fails. What they import need not be
    installed where they are compiled."""
    options = ["--follow-imports=silent", "--ignore-missing-imports"]
    paths = [str(modules["source"](Path("src/diptych"), module)) for module in modules["MODULES"]]
    try:
        from mypyc.build import mypycify

        extensions: list[Extension] = mypycify(
            [*options, *paths], group_name="diptych", multi_file=True, opt_level="2", debug_level="0"
        )
    except (ImportError, SystemExit) as error:
        print(f"warning: the control code was not compiled ({error}); it runs as Python, slower", file=sys.stderr)
        return []
    for extension in extensions:
        extension.optional = True
        extension.extra_compile_args.append("-ffp-contract=off")  # a product and a sum round twice, as in Python
    return extensions


def is_built(extension: Extension) -> bool:
    """Whether its library is among the sources already, and no older than they are."""
    library = Path("src", *extension.name.split(".")).with_suffix(sysconfig.get_config_var("EXT_SUFFIX"))
    sources = [Path(name) for name in ("setup.py", *extension.sources, *extension.depends)]
    return library.exists() and all(source.stat().st_mtime < library.stat().st_mtime for source in sources)


def native_extensions(system: str, machine: str) -> list[Extension]:
    """The library for a kind of machine (sys.platform, platform.machine()): nothing where there are no kernels."""
    if system != "linux" or machine not in ("x86_64", "AMD64"):
        return []
    library = Extension(
        "diptych.runtime.attention.kernels._native",
        sources=[f"{KERNELS}/{name}.cpp" for name in SOURCES],
        depends=[f"{KERNELS}/{name}.h" for name in HEADERS],
        # no contraction: a fused multiply-add happens where the source says so, in every tile alike. Loops of 30
        # instructions are a few per cent slower where they straddle more lines of the instruction cache than they must
        extra_compile_args=["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-falign-loops=64", "-fopenmp", "-w"],
        optional=True,
    )
    return [library]


if __name__ == "__main__":
    setup(
        ext_modules=native_extensions(sys.platform, platform.machine()),
        cmdclass={"build_ext": OptionalBuild},
        setup_requires=[MYPY] if COMPILES and not find_spec("mypy") else [],
    )
