"""Offered tokens are computed where they make more tokens per second, within what a step may hold."""

from dataclasses import dataclass, field

import pytest

from diptych.control.config import BudgetConfig, CacheConfig, EngineConfig, SchedulerConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.scheduler.step_time import StepTimeModel
from diptych.control.events import RequestFinished, StepFinished
from diptych.control.request import FinishReason, Request
from diptych.control.slo import NS_PER_MS, Slo
from diptych.control.step import DraftProposal, SchedulerOutput, StepFeatures, StepResult, VerifyResult

MS = float(NS_PER_MS)


@dataclass
class Streams:
    """Streams on a worker whose steps take 20 ms and ``row_ms`` for each row."""

    count: int
    row_ms: float = 1.0
    context_us: float = 0.0
    budget: BudgetConfig = field(default_factory=lambda: BudgetConfig("slo"))
    num_blocks: int = 2000
    slo: Slo | None = None
    max_tokens: int = 300
    extra_ms: float = 0.0  # more of a step with extra rows

    def __post_init__(self) -> None:
        model = StepTimeModel((20 * MS, 0.1 * MS, 0.0, self.row_ms * MS, self.context_us * 1000))
        for rows in range(1, 25):  # trusted, and right
            features = StepFeatures(0, 0, rows, 100)
            model.observe(features, model.predict_ns(features))
        model.coefficients = (20 * MS, 0.1 * MS, 0.0, self.row_ms * MS, self.context_us * 1000)
        scheduler = SchedulerConfig(budget=self.budget, max_num_seqs=64)
        self.core = EngineCore(EngineConfig(CacheConfig(self.num_blocks, 16), scheduler), model)
        self.now = 0
        for number in range(self.count):
            request = Request(f"r{number}", 20, self.max_tokens)
            request.slo = self.slo
            self.core.add_request(request, self.now)
        output = self.step()
        while output.num_decodes < self.count:
            output = self.step()

    def step(self, *proposals: DraftProposal, accepted: int = 0) -> SchedulerOutput:
        """One step; ``proposals`` come with its result, ``accepted`` of each computed proposal are right."""
        output = self.core.begin_step(self.now)
        assert output is not None
        self.now += self.core.model.predict_ns(output.features) + int(self.extra_ms * MS * bool(output.verify_rows))
        extra = tuple(
            VerifyResult(rows.request_id, rows.num_tokens, min(accepted, rows.num_tokens))
            for rows in output.verify_rows
        )
        self.events = self.core.end_step(StepResult(output.step_id, extra=extra, proposals=proposals), self.now)
        return output

    def rows(self, *proposals: DraftProposal) -> dict[str, int]:
        """What the step after these proposals takes of them."""
        self.step(*proposals)
        return {rows.request_id: rows.num_tokens for rows in self.step().verify_rows}


def proposal(number: int, *chances: float) -> DraftProposal:
    return DraftProposal(f"r{number}", chances)


def test_a_lone_stream_takes_what_a_wide_batch_refuses() -> None:
    falling = proposal(0, 0.9, 0.7, 0.4, 0.1, 0.04)
    assert Streams(1).rows(falling) == {"r0": 3}
    assert Streams(16).rows(falling) == {"r0": 2}
    assert Streams(48).rows(falling) == {"r0": 1}
    assert Streams(48).rows(proposal(0, 0.6)) == {}


def test_rows_pay_together_for_what_a_step_with_extra_rows_costs_more() -> None:
    streams = Streams(16, extra_ms=10.0, max_tokens=5000)
    taken = [bool(streams.rows(proposal(0, 0.9, 0.7))) for _ in range(400)]
    assert taken[0] and not any(taken[100:120])
    assert 3 < sum(taken) < 60  # measured again now and then
    assert streams.core.scheduler.speculation.step_ns < 10 * MS
    many = [proposal(number, 1.0, 1.0) for number in range(16)]
    assert len(streams.rows(*many)) > 8  # all that the budget has room for
    cheap = Streams(16, max_tokens=5000)
    assert all(cheap.rows(proposal(0, 0.9, 0.7)) for _ in range(100))


def test_forced_tokens_pay_at_any_width() -> None:
    for count in (1, 8, 60):
        assert Streams(count).rows(proposal(0, 1.0, 1.0, 1.0)) == {"r0": 3}


def test_rows_that_cost_as_much_as_a_step_are_not_taken() -> None:
    assert Streams(2, row_ms=20.0).rows(proposal(0, 0.5), proposal(1, 0.5)) == {}


def test_a_long_context_makes_rows_dear() -> None:
    assert Streams(1, context_us=300.0).rows(proposal(0, 0.6, 0.3, 0.2)) == {"r0": 1}
    assert Streams(1, context_us=0.0).rows(proposal(0, 0.6, 0.3, 0.2)) == {"r0": 3}


