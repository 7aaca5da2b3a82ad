"""Chats that are rendered once, and sent to engines as tokens."""

import asyncio
import json

import msgspec
import pytest
from fake_engine import Fault, answer_to
from front_harness import Answer
from test_prefix_routing import publishing, settled

from diptych.serving.front.served_engines import MAX_TOKENISING
from diptych.serving.front.tokenized_prompt import read_rendered

pytestmark = pytest.mark.asyncio
PROMPT = "<user>hello<assistant>"


def deltas(answer: Answer) -> list[dict[str, object]]:
    """The deltas of the chunks with choices."""
    assert answer.events is not None
    return [event["choices"][0]["delta"] for event in answer.events if event.get("choices")]


async def test_a_chat_is_rendered_once_and_sent_as_tokens() -> None:
    async with publishing(1, takes_tokens=True) as client:
        answer = await client.chat("hello", 4, stream_options={"include_usage": True})
        [sent] = client.engines[0].requests
        assert sent["token_ids"] == [ord(letter) for letter in PROMPT] and "messages" not in sent
        assert sent["output_mode"] == "text" and sent["request_id"].startswith("chatcmpl-")
        assert client.engines[0].tokenized == 2  # one of them when it was looked at
        assert answer.text == answer_to(PROMPT, 4) and answer.finish_reason == "length" and answer.is_done
        assert answer.usage is not None and answer.usage["completion_tokens"] == 4
        assert answer.usage["prompt_tokens"] == len(PROMPT)
        assert deltas(answer)[0] == {"role": "assistant", "content": ""}
        assert answer.events is not None
        heads = {(event["id"], event["object"], event["model"]) for event in answer.events}
        assert len(heads) == 1 and next(iter(heads))[1:] == ("chat.completion.chunk", "fake-model")
        assert "token_ids" not in json.dumps(answer.events)
        await client.idle()


async def test_what_a_chat_gets_is_the_same_either_way() -> None:
    found = []
    for takes_tokens in (True, False):
        async with publishing(1, takes_tokens=takes_tokens) as client:
            stream = await client.chat("hello", 5, stream_options={"include_usage": True})
            whole = await client.chat("hello", 5, stream=False)
            assert whole.events is not None and stream.events is not None
            own = ("id", "created")
            events = [*stream.events, *whole.events]
            found.append([{name: value for name, value in event.items() if name not in own} for event in events])
    for with_tokens, without in zip(*found, strict=True):
        assert with_tokens.get("usage", {}).pop("prompt_tokens_details", {}).keys() == (
            without.get("usage", {}).pop("prompt_tokens_details", {}).keys()
        )
        for reply in (with_tokens, without):
            for choice in reply["choices"]:
                choice.pop("logprobs", None)
        assert with_tokens == without


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"logprobs": True},
        {"stop": ["x"]},
        {"n": 2},
        {"response_format": {"type": "json_object"}},
        {"unknown_field": 1},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
    ids=lambda more: next(iter(more)),
)
async def test_what_the_chat_endpoint_has_to_make_goes_there_with_the_tokens_known(more: dict[str, object]) -> None:
    async with publishing(1, takes_tokens=True) as client:
        await client.chat("hello", 3, **more)
        [sent] = client.engines[0].requests
        assert "messages" in sent and "token_ids" not in sent
        assert client.engines[0].tokenized == 2


async def test_answers_with_reasoning_are_left_to_the_engine() -> None:
    async with publishing(1, takes_tokens=True, reasons=True) as client:
        answer = await client.chat("hello", 3)
        assert "messages" in client.engines[0].requests[0]
        assert any("reasoning_content" in delta for delta in deltas(answer))


async def test_the_engine_refuses_a_chat_in_its_own_words() -> None:
    async with publishing(1, takes_tokens=True) as client:
        client.engines[0].faults.append(Fault("status", status=400))
        refused = await client.chat("hello", 3)
        assert refused.status == 400 and refused.error is not None and refused.error["message"] == "as told"
        await client.idle()


@pytest.mark.parametrize("at", [-1, 0, 3])
async def test_a_chat_that_breaks_off_goes_on_at_another_engine(at: int) -> None:
    async with publishing(2, takes_tokens=True) as client:
        for engine in client.engines:
            engine.faults.append(Fault("reset", at=at))
            break
        answers = await asyncio.gather(*(client.chat(f"number {number}", 8) for number in range(4)))
        for number, answer in enumerate(answers):
            assert answer.text == answer_to(f"<user>number {number}<assistant>", 8) and answer.error is None
        await client.idle()


async def test_tokens_of_images_are_not_taken_for_text() -> None:
    body = {
        "token_ids": [1, 2, 3, 4, 5],
        "sampling_params": {},
        "features": {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 2, "length": 2}]}},
    }
    found = read_rendered(msgspec.json.encode(body))
    assert found is not None and (found.num_plain, found.question) == (2, None)
    plain = read_rendered(msgspec.json.encode({**body, "features": None, "priority": 0}))
    assert plain is not None and plain.num_plain == 5 and plain.question is not None


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"token_ids":[],"sampling_params":{}}', b'{"token_ids":[-1],"sampling_params":{}}', b"\xff"],
)
async def test_what_is_no_rendered_request_is_none(body: bytes) -> None:
    assert read_rendered(body) is None


async def test_the_beginning_of_a_chat_is_found_in_the_cache() -> None:
    async with publishing(takes_tokens=True) as client:
        await client.chat("hello " * 30, 2)
        await settled(client)
        await client.chat("hello " * 30 + "more", 2)
        used = [engine for engine in client.engines if engine.requests]
        assert len(used) == 1 and used[0].cached[-1][0] >= 160
        assert client.front.fleet.core.router.hit_error == 0


async def test_too_many_that_are_tokenised_at_once_are_placed_by_load_alone() -> None:
    async with publishing(takes_tokens=True) as client:
        client.front._num_tokenising = MAX_TOKENISING
        before = sum(engine.tokenized for engine in client.engines)
        answer = await client.chat("hello", 4)
        assert answer.text == answer_to(PROMPT, 4) and sum(engine.tokenized for engine in client.engines) == before


async def test_a_deadline_counts_while_the_prompt_is_tokenised() -> None:
    async with publishing(1, takes_tokens=True, render_s=0.3) as client:
        late = await client.chat("hello", 4, deadline_ms=100)
        assert late.status in (429, 503) and late.error is not None and not client.engines[0].requests
        assert (await client.chat("hello", 4, deadline_ms=5000)).text == answer_to(PROMPT, 4)
        await client.idle()
