"""Costs fitted to measurements: the fit finds the law, the better law is chosen, and the file keeps everything."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from diptych.control.config import CacheConfig, shape_preset
from diptych.control.errors import ConfigError
from diptych.control.step import ScheduledPrefill, SchedulerOutput, StepFeatures, chunk_attention
from diptych.simulation.costs.fitted import (
    Calibration,
    FittedCost,
    FrontEnd,
    MeasuredPoint,
    fit,
    fit_front_end,
    fit_linear,
    fit_live,
    fit_scaled,
    gather,
    interpolate,
    read_calibration,
    relative_errors,
    write_calibration,
)


def grid() -> list[StepFeatures]:
    """Prompts after several contexts, decodes in several batches, and both in one step."""
    chunks = [(n, start) for n in (16, 64, 256, 1024) for start in (0, 512)]
    decodes = [(count, context) for count in (1, 2, 4, 8, 16, 32) for context in (32, 256, 1024)]
    features = [StepFeatures(n, chunk_attention(start, n), 0, 0) for n, start in chunks]
    features += [StepFeatures(0, 0, count, count * context) for count, context in decodes]
    return features + [StepFeatures(n, chunk_attention(0, n), 4, 1024) for n in (16, 64, 256)]


def straight(f: StepFeatures) -> float:
    return 1e6 + 3e4 * f.prefill_tokens + 4 * f.prefill_attention + 2e5 * f.decode_seqs + 60 * f.decode_context


def bent(f: StepFeatures) -> float:
    """Batches get cheaper per sequence, short chunks waste most of their step."""
    decodes = 2e5 * f.decode_seqs**0.7 + 60 * f.decode_context
    return 1e6 + 3e4 * max(f.prefill_tokens, 100 if f.prefill_tokens else 0) + 4 * f.prefill_attention + decodes


def measured(law: Callable[[StepFeatures], float], noise: float = 0.0) -> list[MeasuredPoint]:
    rng = random.Random(1)
    return [MeasuredPoint(f, round(law(f) * rng.uniform(1 - noise, 1 + noise))) for f in grid()]


def test_five_terms_are_found_where_the_machine_has_five() -> None:
    assert relative_errors(fit_linear(measured(straight)), measured(straight))["p95"] < 1e-3


def test_the_law_that_predicts_unseen_steps_better_is_chosen() -> None:
    cost, errors = fit(measured(bent, noise=0.01))
    assert cost.name == "table"
    assert errors["table"]["median"] < errors["linear"]["median"]
    assert relative_errors(cost, measured(bent))["p95"] < 0.05
    few = [MeasuredPoint(f, round(straight(f))) for f in grid()[::3]]
    assert fit(few)[0].name == "linear"  # too few points for a table


def test_a_step_without_prompts_lies_on_its_decode_line() -> None:
    cost, _ = fit(measured(bent))
    for num_seqs, context in ((1, 1), (3, 700), (40, 9000), (200, 10**6)):
        plan = SchedulerOutput(0, num_decodes=num_seqs, features=StepFeatures(0, 0, num_seqs, context))
        assert cost.step_ns(plan) == cost.decode_line(num_seqs, context).step_ns(context)
    chunk = ScheduledPrefill("a", 0, 64, (), True)
    both = StepFeatures(64, chunk_attention(0, 64), 3, 700)
    assert cost.step_ns(SchedulerOutput(0, (chunk,), 3, features=both)) > cost.decode_line(3, 700).step_ns(700)


def test_a_broken_line_goes_through_its_knots_and_on() -> None:
    knots, values = (0, 2, 10), (1.0, 5.0, 9.0)
    assert [interpolate(knots, values, at) for at in (0, 1, 2, 6, 10, 12)] == [1, 3, 5, 7, 9, 10]


def test_the_live_server_costs_more_than_its_steps_and_the_fit_says_how_much() -> None:
    forward = fit_linear(measured(straight))
    live = [(f, round(1.2 * straight(f) + 3e5 + 2e4 * f.decode_seqs)) for f in grid() for _ in range(10)]
    cost, points, errors = fit_live(forward, live)
    assert set(errors) == {"scaled", "live table"}
    assert relative_errors(cost, points)["p95"] < 0.01
    assert relative_errors(fit_scaled(forward, points), points)["p95"] < 0.01


def test_long_prompts_cost_what_single_steps_say_whatever_the_decodes_of_the_live_server_do() -> None:
    forward, single = fit_linear(measured(straight)), measured(straight)
    short = [f for f in grid() if f.prefill_tokens <= 64]
    live = [(f, round(straight(f) * (1.0 if f.prefill_tokens else 0.8))) for f in short for _ in range(10)]
    cost, _, _ = fit_live(forward, live, single)
    long = [point for point in single if point.features.prefill_tokens > 64 and not point.features.decode_seqs]
    assert relative_errors(cost, long)["p95"] < 0.05


def test_steps_are_gathered_by_their_means_without_the_wild_ones() -> None:
    one = StepFeatures(0, 0, 2, 100)
    (point,) = gather([(one, 90), (one, 110), (one, 100), (one, 100_000)])
    assert (point.duration_ns, point.repeats) == (100, 3)


def test_the_front_end_is_a_line_through_the_medians() -> None:
    samples = [(n, 2_000_000 + 500 * n + wild) for n in (16, 256, 1024) for wild in (0, 0, 9_000_000)]
    front_end = fit_front_end(samples)
    assert front_end.delay_ns(600) == pytest.approx(2_300_000, rel=0.01)


def test_a_file_keeps_everything(tmp_path: Path) -> None:
    cost, errors = fit(measured(bent))
    calibration = Calibration(
        model="m",
        cost=cost,
        cache=CacheConfig(100),
        max_model_len=512,
        front_end=FrontEnd(1.5, 0.25),
        warm_up=((StepFeatures(16, 136), 5000),),
        points=tuple(measured(bent)),
        errors=errors,
        machine={"cpu": "one"},
    )
    path = tmp_path / "calibration.json"
    write_calibration(path, calibration)
    assert read_calibration(path) == calibration
    assert read_calibration(path).cost == cost
    assert read_calibration(path).worker(shape_preset("unified")).cache == CacheConfig(100)
    with pytest.raises(ConfigError, match="cannot write"):
        write_calibration(tmp_path / "no" / "where", calibration)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no file of diptych calibrate"),
        ('{"format": "diptych calibration", "version": 7}', "version 7"),
        ('{"format": "diptych calibration", "version": 1}', "not as diptych calibrate"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_calibration(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot read"):
        read_calibration(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="knots"):
        FittedCost((0, 1), (1.0, 2.0), (0.0, 0.0), (5,), (1.0,), 0.0)
