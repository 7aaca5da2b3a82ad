"""/v1/embeddings as OpenAI's client sees it, over make-believe vectors; and what is refused, by name."""

import math
from array import array
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from fake_llm import FakeLLM

from diptych.control.errors import OverloadedError
from diptych.serving import edge_limits
from diptych.serving.api import embeddings
from diptych.serving.api.app import build_app
from diptych.serving.api.embeddings import shortened
from diptych.serving.embedding_recipe import MODULES_FILE, POOLING_FILE, PROMPTS_FILE

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def client_of(llm: FakeLLM) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(build_app(llm, "fake"), raise_app_exceptions=False)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport) as http:
        yield openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", max_retries=0, http_client=http)


async def test_texts_and_token_ids_alone_and_in_lists() -> None:
    llm = FakeLLM()
    token_ids = llm.tokenizer.encode("two words")
    async with client_of(llm) as client:
        for given, prompts in (
            ("two words", [token_ids]),
            (["two words", "x"], [token_ids, llm.tokenizer.encode("x")]),
            ([5, 6, 7], [[5, 6, 7]]),
            ([[5, 6, 7], [8]], [[5, 6, 7], [8]]),
        ):
            reply = await client.embeddings.create(model="fake", input=given)  # type: ignore[arg-type]
            assert llm.submitted[-1].prompts == prompts
            assert (reply.model_extra or {})["id"] == llm.submitted[-1].generation.request_id
            assert [item.index for item in reply.data] == list(range(len(prompts)))
            for item, prompt in zip(reply.data, prompts, strict=True):  # (asked for as base64 by this client)
                assert item.embedding == pytest.approx([(len(prompt) + place) / 100 for place in range(8)])
            assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, prompts))
            assert reply.usage.model_extra == {"prompt_tokens_details": {"cached_tokens": len(prompts)}}
    sampling = llm.submitted[0].sampling
    assert (sampling.pooling, sampling.max_tokens, sampling.temperature) == ("last", 1, 0.0)


async def test_formats_and_fewer_dimensions_are_the_same_numbers() -> None:
    async with client_of(FakeLLM()) as client:

        async def ask(**fields: Any) -> Any:
            return (await client.embeddings.create(model="fake", input=[5, 6], **fields)).data[0].embedding

        whole = await ask(encoding_format="float")
        assert await ask() == whole
        text = await ask(encoding_format="base64")
        assert array("f", b64decode(text)).tolist() == whole
        few = await ask(encoding_format="float", dimensions=3)
        assert few == pytest.approx([number / math.dist(whole[:3], [0] * 3) for number in whole[:3]])
    assert shortened(array("f", [0.0, 0.0, 1.0]).tobytes(), 2).tolist() == [0.0, 0.0]


async def test_what_a_request_asks_for_reaches_the_engine() -> None:
    llm = FakeLLM()
    extra = {"pooling": "mean", "service_class": "batch", "cache_salt": "mine", "ttft_slo_ms": 5, "priority": 3}
    async with client_of(llm) as client:
        await client.embeddings.create(model="fake", input="a", user="me", extra_body=extra)
    [submitted] = llm.submitted
    options = submitted.options
    assert (submitted.sampling.pooling, options.service_class, options.cache_salt) == ("mean", "batch", "mine")
    assert options.priority == 3 and options.slo is not None and options.slo.ttft_ns == 5_000_000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input.1"),
        ({"input": [[1], [4096]]}, "input.1"),
        ({"input": [1] * 8192}, "input"),
        ({"input": [[1]] * 81}, "input"),  # 64 that wait and 16 that run
        ({"input": [{"type": "image_url"}]}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 9}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "cls"}, "pooling"),
        ({"extra_body": {"normalize": False}}, "normalize"),
        ({"extra_body": {"truncate_prompt_tokens": 0}}, "truncate_prompt_tokens"),
        ({"extra_body": {"truncate_prompt_tokens": -2}}, "truncate_prompt_tokens"),
        ({"extra_body": {"messages": []}}, "messages"),
    ],
    ids=str,
)
async def test_what_cannot_be_served_is_named(fields: dict[str, Any], param: str) -> None:
    fields = {"input": "a"} | fields
    if "pooling" in fields:
        fields = {"input": "a", "extra_body": {"pooling": fields["pooling"]}}
    async with client_of(FakeLLM()) as client:
        with pytest.raises(openai.BadRequestError) as raised:
            await client.embeddings.create(model="fake", **fields)
    assert str(raised.value.param).startswith(param)


async def test_long_inputs_are_cut_where_that_is_asked_for() -> None:
    llm = FakeLLM()
    async with client_of(llm) as client:
        for keep, kept in ((3, [7, 8, 9]), (-1, list(range(9000 - 8191, 9000))), (9001, None)):
            given = list(range(5, 10)) if keep == 3 else [*range(9000)] if keep < 0 else [5, 6]
            given = [token % 4096 for token in given]
            await client.embeddings.create(model="fake", input=given, extra_body={"truncate_prompt_tokens": keep})
            assert llm.submitted[-1].prompts == [[token % 4096 for token in kept] if kept else given]


async def test_another_model_a_full_queue_and_a_reply_that_would_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    async with client_of(FakeLLM(error=OverloadedError("the queue is full"))) as client:
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="other", input="a")
        with pytest.raises(openai.RateLimitError):
            await client.embeddings.create(model="fake", input="a")
    monkeypatch.setattr(edge_limits, "EMBEDDING_NUMBERS", 16)
    monkeypatch.setattr(embeddings, "NUMBERS_AT_ONCE", 8)
    async with client_of(FakeLLM()) as client:
        assert len((await client.embeddings.create(model="fake", input=["a", "b"])).data) == 2
        with pytest.raises(openai.BadRequestError, match="at most 16 numbers"):
            await client.embeddings.create(model="fake", input=["a", "b", "c"])
        assert len((await client.embeddings.create(model="fake", input=["a"] * 8, dimensions=2)).data) == 8


async def test_the_models_own_pooling_and_prompts_are_the_default(tmp_path: Path) -> None:
    llm = FakeLLM()
    llm.options = msgspec.structs.replace(llm.options, model=str(tmp_path))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / POOLING_FILE).write_text('{"pooling_mode": "mean"}')
    (tmp_path / PROMPTS_FILE).write_text('{"prompts": {"query": "q: "}, "default_prompt_name": "query"}')
    async with client_of(llm) as client:

        async def ask(given: Any, **extra: Any) -> tuple[list[list[int]], str | None]:
            await client.embeddings.create(model="fake", input=given, extra_body=extra)
            return llm.submitted[-1].prompts, llm.submitted[-1].sampling.pooling

        encode = llm.tokenizer.encode
        assert await ask(["a", "b"]) == ([encode("q: a"), encode("q: b")], "mean")
        assert await ask("a", prompt_name="", pooling="last") == ([encode("a")], "last")
        assert await ask("a", prompt_name="document") == ([encode("a")], "mean")
        assert await ask([5, 6]) == ([[5, 6]], "mean")
        for given, name, message in (("a", "other", "one of: query, document"), ([5], "query", "is for texts")):
            with pytest.raises(openai.BadRequestError, match=message):
                await ask(given, prompt_name=name)
        (tmp_path / MODULES_FILE).write_text('[{"type": "a.Transformer"}, {"type": "a.Dense", "path": "2_Dense"}]')
        with pytest.raises(openai.BadRequestError, match="2_Dense is a Dense, which is not served"):
            await ask("a", pooling="last")
