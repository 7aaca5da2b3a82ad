"""Engines that misbehave: every request ends, with its whole answer where it can be had, else with a reason."""

import asyncio
import random
from typing import Any

import pytest
from fake_engine import FakeEngine, Fault, answer_to
from front_harness import fronted

from diptych.control.cluster.cluster_config import cluster_config
from diptych.serving.front.relay_request import RelayRequest, read_request

pytestmark = pytest.mark.asyncio

BEFORE = [Fault(kind) for kind in ("reset", "close", "not_http", "long_head", "not_json")]
BEFORE += [Fault("status", status=status) for status in (500, 503, 429)]
STATES = [{"stop": ["zz"]}, {"response_format": {"type": "json_object"}}, {"logprobs": 1}, {"n": 2}, {"unknown": 1}]
PARTS = "abcdefghijk"
MIDDLE = ["reset", "close", "no_finish", "error_event", "abort_reason", "garbage", "ends"]


@pytest.mark.parametrize("fault", BEFORE, ids=lambda fault: f"{fault.kind}-{fault.status}")
@pytest.mark.parametrize("stream", [True, False])
async def test_before_its_first_token_a_request_is_tried_elsewhere(fault: Fault, stream: bool) -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with fronted(*engines) as client:
        for engine in engines:
            engine.faults.append(fault)
        answers = await asyncio.gather(*(client.complete(f"prompt {n}", 6, stream=stream) for n in range(4)))
        for number, answer in enumerate(answers):
            assert answer.status in (200, fault.status)
            if answer.status == 200:
                assert answer.text == answer_to(f"prompt {number}", 6) and answer.error is None
        assert sum(answer.status == 200 for answer in answers) >= 2
        await client.idle()


async def test_one_engine_that_refuses_is_passed_over() -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with fronted(*engines) as client:
        engines[0].faults.extend(Fault("status", status=503) for _ in range(50))
        for number in range(6):
            answer = await client.complete(f"prompt {number}", 4)
            assert (answer.status, answer.text) == (200, answer_to(f"prompt {number}", 4))
        await client.idle()


async def test_the_only_engine_refuses_and_its_client_gets_that() -> None:
    engine = FakeEngine()
    async with fronted(engine) as client:
        engine.faults.append(Fault("status", status=429))
        answer = await client.complete("abc")
        assert (answer.status, answer.error) == (429, {"message": "as told", "code": 429})


DATE = "Wed, 21 Oct 2026 07:28:00 GMT"
PASSED_ON = [(429, "7", "7"), (503, "0", "0"), (503, "3600", "3600"), (429, DATE, DATE)]
NOT_PASSED_ON = [(429, said, "1") for said in ("3601", "-1", "1.5", "soon", "99999999", DATE + " " * 60 + "x")]


@pytest.mark.parametrize(("status", "said", "passed"), [*PASSED_ON, *NOT_PASSED_ON, (500, "7", None)])
async def test_when_an_engine_can_be_asked_again_its_client_is_told(status: int, said: str, passed: str | None) -> None:
    engine = FakeEngine()
    async with fronted(engine) as client:
        for stream in (True, False):
            engine.faults.append(Fault("status", status=status, retry_after=said))
            answer = await client.complete("abc", stream=stream)
            assert answer.headers is not None
            assert (answer.status, answer.headers.get("retry-after")) == (status, passed)


@pytest.mark.parametrize("kind", MIDDLE)
@pytest.mark.parametrize("path", ["completions", "chat"])
async def test_a_greedy_stream_goes_on_elsewhere_with_the_same_tokens(kind: str, path: str) -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with fronted(*engines) as client:
        for engine in engines:
            engine.faults.append(Fault(kind, at=3))
        ask = client.complete if path == "completions" else client.chat
        prompt = "the prompt" if path == "completions" else "<user>the prompt<assistant>"
        answer = await ask("the prompt", 10, stream_options={"include_usage": True})
        if answer.error is not None:  # the other engine failed, too, and the first one had its fault behind it
            raise AssertionError(answer)
        assert (answer.text, answer.finish_reason) == (answer_to(prompt, 10), "length")
        assert answer.headers is not None and answer.headers["x-diptych-recovery"] == "exact"
        assert answer.usage is not None and answer.usage["completion_tokens"] == 10
        assert answer.events is not None and {event["id"] for event in answer.events} == {"engine-id"}
        assert {event["object"] for event in answer.events} == {answer.events[0]["object"]}
        assert client.front.fleet.core.counts["retried"] >= 1
        await client.idle()


