"""Streams of engines that say nothing for long: the client of a front does not wait in silence, and nothing is lost."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_engine import FakeEngine, Fault, answer_to
from front_harness import Answer, FrontClient, fronted

from diptych.control.cluster.cluster_config import cluster_config
from diptych.serving.api import responses
from diptych.serving.api.api_flavour import COMMENT

pytestmark = pytest.mark.asyncio
impatient = pytest.mark.usefixtures("impatience")
HARMLESS = Fault("none", at=10**9)


@pytest.fixture
def impatience(patience: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "OPEN_AFTER_S", 0.02)
    monkeypatch.setattr(responses, "SILENCE_S", 0.02)
    monkeypatch.setattr(responses, "HEAD_ALONE_S", 0.02)


async def raw(client: FrontClient, **more: Any) -> tuple[Answer, str]:
    """A completion, and the text of its stream."""
    body = {"prompt": "the prompt", "max_tokens": 6, "temperature": 0, "stream": True, **more}
    reply = await client.http.post("/v1/completions", json=body)
    answer = Answer(reply.status_code, headers=reply.headers)
    if reply.status_code == 200:
        for event in reply.text.split("\n\n"):
            if event.startswith("data: {"):
                content = json.loads(event[6:])
                answer.error = content.get("error")
                answer.text += "".join(choice["text"] for choice in content.get("choices", ()))
    return answer, reply.text


@impatient
async def test_a_stream_begins_before_its_engine_does_and_is_never_silent() -> None:
    async with fronted(FakeEngine(prefill_s=0.3)) as client:
        answer, said = await raw(client)
        assert answer.text == answer_to("the prompt", 6)
        assert said.startswith(COMMENT.decode() * 2)
        assert (
            answer.headers is not None and answer.headers["x-diptych-engine"] == client.front.external.engines[0].name
        )
        assert answer.headers["x-diptych-recovery"] == "exact"
        await client.idle()


@impatient
async def test_a_stream_whose_engine_names_no_tokens_says_from_its_beginning_that_it_cannot_go_on() -> None:
    async with fronted(FakeEngine("openai", prefill_s=0.3)) as client:
        answer, _ = await raw(client)
        assert answer.headers is not None and answer.headers["x-diptych-recovery"] == "none"
        assert answer.text == answer_to("the prompt", 6)


@impatient
@pytest.mark.parametrize("kind", ["reset", "close", "error_event", "garbage"])
@impatient
async def test_a_stream_that_has_begun_without_a_token_is_tried_elsewhere(kind: str) -> None:
    engines = [FakeEngine(prefill_s=0.1), FakeEngine(prefill_s=0.1)]
    async with fronted(*engines) as client:
        for engine in engines:
            engine.faults.append(Fault(kind, at=0))
        engines[1].faults.clear()
        for _ in range(2):  # whichever is asked first
            answer, said = await raw(client)
            assert (answer.status, answer.text, answer.error) == (200, answer_to("the prompt", 6), None)
            assert said.endswith("data: [DONE]\n\n")
        await client.idle()


@impatient
async def test_a_chat_that_is_tried_elsewhere_begins_once() -> None:
    engines = [FakeEngine(prefill_s=0.1), FakeEngine(prefill_s=0.1)]
    async with fronted(*engines) as client:
        for engine in engines:
            engine.faults.append(Fault("reset", at=0))
            answer = await client.chat("hello", 6)
            roles = [event for event in answer.events or () if "role" in event["choices"][0]["delta"]]
            assert (len(roles), answer.error) == (1, None)
        await client.idle()


@asynccontextmanager
async def one_waits(client: FrontClient) -> AsyncIterator[asyncio.Task[tuple[Answer, str]]]:
    """A request that waits in the front's queue behind another, and has begun its stream."""
    first = asyncio.create_task(raw(client))
    while not client.engines[0].requests:
        await asyncio.sleep(0.001)
    yield asyncio.create_task(raw(client))
    answer, _ = await first
    assert answer.text == answer_to("the prompt", 6)
    await client.idle()


@impatient
async def test_a_stream_waits_for_an_engine_with_its_head_sent() -> None:
    cluster = cluster_config(max_prefills_in_flight_per_worker=1)
    async with fronted(FakeEngine(prefill_s=0.3), cluster=cluster) as client, one_waits(client) as second:
        answer, said = await second
        assert answer.text == answer_to("the prompt", 6)
        assert said.startswith(COMMENT.decode() * 2)


@impatient
async def test_what_an_engine_refuses_after_that_is_said_in_the_stream_in_its_words() -> None:
    engine = FakeEngine(prefill_s=0.3, faults=deque([HARMLESS, Fault("status", status=400)]))
    cluster = cluster_config(max_prefills_in_flight_per_worker=1)
    async with fronted(engine, cluster=cluster) as client, one_waits(client) as second:
        answer, said = await second
        assert (answer.status, answer.error) == (200, {"message": "as told", "code": 400})
        assert said.endswith("data: [DONE]\n\n")


async def test_what_an_engine_refuses_at_once_has_its_status() -> None:
    async with fronted(FakeEngine(faults=deque([Fault("status", status=400)]))) as client:
        answer = await client.complete("the prompt")
        assert (answer.status, answer.error) == (400, {"message": "as told", "code": 400})
