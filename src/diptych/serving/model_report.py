"""What a checkpoint is, what a server of it can do, and why it is refused: from its configs and the heads of its files.

Makes the checks that the start of a server makes, one by one, and goes on where one fails. Reads no weight and imports
no torch.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeVar

from diptych.control.errors import ConfigError, DiptychError
from diptych.runtime.gguf.gguf_file import GgufFile, is_gguf
from diptych.runtime.kv_cache.checkpoint_geometry import read_kv_geometry
from diptych.runtime.models.config_fields import ConfigFields
from diptych.runtime.models.decoder import DecoderConfig
from diptych.runtime.models.model_config import ModelConfig
from diptych.runtime.models.model_place import name_of
from diptych.runtime.models.registry import read_model_config
from diptych.runtime.required_packages import require_packages
from diptych.runtime.weights.checkpoint import Checkpoint, open_checkpoint
from diptych.runtime.weights.safetensors_directory import SafetensorsDirectory
from diptych.runtime.weights.stored_tensor import StoredTensor
from diptych.runtime.weights.weight_bytes import loaded_weight_bytes
from diptych.runtime.weights.weight_format import QUANTIZATIONS
from diptych.serving.answers.grammar.grammar_checker import is_installed
from diptych.serving.answers.response.response_template import FieldKind
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.embedding_recipe import read_embedding_recipe
from diptych.serving.start_checks import GPU, most_memory

GIB = 2**30
BLOCK_SIZE = 32  # tokens; the bytes of a token are the same in every block
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pth")
NO_GRAMMARS = "llguidance is not installed: pip install 'diptych[structured]'"
IDS_ONLY = "there is no tokenizer.json: prompts and answers are token ids"

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Ability:
    """Whether a server of a model does something; detail: how, or why not."""

    is_served: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One checkpoint. What cannot be known (None, "") is what its files do not say, or say in a way that is refused.

    precision: how most of its weights are stored. size_bytes: of the files of weights. loaded_bytes: of the weights
    once a worker on a CPU has loaded them; by_quantize: the same with each --quantize that makes them smaller.
    kv_token_bytes: of the KV cache, for each token that all layers keep. refusals: why no server can have it.
    obstacles: why none can have it on this machine as it is. template: what the chat template takes.
    """

    name: str
    path: str
    format: Literal["safetensors", "GGUF"]
    architecture: str = ""
    num_parameters: int | None = None
    precision: str = ""
    size_bytes: int = 0
    loaded_bytes: int | None = None
    by_quantize: Mapping[str, int] = field(default_factory=dict)
    kv_token_bytes: int | None = None
    context_length: int | None = None
    vocab_size: int | None = None
    num_layers: int | None = None
    abilities: Mapping[str, Ability] = field(default_factory=dict)
    template: Mapping[str, Any] | None = None
    refusals: tuple[str, ...] = ()
    obstacles: tuple[str, ...] = ()

    @property
    def can_be_served(self) -> bool:
        """Whether nothing in its files is refused."""
        return not self.refusals


def report_model(path: Path) -> ModelReport:
    """Look at a model directory or a GGUF file, as from ``find_model``."""
    refusals: list[str] = []
    config = _tried(lambda: read_model_config(path), refusals)
    checkpoint = _tried(lambda: open_checkpoint(config), refusals) if config else _unconfigured(path)
    tokenizer = _tried(lambda: Tokenizer(path), refusals)
    loaded_bytes = loaded_weight_bytes(path, "auto", "none") if config and checkpoint else None
    kv = _tried(lambda: read_kv_geometry(path, "auto", BLOCK_SIZE), refusals) if loaded_bytes is not None else None
    known: dict[str, Any] = _config_facts(config) if config else _raw_facts(path)
    return ModelReport(
        name=name_of(path),
        path=str(path),
        format="GGUF" if is_gguf(path) else "safetensors",
        **known,
        num_parameters=sum(prod(tensor.shape) for tensor in checkpoint.tensors.values()) if checkpoint else None,
        precision=_precision(checkpoint.tensors) if checkpoint else "",
        size_bytes=_size(path, checkpoint),
        loaded_bytes=loaded_bytes,
        by_quantize=_smaller(path, config, loaded_bytes),
        kv_token_bytes=kv.token_bytes if kv else None,
        abilities=_abilities(path, tokenizer) if tokenizer else {},
        template=_template(tokenizer) if tokenizer else None,
        refusals=tuple(refusals),
        obstacles=_obstacles(loaded_bytes),
    )


def _smaller(path: Path, config: ModelConfig | None, loaded_bytes: int | None) -> dict[str, int]:
    """Bytes of the weights with each --quantize that makes them smaller than the one before it."""
    found: dict[str, int] = {}
    if loaded_bytes is None or not isinstance(config, DecoderConfig):
        return found
    for name in QUANTIZATIONS:
        num_bytes = loaded_weight_bytes(path, "auto", name)
        if num_bytes < min([loaded_bytes, *found.values()]):
            found[name] = num_bytes
    return found


def _tried(read: Callable[[], Found], refusals: list[str]) -> Found | None:
    """What is read; None where it is refused, with the reason in ``refusals``."""
    try:
        return read()
    except ConfigError as error:
        refusals.append(error.message)
        return None


def _unconfigured(path: Path) -> Checkpoint | None:
    """The tensors of a directory whose config is refused; None where they cannot be told without it."""
    try:
        is_quantized = not is_gguf(path) and bool(_json(path).get("quantization_config"))
        return None if is_gguf(path) or is_quantized else SafetensorsDirectory(path)
    except (ConfigError, OSError):
        return None


