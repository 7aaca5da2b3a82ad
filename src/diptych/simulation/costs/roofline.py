"""Step durations from first principles: FLOPs and bytes over what a device was measured to reach.

The arithmetic of the laws in catalogue/hardware.toml, whose entries hold every constant. The mathematical library is
never called: sums, products, quotients and comparisons of floats are the same on every platform.

The roofline: S. Williams, A. Waterman, D. Patterson, CACM 52(4), 2009. A pass through a pipeline takes what its stages
take one after the other, and a hop between them. Data-parallel groups share a step's sequences evenly, a chunk stays in
one group, and the fullest group sets the pace of all.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

from diptych.control.step import SchedulerOutput, chunk_attention
from diptych.simulation.costs.assumptions import assumptions_of, model_assumptions
from diptych.simulation.costs.bounded_attention import AttentionOp, LinearAttention, WindowedAttention
from diptych.simulation.costs.collectives import MessageCost, all_reduce, all_to_all, pipeline_hops
from diptych.simulation.costs.cost_model import UNBOUNDED, DecodeLine
from diptych.simulation.costs.layer_shapes import (
    EXPERT_IMBALANCE,
    MatrixShape,
    expert_shape,
    linear_shapes,
    touched_share,
)
from diptych.simulation.hardware import Hardware
from diptych.simulation.models import ModelSpec, MoESpec, check_parallelism
from diptych.simulation.parallelism import ONE_DEVICE, Parallelism
from diptych.simulation.weight_precision import GPU_WEIGHTS, MatrixFormat, WeightPrecision

NS = 1e9
ACTIVATION_BYTES = 2
KERNELS_PER_LAYER = 4  # two norms, the activation, rotary positions with the write to the cache
KERNELS_PER_MOE_LAYER = 4  # router scores, choice, order by expert, weighted sum
SAMPLER_BYTES = 12  # a logit is read and written as 16 and 32 bits, then read by the choice
CACHE_LIMIT = 65_536


@dataclass(frozen=True, slots=True)
class Kernel:
    """One way to multiply: max(compute * rows, weight + io * rows) + launch nanoseconds for ``rows`` rows."""

    compute_ns: float
    weight_ns: float
    io_ns: float
    launch_ns: float

    def ns(self, rows: float, matrices: float = 1.0) -> float:
        """Nanoseconds for ``rows`` rows, each of which meets one of ``matrices`` matrices that are read."""
        compute, memory = self.compute_ns * rows, self.weight_ns * matrices + self.io_ns * rows
        return (compute if compute > memory else memory) + self.launch_ns


@dataclass(frozen=True, slots=True)
class LinearOp:
    """``count`` products a step of one shape, each by the fastest of the kernels that there are for its format."""

    count: int
    kernels: tuple[Kernel, ...]

    def total_ns(self, rows: float, matrices: float = 1.0) -> float:
        """Nanoseconds of all ``count`` of them."""
        return self.count * min([kernel.ns(rows, matrices) for kernel in self.kernels])


class RooflineCost:
    """CostModel of the devices of one worker.

    weights: products run in 8 bits where their format allows it and the device has a peak for it, else in bf16.
    step_overhead_s: host time of a step in place of the hardware entry's.
    For one number of sequences the decode step is one line, or two where attention changes from memory to compute
    (latent attention with many heads), or where contexts fill the window of some layers.
    """

    def __init__(
        self,
        model: ModelSpec,
        hardware: Hardware,
        parallelism: Parallelism = ONE_DEVICE,
        *,
        weights: WeightPrecision = GPU_WEIGHTS[16],
        kv_bits: int = 16,
        step_overhead_s: float | None = None,
    ) -> None:
        check_parallelism(model, parallelism)
        self.name = f"roofline:{model.name}:{hardware.name}:{parallelism}:{weights.name}:kv{kv_bits}"
        self.assumptions = (*assumptions_of(hardware, parallelism, weights), *model_assumptions(model, weights))
        achieved, tensor = hardware.achieved, parallelism.tensor
        self._groups = parallelism.data
        self._ops = tuple(linear_op(hardware, shape, weights.layers) for shape in linear_shapes(model, tensor))
        self._experts = ExpertOps.of(model, hardware, parallelism, weights.expert_format)
        self._attention = attention_op(model, hardware, tensor, kv_bits, model.full_layers)
        self._windowed = self._linear = None
        if model.window:
            op = attention_op(model, hardware, tensor, kv_bits, model.window.layers)
            self._windowed = WindowedAttention(model.window.tokens, op)
        if model.linear:
            self._linear = LinearAttention.of(model.linear, hardware, tensor)
        self._head = linear_op(hardware, MatrixShape(1, model.hidden, -(-model.vocab // tensor)), weights.head)
        rate = hardware.memory_bandwidth * achieved.elementwise_memory
        self._sampled_ns = NS * SAMPLER_BYTES * model.vocab / rate
        overhead = achieved.step_overhead_s if step_overhead_s is None else step_overhead_s
        kernels = model.layers * KERNELS_PER_LAYER + model.num_moe_layers * KERNELS_PER_MOE_LAYER
        messages = collective_costs(model, hardware, parallelism)
        self._step_ns = NS * (overhead + kernels * achieved.elementwise_launch_s + messages.latency_s)
        self._step_ns += self._attention.launch_ns + (self._windowed.op.launch_ns if self._windowed else 0.0)
        self._step_ns += self._linear.launch_ns if self._linear else 0.0
        self._token_ns = NS * (elementwise_bytes(model, tensor) / rate + messages.byte_s)
        self.tokens_ns = lru_cache(CACHE_LIMIT)(self._price_tokens)
        self._lines = cache(self._decode_lines)

    def decode_line(self, num_seqs: int, context: int) -> DecodeLine:
        line, switch, later = self._lines(num_seqs)
        return line if context < switch else later

    def step_ns(self, output: SchedulerOutput) -> int:
        features = output.features
        num_seqs, context = features.decode_seqs, features.decode_context
        if not output.prefills:
            return self.decode_line(num_seqs, context).step_ns(context)
        groups, attention = self._groups, self._attention
        starts = sum([chunk.start for chunk in output.prefills])
        sampled = sum([chunk.is_last for chunk in output.prefills])
        tokens, pairs = features.prefill_tokens, features.prefill_attention
        if groups > 1:
            tokens = max(-(-tokens // groups), max([chunk.num_tokens for chunk in output.prefills]))
            pairs = max(-(-pairs // groups), max([chunk_attention(c.start, c.num_tokens) for c in output.prefills]))
            starts = max(-(-starts // groups), max([chunk.start for chunk in output.prefills]))
            sampled = -(-sampled // groups)
        mine = -(-num_seqs // groups)
        total = self.tokens_ns(tokens + mine, features.prefill_tokens + num_seqs) + self._sampling_ns(sampled + mine)
        total += attention.pair_ns * pairs + attention.token_ns * tokens + attention.start_ns * starts
        if self._windowed:
            total += self._windowed.prefill_ns(output.prefills, tokens, groups)
        if self._linear:
            total += self._linear.token_ns * tokens + self._linear.chunk_ns * -(-len(output.prefills) // groups)
        if num_seqs:
            total += self._decode_attention_ns(mine, context * mine / num_seqs)
        return max(1, int(total))

    def _decode_lines(self, num_seqs: int) -> tuple[DecodeLine, int, DecodeLine]:
        """(line, context from which the second holds, second line), by the context of all groups."""
        attention = self._attention
        mine = -(-num_seqs // self._groups)
        share = mine / num_seqs
        base = self.tokens_ns(mine, num_seqs) + self._sampling_ns(mine) + attention.seq_ns * mine
        if self._linear:
            base += self._linear.seq_ns * mine
        if self._windowed:
            base += self._windowed.op.seq_ns * mine
            slope, more = (
                share * max(attention.context_ns, attention.context_compute_ns),
                share * self._windowed.slope_ns,
            )
            full = self._windowed.tokens * num_seqs
            bounded = DecodeLine.of(base, slope + more, full + 1)
            return bounded, full + 1, DecodeLine.of(base + more * full, slope)
        io = attention.row_ns * mine
        excess = share * (attention.context_compute_ns - attention.context_ns)
        if excess <= 0:
            line = DecodeLine.of(base + io, share * attention.context_ns)
            return line, UNBOUNDED, line
        switch = int(io / excess) + 1
        bounded = DecodeLine.of(base + io, share * attention.context_ns, switch)
        return bounded, switch, DecodeLine.of(base, share * attention.context_compute_ns)

    def _decode_attention_ns(self, num_seqs: int, context: float) -> float:
        total = self._attention.decode_ns(num_seqs, context)
        if self._windowed:
            total += self._windowed.decode_ns(num_seqs, context)
        return total + (self._linear.seq_ns * num_seqs if self._linear else 0.0)

    def _sampling_ns(self, num_sampled: int) -> float:
        return self._head.total_ns(num_sampled) + self._sampled_ns * num_sampled if num_sampled else 0.0

    def _price_tokens(self, num_tokens: int, of_all: int) -> float:
        """Nanoseconds of all but attention over the context and sampling, for a step of ``num_tokens`` tokens of one
        group and ``of_all`` of all groups."""
        total = self._step_ns + self._token_ns * num_tokens + sum([op.total_ns(num_tokens) for op in self._ops])
        return total + self._experts.total_ns(of_all) if self._experts else total


@dataclass(frozen=True, slots=True)
class ExpertOps:
    """The routed experts on one device: all visits of its group are computed, the experts touched are read.

    imbalance: visits of the busiest group over the mean.
    """

    moe: MoESpec
    ops: tuple[LinearOp, LinearOp]
    experts: int
    groups: int
    imbalance: float

    @classmethod
    def of(
        cls, model: ModelSpec, hardware: Hardware, parallelism: Parallelism, weights: MatrixFormat
    ) -> "ExpertOps | None":
        """None without experts."""
        shape = expert_shape(model, parallelism)
        if model.moe is None or shape is None:
            return None
        up = MatrixShape(shape.count, shape.inputs, (2 if model.gated_mlp else 1) * shape.width)
        down = MatrixShape(shape.count, shape.width, shape.inputs)
        ops = linear_op(hardware, up, weights), linear_op(hardware, down, weights)
        groups = parallelism.expert
        return cls(model.moe, ops, shape.experts, groups, EXPERT_IMBALANCE if groups > 1 else 1.0)

    def total_ns(self, num_tokens: int) -> float:
        """Nanoseconds of all layers, for ``num_tokens`` tokens of the whole worker."""
        visits = num_tokens * self.moe.experts_per_token
        share = min(visits, visits * self.imbalance / self.groups)
        touched = self.experts * touched_share(self.moe, num_tokens)
        return sum([op.total_ns(share, touched) for op in self.ops])


def collective_costs(model: ModelSpec, hardware: Hardware, parallelism: Parallelism) -> MessageCost:
    """What the devices of a worker send to each other in a step: latency, and seconds for each token of a group.

    A layer sums its activations over the tensor-parallel devices after the attention and after the MLP.
    """
    hidden = ACTIVATION_BYTES * model.hidden
    inside = all_reduce(hardware, parallelism.tensor).times(num_sums(model, parallelism), hidden)
    return (
        inside + expert_exchange(model, hardware, parallelism) + pipeline_hops(hardware, parallelism).times(1, hidden)
    )


def num_sums(model: ModelSpec, parallelism: Parallelism) -> int:
    """Sums over the tensor-parallel devices in a step."""
    return 2 * model.layers - (model.num_moe_layers if parallelism.data > 1 else 0)


def expert_exchange(model: ModelSpec, hardware: Hardware, parallelism: Parallelism) -> MessageCost:
    """What groups with their own sequences send to each other for the experts they share, in the place of a sum.

    Where every expert is cut over all devices: a sum over all of them (every device has every token). With whole
    experts on some devices two exchanges: tokens go to the groups of their experts, and come back (Switch transformer,
    arXiv:2101.03961, section 2; DeepSeek-V3, arXiv:2412.19437, section 3.2); the slices of a token's devices are
    gathered.
    """
    if parallelism.data == 1 or model.moe is None:
        return MessageCost()
    layers, everybody, hidden = model.num_moe_layers, parallelism.stage_devices, ACTIVATION_BYTES * model.hidden
    if parallelism.expert == 1:
        return all_reduce(hardware, everybody).times(layers, parallelism.data * hidden)
    copies = min(model.moe.experts_per_token, parallelism.expert) * (everybody // parallelism.expert)
    exchange = all_to_all(hardware, everybody).times(2 * layers, copies * hidden / parallelism.tensor)
    return exchange + all_reduce(hardware, parallelism.tensor).times(layers, hidden / 2)


def attention_op(model: ModelSpec, hardware: Hardware, tensor_parallel: int, kv_bits: int, layers: int) -> AttentionOp:
    """Attention of one device's heads in ``layers`` layers. Grouped heads share a read of the KV; the latent is read
    once for all heads, decode computes in it (queries absorb the up-projection: DeepSeek-V2, section 2.1.3)."""
    achieved, heads = hardware.achieved, model.heads // tensor_parallel
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


def linear_op(hardware: Hardware, shape: MatrixShape, weights: MatrixFormat) -> LinearOp:
    """One matrix product on one device: in the arithmetic of the weights' format where the device has it, or with the
    weights widened to bf16 as they are read (Marlin, arXiv:2408.11743), whichever is faster."""
    form = MatrixFormat() if shape.is_router else weights
    peaks = dict.fromkeys(("bf16", form.peak(hardware)))
    return LinearOp(shape.count, tuple(kernel_of(hardware, shape, form, peak) for peak in peaks))


def kernel_of(hardware: Hardware, shape: MatrixShape, weights: MatrixFormat, peak: str) -> Kernel:
    """A product of one shape in the arithmetic ``peak`` (a key of the device's flops)."""
    achieved, low = hardware.achieved, peak != "bf16"
    memory = hardware.memory_bandwidth * achieved.gemm_memory
    share = achieved.fp8_compute if low else achieved.gemm_compute
    weight_bits = shape.inputs * shape.outputs * weights.bits + shape.outputs * weights.scale_bits
    return Kernel(
        compute_ns=NS * 2 * shape.inputs * shape.outputs / (hardware.flops[peak] * share),
        weight_ns=NS * weight_bits / 8 / memory,
        io_ns=NS * (shape.inputs * (1 if low else ACTIVATION_BYTES) + shape.outputs * ACTIVATION_BYTES) / memory,
        launch_ns=NS * (achieved.fp8_launch_s if low else achieved.gemm_launch_s),
    )
