"""Defects planted into what drives workers of other hosts, and the planner's simulation: each ends what it breaks with
an error that names it, is shown by /health, leaves a recording, and disturbs nothing else."""

import asyncio
import json
import stat
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_worker import fake_command
from in_process_fleet import in_process_fleet
from test_failing_server import failing_worker
from test_fleet_planner import FakeTwin, planned, question, requests, settings
from test_framed_link import linked
from test_join import KEY, agent, ask, expected, front_end, number_of, port_of, process, ready, tokens, until
from virtual_time import in_virtual_time

from diptych.advisor.twin_process import answer
from diptych.base.length_prefix import pack
from diptych.control.errors import BrokenInvariantError, CoreFailedError, WorkerError
from diptych.control.planner.planner_events import TwinAnswered, TwinFailed, TwinQuestion
from diptych.serving.async_llm import AsyncLLM
from diptych.serving.failures.failure_board import ELSEWHERE_S, FailureBoard
from diptych.serving.failures.failure_recording import default_folder
from diptych.serving.fleet import join_listener, joined_worker
from diptych.serving.fleet.twin_link import TwinLink
from diptych.serving.fleet.worker_process import WorkerProcess
from diptych.serving.join import worker_agent
from diptych.serving.join.join_messages import RELAYED, TOLD
from diptych.serving.link.engine_options import EngineOptions


def planted(*_: Any, **__: Any) -> Any:
    raise BrokenInvariantError("planted")


@pytest.fixture(autouse=True)
def failures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder for recordings where nobody names one; agents try again soon."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(worker_agent, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(worker_agent, "LONGEST_PAUSE_S", 0.1)
    return default_folder()


