"""A checkpoint's config.json as a frozen record: what the engine knows of any model.

Each family reads its own fields with ``ConfigFields`` and may add fields to ``ModelConfig``; registry.py finds the
family of a directory. Nothing here imports torch: the front end reads configs to size its memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from diptych.runtime.dtypes import DTYPES
from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.field_table import check_rope
from diptych.runtime.models.wrappers import TextPart
from diptych.runtime.quantization.quantization_config import (
    Fp8Quantization,
    QuantizationConfig,
    read_quantization,
)

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "factors")  # those of every family


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. original_max_positions: the context length before scaling (llama3, yarn, longrope, and
    llama_4_scaling_beta). factors: what each frequency is divided by (factors; longrope once ``for_context`` has
    chosen). short_factors, long_factors: likewise, for a longest context of up to original_max_positions and for one
    beyond it (longrope); short_attention_factor, long_attention_factor: likewise, of a family whose attention_factor
    depends on it. rotary: how many values of a head are rotated (None: all). llama_4_scaling_beta: see
    rope.query_scale."""

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
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    short_attention_factor: float | None = None
    long_attention_factor: float | None = None
    rotary: int | None = None
    llama_4_scaling_beta: float = 0.0

    def rotary_of(self, head_dim: int) -> int:
        """How many values of a head are rotated."""
        return self.rotary or head_dim

    def for_context(self, num_positions: int) -> "RopeConfig":
        """What a worker computes with whose longest context this is. LongRoPE has two sets of factors; a worker takes
        one of them for all lengths, so that the KV of a token is the same however long its sequence becomes."""
        if self.kind != "longrope":
            return self
        is_long = num_positions > self.original_max_positions
        chosen = self.long_factors if is_long else self.short_factors
        own = self.long_attention_factor if is_long else self.short_attention_factor
        return replace(
            self,
            factors=chosen,
            attention_factor=self.attention_factor if own is None else own,
            short_factors=(),
            long_factors=(),
            short_attention_factor=None,
            long_attention_factor=None,
        )


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends. Scores are s = scale * (q . k), with a softcap softcap * tanh(s / softcap). With a window
    of w, a token sees itself and the w - 1 tokens before it; None: all of them. has_sinks: each head has one more
    score, the same for all tokens, which takes its share of the softmax and has no value (Xiao et al. 2023).
    holds_inputs: this is a layer of the cache alone: what lies in place of K and V is what a convolution over the
    window reads."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    holds_inputs: bool = False


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The heads that all layers have, and how each layer of the cache attends. head_dim: values per head."""

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
    notes: what people should know of the model, though it is served. text_part: which tensors of a directory are those
    of this model (None: all of them).
    """

    path: Path
    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    attention: AttentionConfig
    dtype: str | None
    eos_token_ids: tuple[int, ...]
    quantization: QuantizationConfig | Fp8Quantization | None
    notes: tuple[str, ...]
    text_part: TextPart | None

    @property
    def num_layers(self) -> int:
        """Transformer layers."""
        return len(self.attention.layers)

    def for_context(self, num_positions: int) -> Self:
        """What a worker computes whose longest context this is, where that makes a difference."""
        return self


