"""What the Triton kernels become for a GPU that need not be there: run as a program, for the interpreter replaces the
language in the process that uses it.

    python -m tests.runtime.triton_machine_code 90      # prints JSON: of each kernel and way to launch it, how it
                                                        # multiplies, and how many products and sums became one
"""

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from diptych.runtime.kernels.triton_kernels import linear, paged_attention

OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
KINDS = {  # of arguments; all others are int32
    "*bf16": ("q", "k_cache", "v_cache", "out", "x", "weight", "bias", "y"),
    "*fp32": ("split_sums", "split_stats", "parts"),
    "*i32": ("query_start", "context_lens", "block_tables"),
    "fp32": ("scale", "softcap"),
}
ATTENTION = {
    "HEAD_DIM": 128, "DIM": 128, "GROUP": 4, "QUERIES": 16, "ROWS_": paged_attention.ROWS, "WINDOW": 0,
    "SPLIT_": paged_attention.SPLIT, "BLOCK_SIZE": 32, "TILE_": paged_attention.TILE, "HAS_SOFTCAP": False,
    "IEEE": False,
}  # fmt: skip
LINEAR = {
    "PART": 1024, "ROWS_": linear.ROWS, "COLUMNS_": linear.COLUMNS, "INNER_": linear.INNER,
    "TOGETHER": linear.ROW_TILES_TOGETHER, "HAS_BIAS": False, "IEEE": False,
}  # fmt: skip
ATTEND_WAYS = [{"IS_SPLIT": split, "IS_DECODE": decode} for split in (False, True) for decode in (False, True)]
LAUNCHES = [
    (paged_attention._attend, ATTENTION, ATTEND_WAYS),
    (linear._multiply, LINEAR, [{"IS_SPLIT": False}, {"IS_SPLIT": True}]),
]


def machine_code(kernel: Any, constants: dict[str, Any], capability: int) -> str:
    """PTX of a kernel of a model with 8 B parameters for GPUs of a compute capability (90: Hopper)."""
    signature = dict.fromkeys(kernel.arg_names, "i32")
    signature.update({name: kind for kind, names in KINDS.items() for name in names if name in signature})
    signature.update(dict.fromkeys(constants, "constexpr"))
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    code: str = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=OPTIONS).asm["ptx"]
    return code


def main(capability: int) -> None:
    """Print what each kernel multiplies with."""
    found: dict[str, list[dict[str, Any]]] = {}
    for kernel, constants, ways in LAUNCHES:
        for way in ways:
            code = machine_code(kernel, {**constants, **way}, capability)
            products = sorted(set(re.findall(r"mma(?:_async)?\.sync[\w.]*", code)))
            contractions = len(re.findall(r"\bfma\.rn\.f32", code))
            found.setdefault(kernel.fn.__name__, []).append({"products": products, "contractions": contractions})
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
