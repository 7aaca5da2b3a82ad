"""What a recording says of the steps of a run."""

from typing import Any

from diptych.control.config import BudgetConfig, CacheConfig, EngineConfig, SchedulerConfig
from diptych.control.engine.recording import (
    DIGEST_BYTES,
    DecisionChain,
    RecordingEngineCore,
    measured_steps,
    plan_summary,
)
from diptych.control.request import Request
from diptych.control.step import SchedulerOutput, StepFeatures, StepResult


def record(times: list[tuple[int, int]]) -> tuple[list[Any], list[StepFeatures]]:
    """Run two requests, steps beginning and ending at these times: the rows as they are in a file, and what each step
    computed."""
    rows: list[Any] = []
    settings = SchedulerConfig("fcfs", BudgetConfig("fixed", 64), max_num_seqs=8)
    core = RecordingEngineCore(EngineConfig(CacheConfig(100, 16), settings), rows.append)
    core.add_request(Request("a", 100, 3), 0)
    core.add_request(Request("b", 20, 3), 0)
    outputs: list[SchedulerOutput] = []
    for begin_ns, end_ns in times:
        output = core.begin_step(begin_ns)
        assert output is not None
        outputs.append(output)
        core.end_step(StepResult(output.step_id), end_ns)
    chain = DecisionChain()
    in_file = [(*row[:2], chain.add(row[2]), plan_summary(row[2])) if row[0] == "begin" else row for row in rows]
    return in_file, [output.features for output in outputs]


def test_what_each_step_computed_and_how_long_it_took_follows_from_the_rows() -> None:
    rows, computed = record([(10, 100), (110, 180), (200, 270)])
    assert list(measured_steps(rows)) == list(zip(computed, [90, 70, 70], strict=True))
    assert computed[0] == StepFeatures(64, 64 * 65 // 2)
    assert computed[1] == StepFeatures(36 + 20, 36 * 64 + 36 * 37 // 2 + 20 * 21 // 2)
    assert computed[2] == StepFeatures(0, 0, 2, 101 + 21)


def test_a_step_that_stands_for_many_measures_nothing() -> None:
    rows = [
        ("begin", 5, b"", (0, (), 3, 60, 0, ())),
        ("end", 50, 0, (), (), (), (4, 40)),
        ("begin", 55),  # nothing to do
        ("begin", 60, b"", (1, (), 3, 72, 0, ())),
        ("end", 70, 1, (), (), (), ()),
    ]
    assert list(measured_steps(rows)) == [(StepFeatures(0, 0, 3, 72), 10)]


def test_a_digest_covers_every_plan_before_it() -> None:
    plans = [SchedulerOutput(0, num_decodes=1), SchedulerOutput(1, num_decodes=2)]
    chain, other = DecisionChain(), DecisionChain()
    digests = [chain.add(plan) for plan in plans]
    assert len(set(digests)) == 2 and {len(digest) for digest in digests} == {DIGEST_BYTES}
    assert other.add(plans[1]) != digests[1]
