"""Prompts from text and from conversations, out of the files of a model directory."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from diptych.control.errors import ChatTemplateError, ConfigError, InvalidRequestError
from diptych.serving.answers.tokenizer import Tokenizer, flatten_content
from diptych.serving.link.engine_options import BUNDLED_MODEL

RUNAWAY = r"(x+x+)+y"  # takes a regular expression engine 2**n steps to refuse n times x
WORDS = r"\S+|\s*[\r\n]+|\s+(?!\S)|\s+"  # treats spaces as the tokenizers of Llama 3 and Qwen do
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model directory with a tokenizer and no template."""
    shutil.copy(BUNDLED_MODEL / "tokenizer.json", tmp_path)
    return tmp_path


def write_config(directory: Path, **fields: Any) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))


def test_text_survives_a_round_trip() -> None:
    tokenizer = Tokenizer(BUNDLED_MODEL)
    text = "def f(x):\n    return 'h\u00e9llo \U0001f642'\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_bytes_of_tokens_add_up_even_inside_a_character() -> None:
    tokenizer = Tokenizer(BUNDLED_MODEL)
    text = "x = '\U0001f642\u00e9'"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_a_template_as_string_list_or_file(directory: Path) -> None:
    write_config(directory, chat_template="A{{ messages[0].content }}")
    assert Tokenizer(directory).render_chat(HELLO) == "Ahi"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "B{{ messages[0]['content'] }}"}]
    write_config(directory, chat_template=named)
    assert Tokenizer(directory).render_chat(HELLO) == "Bhi"
    (directory / "chat_template.jinja").write_text("C{% if add_generation_prompt %}>{% endif %}")
    assert Tokenizer(directory).render_chat(HELLO) == "C>"
    assert Tokenizer(directory).render_chat(HELLO, add_generation_prompt=False) == "C"


def test_a_template_sees_special_tokens_and_extra_arguments(directory: Path) -> None:
    template = "{{ bos_token }}|{{ eos_token }}|{{ mood }}"
    write_config(directory, bos_token="<b>", eos_token={"content": "<e>"}, chat_template=template)
    assert Tokenizer(directory).render_chat(HELLO, template_arguments={"mood": "calm"}) == "<b>|<e>|calm"


def test_a_template_can_refuse_and_cannot_escape_its_sandbox(directory: Path) -> None:
    write_config(directory, chat_template="{{ raise_exception('no system role') }}")
    with pytest.raises(InvalidRequestError, match="no system role"):
        Tokenizer(directory).render_chat(HELLO)
    write_config(directory, chat_template="{{ messages.append(1) }}")
    with pytest.raises(ChatTemplateError):
        Tokenizer(directory).render_chat(HELLO)
    write_config(directory, chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ChatTemplateError):
        Tokenizer(directory).render_chat(HELLO)


def test_a_model_without_a_template_says_so(directory: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        Tokenizer(directory).render_chat(HELLO)


def test_a_directory_without_a_tokenizer_serves_token_ids_only(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tmp_path)
    assert not tokenizer.has_text
    assert tokenizer.detokenizer([1, 2]) is None
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json"):
        tokenizer.encode("x")


def test_a_broken_tokenizer_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        Tokenizer(BUNDLED_MODEL).encode("\ud800")


def test_content_parts_become_text_and_images_are_refused() -> None:
    assert flatten_content([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "messages.0") == "a\nb"
    assert flatten_content(None, "messages.0") == ""
    with pytest.raises(InvalidRequestError, match="image_url") as caught:
        flatten_content([{"type": "image_url", "image_url": {"url": "x"}}], "messages.0.content")
    assert caught.value.param == "messages.0.content.0"


def letters(directory: Path, **parts: Any) -> Tokenizer:
    """A tokenizer of single letters (and of 40 x), with these parts of the tokenizers library."""
    vocabulary = {letter: number for number, letter in enumerate(["x", "y", "?", "x" * 40])}
    fast = FastTokenizer(models.WordLevel(vocabulary, unk_token="?"))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    for name, part in parts.items():
        setattr(fast, name, part)
    fast.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": pre_tokenizers.Split(Regex(RUNAWAY), "isolated")},
        {"normalizer": normalizers.Replace(Regex(RUNAWAY), "")},
    ],
    ids=["pre-tokenizer", "normalizer"],
)
def test_a_text_that_the_tokenizer_panics_on_is_refused_and_the_next_is_read(
    tmp_path: Path, parts: dict[str, Any]
) -> None:
    tokenizer = letters(tmp_path, **parts)
    for _ in range(3):
        with pytest.raises(InvalidRequestError, match="retry-limit") as caught:
            tokenizer.encode("x" * 40, param="text")
        assert caught.value.param == "text"
        assert tokenizer.encode("x") == [0]


