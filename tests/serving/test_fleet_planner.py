"""A live fleet that plans itself, with make-believe workers and a make-believe twin."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from in_process_fleet import InProcessFleet, engine_options, expected, in_process_fleet
from virtual_time import in_virtual_time

from diptych.base.processor import Processor
from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.cluster.core_split import CoreSplit
from diptych.control.config import CacheConfig, EngineConfig, shape_preset
from diptych.control.errors import BrokenInvariantError
from diptych.control.planner.fleet_layout import Layout, WorkerSetting
from diptych.control.planner.planner_config import PlannedPool, PlannerConfig
from diptych.control.planner.planner_events import (
    Demanded,
    GroupCosts,
    Prediction,
    TwinAnswered,
    TwinFailed,
    TwinQuestion,
    TwinSettings,
)
from diptych.control.planner.planner_observer import PlannerObserver
from diptych.control.planner.planner_recording import RecordingPlannerCore
from diptych.control.request import RequestOptions
from diptych.control.slo import NS_PER_S, Slo
from diptych.serving.failures.planner_guard import PlannerGuard, PlannerParts
from diptych.serving.fleet.fleet_options import FleetOptions
from diptych.serving.fleet.fleet_planner import FleetPlanner, pools_of
from diptych.serving.fleet.twin_link import TwinLink
from diptych.serving.fleet.worker_groups import WorkerGroup
from diptych.serving.link.recorder import record_planner
from diptych.simulation.planner_replay import replay_planner

WITH_SLO = RequestOptions(slo=Slo(ttft_ns=NS_PER_S))


class FakeTwin:
    """Likes one configuration. before_answer: what happens meanwhile."""

    def __init__(self, favourite: str) -> None:
        self.favourite = favourite
        self.num_asked = 0

    async def ask(self, question: TwinQuestion) -> TwinAnswered | TwinFailed:
        self.num_asked += 1
        answers = tuple(
            Prediction(2.0, 1.0, 2.0) if layout.label == self.favourite else Prediction(1.0, 0.5, 1.5)
            for layout in question.candidates
        )
        return TwinAnswered(question.number, answers, 0)

    async def close(self) -> None:
        pass


@asynccontextmanager
async def planned(setup: InProcessFleet, twin: FakeTwin, record: Path) -> AsyncIterator[FleetPlanner]:
    fleet = setup.fleet
    planned = replace(fleet.fleet, plan=PlannerConfig("auto", min_arrivals=5), twin_command=("true",))
    members, _, config = pools_of(fleet.options, planned, (0,) * len(fleet.workers))
    recorder = record_planner(record, config)

    def make() -> PlannerParts:
        core = RecordingPlannerCore(config, recorder.write)
        return PlannerParts(core, PlannerObserver(fleet.core, fleet.options.scheduler, members))

    guard = PlannerGuard(make, fleet.failures, record.parent)
    fleet.planner = FleetPlanner(guard, fleet.changes, twin, setup.time.clock, recorder)
    running = asyncio.create_task(fleet.planner.run())
    try:
        yield fleet.planner
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def requests(setup: InProcessFleet, seconds: int) -> None:
    """Two a second."""
    for number in range(2 * seconds):
        setup.client.submit(f"r{number}", [9] * 50, WITH_SLO, max_tokens=4)
        await setup.time.until(setup.time.now + NS_PER_S // 2)


@in_virtual_time
async def test_the_fleet_gets_the_roles_that_the_twin_likes_and_answers_stay_whole(tmp_path: Path) -> None:
    recorded = tmp_path / "run.jsonl"
    async with (
        in_process_fleet(both=2) as setup,
        planned(setup, FakeTwin("1 decode + 1 prefill"), recorded) as planner,
    ):
        await requests(setup, 30)
        assert sorted(setup.fleet.role(worker) for worker in (0, 1)) == ["decode", "prefill"]
        assert planner.num_decisions["change"] == 1
        for number in range(60):
            assert await setup.client.read(f"r{number}") == expected([9] * 50, 4)
    report = replay_planner(recorded)
    assert report.difference is None
    assert report.is_complete
    assert report.num_decisions >= 3


@in_virtual_time
async def test_a_worker_that_an_operator_has_pinned_keeps_its_role(tmp_path: Path) -> None:
    async with in_process_fleet(both=2) as setup:
        for worker in (0, 1):
            setup.fleet.changes.pin(worker, True)
        async with planned(setup, FakeTwin("1 decode + 1 prefill"), tmp_path / "run.jsonl"):
            await requests(setup, 30)
        assert [setup.fleet.role(worker) for worker in (0, 1)] == ["both", "both"]


@in_virtual_time
async def test_a_change_that_is_refused_half_way_is_taken_back(tmp_path: Path) -> None:
    async with in_process_fleet(both=2) as setup:

        class Pinning(FakeTwin):
            """An operator pins a worker while the twin simulates."""

            async def ask(self, question: TwinQuestion) -> TwinAnswered | TwinFailed:
                if self.num_asked == 1:
                    setup.fleet.changes.pin(1, True)
                return await super().ask(question)

        async with planned(setup, Pinning("1 decode + 1 prefill"), tmp_path / "run.jsonl") as planner:
            await requests(setup, 20)
            assert any("taken back" in decision.reason for decision in planner.decisions)
        assert [setup.fleet.role(worker) for worker in (0, 1)] == ["both", "both"]


FOUR_CORES = Processor("a processor", ((0, 4), (1, 5), (2, 6), (3, 7)), tuple(range(8)))
MORE_FOR_PROMPTS = "1 decode on 1 core + 1 prefill on 3 cores"


@in_virtual_time
async def test_cores_move_as_the_twin_likes_and_answers_stay_whole(tmp_path: Path) -> None:
    recorded = tmp_path / "run.jsonl"
    async with (
        in_process_fleet(prefill=1, decode=1, core_split=CoreSplit(), processor=FOUR_CORES) as setup,
        planned(setup, FakeTwin(MORE_FOR_PROMPTS), recorded) as planner,
    ):
        await requests(setup, 30)
        infos = setup.fleet.members.infos
        assert [infos[worker].share.num_threads for worker in (0, 1)] == [3, 1]
        assert planner.decisions[-1].present == MORE_FOR_PROMPTS
        assert planner.num_decisions["change"] == 1
        for number in range(60):
            assert await setup.client.read(f"r{number}") == expected([9] * 50, 4)
    report = replay_planner(recorded)
    assert report.difference is None
    assert report.is_complete


@in_virtual_time
async def test_a_split_that_an_operator_sets_while_the_twin_simulates_stays(tmp_path: Path) -> None:
    async with in_process_fleet(prefill=1, decode=1, core_split=CoreSplit(), processor=FOUR_CORES) as setup:
        changes = setup.fleet.changes

        class Setting(FakeTwin):
            """An operator divides the cores between the second answer and the next tick."""

            async def ask(self, question: TwinQuestion) -> TwinAnswered | TwinFailed:
                if self.num_asked == 1:
                    changes.pin_split(True)
                return await super().ask(question)

        async with planned(setup, Setting(MORE_FOR_PROMPTS), tmp_path / "run.jsonl") as planner:
            await requests(setup, 30)
            assert any("pinned meanwhile" in decision.reason for decision in planner.decisions)
        assert changes.cores.split == CoreSplit()
        infos = setup.fleet.members.infos
        assert [infos[worker].share.num_threads for worker in (0, 1)] == [2, 2]


SMALL = WorkerGroup(name="small", max_model_len=512, kv_cache_tokens=8192, replicas=2)
LARGE = WorkerGroup(name="large", max_model_len=2048, kv_cache_tokens=2560, scheduler=shape_preset("unified"))


@in_virtual_time
async def test_unequal_workers_change_their_roles_and_long_prompts_are_still_served(tmp_path: Path) -> None:
    favourite = "1 both (unified) of large + 1 decode (chunked) of small + 1 prefill (chunked) of small"
    async with in_process_fleet(groups=(SMALL, LARGE)) as setup:
        seen: list[str] = []

        class Seeing(FakeTwin):
            async def ask(self, question: TwinQuestion) -> TwinAnswered | TwinFailed:
                seen.extend(layout.label for layout in question.candidates)
                assert {costs.group for costs in question.costs} == {"", "large", "small"}
                return await super().ask(question)

        async with planned(setup, Seeing(favourite), tmp_path / "run.jsonl"):
            await requests(setup, 30)
        assert sorted(setup.fleet.role(worker) for worker in range(3)) == ["both", "decode", "prefill"]
        assert setup.fleet.role(2) == "both"
        assert seen and not any("prefill (unified) of large" in label for label in seen), "long answers need a worker"
        prompt = list(range(1, 1500))
        setup.client.submit("long", prompt)
        assert await setup.client.read("long") == expected(prompt, 8)
    report = replay_planner(tmp_path / "run.jsonl")
    assert report.difference is None
    assert report.is_complete


def test_pools_are_told_to_the_planner_with_the_shapes_that_they_may_have() -> None:
    rough = WorkerGroup(name="rough", quantize="int8")
    plan = PlannerConfig("auto", shapes=("chunked", "unified"))
    fleet = FleetOptions(groups=(SMALL, LARGE, rough), max_workers=5, plan=plan, twin_command=("true",))
    members, twins, config = pools_of(engine_options(), fleet, (0, 0, 0, 1, 0))
    assert [member.pool for member in members] == ["small", "small", "large", "rough"]
    both = ("chunked", "unified")
    assert config.pools == (PlannedPool("small", both), PlannedPool("large", ("unified",)), PlannedPool("rough", both))
    assert [(pool.engine.max_model_len, pool.model_copy) for pool in twins[:2]] == [(512, 0), (2048, 0)]
    assert twins[2].model_copy == 1
    assert config.max_workers == 5


def question() -> TwinQuestion:
    present = Layout((WorkerSetting(0, "both", "chunked"),))
    return TwinQuestion(1, (), 0, 1, (present,), (GroupCosts((1.0, 1.0, 0.0, 1.0, 1.0), 100, 16),))


def settings() -> TwinSettings:
    return TwinSettings(EngineConfig(CacheConfig(100, 16)), ClusterConfig(), 1)


ECHO = """
import sys
sys.stdin.readline()
for line in sys.stdin:
    print('{"number": 1, "predictions": [], "cost_ns": 5}', flush=True)
