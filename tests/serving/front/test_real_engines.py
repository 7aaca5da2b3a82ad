"""The front over engines that really run: skipped unless DIPTYCH_REAL_ENGINES names them, as --engine does.

    vllm serve MODEL --port 8101 --enable-prompt-tokens-details --scheduler-cls diptych.vllm_plugin.scheduler \
        --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}'
    DIPTYCH_REAL_ENGINES="vllm=http://127.0.0.1:8101,kv_events=tcp://127.0.0.1:5557 llamacpp=http://127.0.0.1:8103" \
        pytest -m slow tests/serving/front/test_real_engines.py

Each test runs over all engines of one kind. DIPTYCH_REAL_ENGINE_PID is the process of the last one: it is killed by the
last test. Every answer is greedy, and compared with that of the engine without a front.
"""

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from front_harness import Answer, FrontClient, fronted, read_stream

from diptych.serving.front.engine_spec import EngineSpec, parse_engines
from diptych.timeline.records import StepRecord

SPECS = [spec for text in os.environ.get("DIPTYCH_REAL_ENGINES", "").split() for spec in parse_engines(text)]
PID = int(os.environ.get("DIPTYCH_REAL_ENGINE_PID", "0"))
LEFT_OUT = ("prompt_token_ids", "system_fingerprint")  # the latter is of vLLM's own chat events
KINDS = list(dict.fromkeys(spec.kind for spec in SPECS))
SETTINGS: dict[str, Any] = {"probe_s": 0.2, "silence_s": 2.0, "bytes_per_token": 4.0}

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.slow,
    pytest.mark.system,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not SPECS, reason="DIPTYCH_REAL_ENGINES names no engine"),
]


def specs_of(kind: str) -> list[EngineSpec]:
    return [spec for spec in SPECS if spec.kind == kind]


@asynccontextmanager
async def over(specs: Sequence[EngineSpec]) -> AsyncIterator[FrontClient]:
    """A front over these, all of them ready."""
    block = 16 if any(spec.kv_events for spec in specs) else 128
    async with fronted(specs=list(specs), **{**SETTINGS, "block_size": block}) as client:
        async with asyncio.timeout(60):
            while len(client.front.external.core.members.up) < len(specs):
                await asyncio.sleep(0.05)
        client.http.timeout = httpx.Timeout(120)
        yield client


async def direct(spec: EngineSpec, path: str, body: dict[str, Any]) -> Answer:
    """The same of an engine itself."""
    async with httpx.AsyncClient(base_url=spec.url, timeout=120, headers=spec.headers) as http:
        return read_stream(await http.post(path, json=body))


def model_of(client: FrontClient) -> str:
    return client.front.engine_models[0]


def body_of(client: FrontClient, prompt: Any, max_tokens: int = 12, **more: Any) -> dict[str, Any]:
    return {
        "model": model_of(client), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, **more
    }  # fmt: skip


def fields(event: dict[str, Any]) -> list[str]:
    """Names in an event, but for those that the front has asked for and takes out, and for what says nothing."""
    return sorted(name for name, value in event.items() if value is not None and name not in LEFT_OUT)