@pytest.mark.parametrize("pattern", [WORDS, None], ids=["like Llama 3", "bundled"])
def test_ten_million_spaces_are_refused_and_a_thousand_are_read(tmp_path: Path, pattern: str | None) -> None:
    tokenizer = Tokenizer(BUNDLED_MODEL)
    if pattern:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer = letters(tmp_path, pre_tokenizer=split)
    with pytest.raises(InvalidRequestError, match="retry-limit"):
        tokenizer.encode(" " * 10_100_000)
    assert tokenizer.encode(" " * 1000)


def test_tokens_that_the_decoder_panics_on_are_refused(tmp_path: Path) -> None:
    runaway = decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex(RUNAWAY), "")])
    tokenizer = letters(tmp_path, decoder=runaway)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="retry-limit") as caught:
            tokenizer.decode([0] * 40, param="tokens")
        assert caught.value.param == "tokens"
        with pytest.raises(InvalidRequestError, match="retry-limit"):
            tokenizer.token_text(3)
        assert tokenizer.decode([0, 0]) == "xx"


def test_an_answer_goes_on_behind_tokens_that_the_decoder_panics_on(tmp_path: Path) -> None:
    runaway = decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex(RUNAWAY), "")])
    detokenizer = letters(tmp_path, decoder=runaway).detokenizer([3, 3])
    assert detokenizer is not None
    said = [detokenizer.push(token_id) for token_id in (0, 3, 0, 1)]
    assert "".join([*said, detokenizer.flush()]) == "x\ufffdxy"


def test_a_vocabulary_without_the_text_is_a_refusal(tmp_path: Path) -> None:
    fast = FastTokenizer(models.WordLevel({"x": 0}, unk_token="?"))
    fast.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidRequestError, match="UNK"):
        Tokenizer(tmp_path).encode("nothing")


def test_long_texts_encode_as_the_library_encodes_them_one_by_one() -> None:
    fast = FastTokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    text = Path(__file__).read_text() * 3
    assert Tokenizer(BUNDLED_MODEL).encode(text) == fast.encode(text).ids


