"""Tokenizers out of GGUF files: the same tokens as the tokenizer that the file was made of."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.gguf_files import VOCABULARY, write_gguf
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits

from diptych.control.errors import ConfigError, InvalidRequestError
from diptych.serving.answers.tokenizer import Tokenizer

PUBLISHED = {  # what the tokenizer.json of such models says
    "gpt-2": ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
}
PIECES = [
    "the",
    "ing",
    " ",
    "  ",
    "\n",
    "\t",
    "'s",
    "don't",
    "123",
    "4",
    "½",
    "é",
    "e\u0301",
    "中文",
    "🙂",
    "\u00a0",
    "_",
    "x=1",
    "\r\n",
]
SPACE = "\u2581"
HELLO = [{"role": "user", "content": "hi"}]


def texts(count: int) -> list[str]:
    """Random mixtures of words, digits, runs of white space and other scripts."""
    rng = random.Random(0)
    return ["".join(rng.choices(PIECES, k=rng.randrange(12))) for _ in range(count)]


def trained(words: Any) -> FastTokenizer:
    """Byte-level BPE of a few hundred tokens."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = words
    trainer = trainers.BpeTrainer(
        vocab_size=500, show_progress=False, initial_alphabet=ByteLevel.alphabet(), special_tokens=["<|im_end|>"]
    )
    fast.train_from_iterator([Path(__file__).read_text(), *texts(200)], trainer)
    return fast


def metadata_of(fast: FastTokenizer, **changes: Any) -> dict[str, Any]:
    """What the file of a tokenizer says."""
    model = json.loads(fast.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token == "<|im_end|>" else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
    } | changes


def small(tmp_path: Path, **changes: Any) -> Tokenizer:
    """The tokenizer of the small vocabulary; changes: of keys behind tokenizer.ggml."""
    metadata = VOCABULARY | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    num_tokens = len(metadata["tokenizer.ggml.tokens"])
    if "tokens" in changes and "bos_token_id" not in changes and num_tokens < 8:
        metadata |= {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.eos_token_id": None}
    return Tokenizer(write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama", **metadata}))


@pytest.mark.parametrize("rules", PUBLISHED)
def test_byte_level_tokens_are_those_of_the_published_tokenizer(rules: str, tmp_path: Path) -> None:
    fast = trained(PUBLISHED[rules])
    ours = Tokenizer(write_gguf(tmp_path / "m.gguf", metadata_of(fast, **{"tokenizer.ggml.pre": rules})))
    for text in texts(300):
        tokens = ours.encode(text)
        assert tokens == fast.encode(text).ids, text
        assert ours.decode(tokens) == text


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ("llama-bpe", ["123", "45"]),
        ("default", ["123", "45"]),
        ("gpt-2", ["12345"]),
        ("qwen2", ["1", "2", "3", "4", "5"]),
        ("tekken", ["1", "2", "3", "4", "5"]),
        ("smollm", ["1", "2", "3", "4", "5"]),
        ("deepseek-coder", ["1", "2", "3", "4", "5"]),
    ],
)
def test_digits_are_split_as_the_rules_say(rules: str, words: list[str], tmp_path: Path) -> None:
    tokens = [*"12345", "12", "123", "1234", "12345", "45"]
    merges = ["1 2", "12 3", "123 4", "1234 5", "4 5"]
    ours = small(tmp_path, tokens=tokens, token_type=[1] * 10, merges=merges, pre=rules, add_bos_token=False)
    assert [ours.token_text(token) for token in ours.encode("12345")] == words


def test_a_word_that_is_a_token_is_taken_whole_where_the_rules_say_so(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"merges": ["b c"], "tokens": ["a", "b", "c", "bc", "abc"], "token_type": [1] * 5}
    assert small(tmp_path, pre="llama-bpe", add_bos_token=False, **changes).encode("abc") == [4]
    assert small(tmp_path, pre="gpt-2", **changes).encode("abc") == [0, 3]


def test_control_tokens_are_special_and_tokens_of_the_user_are_text(tmp_path: Path) -> None:
    ours = small(tmp_path)
    tokens = ours.encode("a<tool>b<|im_end|>")
    assert tokens == [0, 6, 1, 5]
    assert ours.decode(tokens) == "a<tool>b"
    assert ours.decode(tokens, skip_special_tokens=False) == "a<tool>b<|im_end|>"
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "<s>"}


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, [4]),
        ({"add_bos_token": True}, [7, 4]),
        ({"add_bos_token": True, "add_eos_token": True, "eos_token_id": 5}, [7, 4, 5]),
        ({"pre": "llama-bpe"}, [7, 4]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [4]),
        ({"add_bos_token": True, "bos_token_id": None}, [4]),
    ],
)
def test_a_text_is_framed_as_the_file_says(changes: dict[str, Any], tokens: list[int], tmp_path: Path) -> None:
    ours = small(tmp_path, **changes)
    assert ours.encode("abc") == tokens
    assert ours.encode("abc", add_special_tokens=False) == [4]


