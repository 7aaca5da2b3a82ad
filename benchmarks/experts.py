"""Layers of experts at the shapes of published mixtures: decode steps as a share of what reading their weights takes,
and prompts as a share of a dense product's rate.

    python benchmarks/experts.py [--shape qwen3-30b-a3b] [--layers 4] [--threads 2] [--json experts.json]

Weights are random, the experts of a layer copies of one in memory of their own; what a step reads is counted by the
choices of its routers. A plain read of memory and a dense product of the same format take turns with the steps, and the
best of several repetitions counts. Time is wall time: the machine should be idle.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ceilings import PlainRead, measure_ceilings, plain_read
from common import report

from diptych.runtime.attention import make_attention
from diptych.runtime.attention.input_batch import InputBatch
from diptych.runtime.kernels.instruction_set import TORCH, choose
from diptych.runtime.kernels.native import load_native
from diptych.runtime.layers.decoder_layers import DecoderLayers
from diptych.runtime.layers.forward_pass import ForwardPass
from diptych.runtime.layers.native_step import native_step
from diptych.runtime.layers.parts import Attention, GatedMlp, MixtureOfExperts, RmsNorm, RopeAndCache
from diptych.runtime.layers.rope import RotaryTables
from diptych.runtime.models.experts import ClampedSwish, ExpertRouting
from diptych.runtime.models.model_config import AttentionConfig, LayerAttention, RopeConfig
from diptych.runtime.ops import make_ops
from diptych.runtime.ops.ops import Activation, Linear, Ops
from diptych.runtime.weights.quantized_weight import QuantizedSource, QuantizedWeight
from diptych.runtime.weights.weight_format import WeightFormat
from diptych.runtime.weights.weight_memory import PrivateMemory

CPU, BF16, BLOCK_SIZE = torch.device("cpu"), torch.bfloat16, 32
CONTEXT = 64  # tokens of each stream before its step
ROUTED_ROWS = 64  # 8 of them an expert, where 8 of 64 are taken


@dataclass(frozen=True, slots=True)
class Shape:
    """One published mixture. bits: of its weights, in groups of 32."""

    hidden: int
    heads: tuple[int, int, int]  # queries, keys, dim
    routing: ExpertRouting
    inner: int
    activation: Activation
    bits: int

    @property
    def format(self) -> WeightFormat:
        """The format of all linear layers but the router."""
        return WeightFormat(self.bits, 32)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return self.format.num_bytes(2 * self.inner, self.hidden) + self.format.num_bytes(self.hidden, self.inner)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the rest of a layer."""
        queries, keys, dim = self.heads
        rows = (queries + 2 * keys) * dim
        attention = self.format.num_bytes(rows, self.hidden) + self.format.num_bytes(self.hidden, queries * dim)
        return attention + 2 * self.routing.num_experts * self.hidden

    @property
    def multiplications(self) -> int:
        """For one token in one layer, without attention over the cache."""
        queries, keys, dim = self.heads
        attention = (queries + 2 * keys) * dim * self.hidden + queries * dim * self.hidden
        return attention + self.routing.num_experts * self.hidden + self.routing.top_k * 3 * self.inner * self.hidden


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, (32, 4, 128), ExpertRouting(128, 8, is_normalized=True), 768, "silu", 4),
    "gpt-oss-20b": Shape(2880, (64, 8, 64), ExpertRouting(32, 4, "softmax_of_top"), 2880, ClampedSwish(7.0, 1.702), 8),
}


