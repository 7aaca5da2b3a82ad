"""The official client against ``diptych serve`` with the bundled model: every parameter, every reply."""

from typing import Any

import httpx
import openai
import pytest
import torch
from servers import RunningServer, wait_until

from diptych import __version__
from diptych.base import compiled_modules
from diptych.base.processor import read_processor
from diptych.runtime.kernels.instruction_set import choose
from diptych.serving.answers.tokenizer import Tokenizer
from diptych.serving.link.engine_options import BUNDLED_MODEL

PROMPT = "def read(self):\n    return"
TOKENIZER = Tokenizer(BUNDLED_MODEL)
MODEL = "stdlib-python"


def complete(client: openai.OpenAI, **arguments: Any) -> Any:
    defaults = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    return client.completions.create(**{**defaults, **arguments})


def chat(client: openai.OpenAI, **arguments: Any) -> Any:
    messages = [{"role": "system", "content": "brief"}, {"role": "user", "content": "read a file"}]
    defaults = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0}
    return client.chat.completions.create(**{**defaults, **arguments})


def extra(**fields: Any) -> dict[str, Any]:
    return {"extra_body": fields}


def test_a_completion_has_text_usage_and_a_reason(client: openai.OpenAI) -> None:
    reply = complete(client)
    assert reply.object == "text_completion"
    assert reply.model == MODEL
    assert reply.choices[0].text
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.prompt_tokens == len(TOKENIZER.encode(PROMPT))
    assert reply.usage.completion_tokens == 12
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 12


