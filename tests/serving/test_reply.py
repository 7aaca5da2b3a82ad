"""The JSON of replies, without a server."""

import json
from typing import Any

import pytest
from fake_llm import LATENCY, TOKENIZER

from diptych.control.events import RequestFinished
from diptych.control.request import FinishReason, SamplingParams
from diptych.control.step import TokenLogprobs
from diptych.serving.answers.answer_stream import AnswerStream, Delta, Generation
from diptych.serving.api.chat import ChatWriter
from diptych.serving.api.completions import CompletionWriter
from diptych.serving.api.protocol import ChatBody, ChatReply, CompletionBody, CompletionReply
from diptych.serving.api.reply import ReplyContext, chat_logprobs, completion_logprobs, gather, prompt_logprobs

WORDS = TOKENIZER.encode("import os", add_special_tokens=False)
ENTRIES = [TokenLogprobs(token, -0.25, [(token, -0.25), (5, -1.0)]) for token in WORDS]


def generation(num_prompts: int = 1, n: int = 1) -> Generation:
    """Answers of two tokens each to prompts of 3, 4, ... tokens; the last one to end had LATENCY."""
    sequences = []
    for number in range(num_prompts * n):
        prompt = [7] * (3 + number // n)
        sequence = AnswerStream(f"id-{number}", number, prompt, SamplingParams(n=1), TOKENIZER)
        for token, entry in zip(WORDS, ENTRIES, strict=True):
            sequence.push(token, logprobs=entry)
        sequences.append(sequence)
    made = Generation("id", sequences)
    for sequence in sequences:
        sequence.end(RequestFinished(0, sequence.request_id, FinishReason.LENGTH, 3, 2, 0, LATENCY, None))
        sequence.mark()
    return made


def completion(made: Generation, texts: list[str] | None = None, **fields: Any) -> CompletionWriter:
    body = CompletionBody.model_validate({"prompt": "x", **fields})
    return CompletionWriter(ReplyContext(made, body, TOKENIZER, "model", 12), body, texts or [])


def chat(made: Generation, **fields: Any) -> ChatWriter:
    body = ChatBody.model_validate({"messages": [{"role": "user"}], **fields})
    return ChatWriter(ReplyContext(made, body, TOKENIZER, "model", 12), body)


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in data.decode().split("\n\n") if line]


def test_usage_counts_each_prompt_once_and_every_answer() -> None:
    made = generation(num_prompts=2, n=3)
    reply = json.loads(completion(made, n=3).body(made.take()))
    details = {"cached_tokens": 4}
    assert reply["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 6 * len(WORDS),
        "total_tokens": 7 + 6 * len(WORDS),
        "prompt_tokens_details": details,
    }


def test_the_latency_comes_when_asked_and_adds_up() -> None:
    made = generation()
    latency = json.loads(completion(made, return_latency=True).body(made.take()))["usage"]["latency"]
    assert latency == {"queue_ms": 1.0, "prefill_ms": 2.0, "handoff_ms": 0.0, "decode_ms": 3.0, "total_ms": 6.0}


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"echo": True}, {"return_token_ids": True, "n": 2}])
def test_a_completion_is_what_the_schema_says(fields: dict[str, Any]) -> None:
    made = generation(n=fields.get("n", 1))
    CompletionReply.model_validate_json(completion(made, ["x"], **fields).body(made.take()))


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 1}, {"return_token_ids": True}])
def test_a_chat_is_what_the_schema_says(fields: dict[str, Any]) -> None:
    made = generation()
    ChatReply.model_validate_json(chat(made, **fields).body(made.take()))


