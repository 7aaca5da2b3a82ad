"""What a tokenizer is made of, and how a model directory says it: tokenizer.json, tokenizer_config.json and the chat
template. gguf_tokenizer.py reads the same from a GGUF file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from diptych.control.errors import ConfigError
from diptych.serving.answers.native_panic import is_failure

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """fast: None where the model serves token ids only. special_tokens: texts by the names that chat templates use.
    templates: chat templates by name. response_template: how the model writes its answers, where its files say so."""

    fast: FastTokenizer | None
    special_tokens: Mapping[str, str]
    templates: Mapping[str, str]
    response_template: Any = None


def read_directory(directory: Path) -> TokenizerParts:
    """The tokenizer of a model directory. Raises ConfigError for a file that cannot be read."""
    config = _read_json(directory / "tokenizer_config.json")
    special_tokens = {name: _token_text(config[name]) for name in SPECIAL_NAMES if config.get(name) is not None}
    fast, templates = _load_fast(directory / "tokenizer.json"), _chat_templates(directory, config)
    return TokenizerParts(fast, special_tokens, templates, config.get("response_template"))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return content


def _token_text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _load_fast(path: Path) -> FastTokenizer | None:
    if not path.exists():
        return None
    try:
        fast = FastTokenizer.from_file(str(path))
    except BaseException as error:
        if not is_failure(error):
            raise
        raise ConfigError(f"{path} cannot be read: {error}") from None
    fast.no_padding()
    fast.no_truncation()
    return fast


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: chat_template.jinja, or the config's string or list of {name, template}."""
    file = directory / "chat_template.jinja"
    if file.exists():
        return {"default": file.read_text(encoding="utf-8")}
    given = config.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):
        return {str(entry["name"]): str(entry["template"]) for entry in given}
    return {}