def test_a_stream_says_the_same_as_a_whole_reply(client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=40).choices[0].text
    chunks = list(complete(client, max_tokens=40, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_ends_with_its_usage_when_asked(client: openai.OpenAI) -> None:
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[0].usage is None


def test_continuous_usage_grows(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(client, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert counts[0] >= 1


def test_prompts_as_texts_and_as_token_ids_agree(client: openai.OpenAI) -> None:
    ids = TOKENIZER.encode(PROMPT)
    texts = [choice.text for choice in complete(client, prompt=[PROMPT, PROMPT]).choices]
    tokens = [choice.text for choice in complete(client, prompt=[ids, ids]).choices]
    assert texts == tokens
    assert complete(client, prompt=ids).choices[0].text == texts[0]


def test_batches_keep_their_order_and_count_their_prompts(client: openai.OpenAI) -> None:
    prompts = ["import os\n", "class A:\n", "def f(x):\n"]
    reply = complete(client, prompt=prompts, n=2, seed=1, temperature=1)
    assert [choice.index for choice in reply.choices] == list(range(6))
    assert reply.usage.prompt_tokens == sum(len(TOKENIZER.encode(prompt)) for prompt in prompts)
    assert reply.usage.completion_tokens <= 6 * 12
    alone = [complete(client, prompt=prompt).choices[0].text for prompt in prompts]
    assert [choice.text for choice in complete(client, prompt=prompts).choices] == alone


def test_echo_puts_the_prompt_in_front(client: openai.OpenAI) -> None:
    plain = complete(client).choices[0].text
    assert complete(client, echo=True).choices[0].text == PROMPT + plain
    streamed = "".join(chunk.choices[0].text for chunk in complete(client, echo=True, stream=True))
    assert streamed == PROMPT + plain


def test_completion_logprobs_line_up_with_the_text(client: openai.OpenAI) -> None:
    choice = complete(client, logprobs=3).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 12
    assert all(value <= 0 for value in logprobs.token_logprobs)
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert max(top.values()) == pytest.approx(value)  # greedy: the best is the chosen one
        assert token in top
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset[1] == len(logprobs.tokens[0])


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI) -> None:
    choice = complete(client, echo=True, logprobs=1).choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value is not None for value in choice.logprobs.token_logprobs[1:])


def test_prompt_logprobs_name_every_prompt_token(client: openai.OpenAI) -> None:
    rows = complete(client, **extra(prompt_logprobs=2)).choices[0].prompt_logprobs
    ids = TOKENIZER.encode(PROMPT)
    assert rows[0] is None
    for token_id, row in zip(ids[1:], rows[1:], strict=True):
        assert row[str(token_id)]["logprob"] <= 0
        assert len(row) in (2, 3)


def test_a_seed_repeats_and_different_seeds_differ(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        return str(complete(client, temperature=1.0, seed=seed, max_tokens=24).choices[0].text)

    assert text(5) == text(5)
    assert len({text(seed) for seed in range(4)}) > 1


def test_n_answers_differ_and_the_first_is_the_single_one(client: openai.OpenAI) -> None:
    three = complete(client, n=3, temperature=1.0, seed=11, max_tokens=24).choices
    assert len({choice.text for choice in three}) > 1
    assert complete(client, temperature=1.0, seed=11, max_tokens=24).choices[0].text == three[0].text


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=60, **extra(ignore_eos=True)).choices[0].text
    stop = whole[5:9]
    for stream in (False, True):
        reply = complete(client, max_tokens=60, stop=[stop, "never"], stream=stream, **extra(ignore_eos=True))
        choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
        assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
        assert choices[-1].finish_reason == "stop"
        assert choices[-1].stop_reason == stop


def test_stop_token_ids_min_tokens_and_ignore_eos(client: openai.OpenAI) -> None:
    logprobs = complete(client, max_tokens=20, logprobs=0, **extra(ignore_eos=True)).choices[0].logprobs
    fifth = TOKENIZER.encode(logprobs.tokens[4])
    if len(fifth) == 1:
        reply = complete(client, max_tokens=20, **extra(stop_token_ids=fifth))
        assert reply.choices[0].finish_reason == "stop"
        assert reply.usage.completion_tokens <= 5
    reply = complete(client, max_tokens=300, **extra(ignore_eos=True, min_tokens=300))
    assert reply.usage.completion_tokens == 300


def test_sampling_parameters_are_taken(client: openai.OpenAI) -> None:
    fields = extra(top_k=5, min_p=0.05, repetition_penalty=1.2, priority=3, cache_salt="me")
    reply = complete(client, temperature=0.9, top_p=0.8, presence_penalty=0.5, frequency_penalty=-0.5, **fields)
    assert reply.usage.completion_tokens >= 1
    only = TOKENIZER.encode("x", add_special_tokens=False)[0]
    biased = complete(client, logit_bias={str(only): 100}, max_tokens=4, **extra(ignore_eos=True))
    assert biased.choices[0].text == "xxxx"
    top_one = complete(client, temperature=2.0, **extra(top_k=1)).choices[0].text
    assert top_one == complete(client).choices[0].text


def test_token_ids_come_when_asked(client: openai.OpenAI) -> None:
    choice = complete(client, **extra(return_token_ids=True)).choices[0]
    assert choice.prompt_token_ids == TOKENIZER.encode(PROMPT)
    assert TOKENIZER.decode(choice.token_ids) == choice.text
    chunks = [chunk.choices[0] for chunk in chat(client, stream=True, **extra(return_token_ids=True))]
    token_ids = [token_id for chunk in chunks for token_id in getattr(chunk, "token_ids", None) or []]
    assert TOKENIZER.decode(token_ids) == "".join(chunk.delta.content or "" for chunk in chunks)
    assert sum(hasattr(chunk, "prompt_token_ids") for chunk in chunks) == 1


def test_harmless_fields_of_clients_are_ignored(client: openai.OpenAI) -> None:
    assert complete(client, user="me", **extra(metadata={"a": "b"}, store=False, best_of=1)).choices
    assert chat(client, user="me", store=False, response_format={"type": "text"}, tools=[]).choices


def test_usage_tells_cached_tokens_and_a_latency_that_adds_up(client: openai.OpenAI) -> None:
    prompt = "import collections\n" * 40
    complete(client, prompt=prompt)
    usage = complete(client, prompt=prompt, **extra(return_latency=True)).usage
    assert usage.prompt_tokens_details.cached_tokens >= 32
    latency = usage.latency
    parts = ("queue_ms", "prefill_ms", "handoff_ms", "decode_ms")
    assert sum(latency[part] for part in parts) == latency["total_ms"] > 0
    chunks = list(complete(client, stream=True, **extra(return_latency=True)))
    assert chunks[-1].usage.latency["total_ms"] > 0


def test_usage_tells_which_token_broke_the_prefix(client: openai.OpenAI, server: RunningServer) -> None:
    def miss(prompt: list[int], **fields: Any) -> dict[str, Any]:
        usage = complete(client, prompt=prompt, **extra(return_prefix_misses=True, **fields)).usage
        [found] = usage.prompt_tokens_details.prefix_misses
        assert sum(found["computed"].values()) == usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
        return dict(found)

    prompt = TOKENIZER.encode("# 12:30:59\nimport abc\nfrom typing import Protocol\n" + "x = frozenset()\n" * 20)
    answer = complete(client, prompt=prompt, max_tokens=80, **extra(return_token_ids=True, ignore_eos=True))
    turn = [*prompt, *answer.choices[0].token_ids]
    following = miss([*turn, 7, 8, 9])
    assert (following["reason"], following["first_token"]) == ("never_seen", len(turn) - 1)
    assert set(following["computed"]) <= {"new", "block_rounding"}  # every full block of the answer was found, too
    edited = miss([*turn[:100], 7, *turn[101:]])
    assert (edited["reason"], edited["first_token"]) == ("differs", 100)
    assert miss(prompt, cache_salt="another")["reason"] == "other_salt"
    found = httpx.get(f"{server.url}/admin/cache/misses", params={"limit": 2}).json()
    assert found["recent"][1]["text"]["now"] != found["recent"][1]["text"]["was"]
    assert found["history"]["keeps_text"]


def test_chat_whole_and_streamed_agree(client: openai.OpenAI) -> None:
    whole = chat(client).choices[0]
    assert whole.message.role == "assistant"
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.message.content
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-2].choices[0].finish_reason == "length"


def test_chat_takes_content_parts_and_both_names_of_the_limit(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "read a file"}]
    messages = [{"role": "system", "content": "brief"}, {"role": "user", "content": parts}]
    same = chat(client, messages=messages, max_tokens=openai.omit, max_completion_tokens=12)
    assert same.choices[0].message.content == chat(client).choices[0].message.content


