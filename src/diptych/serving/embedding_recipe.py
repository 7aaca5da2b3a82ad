"""How a model makes embeddings, as its files say: Sentence Transformers' files in a directory, or a key of a GGUF file.

Whatever would give other vectors than the model's own is an error that names the file. Reads files and nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from diptych.control.errors import InvalidRequestError
from diptych.control.request import Pooling
from diptych.runtime.gguf.gguf_file import GgufFile, is_gguf

MODULES_FILE = "modules.json"
POOLING_FILE = "1_Pooling/config.json"  # where there is no MODULES_FILE that says it
PROMPTS_FILE = "config_sentence_transformers.json"
TRANSFORMER_FILE = "sentence_bert_config.json"
# Its fields that change vectors: the value that changes none, and what another would mean.
TRANSFORMER_FIELDS: Mapping[str, tuple[Any, str]] = {
    "do_lower_case": (False, "texts in lower case"),
    "processing_kwargs": ({}, "another use of the tokenizer"),
    "transformer_task": ("feature-extraction", "another head"),
    "query_expansion": (None, "a vector for each token"),
}
STATES = "last_hidden_state"
# Vectors have length 1, so that a mean and a sum divided by anything else are the same.
POOLINGS: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean", "mean_sqrt_len_tokens": "mean"}
OLD_MODE = "pooling_mode_"  # one field for each mode, up to version 5
OLD_NAMES = {"cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean", "weightedmean_tokens": "weightedmean"}
GGUF_MODES = {0: "lasttoken", 1: "mean", 2: "cls", 3: "lasttoken", 4: "rank"}  # 0: the file does not say


@dataclass(frozen=True, slots=True)
class EmbeddingRecipe:
    """modes: how the states of tokens become a vector, in Sentence Transformers' words. prompts: texts to put before
    what is embedded, by name. default_prompt: the name of that which is put there unless another is asked for.
    pools_prompt: whether a mean is also of the tokens of such a text."""

    modes: tuple[str, ...] = ("lasttoken",)
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    pools_prompt: bool = True

    def pooling(self, wanted: Pooling | None) -> Pooling:
        """What to compute; wanted None: the model's own. Raises InvalidRequestError for what is not served."""
        if wanted is not None:
            return wanted
        if len(self.modes) == 1 and self.modes[0] in POOLINGS:
            return POOLINGS[self.modes[0]]
        modes = ", ".join(self.modes)
        raise _unsupported(f"this model's own pooling is {modes}, which is not served; pooling is one of last, mean")

    def prompt(self, name: str | None, pooling: Pooling) -> str:
        """The text to put before what is embedded. name None: the default; empty: no text. Raises
        InvalidRequestError."""
        wanted = self.default_prompt if name is None else name
        if not wanted:
            return ""
        if wanted not in self.prompts:
            known = ", ".join(self.prompts) or "this model has none"
            raise InvalidRequestError(f"prompt_name is {wanted!r}; one of: {known}", param="prompt_name")
        text = self.prompts[wanted]
        if text and pooling == "mean" and not self.pools_prompt:
            raise _unsupported(f"{POOLING_FILE}: include_prompt is false, which is not served", "prompt_name")
        return text


class _Prompts(msgspec.Struct):
    """PROMPTS_FILE, as far as it is read."""

    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None


def read_embedding_recipe(model: Path) -> EmbeddingRecipe:
    """The recipe of a model directory or GGUF file; the last token's state where none says more. Raises
    InvalidRequestError for files that cannot be read, and for parts that are not served."""
    if is_gguf(model):
        return EmbeddingRecipe((GGUF_MODES.get(_gguf_pooling(model), "an unknown kind"),))
    pooling_file = model / _pooling_path(model)
    _check_transformer(model / TRANSFORMER_FILE)
    pooling = _object(pooling_file)
    prompts: _Prompts = _read(model / PROMPTS_FILE, _Prompts) or _Prompts()
    texts = {name: text or "" for name, text in (prompts.prompts or {}).items()}
    return EmbeddingRecipe(
        ("lasttoken",) if pooling is None else _modes(pooling),
        {"query": "", "document": ""} | texts,
        prompts.default_prompt_name,
        pooling is None or pooling.get("include_prompt", True) is not False,
    )


def _check_transformer(path: Path) -> None:
    """Raise for what makes other tokens of a text, or takes other states of the model, than is done here."""
    found = _object(path) or {}
    for name, (neutral, meaning) in TRANSFORMER_FIELDS.items():
        if (value := found.get(name)) and value != neutral:
            raise _unsupported(f"{path}: {name} is {value!r}, which is not served: {meaning}")
    modalities = found.get("modality_config") or {}
    if "message" in modalities:
        meaning = "texts would go through the chat template"
        raise _unsupported(f"{path}: modality_config has 'message', which is not served: {meaning}")
    states = (modalities.get("text") or {}).get("method_output_name", STATES)
    if states != STATES:
        raise _unsupported(f"{path}: modality_config.text.method_output_name is {states!r}; served: {STATES}")


def _pooling_path(model: Path) -> str:
    """The file that describes the pooling. Raises for modules behind it that change vectors."""
    modules = _read(model / MODULES_FILE, list[dict[str, Any]])
    if modules is None:
        return POOLING_FILE
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    for kind, module in zip(kinds, modules, strict=True):
        if kind not in ("Transformer", "Pooling", "Normalize"):  # (vectors are normalised anyway)
            raise _unsupported(f"{model / MODULES_FILE}: {module.get('path') or kind} is a {kind}, which is not served")
    if kinds[:2] != ["Transformer", "Pooling"] or "Pooling" in kinds[2:]:
        raise _unsupported(f"{model / MODULES_FILE}: has {', '.join(kinds)}; served: Transformer, Pooling, Normalize")
    return f"{modules[1].get('path')}/config.json"


def _modes(pooling: Mapping[str, Any]) -> tuple[str, ...]:
    """``pooling_mode`` (a name or several), or the older fields, one for each mode."""
    newer = pooling.get("pooling_mode")
    if newer is not None:
        return (newer,) if isinstance(newer, str) else tuple(map(str, newer))
    older = [name.removeprefix(OLD_MODE) for name, value in pooling.items() if name.startswith(OLD_MODE) and value]
    return tuple(OLD_NAMES.get(name, name) for name in older) or ("mean",)


def _object(path: Path) -> dict[str, Any] | None:
    found: dict[str, Any] | None = _read(path, dict[str, Any])
    return found


def _read(path: Path, kind: Any) -> Any:
    """What a JSON file holds; None where there is no such file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise _unsupported(f"{path}: cannot be read ({error})") from None


@lru_cache(maxsize=8)
def _gguf_pooling(path: Path) -> int:
    """``pooling_type`` of the architecture; read once, since all of the metadata must be."""
    metadata = GgufFile(path).metadata
    return metadata.integer(f"{metadata.string('general.architecture')}.pooling_type") or 0


def _unsupported(text: str, param: str = "pooling") -> InvalidRequestError:
    return InvalidRequestError(text, param=param, code="unsupported")


def with_prompt(texts: Sequence[str], prompt: str) -> list[str]:
    """The texts behind a prompt."""
    return [prompt + text for text in texts]
