"""What a tokenizer is made of, and how a model directory says it: tokenizer.json, tokenizer_config.json and the chat
template. gguf_tokenizer.py reads the same from a GGUF file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from diptych.control.errors import ConfigError
from diptych.serving.answers.native_panic import is_failure

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
Token = str | AddedToken


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """fast: None where the model serves token ids only. special_tokens: texts by the names that chat templates use.
    templates: chat templates by name. response_template: how the model writes its answers, where its files say so."""

    fast: FastTokenizer | None
    special_tokens: Mapping[str, str]
    templates: Mapping[str, str]
    response_template: Any = None


def read_directory(directory: Path) -> TokenizerParts:
    """The tokenizer of a model directory, as transformers reads it. Raises ConfigError for a file that cannot be
    read."""
    path = directory / "tokenizer_config.json"
    config = _read_json(path)
    fast = _load_fast(directory / "tokenizer.json")
    try:
        if config.get("additional_special_tokens") and not config.get("extra_special_tokens"):
            config["extra_special_tokens"] = config.pop("additional_special_tokens")
        if "added_tokens_decoder" not in config:
            config = _with_old_files(directory, config)
        named, extra = _named_tokens(config), _extra_tokens(config)
        if fast is not None:
            _add_tokens(fast, _decoder_tokens(config), named, extra)
            fast.encode_special_tokens = bool(config.get("split_special_tokens"))
    except ConfigError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: its special tokens cannot be read ({error})", param="model") from None
    special_tokens = {name: _text_of(token) for name, token in named.items()}
    return TokenizerParts(fast, special_tokens, _chat_templates(directory, config), config.get("response_template"))


def _with_old_files(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with what special_tokens_map.json and added_tokens.json say beside one without its own table."""
    read = {**config, **_read_json(directory / "special_tokens_map.json")}
    extra, more = config.get("extra_special_tokens"), read.get("extra_special_tokens")
    if isinstance(extra, list) and isinstance(more, list) and more is not extra:
        read["extra_special_tokens"] = [*extra, *(token for token in more if token not in extra)]
    special = {_text_of(token) for token in _named_tokens(read).values()}
    special |= {_text_of(_token(token)) for token in read.get("extra_special_tokens") or ()}
    read["added_tokens_decoder"] = {
        number: {"content": text, "special": text in special, "normalized": text not in special}
        for text, number in _read_json(directory / "added_tokens.json").items()
    }
    return read


def _named_tokens(config: Mapping[str, Any]) -> dict[str, Token]:
    """Special tokens by the names that templates use: the usual ones, those of other keys NAME_token, and those of
    extra_special_tokens where it is an object."""
    names = [*SPECIAL_NAMES, *(name for name in config if name.endswith("_token") and name not in SPECIAL_NAMES)]
    named = {
        name: _token(value)
        for name in names
        if isinstance(value := config.get(name), str) or (isinstance(value, dict) and isinstance(value["content"], str))
    }
    for key in ("model_specific_special_tokens", "extra_special_tokens"):
        extra = config.get(key)
        if isinstance(extra, dict):
            named |= {str(name): _token(value) for name, value in extra.items()}
    return named


def _extra_tokens(config: Mapping[str, Any]) -> list[Token]:
    """Special tokens without a name."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    return [] if isinstance(extra, dict) else [_token(value) for value in extra]


def _decoder_tokens(config: Mapping[str, Any]) -> list[AddedToken]:
    """The tokens of added_tokens_decoder, by their ids."""
    entries = config.get("added_tokens_decoder") or {}
    return [_added_token(entries[number]) for number in sorted(entries, key=int)]


def _add_tokens(
    fast: FastTokenizer, decoder: Sequence[AddedToken], named: Mapping[str, Token], extra: Sequence[Token]
) -> None:
    """Add what tokenizer.json lacks. A token with other properties than it has there replaces it and keeps its id."""
    known = {_properties(token) for token in fast.get_added_tokens_decoder().values()}
    wanted: list[Token] = [token for token in decoder if _properties(token) not in known]
    texts = {token.content for token in fast.get_added_tokens_decoder().values()} | {
        _text_of(token) for token in wanted
    }
    special = {_text_of(token) for token in named.values()}
    for token in [*named.values(), *extra]:
        if _text_of(token) not in texts:
            texts.add(_text_of(token))
            wanted.append(token)
    added = [AddedToken(token, special=True, normalized=False) if isinstance(token, str) else token for token in wanted]
    for token in added:
        token.special = token.special or token.content in special
    fast.add_tokens(added)


def _properties(token: AddedToken) -> tuple[Any, ...]:
    return (token.content, token.single_word, token.lstrip, token.rstrip, token.normalized, token.special)


def _token(value: Any) -> Token:
    return _added_token(value) if isinstance(value, dict) else str(value)


def _added_token(value: Mapping[str, Any]) -> AddedToken:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(value["content"], **{name: bool(value[name]) for name in flags if name in value})


def _text_of(token: Token) -> str:
    return token if isinstance(token, str) else str(token.content)


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
    """Templates by name: chat_template.jinja and additional_chat_templates/NAME.jinja, or the config's string, object
    or list of {name, template}."""
    files = {"default": directory / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    found = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    if found:
        return found
    given = config.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, dict):
        return {str(name): str(template) for name, template in given.items()}
    if isinstance(given, list):
        return {str(entry["name"]): str(entry["template"]) for entry in given}
    return {}