@pytest.mark.parametrize(
    ("template", "arguments"),
    [
        ("{{ 1 / 0 }}", {}),
        ("{{ messages[0]['content'] + 1 }}", {}),
        ("{% for i in range(10**9) %}x{% endfor %}", {}),
        ("{{ deep | tojson }}", {"deep": "nested"}),
        ("{{ messages | tojson }}", {"self": 1}),
        ("{{ strftime_now(mood) }}", {"mood": 5}),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", {}),
        ("{{ [1, 2].pop(7) }}", {}),
        ("{{ (mood | list)[0].no.such.thing }}", {"mood": "x"}),
    ],
)
def test_a_template_that_fails_on_what_it_is_given_is_a_refusal(
    directory: Path, template: str, arguments: dict[str, Any]
) -> None:
    if arguments.get("deep"):
        deep: Any = 1
        for _ in range(100_000):
            deep = [deep]
        arguments = {"deep": deep}
    write_config(directory, chat_template="{% if fails %}" + template + "{% endif %}")
    with pytest.raises(InvalidRequestError, match="chat template") as caught:
        Tokenizer(directory).render_chat(HELLO, template_arguments={**arguments, "fails": True})
    assert caught.value.param == "messages"


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ unknown() }}", "{{ messages.append(1) }}", "{% if %}", "{{"])
def test_a_template_that_renders_nothing_is_the_fault_of_the_model(directory: Path, template: str) -> None:
    write_config(directory, chat_template=template)
    with pytest.raises(ChatTemplateError, match="chat template of this model") as caught:
        Tokenizer(directory).render_chat(HELLO)
    assert (caught.value.status, caught.value.param) == (501, None)


def test_additional_templates_are_read_beside_the_default(directory: Path) -> None:
    write_config(directory, chat_template="config")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    (directory / "chat_template.jinja").write_text("without")
    tokenizer = Tokenizer(directory)
    assert tokenizer.render_chat(HELLO) == "without"
    assert tokenizer.render_chat(HELLO, template_arguments={"tools": [{}]}) == "with tools"


def added(content: str, **flags: bool) -> dict[str, Any]:
    """A token as added_tokens_decoder has it."""
    usual = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": content, **usual, **flags}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"additional_special_tokens": ["<x1>", "<x2>"]}},
        {"tokenizer_config": {"extra_special_tokens": ["<x1>"], "additional_special_tokens": ["<x2>"]}},
        {
            "tokenizer_config": {
                "extra_special_tokens": {"image_token": "<im>", "x_token": "<x1>"},
                "pad_token": "<pad>",
            }
        },
        {"tokenizer_config": {"image_token": "<im>", "pad_token": "<pad>", "bos_token": "<new>", "mask_token": "<x1>"}},
        {"tokenizer_config": {"added_tokens_decoder": {"9": added("<new>"), "8": added("<x1>", lstrip=True)}}},
        {"tokenizer_config": {"added_tokens_decoder": {"0": added("<|endoftext|>", lstrip=True, special=False)}}},
        {"tokenizer_config": {"added_tokens_decoder": {"9": {"content": "<x1>"}}, "eos_token": "<x1>"}},
        {"tokenizer_config": {"pad_token": {"__type": "AddedToken", **added("<pad>", lstrip=True)}}},
        {"tokenizer_config": {"split_special_tokens": True, "additional_special_tokens": ["<x1>"]}},
        {"tokenizer_config": {"model_specific_special_tokens": {"image_token": "<im>"}}},
        {"tokenizer_config": {"additional_special_tokens": None, "pad_token": None}},
        {
            "tokenizer_config": {},
            "special_tokens_map": {"pad_token": "<pad>", "additional_special_tokens": ["<x1>"], "bos_token": "<new>"},
        },
        {
            "tokenizer_config": {"extra_special_tokens": ["<x2>"]},
            "added_tokens": {"<x1>": 9000, "<x2>": 9001},
        },
    ],
)
def test_special_tokens_are_those_that_transformers_reads(directory: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    reference, ours = PreTrainedTokenizerFast.from_pretrained(directory), Tokenizer(directory)
    text = "hi <new> there<x1> <x2><pad><im>  <|endoftext|> <x1>  q"
    token_ids = reference(text, add_special_tokens=False)["input_ids"]
    assert ours.encode(text, add_special_tokens=False) == token_ids
    assert ours.decode(token_ids) == reference.decode(token_ids, skip_special_tokens=True)
    assert dict(ours.special_tokens) == reference.special_tokens_map


@pytest.mark.parametrize("field", ["added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"])
def test_special_tokens_that_are_none_are_a_wrong_file(directory: Path, field: str) -> None:
    write_config(directory, **{field: 7})
    with pytest.raises(ConfigError, match="special tokens"):
        Tokenizer(directory)