def test_chat_logprobs_carry_bytes_and_alternatives(client: openai.OpenAI) -> None:
    choice = chat(client, logprobs=True, top_logprobs=2, n=2).choices[1]
    content = choice.logprobs.content
    assert len(content) == 12
    assert b"".join(bytes(one.bytes) for one in content).decode() == choice.message.content
    assert all(len(one.top_logprobs) == 2 for one in content)
    assert all(one.top_logprobs == [] for one in chat(client, logprobs=True).choices[0].logprobs.content)


def test_models_health_ready_version_and_metrics(client: openai.OpenAI, server: RunningServer) -> None:
    assert client.models.list().data[0].id == MODEL
    assert client.models.retrieve(MODEL).max_model_len == 8192
    for path in ("/health", "/ready", "/version", "/metrics", "/openapi.json", "/docs"):
        assert httpx.get(server.url + path).status_code == 200
    version = httpx.get(server.url + "/version").json()
    assert version.pop("chat_template")["error"] == ""
    assert version == {
        "version": __version__,
        "control": compiled_modules.what_runs(),
        "instruction_set": choose(torch.bfloat16),
        "weights": "bfloat16",
        "processor": read_processor().describe(1),
    }
    before = server.metrics()
    complete(client, **extra(ttft_slo_ms=60000, tpot_slo_ms=60000))
    after = server.metrics()
    for name, by in (
        ("vllm:generation_tokens_total", 12),
        ('vllm:request_success_total{finished_reason="length"}', 1),
        ("vllm:time_to_first_token_seconds_count", 1),
        ("vllm:e2e_request_latency_seconds_count", 1),
        ("diptych:requests_with_slo_total", 1),
        ("diptych:requests_meeting_slo_total", 1),
    ):
        assert after[name] - before[name] == by, name
    names = ("vllm:inter_token_latency_seconds_count", "vllm:spec_decode_num_accepted_tokens_total")

    def num_later_tokens() -> float:  # a step gives one, and the guessed ones that were right
        now = server.metrics()
        return sum(now[name] - before[name] for name in names)

    wait_until(lambda: num_later_tokens() >= 11)  # workers count guesses, those of earlier tests too, in a later report
    for name in ("vllm:kv_cache_usage_perc", "vllm:num_preemptions_total", "diptych:step_time_model_error"):
        assert name in after


