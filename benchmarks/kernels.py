"""The native kernels beside oneDNN, torch's attention and what the machine can do.

    python benchmarks/kernels.py [--threads 1] [--isa avx2] [--json kernels.json]

Candidates take turns and the best of several repetitions counts. With one thread (the default) time is the thread's own
processor time, so that a busy machine disturbs little; with more it is wall time on a machine that should be idle.
"gflops" counts the multiplications that are asked for, "gbps" the bytes of weights or of KV that must be read. What a
decode reads (weights, KV) is rotated through more memory than the caches hold.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from ceilings import best_of, measure_ceilings
from common import report

from diptych.runtime.attention import make_attention
from diptych.runtime.attention.input_batch import InputBatch
from diptych.runtime.attention.layout import write_cpu
from diptych.runtime.kernels.instruction_set import TORCH, choose
from diptych.runtime.kernels.native import NativeKernels, load_native
from diptych.runtime.models.model_config import AttentionConfig, LayerAttention
from diptych.runtime.ops.native_linear import NativeLinear, pack_native, pack_native_quantized
from diptych.runtime.weights.quantized_weight import QuantizedSource, quantize
from diptych.runtime.weights.weight_format import WeightFormat
from diptych.runtime.weights.weight_memory import PrivateMemory

CPU, BF16 = torch.device("cpu"), torch.bfloat16
COLD_BYTES = 150e6
BLOCK_SIZE = 32
LINEARS = (  # what, out_features, in_features, gated
    ("qwen2.5-0.5b qkv", 1152, 896, False),
    ("qwen2.5-0.5b gate_up", 9728, 896, True),
    ("qwen2.5-0.5b down", 896, 4864, False),
    ("smollm2-135m gate_up", 3072, 576, True),
    ("smollm2-135m lm_head", 49152, 576, False),
)
ROWS = (1, 4, 8, 16, 32, 128, 512, 2048)
HEADS = ((14, 2, 64), (9, 3, 64), (16, 8, 128))


class OneDnnLinear:
    """A linear layer through oneDNN with weights that it has packed for itself."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
        return y


def quantized_layers(
    kernels: NativeKernels, weight: torch.Tensor, weight_format: WeightFormat, gated: bool
) -> tuple[list[NativeLinear], int]:
    """(copies of one layer that are cold, bytes of each)."""
    source = QuantizedSource(weight_format, *weight.shape, lambda: numbers)
    numbers = quantize(weight, weight_format)
    size = weight_format.num_bytes(*weight.shape)
    copies = max(1, int(COLD_BYTES / size))
    memory = PrivateMemory(CPU)
    return [pack_native_quantized(kernels, source, None, gated, memory) for _ in range(copies)], size


def quantized_rows(kernels: NativeKernels, repetitions: int) -> list[dict[str, Any]]:
    """Linear layers in bf16 beside those whose weights have 8 and 4 bits; rows of x are quantised in the call."""
    rows = []
    for what, outputs, inputs, gated in LINEARS:
        weight = torch.randn(outputs, inputs)
        size = outputs * inputs * 2
        memory, copies = PrivateMemory(CPU), max(1, int(COLD_BYTES / size))
        layers = {
            "bf16": ([pack_native(kernels, weight.to(BF16), None, gated, memory) for _ in range(copies)], size),
            "int8": quantized_layers(kernels, weight, WeightFormat(8), gated),
            "int4": quantized_layers(kernels, weight, WeightFormat(4, 32), gated),
        }
        for num_rows in ROWS if outputs < 40_000 else ROWS[:5]:
            x = torch.randn(num_rows, inputs).to(BF16)
            flop = 2 * num_rows * outputs * inputs
            count = max(1, min(copies, int(0.03 / (flop / 2e11 + size / 1e10))))

            def call(layers: list[NativeLinear], x: torch.Tensor = x, count: int = count) -> None:
                for layer in layers[:count]:
                    layer(x)

            calls = [partial(call, copied) for copied, _ in layers.values()]
            seconds = [value / count for value in best_of(calls, repetitions)]
            row: dict[str, Any] = {"what": what, "rows": num_rows}
            for (name, (_, num_bytes)), value in zip(layers.items(), seconds, strict=True):
                row[f"{name} gflops"] = round(flop / value / 1e9, 1)
                row[f"{name} gbps"] = round(num_bytes / value / 1e9, 1)
            rows.append(
                row
                | {"int8 / bf16": round(seconds[0] / seconds[1], 2), "int4 / bf16": round(seconds[0] / seconds[2], 2)}
            )
    return rows


def linear_rows(kernels: NativeKernels, repetitions: int) -> list[dict[str, Any]]:
    """Ours and oneDNN's prepacked linear layers in bf16, silu(gate) * up included where it belongs."""
    rows = []
    for what, outputs, inputs, gated in LINEARS:
        weight = torch.randn(outputs, inputs).to(BF16)
        size = outputs * inputs * 2
        copies = max(1, int(COLD_BYTES / size))
        ours = [pack_native(kernels, weight, None, gated, PrivateMemory(CPU)) for _ in range(copies)]
        theirs = [OneDnnLinear(weight) for _ in range(copies)]
        for num_rows in ROWS if outputs < 40_000 else ROWS[:5]:
            x = torch.randn(num_rows, inputs).to(BF16)
            flop = 2 * num_rows * outputs * inputs
            count = max(1, min(copies, int(0.03 / (flop / 2e11 + size / 1e10))))

            def native(layers: list[NativeLinear] = ours, x: torch.Tensor = x, count: int = count) -> None:
                for layer in layers[:count]:
                    layer(x)

            def onednn(
                layers: list[OneDnnLinear] = theirs, x: torch.Tensor = x, count: int = count, gated: bool = gated
            ) -> None:
                for layer in layers[:count]:
                    y = layer(x)
                    if gated:
                        gate, up = y.chunk(2, dim=-1)
                        F.silu(gate) * up

            seconds = [value / count for value in best_of([native, onednn], repetitions)]
            row: dict[str, Any] = {"what": what, "rows": num_rows}
            for name, value in zip(("native", "onednn"), seconds, strict=True):
                row[f"{name} gflops"] = round(flop / value / 1e9, 1)
                row[f"{name} gbps"] = round(size / value / 1e9, 1)
            row["ratio"] = round(seconds[1] / seconds[0], 2)
            rows.append(row)
    return rows


