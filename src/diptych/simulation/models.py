"""Models as their dimensions: parameters, weight bytes, KV bytes, and how many tokens of KV fit beside the weights.

Owns the reading of catalogue/models.toml and of Hugging Face config.json files. Must never guess a dimension: what a
file does not say is an error. Durations are the business of costs/.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from diptych.control.errors import ConfigError, UnsupportedModelError
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

    intermediate: width of one expert. dense_layers: the first layers, which have an ordinary MLP.
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


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Dimensions of one decoder. Counts below are of numbers (parameters), bytes where the name says so."""

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
    moe: MoESpec | None = None
    mla: MLASpec | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of {self.name} is {getattr(self, name)}; it must be at least 1", param=name)
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads ({self.heads}) is no multiple of kv_heads ({self.kv_heads})", param="kv_heads")

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
            return (self.query_width + self.kv_width, self.hidden), (self.hidden, self.query_width)
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
        total = self.layers * self.attention_parameters + (self.layers - self.num_moe_layers) * self.mlp_parameters
        if self.moe:
            experts = (self.moe.experts_per_token if active else self.moe.experts) + self.moe.shared
            total += self.num_moe_layers * (experts * self.expert_parameters + self.moe.experts * self.hidden)
        return total

    @property
    def layer_outputs(self) -> int:
        """Output channels of the matrices of all layers: each has a scale where weights are quantised by channel."""
        up = 2 if self.gated_mlp else 1
        total = self.layers * sum(outputs for outputs, _ in self.attention_shapes)
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

    def kv_bytes_per_token(self, dtype_bytes: float = 2) -> int:
        """KV bytes of one token over all layers: 2 * layers * kv_heads * head_dim * dtype_bytes; with MLA
        layers * (kv_rank + rope_dim) * dtype_bytes."""
        return round(self.layers * self.kv_width * dtype_bytes)

    def weight_bytes(self, weights: WeightPrecision = GPU_WEIGHTS[16]) -> int:
        """Bytes of all parameters: matrices of the layers, embeddings and lm_head in their formats, vectors in 16
        bits."""
        layers = weights.layers.num_bytes(self.layer_outputs, self.layer_parameters())
        num_heads = weights.tied_copies if self.tied_embeddings else 2
        head = num_heads * weights.head.num_bytes(self.vocab, self.head_parameters)
        return layers + head + 2 * self.vector_parameters