class Layer:
    """One layer with random weights; see DecoderLayer."""

    attention_gate = attention_norm = output_norm = convolution = None

    def __init__(self, shape: Shape, ops: Ops, memory: PrivateMemory, rotary: RotaryTables) -> None:
        queries, keys, dim = shape.heads
        self._memory, self._ops, self._format = memory, ops, shape.format
        self.caches = range(1)
        self.input_norm = self.mlp_norm = RmsNorm(ops, torch.ones(shape.hidden, dtype=BF16), 1e-6)
        self.qkv = ops.pack_quantized(self._source((queries + 2 * keys) * dim, shape.hidden), None, BF16, memory)
        self.o_proj = ops.pack_quantized(self._source(shape.hidden, queries * dim), None, BF16, memory)
        self.rope = RopeAndCache(ops, rotary.table(RopeConfig()), None, None)
        self.attention = Attention(LayerAttention(dim**-0.5))
        gate_up, down = self._source(2 * shape.inner, shape.hidden), self._source(shape.hidden, shape.inner)
        experts = [
            GatedMlp(
                ops.pack_quantized_gate_up(gate_up, None, BF16, memory, shape.activation),
                ops.pack_quantized(down, None, BF16, memory),
            )
            for _ in range(shape.routing.num_experts)
        ]
        router = torch.randn(shape.routing.num_experts, shape.hidden).to(BF16)
        self.mlp = MixtureOfExperts(
            ops, shape.routing, ops.pack_router(router, None, memory), ops.join_experts(experts)
        )

    def _source(self, rows: int, columns: int) -> QuantizedSource:
        groups = self._format.num_groups(columns)
        values = torch.randint(0, 1 << self._format.bits, (rows, columns), dtype=torch.uint8)
        weight = QuantizedWeight(self._format, values, torch.full((rows, groups), 0.3 / (1 << self._format.bits) / 8))
        return QuantizedSource(self._format, rows, columns, lambda: weight)