def make_batch(before: int, new: int, num_seqs: int, block_size: int) -> InputBatch:
    """``num_seqs`` sequences of ``new`` tokens after ``before``, in blocks at random places."""
    context = before + new
    blocks = -(-context // block_size)
    order = torch.randperm(num_seqs * blocks, dtype=torch.int32).view(num_seqs, blocks)
    tokens = torch.zeros(num_seqs * new, dtype=torch.int64)
    starts = torch.arange(0, num_seqs * new + 1, new, dtype=torch.int32)
    contexts = torch.full((num_seqs,), context, dtype=torch.int32)
    decodes = num_seqs if new == 1 else 0
    return InputBatch(tokens, tokens, (tokens,), starts, contexts, (order,), tokens[:0], decodes, new, context)


def attention_calls(
    shape: tuple[int, int, int], before: int, new: int, num_seqs: int, instruction_set: str, kv_dtype: str = "auto"
) -> tuple[Callable[[], None], int, int]:
    """(call, layers that it computes, bytes of KV of each): paged attention of one layer of ``shape`` (heads, KV heads,
    head_dim) for ``num_seqs`` sequences of ``new`` tokens after ``before``."""
    heads, kv_heads, dim = shape
    how = LayerAttention(dim**-0.5)
    config = AttentionConfig(heads, kv_heads, dim, (how,))
    backend = make_attention(config, BLOCK_SIZE, BF16, CPU, instruction_set, kv_dtype=kv_dtype)
    batch = make_batch(before, new, num_seqs, BLOCK_SIZE)
    blocks = batch.block_tables[0].numel()
    size = blocks * backend.geometry.block_bytes
    caches = [backend.allocate(blocks) for _ in range(1 if new > 1 else max(1, int(COLD_BYTES / size)))]
    k, v = torch.randn(2, blocks * BLOCK_SIZE, kv_heads, dim).to(BF16)
    for k_cache, v_cache in caches:
        write_cpu(k, v, k_cache, v_cache, torch.arange(blocks * BLOCK_SIZE))
    q, plan = torch.randn(num_seqs * new, heads, dim).to(BF16), backend.plan(batch, how)

    def call() -> None:
        for k_cache, v_cache in caches:
            backend.run(q, k_cache, v_cache, plan)

    return call, len(caches), size


def attention_rows(instruction_set: str, repetitions: int) -> list[dict[str, Any]]:
    """Paged attention: prefill against torch's SDPA over contiguous tensors, decode against reading the KV once."""
    rows = []
    for shape in HEADS:
        heads, kv_heads, dim = shape
        for before, new, num_seqs in (
            (0, 512, 1),
            (0, 2048, 1),
            (6144, 2048, 1),
            (511, 1, 1),
            (4095, 1, 1),
            (511, 1, 32),
        ):
            native, layers, size = attention_calls(shape, before, new, num_seqs, instruction_set)
            flop = 4 * heads * dim * num_seqs * sum(range(before + 1, before + new + 1))
            calls: list[Callable[[], Any]] = [native]
            if new > 1 and before == 0:
                k, v = torch.randn(2, 1, kv_heads, new, dim).to(BF16)
                query = torch.randn(1, heads, new, dim).to(BF16)
                calls.append(
                    lambda q=query, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                )
            seconds = best_of(calls, repetitions)
            ours = seconds[0] / layers
            rows.append(
                {
                    "what": "prefill" if new > 1 else "decode",
                    "heads": f"{heads}/{kv_heads}x{dim}",
                    "sequences": num_seqs,
                    "context": before + new,
                    "new": new,
                    "native gflops": round(flop / ours / 1e9, 1),
                    "native gbps": None if new > 1 else round(size / ours / 1e9, 1),
                    "sdpa gflops": round(flop / seconds[1] / 1e9, 1) if len(seconds) > 1 else None,
                }
            )
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", default="auto", help="instruction set of the native kernels")
    parser.add_argument("--repetitions", type=int, default=4)
    parser.add_argument("--json")
    options = parser.parse_args()
    library = load_native()
    instruction_set = choose(BF16, options.isa)
    if library is None or instruction_set == TORCH:
        raise SystemExit("the native bf16 kernels are not built, or this processor lacks AVX2")
    torch.set_num_threads(options.threads)
    limits = measure_ceilings(options.repetitions)
    print(f"ceilings of {options.threads} threads:", limits, flush=True)
    kernels = library.kernels(instruction_set, BF16)
    linears = linear_rows(kernels, options.repetitions)
    report(f"linear layers, bf16, {instruction_set}", linears)
    quantized = quantized_rows(kernels, options.repetitions)
    report(f"linear layers with weights of 8 and 4 bits, {instruction_set}", quantized)
    attention = attention_rows(instruction_set, options.repetitions)
    how = "thread CPU time" if options.threads == 1 else "wall time"
    report(
        f"attention, bf16, {instruction_set}", attention, options.json,
        linear=linears, quantized=quantized, ceilings=limits, threads=options.threads, time=how,
    )  # fmt: skip


if __name__ == "__main__":
    main()
