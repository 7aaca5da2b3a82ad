"""Step durations from first principles: FLOPs and bytes over what a device was measured to reach.

Owns the arithmetic; every constant comes from the hardware entry (the laws are written in catalogue/hardware.toml).
Must never hold a figure of one device or model, and never call the mathematical library: sums, products, quotients and
comparisons of floats are the same on every platform.

The roofline: S. Williams, A. Waterman, D. Patterson, CACM 52(4), 2009. Experts touched by n tokens:
E * (1 - (1 - k/E)^n), each token choosing k of E at random.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

from diptych.control.step import SchedulerOutput
from diptych.simulation.costs.cost_model import UNBOUNDED, DecodeLine
from diptych.simulation.hardware import Hardware
from diptych.simulation.models import ModelSpec, MoESpec, check_tensor_parallel
from diptych.simulation.weight_precision import GPU_WEIGHTS, MatrixFormat, WeightPrecision

NS = 1e9
ACTIVATION_BYTES = 2
KERNELS_PER_LAYER = 4  # two norms, the activation, rotary positions with the write to the cache
KERNELS_PER_MOE_LAYER = 4  # router scores, choice, order by expert, weighted sum
SAMPLER_BYTES = 12  # a logit is read and written as 16 and 32 bits, then read by the choice
CACHE_LIMIT = 65_536


@dataclass(frozen=True, slots=True)
class LinearOp:
    """A linear layer on one device: max(token_compute * n, weight + token_io * n) + launch nanoseconds for n tokens,
    ``count`` times a step."""

    count: int
    token_compute_ns: float
    weight_ns: float
    token_io_ns: float
    launch_ns: float

    def total_ns(self, num_tokens: int) -> float:
        """Nanoseconds of all ``count`` of them."""
        compute = self.token_compute_ns * num_tokens
        memory = self.weight_ns + self.token_io_ns * num_tokens
        return self.count * ((compute if compute > memory else memory) + self.launch_ns)


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


class RooflineCost:
    """CostModel of ``tensor_parallel`` devices that run one worker.

    weights: products run in 8 bits where their format allows it and the device has a peak for it, else in bf16.
    step_overhead_s: host time of a step in place of the hardware entry's.
    For one number of sequences the decode step is one line, or two where attention changes from memory to compute
    (latent attention with many heads).
    """

    def __init__(
        self,
        model: ModelSpec,
        hardware: Hardware,
        tensor_parallel: int = 1,
        *,
        weights: WeightPrecision = GPU_WEIGHTS[16],
        kv_bits: int = 16,
        step_overhead_s: float | None = None,
    ) -> None:
        check_tensor_parallel(model, tensor_parallel)
        self.name = f"roofline:{model.name}:{hardware.name}:tp{tensor_parallel}:{weights.name}:kv{kv_bits}"
        achieved = hardware.achieved
        self._ops = linear_ops(model, hardware, tensor_parallel, weights.layers)
        self._experts = expert_ops(model, hardware, tensor_parallel, weights.layers)
        self._moe = model.moe
        self._attention = attention_op(model, hardware, tensor_parallel, kv_bits)
        rate = hardware.memory_bandwidth * achieved.elementwise_memory
        self._head = _linear(hardware, 1, model.hidden, -(-model.vocab // tensor_parallel), weights.head)
        self._sampled_ns = NS * SAMPLER_BYTES * model.vocab / rate
        overhead = achieved.step_overhead_s if step_overhead_s is None else step_overhead_s
        kernels = model.layers * KERNELS_PER_LAYER + model.num_moe_layers * KERNELS_PER_MOE_LAYER
        reduces = 2 * model.layers
        link = hardware.interconnect
        latency = link.all_reduce_s(tensor_parallel, 0)
        message = link.all_reduce_s(tensor_parallel, ACTIVATION_BYTES * model.hidden) - latency
        self._step_ns = NS * (overhead + kernels * achieved.elementwise_launch_s + reduces * latency)
        self._step_ns += self._attention.launch_ns
        self._token_ns = NS * (elementwise_bytes(model, tensor_parallel) / rate + reduces * message)
        self._tokens_ns = lru_cache(CACHE_LIMIT)(self._price_tokens)
        self._lines = cache(self._decode_lines)

    def decode_line(self, num_seqs: int, context: int) -> DecodeLine:
        """See CostModel."""
        line, switch, later = self._lines(num_seqs)
        return line if context < switch else later

    def step_ns(self, output: SchedulerOutput) -> int:
        """See CostModel."""
        features = output.features
        num_seqs, context = features.decode_seqs, features.decode_context
        if not output.prefills:
            return self.decode_line(num_seqs, context).step_ns(context)
        sampled, starts = num_seqs, 0
        for chunk in output.prefills:
            starts += chunk.start
            sampled += chunk.is_last
        attention = self._attention
        total = self._tokens_ns(features.prefill_tokens + num_seqs) + self._sampling_ns(sampled)
        total += attention.pair_ns * features.prefill_attention + attention.token_ns * features.prefill_tokens
        total += attention.start_ns * starts
        if num_seqs:
            total += self._decode_attention_ns(num_seqs, context)
        return max(1, int(total))

    def _decode_lines(self, num_seqs: int) -> tuple[DecodeLine, int, DecodeLine]:
        """(line, context from which the second holds, second line)."""
        attention = self._attention
        base = self._tokens_ns(num_seqs) + self._sampling_ns(num_seqs) + attention.seq_ns * num_seqs
        io = attention.row_ns * num_seqs
        excess = attention.context_compute_ns - attention.context_ns
        if excess <= 0:
            line = DecodeLine.of(base + io, attention.context_ns)
            return line, UNBOUNDED, line
        switch = int(io / excess) + 1
        bounded = DecodeLine.of(base + io, attention.context_ns, switch)
        return bounded, switch, DecodeLine.of(base, attention.context_compute_ns)

    def _decode_attention_ns(self, num_seqs: int, context: int) -> float:
        attention = self._attention
        memory = attention.context_ns * context + attention.row_ns * num_seqs
        return max(memory, attention.context_compute_ns * context) + attention.seq_ns * num_seqs

    def _sampling_ns(self, num_sampled: int) -> float:
        return self._head.total_ns(num_sampled) + self._sampled_ns * num_sampled if num_sampled else 0.0

    def _price_tokens(self, num_tokens: int) -> float:
        """Everything but attention over the context and the sampling, for a step of so many tokens."""
        total = self._step_ns + self._token_ns * num_tokens + sum(op.total_ns(num_tokens) for op in self._ops)
        if self._moe:
            total += sum(expert_ns(op, self._moe, num_tokens) for op in self._experts)
        return total


def linear_ops(
    model: ModelSpec, hardware: Hardware, tensor_parallel: int, weights: MatrixFormat
) -> tuple[LinearOp, ...]:
    """The dense linear layers of a model: around the attention, and the MLPs (or the shared experts and the router)."""
    tp, hidden = tensor_parallel, model.hidden
    shapes: list[tuple[int, int, int, MatrixFormat]] = []  # (times a step, inputs, outputs, format)
    if model.mla is None:
        kv = 2 * -(-model.kv_heads // tp) * model.head_dim
        shapes.append((model.layers, hidden, model.query_width // tp + kv, weights))
        shapes.append((model.layers, model.query_width // tp, hidden, weights))
    else:
        mla, heads = model.mla, model.heads // tp
        query = heads * (mla.nope_dim + mla.rope_dim)
        shapes.append((model.layers, hidden, mla.q_rank + model.kv_width, weights))
        shapes.append((model.layers, mla.q_rank or hidden, query, weights))
        shapes.append((model.layers, mla.kv_rank, heads * (mla.nope_dim + mla.value_dim), weights))
        shapes.append((model.layers, heads * mla.value_dim, hidden, weights))
    up = 2 if model.gated_mlp else 1
    widths = [(model.layers - model.num_moe_layers, model.intermediate)]
    if model.moe:
        shapes.append((model.num_moe_layers, hidden, model.moe.experts, MatrixFormat()))
        widths.append((model.num_moe_layers, model.moe.shared * model.moe.intermediate))
    for count, width in widths:
        if count and width:
            shapes.append((count, hidden, up * width // tp, weights))
            shapes.append((count, width // tp, hidden, weights))
    return tuple(_linear(hardware, *shape) for shape in shapes)


def expert_ops(
    model: ModelSpec, hardware: Hardware, tensor_parallel: int, weights: MatrixFormat
) -> tuple[LinearOp, ...]:
    """The two linear layers of one expert, whose width is split over the devices (see ``expert_ns``)."""
    if model.moe is None:
        return ()
    width, count = max(1, model.moe.intermediate // tensor_parallel), model.num_moe_layers
    up = 2 if model.gated_mlp else 1
    return (
        _linear(hardware, count, model.hidden, up * width, weights),
        _linear(hardware, count, width, model.hidden, weights),
    )


def expert_ns(op: LinearOp, moe: MoESpec, num_tokens: int) -> float:
    """Nanoseconds of a grouped linear layer: all visits are computed, the weights of the experts touched are read."""
    visits = num_tokens * moe.experts_per_token
    touched = moe.experts * (1.0 - _power(1.0 - moe.experts_per_token / moe.experts, num_tokens))
    memory = op.weight_ns * touched + op.token_io_ns * visits
    return op.count * (max(op.token_compute_ns * visits, memory) + op.launch_ns)


def attention_op(model: ModelSpec, hardware: Hardware, tensor_parallel: int, kv_bits: int) -> AttentionOp:
    """Attention of one device's heads. Grouped heads share a read of the KV; the latent is read once for all heads,
    decode computes in it (queries absorb the up-projection: DeepSeek-V2, section 2.1.3)."""
    achieved, layers, heads = hardware.achieved, model.layers, model.heads // tensor_parallel
    compute = NS * layers / (hardware.flops["bf16"] * achieved.attention_compute)
    io = NS * layers / (hardware.memory_bandwidth * achieved.attention_io)
    read = NS * layers / (hardware.memory_bandwidth * achieved.decode_memory)
    if model.mla is None:
        dim, kv_heads = model.head_dim, -(-model.kv_heads // tensor_parallel)
        pair_flop = context_flop = 4 * heads * dim
        kv_width, row = 2 * kv_heads * dim, 0
        query_width = 2 * heads * dim
    else:
        mla = model.mla
        pair_flop = 2 * heads * (mla.nope_dim + mla.rope_dim + mla.value_dim)
        context_flop = 2 * heads * (2 * mla.kv_rank + mla.rope_dim)
        kv_width, row = model.kv_width, heads * (2 * mla.kv_rank + mla.rope_dim) * ACTIVATION_BYTES
        query_width = heads * (mla.nope_dim + mla.rope_dim + mla.value_dim)
    kv_bytes = kv_width * kv_bits / 8
    return AttentionOp(
        pair_ns=pair_flop * compute,
        token_ns=(query_width + kv_width) * ACTIVATION_BYTES * io,
        start_ns=kv_bytes * io,
        context_ns=kv_bytes * read,
        context_compute_ns=context_flop * compute,
        row_ns=row * read,
        seq_ns=NS * layers * achieved.decode_seq_s,
        launch_ns=NS * layers * achieved.attention_launch_s,
    )


def elementwise_bytes(model: ModelSpec, tensor_parallel: int) -> float:
    """Bytes that norms, activations and rotary positions move per token on one device."""
    norms = 2 * 4 * model.hidden  # read and write the input and the residual
    width = model.intermediate
    if model.moe:
        moe_width = (model.moe.experts_per_token + model.moe.shared) * model.moe.intermediate
        dense = model.layers - model.num_moe_layers
        width = (dense * model.intermediate + model.num_moe_layers * moe_width) // model.layers
    activation = (3 if model.gated_mlp else 2) * width / tensor_parallel
    rotary = 2 * (model.query_width + model.kv_width) / tensor_parallel
    return ACTIVATION_BYTES * model.layers * (norms + activation + rotary)


def _linear(hardware: Hardware, count: int, inputs: int, outputs: int, weights: MatrixFormat) -> LinearOp:
    achieved, peak = hardware.achieved, weights.peak(hardware)
    low = peak != "bf16"
    share = achieved.fp8_compute if low else achieved.gemm_compute
    memory = hardware.memory_bandwidth * achieved.gemm_memory
    input_bytes = 1 if low else ACTIVATION_BYTES
    return LinearOp(
        count=count,
        token_compute_ns=NS * 2 * inputs * outputs / (hardware.flops[peak] * share),
        weight_ns=NS * (inputs * outputs * weights.bits + outputs * weights.scale_bits) / 8 / memory,
        token_io_ns=NS * (inputs * input_bytes + outputs * ACTIVATION_BYTES) / memory,
        launch_ns=NS * (achieved.fp8_launch_s if low else achieved.gemm_launch_s),
    )


def _power(base: float, exponent: int) -> float:
    """base ** exponent by squaring: the same bits on every platform, unlike the mathematical library."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
