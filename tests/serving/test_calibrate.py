"""The measurements of a calibration, on small models: what is measured is what was asked for."""

import asyncio
import time
from pathlib import Path

from fake_worker import VOCAB_SIZE
from servers import RunningServer
from tests.control.driver import Driver

from diptych.calibration.calibration import IDLE_PROMPTS, _Load
from diptych.calibration.calibration_steps import DesignPoint, design, measure_point
from diptych.control.config import CacheConfig, EngineConfig
from diptych.control.engine.recording import RecordingEngineCore
from diptych.control.step import StepFeatures
from diptych.runtime.step.model_runner import RunnerConfig, load_runner
from diptych.serving.link.engine_options import BUNDLED_MODEL, EngineOptions
from diptych.serving.link.recorder import record_engine
from diptych.simulation.replay import recorded_steps


def test_every_design_point_fits_the_machine() -> None:
    points = design(max_num_seqs=8, room_tokens=5000, max_model_len=1000)
    assert {point.num_seqs for point in points} >= {0, 1, 8}
    for point in points:
        assert point.num_seqs <= 8
        assert point.start + point.chunk + point.num_seqs * point.context <= 5000
        assert max(point.start + point.chunk, point.context) < 1000
    assert len(set(points)) == len(points)


def test_single_steps_are_measured_and_leave_nothing_behind() -> None:
    runner = load_runner(RunnerConfig(BUNDLED_MODEL, num_blocks=64, max_num_seqs=4))
    for point in (DesignPoint(16, 40, 0, 0), DesignPoint(0, 0, 3, 50), DesignPoint(8, 0, 2, 20)):
        durations = measure_point(runner, point, time.perf_counter_ns)
        assert all(duration > 0 for duration in durations)
        assert len(durations) == (1 if point.chunk else 3)
        assert runner.num_requests == 0
    assert DesignPoint(8, 0, 2, 20).features == StepFeatures(8, 36, 2, 42)


def test_the_load_reaches_a_live_server_in_every_scenario(fake: RunningServer) -> None:
    steps = [(StepFeatures(0, 0, count, 64), 10**7) for count in (1, 8, 32)] + [(StepFeatures(64, 2080, 0, 0), 10**7)]
    stages: list[tuple[str, float]] = []
    load = _Load(fake.url, VOCAB_SIZE // 2, EngineOptions(), steps, 0.1, lambda *stage: stages.append(stage))
    samples = asyncio.run(load.run())
    assert {prompt for prompt, _ in samples} == set(IDLE_PROMPTS)
    assert stages[-1] == ("live server", 1.0)


def test_recorded_steps_are_what_the_core_measured(tmp_path: Path) -> None:
    driver = Driver(EngineConfig(CacheConfig(200, block_size=4)))
    recorder = record_engine(tmp_path / "run.jsonl", driver.config)
    core = driver.core = RecordingEngineCore(driver.config, recorder.write)
    core.observe(StepFeatures(16, 136), 1000)
    for number in range(5):
        driver.add(f"r{number}", 10 + 7 * number, 6)
        driver.step()
    driver.run()
    recorder.close()
    recorded = recorded_steps(tmp_path / "run.jsonl")
    assert recorded.config == driver.config
    assert recorded.warm_up == [(StepFeatures(16, 136), 1000)]
    computing = [output.features for output in driver.outputs if output.is_compute]
    assert recorded.steps == [
        (features, step.end_ns - step.start_ns) for features, step in zip(computing, driver.steps(), strict=True)
    ]
