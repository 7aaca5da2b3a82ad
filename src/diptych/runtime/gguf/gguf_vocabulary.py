"""The vocabulary of a GGUF file: the text and the type of each token, and which tokens have a meaning of their own."""

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.runtime.gguf.gguf_metadata import GgufMetadata

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens
ROLES = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}
STOP_ROLES = ("eos", "eot", "eom")
# Tokens that end an answer whatever the metadata says: files often name only one of those that a model uses, and some
# do not even say that they are control tokens.
STOP_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>")


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """texts, types: by token id. roles: token ids by the names of ROLES, where the file says them."""

    texts: Sequence[str]
    types: Sequence[int]
    roles: dict[str, int]

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        found = [self.roles[role] for role in STOP_ROLES if role in self.roles]
        marked = {text: token for token, text in enumerate(self.texts) if self.types[token] == CONTROL}
        found += [marked[text] for text in STOP_TEXTS if text in marked]
        return tuple(dict.fromkeys(found))


def read_vocabulary(metadata: GgufMetadata) -> GgufVocabulary | None:
    """The vocabulary, or None in a file that has none. Raises UnsupportedModelError naming the key."""
    texts = metadata.strings("tokenizer.ggml.tokens")
    if texts is None:
        return None
    types = metadata.numbers("tokenizer.ggml.token_type") or [NORMAL] * len(texts)
    if len(types) != len(texts):
        raise metadata.unsupported("tokenizer.ggml.token_type", f"{len(texts)} values, as tokenizer.ggml.tokens has")
    roles = {}
    for role, name in ROLES.items():
        key = f"tokenizer.ggml.{name}_token_id"
        token = metadata.integer(key)
        if token is not None and token >= len(texts):
            raise metadata.unsupported(key, f"less than {len(texts)}, the number of tokens")
        if token is not None:
            roles[role] = token
    return GgufVocabulary(texts, [_type(*token) for token in zip(texts, types, strict=True)], roles)


def _type(text: str, stored: int) -> int:
    return CONTROL if stored == USER_DEFINED and text in STOP_TEXTS else stored
