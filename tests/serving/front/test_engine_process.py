"""An engine that is another process than before, though no connection was ever refused."""

import asyncio

import pytest
from fake_engine import FakeEngine, answer_to
from front_harness import FrontClient, fronted

from diptych.serving.front.engine_pages import EngineProcess, started_of
from diptych.serving.front.external_worker import ExternalWorker


def page(*started: object) -> bytes:
    """A page of metrics with a sample for each process."""
    labels = ['{pid="1"}', '{pid="2"}'] if len(started) > 1 else [""]
    lines = [f"process_start_time_seconds{label} {value}" for label, value in zip(labels, started, strict=False)]
    return "\n".join(("# TYPE process_start_time_seconds gauge", *lines, "other 1", "")).encode()


def test_the_start_of_a_process_is_read_from_its_page() -> None:
    assert started_of(page(1.5e9)) == 1.5e9
    assert started_of(b"process_start_time_seconds 7") == 7
    assert started_of(page(7, 7)) == 7
    for unclear in (b"", page(), page(7, 8), page("NaN"), page("1e"), b"my_process_start_time_seconds 7\n"):
        assert started_of(unclear) is None


def test_a_later_start_is_another_process() -> None:
    process = EngineProcess()
    said = [process.is_another(page(*started)) for started in ((100,), (100.5,), (), (7, 200), (200,), (200,), (300,))]
    assert said == [False, False, False, False, True, False, True]


def test_a_start_that_was_waited_for_is_not_another_process() -> None:
    process = EngineProcess()
    process.is_another(page(100))
    process.begin()
    assert [process.is_another(page(started)) for started in (200, 200, 300)] == [False, False, True]


def test_of_processes_that_answer_in_turn_nothing_is_concluded_after_the_second() -> None:
    process = EngineProcess()
    assert [process.is_another(page(started)) for started in (100, 200)] == [False, True]
    process.begin()
    assert not any(process.is_another(page(started)) for started in (100, 200, 100, 200, 300))


async def lost(client: FrontClient, number: int, times: int) -> None:
    """Until an engine was lost so often, and is used again."""
    engine = client.front.external.engines[number]
    async with asyncio.timeout(10):
        while engine.num_restarts < times or number not in client.front.fleet.core.members.up:
            await asyncio.sleep(0.01)


async def pages_read(engine: ExternalWorker, started_s: float) -> None:
    """Until two more pages of its metrics were read, of a process that was started at this time."""
    process, count = engine._process, 0
    really = process.is_another

    def is_another(page: bytes) -> bool:
        nonlocal count
        count += started_of(page) == started_s
        return really(page)

    process.is_another = is_another  # type: ignore[method-assign]
    async with asyncio.timeout(10):
        while count < 2:
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_an_engine_that_was_replaced_behind_its_address_is_looked_at_again_and_its_streams_go_on() -> None:
    engines = [FakeEngine(delay_s=0.05, started_s=1000.0), FakeEngine(delay_s=0.05, started_s=1000.0)]
    async with fronted(*engines) as client:
        prompt = "a prompt with some blocks " * 3
        task = asyncio.create_task(client.complete(prompt, 20))
        async with asyncio.timeout(10):
            while not any(exchange.num_tokens for each in client.front.external.engines for exchange in
                          each.exchanges.values()):  # fmt: skip
                await asyncio.sleep(0.01)
        number = next(each.number for each in client.front.external.engines if each.exchanges)
        engine = client.front.external.engines[number]
        await pages_read(engine, 1000.0)
        assert engine.cache.num_blocks
        engines[number].started_s = 2000.0
        await lost(client, number, 1)
        assert engine.cache.num_blocks == 0
        answer = await task
        assert (answer.text, answer.error) == (answer_to(prompt, 20), None)
        assert engines[1 - number].requests
        await pages_read(engine, 2000.0)
        assert engine.num_restarts == 1  # it is known now
        await client.idle()
