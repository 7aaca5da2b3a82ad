"""Requests through a front: what engines get, what clients get, whichever kind of engine it is."""

import asyncio
import gc
import json

import pytest
from fake_engine import FakeEngine, answer_to
from front_harness import fronted

from diptych.control.slo import NS_PER_S
from diptych.serving.front import engine_pages
from diptych.serving.front.engine_spec import EngineSpec
from diptych.serving.front.relay_request import RelayRequest
from diptych.serving.front.relay_stream import RelayStream

KINDS = ("vllm", "sglang", "llamacpp", "openai")
pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_is_that_of_the_engine(kind: str) -> None:
    async with fronted(FakeEngine(kind)) as client:
        answer = await client.complete("hello there", 6)
        assert (answer.text, answer.finish_reason, answer.is_done) == (answer_to("hello there", 6), "length", True)
        assert answer.headers is not None and answer.headers["x-diptych-engine"].startswith(kind)
        await client.idle()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_whole_reply_is_that_of_the_engine(kind: str) -> None:
    async with fronted(FakeEngine(kind)) as client:
        answer = await client.chat("hi", 5, stream=False)
        assert answer.text == answer_to("<user>hi<assistant>", 5)
        assert answer.usage is not None and answer.usage["completion_tokens"] == 5
        await client.idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_events_of_several_lines_are_events_of_several_lines(path: str) -> None:
    async with fronted(FakeEngine(indents=True)) as client:
        what = {"prompt": "abc"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "abc"}]}
        reply = await client.http.post(path, json={**what, "max_tokens": 4, "stream": True})
        *events, done, rest = reply.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        text, prompt = "", "abc" if path == "/v1/completions" else "<user>abc<assistant>"
        for event in events:
            lines = event.split("\n")
            assert len(lines) > 1 and all(line.startswith("data: ") for line in lines)
            choice = json.loads("\n".join(line[6:] for line in lines))["choices"][0]
            text += choice["text"] if "text" in choice else choice["delta"]["content"]
        assert text == answer_to(prompt, 4)
        await client.idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_events_are_lines_for_readers_that_know_more_ends_of_lines(path: str) -> None:
    async with fronted(FakeEngine(after="\x85\u2028\u2029")) as client:
        asked = client.complete if path == "/v1/completions" else client.chat
        answer = await asked("abc", 8)
        assert answer.text.count("\x85\u2028\u2029") == 4 and answer.is_done
        what = {"prompt": "abc"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "abc"}]}
        reply = await client.http.post(path, json={**what, "max_tokens": 8, "stream": True})
        assert reply.text.splitlines() == reply.text.removesuffix("\n").split("\n")
        await client.idle()


async def test_what_the_front_asked_for_itself_is_taken_out_again() -> None:
    async with fronted(FakeEngine()) as client:
        answer = await client.complete("abc", 3)
        sent = client.engines[0].requests[0]
        assert sent["return_token_ids"] and sent["stream_options"] == {"include_usage": True}
        assert answer.usage is None and answer.events is not None
        assert all("token_ids" not in choice for event in answer.events for choice in event["choices"])
        asked = await client.complete("abc", 3, stream_options={"include_usage": True})
        assert asked.usage is not None and asked.usage["prompt_tokens"] == 3


async def test_own_fields_do_not_reach_the_engine_and_others_do() -> None:
    async with fronted(FakeEngine()) as client:
        own = {"ttft_slo_ms": 500, "service_class": "interactive", "metadata": {"a": "b"}, "priority": 3}
        await client.complete("abc", 2, **own, guided_regex="a+", vllm_xargs={"x": 1})
        sent = client.engines[0].requests[0]
        assert not set(own) & set(sent)
        assert sent["guided_regex"] == "a+" and sent["vllm_xargs"] == {"x": 1}
        assert "return_token_ids" not in sent  # an answer under a grammar cannot be continued elsewhere


async def test_an_engines_refusal_reaches_the_client_as_it_is() -> None:
    from fake_engine import Fault

    engine = FakeEngine()
    engine.faults.append(Fault("status", status=400))
    async with fronted(engine) as client:
        answer = await client.complete("abc")
        assert answer.status == 400 and answer.error == {"message": "as told", "code": 400}
        await client.idle()