class Stack:
    """Some layers and a cache for them."""

    def __init__(self, shape: Shape, num_layers: int, instruction_set: str) -> None:
        self.shape, self.num_layers = shape, num_layers
        queries, keys, dim = shape.heads
        config = AttentionConfig(queries, keys, dim, (LayerAttention(dim**-0.5),) * num_layers)
        self.attention = make_attention(config, BLOCK_SIZE, BF16, CPU, instruction_set)
        ops, memory, rotary = make_ops(BF16, instruction_set), PrivateMemory(CPU), RotaryTables(dim, 4096, CPU)
        layers = [Layer(shape, ops, memory, rotary) for _ in range(num_layers)]
        norm = RmsNorm(ops, torch.ones(shape.hidden, dtype=BF16), 1e-6)
        self.layers = DecoderLayers(ops, layers, norm, 1.0, native_step(layers, norm, self.attention, 1.0))
        self.caches = [self.attention.allocate(32 * 4 + 65) for _ in layers]
        self.ops = ops

    def pass_of(self, num_seqs: int, new: int, before: int) -> ForwardPass:
        """A step of ``num_seqs`` sequences, each with ``new`` tokens behind ``before``."""
        return ForwardPass(batch_of(num_seqs, new, before), self.caches, self.attention)

    def run(self, residual: torch.Tensor, step: ForwardPass) -> None:
        """One step."""
        self.layers(residual.clone(), step)

    def touched(self, residual: torch.Tensor, step: ForwardPass) -> int:
        """Experts that a step visits, over all layers."""
        found: list[int] = []
        route, native = self.ops.route, self.layers.native_step

        def counted(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            chosen, weights = route(*arguments)
            found.append(len(chosen.unique()))
            return chosen, weights

        self.ops.route, self.layers.native_step = counted, None  # type: ignore[method-assign]
        try:
            self.run(residual, step)
        finally:
            self.ops.route, self.layers.native_step = route, native  # type: ignore[method-assign]
        return sum(found)


def batch_of(num_seqs: int, new: int, before: int) -> InputBatch:
    """A batch whose sequences have blocks of their own."""
    blocks = -(-(before + new) // BLOCK_SIZE)
    tables = torch.arange(num_seqs * blocks, dtype=torch.int32).view(num_seqs, blocks)
    positions = torch.arange(before, before + new).repeat(num_seqs)
    slots = (
        (tables.long().repeat_interleave(new, 0)[torch.arange(num_seqs * new), positions // BLOCK_SIZE]) * BLOCK_SIZE
    )
    return InputBatch(
        token_ids=torch.zeros(num_seqs * new, dtype=torch.int64),
        positions=positions,
        slot_mappings=(slots + positions % BLOCK_SIZE,),
        query_start=torch.arange(0, num_seqs * new + 1, new, dtype=torch.int32),
        context_lens=torch.full((num_seqs,), before + new, dtype=torch.int32),
        block_tables=(tables,),
        sample_rows=torch.arange(num_seqs * new),  # all: else the last layer computes one of a prompt
        num_decodes=num_seqs if new == 1 else 0,
        max_query_len=new,
        max_context_len=before + new,
    )


def in_turns(calls: Sequence[Callable[[], Any]], repetitions: int) -> list[float]:
    """Seconds of each call, the best of several."""
    best = [float("inf")] * len(calls)
    for _ in range(repetitions + 1):
        for index, call in enumerate(calls):
            began = time.perf_counter()
            call()
            best[index] = min(best[index], time.perf_counter() - began)
    return best


def decode_row(stack: Stack, num_seqs: int, read: PlainRead, repetitions: int) -> dict[str, Any]:
    """A decode step of ``num_seqs`` streams, beside a plain read."""
    shape, step = stack.shape, stack.pass_of(num_seqs, 1, CONTEXT)
    residual = torch.randn(num_seqs, shape.hidden).to(BF16)
    touched = stack.touched(residual, step)
    size = touched * shape.expert_bytes + stack.num_layers * shape.dense_bytes
    seconds, read_s = in_turns([lambda: stack.run(residual, step), read], repetitions)
    rate, read_rate = size / seconds / 1e9, read.num_bytes / read_s / 1e9
    return {
        "what": f"decode, {num_seqs} streams",
        "ms": round(seconds * 1e3, 2),
        "experts": touched,
        "rate": f"{rate:.1f} of {read_rate:.1f} GB/s",
        "share": round(rate / read_rate, 3),
    }


def dense_layer(stack: Stack) -> Linear:
    """A dense layer as wide as the experts of a token together."""
    shape = stack.shape
    rows = 2 * shape.inner * shape.routing.top_k
    values = torch.randint(0, 1 << shape.bits, (rows, shape.hidden), dtype=torch.uint8)
    scales = torch.full((rows, shape.format.num_groups(shape.hidden)), 0.01)
    weight = QuantizedWeight(shape.format, values, scales)
    return stack.ops.pack_quantized(QuantizedSource(shape.format, rows, shape.hidden, lambda: weight), None, BF16)


def prefill_row(stack: Stack, dense: Linear, num_tokens: int, repetitions: int) -> dict[str, Any]:
    """A prompt, beside a dense product of as many rows."""
    shape, step = stack.shape, stack.pass_of(1, num_tokens, 0)
    residual = torch.randn(num_tokens, shape.hidden).to(BF16)
    seconds, dense_s = in_turns([lambda: stack.run(residual, step), lambda: dense(residual)], repetitions)
    rate = 2 * shape.multiplications * num_tokens * stack.num_layers / seconds
    dense_rate = 2 * dense.in_features * dense.out_features * num_tokens / dense_s
    return {
        "what": f"prompt, {num_tokens} tokens",
        "ms": round(seconds * 1e3, 2),
        "experts": stack.touched(residual, step),
        "rate": f"{rate / 1e9:.0f} of {dense_rate / 1e9:.0f} GFLOP/s",
        "share": round(rate / dense_rate, 3),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default="auto", help="instruction set of the native kernels")
    parser.add_argument("--repetitions", type=int, default=8)
    parser.add_argument("--json")
    options = parser.parse_args()
    instruction_set = choose(BF16, options.isa)
    if load_native() is None or instruction_set == TORCH:
        raise SystemExit("the native bf16 kernels are not built, or this processor lacks AVX2")
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    limits, read = measure_ceilings(4), plain_read()
    if read is None:
        raise SystemExit("a plain read of memory needs a C++ compiler")
    with torch.inference_mode():
        stack = Stack(SHAPES[options.shape], options.layers, instruction_set)
        rows = [decode_row(stack, count, read, options.repetitions) for count in (1, 8, 32)]
        dense = dense_layer(stack)
        rows += [prefill_row(stack, dense, count, options.repetitions) for count in (ROUTED_ROWS, 2048)]
    report(
        f"{options.shape}, {options.layers} layers, {instruction_set}", rows, options.json,
        ceilings=limits, threads=options.threads, layers=options.layers,
    )  # fmt: skip


if __name__ == "__main__":
    main()