def read_common(fields: ConfigFields) -> dict[str, Any]:
    """The arguments of ModelConfig that every family reads alike: all but ``attention``."""
    quantization = read_quantization(fields)
    return {
        "path": fields.model,
        "architecture": fields.values["architectures"][0],
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "dtype": _dtype(fields),
        "eos_token_ids": _eos_token_ids(fields),
        "quantization": quantization,
        "notes": (*_notes(fields), *(quantization.notes if isinstance(quantization, Fp8Quantization) else ())),
        "text_part": None,
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


# kinds of layers, in layer_types
FULL, SLIDING, CONVOLUTION = "full_attention", "sliding_attention", "conv"


def read_rope(
    fields: ConfigFields, *, kinds: Sequence[str] = ROPE_KINDS, theta: float = 10_000.0, is_partial: bool = False
) -> RopeConfig:
    """From ``rope_parameters`` (newer), or ``rope_theta`` with ``rope_scaling`` (older). Where a file has both objects,
    transformers takes the older one alone, and so does this. kinds: that the family has. theta: where the file does not
    say it. is_partial: whether the family may rotate a part of each head."""
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    scaling = fields.nested(name)
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise fields.unsupported(name, "one flat object for all layers")
    theta = scaling.number("rope_theta", fields.number("rope_theta", theta))
    return _read_rope(fields, scaling, kinds, theta, _rotary(fields, scaling) if is_partial else None)


def read_ropes_by_kind(fields: ConfigFields, thetas: Mapping[str, float]) -> dict[str, RopeConfig]:
    """One for each kind of layer, from the objects in ``rope_parameters`` (newer), or ``rope_theta`` with
    ``rope_scaling``, which is that of layers with full attention alone (older). thetas: by kind, where the file does
    not say them."""
    parameters, older = fields.nested("rope_parameters"), fields.nested("rope_scaling")
    if any(not isinstance(value, dict | None) for value in parameters.values.values()):
        raise fields.unsupported("rope_parameters", f"an object with one object for each of {', '.join(thetas)}")
    found = {}
    for kind, default in thetas.items():
        scaling = parameters.nested(kind)
        if kind == FULL and older.values:
            scaling = older.with_values({"rope_type": "default", **scaling.values, **older.values})
        check_rope(scaling)
        theta = scaling.number("rope_theta", default)
        alone = fields.with_values({"max_position_embeddings": fields.values["max_position_embeddings"]})
        found[kind] = _read_rope(alone, scaling, ROPE_KINDS, theta, None)
    return found


def read_layer_kinds(fields: ConfigFields, default: Sequence[str]) -> tuple[str, ...]:
    """Each layer's kind, FULL or SLIDING. default: where ``layer_types`` is absent or null."""
    kinds, num_layers = fields.values.get("layer_types"), fields.integer("num_hidden_layers")
    if kinds is None:
        return tuple(default)
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise fields.unsupported("layer_types", f"num_hidden_layers ({num_layers}) times {FULL} or {SLIDING}")
    return tuple(kinds)


def read_windows(fields: ConfigFields, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """Each layer's window, by its kind: that of SLIDING layers is ``sliding_window``, and none where no context is
    longer."""
    if SLIDING not in kinds:
        return (None,) * len(kinds)
    window = fields.integer("sliding_window")
    seen = None if window >= fields.integer("max_position_embeddings") else window
    return tuple(seen if kind == SLIDING else None for kind in kinds)


def _read_rope(
    fields: ConfigFields, scaling: ConfigFields, kinds: Sequence[str], theta: float, rotary: int | None
) -> RopeConfig:
    key = "rope_type" if "rope_type" in scaling.values else "type"
    scaling.require(key, *kinds)
    kind = scaling.values.get(key, "default")
    if kind == "default":
        return RopeConfig(theta=theta, rotary=rotary)
    if kind == "linear":
        return RopeConfig(theta=theta, rotary=rotary, kind=kind, factor=scaling.number("factor"))
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
            rotary=rotary,
        )
    max_positions = fields.integer("max_position_embeddings")
    is_given = scaling.values.get("attention_factor") is not None
    extended = RopeConfig(
        theta=theta,
        kind=kind,
        factor=scaling.number("factor", max_positions / original),
        original_max_positions=original,
        attention_factor=scaling.number("attention_factor") if is_given else None,
        rotary=rotary,
    )
    return _with_yarn(extended, scaling) if kind == "yarn" else _with_longrope(extended, scaling)


def _rotary(fields: ConfigFields, scaling: ConfigFields) -> int | None:
    """How many values of a head are rotated; None: all of them."""
    source = scaling if scaling.values.get("partial_rotary_factor") is not None else fields
    factor = source.number("partial_rotary_factor", 1.0)
    if factor == 1.0:
        return None
    head_dim = read_heads(fields)[-1]
    rotary = int(head_dim * factor)
    if not 0 < rotary <= head_dim or rotary % 2:
        raise source.unsupported("partial_rotary_factor", f"an even number of the {head_dim} values of a head")
    return rotary


def _with_longrope(rope: RopeConfig, scaling: ConfigFields) -> RopeConfig:
    factors = scaling.positive_numbers("short_factor"), scaling.positive_numbers("long_factor")
    return replace(rope, short_factors=factors[0], long_factors=factors[1])


def _with_yarn(rope: RopeConfig, scaling: ConfigFields) -> RopeConfig:
    return replace(
        rope,
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