async def test_a_sampled_stream_goes_on_and_its_header_says_that_it_would_be_another() -> None:
    async with fronted(FakeEngine(), FakeEngine()) as client:
        answer = await client.complete("abc", 5, temperature=0.7)
        assert answer.headers is not None and answer.headers["x-diptych-recovery"] == "resampled"


@pytest.mark.parametrize("more", STATES, ids=lambda more: next(iter(more)))
async def test_a_stream_with_state_ends_with_an_error_that_says_so(more: dict[str, object]) -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with fronted(*engines) as client:
        for engine in engines:
            engine.faults.append(Fault("reset", at=3))
        answer = await client.complete("the prompt", 10, **more)
        assert answer.error is not None and answer.error["code"] == "answer_lost" and answer.is_done
        assert answer.headers is not None and answer.headers["x-diptych-recovery"] == "none"
        assert answer.text == answer_to("the prompt", 3)
        await client.idle()


async def test_what_an_answer_must_have_at_least_is_less_where_it_goes_on() -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with fronted(*engines) as client:
        for engine in engines:
            engine.faults.append(Fault("reset", at=3))
        answer = await client.complete("the prompt", 10, min_tokens=8)
        assert answer.text == answer_to("the prompt", 10) and answer.error is None
        asked = [request["min_tokens"] for engine in engines for request in engine.requests if "min_tokens" in request]
        assert 8 in asked and 5 in asked
        await client.idle()


async def test_an_engine_that_names_no_tokens_cannot_be_continued() -> None:
    engines = [FakeEngine(names_tokens=False), FakeEngine(names_tokens=False)]
    async with fronted(*engines) as client:
        for engine in engines:
            engine.faults.append(Fault("reset", at=3))
        answer = await client.complete("the prompt", 10)
        assert answer.error is not None and answer.error["code"] == "answer_lost"
        await client.idle()


async def test_an_answer_is_not_longer_than_was_asked_for() -> None:
    engine = FakeEngine()
    async with fronted(engine) as client:
        engine.faults.append(Fault("endless", at=0))
        answer = await client.complete("abc", 5)
        assert answer.error is not None and "more than max_tokens (5)" in answer.error["message"]
        await client.idle()


@pytest.mark.parametrize("at", [-1, 3])
async def test_an_engine_that_says_nothing_any_more_is_left(at: int) -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with fronted(*engines, first_byte_s=0.3, idle_s=0.3) as client:
        for engine in engines:
            engine.faults.append(Fault("stall", at=at))
        answers = await asyncio.gather(*(client.complete(f"prompt {number}", 6) for number in range(3)))
        assert [answer.text for answer in answers] == [answer_to(f"prompt {number}", 6) for number in range(3)]
        await client.idle()


async def test_a_whole_reply_that_is_cut_is_asked_for_again() -> None:
    engine = FakeEngine()
    async with fronted(engine) as client:
        engine.faults.append(Fault("truncated", at=0))
        answer = await client.complete("abc", 5, stream=False)
        assert (answer.status, answer.text) == (200, answer_to("abc", 5))
        await client.idle()


async def test_attempts_are_bounded() -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with fronted(*engines) as client:
        for engine in engines:
            engine.faults.extend(Fault("reset") for _ in range(100))
        answer = await client.complete("abc", 5)
        assert answer.status == 500 and answer.error is not None and "attempts in a row" in answer.error["message"]
        assert sum(len(engine.requests) for engine in engines) <= 5
        await client.idle()


