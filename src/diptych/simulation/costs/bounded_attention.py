"""Layers whose cost stops growing with the context: attention to a window, and linear attention.

A layer with a window attends to a limited number of tokens; beyond, a decode step costs the same whatever the context.
A layer with linear attention reads and writes a state of fixed size for each sequence in a decode step; in a prompt it
computes chunks of CHUNK tokens with matrix products (the chunkwise form of the gated delta rule, arXiv:2412.06464,
section 3.3). Its kernels were not measured: they are taken to reach what attention reaches on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.control.step import ScheduledPrefill, chunk_attention
from diptych.simulation.hardware import Hardware
from diptych.simulation.models import LinearAttentionSpec

NS = 1e9
CHUNK = 64  # tokens of a prompt that the kernels compute together
KERNELS_PER_LAYER = 3  # the convolution, the gates, the norm of the output


@dataclass(frozen=True, slots=True)
class AttentionOp:
    """Attention of all layers on one device, in nanoseconds.

    prefill: pair per (query, key) pair, token per computed token, start per token of KV that lies before a chunk.
    decode: max(context * n + row * sequences, context_compute * n) + seq * sequences for n tokens of context.
    """

    pair_ns: float
    token_ns: float
    start_ns: float
    context_ns: float
    context_compute_ns: float
    row_ns: float
    seq_ns: float
    launch_ns: float

    def decode_ns(self, num_seqs: float, context: float) -> float:
        """Nanoseconds for the sequences of a step, without the launch."""
        memory = self.context_ns * context + self.row_ns * num_seqs
        return max(memory, self.context_compute_ns * context) + self.seq_ns * num_seqs


@dataclass(frozen=True, slots=True)
class WindowedAttention:
    """Attention of all layers with a window on one device. tokens: of the window."""

    tokens: int
    op: AttentionOp

    @property
    def slope_ns(self) -> float:
        """Nanoseconds of a decode step for a token of context within the window."""
        return max(self.op.context_ns, self.op.context_compute_ns)

    def decode_ns(self, num_seqs: int, context: float) -> float:
        """Nanoseconds of a decode step: ``num_seqs`` sequences with ``context`` tokens in all."""
        return self.slope_ns * min(context, float(self.tokens * num_seqs)) + self.op.seq_ns * num_seqs

    def prefill_ns(self, chunks: Sequence[ScheduledPrefill], num_tokens: int, groups: int) -> float:
        """Nanoseconds for the chunks of a step, with ``num_tokens`` of them in the fullest of ``groups`` groups."""
        pairs = fullest([window_pairs(chunk.start, chunk.num_tokens, self.tokens) for chunk in chunks], groups)
        starts = fullest([min(chunk.start, self.tokens) for chunk in chunks], groups)
        return self.op.pair_ns * pairs + self.op.token_ns * num_tokens + self.op.start_ns * starts


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """The recurrence of all layers with linear attention on one device, in nanoseconds: for each token of a prompt,
    each chunk of a prompt, each sequence of a decode step, and once a step."""

    token_ns: float
    chunk_ns: float
    seq_ns: float
    launch_ns: float

    @classmethod
    def of(cls, spec: LinearAttentionSpec, hardware: Hardware, tensor_parallel: int) -> "LinearAttention":
        """The heads are dealt out to the tensor-parallel devices."""
        achieved = hardware.achieved
        compute = NS / (hardware.flops["bf16"] * achieved.attention_compute) / tensor_parallel
        io = NS / (hardware.memory_bandwidth * achieved.attention_io) / tensor_parallel
        read = NS / (hardware.memory_bandwidth * achieved.decode_memory) / tensor_parallel
        state = 6 * spec.key_dim * spec.value_dim  # with the queries, with the keys, and what is written
        inside = 2 * CHUNK * (3 * spec.key_dim + 2 * spec.value_dim)
        moved = 2 * (2 * spec.key_width + 3 * spec.value_width)  # bytes of queries, keys, values, gate and output
        return cls(
            token_ns=spec.layers * (spec.value_heads * (state + inside) * compute + moved * io),
            chunk_ns=2 * spec.state_bytes * io,
            seq_ns=2 * spec.state_bytes * read + NS * spec.layers * achieved.decode_seq_s,
            launch_ns=NS
            * spec.layers
            * (achieved.attention_launch_s + KERNELS_PER_LAYER * achieved.elementwise_launch_s),
        )


def fullest(values: Sequence[int], groups: int) -> int:
    """What the fullest of several groups has, when whole values are dealt to them evenly: their share, and never less
    than one of them."""
    return sum(values) if groups == 1 else max(-(-sum(values) // groups), max(values))


def window_pairs(start: int, num_tokens: int, window: int) -> int:
    """(query, key) pairs of a chunk after ``start`` tokens, each query with itself and at most window - 1 before it."""
    inside = max(0, min(num_tokens, window - start))
    return chunk_attention(start, inside) + (num_tokens - inside) * window
