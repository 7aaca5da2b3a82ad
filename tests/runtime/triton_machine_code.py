"""What the Triton kernels become for a GPU that need not be there: run as a program, for the interpreter replaces the
language in the process that uses it.

    python -m tests.runtime.triton_machine_code 90      # prints JSON: of each kernel and way to launch it, how it
                                                        # multiplies, and how many products and sums became one
"""

import json
import re
import sys
from itertools import product
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from diptych.runtime.kernels.triton_kernels import elementwise, int8_codec, linear, paged_attention, pick_tokens

KINDS = {  # of arguments; all others are int32
    "*bf16": (
        "q", "k_cache", "v_cache", "out", "x", "weight", "bias", "y", "residual", "gate_up", "qkv", "q_norm", "k_norm",
        "logits",
    ),
    "*fp32": ("split_sums", "split_stats", "parts", "cos_sin", "peaks", "factors", "least_depths"),
    "*fp64": ("top_ps", "uniforms"),
    "*i16": ("wire_scales",),
    "*i32": ("query_start", "context_lens", "block_tables"),
    "*i64": ("positions", "slots", "caches", "row_ids", "top_ks", "tokens"),
    "*u8": ("wire",),
    "fp32": ("scale", "softcap", "eps", "multiplier"),
}  # fmt: skip
TILES = {
    "HEAD_DIM": 128, "DIM": 128, "GROUP": 4, "QUERIES": 16, "ROWS_": paged_attention.ROWS, "WINDOW": 0,
    "SPLIT_": paged_attention.SPLIT,
}  # fmt: skip
ATTENTION = {**TILES, "BLOCK_SIZE": 32, "TILE_": paged_attention.TILE, "HAS_SOFTCAP": False, "IEEE": False}
LINEAR = {
    "PART": 1024, "ROWS_": linear.ROWS, "COLUMNS_": linear.COLUMNS, "INNER_": linear.INNER,
    "TOGETHER": linear.ROW_TILES_TOGETHER, "IEEE": False,
}  # fmt: skip
HEADS = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": 64, "WIDTH": 64}


def ways(*names: str, **ones: int) -> list[dict[str, Any]]:
    """Every choice of these switches. ones: each choice once more with these arguments equal to 1, which the compiler
    takes for constants (the interpreter does not)."""
    choices = [dict(zip(names, values, strict=True)) for values in product((False, True), repeat=len(names))]
    return [*choices, *({**choice, **ones} for choice in choices if ones)]


LAUNCHES = [  # (kernel, constants, ways)
    (paged_attention._attend, ATTENTION, ways("IS_SPLIT", "IS_DECODE", num_seqs=1, num_splits=1)),
    (paged_attention._attend, {**ATTENTION, "WINDOW": 100, "HAS_SOFTCAP": True}, ways("IS_SPLIT", "IS_DECODE")),
    (paged_attention._merge_splits, TILES, ways("IS_DECODE", num_seqs=1, num_splits=1)),
    (linear._multiply, LINEAR, ways("IS_SPLIT", "HAS_BIAS", rows=1)),
    (linear._add_parts, {"WIDTH": 512}, ways("HAS_BIAS", num_parts=1)),
    (elementwise._rms_norm, {"WIDTH": 4096}, ways("ROUNDS", "HAS_RESIDUAL")),
    (elementwise._activate_and_mul, {"WIDTH": elementwise.GATE_WIDTH}, ways("IS_GELU")),
    (elementwise._rope_and_cache, HEADS, ways("HAS_Q_NORM", "HAS_K_NORM")),
    (pick_tokens._pick, {"BLOCK_": pick_tokens.BLOCK}, ways()),
    (int8_codec._encode, {"DIM": 128, "WIDTH": 128, "GROUPS": 4}, ways("IS_BF16")),
    (int8_codec._decode, {"DIM": 128, "WIDTH": 128, "GROUPS": 4}, ways("IS_BF16")),
]
OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}


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
    """Print what each kernel multiplies with; raises what the compiler does of one that it does not take."""
    found: dict[str, list[dict[str, Any]]] = {}
    for kernel, constants, choices in LAUNCHES:
        for way in choices:
            code = machine_code(kernel, {**constants, **way}, capability)
            instructions = sorted(set(re.findall(r"mma(?:_async)?\.sync[\w.]*", code)))
            contractions = len(re.findall(r"\bfma\.rn\.f32", code))
            found.setdefault(kernel.fn.__name__, []).append({"products": instructions, "contractions": contractions})
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
