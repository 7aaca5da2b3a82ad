"""Models as their dimensions: parameters, weight bytes, KV bytes, and how many tokens of KV fit beside the weights.

model_catalogue.py reads them by name. Durations are the business of costs/.
"""

from dataclasses import dataclass

from diptych.control.errors import ConfigError
from diptych.simulation.hardware import Hardware
from diptych.simulation.parallelism import ONE_DEVICE, Parallelism
from diptych.simulation.weight_precision import GPU_WEIGHTS, WeightPrecision

# What an engine takes besides weights and KV: the context of the driver, kernels, captured graphs, and activations.
# vLLM 0.19 with Llama-3.1-8B, 2,048 tokens a step, reports 41,408 KV tokens on an RTX 4090: 1.24 GB are left over.
ENGINE_RESERVE_BYTES = 900 * 10**6
DEFAULT_STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class MoESpec:
    """Mixture of experts: each token visits ``experts_per_token`` of ``experts`` and all ``shared`` ones.

    intermediate: width of one expert. dense_layers: how many layers have an ordinary MLP.
    """

    experts: int
    experts_per_token: int
    intermediate: int
    shared: int = 0
    dense_layers: int = 0


@dataclass(frozen=True, slots=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    The cache holds kv_rank + rope_dim numbers per token and layer, for all heads. q_rank 0: queries are not compressed.
    """

    q_rank: int
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """``layers`` of the model attend to the last ``tokens`` tokens alone, and keep the KV of no more."""

    tokens: int
    layers: int


@dataclass(frozen=True, slots=True)
class LinearAttentionSpec:
    """``layers`` of the model have a state of fixed size in place of KV: Gated DeltaNet (arXiv:2412.06464, section 3)
    as in Qwen3-Next. A head keeps a matrix of key_dim x value_dim numbers in 32 bits, and the convolution before it the
    last ``conv_width`` - 1 inputs in 16."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4

    @property
    def key_width(self) -> int:
        """Key elements of all heads."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Value elements of all heads."""
        return self.value_heads * self.value_dim

    def shapes(self, hidden: int) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of the matrices of one layer: queries, keys, values and the gate; the two gates of the
        recurrence; the output."""
        return (
            (2 * self.key_width + 2 * self.value_width, hidden),
            (2 * self.value_heads, hidden),
            (hidden, self.value_width),
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state, over all layers."""
        convolution = (2 * self.key_width + self.value_width) * (self.conv_width - 1) * 2
        return self.layers * (4 * self.value_heads * self.key_dim * self.value_dim + convolution)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Dimensions of one decoder. Counts below are of numbers (parameters), bytes where the name says so.

    gated_attention: queries have a gate of their own width. checkpoint_bits, expert_bits: of the matrices and of the
    experts in the published checkpoint (0: as the others)."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_context: int
    gated_mlp: bool = True
    tied_embeddings: bool = False
    qkv_bias: bool = False
    linear_bias: bool = False
    norm_bias: bool = False
    qk_norm: bool = False
    learned_positions: int = 0
    gated_attention: bool = False
    checkpoint_bits: int = 16
    expert_bits: float = 0.0
    moe: MoESpec | None = None
    mla: MLASpec | None = None
    window: WindowSpec | None = None
    linear: LinearAttentionSpec | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of {self.name} is {getattr(self, name)}; it must be at least 1", param=name)
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads ({self.heads}) is no multiple of kv_heads ({self.kv_heads})", param="kv_heads")
        if self.full_layers < 0:
            message = f"{self.name} has {self.layers} layers; those with windows and with linear attention are more"
            raise ConfigError(message, param="layers")
        if self.mla and (self.window or self.linear):
            raise ConfigError(f"{self.name} has latent attention beside windows or linear attention", param="mla")

    @property
    def attention_layers(self) -> int:
        """Layers with queries, keys and values, whose KV is kept."""
        return self.layers - (self.linear.layers if self.linear else 0)

    @property
    def full_layers(self) -> int:
        """Layers that attend to the whole context."""
        return self.attention_layers - (self.window.layers if self.window else 0)

    def kv_layers(self, context: int = 0) -> float:
        """Layers that keep all tokens of a sequence of ``context`` tokens; one with a window counts for the share that
        it keeps (0: a sequence within the window)."""
        kept = min(1.0, self.window.tokens / context) if self.window and context else 1.0
        return self.full_layers + (self.window.layers * kept if self.window else 0)

    @property
    def state_bytes(self) -> int:
        """What a sequence keeps whatever its length, over all layers."""
        return self.linear.state_bytes if self.linear else 0

    @property
    def query_width(self) -> int:
        """Width of all queries of one token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers cached per token and layer."""
        if self.mla:
            return self.mla.kv_rank + self.mla.rope_dim
        return 2 * self.kv_heads * self.head_dim

    @property
    def attention_shapes(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of the matrices around the attention of one layer."""
        if self.mla is None:
            queries = (2 if self.gated_attention else 1) * self.query_width
            return (queries + self.kv_width, self.hidden), (self.hidden, self.query_width)
        mla, hidden, heads = self.mla, self.hidden, self.heads
        query = heads * (mla.nope_dim + mla.rope_dim)
        return (
            *(((mla.q_rank, hidden), (query, mla.q_rank)) if mla.q_rank else ((query, hidden),)),
            (self.kv_width, hidden),
            (heads * (mla.nope_dim + mla.value_dim), mla.kv_rank),
            (hidden, heads * mla.value_dim),
        )

    @property
    def attention_parameters(self) -> int:
        """Matrices around the attention of one layer."""
        return sum(outputs * inputs for outputs, inputs in self.attention_shapes)

    @property
    def mlp_parameters(self) -> int:
        """Matrices of the MLP of one dense layer."""
        return (3 if self.gated_mlp else 2) * self.hidden * self.intermediate

    @property
    def expert_parameters(self) -> int:
        """Matrices of one expert (0 without experts)."""
        return (3 if self.gated_mlp else 2) * self.hidden * self.moe.intermediate if self.moe else 0

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.moe.dense_layers if self.moe else 0

    @property
    def head_parameters(self) -> int:
        """The matrix from hidden states to logits."""
        return self.vocab * self.hidden

    def layer_parameters(self, *, active: bool = False) -> int:
        """Matrices of all layers; with ``active``, those that one token visits."""
        total = self.attention_layers * self.attention_parameters
        total += (self.layers - self.num_moe_layers) * self.mlp_parameters
        if self.linear:
            total += self.linear.layers * sum(outputs * inputs for outputs, inputs in self.linear.shapes(self.hidden))
        if self.moe:
            experts = (self.moe.experts_per_token if active else self.moe.experts) + self.moe.shared
            total += self.num_moe_layers * (experts * self.expert_parameters + self.moe.experts * self.hidden)
        return total

    @property
    def layer_outputs(self) -> int:
        """Output channels of the matrices of all layers: each has a scale where weights are quantised by channel."""
        up = 2 if self.gated_mlp else 1
        total = self.attention_layers * sum(outputs for outputs, _ in self.attention_shapes)
        if self.linear:
            total += self.linear.layers * sum(outputs for outputs, _ in self.linear.shapes(self.hidden))
        total += (self.layers - self.num_moe_layers) * (up * self.intermediate + self.hidden)
        if self.moe:
            experts = (self.moe.experts + self.moe.shared) * (up * self.moe.intermediate + self.hidden)
            total += self.num_moe_layers * (experts + self.moe.experts)
        return total

    @property
    def vector_parameters(self) -> int:
        """Norms, biases, positions."""
        norm = self.hidden * (2 if self.norm_bias else 1)
        per_layer = 2 * norm
        if self.qkv_bias or self.linear_bias:
            per_layer += self.query_width + self.kv_width
        if self.linear_bias:
            per_layer += 2 * self.hidden + self.intermediate
        if self.qk_norm:
            per_layer += 2 * self.head_dim
        if self.mla:
            per_layer += self.mla.q_rank + self.mla.kv_rank
        return self.layers * per_layer + norm + self.learned_positions * self.hidden

    @property
    def num_parameters(self) -> int:
        """All parameters; tied embeddings count once."""
        embeddings = self.head_parameters * (1 if self.tied_embeddings else 2)
        return self.layer_parameters() + embeddings + self.vector_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token visits (as papers count them, embeddings included)."""
        return self.num_parameters - self.layer_parameters() + self.layer_parameters(active=True)

    def kv_bytes_per_token(self, dtype_bytes: float = 2, context: int = 0) -> int:
        """KV bytes of one token over all layers: 2 * layers * kv_heads * head_dim * dtype_bytes; with MLA
        layers * (kv_rank + rope_dim) * dtype_bytes. With windows or linear attention: what a sequence of ``context``
        tokens keeps, over its tokens (0: of a sequence within the window, without the state)."""
        state = self.state_bytes / context if context else 0.0
        return round(self.kv_layers(context) * self.kv_width * dtype_bytes + state)

    @property
    def routed_parameters(self) -> int:
        """Matrices of all routed experts."""
        return self.num_moe_layers * self.moe.experts * self.expert_parameters if self.moe else 0

    @property
    def routed_outputs(self) -> int:
        """Output channels of the matrices of all routed experts."""
        if self.moe is None:
            return 0
        up = 2 if self.gated_mlp else 1
        return self.num_moe_layers * self.moe.experts * (up * self.moe.intermediate + self.hidden)

    def routed_bytes(self, weights: WeightPrecision) -> int:
        """Bytes of all routed experts in their format."""
        return weights.expert_format.num_bytes(self.routed_outputs, self.routed_parameters)

    def weight_bytes(self, weights: WeightPrecision = GPU_WEIGHTS[16]) -> int:
        """Bytes of all parameters: matrices of the layers, routed experts, embeddings and lm_head in their formats,
        vectors in 16 bits."""
        outputs, parameters = self.layer_outputs - self.routed_outputs, self.layer_parameters() - self.routed_parameters
        layers = weights.layers.num_bytes(outputs, parameters) + self.routed_bytes(weights)
        num_heads = weights.tied_copies if self.tied_embeddings else 2
        head = num_heads * weights.head.num_bytes(self.vocab, self.head_parameters)
        return layers + head + 2 * self.vector_parameters


def kv_bytes_per_gpu(
    model: ModelSpec, parallelism: Parallelism = ONE_DEVICE, kv_bits: int = 16, context: int = 0
) -> int:
    """KV bytes of one token on each GPU of its group that holds the largest stage. KV heads are split, and copied when
    there are fewer heads than GPUs; the latent of MLA belongs to all heads and lies on every GPU whole. context: of the
    sequence, where it matters (``ModelSpec.kv_bytes_per_token``)."""
    stage = -(-model.layers // parallelism.pipeline) / model.layers
    layers = model.kv_layers(context) * stage
    state = model.state_bytes * stage / parallelism.tensor / context if context else 0.0
    width = model.kv_width
    if model.mla is None:
        width = 2 * -(-model.kv_heads // parallelism.tensor) * model.head_dim
    return round(layers * width * kv_bits / 8 + state)


def device_weight_bytes(model: ModelSpec, parallelism: Parallelism, weights: WeightPrecision) -> int:
    """Bytes of weights on a device of the largest stage.

    Matrices are cut over the tensor-parallel devices, routed experts over all devices of a stage. A stage has its share
    of the layers, rounded up; the first has the embeddings and the last the lm_head, of which one is counted.
    """
    total = model.weight_bytes(weights)
    routed = model.routed_bytes(weights) if parallelism.data > 1 else 0
    if parallelism.pipeline > 1:
        head = weights.head.num_bytes(model.vocab, model.head_parameters)
        num_heads = weights.tied_copies if model.tied_embeddings else 2
        share = -(-model.layers // parallelism.pipeline)
        total = head + (total - num_heads * head) * share // model.layers
        routed = routed * share // model.layers
    return (total - routed) // parallelism.tensor + routed // parallelism.stage_devices


def kv_capacity_tokens(
    model: ModelSpec,
    hardware: Hardware,
    *,
    parallelism: Parallelism = ONE_DEVICE,
    weights: WeightPrecision = GPU_WEIGHTS[16],
    kv_bits: int = 16,
    utilization: float = 0.9,
    step_tokens: int = DEFAULT_STEP_TOKENS,
    context: int = 0,
) -> int:
    """Tokens of KV that fit in all data-parallel groups together: memory * utilization - weights - reserve of a device,
    over the bytes of a token in sequences of ``context`` tokens (see ``ModelSpec.kv_bytes_per_token``).

    The reserve is 0.9 GB for the engine and the activations of a step of ``step_tokens`` tokens (two residual streams,
    the input and the output of the widest MLP, in 16 bits). Raises ConfigError when no token fits.
    """
    if not 0 < utilization <= 1:
        raise ConfigError(f"utilization is {utilization}; it must be in (0, 1]", param="utilization")
    check_parallelism(model, parallelism)
    weight_bytes = device_weight_bytes(model, parallelism, weights)
    usable = int(hardware.memory_bytes * utilization)
    width = 2 * model.hidden + (3 if model.gated_mlp else 2) * model.intermediate // parallelism.tensor
    left = usable - weight_bytes - ENGINE_RESERVE_BYTES - 2 * step_tokens * width
    tokens = left // kv_bytes_per_gpu(model, parallelism, kv_bits, context)
    if tokens < 1:
        raise ConfigError(
            f"{model.name} does not fit on {parallelism.devices} x {hardware.name}: its weights take "
            f"{weight_bytes / 1e9:.1f} GB of each at {weights.name}, {usable / 1e9:.1f} GB are usable "
            f"({utilization:.0%} of {hardware.memory_bytes / 1e9:.1f} GB); {_cure(hardware)}",
            param="tensor_parallel",
        )
    return tokens * parallelism.data


def _cure(hardware: Hardware) -> str:
    return "set quantize" if hardware.kind == "cpu" else "raise tensor_parallel or lower weight_bits"


def check_parallelism(model: ModelSpec, parallelism: Parallelism) -> None:
    """Raise ConfigError unless the model can be split like that."""
    if model.heads % parallelism.tensor:
        raise ConfigError(
            f"tensor_parallel is {parallelism.tensor}; it must divide the {model.heads} heads of {model.name}",
            param="tensor_parallel",
        )
    if parallelism.pipeline > model.layers:
        raise ConfigError(
            f"pipeline_parallel is {parallelism.pipeline}; {model.name} has {model.layers} layers",
            param="pipeline_parallel",
        )
    for name, size in (("expert_parallel", parallelism.expert), ("data_parallel", parallelism.data)):
        if size > 1 and model.moe is None:
            raise ConfigError(
                f"{name} is {size}; {model.name} has no experts (for more copies set replicas)", param=name
            )
    if model.moe and model.moe.experts % parallelism.expert:
        raise ConfigError(
            f"expert_parallel is {parallelism.expert}; it must divide the {model.moe.experts} experts of {model.name}",
            param="expert_parallel",
        )