@pytest.mark.parametrize("on_failure", ["retry", "fail"])
async def test_what_no_engine_takes_is_refused_as_they_refuse_it(on_failure: Any) -> None:
    engines = [FakeEngine() for _ in range(7)]
    async with fronted(*engines, cluster=cluster_config(on_failure=on_failure)) as client:
        for engine in engines:
            engine.faults.extend(Fault("status", status=429) for _ in range(9))
        answer = await client.complete("abc", 5)
        assert (answer.status, answer.error) == (429, {"message": "as told", "code": 429})
        for engine in engines:
            engine.faults.clear()
        assert (await client.complete("abc", 5)).text == answer_to("abc", 5)
        await client.idle()


async def test_on_failure_fail_tries_once() -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with fronted(*engines, cluster=cluster_config(on_failure="fail")) as client:
        for engine in engines:
            engine.faults.append(Fault("reset"))
        answer = await client.complete("abc", 5)
        assert answer.status == 500 and sum(len(engine.requests) for engine in engines) == 1
        await client.idle()


async def test_an_engine_that_dies_takes_no_request_with_it_and_is_used_again() -> None:
    engines = [FakeEngine(delay_s=0.01), FakeEngine(delay_s=0.01)]
    async with fronted(*engines) as client:
        tasks = [asyncio.create_task(client.complete(f"prompt {number}", 20)) for number in range(8)]
        while sum(engine.num_running for engine in engines) < 8:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        port = int(engines[0].url.rsplit(":", 1)[1])
        await engines[0].stop()
        answers = await asyncio.gather(*tasks)
        assert [answer.text for answer in answers] == [answer_to(f"prompt {n}", 20) for n in range(8)]
        members = client.front.fleet.core.members
        async with asyncio.timeout(10):
            while 0 in members.up:
                await asyncio.sleep(0.02)
        await engines[0].start(port)
        async with asyncio.timeout(10):
            while 0 not in members.up:
                await asyncio.sleep(0.02)
        assert client.front.fleet.metrics.fleet.losses[0] == 1
        await client.idle()


async def test_without_an_engine_requests_wait_and_without_any_ever_the_server_is_not_ready() -> None:
    engine = FakeEngine(is_ready=False)
    async with fronted(engine) as client:
        answer = await client.complete("abc")
        assert answer.status == 503 and answer.error is not None and answer.error["code"] == "loading"
        engine.is_ready = True
        async with asyncio.timeout(10):
            while not client.front.is_routable:
                await asyncio.sleep(0.02)
        assert (await client.complete("abc", 3)).text == answer_to("abc", 3)


async def test_a_drained_engine_gets_nothing_new_and_its_streams_go_on() -> None:
    engines = [FakeEngine(delay_s=0.01), FakeEngine(delay_s=0.01)]
    async with fronted(*engines) as client:
        plain = [asyncio.create_task(client.complete(f"prompt {n}", 25)) for n in range(3)]
        stateful = [asyncio.create_task(client.complete(f"other {n}", 25, stop=["~"])) for n in range(3)]
        while sum(engine.num_running for engine in engines) < 6:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        client.front.fleet.changes.drain(0)
        before = len(engines[0].requests)
        answers = await asyncio.gather(*plain, *stateful)
        prompts = [f"prompt {n}" for n in range(3)] + [f"other {n}" for n in range(3)]
        assert [answer.text for answer in answers] == [answer_to(prompt, 25) for prompt in prompts]
        await client.complete("later", 2)
        assert len(engines[0].requests) == before
        await client.idle()