def header_of(folder: Path, core: str) -> dict[str, Any]:
    """The header of the one recording of a core, which is this user's alone."""
    [path] = [path for path in folder.iterdir() if core in path.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_size < 8 * 2**20
    header: dict[str, Any] = json.loads(path.read_bytes().split(b"\n")[0])
    assert "BrokenInvariantError: planted" in header["failure"]["error"]
    return header


async def refused(llm: AsyncLLM, asking: "asyncio.Task[Any]", where: str, folder: Path) -> None:
    """The front end has failed: its request ends with a 500 that says where, and nothing new begins."""
    with pytest.raises(CoreFailedError, match=rf"the cluster core has failed .*planted \(at {where}\)") as caught:
        await asyncio.wait_for(asking, 60)
    assert caught.value.status == 500
    assert llm.health()[0] == 503 and llm.fleet.failures.ended.is_set() and not llm.fleet.is_routable
    assert header_of(folder, "the-cluster-core")["format"] == "diptych cluster recording"


# -- a worker that has joined: its port in the front end, and its core on the other host -----------------------------


@pytest.mark.system
@pytest.mark.asyncio
async def test_a_defect_in_the_port_of_a_joined_worker_ends_the_front_end_loudly(
    failures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front_end() as llm, agent(port_of(llm), worker={"step_ms": 3}, drain_s=0.1) as worker:
        await ready(llm)
        asking = asyncio.create_task(ask(llm, 4000))
        await until(lambda: any(llm.fleet.progress().values()))
        with monkeypatch.context() as patch:
            patch.setattr(joined_worker, "decode_from_worker", planted)
            await refused(llm, asking, f"the connection of worker {number_of(worker)}", failures)


@pytest.mark.system
@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["core", "step"])
async def test_a_core_that_fails_on_another_host_is_named_and_its_stream_goes_on(where: str, tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []
    async with front_end() as llm:
        options = {"host": "127.0.0.1", "port": port_of(llm), "key": KEY, "model": EngineOptions().model, "name": "far"}
        options |= {"command": failing_worker(tmp_path, where, 1), "drain_s": 0.1}
        worker = worker_agent.WorkerAgent(worker_agent.AgentOptions(**options))
        running = asyncio.create_task(worker.run())
        await ready(llm)
        lost = llm.fleet.on_lost

        def on_lost(number: int, loss: Any) -> None:
            lost(number, loss)
            seen.append((llm.health()[0], llm.health()[1]["detail"] or ""))

        llm.fleet.on_lost = on_lost  # type: ignore[method-assign]
        assert tokens(await asyncio.wait_for(ask(llm), 60)) == expected()
        [(status, detail)] = seen
        assert status == 503 and "worker 0 has failed" in detail and "planted" in detail and "on far)" in detail
        assert llm.health()[0] == 200 and llm.fleet.failures.counts == {"worker 0": 1}
        await worker.leave()
        await worker.leave()
        await running


# -- the door ----------------------------------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["_port_for", "_greet"])
async def test_a_defect_of_the_door_ends_the_front_end_loudly(
    name: str, failures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front_end() as llm, agent(port_of(llm), worker={"step_ms": 3}, drain_s=0.1):
        await ready(llm)
        asking = asyncio.create_task(ask(llm, 4000))
        await until(lambda: any(llm.fleet.progress().values()))
        monkeypatch.setattr(join_listener.JoinListener, name, planted)
        async with agent(port_of(llm), name="newcomer", drain_s=0.1):
            await refused(llm, asking, "the door for workers", failures)


# -- the agent ---------------------------------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["vital", "on_relayed", "start_over"])
async def test_an_agent_that_fails_ends_and_says_why_on_both_hosts_and_its_streams_go_on(
    name: str, failures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front_end() as llm, agent(port_of(llm), worker={"step_ms": 3}, drain_s=0.1):
        await ready(llm)
        options = {"host": "127.0.0.1", "port": port_of(llm), "key": KEY, "model": EngineOptions().model, "name": "far"}
        options |= {"command": fake_command(step_ms=3), "drain_s": 0.1}
        failing = worker_agent.WorkerAgent(worker_agent.AgentOptions(**options))
        running = asyncio.create_task(failing.run())
        await until(lambda: len(llm.fleet.core.members.up) == 2)
        asking = [asyncio.create_task(ask(llm, 200)) for _ in range(4)]
        await until(lambda: len([count for count in llm.fleet.progress().values() if count]) == 4)
        if name == "on_relayed":
            monkeypatch.setattr(failing._link, name, planted)
            while not running.done() and len(asking) < 64:  # until one of them is sent to this worker
                asking.append(asyncio.create_task(ask(llm, 200)))
                await asyncio.sleep(0.02)
        else:
            monkeypatch.setattr(failing._worker, name, planted)
        if name == "start_over":  # it is called where a front end is lost
            llm.fleet.workers[number_of(failing)].kill("to try it")
        core = f"the agent of worker {number_of(failing)}"
        with pytest.raises(CoreFailedError, match="the agent has failed: BrokenInvariantError: planted"):
            await asyncio.wait_for(running, 60)
        assert not process(failing)
        assert header_of(failures, "the-agent-of-worker")["failure"]["core"] == core
        for output in await asyncio.wait_for(asyncio.gather(*asking), 60):
            assert tokens(output) == expected(200)
        if name != "start_over":  # there the front end had cut it off before
            failure = llm.fleet.failures.recent[-1]
            assert failure.core == f"worker {number_of(failing)}" and core in failure.error and failure.is_elsewhere


@pytest.mark.system
@pytest.mark.asyncio
async def test_a_process_that_the_agent_cannot_follow_is_ended_named_and_replaced(
    failures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front_end() as llm, agent(port_of(llm), worker={"step_ms": 3}, drain_s=0.1) as worker:
        await ready(llm)
        before = process(worker)
        asking = asyncio.create_task(ask(llm, 200))
        await until(lambda: any(llm.fleet.progress().values()))
        running = worker._worker._process
        assert running is not None
        monkeypatch.setattr(running, "_on_data", planted)
        assert tokens(await asyncio.wait_for(asking, 60)) == expected(200)
        assert process(worker) not in (0, before)
        assert "what follows the worker process has failed" in llm.fleet.failures.recent[-1].error
        assert header_of(failures, "what-follows")["format"] == "diptych failure"


@pytest.mark.asyncio
async def test_what_takes_the_messages_of_a_process_and_fails_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = WorkerProcess(EngineOptions(), fake_command(), planted)
    with pytest.raises(BrokenInvariantError, match="planted"):
        await asyncio.wait_for(found.run(), 60)
    assert found.pid is None


# -- a connection between hosts ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [RELAYED, TOLD])
async def test_what_a_connection_brings_and_cannot_be_handled_ends_it_and_is_a_defect(kind: bytes) -> None:
    link, transport, closed = linked()
    found: list[BaseException] = []
    link.on_told = link.on_relayed = planted
    link.on_defect = found.append
    link.data_received(pack(kind + b"one") + pack(kind + b"two"))
    assert [str(error) for error in found] == ["planted"] and transport.ended == "at once"
    link.connection_lost(None)
    assert closed == ["what it brought could not be handled: BrokenInvariantError"]


def test_a_loss_that_cannot_be_handled_is_a_defect() -> None:
    async def lose() -> list[BaseException]:
        link, _, _ = linked()
        found: list[BaseException] = []
        link.on_closed, link.on_defect = planted, found.append
        link.connection_lost(None)
        return found

    assert [str(error) for error in asyncio.run(lose())] == ["planted"]


# -- the planner's simulation ------------------------------------------------------------------------------------------

LATE = """
import sys, json
sys.stdin.readline()
for line in sys.stdin:
    number = json.loads(line)["number"]
    print(json.dumps({"number": number - 1 if number == 2 else number, "predictions": [], "cost_ns": 5}), flush=True)
"""


def test_a_twin_that_answers_another_question_has_failed_and_the_next_one_is_answered() -> None:
    async def ask_thrice() -> list[TwinAnswered | TwinFailed]:
        link = TwinLink((sys.executable, "-c", LATE), settings())
        found = [await link.ask(numbered(number)) for number in (1, 2, 3)]
        await link.close()
        return found

    first, second, third = asyncio.run(ask_thrice())
    assert (first, third) == (TwinAnswered(1, (), 5), TwinAnswered(3, (), 5))
    assert second == TwinFailed(2, "it answers question 1, and was asked 2")


def numbered(number: int) -> TwinQuestion:
    return replace(question(), number=number)


def test_a_question_that_is_given_up_leaves_no_answer_to_a_later_one() -> None:
    slow = LATE.replace("number - 1 if number == 2 else number", "number").replace(
        "print(", "__import__('time').sleep(0.3 if number == 1 else 0); print("
    )

    async def give_up() -> TwinAnswered | TwinFailed:
        link = TwinLink((sys.executable, "-c", slow), settings())
        first = asyncio.create_task(link.ask(numbered(1)))
        while link._process is None:
            await asyncio.sleep(0)
        first.cancel()
        second = asyncio.create_task(link.ask(numbered(2)))  # both are under way for a moment
        await asyncio.gather(first, return_exceptions=True)
        found = await second
        await link.close()
        return found

    assert asyncio.run(give_up()) == TwinAnswered(2, (), 5)


DEFECTS, OTHERS = (BrokenInvariantError("planted"), ZeroDivisionError()), (WorkerError("no"), MemoryError())


@pytest.mark.parametrize(
    ("error", "is_defect"),
    [*((error, True) for error in DEFECTS), *((error, False) for error in OTHERS)],
    ids=lambda value: type(value).__name__,
)
def test_a_twin_says_whether_its_code_has_failed(error: Exception, is_defect: bool) -> None:
    class Failing:
        def answer(self, question: TwinQuestion) -> tuple[()]:
            raise error

    found = answer(Failing(), numbered(7))  # type: ignore[arg-type]
    assert found == TwinFailed(7, f"{type(error).__name__}: {error}", is_defect)


@in_virtual_time
async def test_a_defect_of_the_twin_is_one_of_the_planner_and_answers_go_on(tmp_path: Path) -> None:
    class Failing(FakeTwin):
        async def ask(self, question: TwinQuestion) -> TwinAnswered | TwinFailed:
            self.num_asked += 1
            if self.num_asked == 1:
                raise CoreFailedError("the planner's simulation has failed: BrokenInvariantError: planted")
            return await super().ask(question)

    twin = Failing("1 decode + 1 prefill")
    async with in_process_fleet(both=2) as setup, planned(setup, twin, tmp_path / "run.jsonl") as planner:
        first, seen = planner.planner, []
        report = setup.fleet.failures.report

        def reported(*arguments: Any, **more: Any) -> Any:
            found = report(*arguments, **more)
            seen.append(setup.fleet.failures.health()[0])
            return found

        setup.fleet.failures.report = reported  # type: ignore[method-assign]
        await requests(setup, 60)
        assert seen == [503] and setup.fleet.failures.health()[0] == 200 and planner.planner is not first
        assert "the planner's simulation has failed" in setup.fleet.failures.recent[-1].error
        assert header_of(tmp_path, "diptych-failure-the-planner")["failure"]["core"] == "the planner"
        assert twin.num_asked > 2
        for number in range(120):
            assert len(await setup.client.read(f"r{number}")) == 4


# -- what /health says of other hosts ----------------------------------------------------------------------------------


def test_a_failure_on_another_host_does_not_end_this_process() -> None:
    now = [0.0]
    board = FailureBoard(lambda: now[0])
    board.report("worker 1", "RuntimeError: planted", is_elsewhere=True)
    assert board.health()[0] == 503
    now[0] += ELSEWHERE_S + 1
    status, content = board.health()
    assert status == 200 and "worker 1 has failed" in (content["detail"] or "") and "not come back yet" in str(content)
    board.report("worker 2", "RuntimeError: planted")
    now[0] += 10 * ELSEWHERE_S
    assert board.health()[0] == 503  # of this host
    board.replaced("worker 2")
    assert board.health()[0] == 200
