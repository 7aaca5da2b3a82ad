"""Texts are refused by their length only where no tokenizer's rule could make them fit."""

import unicodedata

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from diptych.control.errors import ContextLengthError
from diptych.serving.answers.token_length import NFC_SHRINKS, TokenLength
from diptych.serving.answers.tokenizer import Tokenizer as ModelTokenizer
from diptych.serving.link.engine_options import BUNDLED_MODEL

TEXTS = [" " * 500, "a" * 300, "K" * 90, "\u212a" * 90, "\u1112\u1161\u11ab" * 50, "ệ" * 40, "e\u0323\u0302" * 40]
TEXTS += ["\n \t" * 99, "abc " * 99, "😀" * 50, "\u0000" * 40, "<tool>" * 30, "  <tool>  " * 30, "ﬃ" * 50, "x"]


def byte_level(**parts: object) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = [*sorted(alphabet), "ab", "abc", "aa", "aaaa"]
    merges = [("a", "b"), ("ab", "c"), ("a", "a"), ("aa", "aa")]
    fast = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, part in parts.items():
        setattr(fast, name, part)
    return fast


def byte_fallback(**parts: object) -> Tokenizer:
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "aa"]
    fast = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, [("a", "a")], byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    for name, part in parts.items():
        setattr(fast, name, part)
    return fast


def with_tokens(fast: Tokenizer, *tokens: AddedToken) -> Tokenizer:
    fast.add_tokens(list(tokens))
    return fast


BOUNDED = {
    "bytes": byte_level(),
    "bytes, composed": byte_level(normalizer=normalizers.NFC()),
    "fallback": byte_fallback(),
    "tokens that strip": with_tokens(byte_level(), AddedToken("<tool>", lstrip=True, rstrip=True)),
    "long tokens": with_tokens(byte_level(), AddedToken("<tool>" * 9)),
    "bundled": ModelTokenizer(BUNDLED_MODEL).fast,
}
WITHOUT_BOUND = {
    "compatibility": byte_level(normalizer=normalizers.NFKC()),
    "stripped": byte_level(normalizer=normalizers.Strip()),
    "lower case": byte_level(normalizer=normalizers.Lowercase()),
    "runs of blanks": byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "nothing for a letter": byte_level(normalizer=normalizers.Replace("a", "")),
    "blanks removed": byte_level(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
    ),
    "split and removed": byte_level(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])
    ),
    "not every byte": byte_level(pre_tokenizer=pre_tokenizers.Metaspace()),
    "words": Tokenizer(models.WordLevel({"[UNK]": 0}, "[UNK]")),
    "word pieces": Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
}


@pytest.mark.parametrize("name", [*BOUNDED, *WITHOUT_BOUND])
def test_no_text_has_fewer_tokens_than_its_length_says(name: str) -> None:
    fast = (BOUNDED | WITHOUT_BOUND)[name]
    length = TokenLength(fast)
    assert (length.most_bytes is None) == (name in WITHOUT_BOUND)
    for text in TEXTS:
        for each in (text, text * 40, text + "ab" + text):
            assert length.least_tokens(each) <= len(fast.encode(each, add_special_tokens=False).ids), each[:20]


def test_composition_shortens_no_character_more_than_that() -> None:
    longest: dict[str, int] = {}  # bytes of the longest character that decomposes into this one alone
    hangul = range(0xAC00, 0xD7A4)  # which are composed by a rule
    composed = [number for number in range(0x110000) if number in hangul or unicodedata.decomposition(chr(number))]
    for number in composed:
        whole = chr(number)
        parts = unicodedata.normalize("NFD", whole)
        if len(parts) == 1:
            longest[parts] = max(longest.get(parts, 0), len(whole.encode()))
    assert len(composed) > 10_000 and longest
    for number in {*composed, *map(ord, longest)}:  # of all others, nothing is composed
        whole = chr(number)
        if unicodedata.normalize("NFC", whole) != whole:
            continue
        parts = unicodedata.normalize("NFD", whole)
        given = max(len(whole.encode()), sum(longest.get(part, len(part.encode())) for part in parts))
        assert given <= NFC_SHRINKS * len(whole.encode()), hex(number)


def test_a_text_that_is_far_too_long_is_not_encoded() -> None:
    tokenizer = ModelTokenizer(BUNDLED_MODEL)
    most = tokenizer.token_length.most_bytes
    assert most is not None
    with pytest.raises(ContextLengthError, match="maximum context length is 8 tokens; the prompt is too long"):
        tokenizer.encode("a\ud800" * most * 8, limit=8)  # encoding would be a complaint about the surrogate
    with pytest.raises(ContextLengthError, match=r"too long: it has \d+, and"):
        tokenizer.encode("one two three four five six seven eight nine", limit=8)
    assert tokenizer.encode("one two", limit=8) == tokenizer.encode("one two")
