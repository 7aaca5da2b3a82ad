"""The metadata of a GGUF file as the fields that a config.json has, so that each family reads both alike.

Says what it cannot serve by the key of the metadata. Keys of the architecture that have no field here must have a value
that changes nothing, also those that are not known; keys of other namespaces are ignored, as the format asks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diptych.control.errors import ConfigError, UnsupportedModelError
from diptych.runtime.gguf.gguf_families import (
    DEFAULT_THETA,
    EXPERT_KEYS,
    FREQUENCY_FACTORS,
    GGUF_FAMILIES,
    LONG_ROPES,
    PARTLY_ROTATED,
    WINDOWED,
    find_family,
    kv_heads_of_layers,
    rotary_factors,
)
from diptych.runtime.gguf.gguf_model import GgufModel
from diptych.runtime.gguf.gguf_vocabulary import read_vocabulary
from diptych.runtime.models.config_fields import ConfigFields

ARCHITECTURES = {name: family.architecture for name, family in GGUF_FAMILIES.items()}
EMBEDDING = "token_embd.weight"

# Fields of config.json by the key behind "ARCHITECTURE.".
WHOLE_NUMBERS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
}
NUMBERS = {"rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base"}
MAY_BE_ABSENT = ("num_key_value_heads", "head_dim", "sliding_window", "rope_theta")
READ = frozenset(
    {
        *WHOLE_NUMBERS.values(),
        *NUMBERS.values(),
        "attention.value_length",
        "pooling_type",  # where embeddings are made
        "rope.dimension_count",
        "rope.scale_linear",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)
HARMLESS: Mapping[str, str] = {
    "attention.layer_norm_epsilon": "of norms that are not in these architectures",
    "rope.scaling.finetuned": "a label",
    "tensor_data_layout": "the order of rows is that of the architecture",
    "vocab_size": "the tensors say it",
}
# Keys behind "ARCHITECTURE." that have no field, with the values that change nothing; of all others, 0 and "" do.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}


class GgufFields(ConfigFields):
    """The fields of one file; complaints name the keys that they come from."""

    def __init__(self, path: Path, values: Mapping[str, Any], keys: Mapping[str, str]) -> None:
        super().__init__(path, values)
        self.model = path
        self._keys = keys

    def name_of(self, name: str) -> str:
        return self._keys.get(name, name)

    def unsupported(self, name: str, supported: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.path}: {self.name_of(name)} is {self.values.get(name)!r}; supported: {supported}", param="model"
        )


def read_gguf_fields(path: Path) -> GgufFields:
    """What a config.json of the model in this file, or in the parts of which it is the first, would say. Raises
    ConfigError or UnsupportedModelError that name the key."""
    file = GgufModel(path)
    metadata = file.metadata
    architecture = metadata.string("general.architecture")
    if architecture not in ARCHITECTURES:
        raise metadata.unsupported("general.architecture", ", ".join(ARCHITECTURES))
    _check_kind(file, architecture)
    keys = {field: f"{architecture}.{key}" for field, key in (WHOLE_NUMBERS | NUMBERS | EXPERT_KEYS).items()}
    keys["num_local_experts"] = keys["num_experts"]
    values: dict[str, Any] = {
        field: metadata.integer(keys[field]) for field in WHOLE_NUMBERS if field != "num_key_value_heads"
    }
    values["num_key_value_heads"] = _num_kv_heads(file, keys)
    values |= {field: metadata.number(keys[field]) for field in NUMBERS}
    for field, value in values.items():
        if value is None and field not in MAY_BE_ABSENT:
            raise metadata.unsupported(keys[field], "a value")
    if values["num_hidden_layers"] > len(file.tensors):
        raise metadata.unsupported(keys["num_hidden_layers"], f"at most {len(file.tensors)}, the number of tensors")
    values["head_dim"] = _head_dim(file, architecture, values)
    values["num_key_value_heads"] = values["num_key_value_heads"] or values["num_attention_heads"]
    if not values["sliding_window"] or values["sliding_window"] >= values["max_position_embeddings"]:
        values["sliding_window"] = None  # no context is longer
    values["architectures"] = [_class_name(file, architecture, values)]
    values["rope_theta"] = values["rope_theta"] or DEFAULT_THETA
    values["rope_parameters"] = _rope(file, architecture, values["head_dim"])
    vocabulary = read_vocabulary(metadata)
    values |= {
        "vocab_size": _vocab_size(file, len(vocabulary.texts) if vocabulary else 0),
        "eos_token_id": list(vocabulary.stop_token_ids) if vocabulary else [],
        "dtype": _dtype(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }
    find_family(file).complete(file, values)
    return GgufFields(path, {field: value for field, value in values.items() if value is not None}, keys)


def _num_kv_heads(file: GgufModel, keys: Mapping[str, str]) -> int | None:
    """Heads of keys and values of the layers that have any."""
    if not find_family(file).has_empty_layers:
        return file.metadata.integer(keys["num_key_value_heads"])
    return max(kv_heads_of_layers(file, file.metadata.integer(keys["num_hidden_layers"]) or 0))


def _check_kind(file: GgufModel, architecture: str) -> None:
    """Raise for files that are no model, and for what such a model computes and this engine does not."""
    metadata, family = file.metadata, find_family(file)
    if metadata.string("general.type") not in (None, "model"):
        raise metadata.unsupported("general.type", "model")
    for key, value in metadata.values.items():
        prefix, _, name = key.partition(".")
        if prefix != architecture or name in READ | family.read or name in HARMLESS:
            continue
        if (neutral := NEUTRAL.get(name)) is not None:
            if value not in neutral:
                raise metadata.unsupported(key, " or ".join(map(str, neutral)))
        elif any(_entries(value)):
            raise metadata.unsupported(key, "no such key")


def _entries(value: Any) -> Sequence[Any]:
    """Entries of an array; a single value is an array of one."""
    return value if isinstance(value, Sequence | memoryview) and not isinstance(value, str) else (value,)


def _class_name(file: GgufModel, architecture: str, values: Mapping[str, Any]) -> str:
    """The architecture as config.json names it. Mistral is stored as llama; a window tells it from that."""
    if values["sliding_window"] is None:
        return ARCHITECTURES[architecture]
    if architecture not in WINDOWED:
        raise file.metadata.unsupported(f"{architecture}.attention.sliding_window", f"none for {architecture}")
    return "MistralForCausalLM" if architecture == "llama" else ARCHITECTURES[architecture]


def _head_dim(file: GgufModel, architecture: str, values: Mapping[str, Any]) -> int:
    """The dimension of a head. Checks that values are as wide as keys, and that all of a head is rotated."""
    metadata, heads, width = file.metadata, values["num_attention_heads"], values["hidden_size"]
    if heads < 1 or (width % heads and values["head_dim"] is None):
        raise metadata.unsupported(f"{architecture}.attention.head_count", f"a divisor of embedding_length ({width})")
    head_dim: int = values["head_dim"] or width // heads
    for name in ("attention.value_length", *([] if architecture in PARTLY_ROTATED else ["rope.dimension_count"])):
        key = f"{architecture}.{name}"
        if metadata.integer(key) not in (None, head_dim):
            raise metadata.unsupported(key, f"{head_dim}, the length of a head's keys")
    return head_dim


def _rope(file: GgufModel, architecture: str, head_dim: int) -> dict[str, Any]:
    """The fields of ``rope_parameters``, but for the base."""
    metadata, prefix = file.metadata, f"{architecture}.rope"
    factor = metadata.number(f"{prefix}.scaling.factor") or metadata.number(f"{prefix}.scale_linear") or 1.0
    kind = metadata.string(f"{prefix}.scaling.type") or "linear"
    if kind not in ("none", "linear", "yarn", *(["longrope"] if architecture in LONG_ROPES else [])):
        raise metadata.unsupported(f"{prefix}.scaling.type", "none, linear, yarn")
    if not factor > 0:
        raise metadata.unsupported(f"{prefix}.scaling.factor", "a positive number")
    is_scaled = kind == "yarn" or (kind == "linear" and factor != 1.0)
    if FREQUENCY_FACTORS in file.tensors:
        if is_scaled:
            raise metadata.unsupported(f"{prefix}.scaling.type", f"none beside the tensor {FREQUENCY_FACTORS}")
        return {"rope_type": "factors", "factors": rotary_factors(file, FREQUENCY_FACTORS, head_dim // 2)}
    if not is_scaled:
        return {}
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    optional = {
        "original_max_position_embeddings": metadata.integer(f"{prefix}.scaling.original_context_length"),
        "beta_fast": metadata.number(f"{prefix}.scaling.yarn_beta_fast"),
        "beta_slow": metadata.number(f"{prefix}.scaling.yarn_beta_slow"),
    }
    return {"rope_type": kind, "factor": factor} | {name: value for name, value in optional.items() if value}


def _vocab_size(file: GgufModel, num_tokens: int) -> int:
    """The rows of the embedding: at least the tokens of the vocabulary."""
    if EMBEDDING not in file.tensors:
        raise ConfigError(f"{file.path}: tensor {EMBEDDING} is missing", param="model")
    rows = file.tensors[EMBEDDING].shape[0]
    if num_tokens > rows:
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.tokens has {num_tokens} entries; {EMBEDDING} has {rows} rows", param="model"
        )
    return rows


def _dtype(file: GgufModel) -> str:
    """float32 and float16 where all matrices are; bfloat16 for BF16, whole numbers, and mixtures."""
    kinds = {tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(kinds), "bfloat16")
