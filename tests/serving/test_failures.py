"""A defect planted in each driver ends loudly: an error that names it, a failed /health, a recording."""

import asyncio
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_process_fleet import engine_options, expected, in_process_fleet
from virtual_time import in_virtual_time

from diptych.control.cluster.cluster_core import ClusterCore
from diptych.control.config import CacheConfig, EngineConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.recording import RecordingEngineCore
from diptych.control.errors import BrokenInvariantError, CoreFailedError, ErrorRecord, WorkerError
from diptych.control.recent_rows import LAST_NS, MAX_ROWS, MAX_WEIGHT, ROW_WEIGHT, RecentRows
from diptych.control.request import DEFAULT_OPTIONS, Request, Submission
from diptych.control.step import StepResult
from diptych.runtime.tiers.tier_io import TierEvents
from diptych.serving.failures.failure_board import FailureBoard
from diptych.serving.failures.failure_recording import MAX_FILES, write_failure
from diptych.serving.failures.recorded_cores import weigh_engine_row
from diptych.serving.failures.restart_pause import HEALTHY_S, LONGEST_PAUSE_S, RestartPause
from diptych.serving.failures.watched_tasks import start_watched
from diptych.simulation.cluster_replay import replay_cluster
from diptych.simulation.environment import Environment


@in_virtual_time
async def test_a_defect_of_the_cluster_core_ends_every_request_and_leaves_a_recording_that_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "failures"
    async with in_process_fleet(options=engine_options(failures=str(folder)), both=2) as setup:
        fleet, client = setup.fleet, setup.client
        client.submit("first", range(100, 140))
        assert await client.read("first") == expected(range(40), 8)
        client.submit("running", range(200, 240), max_tokens=4000)
        await setup.when(lambda: client.generations["running"].streams[0].num_tokens > 2)
        assert fleet.failures.health() == (200, {"status": "ok", "detail": None})

        fleet.core._num_awaiting_first_token[0] += 1  # a count that agrees with nothing
        monkeypatch.setattr("diptych.control.cluster.cluster_audit.EVENTS_PER_REQUEST", 0)
        with pytest.raises(CoreFailedError, match=r"the cluster core has failed .*BrokenInvariantError") as caught:
            await client.read("running")
        assert caught.value.status == 500 and str(tmp_path) not in caught.value.message
        assert not fleet.is_routable and len(fleet.streams) == 0 and fleet.failures.ended.is_set()
        status, content = fleet.failures.health()
        assert status == 503 and content["status"] == "failed" and str(folder) in (content["detail"] or "")
        with pytest.raises(CoreFailedError):
            client.submit("late", range(10))
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    header = json.loads(path.read_bytes().split(b"\n")[0])
    assert header["failure"]["core"] == "the cluster core" and header["dropped"] == 0
    assert header["failure"]["notes"][0].startswith("ClusterCore was given Reported by worker")
    report = replay_cluster(path)  # up to the event with the defect, which a sound core passes
    assert report.num_events > 5 and report.difference is not None
    assert report.difference.line == report.num_events + 1
    assert "the failure: BrokenInvariantError" in report.difference.expected


@in_virtual_time
async def test_a_message_that_cannot_be_handled_is_a_defect_and_not_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with in_process_fleet(options=engine_options(failures=str(tmp_path))) as setup:
        fleet, client = setup.fleet, setup.client

        def planted(*_: Any) -> None:
            raise RuntimeError("planted")

        monkeypatch.setattr(fleet.timeline, "on_events", planted)
        client.submit("a", range(40))
        with pytest.raises(CoreFailedError, match="RuntimeError: planted"):
            await client.read("a")


