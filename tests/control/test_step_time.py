"""The step-time model learns a machine, keeps what it knows, and says how wrong it is."""

import random

import pytest

from diptych.control.engine.scheduler.step_time import (
    OUTLIERS_BELIEVED,
    REFIT_EVERY,
    StepTimeModel,
    nonnegative_least_squares,
)
from diptych.control.errors import ConfigError
from diptych.control.expert_law import ExpertLaw
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


# ---------------------------------------------------------------- mixtures of experts

LAW, EXPERT_NS = ExpertLaw(128, 8), 300_000.0


def mixed_duration(features: StepFeatures, rng: random.Random | None = None) -> int:
    """A step of a mixture: most of its weights are those of the experts that its tokens visit."""
    rows = features.prefill_tokens + features.decode_seqs
    return duration(features, rng) + int(EXPERT_NS * LAW.touched(rows) * (rng.gauss(1, 0.03) if rng else 1))


def test_experts_that_tokens_visit_are_counted() -> None:
    assert LAW.touched(0) == 0.0 and LAW.touched(1) == pytest.approx(8.0)
    rng, counts = random.Random(8), []
    for _ in range(2000):
        counts.append(len({expert for _ in range(16) for expert in rng.sample(range(128), 8)}))
    assert LAW.touched(16) == pytest.approx(sum(counts) / len(counts), rel=0.01)
    assert 127.9 < LAW.touched(200) <= 128.0


def test_a_model_that_knows_experts_predicts_steps_of_a_mixture() -> None:
    rng, knows, does_not = random.Random(9), StepTimeModel(experts=LAW), StepTimeModel()
    for _ in range(400):
        features = random_features(rng, prefill=rng.random() < 0.4)
        for model in (knows, does_not):
            model.observe(features, mixed_duration(features, rng))
    errors: dict[StepTimeModel, list[float]] = {knows: [], does_not: []}
    for number in range(200):
        features = random_features(rng, prefill=number % 3 == 0)
        for model, found in errors.items():
            found.append(abs(model.predict_ns(features) / mixed_duration(features) - 1))
    medians = {model: sorted(found)[100] for model, found in errors.items()}
    assert medians[knows] < 0.05 and medians[knows] < medians[does_not]
    assert knows.expert_ns == pytest.approx(EXPERT_NS, rel=0.2)
    other = knows.copy()
    assert (other.expert_ns, other.experts) == (knows.expert_ns, LAW)
    other.rescale(2.0)
    assert other.expert_ns == 2 * knows.expert_ns


@law(weight=0.2)
def test_the_largest_chunk_beside_streams_reads_no_expert_twice(seed: int) -> None:
    rng, model = random.Random(seed), StepTimeModel(TRUTH, LAW, EXPERT_NS)
    start, beside, available = rng.randrange(5000), rng.randrange(80), rng.uniform(1e5, 2e8)
    chunk = model.largest_chunk(start, available, beside)
    assert model.prefill_work_ns(start, chunk, beside) <= available or chunk == 0
    assert model.prefill_work_ns(start, chunk + 2, beside) > available
    decode = StepFeatures(0, 0, beside, 40 * beside)
    both = StepFeatures(chunk, chunk_attention(start, chunk), beside, 40 * beside)
    work_ns = model.prefill_work_ns(start, chunk, beside)
    assert model.predict_ns(both) - model.predict_ns(decode) == pytest.approx(work_ns, abs=2)
    assert model.largest_chunk(start, available, beside + 20) >= chunk  # more streams read more experts anyway


def test_top_k_is_at_most_the_number_of_experts() -> None:
    with pytest.raises(ConfigError, match=r"top_k is 9; 1 to num_experts \(8\)"):
        ExpertLaw(8, 9)
