"""What prefills were spent on, in the simulator: known traces, and no effect on what is simulated."""

from dataclasses import replace

from diptych.control.config import CacheConfig, EngineConfig, shape_preset
from diptych.control.misses.miss_summary import MissSummary
from diptych.control.slo import NS_PER_S
from diptych.serving.metrics.serving_metrics import CAUSES
from diptych.simulation.faults import CHANNEL_FAULTS
from diptych.simulation.report.outcome import misses
from diptych.simulation.report.simulation_report import MISS_CAUSES, misses_table
from diptych.simulation.run import simulate
from diptych.simulation.scenario import Scenario, load_balancer
from diptych.workload.spec import RequestSpec
from tests.laws import law
from tests.simulation.linear_cost import LinearCost
from tests.simulation.scenarios import random_scenario

BLOCK = 32


def spec(at_s: int, blocks: list[int], prompt_blocks: int) -> RequestSpec:
    """A prompt of whole blocks and one token, with an answer of the other blocks."""
    return RequestSpec(
        arrival_ns=at_s * NS_PER_S,
        prompt_tokens=prompt_blocks * BLOCK + 1,
        output_tokens=(len(blocks) - prompt_blocks) * BLOCK + 1,
        hash_ids=tuple(blocks),
        hash_block_tokens=BLOCK,
    )


def explained(specs: list[RequestSpec], num_blocks: int = 200, num_workers: int = 1) -> MissSummary:
    scenario = Scenario(
        engine=EngineConfig(CacheConfig(num_blocks, BLOCK), shape_preset("chunked")),
        cost=LinearCost(5e6, 3e4),
        workload=specs,
        num_workers=num_workers,
        cluster=load_balancer("round_robin"),
        explain_misses=True,
    )
    summary = simulate(scenario).misses
    assert summary is not None
    assert summary.tokens.total() == summary.num_computed_tokens
    return summary


def test_turns_edits_evictions_and_other_workers_are_told_apart() -> None:
    turn = list(range(10))  # 8 blocks of prompt, 2 of answer
    later = [*turn, 20, 21]
    summary = explained([spec(0, turn, 8), spec(10, later, 11), spec(20, [*turn[:5], 30, 31, 32], 8)])
    assert dict(summary.requests) == {"never_seen": 2, "differs": 1}
    assert summary.tokens == {"new": 8 * BLOCK + 1 + BLOCK + 1 + 3 * BLOCK + 1}
    flood = [spec(10 + number, list(range(100 * number + 100, 100 * number + 170)), 70) for number in range(3)]
    summary = explained([spec(0, turn, 8), *flood, spec(20, turn, 8)], num_blocks=100)
    assert summary.requests["evicted"] == 1 and summary.tokens["evicted"] == 8 * BLOCK
    summary = explained([spec(0, turn, 8), spec(10, turn, 8)], num_workers=2)
    assert summary.requests["routed_elsewhere"] == 1


@law(weight=0.3)
def test_explaining_changes_nothing_of_what_is_simulated(seed: int) -> None:
    """But for faults of messages: what a cache holds is reported in some more, and each has a fate of its own."""
    scenario = random_scenario(seed)
    others = tuple(fault for fault in scenario.faults if fault.kind not in CHANNEL_FAULTS)
    scenario = replace(scenario, record_events=False, faults=others)
    plain, other = simulate(scenario), simulate(replace(scenario, explain_misses=True))
    assert plain.misses is None and other.misses is not None
    assert (plain.requests, plain.duration_ns) == (other.requests, other.duration_ns)
    assert other.misses.tokens.total() == other.misses.num_computed_tokens


def test_every_cause_has_words() -> None:
    assert set(MISS_CAUSES) == set(CAUSES)
    table = misses_table(misses(explained([spec(0, [1, 2], 2)])))
    assert table.rows == (("found in a cache", "0", ""), ("text that was not sent before", "65", "100.0 %"))