def test_a_request_in_two_places_and_a_lost_block_are_noticed_by_the_engine() -> None:
    def running() -> EngineCore:
        core = EngineCore(EngineConfig(cache=CacheConfig(num_blocks=64, block_size=16)))
        core.add_request(Request("a", 40, 500), 0)
        return core

    def steps(core: EngineCore) -> None:
        for now in range(1, 150):
            output = core.begin_step(now)
            assert output is not None
            core.end_step(StepResult(output.step_id), now)

    steps(running())
    core = running()
    core.scheduler.swapped["a"] = core.requests["a"]
    with pytest.raises(BrokenInvariantError, match="1 requests are open and 2 are"):
        steps(core)
    core = running()
    core.kv.pool._free.pop()
    with pytest.raises(BrokenInvariantError, match="not the 64 that there are"):
        steps(core)
    core = running()
    steps(core)
    core.kv._num_reserved += 1
    core.abort("a", 200)
    with pytest.raises(BrokenInvariantError, match="no request is open"):
        while (output := core.begin_step(201)) is not None:
            core.end_step(StepResult(output.step_id), 201)


def test_a_request_that_nobody_owns_is_noticed_by_the_cluster() -> None:
    from diptych.control.cluster.cluster_events import Arrived

    core = ClusterCore()
    core.on_event(Arrived(Submission("a", 10, 10, (), DEFAULT_OPTIONS)), 0)  # no worker: it waits in the queue
    core._audit.check()
    core.admission.remove("a")
    with pytest.raises(BrokenInvariantError, match="request a is nowhere"):
        core._audit.check()


def recent_rows(weigh: Callable[[Any], int] = lambda row: row[1]) -> RecentRows:
    """The recent part of rows (time or None, weight, ...)."""
    return RecentRows(weigh, lambda row: row[0])


def names(rows: RecentRows) -> list[Any]:
    """The third of each row that is kept."""
    return [row[2] for row in rows.kept()[0]]