def test_chat_templates_come_from_the_metadata(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    metadata = {"general.architecture": "llama", **VOCABULARY, "tokenizer.chat_template": template}
    ours = Tokenizer(write_gguf(tmp_path / "m.gguf", metadata))
    assert ours.render_chat(HELLO) == "<s>hi"
    with pytest.raises(InvalidRequestError, match="no chat template"):
        small(tmp_path).render_chat(HELLO)


def test_a_file_without_a_vocabulary_serves_token_ids_only(tmp_path: Path) -> None:
    ours = Tokenizer(write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}))
    assert not ours.has_text and ours.vocab_size == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; supported: gpt2, llama"),
        ({"model": None}, "tokenizer.ggml.model is None; supported: gpt2, llama"),
        ({"pre": "viking"}, "tokenizer.ggml.pre is 'viking'; supported: default, gpt-2, smollm"),
        ({"pre": None}, "tokenizer.ggml.pre is None; supported: default"),
        ({"merges": None}, "tokenizer.ggml.merges is None; supported: pairs of tokens"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges is 1 values; supported: pairs of tokens"),
        ({"merges": ["a x"]}, "no tokenizer can be made of tokenizer.ggml"),
        ({"tokens": ["a", "b", "a", "c", "d", "e", "f", "g"]}, "tokenizer.ggml.tokens has 'a' twice"),
        ({"model": "llama"}, "tokenizer.ggml.scores is None; supported: 8 numbers"),
        ({"token_type": ["x"] * 8}, "tokenizer.ggml.token_type is 8 values; supported: an array of numbers"),
        ({"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token is 'yes'; supported: true or false"),
    ],
)
def test_vocabularies_that_cannot_be_served_are_refused_by_key(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"m\.gguf: ") as error:
        small(tmp_path, **changes)
    assert message in str(error.value)


def test_old_files_of_qwen_need_not_name_their_rules(tmp_path: Path) -> None:
    metadata = {"general.architecture": "qwen2", **VOCABULARY, "tokenizer.ggml.pre": None}
    assert Tokenizer(write_gguf(tmp_path / "m.gguf", metadata)).encode("abc") == [4]


def pieces_of(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's way: join the pair of neighbours whose token has the best score, the first of equals."""
    parts = list(text)
    while True:
        joins = [(-scores[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not joins:
            return parts
        at = min(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def sentence_piece(tmp_path: Path, **changes: Any) -> tuple[Tokenizer, dict[str, float]]:
    """A tokenizer with scores, and the scores of its pieces."""
    rng = random.Random(1)
    pieces = [*("abc" + SPACE), *{"".join(rng.choices("abc" + SPACE, k=rng.choice((2, 2, 3, 4)))) for _ in range(120)}]
    scores = {piece: -float(number) for number, piece in enumerate(dict.fromkeys(pieces))}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *scores]
    ours = small(
        tmp_path,
        model="llama",
        tokens=tokens,
        scores=[0.0] * 259 + list(scores.values()),
        token_type=[2, 3, 3] + [6] * 256 + [1] * len(scores),
        **{"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} | changes,
    )
    return ours, scores


def test_scores_join_tokens_as_sentencepiece_does(tmp_path: Path) -> None:
    ours, scores = sentence_piece(tmp_path)
    rng = random.Random(2)
    for length in [*range(1, 40), *[30] * 200]:
        text = "".join(rng.choices("abc ", k=length))
        tokens = ours.encode(text, add_special_tokens=False)
        assert [ours.fast.id_to_token(token) for token in tokens] == pieces_of(SPACE + text.replace(" ", SPACE), scores)
        assert ours.decode(tokens) == text


def test_characters_without_a_token_become_their_bytes(tmp_path: Path) -> None:
    ours, _ = sentence_piece(tmp_path)
    tokens = ours.encode("aé")
    assert tokens[0] == 1 and tokens[-2:] == [3 + 0xC3, 3 + 0xA9]
    assert ours.decode(tokens) == "aé"


def test_no_space_is_put_before_a_text_where_the_file_says_so(tmp_path: Path) -> None:
    ours, scores = sentence_piece(tmp_path, add_space_prefix=False, add_bos_token=False)
    assert [ours.fast.id_to_token(token) for token in ours.encode("cab")] == pieces_of("cab", scores)
    assert ours.decode(ours.encode(" a")) == " a"
