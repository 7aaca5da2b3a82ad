"""An engine that is drained, started again, and used again: every step can be seen, and no request is lost."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import FakeEngine, answer_to
from front_harness import FrontClient, fronted

pytestmark = pytest.mark.asyncio


async def state(client: FrontClient, number: int) -> str:
    """What /engines says of it."""
    return str((await client.http.get(f"/engines/{number}")).json()["state"])


async def until(client: FrontClient, number: int, wanted: str) -> None:
    """Retry until the engine is in a state, as an operator's script does."""
    async with asyncio.timeout(20):
        while (await client.http.get(f"/engines/{number}/{wanted}")).status_code != 200:
            await asyncio.sleep(0.01)


async def until_state(client: FrontClient, number: int, wanted: str) -> None:
    async with asyncio.timeout(20):
        while await state(client, number) != wanted:
            await asyncio.sleep(0.01)


async def drain(client: FrontClient, number: int, drain: Any = True) -> None:
    reply = await client.http.post(f"/admin/workers/{number}", json={"drain": drain})
    assert reply.status_code == 200 and reply.json()["state"] == ("draining" if drain else "ready")


async def restart(client: FrontClient, number: int) -> None:
    """The process ends, and another begins at the same address a moment later, as those of models do."""
    engine = client.engines[number]
    await engine.stop()
    await until_state(client, number, "lost")
    assert await series(client, engine) == "lost"
    await engine.start(int(engine.url.rpartition(":")[2]))


async def series(client: FrontClient, engine: FakeEngine) -> str:
    """The state of an engine whose series is 1."""
    page = (await client.http.get("/metrics")).text
    address = engine.url.removeprefix("http://")
    mine = [line for line in page.splitlines() if line.startswith("diptych:engine_state{") and address in line]
    [single] = [line for line in mine if line.endswith(" 1.0")]
    return single.partition('state="')[2].partition('"')[0]


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp", "openai"])
async def test_every_engine_is_restarted_in_turn_under_load_and_used_again(kind: str) -> None:
    engines = [FakeEngine(kind=kind, delay_s=0.005, names_tokens=kind == "vllm") for _ in range(2)]
    async with fronted(*engines) as client:
        is_over = False
        answers = []

        async def load(number: int) -> None:
            while not is_over:
                answers.append((number, await client.complete(f"prompt {number}", 10)))

        tasks = [asyncio.ensure_future(load(number)) for number in range(6)]
        for number, engine in enumerate(engines):
            await drain(client, number)
            await until(client, number, "drained")
            assert await series(client, engine) == "drained"
            served = len(engine.requests)
            await restart(client, number)
            await until(client, number, "ready")
            assert await series(client, engine) == "ready"
            async with asyncio.timeout(20):
                while len(engine.requests) < served + 3:  # one of these is the front's own question
                    await asyncio.sleep(0.01)
        is_over = True
        await asyncio.gather(*tasks)
        for number, answer in answers:
            assert (answer.status, answer.error, answer.text) == (200, None, answer_to(f"prompt {number}", 10))
        await client.idle()


@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_an_engine_that_is_held_stays_out_until_it_is_let_in(kind: str) -> None:
    engines = [FakeEngine(kind=kind), FakeEngine(kind=kind)]
    async with fronted(*engines) as client:
        await drain(client, 0, "hold")
        await until(client, 0, "drained")
        await restart(client, 0)
        await until_state(client, 0, "drained")
        shown = (await client.http.get("/engines/0")).json()
        assert (shown["is_up"], shown["is_used"], shown["is_held"]) == (True, False, True)
        await drain(client, 0, False)
        assert await state(client, 0) == "ready"


async def test_an_engine_that_was_only_silent_stays_drained() -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with fronted(*engines) as client:
        await drain(client, 0)
        await until(client, 0, "drained")
        port = client.front.external.engines[0]
        port._lose("no sign of life within 2 s")  # as after a cable that was out for a while
        async with asyncio.timeout(20):
            while not port.num_restarts:
                await asyncio.sleep(0.01)
        await until_state(client, 0, "drained")
        assert not port.has_restarted


async def test_an_engine_that_was_lost_without_a_drain_is_back_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    engines = [FakeEngine(kind="openai"), FakeEngine(kind="openai")]
    async with fronted(*engines) as client:
        await engines[0].stop()  # nothing is asked of it, and it is missed all the same
        await until_state(client, 0, "lost")
        await engines[0].start(int(engines[0].url.rpartition(":")[2]))
        await until(client, 0, "ready")
        name = client.front.external.engines[0].name
        said = [record.getMessage() for record in caplog.records if name in record.getMessage()]
        assert any(words.startswith(f"{name} is lost: ") for words in said)
        assert any(words.startswith(f"{name} is back after ") for words in said)


async def test_the_log_has_every_step_with_the_engine_s_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    engines = [FakeEngine(), FakeEngine()]
    async with fronted(*engines) as client:
        await drain(client, 1)
        await until(client, 1, "drained")
        await restart(client, 1)
        await until(client, 1, "ready")
        name = client.front.external.engines[1].name
    said = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    steps = ("draining", "drained", "is gone while it drains", "is back after", "ends its drain", "used again")
    places = [next(place for place, words in enumerate(said) if step in words) for step in steps]
    assert places == sorted(places)


NOT_THERE: list[tuple[str, int, Callable[[dict[str, Any]], bool]]] = [
    ("/engines/7", 404, lambda body: "there are 0, 1" in body["error"]["message"]),
    ("/engines/7/ready", 404, lambda body: "there are 0, 1" in body["error"]["message"]),
    ("/engines/7/drained", 404, lambda body: "there are 0, 1" in body["error"]["message"]),
    ("/engines/0/drained", 503, lambda body: body["state"] == "ready"),
]


@pytest.mark.parametrize(("path", "status", "is_right"), NOT_THERE, ids=lambda value: str(value)[:20])
async def test_what_is_asked_of_an_engine_has_a_clear_reply(
    path: str, status: int, is_right: Callable[[dict[str, Any]], bool]
) -> None:
    async with fronted(FakeEngine(), FakeEngine()) as client:
        reply = await client.http.get(path)
        assert reply.status_code == status and is_right(reply.json()), reply.text


async def test_the_last_engine_in_use_is_not_drained() -> None:
    async with fronted(FakeEngine(), FakeEngine()) as client:
        await drain(client, 0)
        reply = await client.http.post("/admin/workers/1", json={"drain": True})
        assert reply.status_code == 409 and await state(client, 1) == "ready"
