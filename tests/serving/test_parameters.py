"""From bodies to what the engine understands, without a server."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from diptych.control.errors import ContextLengthError, InvalidRequestError, NotFoundError
from diptych.control.request import RequestOptions
from diptych.control.slo import Slo
from diptych.serving import edge_limits
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.api import protocol
from diptych.serving.api.conversation import conversation
from diptych.serving.api.error_responses import invalid_body
from diptych.serving.api.parameters import (
    UNSUPPORTED,
    check_model,
    given_prompts,
    max_tokens_of,
    options_of,
    refuse_unsupported,
    sampling_of,
    shown_tokens,
    truncated,
)
from diptych.serving.link.engine_options import BUNDLED_MODEL
from diptych.serving.link.messages import Ready

TOKENIZER = Tokenizer(BUNDLED_MODEL)
READY = Ready(4096, 1000, 800, 8, 4, [0], "a worker")


def completion(**fields: Any) -> protocol.CompletionBody:
    return protocol.CompletionBody.model_validate({"prompt": "x", **fields})


def chat(**fields: Any) -> protocol.ChatBody:
    return protocol.ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})


@pytest.mark.parametrize(
    ("prompt", "texts", "token_ids"),
    [
        ("a", ["a"], []),
        ("", [""], []),
        (["a", "b"], ["a", "b"], []),
        ([1, 2], [], [[1, 2]]),
        ([[1], [2, 3]], [], [[1], [2, 3]]),
        ([[]], [], [[]]),
    ],
)
def test_prompts_are_texts_or_token_ids(prompt: Any, texts: list[str], token_ids: list[list[int]]) -> None:
    assert given_prompts(completion(prompt=prompt)) == (texts, token_ids)


def test_no_prompt_at_all_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty list"):
        given_prompts(completion(prompt=[]))


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_field_that_would_change_the_answer_is_refused_and_its_harmless_values_are_not(name: str) -> None:
    refuse_unsupported(completion(**{name: None}))
    for harmless in UNSUPPORTED[name]:
        refuse_unsupported(completion(**{name: harmless}))
    with pytest.raises(InvalidRequestError, match=name) as caught:
        refuse_unsupported(completion(**{name: {"something": "else"}}))
    assert (caught.value.param, caught.value.code) == (name, "unsupported")


def test_unknown_fields_are_ignored() -> None:
    refuse_unsupported(completion(user="me", store=False, colour="blue"))


def test_only_the_served_model_is_found() -> None:
    check_model(None, ["served"])
    check_model("served", ["served"])
    with pytest.raises(NotFoundError, match="'other' is not served here; 'served' is"):
        check_model("other", ["served"])
    check_model("b", ["a", "b"])
    with pytest.raises(NotFoundError, match="'c' is not served here; 'a', 'b' are"):
        check_model("c", ["a", "b"])


def test_what_is_not_given_takes_the_defaults() -> None:
    assert options_of(completion()) == RequestOptions()
    sampling = sampling_of(completion(), 16, None)
    assert (sampling.temperature, sampling.n, sampling.stop, sampling.logit_bias) == (1.0, 1, (), {})


def test_what_is_given_arrives_in_the_units_of_the_engine() -> None:
    body = completion(
        ttft_slo_ms=1.5, tpot_slo_ms=0.0000001, deadline_ms=250, priority=-3, service_class="batch", cache_salt="s"
    )
    options = RequestOptions(
        priority=-3,
        slo=Slo(1_500_000, 1),
        service_class="batch",
        tenant="tenant",
        deadline_ns=250_000_000,
        cache_salt="s",
    )
    assert options_of(body, "tenant") == options
    body = completion(stop="end", stop_token_ids=[7], logit_bias={"12": -5}, seed=-1, top_k=3, n=2)
    sampling = sampling_of(body, 5, 2, 0)
    assert (sampling.stop, sampling.stop_token_ids, sampling.logit_bias) == (("end",), (7,), {12: -5})
    assert (sampling.seed, sampling.top_k, sampling.n, sampling.max_tokens) == (-1, 3, 2, 5)
    assert (sampling.logprobs, sampling.prompt_logprobs) == (2, 0)


@pytest.mark.parametrize("key", ["", "x", "-1", "+1", " 1", "1_0", "1e3", "\u0663", "9" * 5000])
def test_the_keys_of_logit_bias_are_plain_numbers(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="token ids") as caught:
        sampling_of(completion(logit_bias={key: 1}), 16, None)
    assert caught.value.param == "logit_bias"


@given(st.integers(1, 999), st.integers(1, 2**31 - 1))
def test_a_wish_is_taken_whole_or_refused(prompt: int, wish: int) -> None:
    if prompt + wish <= READY.max_model_len:
        assert max_tokens_of(completion(max_tokens=wish), prompt, READY) == wish
        return
    with pytest.raises(ContextLengthError) as caught:
        max_tokens_of(completion(max_tokens=wish), prompt, READY)
    assert caught.value.param == "max_tokens"


@given(st.integers(1, 799))
def test_without_a_wish_an_answer_fits_into_context_and_cache(prompt: int) -> None:
    assert max_tokens_of(chat(), prompt, READY) == READY.kv_capacity_tokens - prompt
    assert max_tokens_of(completion(), prompt, READY) == min(16, READY.kv_capacity_tokens - prompt)


def test_without_a_wish_min_tokens_counts() -> None:
    assert max_tokens_of(completion(min_tokens=100), 1, READY) == 100
    assert max_tokens_of(completion(min_tokens=5000), 1, READY) == 799


def test_the_newer_name_of_the_limit_wins_in_chats() -> None:
    assert max_tokens_of(chat(max_tokens=5, max_completion_tokens=7), 1, READY) == 7
    with pytest.raises(ContextLengthError) as caught:
        max_tokens_of(chat(max_completion_tokens=1000), 1, READY)
    assert caught.value.param == "max_completion_tokens"


def test_a_conversation_keeps_its_parts_its_nulls_and_its_other_fields() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    messages = [{"role": "user", "content": parts, "name": "me"}, {"role": "tool", "content": None}]
    assert conversation(chat(messages=messages).messages) == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "tool", "content": None},
    ]


MANY = 200_000
FLOODS: list[tuple[type[BaseModel], dict[str, Any], str]] = [
    (protocol.CompletionBody, {"prompt": [1] * MANY + ["x"]}, "prompt"),
    (protocol.CompletionBody, {"prompt": [0.5] * MANY}, "prompt"),
    (protocol.CompletionBody, {"prompt": [{}] * MANY}, "prompt"),
    (protocol.CompletionBody, {"prompt": [["x"]] * MANY}, "prompt"),
    (protocol.CompletionBody, {"prompt": ["x"] * MANY}, "prompt"),
    (protocol.CompletionBody, {"prompt": "x", "logit_bias": {str(key): "x" for key in range(MANY)}}, "logit_bias"),
    (protocol.CompletionBody, {"prompt": "x", "stop": [""] * MANY}, "stop"),
    (protocol.CompletionBody, {"prompt": "x", "stop_token_ids": ["x"] * MANY}, "stop_token_ids"),
    (protocol.ChatBody, {"messages": [{}] * MANY}, "messages"),
    (protocol.ChatBody, {"messages": [{"role": "user", "content": [1] * MANY}]}, "messages.0.content"),
    (protocol.TokenizeBody, {"messages": [{}] * MANY}, "messages"),
    (protocol.DetokenizeBody, {"tokens": [-1] * MANY}, "tokens"),
    (protocol.DetokenizeBody, {"tokens": [1] * (edge_limits.TOKEN_IDS + 1)}, "tokens"),
]


@pytest.mark.parametrize(
    ("model", "body", "field"), FLOODS, ids=[f"{row[2]} {number}" for number, row in enumerate(FLOODS)]
)
def test_a_flood_of_wrong_values_is_a_short_error(model: type[BaseModel], body: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() <= 4
    error = invalid_body(caught.value)
    assert error.param is not None and error.param.startswith(field.split(".")[0])
    assert len(error.message) < 400


@pytest.mark.parametrize("body", [True, None, 5, "x", [], [{}]])
def test_a_body_that_is_no_object_is_told_so(body: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        protocol.CompletionBody.model_validate(body)
    assert "dictionary" in invalid_body(caught.value).message


def test_special_tokens_have_their_text_where_that_is_asked_for_or_an_answer_is_read_with_it() -> None:
    special = TOKENIZER.special_token_ids
    assert shown_tokens(TOKENIZER, completion()) == {}
    assert shown_tokens(TOKENIZER, completion(skip_special_tokens=True)) == {}
    assert shown_tokens(TOKENIZER, completion(skip_special_tokens=False)) == {
        token_id: text for text, token_id in special.items()
    }
    [first, *_] = special
    assert shown_tokens(TOKENIZER, completion(), [f"x{first}y"]) == {special[first]: first}


def test_prompts_are_cut_from_their_beginning() -> None:
    prompts = [list(range(1, 7)), [8]]
    assert truncated(completion(), prompts, READY, None) == prompts
    assert truncated(completion(truncate_prompt_tokens=2), prompts, READY, None) == [[5, 6], [8]]
    long = [list(range(2000))]
    assert [len(prompt) for prompt in truncated(chat(truncate_prompt_tokens=-1), long, READY, 100)] == [900]
    assert [len(prompt) for prompt in truncated(chat(truncate_prompt_tokens=-1), long, READY, None)] == [999]
    assert [len(prompt) for prompt in truncated(chat(truncate_prompt_tokens=-1), long, READY, 5000)] == [1]
    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens is 0"):
        truncated(completion(truncate_prompt_tokens=0), prompts, READY, None)


def test_the_docs_name_every_field_that_is_refused() -> None:
    said = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    assert [name for name in UNSUPPORTED if name != "prediction" and f"`{name}`" not in said] == []
