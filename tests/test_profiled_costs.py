"""Published step-time profiles as cost models: exact where they were fitted or measured, one line for decodes."""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych.control.config import BudgetConfig, CacheConfig, EngineConfig, SchedulerConfig
from diptych.control.errors import ConfigError
from diptych.control.step import ScheduledPrefill, SchedulerOutput, StepFeatures, chunk_attention
from diptych.simulation.costs import cost_choice
from diptych.simulation.costs.cost_model import CostModel
from diptych.simulation.parallelism import Parallelism
from diptych.simulation.run import simulate
from diptych.simulation.scenario import Scenario
from diptych.workload.spec import RequestSpec

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from profiled_costs import FOLDER, choose_cost, load_profile, profile_names


def step(chunks: list[tuple[int, int]], num_seqs: int = 0, context: int = 0) -> SchedulerOutput:
    """A step with these chunks (start, tokens) and this decode batch."""
    prefills = tuple(ScheduledPrefill("", start, tokens, (), True) for start, tokens in chunks)
    pairs = sum(chunk_attention(start, tokens) for start, tokens in chunks)
    features = StepFeatures(sum(tokens for _, tokens in chunks), pairs, num_seqs, context)
    return SchedulerOutput(0, prefills, num_seqs, features=features)


def test_a_fitted_prefill_takes_what_the_published_formula_says() -> None:
    cost = load_profile("distserve-vllm-opt-13b-a100-tp1")
    a, b, c = 22.052204789310185, 0.14050923870128956, 8.076584822611088e-06
    prompts = [700, 30, 1100]
    expected_ms = a + b * sum(prompts) + c * sum(n * n for n in prompts)
    assert cost.step_ns(step([(0, n) for n in prompts])) == pytest.approx(expected_ms * 1e6, abs=2)


@pytest.mark.parametrize("batch", [1, 94, 95, 200])
def test_a_fitted_decode_changes_regime_at_its_threshold(batch: int) -> None:
    cost = load_profile("distserve-distserve-opt-66b-a100-tp4")
    a, b, c = (
        (30.760284619429587, 0.000451947603788462, 0.063284195750671)
        if batch < 95
        else (27.47082137429487, 0.0004046845541646486, 0.12480667738300383)
    )
    expected_ms = a + b * 50_000 + c * batch
    assert cost.step_ns(step([], batch, 50_000)) == pytest.approx(expected_ms * 1e6, abs=2)


def test_chunks_of_a_prompt_cost_its_prefill_and_one_base_more_each() -> None:
    cost = load_profile("distserve-distserve-opt-13b-a100-tp1")
    whole = cost.step_ns(step([(0, 1500)]))
    parts = cost.step_ns(step([(0, 600)])) + cost.step_ns(step([(600, 900)]))
    assert parts - whole == pytest.approx(18.10254647486372e6, abs=3)


def test_tabled_steps_are_the_measured_ones_and_linear_between() -> None:
    cost = load_profile("splitwise-bloom-176b-h100-tp8")
    at_512, at_1024 = cost.step_ns(step([(0, 512)])), cost.step_ns(step([(0, 1024)]))
    assert at_512 == pytest.approx(76.14e6, rel=1e-3)
    assert cost.step_ns(step([(0, 300), (0, 468)])) == pytest.approx((at_512 + at_1024) / 2, abs=2)
    assert cost.step_ns(step([], 64, 10)) == cost.step_ns(step([], 64, 100_000))
    assert cost.step_ns(step([], 64, 10)) > cost.step_ns(step([], 1, 10))


def test_power_is_given_where_it_was_measured() -> None:
    assert load_profile("splitwise-bloom-176b-h100-tp8").power is None
    power = load_profile("splitwise-bloom-176b-a100-80-tp8").power
    assert power is not None
    assert 0.4 < power.mean(8) < power.peak(8192) < 1.1


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_keeps_the_contract_of_cost_models(name: str) -> None:
    cost: CostModel = load_profile(name)
    assert cost.name == name
    rng = random.Random(name)
    for _ in range(200):
        batch = rng.randrange(1, 600)
        context = batch * rng.randrange(1, 2048)
        line = cost.decode_line(batch, context)
        duration = cost.step_ns(step([], batch, context))
        assert duration == line.step_ns(context) >= 1
        assert line.until_context > context
        assert line.total_ns(context, batch, 3) == sum(line.step_ns(context + i * batch) for i in range(3))
        mixed = cost.step_ns(step([(0, rng.randrange(1, 2048))], batch, context))
        assert type(mixed) is int
        assert mixed >= 1


def test_documents_name_source_licence_and_stay_small() -> None:
    files = list(FOLDER.glob("*.json"))
    assert len(files) == 2
    for file in files:
        text = file.read_text("utf-8")
        assert len(text) < 60_000
        document = json.loads(text)
        assert document["source"]
        assert document["licence"] in ("MIT", "Apache-2.0")


def test_an_unknown_profile_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="splitwise-bloom-176b-h100-tp8") as caught:
        load_profile("gpt-2")
    assert caught.value.param == "profile"


def test_a_request_alone_takes_its_prefill_and_its_decode_steps() -> None:
    cost = load_profile("distserve-vllm-opt-66b-a100-tp4")

    class One:
        def __iter__(self) -> Iterator[RequestSpec]:
            return iter((RequestSpec(arrival_ns=5, prompt_tokens=755, output_tokens=200),))

        def __len__(self) -> int:
            return 1

    config = EngineConfig(
        CacheConfig(cost.info.kv_tokens[1] // 16, block_size=16),
        SchedulerConfig(order="fcfs", budget=BudgetConfig("whole", max_batched_tokens=8192)),
    )
    table = simulate(Scenario(engine=config, cost=cost, workload=One())).requests
    assert table.ttft_ns(0) == cost.step_ns(step([(0, 755)]))
    assert table.decode_ns[0] == sum(cost.step_ns(step([], 1, 756 + i)) for i in range(199))


def test_a_family_is_the_profile_of_the_device_and_its_sharing_of_the_model() -> None:
    wanted = {"model": "bloom-176b", "hardware": "h100", "parallelism": Parallelism(8)}
    choice = choose_cost("splitwise-bloom-176b", **wanted)
    assert choice.cost.name == "splitwise-bloom-176b-h100-tp8" and choice.weights is not None
    for other in ({"parallelism": Parallelism(4)}, {"model": "opt-13b"}, {"hardware": "l40s"}, {"kv_bits": 8}):
        with pytest.raises(ConfigError, match="does not hold"):
            choose_cost("splitwise-bloom-176b", **(wanted | other))
    with pytest.raises(ConfigError, match="engine is 'sglang'"):
        choose_cost("splitwise-bloom-176b", **wanted, engine="sglang")
    assert choose_cost("roofline", model="llama-3-8b", hardware="h100").cost.name != choice.cost.name


def test_the_product_names_no_profile() -> None:
    with pytest.raises(ConfigError, match="one of auto"):
        cost_choice.choose_cost("splitwise-bloom-176b", model="bloom-176b", hardware="h100")