"""


def test_a_twin_is_asked_through_its_pipes_and_ends_with_the_link() -> None:
    async def ask_twice() -> None:
        link = TwinLink((sys.executable, "-c", ECHO), settings())
        for _ in range(2):
            assert await link.ask(question()) == TwinAnswered(1, (), 5)
        await link.close()

    asyncio.run(ask_twice())


def test_a_twin_that_dies_fails_its_question_and_the_next_one_starts_another(tmp_path: Path) -> None:
    mark = str(tmp_path / "mark")
    dies_first = f"import os, sys; made = os.path.exists({mark!r}); open({mark!r}, 'w').close(); made or sys.exit()"

    async def ask_twice() -> None:
        link = TwinLink((sys.executable, "-c", dies_first + ECHO), settings())
        assert isinstance(await link.ask(question()), TwinFailed)
        assert await link.ask(question()) == TwinAnswered(1, (), 5)
        await link.close()

    asyncio.run(ask_twice())


@in_virtual_time
async def test_a_planner_that_fails_is_reported_recorded_and_replaced_while_answers_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        in_process_fleet(both=2) as setup,
        planned(setup, FakeTwin("1 decode + 1 prefill"), tmp_path / "run.jsonl") as planner,
    ):
        first, board = planner.planner, setup.fleet.failures

        def planted(*_: object) -> None:
            raise BrokenInvariantError("planted")

        with monkeypatch.context() as patch:
            patch.setitem(first._counters, Demanded, planted)
            setup.client.submit("a", [9] * 50, WITH_SLO, max_tokens=4)
        assert board.health()[0] == 503 and "the planner has failed" in (board.health()[1]["detail"] or "")
        assert await setup.client.read("a") == expected([9] * 50, 4)
        assert board.final is None
        await setup.when(lambda: planner.planner is not first)
        assert board.health()[0] == 200
        (recording,) = tmp_path.glob("diptych-failure-the-planner-*.jsonl")
        assert b"BrokenInvariantError: planted" in recording.read_bytes().split(b"\n")[0]
        await requests(setup, 30)
        assert planner.num_decisions["change"] == 1  # the new one decides