@pytest.mark.skipif(not any(spec.kv_events for spec in SPECS), reason="no engine publishes its KV events")
async def test_chats_as_tokens_are_those_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that was started with --enable-scale-out."""
    async with over([spec for spec in SPECS if spec.kv_events][:1]) as client:
        engine = client.front.external.engines[0]
        assert engine.facts is not None
        if not engine.facts.capabilities.tokens_in:
            pytest.skip("it takes no tokens")
        asked: list[str] = []
        send = engine.pool.send

        def recorded(method: str, path: str, *rest: Any, **more: Any) -> Any:
            asked.append(path)
            return send(method, path, *rest, **more)

        monkeypatch.setattr(engine.pool, "send", recorded)
        for number in range(20):
            messages = [{"role": "user", "content": f"{number} prompts with words {'and more ' * number}"}]
            body = {"model": model_of(client), "messages": messages, "max_tokens": 20, "temperature": 0}
            body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
            expected = await direct(engine.spec, "/v1/chat/completions", body)
            found = await client.post("/v1/chat/completions", body)
            assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason)
            assert found.usage and expected.usage and found.is_done
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert found.usage[name] == expected.usage[name]
            body |= {"stream": False}
            del body["stream_options"]
            whole = await client.post("/v1/chat/completions", body)
            assert (whole.text, whole.finish_reason) == (expected.text, expected.finish_reason)
        assert asked.count("/inference/v1/generate") == asked.count("/v1/chat/completions/render") == 40
        assert "/v1/chat/completions" not in asked and "/tokenize" not in asked


@pytest.mark.parametrize("kind", KINDS)
async def test_streams_are_those_of_the_engine(kind: str) -> None:
    specs = specs_of(kind)
    async with over(specs) as client:
        completion = body_of(client, "def main(argv):", stream_options={"include_usage": True})
        chat = {**completion, "messages": [{"role": "user", "content": "hello"}]}
        del chat["prompt"]
        for path, body in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
            own, theirs = await client.post(path, body), await direct(specs[0], path, body)
            assert own.error is None
            assert own.is_done
            assert (own.text, own.finish_reason) == (theirs.text, theirs.finish_reason)
            assert own.usage is not None
            assert theirs.usage is not None
            assert own.usage["completion_tokens"] == theirs.usage["completion_tokens"]
            assert own.events is not None
            assert theirs.events is not None
            for at in (0, -1):  # a busy engine puts several tokens into one event
                assert fields(own.events[at]) == fields(theirs.events[at])
        plain = body_of(client, "def main(argv):")
        without, theirs = await client.post("/v1/completions", plain), await direct(specs[0], "/v1/completions", plain)
        assert (without.usage is None) == (theirs.usage is None)  # llama.cpp gives it always
        assert b"token_ids" not in json.dumps(without.events).replace('token_ids": null', "").encode()
        await client.idle()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_leaves_frees_the_engine(kind: str) -> None:
    specs = specs_of(kind)
    async with over(specs) as client:
        body = {**body_of(client, "def main(", max_tokens=1500), "ignore_eos": True}
        task = asyncio.create_task(client.post("/v1/completions", body))
        engines = client.front.external.engines
        async with asyncio.timeout(30):
            while not any(exchange.num_tokens > 3 for engine in engines for exchange in engine.exchanges.values()):
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(20):
            while any(engine.load._gauges.num_running for engine in engines):
                await asyncio.sleep(0.2)
        await asyncio.sleep(1.0)  # two looks at the gauges later it is still gone
        assert not any(engine.load._gauges.num_running for engine in engines)
        await client.idle()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind == "vllm"])
async def test_what_is_predicted_to_be_cached_is_what_the_engine_reports(kind: str) -> None:
    specs = [spec for spec in specs_of(kind) if spec.kv_events]
    if len(specs) < 2:
        pytest.skip("needs two engines with kv_events")
    async with over(specs) as client:
        seen: list[tuple[int, int]] = []
        watch = client.front.fleet.core.router.watch  # type: ignore[attr-defined]
        observe = watch.observe

        def note(predicted: int, actual: int, num_prompt_tokens: int) -> None:
            seen.append((predicted, actual))
            observe(predicted, actual, num_prompt_tokens)

        watch.observe = note
        rng = random.Random(os.getpid())

        async def converse() -> None:
            ids = [rng.randrange(300, 4000) for _ in range(rng.randrange(150, 500))]
            for _ in range(5):
                more = {"return_token_ids": True, "ignore_eos": True}
                answer = await client.post("/v1/completions", body_of(client, ids, **more))
                assert answer.error is None
                assert answer.events is not None
                got = [token for event in answer.events for choice in event["choices"] for token in choice["token_ids"]]
                ids = [*ids, *got, *(rng.randrange(300, 4000) for _ in range(rng.randrange(20, 200)))]
                await asyncio.sleep(0.1)  # events come after the answer

        await asyncio.gather(*(converse() for _ in range(12)))
        wrong = [pair for pair in seen if pair[0] != pair[1]]
        hits = sum(actual for _, actual in seen)
        print(f"{len(seen)} prompts, {hits} cached tokens, predicted otherwise: {wrong}")
        assert len(seen) == 60
        assert hits
        assert len(wrong) <= 1
        assert all(engine.cache.kind == "exact" for engine in client.front.external.engines)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind == "vllm"])
async def test_steps_of_the_engine_are_on_the_timeline(kind: str) -> None:
    specs = [spec for spec in specs_of(kind) if spec.step_events]
    if not specs:
        pytest.skip("needs an engine with step_events")
    async with over(specs[:1]) as client:
        await asyncio.sleep(0.5)  # a subscription takes a moment
        answers = await asyncio.gather(
            *(
                client.post("/v1/completions", body_of(client, [7 + number] * 40, 80, ignore_eos=True))
                for number in range(3)
            )
        )
        assert all(answer.error is None for answer in answers)
        await asyncio.sleep(0.5)
        steps = [record for record in client.front.timeline.since(0) if isinstance(record, StepRecord)]
        ids = {request_id for step in steps for request_id, _, _ in step.prefills}
        assert len(ids) == 3
        assert all(request_id.startswith("cmpl-") and len(request_id) == 37 for request_id in ids)
        assert sum(num_tokens for step in steps for _, _, num_tokens in step.prefills) == 120
        assert sum(step.num_decodes for step in steps) == 3 * 79
        assert any(step.joined for step in steps)
        feed = client.front.external.engines[0].steps.feed
        assert feed is not None
        assert feed.num_missed == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_streams_that_move_at_any_token_keep_their_text(kind: str) -> None:
    """Also within a character: a model with random weights gives hardly anything but parts of characters."""
    specs = specs_of(kind)
    if len(specs) < 2:
        pytest.skip("needs two engines of a kind")
    async with over(specs) as client:
        engines, changes = client.front.external.engines, client.front.fleet.changes
        if not all(engine.facts and engine.facts.capabilities.tokens_out for engine in engines):
            pytest.skip("does not name its tokens")
        bodies = [body_of(client, [100 + number] * 60, max_tokens=200, ignore_eos=True) for number in range(8)]
        expected = [await direct(specs[0], "/v1/completions", body) for body in bodies]
        tasks = [asyncio.create_task(client.post("/v1/completions", body)) for body in bodies]
        drained = 0
        while not all(task.done() for task in tasks):
            changes.drain(drained)
            await asyncio.sleep(0.1)
            changes.use_again(drained)
            drained = (drained + 1) % len(specs)
        answers = [await task for task in tasks]
        print(f"{client.front.fleet.core.counts} in {len(answers)} streams")
        assert [answer.text for answer in answers] == [right.text for right in expected]
        await client.idle()


@pytest.mark.skipif(not PID, reason="DIPTYCH_REAL_ENGINE_PID names no process")
async def test_streams_of_an_engine_that_is_killed_go_on_at_another_where_its_tokens_are_known() -> None:
    specs = specs_of(SPECS[-1].kind)
    if len(specs) < 2:
        pytest.skip("needs two engines of a kind")
    async with over(specs) as client:
        prompts = [[100 + number] * 60 for number in range(12)]
        bodies = [body_of(client, prompt, max_tokens=150, ignore_eos=True) for prompt in prompts]
        expected = [await direct(specs[0], "/v1/completions", body) for body in bodies]
        tasks = [asyncio.create_task(client.post("/v1/completions", body)) for body in bodies]
        last = client.front.external.engines[-1]
        async with asyncio.timeout(60):
            while not any(exchange.num_tokens > 5 for exchange in last.exchanges.values()):
                await asyncio.sleep(0.01)
        os.kill(PID, signal.SIGKILL)
        answers = await asyncio.gather(*tasks)
        print(f"{sum(answer.text == right.text for answer, right in zip(answers, expected, strict=True))} of 12 equal")
        names_tokens = all(
            engine.facts and engine.facts.capabilities.tokens_out for engine in client.front.external.engines
        )
        for answer, right in zip(answers, expected, strict=True):
            is_whole = answer.is_done and answer.error is None and answer.finish_reason == "length"
            assert is_whole or (answer.error is not None and not names_tokens)
            assert not names_tokens or right.text == answer.text  # others may depend on what else is in a batch
        await client.idle()
