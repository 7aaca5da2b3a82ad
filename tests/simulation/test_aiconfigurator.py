"""The adapter to aiconfigurator-core: its arithmetic on a stand-in, and the library itself where it is installed."""

import sys

import pytest

from diptych.control.errors import ConfigError
from diptych.control.step import ScheduledPrefill, SchedulerOutput, StepFeatures, chunk_attention
from diptych.simulation.costs.aiconfigurator import KNOTS, AIConfiguratorCost
from diptych.simulation.costs.cost_model import UNBOUNDED


class LinearEngine:
    """Milliseconds: 1 a token outside of attention, 0.001 a pair of a chunk, 0.01 a context token of a decode."""

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        tokens = isl - prefix
        return bs * (tokens + 0.001 * chunk_attention(prefix, tokens))

    def decode_step_latency(self, gen_tokens: int, isl: int, osl: int) -> float:
        return gen_tokens * (1 + 0.01 * (isl + osl / 2))

    def mixed_step_breakdown(
        self, ctx_tokens: int, gen_tokens: int, isl: int, osl: int, prefix: int = 0
    ) -> tuple[float, float, float, float]:
        shared, decode = float(ctx_tokens + gen_tokens), gen_tokens * 0.01 * (isl + osl / 2)
        return shared + decode, shared, 0.0, decode


def plan(chunks: tuple[tuple[int, int], ...], num_decodes: int, context: int) -> SchedulerOutput:
    prefills = tuple(ScheduledPrefill(f"r{i}", start, n, (), True) for i, (start, n) in enumerate(chunks))
    features = StepFeatures(
        sum(n for _, n in chunks), sum(chunk_attention(start, n) for start, n in chunks), num_decodes, context
    )
    return SchedulerOutput(0, prefills=prefills, num_decodes=num_decodes, features=features)


@pytest.fixture(params=["stand-in", "library"])
def cost(request: pytest.FixtureRequest) -> AIConfiguratorCost:
    if request.param == "stand-in":
        return AIConfiguratorCost(LinearEngine())
    pytest.importorskip("aiconfigurator_core")
    return AIConfiguratorCost.compile("llama-3.1-8b", "h100-sxm")


def test_decode_lines_cover_every_context_and_never_fall(cost: AIConfiguratorCost) -> None:
    for num_seqs in (1, 8, 64):
        context, before = num_seqs, 0
        for _ in KNOTS:
            line = cost.decode_line(num_seqs, context)
            assert line.until_context > context
            assert cost.step_ns(plan((), num_seqs, context)) == line.step_ns(context) >= before
            before = line.step_ns(context)
            if line.until_context == UNBOUNDED:
                break
            context = line.until_context
        assert line.until_context == UNBOUNDED


def test_a_mixed_step_costs_more_than_either_part_and_less_than_both(cost: AIConfiguratorCost) -> None:
    chunk, decodes = cost.step_ns(plan(((0, 512),), 0, 0)), cost.step_ns(plan((), 16, 16_000))
    mixed = cost.step_ns(plan(((0, 512),), 16, 16_000))
    assert max(chunk, decodes) < mixed <= chunk + decodes


def test_parts_add_up_as_the_tables_say() -> None:
    cost = AIConfiguratorCost(LinearEngine())
    mixed = cost.step_ns(plan(((0, 100), (50, 30)), 4, 4 * 200))
    expected_ms = 100 + 30 + 4 + 0.001 * (chunk_attention(0, 100) + chunk_attention(50, 30)) + 4 * 0.01 * 200
    assert mixed == pytest.approx(expected_ms * 1e6, rel=1e-6)
    assert cost.step_ns(plan((), 4, 4 * 200)) == pytest.approx((4 + 0.01 * 800) * 1e6, rel=1e-6)


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.engine", None)
    with pytest.raises(ConfigError, match=r"pip install 'diptych\[planner\]'"):
        AIConfiguratorCost.compile("llama-3.1-8b", "h100-sxm")


def test_what_the_library_does_not_know_is_a_config_error() -> None:
    pytest.importorskip("aiconfigurator_core")
    with pytest.raises(ConfigError, match="no data for"):
        AIConfiguratorCost.compile("llama-3.1-8b", "no-such-device")
    with pytest.raises(ConfigError, match="weight_bits is 3"):
        AIConfiguratorCost.compile("llama-3.1-8b", "h100-sxm", weight_bits=3)
