"""Models that the package transformers computes: what the engine knows of them, from transformers' own config classes.

Only their attention is the engine's (layers/transformers_layers.py). What would keep more between steps than keys and
values of each layer, or let a token depend on others beyond attention, is refused by the field that says it; what no
field says is found when the model is tried at its start. Imports no torch by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from diptych.control.errors import ConfigError, UnsupportedModelError
from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.model_config import (
    FULL,
    SLIDING,
    AttentionConfig,
    LayerAttention,
    ModelConfig,
    read_common,
    read_heads,
)
from diptych.runtime.required_packages import is_there

EXTRA = "pip install 'diptych[transformers]'"
NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {  # fields whose other values are refused, and what these would be
    "num_kv_shared_layers": ((None, 0), "layers that read the keys and values of others"),
    "kv_lora_rank": ((None, 0), "latent attention"),
    "attention_chunk_size": ((None,), "attention within chunks"),
    "is_encoder_decoder": ((None, False), "an encoder"),
    "use_bidirectional_attention": ((None, False), "attention to later tokens"),
    "quantization_config": ((None,), "quantised weights"),
}
ROPES_BY_LENGTH = ("dynamic", "longrope")  # rotations that change when the longest sequence of a batch grows


@dataclass(frozen=True, slots=True)
class TransformersConfig(ModelConfig):
    """A model of a class of transformers. How its layers attend is known when they do: ``attention`` has their number
    and their heads."""


def read_transformers_config(fields: ConfigFields) -> TransformersConfig:
    """The record of a model directory. Raises ConfigError without the package, UnsupportedModelError for a config that
    no class of it has, and for what the engine does not keep."""
    names = fields.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.unsupported("architectures", "the name of one class of transformers")
    own = _own_config(fields)
    given = {name: value for name in NEUTRAL if (value := getattr(own, name, None)) is not None}
    told = fields.with_values(
        {
            **fields.values,
            **given,
            **_sizes(fields, own),
            "rope_parameters": getattr(own, "rope_parameters", None),
            "layer_types": getattr(own, "layer_types", None),
        }
    )
    for name, (neutral, what) in NEUTRAL.items():
        if told.values.get(name) not in neutral:
            raise told.unsupported(name, f"{neutral[0]}: no {what} with model_impl transformers")
    _check_kinds(told)
    _check_ropes(told)
    heads = read_heads(told)
    note = (
        f"computed by transformers' {names[0]} with torch, its attention replaced: last bits of an answer may depend "
        "on what else is computed"
    )
    layers = (LayerAttention(heads[-1] ** -0.5),) * told.integer("num_hidden_layers")
    common = read_common(told)
    return TransformersConfig(
        **{**common, "notes": (*common["notes"], note)}, attention=AttentionConfig(*heads, layers)
    )


def load_package() -> Any:
    """The package. Raises ConfigError where it is not installed."""
    if not is_there("transformers"):
        raise ConfigError(f"model_impl is transformers, which is not installed: {EXTRA}", param="model_impl")
    return import_module("transformers")


def _own_config(fields: ConfigFields) -> Any:
    """The config of its class, which knows other names of fields and their defaults. Runs no code of the directory."""
    package = load_package()
    try:
        own = package.AutoConfig.from_pretrained(fields.model, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # of any kind: classes check their own fields
        raise UnsupportedModelError(
            f"{fields.path}: transformers {package.__version__} has no config for it ({_first_line(error)})",
            param="model",
        ) from None
    if own.get_text_config() is not own:
        raise fields.unsupported("architectures", "a model of text alone, with model_impl transformers")
    return own


def _sizes(fields: ConfigFields, own: Any) -> dict[str, int | None]:
    """What every class has by these names, whatever its files call it."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    found = {name: getattr(own, name, None) for name in names}
    for name, value in found.items():
        if value is None:
            raise fields.unsupported(name, "a value, with model_impl transformers")
    kv_heads, head_dim = getattr(own, "num_key_value_heads", None), getattr(own, "head_dim", None)
    return found | {"num_key_value_heads": kv_heads or found["num_attention_heads"], "head_dim": head_dim}


def _check_kinds(fields: ConfigFields) -> None:
    kinds = fields.values.get("layer_types")
    if kinds is not None and any(kind not in (FULL, SLIDING) for kind in kinds):
        raise fields.unsupported("layer_types", f"{FULL} and {SLIDING}, with model_impl transformers")


def _check_ropes(fields: ConfigFields) -> None:
    parameters = fields.values.get("rope_parameters") or {}
    for rope in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if rope.get("rope_type") in ROPES_BY_LENGTH:
            raise fields.unsupported("rope_parameters", "rotations that are the same for sequences of every length")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
