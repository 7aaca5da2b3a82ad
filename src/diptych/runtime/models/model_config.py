"""A checkpoint's config.json as a frozen record: what the engine knows of any model.

Each family reads its own fields with ``ConfigFields`` and may add fields to ``ModelConfig``; registry.py finds the
family of a directory. Nothing here imports torch: the front end reads configs to size its memory.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.runtime.dtypes import DTYPES
from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.quantization.quantization_config import QuantizationConfig, read_quantization

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "factors")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. original_max_positions: the context length before scaling (llama3, yarn). factors: what each
    frequency is divided by (factors)."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends. Scores are s = scale * (q . k), with a softcap softcap * tanh(s / softcap). With a window
    of w, a token sees itself and the w - 1 tokens before it; None: all of them."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The heads that all layers have, and how each layer attends. head_dim: values per head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerAttention, ...]

    @property
    def query_width(self) -> int:
        """All query heads side by side."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the engine knows of a model besides its tensors; families add what only their layers need.

    path: the directory or GGUF file. dtype: as the checkpoint says (None: it does not). eos_token_ids: from
    generation_config.json, else config.json. quantization: how the weights of a directory are quantised (None: not).
    notes: what people should know of the model, though it is served.
    """

    path: Path
    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    attention: AttentionConfig
    dtype: str | None
    eos_token_ids: tuple[int, ...]
    quantization: QuantizationConfig | None
    notes: tuple[str, ...]

    @property
    def num_layers(self) -> int:
        """Transformer layers, each with K and V of its own."""
        return len(self.attention.layers)


def read_common(fields: ConfigFields) -> dict[str, Any]:
    """The arguments of ModelConfig that every family reads alike: all but ``attention``."""
    return {
        "path": fields.model,
        "architecture": fields.values["architectures"][0],
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "dtype": _dtype(fields),
        "eos_token_ids": _eos_token_ids(fields),
        "quantization": read_quantization(fields),
        "notes": _notes(fields),
    }


def read_heads(
    fields: ConfigFields, default_head_dim: int | None = None, default_kv_heads: int | None = None
) -> tuple[int, int, int]:
    """(num_heads, num_kv_heads, head_dim). default_head_dim None: hidden_size divided by the number of heads.
    default_kv_heads: where there is no such field (None: num_heads, as where it is null)."""
    num_heads = fields.integer("num_attention_heads")
    is_absent = "num_key_value_heads" not in fields.values
    num_kv_heads = fields.integer("num_key_value_heads", (is_absent and default_kv_heads) or num_heads)
    if num_heads % num_kv_heads:
        raise fields.unsupported("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    hidden_size = fields.integer("hidden_size")
    if fields.values.get("head_dim") is None and default_head_dim is None and hidden_size % num_heads:
        raise fields.unsupported("num_attention_heads", f"a divisor of hidden_size ({hidden_size}), or head_dim given")
    head_dim = fields.integer("head_dim", default_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise fields.unsupported("head_dim", "an even number")
    return num_heads, num_kv_heads, head_dim


def read_rope(fields: ConfigFields) -> RopeConfig:
    """The RoPE settings from ``rope_parameters`` (newer), or ``rope_theta`` with ``rope_scaling`` (older). Where a file
    has both objects, transformers takes the older one alone, and so does this."""
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    scaling = fields.nested(name)
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise fields.unsupported(name, "one flat object for all layers")
    key = "rope_type" if "rope_type" in scaling.values else "type"
    scaling.require(key, *ROPE_KINDS)
    kind = scaling.values.get(key, "default")
    theta = scaling.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=scaling.number("factor"))
    if kind == "factors":
        return RopeConfig(theta=theta, kind=kind, factors=scaling.positive_numbers("factors"))
    original = _original_max_positions(fields, scaling)
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if low >= high:
            raise scaling.unsupported("high_freq_factor", f"a number above low_freq_factor ({low})")
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=scaling.number("factor"),
            original_max_positions=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return _read_yarn(scaling, theta, original, fields.integer("max_position_embeddings"))


def _read_yarn(scaling: ConfigFields, theta: float, original: int, max_positions: int) -> RopeConfig:
    is_given = scaling.values.get("attention_factor") is not None
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=scaling.number("factor", max_positions / original),
        original_max_positions=original,
        attention_factor=scaling.number("attention_factor") if is_given else None,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", default="truncate" not in scaling.values),  # null is false to transformers
        mscale=scaling.number("mscale") if scaling.values.get("mscale") else 0.0,
        mscale_all_dim=scaling.number("mscale_all_dim") if scaling.values.get("mscale_all_dim") else 0.0,
    )


def _original_max_positions(fields: ConfigFields, scaling: ConfigFields) -> int:
    """The context length before scaling. Beside the object, it counts for more than within it, as in transformers."""
    name = "original_max_position_embeddings"
    if fields.values.get(name) is not None:
        return fields.integer(name)
    return scaling.integer(name, fields.integer("max_position_embeddings"))


def _notes(fields: ConfigFields) -> tuple[str, ...]:
    """Code that the directory brings along is never run; where it is the model's, users may count on it."""
    code = fields.nested("auto_map").values
    own = [str(value) for name, value in code.items() if str(name).startswith("AutoModel") and value]
    if not own:
        return ()
    architecture = fields.values["architectures"][0]
    return (f"auto_map names code of its own ({own[0]}), which is not run: the model is {architecture}",)


def _dtype(fields: ConfigFields) -> str | None:
    name = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    value = fields.values.get(name)
    if value is None:
        return None
    if value not in DTYPES:
        raise fields.unsupported(name, ", ".join(DTYPES))
    return str(value)


def _eos_token_ids(fields: ConfigFields) -> tuple[int, ...]:
    path = fields.model / "generation_config.json"
    for source in (ConfigFields.of_file(path), fields) if path.exists() else (fields,):
        value = source.values.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
            raise source.unsupported("eos_token_id", "a token id or a list of them")
        if ids:
            return tuple(ids)
    return ()