async def test_embeddings_pass() -> None:
    async with fronted(FakeEngine()) as client:
        reply = await client.http.post("/v1/embeddings", json={"input": "x", "model": "fake-model"})
        assert reply.status_code == 200 and reply.json()["data"][0]["embedding"] == [0.5, 0.25]
        await client.idle()


@pytest.mark.parametrize(
    ("body", "param"),
    [({"prompt": "x", "max_tokens": -1}, "max_tokens"), ({"prompt": "x", "service_class": "gold"}, "service_class"),
     ({"max_tokens": 3}, "prompt"), ({"prompt": "x", "n": "two"}, "n"),
     ({"prompt": "x", "deadline_ms": 0}, "deadline_ms")],
)  # fmt: skip
async def test_a_wrong_field_is_named(body: dict[str, object], param: str) -> None:
    async with fronted(FakeEngine()) as client:
        answer = await client.post("/v1/completions", body)
        assert answer.status == 400 and answer.error is not None and answer.error["param"] == param
        assert not client.engines[0].requests


async def test_a_body_that_is_no_json_and_a_model_that_is_not_there() -> None:
    async with fronted(FakeEngine()) as client:
        reply = await client.http.post("/v1/completions", content=b"{")
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json")
        answer = await client.complete("x", model="other")
        assert answer.status == 404 and answer.error is not None and answer.error["code"] == "model_not_found"


async def test_a_client_that_leaves_ends_its_request_at_the_engine() -> None:
    engine = FakeEngine(delay_s=0.01, answer_tokens=0)
    async with fronted(engine) as client:
        task = asyncio.create_task(client.complete("abc", 5000))
        while not engine.num_running:
            await asyncio.sleep(0.005)
        generation = next(iter(client.front.fleet.streams._streams.values())).generation
        client.front.abort(generation)
        await client.idle()
        async with asyncio.timeout(5):
            while engine.num_running:
                await asyncio.sleep(0.01)
        task.cancel()


async def test_api_keys_and_the_engines_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from diptych.serving.front.engine_spec import EngineSpec

    engine = await FakeEngine(api_key="secret").start()
    url = engine.url
    await engine.stop()
    monkeypatch.setenv("ENGINE_KEY", "secret")
    port = int(url.rsplit(":", 1)[1])
    engine = await FakeEngine(api_key="secret").start(port)
    spec = EngineSpec("vllm", url, api_key_env="ENGINE_KEY")
    async with fronted(specs=[spec], app={"api_keys": ["mine"]}) as client:
        async with asyncio.timeout(5):
            while not client.front.is_routable:
                await asyncio.sleep(0.01)
        assert (await client.complete("abc")).status == 401
        body = {"prompt": "abc", "max_tokens": 2, "temperature": 0}
        answer = await client.post("/v1/completions", body, Authorization="Bearer mine")
        assert answer.text == answer_to("abc", 2)
    await engine.stop()


async def test_pages_say_what_is_known_and_refuse_what_is_not() -> None:
    async with fronted(FakeEngine(), FakeEngine("sglang", has_metrics=False, reports_cache=False)) as client:
        await client.complete("abc")
        engines = (await client.http.get("/engines")).json()["engines"]
        assert [engine["version"] for engine in engines] == ["0.32.0-fake", "0.5.23-fake"]
        assert engines[0]["degraded"] == [] and engines[0]["capabilities"]["tokens_out"]
        assert any("--enable-metrics" in words for words in engines[1]["degraded"])
        refused = await client.http.get("/diagnosis")
        assert refused.status_code == 409 and refused.json()["error"]["code"] == "no_engine_metrics"
        assert (await client.http.get("/ready")).status_code == 200
        assert (await client.http.get("/ui/state")).json()["workers"][0]["is_up"]
        assert (await client.http.get("/v1/models")).json()["data"][0]["id"] == "fake-model"
        assert "vllm:generation_tokens_total" in (await client.http.get("/metrics")).text


