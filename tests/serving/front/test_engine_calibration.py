"""A calibration from the steps that an engine reports, and the simulation by it."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from diptych.base.engine_steps import EngineAbout, EngineStep, encode_line
from diptych.calibration.engine_calibration import (
    FEWEST_STEPS,
    ReportedSteps,
    durations,
    engine_calibration,
    listen,
    not_modelled,
    read_steps_file,
    worker_ns,
)
from diptych.calibration.engine_streams import EngineStreams
from diptych.cli.calibrate import calibrate_engine, refuse_others
from diptych.control.errors import ConfigError, WorkerError
from diptych.control.step import StepFeatures, chunk_attention
from diptych.serving.front.engine_spec import EngineSpec
from diptych.simulation.costs.fitted import read_calibration, write_calibration
from diptych.simulation.prepare import scheduler_of, shape_words
from diptych.simulation.settings import settings_from
from diptych.simulation.sweep import run_here
from diptych.vllm_plugin.step_publisher import StepPublisher

ABOUT = EngineAbout(
    "vllm", "run", "0.32.0", "m", "fcfs", max_model_len=4096, block_size=16, num_blocks=500, max_num_seqs=8,
    max_batched_tokens=512,
)  # fmt: skip
PAUSE_NS = 200_000


def law(prefill: int, seqs: int, context: int) -> int:
    """Nanoseconds of a step besides what follows it."""
    return 1_800_000 + 20_000 * prefill + 300_000 * seqs + 100 * context


def reported(about: EngineAbout = ABOUT, num_steps: int = 600) -> ReportedSteps:
    """Steps of all kinds, one right after the other."""
    rng, found, now = random.Random(1), ReportedSteps(about), 1_000
    for number in range(1, num_steps + 1):
        prefill = rng.choice((0, 0, 0, 16, 64, 256, 500))
        seqs = rng.randrange(0 if prefill else 1, 9)
        context = seqs * rng.choice((50, 200, 800))
        end = now + law(prefill, seqs, context)
        prefills = ((f"r{number}", 0, prefill),) if prefill else ()
        found.steps.append(EngineStep(number, now, end, prefills, seqs, seqs, context, 3))
        now = end + PAUSE_NS
    return found


def predicted(found: ReportedSteps, prefill: int, seqs: int, context: int) -> int:
    features = StepFeatures(prefill, chunk_attention(0, prefill), seqs, context)
    return engine_calibration(found).cost.features_ns(features)


@pytest.mark.parametrize(("prefill", "seqs", "context"), [(0, 1, 200), (0, 8, 1600), (256, 0, 0), (64, 4, 800)])
def test_a_step_costs_what_was_reported_and_the_pause_after_it(prefill: int, seqs: int, context: int) -> None:
    expected = law(prefill, seqs, context) + PAUSE_NS
    assert predicted(reported(), prefill, seqs, context) == pytest.approx(expected, rel=0.1)


def step(number: int, start: int, end: int, num_left: int = 1) -> EngineStep:
    return EngineStep(number, start, end, (), 1, 1, 5, num_left)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((step(1, 0, 100), step(2, 120, 200)), [120, 80]),
        ((step(1, 0, 100, num_left=0), step(2, 120, 200)), [100, 80]),  # it was idle meanwhile
        ((step(1, 0, 100), step(3, 120, 200)), [100, 80]),  # a step was missed
        ((step(1, 0, 100), step(2, 900, 1000)), [100, 100]),  # it could not go on
    ],
)
def test_a_pause_counts_only_where_the_engine_had_work_and_went_on(
    steps: Sequence[EngineStep], expected: list[int]
) -> None:
    assert durations(steps) == expected


def test_the_rules_are_those_of_the_engine() -> None:
    found = engine_calibration(reported())
    assert found.scheduler is not None
    assert (found.scheduler.order, found.scheduler.budget.kind) == ("fcfs", "fixed")
    assert (found.scheduler.budget.max_batched_tokens, found.scheduler.max_num_seqs) == (512, 8)
    assert (found.cache.num_blocks, found.cache.block_size, found.cache.admission) == (500, 16, "greedy")
    assert found.max_model_len == 4096
    assert found.settings["engine"] == "vllm 0.32.0"


def test_rules_that_the_simulator_does_not_have_are_named() -> None:
    about = EngineAbout("vllm", "run", long_prefill_threshold=64, chunked_prefill=False)
    assert len(not_modelled(about)) == 2
    assert not not_modelled(ABOUT)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (ReportedSteps(), "0 steps were reported; a calibration needs 50"),
        (ReportedSteps(None, reported().steps), "a calibration needs 50 at least, and the engine's own description"),
        (reported(EngineAbout("vllm", "run", max_num_seqs=4, max_batched_tokens=64)), "how large its KV cache is"),
        (reported(EngineAbout("vllm", "run", block_size=16, num_blocks=9)), "how large its steps are"),
    ],
)
def test_what_is_too_little_is_refused(found: ReportedSteps, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_calibration(found)


def test_another_run_of_the_engine_begins_again() -> None:
    found = ReportedSteps()
    for line in (ABOUT, step(1, 0, 1), step(2, 1, 2), EngineAbout("vllm", "other"), step(1, 0, 5)):
        found.take(encode_line(line))
    assert [known.end_ns for known in found.steps] == [5]
    found.take(encode_line(step(1, 7, 9)))  # before it has said what it is
    assert [known.end_ns for known in found.steps] == [9]


def test_steps_are_read_again_from_a_file(tmp_path: Path) -> None:
    path, found = tmp_path / "steps.jsonl", reported(num_steps=FEWEST_STEPS)
    found.write(path)
    assert read_steps_file(path) == found
    path.write_bytes(path.read_bytes() + b"{}\n")
    with pytest.raises(ConfigError, match=f"steps.jsonl, line {FEWEST_STEPS + 2}: "):
        read_steps_file(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_steps_file(tmp_path / "none.jsonl")


def test_a_simulation_has_the_engines_rules_unless_a_shape_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cal.json"
    calibration = engine_calibration(reported())
    write_calibration(path, calibration)
    assert read_calibration(path) == calibration
    workload = {"rate": 5.0, "num_requests": 40, "lengths": {"prompt": {"mean": 100}, "output": {"mean": 20}}}
    settings = settings_from({"cost": str(path), "workload": workload})
    assert scheduler_of(settings) == calibration.scheduler
    assert shape_words(settings) == "scheduler of vllm 0.32.0"
    tighter = settings_from({"cost": str(path), "workload": workload, "scheduler": {"max_batched_tokens": 64}})
    assert scheduler_of(tighter).budget.max_batched_tokens == 64
    assert scheduler_of(tighter).order == "fcfs"
    other = settings_from({"cost": str(path), "workload": workload, "shape": "unified"})
    assert scheduler_of(other).budget.kind == "whole"
    assert shape_words(other) == "shape unified"
    summary = run_here(settings).point["summary"]
    assert summary["num_completed"] == 40
    assert summary["ttft_ms"]["p50"] == pytest.approx((law(100, 0, 0) + PAUSE_NS) / 1e6, rel=0.5)


def test_the_command_reads_a_file_and_names_what_has_no_effect(tmp_path: Path) -> None:
    steps, out = tmp_path / "steps.jsonl", tmp_path / "cal.json"
    reported().write(steps)
    assert calibrate_engine(str(steps), out, 10, None) == read_calibration(out)
    with pytest.raises(ConfigError, match="threads has no effect with engine"):
        refuse_others({"model": None, "threads": 2})
    with pytest.raises(ConfigError, match="seconds is 0"):
        calibrate_engine(str(steps), out, 0, None)


@pytest.mark.asyncio
async def test_what_is_published_is_listened_to(tmp_path: Path) -> None:
    publisher = StepPublisher(f"ipc://{tmp_path}/steps", ABOUT)
    stages: list[str] = []
    listening = asyncio.create_task(listen(f"ipc://{tmp_path}/steps", 0.6, lambda stage, share: stages.append(stage)))
    try:
        for line in reported(num_steps=60).steps:
            await asyncio.sleep(0.005)
            publisher.publish(line)
        found = await listening
    finally:
        publisher.close()
    assert found.steps
    assert "steps" in stages[-1]


@pytest.mark.asyncio
async def test_an_engine_is_given_single_requests_and_streams() -> None:
    engine = FakeEngine("vllm", answer_tokens=0)
    await engine.start()
    try:
        spec = EngineSpec("vllm", engine.url, step_events="tcp://127.0.0.1:1")
        found = ReportedSteps(ABOUT)
        stages: list[str] = []
        streams = EngineStreams(spec, 0.01, lambda stage, share: stages.append(stage))
        assert await streams.run(found) == []  # none of its steps was reported
        lengths = {len(body["prompt"]) for body in engine.requests if isinstance(body["prompt"], list)}
        assert lengths >= {16, 64, 256, 1024}
        assert stages
    finally:
        await engine.stop()
    with pytest.raises(WorkerError, match="no connection"):
        await EngineStreams(spec, 0.01, lambda stage, share: None).run(found)
    with pytest.raises(ConfigError, match="has no step_events"):
        EngineStreams(EngineSpec("vllm", engine.url), 1, lambda stage, share: None)
    with pytest.raises(ConfigError, match="only Diptych's plugin in vLLM"):
        EngineStreams(EngineSpec("sglang", engine.url, step_events="ipc:///run/x.0"), 1, lambda stage, share: None)


def test_the_front_end_is_what_the_steps_of_a_request_leave() -> None:
    own = "cmpl-" + "0123456789abcdef" * 2
    steps = [EngineStep(1, 0, 70, ((f"cmpl-{own}-0-ab", 0, 9),)), EngineStep(2, 80, 90, ((f"cmpl-{own}-0-ab", 9, 3),))]
    assert worker_ns(steps, [own, "cmpl-other"]) == {own: 80, "cmpl-other": 0}
