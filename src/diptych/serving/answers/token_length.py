"""The least number of tokens that a text can have, from its length alone: a text that is far too long is refused
before it is encoded.

Where a tokenizer may leave out or shorten parts of a text (it strips, folds, or knows not every byte), there is no such
number, and 0 is given: a text that could fit is never refused.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.pre_tokenizers import ByteLevel

from diptych.base.byte_size import utf8_size

NFC_SHRINKS = 4  # at most: iota with two marks, seven bytes, becomes one letter of two
_SPLITS = ("ByteLevel", "Metaspace", "Digits", "Punctuation", "Split", "UnicodeScripts")
_NUM_BYTES = 256


class TokenLength:
    """most_bytes: of a text that one token stands for; None: there is no bound. is_blank_free: tokens that swallow
    blanks are known, so that blanks do not count."""

    def __init__(self, fast: FastTokenizer) -> None:
        added = fast.get_added_tokens_decoder().values()
        self.is_blank_free = any(token.lstrip or token.rstrip for token in added)
        self.most_bytes: int | None = None
        shrinks = _shrinks(_state(fast.normalizer))
        if shrinks is not None and _keeps_all(fast):
            is_byte_level = "ByteLevel" in _kinds(_state(fast.pre_tokenizer))
            vocabulary = fast.get_vocab(with_added_tokens=False)
            longest = max(map(len if is_byte_level else utf8_size, vocabulary), default=1)
            own = max((utf8_size(token.content) for token in added), default=1)
            self.most_bytes = max(longest, own) * shrinks

    def least_tokens(self, text: str) -> int:
        """Tokens that this text has at least."""
        if self.most_bytes is None:
            return 0
        if self.is_blank_free:
            text = "".join(text.split())
        return -(-utf8_size(text) // self.most_bytes)


def _state(part: Any) -> Mapping[str, Any]:
    """What a normalizer or pre-tokenizer is, as in tokenizer.json."""
    if part is None:
        return {"type": "Sequence"}
    state: Mapping[str, Any] = json.loads(part.__getstate__())
    return state


def _parts(state: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    inner = state.get("normalizers") or state.get("pretokenizers") or []
    return [part for each in inner for part in _parts(each)]


def _kinds(state: Mapping[str, Any]) -> list[str]:
    return [part["type"] for part in _parts(state)]


def _shrinks(normalizer: Mapping[str, Any]) -> int | None:
    """How many bytes one byte of the normalized text stands for at most; None: any number."""
    factor = 1
    for part in _parts(normalizer):
        if part["type"] == "NFC":
            factor *= NFC_SHRINKS
        elif part["type"] == "Replace":
            pattern, content = part["pattern"].get("String"), part["content"]
            if pattern is None or not content:
                return None
            factor *= max(1, -(-utf8_size(pattern) // utf8_size(content)))
        elif part["type"] not in ("Prepend", "ByteLevel"):
            return None
    return factor


def _keeps_all(fast: FastTokenizer) -> bool:
    """Whether every byte of a text comes to stand in some token."""
    parts = list(_parts(_state(fast.pre_tokenizer)))
    kinds = [part["type"] for part in parts]
    if any(kind not in _SPLITS for kind in kinds) or any(part.get("behavior") == "Removed" for part in parts):
        return False
    model = fast.model
    if type(model).__name__ not in ("BPE", "Unigram") or getattr(model, "dropout", None):
        return False
    if getattr(model, "continuing_subword_prefix", None) or getattr(model, "end_of_word_suffix", None):
        return False
    if "ByteLevel" in kinds:
        return all(fast.token_to_id(each) is not None for each in _byte_alphabet())
    return bool(getattr(model, "byte_fallback", False)) and all(
        fast.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(_NUM_BYTES)
    )


def _byte_alphabet() -> list[str]:
    return ByteLevel.alphabet()
