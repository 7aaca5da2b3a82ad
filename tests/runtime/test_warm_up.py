"""What the warm-up measures, on a runner that takes what a formula says, and on a machine where much else runs."""

import random
import statistics
from types import SimpleNamespace
from typing import Any

import pytest

from diptych.control.engine.scheduler.step_time import StepTimeModel
from diptych.control.step import SchedulerOutput, chunk_attention
from diptych.runtime.step.warm_up import COUNTED, DECODES, MOST_ROUNDS, PREFILLS, Measurement, warm_up
from tests.laws import law

CONSTANT, PER_TOKEN, PER_PAIR, PER_SEQUENCE = 4_000_000, 26_000, 70, 150_000  # nanoseconds, as of small models


class TimedRunner:
    """Counts the time of its steps instead of computing. stalls: what part of the steps is stopped in between, as long
    as a scheduler of an operating system does that, and somewhat longer."""

    def __init__(self, stalls: float = 0.0, speed: float = 1.0, max_model_len: int = 4096, seed: int = 0) -> None:
        self.max_model_len, self.max_num_seqs, self.first_block, self.block_size = max_model_len, 64, 0, 32
        self.num_blocks, self.groups = 4096 // 32 + 1, ()
        self.model_config = SimpleNamespace(vocab_size=100)
        self.now = 0
        self.num_steps = 0
        self.known: set[str] = set()
        self._stalls, self._speed, self._rng = stalls, speed, random.Random(seed)

    @property
    def num_requests(self) -> int:
        return len(self.known)

    def clock(self) -> int:
        return self.now

    def add_request(self, request_id: str, *_: Any) -> None:
        self.known.add(request_id)

    def execute(self, output: SchedulerOutput) -> None:
        self.known.difference_update(output.finished)
        if not output.prefills and not output.num_decodes:
            return
        work = CONSTANT + PER_SEQUENCE * output.num_decodes
        for chunk in output.prefills:
            work += PER_TOKEN * chunk.num_tokens + PER_PAIR * chunk_attention(chunk.start, chunk.num_tokens)
        self.num_steps += 1
        self.now += int(work / self._speed)
        if self._rng.random() < self._stalls:
            self.now += self._rng.randrange(5_000_000, 60_000_000)


def measure(runner: Any, budget_s: float = 1.2) -> list[Measurement]:
    """What is measured of it, by its own clock."""
    return warm_up(runner, budget_s=budget_s, clock=runner.clock)


def fitted(runner: TimedRunner) -> StepTimeModel:
    model = StepTimeModel()
    for features, duration_ns in measure(runner):
        model.observe(features, duration_ns)
    return model


def test_a_quiet_machine_measures_each_shape_as_often_as_it_counts() -> None:
    runner = TimedRunner()
    measured = measure(runner)
    assert len(measured) == COUNTED * (len(PREFILLS) + len(DECODES))
    assert runner.num_steps == COUNTED * (len(PREFILLS) + 2 * len(DECODES))  # a decode joins in a step of its own
    assert not runner.known
    true_ns = PER_TOKEN * 1000 + PER_PAIR * chunk_attention(0, 1000)
    assert fitted(TimedRunner()).prefill_work_ns(0, 1000) == pytest.approx(true_ns, rel=0.01)


@law(weight=0.3)
def test_the_price_of_a_prompt_is_right_when_every_third_step_is_stopped_in_between(seed: int) -> None:
    """The median of nine machines: on one, a shape can be stopped each time that it is measured."""
    true_ns = PER_TOKEN * 1000 + PER_PAIR * chunk_attention(0, 1000)
    runners = [TimedRunner(stalls=0.33, seed=seed + number) for number in range(9)]
    work_ns = statistics.median(fitted(runner).prefill_work_ns(0, 1000) for runner in runners)
    assert true_ns / 1.15 < work_ns < true_ns * 1.15


def test_every_shape_is_measured_before_any_is_measured_again() -> None:
    """A slow machine, where the time is over after some of them: the model has seen dear shapes, too."""
    runner = TimedRunner(speed=0.1)
    measured = measure(runner)
    shapes = {(features.prefill_tokens, features.decode_seqs) for features, _ in measured}
    assert len(measured) < COUNTED * (len(PREFILLS) + len(DECODES))
    assert max(tokens for tokens, _ in shapes) >= 128


def test_shapes_that_do_not_fit_are_left_out_and_a_restless_machine_ends() -> None:
    runner = TimedRunner(max_model_len=300)
    measured = measure(runner)
    assert max(features.prefill_tokens for features, _ in measured) == 256
    restless = TimedRunner(stalls=1.0, speed=1e6)
    measure(restless, budget_s=1e9)
    assert restless.num_steps <= MOST_ROUNDS * (len(PREFILLS) + 2 * len(DECODES))
