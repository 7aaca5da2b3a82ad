"""Prompts that one engine computes and another continues, by vLLM's and SGLang's protocols, and every way to fail."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_engine import ROOMS, TRANSFERS, FakeEngine, Fault, answer_to
from front_harness import FrontClient, fronted

from diptych.control.cluster.cluster_config import cluster_config
from diptych.control.errors import ConfigError
from diptych.serving.front.engine_spec import EngineSpec, FrontOptions

pytestmark = pytest.mark.asyncio
ALWAYS = cluster_config(disaggregate="always")


@asynccontextmanager
async def pools(
    kind: str, roles: Iterable[str] = ("prefill", "decode"), options: dict[str, Any] | None = None, **more: Any
) -> AsyncIterator[FrontClient]:
    """A front over engines with these roles."""
    TRANSFERS.clear()
    ROOMS.clear()
    engines = [FakeEngine(kind, phase=role, **more) for role in roles]
    for engine in engines:
        await engine.start()
    specs = [EngineSpec(kind, engine.url, role=engine.phase) for engine in engines]  # type: ignore[arg-type]
    try:
        async with fronted(specs=specs, cluster=ALWAYS, **(options or {})) as client:
            client.engines = engines
            await client.until_up(len(engines))
            yield client
    finally:
        for engine in engines:
            await engine.stop()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_answer_is_that_of_one_engine(kind: str, stream: bool) -> None:
    async with pools(kind) as client:
        prefill, decode = client.engines
        for number in range(5):
            prompt = f"prompt {number}"
            answer = await client.complete(
                prompt, 7, stream=stream, stream_options={"include_usage": True} if stream else None
            )
            assert (answer.text, answer.finish_reason) == (answer_to(prompt, 7), "length"), answer
            assert answer.headers is not None and answer.headers["x-diptych-engine"].endswith(
                decode.url.rsplit(":", 1)[1]
            )
        assert len(prefill.requests) == len(decode.requests) == 5
        assert client.front.fleet.core.counts["handoffs"] == 5
        if kind == "vllm":
            assert all(sent["max_tokens"] == 1 and not sent["stream"] for sent in prefill.requests)
            assert not TRANSFERS
        else:
            rooms = [sent["bootstrap_room"] for sent in prefill.requests]
            assert rooms == [sent["bootstrap_room"] for sent in decode.requests] and len(set(rooms)) == 5
        assert (await client.chat("hi", 4)).text == answer_to("<user>hi<assistant>", 4)
        await client.idle()


@pytest.mark.parametrize("leg", [0, 1])
@pytest.mark.parametrize("kind", ["reset", "close", "not_http", "not_json"])
async def test_a_leg_that_breaks_before_the_first_token_is_tried_again(leg: int, kind: str) -> None:
    async with pools("vllm") as client:
        client.engines[leg].faults.append(Fault(kind))
        answer = await client.complete("the prompt", 6)
        assert (answer.text, answer.error) == (answer_to("the prompt", 6), None)
        await client.idle()


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize("leg", [0, 1])
async def test_a_leg_that_is_refused_is_tried_again(leg: int, status: int) -> None:
    async with pools("vllm", ("prefill", "prefill", "decode", "decode")) as client:
        client.engines[2 * leg].faults.append(Fault("status", status=status))
        answers = await asyncio.gather(*(client.complete(f"prompt {number}", 6) for number in range(4)))
        assert [answer.text for answer in answers] == [answer_to(f"prompt {number}", 6) for number in range(4)]
        await client.idle()


@pytest.mark.parametrize("leg", [0, 1])
async def test_what_is_wrong_with_the_request_itself_reaches_the_client(leg: int) -> None:
    async with pools("vllm") as client:
        client.engines[leg].faults.append(Fault("status", status=400))
        answer = await client.complete("the prompt", 6)
        assert (answer.status, answer.error) == (400, {"message": "as told", "code": 400})
        await client.idle()


async def test_a_prefill_engine_that_gives_no_parameters_costs_attempts_and_then_an_error() -> None:
    async with pools("vllm", gives_parameters=False) as client:
        answer = await client.complete("the prompt", 6)
        assert answer.status == 500 or answer.text == answer_to("the prompt", 6)  # (served whole where that is left)
        assert client.front.fleet.core.counts["lost_transfer"] >= 1
        await client.idle()


async def test_a_stream_that_the_decode_engine_loses_goes_on() -> None:
    async with pools("vllm", ("prefill", "decode", "decode")) as client:
        for engine in client.engines[1:]:
            engine.faults.append(Fault("reset", at=3))
        answer = await client.complete("the prompt", 10)
        assert (answer.text, answer.finish_reason, answer.error) == (answer_to("the prompt", 10), "length", None)
        await client.idle()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_leg_that_says_nothing_is_left(kind: str) -> None:
    async with pools(kind, ("prefill", "prefill", "decode", "decode"), {"first_byte_s": 0.3, "idle_s": 0.3}) as client:
        client.engines[0].faults.append(Fault("stall"))
        client.engines[2].faults.append(Fault("stall"))
        answers = await asyncio.gather(*(client.complete(f"prompt {number}", 6) for number in range(4)))
        assert [answer.text for answer in answers] == [answer_to(f"prompt {number}", 6) for number in range(4)]
        await client.idle()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("victim", [0, 2])
async def test_an_engine_that_dies_in_a_handoff_takes_no_request_with_it(kind: str, victim: int) -> None:
    async with pools(kind, ("prefill", "prefill", "decode", "decode"), prefill_s=0.1, delay_s=0.01) as client:
        tasks = [asyncio.create_task(client.complete(f"prompt {number}", 12)) for number in range(6)]
        await asyncio.sleep(0.05 if victim == 0 else 0.15)
        await client.engines[victim].stop()
        answers = await asyncio.gather(*tasks)
        if kind == "vllm":
            assert [answer.text for answer in answers] == [answer_to(f"prompt {n}", 12) for n in range(6)]
        for number, answer in enumerate(answers):
            assert answer.text == answer_to(f"prompt {number}", 12) or answer.error is not None
        await client.idle()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_client_that_leaves_ends_both_legs(kind: str) -> None:
    async with pools(kind, prefill_s=0.2) as client:
        task = asyncio.create_task(client.complete("the prompt", 50))
        await asyncio.sleep(0.1)
        for stream in list(client.front.fleet.streams._streams.values()):
            client.front.abort(stream.generation)
        await client.idle()
        assert not any(engine.handoffs.legs for engine in client.front.external.engines)
        task.cancel()


async def test_two_answers_of_one_request_stay_on_one_engine() -> None:
    async with pools("vllm") as client:
        await client.complete("the prompt", 3, n=2)
        assert sum(len(engine.requests) for engine in client.engines) == 1


async def test_kv_goes_between_engines_of_one_kind_only() -> None:
    with pytest.raises(ConfigError, match="of one kind only"):
        FrontOptions((EngineSpec("vllm", "http://a:1", "prefill"), EngineSpec("sglang", "http://b:1", "decode")))