async def test_a_drained_engine_keeps_streams_that_turned_out_not_to_be_plain_text() -> None:
    engines = [FakeEngine(delay_s=0.01, reasons=True), FakeEngine(delay_s=0.01, reasons=True)]
    async with fronted(*engines) as client:
        tasks = [asyncio.create_task(client.chat(f"prompt {number}", 25)) for number in range(4)]
        while sum(engine.num_running for engine in engines) < 4:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        client.front.fleet.changes.drain(0)
        answers = await asyncio.gather(*tasks)
        assert all(answer.error is None and answer.finish_reason == "length" for answer in answers)
        assert all(answer.headers is not None and answer.headers["x-diptych-recovery"] == "none" for answer in answers)
        client.front.fleet.changes.use_again(0)
        assert (await client.complete("abc", 2)).text == answer_to("abc", 2)
        await client.idle()


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 60))])
async def test_whatever_goes_wrong_every_request_ends_and_no_text_is_wrong(seed: int) -> None:
    """Random faults, deaths, drains and clients that leave."""
    rng = random.Random(seed)
    engines = [FakeEngine(delay_s=0.001) for _ in range(3)]
    async with fronted(*engines, first_byte_s=0.5, idle_s=0.5) as client:

        async def one(number: int) -> None:
            await asyncio.sleep(rng.random() * 0.5)
            stream, path = rng.random() < 0.7, rng.choice([client.complete, client.chat])
            task = asyncio.create_task(path(f"prompt {number}", 15, stream=stream))
            if rng.random() < 0.1:
                await asyncio.sleep(rng.random() * 0.05)
                task.cancel()
                return
            answer = await task
            prompt = f"prompt {number}" if path == client.complete else f"<user>prompt {number}<assistant>"
            whole = answer_to(prompt, 15)
            assert whole.startswith(answer.text)
            assert answer.text == whole or answer.error is not None

        async def trouble() -> None:
            for _ in range(30):
                await asyncio.sleep(0.02)
                engine = rng.choice(engines)
                kind = rng.random()
                if kind < 0.7:
                    engine.faults.append(
                        rng.choice([*BEFORE, *(Fault(name, at=rng.randint(0, 14)) for name in MIDDLE)])
                    )
                elif kind < 0.85 and not engine.is_stopped:
                    port = int(engine.url.rsplit(":", 1)[1])
                    await engine.stop()
                    await asyncio.sleep(0.05)
                    await engine.start(port)
                else:
                    engine.faults.clear()

        async with asyncio.timeout(30):
            await asyncio.gather(trouble(), *(one(number) for number in range(40)))
        for stream in list(client.front.fleet.streams._streams.values()):  # of clients that left
            client.front.abort(stream.generation)
        await client.idle()


async def undisturbed(prompt: str, num_tokens: int) -> str:
    """The text that an engine with these parts gives."""
    async with fronted(FakeEngine(parts=PARTS)) as client:
        return (await client.complete(prompt, num_tokens)).text


async def test_an_engine_whose_server_answers_and_gives_no_token_is_lost() -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with fronted(*engines, idle_s=0.3) as client:
        for engine in engines:
            engine.faults.append(Fault("stall", at=3))
        answer = await client.complete("the prompt", 10)
        assert (answer.text, answer.error) == (answer_to("the prompt", 10), None)
        losses = client.front.fleet.metrics.fleet.losses
        assert sum(losses.values()) >= 1
        async with asyncio.timeout(10):
            while len(client.front.fleet.core.members.up) < 2:  # it gives a token when it is asked for one
                await asyncio.sleep(0.02)
        await client.idle()


async def test_an_answer_that_was_complete_when_its_stream_broke_is_not_gone_on_with() -> None:
    engine = FakeEngine()
    async with fronted(engine, FakeEngine()) as client:
        for one in client.engines:
            one.faults.append(Fault("no_done"))
        answer = await client.complete("the prompt", 10)
        assert (answer.text, answer.error, answer.is_done) == (answer_to("the prompt", 10), None, True)
        assert sum(len(one.requests) for one in client.engines) == 1
        await client.idle()


async def test_a_chat_without_a_limit_goes_on_within_the_context_of_the_engine() -> None:
    engines = [FakeEngine(answer_tokens=30), FakeEngine(answer_tokens=30)]
    async with fronted(*engines) as client:
        for engine in engines:
            engine.faults.append(Fault("reset", at=3))
        body = {"messages": [{"role": "user", "content": "abc|"}], "stream": True, "temperature": 0}
        answer = await client.post("/v1/chat/completions", body)
        assert (answer.error, answer.finish_reason) == (None, "stop")
        asked = [request["max_tokens"] for engine in engines for request in engine.requests if "max_tokens" in request]
        assert asked and all(limit < 32768 for limit in asked)
        await client.idle()


