"""The laws of sampling: the right distribution, the definitions of every parameter, and independence of everything
but the seed, the position and the row itself."""

import math

import numpy as np
import pytest
import torch

from diptych.control.request import SamplingParams
from diptych.runtime.sampling.sampler import (
    RowSampling,
    SamplingError,
    adjust_logits,
    row_as_float32,
    sample_greedy,
    sample_row,
    token_logprobs,
    top_tokens,
    uniforms,
)

VOCAB = 5000


def logits_of(size: int = VOCAB, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    """Random logits."""
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def row(seed: int = 0, tokens: int = 10, outputs: int = 4, stop_ids: tuple[int, ...] = (), **params: object):
    """A row whose history is 0, 1, 2, ... (the last ``outputs`` of them sampled)."""
    history = np.arange(tokens, dtype=np.int32)
    uniform = float(uniforms(np.array([seed]), np.array([tokens]))[0])
    return RowSampling(SamplingParams(max_tokens=100, **params), uniform, history, tokens - outputs, stop_ids)


def draws(logits: np.ndarray, count: int, **params: object) -> np.ndarray:
    """Tokens for ``count`` seeds."""
    return np.array([sample_row(logits.copy(), row(seed=seed, **params)) for seed in range(count)])


def probabilities(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Softmax in fp64."""
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def check_distribution(tokens: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square over bins of at least 8 expected draws, at 4.5 standard deviations of its normal approximation."""
    counts = np.bincount(tokens, minlength=len(expected))
    assert not counts[expected == 0].any(), "a token of probability 0 was drawn"
    order = np.argsort(-expected, kind="stable")
    cumulative = np.floor(np.cumsum(expected[order]) * len(tokens) / 8)
    starts = np.unique(cumulative, return_index=True)[1]
    bins = np.add.reduceat(expected[order] * len(tokens), starts)
    seen = np.add.reduceat(counts[order], starts)
    bins[-2:], seen[-2:] = bins[-2:].sum() / 2, seen[-2:].sum() / 2  # the last bin may be small
    statistic, freedom = float(((seen - bins) ** 2 / bins).sum()), len(bins) - 2
    assert statistic < freedom + 4.5 * math.sqrt(2 * freedom), (statistic, freedom)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_follow_the_softmax_of_the_logits(temperature: float) -> None:
    logits = logits_of(3000)
    check_distribution(draws(logits, 6000, temperature=temperature), probabilities(logits, temperature))


def test_positions_of_one_request_are_independent_draws() -> None:
    logits = logits_of(40)
    tokens = np.array([sample_row(logits.copy(), row(seed=7, tokens=n)) for n in range(4, 8004)])
    expected = probabilities(logits)
    check_distribution(tokens, expected)
    pairs = tokens[0::2] * 40 + tokens[1::2]
    check_distribution(pairs, np.outer(expected, expected).ravel())


@pytest.mark.parametrize("size", [40, 3000])
def test_top_k_keeps_the_k_best(size: int) -> None:
    logits = logits_of(size)
    expected = probabilities(logits)
    expected[np.argsort(-logits)[20:]] = 0
    check_distribution(draws(logits, 6000, top_k=20), expected / expected.sum())


@pytest.mark.parametrize("scale", [0.3, 2.0, 6.0])
def test_top_p_keeps_the_smallest_set_that_reaches_p(scale: float) -> None:
    logits = logits_of(3000, scale=scale)
    expected = probabilities(logits)
    order = np.argsort(-logits)
    size = int(np.searchsorted(np.cumsum(expected[order]), 0.8)) + 1
    expected[order[size:]] = 0
    check_distribution(draws(logits, 3000, top_p=0.8), expected / expected.sum())


def test_top_p_of_any_row_is_what_sorting_gives() -> None:
    """The shortcuts of top_p against the definition, for the first and the last token of the kept set."""
    for scale in (0.01, 0.5, 3.0, 20.0):
        for size in (5, 600, 20_000):
            for top_p in (0.01, 0.5, 0.99, 0.999999):
                logits = np.round(logits_of(size, seed=size, scale=scale), 2)  # with many equal logits
                order = np.argsort(-logits, kind="stable")
                expected = probabilities(logits)[order]
                kept = order[: int(np.searchsorted(np.cumsum(expected), top_p * (1 + 1e-7))) + 1]
                for uniform, token in ((1e-9, kept.min()), (1 - 1e-9, kept.max())):
                    params = SamplingParams(top_p=top_p)
                    sampled = sample_row(logits.copy(), RowSampling(params, uniform, order[:2].astype(np.int32), 1))
                    near = np.isclose(np.cumsum(expected)[len(kept) - 2 :], top_p, rtol=1e-6, atol=0).any()
                    weight = probabilities(logits)[kept]
                    reachable = weight[kept == token][0] / weight.sum() > 2e-9
                    assert sampled == token or near or not reachable


def test_min_p_keeps_what_is_likely_enough_beside_the_best() -> None:
    logits = logits_of(3000)
    expected = probabilities(logits)
    expected[expected < 0.05 * expected.max()] = 0
    check_distribution(draws(logits, 6000, min_p=0.05), expected / expected.sum())


def test_top_p_counts_within_what_top_k_and_min_p_left() -> None:
    logits = np.log(np.array([0.4, 0.2, 0.2, 0.1, 0.1], dtype=np.float32))
    assert set(draws(logits, 300, top_k=2, top_p=0.6)) == {0}  # 0.4 of 0.6 reaches 0.6
    assert set(draws(logits, 300, top_p=0.6)) == {0, 1}
    assert set(draws(logits, 300, min_p=0.4, top_p=0.7)) == {0, 1}  # 0.6 of 0.8 reaches 0.7


def test_equal_logits_are_told_apart_by_their_ids() -> None:
    logits = np.zeros(2000, dtype=np.float32)
    assert set(draws(logits, 400, top_k=3)) == {0, 1, 2}
    assert set(draws(logits, 400, top_p=0.002)) == {0, 1, 2, 3}
    assert draws(logits, 1, temperature=0.0)[0] == 0


def test_top_k_of_1_is_greedy() -> None:
    for seed in range(20):
        logits = logits_of(seed=seed)
        assert draws(logits, 1, top_k=1)[0] == logits.argmax()


def test_top_tokens_is_a_stable_sort() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 7, 600, 5000):
        for levels in (3, 50, 10**6):
            logits = rng.integers(0, levels, size).astype(np.float32)
            order = np.argsort(-logits, kind="stable")
            for count in (1, 5, 64, 1000):
                assert (top_tokens(logits, min(count, size)) == order[: min(count, size)]).all()


def test_the_result_depends_on_seed_and_position_alone() -> None:
    logits = logits_of()
    assert sample_row(logits.copy(), row(seed=3)) == sample_row(logits.copy(), row(seed=3))
    by_seed = {sample_row(logits.copy(), row(seed=seed)) for seed in range(50)}
    by_position = {sample_row(logits.copy(), row(tokens=tokens)) for tokens in range(4, 54)}
    assert len(by_seed) > 20 and len(by_position) > 20


def test_uniforms_are_spread_over_the_unit_interval_for_any_seeds() -> None:
    seeds, positions = np.meshgrid(np.arange(-200, 200), np.arange(100))
    values = uniforms(seeds.ravel(), positions.ravel())
    assert values.min() > 0 and values.max() < 1
    counts = np.bincount((values * 100).astype(int), minlength=100)
    assert float(((counts - 400) ** 2 / 400).sum()) < 99 + 4.5 * math.sqrt(2 * 99)
    assert len(np.unique(values)) == len(values)
    extremes = uniforms(np.array([-(2**63), 2**63 - 1]), np.array([0, 2**31]))
    assert ((extremes > 0) & (extremes < 1)).all()


def test_uniforms_never_change() -> None:
    """A request that moves to a newer version continues its stream: the values are part of the interface."""
    assert uniforms(np.array([0, 1, -1]), np.array([0, 5, 7])).tolist() == [
        0.6524484863740323,
        0.4651924506284873,
        0.10134950925237735,
    ]


def test_repetition_penalty_covers_prompt_and_output() -> None:
    logits = np.array([2.0, -2.0, 2.0, -2.0, 1.0], dtype=np.float32)
    adjust_logits(logits, row(tokens=2, outputs=1, repetition_penalty=2.0))
    assert logits.tolist() == [1.0, -4.0, 2.0, -2.0, 1.0]


def test_presence_and_frequency_penalties_cover_the_output_only() -> None:
    logits = np.zeros(5, dtype=np.float32)
    params = SamplingParams(max_tokens=9, presence_penalty=0.5, frequency_penalty=0.25)
    adjust_logits(logits, RowSampling(params, 0.5, np.array([0, 1, 1, 2, 1], dtype=np.int32), 2))
    assert logits.tolist() == [0.0, -1.0, -0.75, 0.0, 0.0]


def test_logit_bias_is_added_and_min_tokens_masks_the_stops() -> None:
    logits = np.zeros(5, dtype=np.float32)
    adjust_logits(logits, row(tokens=3, outputs=2, stop_ids=(4,), min_tokens=3, logit_bias={1: 5.0}))
    assert logits.tolist() == [0.0, 5.0, 0.0, 0.0, -math.inf]
    logits = np.zeros(5, dtype=np.float32)
    adjust_logits(logits, row(tokens=4, outputs=3, stop_ids=(4,), min_tokens=3))
    assert not logits.any()


def test_greedy_applies_penalties_too() -> None:
    logits = np.array([5.0, 4.9, 0.0], dtype=np.float32)
    history = np.array([0, 0], dtype=np.int32)
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    assert sample_row(logits, RowSampling(params, 0.5, history, 1)) == 1


def test_nothing_to_pick_from_is_an_error() -> None:
    with pytest.raises(SamplingError):
        sample_row(np.full(9, math.nan, dtype=np.float32), row())
    with pytest.raises(SamplingError):
        sample_row(np.zeros(2, dtype=np.float32), row(tokens=1, outputs=1, stop_ids=(0, 1), min_tokens=5))


@pytest.mark.parametrize("params", [{}, {"top_k": 30}, {"top_p": 0.9}, {"min_p": 0.01}])
def test_masked_tokens_are_never_drawn(params: dict[str, float]) -> None:
    logits = logits_of(3000)
    logits[::2] = -math.inf
    assert (draws(logits, 500, temperature=2.0, **params) % 2 == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_greedy_path_is_argmax_with_the_lowest_id_first(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for shift in (0.0, -50.0, 50.0):
        logits = (torch.randn(40, 777, generator=generator) * 3 + shift).to(dtype)
        logits[3, [100, 200]] = logits[3].max() + 1
        logits[4] = -1.5
        logits[5] = 0.0
        expected = [row_as_float32(logits, index).argmax() for index in range(40)]
        ids, is_finite = sample_greedy(logits)
        assert ids.tolist() == expected and is_finite.all()
        assert ids[3] == 100 and ids[4] == 0 and ids[5] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
def test_the_greedy_path_notices_rows_that_are_not_finite(dtype: torch.dtype, value: float) -> None:
    logits = torch.randn(3, 100).to(dtype)
    logits[1] = value
    assert sample_greedy(logits)[1].tolist() == [True, False, True]
    logits[1] = -math.inf
    assert sample_greedy(logits)[1].tolist() == [True, False, True]


def test_rows_are_converted_exactly() -> None:
    logits = torch.randn(2, 1000).to(torch.bfloat16)
    assert (row_as_float32(logits, 1) == logits[1].float().numpy()).all()


def test_logprobs_are_log_softmax_and_the_best_come_first() -> None:
    logits = logits_of()
    expected = torch.from_numpy(logits).double().log_softmax(-1)
    entry = token_logprobs(logits, 17, 5)
    assert entry.token_id == 17 and entry.logprob == pytest.approx(float(expected[17]), abs=1e-5)
    best = expected.topk(5)
    assert [token for token, _ in entry.top] == best.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert token_logprobs(logits, 17, 0).top == ()