def test_the_events_of_a_stream_say_what_the_whole_reply_says() -> None:
    for fields in ({}, {"logprobs": 1}, {"return_token_ids": True}, {"echo": True}):
        whole_of, made = generation(), generation()
        whole = json.loads(completion(whole_of, ["P"], **fields).body(whole_of.take()))["choices"][0]
        writer = completion(made, ["P"], **fields)
        deltas = made.take()
        half = Delta(0, deltas[0].text[:3], deltas[0].token_ids[:1], deltas[0].logprobs[:1])
        rest = Delta(0, deltas[0].text[3:], deltas[0].token_ids[1:], deltas[0].logprobs[1:], "length")
        choices = [event["choices"][0] for event in events(writer.events([half]) + writer.events([rest]))]
        assert "".join(choice["text"] for choice in choices) == whole["text"]
        assert [choice["finish_reason"] for choice in choices] == [None, "length"]
        if "logprobs" in fields:
            for name, values in whole["logprobs"].items():
                assert [value for choice in choices for value in choice["logprobs"][name]] == values
        if "return_token_ids" in fields:
            assert [token for choice in choices for token in choice["token_ids"]] == WORDS
            assert ["prompt_token_ids" in choice for choice in choices] == [True, False]


def test_a_chat_stream_begins_with_the_role_of_each_answer() -> None:
    made = generation(n=2)
    writer = chat(made, n=2, stream=True, stream_options={"include_usage": True})
    said = events(writer.events([Delta(1, "b", [1], []), Delta(0, "a", [1], []), Delta(1, "c", [1], [])]))
    assert [(event["choices"][0]["index"], event["choices"][0]["delta"]) for event in said] == [
        (0, {"role": "assistant", "content": ""}),
        (1, {"role": "assistant", "content": ""}),
        (1, {"content": "b"}),
        (0, {"content": "a"}),
        (1, {"content": "c"}),
    ]
    [last] = events(writer.last_events())
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 2 * len(WORDS))


@pytest.mark.parametrize("name", ["100%", "%d", '"quoted"', "\u00e9\n", "%b" * 20])
def test_the_name_of_a_model_is_data_and_no_format(name: str) -> None:
    body = CompletionBody.model_validate({"prompt": "x"})
    writer = CompletionWriter(ReplyContext(generation(), body, TOKENIZER, name, 12), body, [])
    [event] = events(writer.events([Delta(0, "100% %d", [1], [])]))
    assert (event["model"], event["choices"][0]["text"]) == (name, "100% %d")


def test_continuous_usage_grows_with_every_event() -> None:
    made = generation()
    writer = completion(made, stream=True, stream_options={"continuous_usage_stats": True})
    [event] = events(writer.events([Delta(0, "x", [1], [])]))
    assert event["usage"]["completion_tokens"] == len(WORDS)
    assert writer.last_events() == b""


def test_deltas_of_one_answer_become_one() -> None:
    deltas = [Delta(1, "a", [1], []), Delta(0, "b", [2], [ENTRIES[0]]), Delta(1, "c", [3], [], "stop")]
    assert gather(deltas, 3) == [
        Delta(0, "b", [2], [ENTRIES[0]]),
        Delta(1, "ac", [1, 3], [], "stop"),
        Delta(2, "", [], []),
    ]


def test_completion_logprobs_name_the_chosen_token_even_below_the_best() -> None:
    low = TokenLogprobs(WORDS[0], -9.0, [(5, -0.1), (6, -0.2)])
    found = completion_logprobs([None, low], [WORDS[1], WORDS[0]], 10, 1, TOKENIZER)
    texts = [TOKENIZER.token_text(token) for token in (WORDS[1], WORDS[0])]
    assert found["tokens"] == texts
    assert found["token_logprobs"] == [None, -9.0]
    assert found["top_logprobs"] == [None, {TOKENIZER.token_text(5): -0.1, texts[1]: -9.0}]
    assert found["text_offset"] == [10, 10 + len(texts[0])]


def test_chat_logprobs_carry_the_bytes_of_each_token() -> None:
    content = chat_logprobs(ENTRIES, 1, TOKENIZER)["content"]
    assert b"".join(bytes(token["bytes"]) for token in content) == b"import os"
    assert [len(token["top_logprobs"]) for token in content] == [1] * len(WORDS)


def test_prompt_logprobs_rank_the_best_and_add_the_token_itself() -> None:
    assert prompt_logprobs(None, TOKENIZER) is None
    low = TokenLogprobs(WORDS[0], -9.0, [(5, -0.1)])
    first, second = prompt_logprobs([None, low], TOKENIZER) or []
    assert first is None
    assert [(key, row["rank"]) for key, row in second.items()] == [("5", 1), (str(WORDS[0]), None)]