def test_recent_rows_are_bounded_in_number_and_weight() -> None:
    rows = recent_rows()
    for number in range(MAX_ROWS + 10):
        (rows.write_light if number % 3 else rows.write)((number, 0, number))
    assert names(rows) == list(range(10, MAX_ROWS + 10)) and rows.kept()[1] == 10
    rows = recent_rows()
    rows.write((1, MAX_WEIGHT // 2, "heavy"))
    rows.write_light((1, 0, "light"))
    rows.write((1, MAX_WEIGHT // 2, "heavier"))
    assert names(rows) == ["light", "heavier"] and rows.kept()[1] == 1
    rows.write((1, 2 * MAX_WEIGHT, "too heavy"))
    assert rows.kept() == ([], 4)
    rows.write_light((1, 0, "new"))
    assert names(rows) == ["new"]


def test_recent_rows_are_those_of_the_last_seconds_before_the_newest_one() -> None:
    rows = recent_rows()
    for time_ns, name in ((0, "old"), (None, "before"), (LAST_NS, "edge"), (None, "beside"), (2 * LAST_NS, "new")):
        rows.write_light((time_ns, 0, name))
    assert names(rows) == ["before", "edge", "beside", "new"] and rows.kept()[1] == 1
    rows.write_light((None, 0, "newer"))
    assert names(rows) == ["before", "edge", "beside", "new", "newer"]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, MAX_WEIGHT // 3)), max_size=60))
def test_what_recent_rows_refer_to_never_exceeds_the_limit_and_the_newest_stay(written: list[tuple[bool, int]]) -> None:
    rows, weights = recent_rows(), []
    for number, (is_light, weight) in enumerate(written):
        weights.append(0 if is_light else weight)
        (rows.write_light if is_light else rows.write)((1, weights[-1], number))
        kept, num_gone = rows.kept()
        assert [row[2] for row in kept] == list(range(num_gone, number + 1))
        total = sum(row[1] for row in kept) + ROW_WEIGHT * len(kept)
        assert total <= MAX_WEIGHT + ROW_WEIGHT * len(kept)
        if num_gone:  # no more is let go than must be
            assert total + sum(weights[num_gone - 1 :][:1]) + ROW_WEIGHT * len(written) > MAX_WEIGHT


def test_a_row_is_light_only_where_it_refers_to_nothing() -> None:
    """Whatever a scheduler does: what is not weighed has no weight."""
    light: list[Any] = []
    core = RecordingEngineCore(EngineConfig(cache=CacheConfig(64, 16)), lambda row: None, light.append)
    for number in range(6):
        core.add_request(Request(f"r{number}", 40 + 30 * number, 60), 0)
    for now in range(1, 400):
        if (output := core.begin_step(now)) is not None:
            core.end_step(StepResult(output.step_id), now)
    assert len(light) > 400 and {row[0] for row in light} == {"begin", "end"}
    assert [weigh_engine_row(row) for row in light] == [0] * len(light)


def test_a_recording_has_no_hashes_no_labels_and_few_files(tmp_path: Path) -> None:
    rows = RecentRows(lambda row: 0, lambda row: row[1])
    block_hash = b"0123456789abcdef"
    rows.write(("add", 1, ("id", [block_hash, block_hash], {"metadata": {"name": "secret label"}})))
    for _ in range(MAX_FILES + 3):
        try:
            raise BrokenInvariantError("counts\x1b[31m differ")
        except BrokenInvariantError as error:
            path = write_failure(tmp_path, "a core", error, rows, {"format": "x"}, lambda row: row)
    assert len(list(tmp_path.iterdir())) == MAX_FILES
    data = Path(path).read_bytes()
    assert b"MDEyMzQ1Njc4OWFiY2RlZg" not in data and b"secret" not in data and b"\x1b" not in data
    row = json.loads(data.split(b"\n")[1])
    assert row[2][1][0] == row[2][1][1]  # equal where they were
    assert "test_failures.py" in json.loads(data.split(b"\n")[0])["failure"]["places"][-1]
    assert write_failure(tmp_path / "file" / "x", "c", ValueError(), None, {}, lambda row: row)
    (tmp_path / "plain").write_text("")
    assert write_failure(tmp_path / "plain", "c", ValueError(), None, {}, lambda row: row) == ""  # logged, not raised


def test_health_fails_until_what_failed_is_replaced() -> None:
    board = FailureBoard()
    board.report("worker 1", "RuntimeError: planted")
    assert board.health()[0] == 503
    board.replaced("worker 1")
    status, content = board.health()
    assert status == 200 and "worker 1 has failed" in (content["detail"] or "")
    assert board.counts == {"worker 1": 1}


def test_pauses_grow_until_it_was_well_for_a_while() -> None:
    now = [0.0]
    pause = RestartPause(lambda: now[0])
    assert [pause.next_s() for _ in range(3)] == [0.5, 1.0, 2.0]
    assert max(pause.next_s() for _ in range(10)) == LONGEST_PAUSE_S
    pause.begun()
    now[0] += HEALTHY_S + 1
    assert pause.next_s() == 0.5


@pytest.mark.asyncio
async def test_the_end_of_a_task_beside_requests_is_reported() -> None:
    found: list[BaseException] = []

    async def failing() -> None:
        raise RuntimeError("planted")

    await asyncio.gather(start_watched(failing(), "failing", found.append), return_exceptions=True)
    task = start_watched(asyncio.sleep(1000), "cancelled", found.append)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [str(error) for error in found] == ["planted"]


def test_a_failure_crosses_between_processes() -> None:
    error = ErrorRecord.of(CoreFailedError("it failed")).exception()
    assert isinstance(error, CoreFailedError) and error.status == 500 and error.code == "core_failed"


def test_a_thread_of_the_tiers_that_fails_is_found_by_who_polls() -> None:
    events = TierEvents()
    assert events.poll() == []
    with events.defects():
        raise RuntimeError("planted")
    with pytest.raises(WorkerError, match="a thread of the KV tiers has failed: planted"):
        events.poll()
    events.close()


def test_a_failure_in_a_simulation_says_when() -> None:
    environment = Environment()

    def planted() -> None:
        raise BrokenInvariantError("planted")

    environment.at(70, 0, planted)
    with pytest.raises(BrokenInvariantError) as caught:
        environment.run()
    assert caught.value.__notes__ == ["in the simulation, at 70 ns"]