async def test_a_front_has_several_names_for_its_model() -> None:
    app = {"model_name": "first", "also_served_as": ("second",)}
    async with fronted(FakeEngine(), app=app) as client:
        for name in ("first", "second", "fake-model"):
            answer = await client.post("/v1/completions", {"model": name, "prompt": "abc", "max_tokens": 2})
            assert answer.status == 200
        listed = (await client.http.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == ["first", "second"]
        own = await client.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert own.json()["last_id"] == "second"
        assert (await client.http.head("/v1/models")).status_code == 200
        packed = await client.http.post("/v1/completions", content=b"x", headers={"content-encoding": "gzip"})
        assert packed.status_code == 415


async def test_the_engines_behind_it_are_diagnosed_by_their_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pages, "FEWEST_NS", 1)
    async with fronted(FakeEngine(), FakeEngine(), FakeEngine("llamacpp")) as client:
        async with asyncio.timeout(10):
            while sum(engine.watched() is not None for engine in client.front.external.engines) < 2:
                await asyncio.sleep(0.02)
        found = (await client.http.get("/diagnosis?slo=ttft=300ms")).json()
        assert found["engine"] == "vllm" and found["version"] == "0.32.0-fake" and found["num_requests"] == 0
        urls = [engine.url for engine in client.engines[:2]]
        assert [server["source"] for server in found["servers"]] == urls and found["sentence"].startswith(urls[0])
        wrong = await client.http.get("/diagnosis?slo=ttft")
        assert wrong.status_code == 400


async def test_a_diagnosis_that_cannot_be_made_here_says_where() -> None:
    async with fronted(FakeEngine("llamacpp")) as client:
        refused = await client.http.get("/diagnosis")
        assert refused.status_code == 409
        assert refused.json()["error"]["message"].endswith(f"run: diptych diagnose {client.engines[0].url}")
    async with fronted(FakeEngine("openai")) as client:
        assert (await client.http.get("/diagnosis")).status_code == 409


async def test_pages_of_the_last_minute_are_kept_at_distances() -> None:
    pages, spec = engine_pages.EnginePages(), EngineSpec("vllm", "http://h:1")
    assert pages.watched(spec, "1") is None
    for second in range(200):
        pages.add(b"%d" % second, second * NS_PER_S)
    watched = pages.watched(spec, "1")
    assert watched is not None
    assert watched.pages == [(float(second), b"%d" % second) for second in (144, 152, 160, 168, 176, 184, 192, 199)]
    pages.clear()
    pages.add(b"0", 0)
    assert pages.watched(spec, "1") is None


async def test_events_that_come_at_once_are_the_events_that_come_one_by_one() -> None:
    for delay_s in (0.0, 0.005):
        async with fronted(FakeEngine(delay_s=delay_s)) as client:
            answer = await client.complete("abc", 12, stream_options={"include_usage": True})
            assert (answer.text, answer.finish_reason, answer.is_done) == (answer_to("abc", 12), "length", True)
            assert answer.usage is not None and answer.usage["completion_tokens"] == 12
            await client.idle()
            assert client.front.metrics.num_generated_tokens == 12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["completions", "chat"])
async def test_tokens_without_text_reach_the_client_as_they_come(kind: str, path: str) -> None:
    """Parts of a character are tokens, also of an engine that does not name tokens: none waits for the next letter."""
    async with fronted(FakeEngine(kind, names_tokens=False, shows_text=False, delay_s=0.01)) as client:
        ask = client.complete if path == "completions" else client.chat
        answer = await ask("hello there", 6)
        assert (answer.text, answer.finish_reason, answer.is_done) == ("", "length", True)
        await client.idle()
        assert client.front.metrics.num_generated_tokens == 5  # the last one's event ends the answer, and may be none


async def test_of_several_models_the_named_one_is_served() -> None:
    engine = FakeEngine("openai", other_models=("embedder",))
    await engine.start()
    try:
        async with fronted(specs=[EngineSpec("openai", engine.url, model="fake-model")]) as client:
            async with asyncio.timeout(10):
                while not client.front.fleet.core.members.up:
                    await asyncio.sleep(0.01)
            assert (await client.complete("abc", 3)).text == answer_to("abc", 3)
            assert engine.requests[-1]["model"] == "fake-model"
            assert client.front.engine_models == ["fake-model"]
    finally:
        await engine.stop()


async def test_an_answer_is_freed_when_it_is_over_without_a_search_for_garbage() -> None:
    """Long prompts that wait for a search fill the memory, and a search stops all streams."""
    async with fronted(FakeEngine()) as client:
        await client.complete("before", 4)
        gc.collect()
        gc.disable()
        try:
            for stream in (True, False):
                await client.complete("hello", 4, stream=stream)
            assert (await client.complete("hello", 4, service_class="none")).status == 400
            await client.idle()
            await asyncio.sleep(0.05)
            assert not [found for found in gc.get_objects() if type(found) in (RelayStream, RelayRequest)]
        finally:
            gc.enable()
