"""Defects planted into a front before engines of others: its core, and the connection to one engine. What fails ends
its requests with a 500 that names it, shows in /health, leaves a recording and begins anew; other engines go on."""

import asyncio
import json
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, answer_to
from front_harness import Answer, FrontClient, fronted

from diptych.control.cluster.cluster_core import ClusterCore
from diptych.control.errors import BrokenInvariantError
from diptych.serving.failures.failure_recording import default_folder
from diptych.serving.front import engine_connection, engine_exchange
from diptych.serving.front.engine_cache import EngineCache
from diptych.serving.front.engine_load import EngineLoad
from diptych.serving.front.engine_spec import EngineSpec, FrontOptions
from diptych.serving.front.external_worker import ExternalWorker
from diptych.serving.front.kv_events import KVEventReader

pytestmark = pytest.mark.asyncio


def planted(*_: Any, **__: Any) -> Any:
    raise BrokenInvariantError("planted")


@pytest.fixture(autouse=True)
def failures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder for recordings where nobody names one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return default_folder()


def the_recording(folder: Path, core: str) -> dict[str, Any]:
    """The header of the only recording."""
    [path] = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_size < 8 * 2**20
    assert b"the prompt" not in path.read_bytes()
    header: dict[str, Any] = json.loads(path.read_bytes().split(b"\n")[0])
    assert header["failure"]["core"] == core and header["failure"]["error"] == "BrokenInvariantError: planted"
    return header


def once(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, after: int = 0) -> None:
    """Plant a defect that shows once, after ``after`` calls."""
    sound, left = getattr(owner, name), [after]

    def failing(*arguments: Any, **more: Any) -> Any:
        left[0] -= 1
        return planted() if left[0] == -1 else sound(*arguments, **more)

    monkeypatch.setattr(owner, name, failing)


def noting_health(client: FrontClient) -> list[tuple[int, str]]:
    """What /health says when something is reported, from now on."""
    seen: list[tuple[int, str]] = []
    board = client.front.fleet.failures
    report = board.report

    def reported(*arguments: Any, **more: Any) -> Any:
        found = report(*arguments, **more)
        status, content = board.health()
        seen.append((status, content["detail"] or ""))
        return found

    board.report = reported  # type: ignore[method-assign]
    return seen