def test_tokenize_and_detokenize_are_inverse(server: RunningServer) -> None:
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": PROMPT}).json()
    assert tokens == {"count": len(tokens["tokens"]), "max_model_len": 8192, "tokens": TOKENIZER.encode(PROMPT)}
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": PROMPT}
    chat = httpx.post(f"{server.url}/tokenize", json={"messages": [{"role": "user", "content": "x"}]})
    assert chat.json()["count"] > 1


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"max_tokens": 9000}, 400, "max_tokens"),
        ({"prompt": "x " * 9000}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [[1], []]}, 400, "prompt"),
        ({"prompt": [4096]}, 400, "prompt"),
        ({"prompt": ["a", 1]}, 400, "prompt"),
        ({"prompt": None}, 400, "prompt"),
        ({"model": "gpt-4"}, 404, "model"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"n": 0}, 400, "n"),
        ({"n": 1.5}, 400, "n"),
        ({"max_tokens": True}, 400, "max_tokens"),
        ({"min_tokens": 13}, 400, "min_tokens"),
        ({"logprobs": 21}, 400, "logprobs"),
        ({"stop": [""]}, 400, "stop"),
        ({"stop_token_ids": [5000]}, 400, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"5000": 1}}, 400, "logit_bias"),
        ({"seed": 2**63}, 400, "seed"),
        ({"suffix": "x"}, 400, "suffix"),
        ({"best_of": 3}, 400, "best_of"),
        ({"guided_json": {"type": "nothing"}}, 400, "guided_json.type"),
        ({"ttft_slo_ms": 0}, 400, "ttft_slo_ms"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage"),
    ],
)
def test_a_wrong_completion_is_refused_and_its_field_named(
    server: RunningServer, fields: dict[str, Any], status: int, param: str
) -> None:
    reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 12, **fields})
    error = reply.json()["error"]
    assert reply.status_code == status, error
    assert error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "nothing"}}, "response_format.type"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 8192}, "max_completion_tokens"),
        ({"logprobs": 3}, "logprobs"),
    ],
)
def test_a_wrong_chat_is_refused_and_its_field_named(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_that_is_no_request_is_a_400(server: RunningServer, body: bytes) -> None:
    reply = httpx.post(f"{server.url}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_unknown_paths_and_methods_and_huge_bodies(server: RunningServer) -> None:
    assert httpx.get(f"{server.url}/v1/nothing").status_code == 404
    assert httpx.get(f"{server.url}/v1/completions").status_code == 405
    assert httpx.get(f"{server.url}/v1/models/nothing").json()["error"]["code"] == "model_not_found"
    for content in (b"x" * (17 * 2**20), iter([b"x" * 2**20] * 17)):
        reply = httpx.post(f"{server.url}/v1/completions", content=content)
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "body_too_large"


def test_the_client_library_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="8192") as caught:
        complete(client, max_tokens=9000)
    assert caught.value.param == "max_tokens"
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        complete(client, model="nothing")