def _config_facts(config: ModelConfig) -> dict[str, Any]:
    return {
        "architecture": config.architecture,
        "context_length": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "num_layers": config.num_layers,
    }


def _raw_facts(path: Path) -> dict[str, Any]:
    """What a config says that is refused, as far as it is what one expects."""
    architecture, *numbers = _gguf_values(path) if is_gguf(path) else _json_values(path)
    context, vocabulary, layers = map(_whole, numbers)
    return {
        "architecture": architecture if isinstance(architecture, str) else "",
        "context_length": context,
        "vocab_size": vocabulary,
        "num_layers": layers,
    }


def _gguf_values(path: Path) -> tuple[Any, ...]:
    """(architecture, context length, size of the vocabulary, layers), as the file says them."""
    try:
        values = GgufFile(path).metadata.values
    except ConfigError:
        return (None,) * 4
    architecture, tokens = values.get("general.architecture"), values.get("tokenizer.ggml.tokens")
    vocabulary = len(tokens) if isinstance(tokens, list) else None
    return (
        architecture,
        values.get(f"{architecture}.context_length"),
        vocabulary,
        values.get(f"{architecture}.block_count"),
    )


def _json_values(path: Path) -> tuple[Any, ...]:
    """The same of a config.json; a model with several parts says it of its text model in ``text_config``."""
    values = _json(path)
    names, inner = values.get("architectures"), values.get("text_config")
    inside = {**values, **(inner if isinstance(inner, dict) else {})}
    fields = ("max_position_embeddings", "vocab_size", "num_hidden_layers")
    return names[0] if isinstance(names, list) and names else None, *(inside.get(name) for name in fields)


def _json(path: Path) -> Mapping[str, Any]:
    """The values of a config.json; none where it is no JSON object."""
    try:
        return ConfigFields.of_file(path / "config.json").values
    except ConfigError:
        return {}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _precision(tensors: Mapping[str, StoredTensor]) -> str:
    """How most values of matrices are stored, and by which layout."""
    values = Counter[str]()
    for tensor in tensors.values():
        if len(tensor.shape) == 2:
            words = tensor.dtype if tensor.format is None else f"{tensor.dtype} ({tensor.format})"
            values[words] += prod(tensor.shape)
    return values.most_common(1)[0][0] if values else ""


def _size(path: Path, checkpoint: Checkpoint | None) -> int:
    files = checkpoint.files if checkpoint else [path] if is_gguf(path) else _weight_files(path)
    return sum(file.stat().st_size for file in files if file.exists())


def _weight_files(path: Path) -> list[Path]:
    """Files of the first format that the directory has: some hold the same weights in two."""
    return next((found for pattern in WEIGHT_FILES if (found := sorted(path.glob(pattern)))), [])


def _abilities(path: Path, tokenizer: Tokenizer) -> dict[str, Ability]:
    """What clients can ask a server of this model for, by name."""
    template = tokenizer.response_template
    return {
        "text": Ability(tokenizer.has_text, "" if tokenizer.has_text else IDS_ONLY),
        "chat": _chat(tokenizer),
        "tools": _tools(tokenizer),
        "reasoning": Ability(template is not None and template.has(FieldKind.REASONING)),
        "structured output": _structured(tokenizer),
        "embeddings": _embeddings(path),
    }


def _template(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """What the chat template takes, with the sentences of a start about what is wrong with the templates."""
    profile = tokenizer.template_profile
    return None if profile is None else {**profile.as_dict(), "complaints": tokenizer.template_complaints}


def _chat(tokenizer: Tokenizer) -> Ability:
    complaints = tokenizer.template_complaints
    if tokenizer.has_chat_template:
        return Ability(True, complaints[0] if complaints else "")
    if not tokenizer.has_text:
        return Ability(False, IDS_ONLY)
    return Ability(False, complaints[0] if complaints else "there is no chat template")


def _tools(tokenizer: Tokenizer) -> Ability:
    answers = tokenizer.answer_format
    if not tokenizer.has_chat_template:
        return Ability(False, "there is no chat template that can be used")
    if answers.tools_error:
        return Ability(False, answers.tools_error)
    if answers.is_generic:
        return Ability(True, "format generic: the chat template has none of its own")
    return Ability(True, f"format {answers.name}")


def _structured(tokenizer: Tokenizer) -> Ability:
    if not tokenizer.has_text:
        return Ability(False, IDS_ONLY)
    return Ability(True, "JSON schemas, grammars, choices") if is_installed() else Ability(False, NO_GRAMMARS)


def _embeddings(path: Path) -> Ability:
    try:
        return Ability(True, f"pooling {read_embedding_recipe(path).pooling(None)}")
    except DiptychError as error:
        return Ability(False, error.message)


def _obstacles(loaded_bytes: int | None) -> tuple[str, ...]:
    """Why this machine cannot compute it now."""
    found = []
    try:
        require_packages()
    except ConfigError as error:
        found.append(error.message)
    most_bytes, where = most_memory()
    if loaded_bytes is not None and loaded_bytes >= most_bytes and not GPU.exists():
        found.append(
            f"its weights take {loaded_bytes / GIB:,.1f} GiB of memory; {where} has {most_bytes / GIB:,.1f} GiB "
            "(--quantize int8 halves them, int4 quarters them)"
        )
    return tuple(found)
