"""A step that is broken off in the middle and planned again changes no token."""

import random
from collections.abc import Iterator

import pytest

from diptych.control.config import BudgetConfig, PreemptionConfig, SchedulerConfig
from diptych.control.step import StepBrokenOff, StepResult, StepTokens
from diptych.runtime.local_engine import StepOutcome, engine_config
from diptych.runtime.step.model_runner import ModelRunner
from tests.runtime.checkpoints import prompt_of, reference, runner
from tests.runtime.driving import greedy
from tests.runtime.gathering_engine import GatheringEngine
from tests.runtime.kernel_sets import FLOAT32


class InterruptedEngine(GatheringEngine):
    """Breaks off many of the steps that compute, before one of their layers."""

    num_broken_off = 0
    _chance = random.Random(3)

    def step(self) -> StepOutcome | None:
        self.runner.on_layer = self._on_layer
        try:
            return super().step()
        except StepBrokenOff:
            self.num_broken_off += 1
            plan = self.core._plan
            assert plan is not None
            return StepOutcome(StepTokens([], []), self.core.end_step(StepResult(plan.step_id), 0, num_steps=0))

    def _on_layer(self, num_layers: int) -> None:
        if self._chance.random() < 0.35:
            raise StepBrokenOff


@pytest.fixture(params=FLOAT32)
def shared(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    shared = runner("llama", request.param)
    yield shared
    shared.on_layer = None


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_requests_get_the_tokens_that_they_would_have_got(shared: ModelRunner, preemption: str) -> None:
    scheduler = SchedulerConfig(
        order="fcfs",
        budget=BudgetConfig(kind="fixed", max_batched_tokens=48, min_chunk_tokens=1),
        preemption=PreemptionConfig(kind=preemption),  # type: ignore[arg-type]
        max_num_seqs=8,
    )
    engine = InterruptedEngine(shared, engine_config(shared, scheduler))
    prompts = {f"r{number}": prompt_of(20 + 23 * number, seed=number) for number in range(6)}
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, greedy(30))
        engine.step()
    results = engine.run()
    assert engine.num_broken_off >= 5
    for request_id, prompt in prompts.items():
        assert len(results[request_id].token_ids) == 30
        reference("llama").check_greedy(prompt, results[request_id].token_ids)
    assert shared.num_requests == 0