async def test_an_answer_without_a_limit_is_as_long_as_its_engine_makes_it() -> None:
    async with fronted(FakeEngine("llamacpp")) as client:
        answer = await client.post("/v1/completions", {"prompt": "abc", "stream": True, "temperature": 0})
        assert (answer.text, answer.error) == (answer_to("abc", 64), None)


async def test_a_list_of_prompts_has_an_answer_for_each_and_cannot_go_on_elsewhere() -> None:
    def read(prompt: str) -> RelayRequest:
        return read_request("/v1/completions", b'{"prompt": %b, "stream": true, "n": 2}' % prompt.encode())

    several, ids, one = read('["a", "b", "c"]'), read("[[1, 2], [3]]"), read("[1, 2]")
    assert [request.num_choices for request in (several, ids, one)] == [6, 4, 2]
    single = read_request("/v1/completions", b'{"prompt": "a", "stream": true}')
    assert single.is_stateless and not several.is_stateless and not ids.is_stateless


async def test_a_prompt_that_ends_every_engine_ends_itself() -> None:
    engines = [FakeEngine(delay_s=0.005) for _ in range(8)]
    async with fronted(*engines) as client:

        async def die() -> None:
            while True:
                for engine in engines:
                    if not engine.is_stopped and engine.num_running and engine.requests:
                        await engine.stop()
                await asyncio.sleep(0.02)

        killer = asyncio.create_task(die())
        answer = await client.complete("boom", 200)
        killer.cancel()
        assert answer.error is not None and answer.error["code"] == "poison_request"
        assert sum(not engine.is_stopped for engine in engines) >= 3
        await client.idle()


@pytest.mark.parametrize("merges", [1, 3])
@pytest.mark.parametrize("at", range(1, 10))
async def test_an_answer_that_breaks_off_within_a_character_goes_on_with_that_character(at: int, merges: int) -> None:
    engines = [FakeEngine(parts=PARTS, merges=merges), FakeEngine(parts=PARTS, merges=merges)]
    async with fronted(*engines) as client:
        for engine in engines:
            engine.faults.append(Fault("reset", at=at))
            engine.faults.append(Fault("reset", at=1))
        answer = await client.complete("the prompt", 32, stream_options={"include_usage": True})
        assert (answer.text, answer.error) == (await undisturbed("the prompt", 32), None)
        assert answer.usage is not None and answer.usage["completion_tokens"] == 32
        assert client.front.fleet.core.counts["retried"] >= 1
        await client.idle()


async def test_a_stream_whose_last_character_cannot_be_found_ends_with_an_error() -> None:
    engines = [FakeEngine(parts=PARTS, merges=3, detokenizes=False) for _ in range(2)]
    async with fronted(*engines) as client:
        for engine in engines:
            engine.faults.append(Fault("reset", at=3))
        answer = await client.complete("the prompt", 32)
        assert answer.error is not None and answer.error["code"] == "answer_lost"
        assert (await undisturbed("the prompt", 32)).startswith(answer.text) and answer.text
        await client.idle()


async def test_an_answer_that_nobody_wants_any_more_is_not_asked_about() -> None:
    engines = [FakeEngine(parts=PARTS, merges=3, delay_s=0.02) for _ in range(2)]
    async with fronted(*engines) as client:
        task = asyncio.create_task(client.complete("the prompt", 32))
        while not sum(engine.num_running for engine in engines):
            await asyncio.sleep(0.005)
        for engine in engines:
            engine.detokenize_s = 0.5
        busy = next(engine for engine in engines if engine.num_running)
        await asyncio.sleep(0.08)
        await busy.stop()
        await asyncio.sleep(0.1)
        for stream in list(client.front.fleet.streams._streams.values()):
            client.front.abort(stream.generation)
        task.cancel()
        await client.idle()
