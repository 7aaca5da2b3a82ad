"""Reads a checkpoint's config.json and generation_config.json into one frozen record.

Owns: which architectures and options exist, and the words in which anything else is refused. Never imports torch or
transformers, and never looks at weights.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.control.errors import ConfigError, UnsupportedModelError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
DTYPES = ("bfloat16", "float32", "float16")
QWEN3_HEAD_DIM = 128  # what a Qwen3 config means when it does not say
MISTRAL_WINDOW = 4096  # likewise for the sliding window of Mistral


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. original_max_positions: the context length before scaling (llama3, yarn)."""

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


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Attention of all layers; ``windows`` holds each layer's sliding window (None: the whole context)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool
    windows: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the runtime needs to know of a checkpoint besides its tensors.

    dtype: as the checkpoint says (None: it does not). eos_token_ids: from generation_config.json, else config.json.
    """

    path: Path
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    max_position_embeddings: int
    norm_eps: float
    attention: AttentionConfig
    rope: RopeConfig
    mlp_bias: bool
    tie_word_embeddings: bool
    dtype: str | None
    eos_token_ids: tuple[int, ...]


class _Fields:
    """Typed access to one JSON object; every complaint names the file, the field and the value."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self._prefix = prefix

    def unsupported(self, name: str, supported: str) -> UnsupportedModelError:
        value = self.values.get(name)
        return UnsupportedModelError(
            f"{self.path}: {self._prefix}{name} is {value!r}; supported: {supported}", param=name
        )

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.unsupported(name, "a whole number of at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.unsupported(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.unsupported(name, "true or false")
        return value


def read_model_config(path: str | Path) -> ModelConfig:
    """Read the config of the checkpoint directory ``path``.

    Raises ConfigError when the file is missing or not JSON, UnsupportedModelError when it asks for something that
    this engine does not have.
    """
    directory = Path(path)
    fields = _Fields(directory / "config.json", _read_json(directory / "config.json"))
    architecture = _architecture(fields)
    _refuse_what_we_lack(fields)
    hidden_size = fields.integer("hidden_size")
    max_positions = fields.integer("max_position_embeddings")
    num_layers = fields.integer("num_hidden_layers")
    return ModelConfig(
        path=directory,
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        max_position_embeddings=max_positions,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        attention=_attention(fields, architecture, hidden_size, num_layers),
        rope=_rope(fields, max_positions),
        mlp_bias=fields.flag("mlp_bias") if architecture == "LlamaForCausalLM" else False,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        dtype=_dtype(fields),
        eos_token_ids=_eos_token_ids(directory, fields),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a model directory holds one", param="model") from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})", param="model") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds {type(values).__name__}, not an object", param="model")
    return values


def _architecture(fields: _Fields) -> str:
    names = fields.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise fields.unsupported("architectures", "one of " + ", ".join(ARCHITECTURES))
    return str(names[0])


def _refuse_what_we_lack(fields: _Fields) -> None:
    if fields.values.get("hidden_act", "silu") != "silu":
        raise fields.unsupported("hidden_act", "silu")
    if fields.values.get("quantization_config"):
        raise fields.unsupported("quantization_config", "none: weights in bfloat16, float16 or float32")
    if fields.values.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise fields.unsupported("partial_rotary_factor", "1.0")


def _attention(fields: _Fields, architecture: str, hidden_size: int, num_layers: int) -> AttentionConfig:
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.unsupported("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    if architecture == "Qwen3ForCausalLM":
        head_dim = fields.integer("head_dim", QWEN3_HEAD_DIM)
    elif fields.values.get("head_dim") is not None:
        head_dim = fields.integer("head_dim")
    elif hidden_size % num_heads:
        raise fields.unsupported("num_attention_heads", f"a divisor of hidden_size ({hidden_size}), or head_dim given")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise fields.unsupported("head_dim", "an even number")
    has_option = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        bias=fields.flag("attention_bias") if has_option else architecture == "Qwen2ForCausalLM",
        windows=_windows(fields, architecture, num_layers),
    )


def _windows(fields: _Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window. A window that no context can exceed counts as none."""
    nothing = (None,) * num_layers
    if architecture == "LlamaForCausalLM":
        return nothing
    if architecture == "MistralForCausalLM":
        if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
            return nothing
        window = fields.integer("sliding_window", MISTRAL_WINDOW)
        return nothing if window >= fields.integer("max_position_embeddings") else (window,) * num_layers
    if not fields.flag("use_sliding_window") or fields.values.get("sliding_window", 4096) is None:
        return nothing
    window = fields.integer("sliding_window", 4096)
    if window >= fields.integer("max_position_embeddings"):
        return nothing
    kinds = fields.values.get("layer_types")
    if kinds is None:
        first = fields.values.get("max_window_layers", 28)
        if not isinstance(first, int) or first < 0:
            raise fields.unsupported("max_window_layers", "a whole number of at least 0")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(kinds) != num_layers or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise fields.unsupported("layer_types", f"{num_layers} times full_attention or sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(fields: _Fields, max_positions: int) -> RopeConfig:
    """From ``rope_parameters`` (newer) or ``rope_theta`` with ``rope_scaling`` (older)."""
    name = "rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling"
    values = fields.values.get(name) or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise fields.unsupported(name, "one flat object for all layers")
    scaling = _Fields(fields.path, values, f"{name}.")
    key = "rope_type" if "rope_type" in values else "type"
    kind = values.get(key, "default")
    if kind not in ROPE_KINDS:
        raise scaling.unsupported(key, ", ".join(ROPE_KINDS))
    if values.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise scaling.unsupported("partial_rotary_factor", "1.0")
    theta = scaling.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=scaling.number("factor"))
    original = scaling.integer(
        "original_max_position_embeddings", fields.integer("original_max_position_embeddings", max_positions)
    )
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=scaling.number("factor"),
            original_max_positions=original,
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
        )
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=scaling.number("factor", max_positions / original),
        original_max_positions=original,
        attention_factor=scaling.number("attention_factor") if values.get("attention_factor") else None,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", True),
        mscale=float(values.get("mscale") or 0.0),
        mscale_all_dim=float(values.get("mscale_all_dim") or 0.0),
    )


def _dtype(fields: _Fields) -> str | None:
    name = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    value = fields.values.get(name)
    if value is None:
        return None
    if value not in DTYPES:
        raise fields.unsupported(name, ", ".join(DTYPES))
    return str(value)


def _eos_token_ids(directory: Path, fields: _Fields) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    sources = [fields]
    if path.exists():
        sources.insert(0, _Fields(path, _read_json(path)))
    for source in sources:
        value = source.values.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
            raise source.unsupported("eos_token_id", "a token id or a list of them")
        if ids:
            return tuple(ids)
    return ()