def test_the_best_rows_of_all_streams_go_first() -> None:
    taken = Streams(8).rows(proposal(0, 0.5, 0.3), proposal(1, 0.9, 0.85), proposal(2, 0.2))
    assert taken == {"r0": 1, "r1": 2}


def test_a_budget_in_tokens_counts_them() -> None:
    config = SchedulerConfig(budget=BudgetConfig("fixed", 64), max_num_seqs=64)
    streams = Streams(1)
    streams.core.configure(config)
    assert streams.rows(proposal(0, *[1.0] * 100)) == {"r0": 63}


def test_a_prompt_that_waits_keeps_half_of_the_room() -> None:
    streams = Streams(4, budget=BudgetConfig("fixed", 64))
    proposals = [proposal(number, *[1.0] * 100) for number in range(4)]
    assert sum(streams.rows(*proposals).values()) == 60
    streams.step(*proposals)
    streams.core.add_request(Request("late", 200, 4), streams.now)
    output = streams.step()
    assert sum(rows.num_tokens for rows in output.verify_rows) == 30
    assert [(chunk.request_id, chunk.num_tokens) for chunk in output.prefills] == [("late", 30)]


def test_objectives_bound_the_step() -> None:
    slack = Streams(1, slo=Slo(tpot_ns=60 * NS_PER_MS))
    tight = Streams(1, slo=Slo(tpot_ns=26 * NS_PER_MS))
    chances = [1.0] * 100
    many, few = slack.rows(proposal(0, *chances))["r0"], tight.rows(proposal(0, *chances))["r0"]
    assert 25 <= many <= 39 and 1 <= few <= 5


def test_no_row_goes_behind_the_last_token_of_an_answer() -> None:
    streams = Streams(1, max_tokens=8)
    used = 8 - streams.core.scheduler.batch.num_outputs(streams.core.requests["r0"])
    output = streams.step(proposal(0, *[1.0] * 20))
    assert not output.verify_rows
    output = streams.step(accepted=20)
    (rows,) = output.verify_rows
    assert rows.num_tokens == used - 2  # one was sampled meanwhile, and each step samples one itself
    (finished,) = [event for event in streams.events if isinstance(event, RequestFinished)]
    assert finished.reason is FinishReason.LENGTH and finished.latency.num_output_tokens == 8


def test_blocks_come_early_only_where_memory_is_plentiful() -> None:
    for num_blocks in (400, 10):
        streams = Streams(1, num_blocks=num_blocks, max_tokens=70)
        taken = streams.rows(proposal(0, *[1.0] * 60))["r0"]
        assert (taken == 60) == (num_blocks == 400) and taken > 40
        request = streams.core.requests["r0"]
        assert request.num_blocks * 16 >= streams.core.scheduler.batch.num_computed(request)
        streams.core.kv.check()


def test_an_offer_stands_for_one_step_and_none_for_those_that_left() -> None:
    streams = Streams(2)
    streams.step(proposal(0, 0.9), proposal(1, 0.9))
    streams.core.abort("r1", streams.now)
    assert [rows.request_id for rows in streams.step().verify_rows] == ["r0"]
    assert not streams.step().verify_rows


def test_a_model_that_is_not_trusted_takes_none() -> None:
    core = EngineCore(EngineConfig(CacheConfig(40, 16)))
    core.add_request(Request("r0", 5, 50), 0)
    for now in range(1, 4):
        output = core.begin_step(now)
        assert output is not None and not output.verify_rows
        core.end_step(StepResult(output.step_id, proposals=(proposal(0, 1.0),)), now)


def test_what_came_of_them_is_counted_and_said() -> None:
    streams = Streams(1)
    streams.step(proposal(0, 0.9, 0.9, 0.9))
    streams.step(accepted=2)
    (step,) = [event for event in streams.events if isinstance(event, StepFinished)]
    assert step.extra == (VerifyResult("r0", 3, 2),) and step.num_extra_tokens == 2
    stats = streams.core.stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.accepted_draft_tokens) == (1, 3, (1, 1, 0))
    streams.core.scheduler.speculation.count(VerifyResult("r0", 4, 4, num_forced=3))
    stats = streams.core.stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_forced_tokens) == (2, 4, 3)
    assert stats.accepted_draft_tokens == (2, 1, 0)


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_a_stream_that_got_more_ends_as_much_earlier(accepted: int) -> None:
    streams = Streams(3, max_tokens=60)
    steps = 0
    while "r0" in streams.core.requests:
        streams.step(proposal(0, 0.9, 0.9, 0.9), accepted=accepted)
        steps += 1
    assert "r1" in streams.core.requests or accepted == 0
    assert steps == pytest.approx(58 / (1 + accepted), abs=3)