async def test_a_defect_of_the_core_ends_every_request_and_the_server(
    failures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fronted(FakeEngine(delay_s=0.02), FakeEngine(delay_s=0.02)) as client:
        asking = [asyncio.create_task(client.complete("the prompt", 400, stream=stream)) for stream in (True, False)]
        async with asyncio.timeout(10):
            while not any(client.front.fleet.progress().values()):
                await asyncio.sleep(0.005)
        monkeypatch.setattr(ClusterCore, "_take_report", planted, raising=False)
        monkeypatch.setattr(ClusterCore, "on_event", planted)
        answers = await asyncio.gather(*asking)
        for answer in answers:
            assert answer.error is not None and "the cluster core has failed" in answer.error["message"]
        assert answers[1].status == 500
        health = await client.http.get("/health")
        assert health.status_code == 503 and "planted" in health.text
        assert client.front.fleet.failures.ended.is_set()
        assert (await client.complete("late", 3)).status == 503
    assert the_recording(failures, "the cluster core")["format"] == "diptych cluster recording"


PLACES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "reading": lambda patch: once(engine_exchange, "read_chunk", patch, after=2),
    "counting": lambda patch: once(engine_exchange.EngineExchange, "_count", patch),
    "ending": lambda patch: once(engine_exchange.EngineExchange, "_finish", patch),
    "head": lambda patch: once(engine_exchange.EngineExchange, "on_head", patch),
    "sending": lambda patch: once(ExternalWorker, "_serve", patch),
    "connecting": lambda patch: once(engine_connection._Connection, "begin", patch),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_defect_over_one_reply_ends_its_request_and_others_go_on(
    place: str, stream: bool, failures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fronted(FakeEngine(), FakeEngine(), probe_s=30.0) as client:
        seen = noting_health(client)
        for engine in client.front.external.engines:  # kept connections are of those that asked what it is
            engine.pool._idle.clear()
        if place == "reading" and not stream:
            once(engine_exchange, "read_chunk", monkeypatch)
        else:
            PLACES[place](monkeypatch)
        answer = await client.complete("the prompt", 10, stream=stream)
        assert answer.error is not None and answer.error["code"] == "core_failed"
        assert "the connection to " in answer.error["message"] and "planted" in answer.error["message"]
        assert answer.status == 500 or (stream and answer.is_done)
        assert answer_to("the prompt", 10).startswith(answer.text)
        await client.until_up(1)
        others = await asyncio.gather(*(client.complete(f"other {n}", 6) for n in range(4)))
        assert [other.text for other in others] == [answer_to(f"other {n}", 6) for n in range(4)]
        await client.until_up(2)
        await client.idle()
        [(status, detail)] = seen
        assert status == 503 and "worker " in detail and "has failed" in detail and "recording: " in detail
        assert client.front.fleet.failures.health()[0] == 200 and client.front.fleet.failures.final is None
        name = the_recording(failures, answer.error["message"].partition(" has failed")[0])["format"]
        assert name == "diptych cluster recording"


async def test_streams_of_the_engine_whose_connection_fails_go_on_elsewhere(
    failures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fronted(FakeEngine(delay_s=0.01), FakeEngine(delay_s=0.01)) as client:
        asking = [asyncio.create_task(client.complete(f"the prompt {n}", 60)) for n in range(6)]
        async with asyncio.timeout(10):
            while len([count for count in client.front.fleet.progress().values() if count]) < 6:
                await asyncio.sleep(0.005)
        once(engine_exchange.EngineExchange, "_on_later", monkeypatch)
        answers = await asyncio.gather(*asking)
        failed = [number for number, answer in enumerate(answers) if answer.error is not None]
        assert len(failed) == 1 and (answers[failed[0]].error or {})["code"] == "core_failed"
        for number, answer in enumerate(answers):
            whole = answer_to(f"the prompt {number}", 60)
            assert whole.startswith(answer.text) if number in failed else whole == answer.text
        await client.until_up(2)
        await client.idle()


async def test_a_reader_of_events_that_ends_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVEventReader, "run", planted)
    monkeypatch.setattr(EngineCache, "_on_change", planted)  # what is done where events cannot be read
    spec = EngineSpec("vllm", "http://127.0.0.1:1")
    cache = EngineCache(FrontOptions((spec,), 16), spec, lambda: 0)
    found: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    cache.on_defect = found.set_result
    cache.begin(1, 1, lambda events: None, ("tcp://127.0.0.1:1", ""))
    assert str(await asyncio.wait_for(found, 10)) == "planted"
    await cache.close()


BESIDE: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a tick": lambda patch: once(ExternalWorker, "_report_load", patch),
    "its load": lambda patch: once(EngineLoad, "on_gauges", patch),
    "its cache": lambda patch: once(EngineCache, "on_computed", patch),
}


@pytest.mark.parametrize("place", BESIDE)
async def test_a_defect_beside_the_replies_is_shown_and_the_connection_begins_anew(
    place: str, failures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fronted(FakeEngine(), FakeEngine()) as client:
        seen = noting_health(client)
        BESIDE[place](monkeypatch)
        answers: list[Answer] = []
        async with asyncio.timeout(20):
            while not seen:
                answers.append(await client.complete(f"the prompt {len(answers)}", 3))
                await asyncio.sleep(0.02)
        await client.until_up(2)
        for number, answer in enumerate(answers):
            assert (answer.text, answer.error) == (answer_to(f"the prompt {number}", 3), None)
        [(status, detail)] = seen
        assert status == 503 and "the connection to " in detail
        assert client.front.fleet.failures.health()[0] == 200
        the_recording(failures, detail.partition("worker ")[2].partition(": ")[2].partition(" has failed")[0])
        await client.idle()