def kv_bytes_per_gpu(model: ModelSpec, parallelism: Parallelism = ONE_DEVICE, kv_bits: int = 16) -> int:
    """KV bytes of one token on each GPU of its group that holds the largest stage. KV heads are split, and copied when
    there are fewer heads than GPUs; the latent of MLA belongs to all heads and lies on every GPU whole."""
    layers = -(-model.layers // parallelism.pipeline)
    width = model.kv_width
    if model.mla is None:
        width = 2 * -(-model.kv_heads // parallelism.tensor) * model.head_dim
    return round(layers * width * kv_bits / 8)


def device_weight_bytes(model: ModelSpec, parallelism: Parallelism, weights: WeightPrecision) -> int:
    """Bytes of weights on a device of the largest stage.

    Matrices are cut over the tensor-parallel devices, routed experts over all devices of a stage. A stage has its share
    of the layers, rounded up; the first has the embeddings and the last the lm_head, of which one is counted.
    """
    total = model.weight_bytes(weights)
    routed = 0
    if model.moe and parallelism.data > 1:
        matrices = model.num_moe_layers * model.moe.experts
        outputs = matrices * ((2 if model.gated_mlp else 1) * model.moe.intermediate + model.hidden)
        routed = weights.layers.num_bytes(outputs, matrices * model.expert_parameters)
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
) -> int:
    """Tokens of KV that fit in all data-parallel groups together: memory * utilization - weights - reserve of a device,
    over the bytes of a token.

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
    tokens = left // kv_bytes_per_gpu(model, parallelism, kv_bits)
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


def load_model(name: str, *, extra: Path | None = None) -> ModelSpec:
    """A model of the catalogue by name or alias (case does not matter), or of a Hugging Face directory or config.json.

    ``extra``: a file in the format of catalogue/models.toml whose entries come first. Raises ConfigError for a name
    that is in neither.
    """
    entries = dict(_catalogue())
    if extra is not None:
        entries.update(_parse(extra.read_text(), str(extra)))
    spec = entries.get(name.lower())
    if spec is not None:
        return spec
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" and path.is_file():
        return model_from_config(json.loads(path.read_text()), path.parent.name)
    known = ", ".join(sorted({entry.name for entry in entries.values()}))
    raise ConfigError(f"model {name!r} is neither in the catalogue nor a config.json; known: {known}", param="model")


def model_names() -> tuple[str, ...]:
    """Names of the catalogue, without aliases, in its order."""
    return tuple(dict.fromkeys(spec.name for spec in _catalogue().values()))


@cache
def _catalogue() -> Mapping[str, ModelSpec]:
    text = (resources.files("diptych.simulation.catalogue") / "models.toml").read_text()
    return _parse(text, "models.toml")


def _parse(text: str, source: str) -> dict[str, ModelSpec]:
    """Name and aliases, in lower case, to the model."""
    known = {field.name for field in fields(ModelSpec)}
    entries: dict[str, ModelSpec] = {}
    for name, raw in tomllib.loads(text).items():
        values = dict(raw)
        aliases = values.pop("aliases", [])
        unknown = set(values) - known
        if unknown:
            raise ConfigError(f"{source}: {name} has unknown fields {sorted(unknown)}", param="model")
        values.setdefault("head_dim", values.get("hidden", 0) // max(1, values.get("heads", 1)))
        try:
            values["moe"] = MoESpec(**values["moe"]) if "moe" in values else None
            values["mla"] = MLASpec(**values["mla"]) if "mla" in values else None
            spec = ModelSpec(name=name, **values)
        except TypeError as error:
            raise ConfigError(f"{source}: {name}: {error}", param="model") from error
        for key in (name, *aliases):
            entries[key.lower()] = spec
    return entries


_PLAIN = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "yi")


def model_from_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """The model that a Hugging Face config.json describes. Raises UnsupportedModelError for other families."""
    kind = config.get("model_type", "")
    if kind not in _PLAIN:
        raise UnsupportedModelError(f"model_type is {kind!r}; known: {', '.join(_PLAIN)}", param="model")
    missing = [
        key
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        if key not in config
    ]
    if missing:
        raise ConfigError(f"config.json of {name} lacks {', '.join(missing)}", param="model")
    heads = config["num_attention_heads"]
    return ModelSpec(
        name=name,
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        max_context=config.get("max_position_embeddings", 2048),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
        qk_norm=kind.startswith("qwen3"),
        moe=_moe(config),
        mla=_mla(config),
    )


def _moe(config: Mapping[str, Any]) -> MoESpec | None:
    experts = config.get("n_routed_experts") or config.get("num_local_experts") or config.get("num_experts")
    if not experts:
        return None
    return MoESpec(
        experts=experts,
        experts_per_token=config["num_experts_per_tok"],
        intermediate=config.get("moe_intermediate_size") or config["intermediate_size"],
        shared=config.get("n_shared_experts") or 0,
        dense_layers=config.get("first_k_dense_replace", 0),
    )


def _mla(config: Mapping[str, Any]) -> MLASpec | None:
    if not config.get("kv_lora_rank"):
        return None
    return MLASpec(
        q_rank=config.get("q_lora_rank") or 0,
        kv_rank=config["kv_lora_rank"],
        rope_dim=config["qk_rope_head_dim"],
        nope_dim=config["qk_nope_head_dim"],
        value_dim=config["v_head_dim"],
    )
