"""The step-time model learns a machine, keeps what it knows, and says how wrong it is."""

import random

import pytest

from diptych.control.engine.scheduler.step_time import (
    OUTLIERS_BELIEVED,
    REFIT_EVERY,
    StepTimeModel,
    nonnegative_least_squares,
)
from diptych.control.step import StepFeatures, chunk_attention
from tests.laws import law

TRUTH = (4e6, 80_000.0, 6.0, 150_000.0, 40.0)


def duration(features: StepFeatures, rng: random.Random | None = None) -> int:
    c = TRUTH
    exact = (
        c[0] + c[1] * features.prefill_tokens + c[2] * features.prefill_attention
        + c[3] * features.decode_seqs + c[4] * features.decode_context
    )  # fmt: skip
    return int(exact * (rng.gauss(1, 0.03) if rng else 1))


def random_features(rng: random.Random, *, prefill: bool = True) -> StepFeatures:
    tokens = rng.randrange(1, 600) if prefill else 0
    start, seqs = rng.randrange(0, 8000), rng.randrange(0 if prefill else 1, 64)
    return StepFeatures(tokens, chunk_attention(start, tokens), seqs, seqs * rng.randrange(1, 2000))


def test_it_learns_a_machine_from_noisy_steps() -> None:
    rng, model = random.Random(1), StepTimeModel()
    for _ in range(300):
        features = random_features(rng, prefill=rng.random() < 0.5)
        model.observe(features, duration(features, rng))
    errors = []
    for _ in range(200):
        features = random_features(rng)
        errors.append(abs(model.predict_ns(features) / duration(features) - 1))
    assert sorted(errors)[100] < 0.03
    assert 0.005 < model.relative_error < 0.06


def test_an_hour_of_decoding_does_not_erase_what_prefill_costs() -> None:
    rng, model = random.Random(2), StepTimeModel()
    for _ in range(100):
        features = random_features(rng)
        model.observe(features, duration(features))
    for _ in range(5000):
        features = random_features(rng, prefill=False)
        model.observe(features, duration(features))
    features = StepFeatures(512, chunk_attention(1000, 512), 8, 4000)
    assert model.predict_ns(features) == pytest.approx(duration(features), rel=0.02)


def test_it_follows_a_machine_that_becomes_slower() -> None:
    rng, model = random.Random(3), StepTimeModel()
    for factor in (1, 2):
        for _ in range(1200):
            features = random_features(rng)
            model.observe(features, factor * duration(features))
    features = random_features(rng)
    assert model.predict_ns(features) == pytest.approx(2 * duration(features), rel=0.05)


def test_one_outlier_changes_nothing() -> None:
    rng, model = random.Random(4), StepTimeModel()
    for _ in range(100):
        features = random_features(rng)
        model.observe(features, duration(features))
    before = model.coefficients
    model.observe(features, 50 * duration(features))
    assert model.coefficients == before


def test_the_largest_chunk_is_the_largest() -> None:
    model = StepTimeModel(TRUTH)
    for start in (0, 100, 5000):
        for available in (1e6, 5e7, 3e8):
            chunk = model.largest_chunk(start, available)
            assert model.prefill_work_ns(start, chunk) <= available
            assert model.prefill_work_ns(start, chunk + 2) > available
    assert model.largest_chunk(0, -1.0) == 0


def test_the_fit_is_not_negative_and_optimal() -> None:
    solution = nonnegative_least_squares([[2.0, 1.0], [1.0, 2.0]], [1.0, -1.0])
    assert solution == pytest.approx([0.5, 0.0])
    solution = nonnegative_least_squares([[2.0, 1.0], [1.0, 2.0]], [3.0, 3.0])
    assert solution == pytest.approx([1.0, 1.0])


@law(weight=0.2)
def test_so_many_outliers_in_a_row_are_the_new_truth_and_fewer_are_not(seed: int) -> None:
    rng, model = random.Random(seed), StepTimeModel()
    for _ in range(100):
        features = random_features(rng)
        model.observe(features, duration(features))
    for count in (OUTLIERS_BELIEVED, OUTLIERS_BELIEVED - 1):
        seen = model.num_observed
        for _ in range(count):
            features = random_features(rng)
            model.observe(features, 50 * duration(features))
        assert model.num_observed == seen
        if count == OUTLIERS_BELIEVED:
            model.observe(features, 50 * duration(features))
            assert model.num_observed == seen + 1
        else:
            model.observe(features, duration(features))
            assert model.num_observed == seen + 1


def test_a_grown_model_is_fitted_again_once_in_so_many_steps() -> None:
    rng, model = random.Random(6), StepTimeModel()
    fits = []
    for _ in range(32 * REFIT_EVERY + 10 * 4 * REFIT_EVERY):
        before = model.coefficients
        features = random_features(rng)
        model.observe(features, duration(features, rng))
        if model.coefficients != before:
            fits.append(model.num_observed)
    assert fits[: REFIT_EVERY + 1] == [*range(1, REFIT_EVERY + 1), 2 * REFIT_EVERY]
    young = [count for count in fits if count < 32 * REFIT_EVERY]
    assert young[REFIT_EVERY:] == list(range(2 * REFIT_EVERY, 32 * REFIT_EVERY, REFIT_EVERY))
    grown = [count for count in fits if count >= 32 * REFIT_EVERY]
    assert grown == list(range(32 * REFIT_EVERY, model.num_observed + 1, 4 * REFIT_EVERY))


def test_a_model_whose_machine_gets_other_cores_goes_on_with_scaled_prices_and_relearns() -> None:
    """Half the cores: prefill takes twice as long, decodes (bound by memory) 1.4 times."""
    rng, model = random.Random(6), StepTimeModel()
    for at in range(300):
        features = random_features(rng, prefill=at % 2 == 0)
        model.observe(features, duration(features))

    def now(features: StepFeatures) -> int:
        work = (0.0, TRUTH[1] * features.prefill_tokens, TRUTH[2] * features.prefill_attention)
        return int(2 * sum(work) + 1.4 * (duration(features) - sum(work)))

    prompt, stream = StepFeatures(512, chunk_attention(1000, 512), 0, 0), StepFeatures(0, 0, 8, 4000)
    model.rescale(2.0)
    assert model.predict_ns(prompt) == pytest.approx(2 * duration(prompt), rel=0.02)
    assert model.predict_ns(stream) == pytest.approx(2 * duration(stream), rel=0.02)
    for _ in range(12):
        features = random_features(rng, prefill=False)
        model.observe(features, now(features))
    assert model.predict_ns(stream) == pytest.approx(now(stream), rel=0.05)
    assert model.predict_ns(prompt) == pytest.approx(now(prompt), rel=0.15)
    for at in range(40):
        features = random_features(rng, prefill=at % 2 == 0)
        model.observe(features, now(features))
    assert model.predict_ns(prompt) == pytest.approx(now(prompt), rel=0.03)
    assert model.predict_ns(stream) == pytest.approx(now(stream), rel=0.03)


def test_a_rescaled_model_learns_from_its_first_step() -> None:
    """Wrong by a factor of 5, which a trusted model would take for an outlier."""
    rng, model = random.Random(7), StepTimeModel()
    for _ in range(100):
        features = random_features(rng)
        model.observe(features, duration(features))
    model.rescale(1.5)
    for _ in range(REFIT_EVERY):
        features = random_features(rng)
        model.observe(features, 5 * duration(features))
    features = random_features(rng)
    assert model.predict_ns(features) == pytest.approx(5 * duration(features), rel=0.15)
