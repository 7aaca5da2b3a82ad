"""LocalEngine: the loop around EngineCore and ModelRunner."""

import pytest

from diptych.control.errors import ContextLengthError, InvalidRequestError
from diptych.control.request import FinishReason, SamplingParams
from diptych.runtime.local_engine import engine_config
from diptych.runtime.step.warm_up import warm_up
from tests.runtime.checkpoints import prompt_of, runner
from tests.runtime.driving import greedy
from tests.runtime.gathering_engine import GatheringEngine


def engine_of(**changes: object) -> GatheringEngine:
    """An engine over the shared Llama."""
    return GatheringEngine(runner("llama"), engine_config(runner("llama"), **changes))


def test_every_request_comes_back_once_with_its_reason() -> None:
    engine = engine_of()
    for index in range(5):
        engine.add(f"r{index}", prompt_of(10 + index), greedy(4 + index))
    results = engine.run()
    assert {name: len(generation.token_ids) for name, generation in results.items()} == {
        f"r{index}": 4 + index for index in range(5)
    }
    assert all(generation.finish_reason is FinishReason.LENGTH for generation in results.values())
    assert engine.run() == {} and runner("llama").num_requests == 0


def test_an_aborted_request_keeps_what_it_has() -> None:
    engine = engine_of()
    engine.add("gone", prompt_of(10), greedy(50))
    engine.add("stays", prompt_of(11), greedy(20))
    for _ in range(6):
        engine.step()
    engine.abort("gone")
    engine.abort("never heard of")
    results = engine.run()
    assert results["gone"].finish_reason is FinishReason.ABORT and 0 < len(results["gone"].token_ids) < 50
    assert len(results["stays"].token_ids) == 20
    assert runner("llama").num_requests == 0


def test_a_refused_request_leaves_nothing_behind() -> None:
    engine = engine_of(max_model_len=64)
    with pytest.raises(ContextLengthError):
        engine.add("long", prompt_of(64), greedy(1))
    with pytest.raises(InvalidRequestError):
        engine.add("strange", [10**6], greedy(1))
    engine.add("fine", prompt_of(60), greedy(50))
    assert len(engine.run()["fine"].token_ids) == 4  # to the end of the context
    assert runner("llama").num_requests == 0


def test_requests_with_different_salts_share_no_blocks() -> None:
    engine = engine_of()
    prompt = prompt_of(100)
    cached = []
    for name, salt in (("a", "x"), ("b", "x"), ("c", "y"), ("d", None)):
        engine.add(name, prompt, greedy(40), salt=salt)
        engine.run()
        cached.append(engine.core.stats().prefix_hit_tokens)
    assert cached == [0, 96, 96, 96]


def test_a_long_answer_extends_the_cached_prefix_under_its_salt() -> None:
    engine = engine_of()
    prompt = prompt_of(40)
    engine.add("first", prompt, greedy(60), salt="s")
    answer = engine.run()["first"].token_ids
    engine.add("second", prompt + answer, greedy(2), salt="s")
    engine.run()
    assert engine.core.stats().prefix_hit_tokens == 96


def test_warm_up_gives_the_step_time_model_its_first_fit() -> None:
    engine = engine_of()
    before = engine.core.stats().step_time_coefficients
    for features, duration_ns in warm_up(engine.runner):
        engine.core.observe(features, duration_ns)
    assert engine.core.stats().step_time_coefficients != before
    engine.add("r", prompt_of(10), SamplingParams(max_tokens=3, seed=1))
    assert len(engine.run()["r"].token_ids) == 3
