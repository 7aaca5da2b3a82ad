"""Prompts from text and from conversations, out of the files of a model directory."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from diptych.control.errors import ConfigError, InvalidRequestError
from diptych.serving.answers.tokenizer import Tokenizer, flatten_content
from diptych.serving.link.engine_options import BUNDLED_MODEL

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
    with pytest.raises(InvalidRequestError):
        Tokenizer(directory).render_chat(HELLO)
    write_config(directory, chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequestError):
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
