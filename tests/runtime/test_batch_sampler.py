"""The sampler of whole batches picks, on any device and in any company, the tokens that the sampler of single rows
picks; the kernel picks them, too."""

import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from diptych.control.request import SamplingParams
from diptych.control.step import TokenLogprobs
from diptych.runtime.device.host_copies import Copied, ToDevice, memory_of
from diptych.runtime.kernels.native import load_native
from diptych.runtime.sampling.batch_sampler import (
    NOT_FINITE,
    NOTHING_LEFT,
    ROWS_AT_ONCE,
    Adjustment,
    BatchSampler,
    Pick,
    RowBatch,
    best_tokens,
    pick_torch,
)
from diptych.runtime.sampling.sampler import (
    GREEDY_BELOW,
    RowSampling,
    SamplingError,
    row_as_float32,
    sample_row,
    token_logprobs,
    top_tokens,
    uniforms,
)
from diptych.runtime.sampling.step_sampling import mask_out
from diptych.runtime.sampling.token_counts import CountedTokens
from diptych.runtime.sampling.whole_weights import (
    LOG2_E,
    ONE,
    depth_factor,
    whole_weights,
    whole_weights_numpy,
    whole_weights_torch,
)

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
MEMORY = memory_of(DEVICE)
NUM_PROMPT = 12


def pick_of(name: str) -> Pick:
    """torch, or the kernel."""
    if name == "torch":
        return pick_torch
    pytest.importorskip("triton")
    from diptych.runtime.kernels.triton_kernels.pick_tokens import pick_triton

    return pick_triton


def random_params(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    """Parameters as requests mix them; each of them often has no effect."""

    def sometimes(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.4 else otherwise

    return SamplingParams(
        max_tokens=100,
        temperature=float(rng.choice([0.0, 1e-5, 0.3, 1.0, 1.0, 1.7, 20.0])),
        top_k=int(sometimes(rng.choice([1, 2, 20, vocab_size - 1, vocab_size + 5]), 0)),
        top_p=float(sometimes(rng.choice([1e-6, 0.3, 0.9, 0.999999]), 1.0)),
        min_p=float(sometimes(rng.choice([1e-4, 0.05, 0.5, 1.0]), 0.0)),
        repetition_penalty=float(sometimes(1.3, 1.0)),
        presence_penalty=float(sometimes(0.7, 0.0)),
        frequency_penalty=float(sometimes(-0.4, 0.0)),
        min_tokens=int(sometimes(50, 0)),
        logit_bias=sometimes({int(token): float(rng.normal() * 5) for token in rng.choice(vocab_size, 3)}, {}),
        logprobs=sometimes(int(rng.integers(0, 6)), None),
    )


class Case:
    """A step of random rows, and what the sampler of single rows gives for each."""

    def __init__(self, seed: int, num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
        rng = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        scale = float(rng.choice([0.01, 1.0, 4.0, 30.0]))
        logits = torch.randn(num_rows + 2, vocab_size, generator=generator) * scale
        if rng.random() < 0.3:
            logits = logits.round()  # with many equal logits, and zeros of both signs
        self.logits = logits.to(dtype)
        self.rows = rng.permutation(num_rows + 2)[:num_rows]
        self.params = [random_params(rng, vocab_size) for _ in range(num_rows)]
        self.tokens = [rng.integers(0, vocab_size, NUM_PROMPT + 9, dtype=np.int32) for _ in range(num_rows)]
        self.uniforms = uniforms(np.arange(num_rows) + 1000 * seed, np.full(num_rows, NUM_PROMPT + 9))
        self.stop_ids = (0, 3)
        self.masks = [self._mask(rng, vocab_size) if rng.random() < 0.3 else None for _ in range(num_rows)]

    @staticmethod
    def _mask(rng: np.random.Generator, vocab_size: int) -> bytes:
        """A mask of a vocabulary that may be larger or smaller than the model's."""
        allowed = rng.random(vocab_size + int(rng.choice([-7, 0, 9]))) < 0.2
        allowed[5] = True
        return np.packbits(allowed, bitorder="little").tobytes()

    def expected(self, place: int) -> tuple[int, TokenLogprobs | None]:
        """What the host's sampler picks."""
        params = self.params[place]
        values = row_as_float32(self.logits, int(self.rows[place]))
        raw = values.copy()
        if (mask := self.masks[place]) is not None:
            mask_out(values, mask)
        stop_ids = self.stop_ids if params.min_tokens else ()
        row = RowSampling(params, float(self.uniforms[place]), self.tokens[place], NUM_PROMPT, stop_ids)
        try:
            token_id = sample_row(values, row)
        except SamplingError:
            return NOTHING_LEFT, None
        return token_id, None if params.logprobs is None else token_logprobs(raw, token_id, params.logprobs)

    def batch(self, places: list[int]) -> RowBatch:
        """Some of the rows, side by side."""
        params = [self.params[place] for place in places]
        adjustments = {}
        for number, place in enumerate(places):
            stop_ids = self.stop_ids if params[number].min_tokens else ()
            counted = CountedTokens(self.tokens[place], self.tokens[place], NUM_PROMPT)
            adjustments[number] = Adjustment(params[number], self.masks[place], stop_ids, counted)
        return RowBatch(
            rows=self.rows[places].astype(np.int64),
            temperatures=np.array([one.temperature for one in params]),
            top_ks=np.array([one.top_k for one in params]),
            top_ps=np.array([one.top_p for one in params]),
            min_ps=np.array([one.min_p for one in params]),
            uniforms=self.uniforms[places],
            forced=np.full(len(places), -1),
            num_logprobs=np.array([-1 if one.logprobs is None else one.logprobs for one in params]),
            adjustments=adjustments,
        )


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is several blocks, and no more of them than the interpreter has time for."""
    pick_of("triton")
    from diptych.runtime.kernels.triton_kernels import pick_tokens

    monkeypatch.setattr(pick_tokens, "BLOCK", 256)


def check(case: Case, sampler: BatchSampler, *, is_twice: bool = True) -> None:
    """All rows at once, then some of them in another order."""
    places = list(range(len(case.params)))
    expected = [case.expected(place) for place in places]
    for chosen in (places, places[::-2]) if is_twice else (places,):
        token_ids, logprobs = sampler.sample(case.logits.to(DEVICE), case.batch(chosen)).result()
        assert token_ids.tolist() == [expected[place][0] for place in chosen]
        for number, place in enumerate(chosen):
            assert logprobs.get(number) == expected[place][1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_gets_the_tokens_that_its_rows_get_alone_for_a_thousand_seeds(dtype: torch.dtype) -> None:
    samplers = {vocab_size: BatchSampler(DEVICE, MEMORY) for vocab_size in (777, 3000, 64)}
    for seed, vocab_size in zip(range(25), itertools.cycle(samplers), strict=False):
        check(Case(seed, 40, vocab_size, dtype), samplers[vocab_size])


def test_the_kernel_gets_the_tokens_that_rows_get_alone(small_blocks: None) -> None:
    check(Case(100, 4, 300, torch.float32), BatchSampler(DEVICE, MEMORY, pick_of("triton")), is_twice=False)


FILTERS = [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.5, 0.0), (5, 0.7, 0.2)]  # top_k, top_p, min_p


def equal_logits(top_k: int, top_p: float, min_p: float, uniform: float) -> Case:
    """A row of zeros of both signs, with one token that is a little more likely."""
    case = Case(0, 1, 300, torch.float32)
    case.logits, case.rows, case.masks = torch.zeros(1, 300), np.array([0]), [None]
    case.logits[0, 7], case.logits[0, 290] = -0.0, 1e-30
    case.params, case.uniforms = [SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)], np.array([uniform])
    return case


@pytest.mark.parametrize("filters", FILTERS)
def test_equal_logits_are_told_apart_by_their_ids(filters: tuple[int, float, float]) -> None:
    for uniform in (1e-9, 0.4, 1 - 1e-12, 1.0):
        check(equal_logits(*filters, uniform), BatchSampler(DEVICE, MEMORY))


@pytest.mark.parametrize(("filters", "uniform"), [*zip(FILTERS, (1.0, 0.4, 1 - 1e-12, 1.0), strict=True)])
def test_the_kernel_tells_them_apart_so_too(
    filters: tuple[int, float, float], uniform: float, small_blocks: None
) -> None:
    check(equal_logits(*filters, uniform), BatchSampler(DEVICE, MEMORY, pick_of("triton")), is_twice=False)


def test_rows_without_a_token_say_why_and_disturb_no_other() -> None:
    case = Case(1, 6, 300, torch.float32)
    case.params = [SamplingParams(logprobs=1) for _ in range(6)]
    case.masks = [None] * 6
    expected = [case.expected(place) for place in range(6)]
    case.masks[2] = bytes(300 // 8 + 1)
    case.logits[case.rows[4], 17] = math.nan
    case.logits[case.rows[5], 17] = math.inf
    token_ids, logprobs = (
        BatchSampler(DEVICE, MEMORY).sample(case.logits.to(DEVICE), case.batch(list(range(6)))).result()
    )
    assert token_ids[[2, 4, 5]].tolist() == [NOTHING_LEFT, NOT_FINITE, NOT_FINITE]
    for place in (0, 1, 3):
        assert (token_ids[place], logprobs[place]) == expected[place]
    assert sorted(logprobs) == [0, 1, 3]


def test_greedy_rows_take_the_lowest_of_equal_ids() -> None:
    logits = torch.randn(5, 50)
    logits[1, [9, 30]] = 99.0
    logits[3, 4] = math.nan
    pending = BatchSampler(DEVICE, MEMORY).greedy(logits.to(DEVICE))
    assert pending.result()[0].tolist() == [logits[0].argmax(), 9, logits[2].argmax(), NOT_FINITE, logits[4].argmax()]


def test_forced_tokens_are_not_sampled_and_have_log_probabilities() -> None:
    case = Case(2, 3, 300, torch.float32)
    case.params = [SamplingParams(logprobs=2)] * 3
    case.masks = [None, None, bytes(100)]  # a mask of a forced row is not looked at
    batch = case.batch([0, 1, 2])
    batch.forced[2] = 11
    token_ids, logprobs = BatchSampler(DEVICE, MEMORY).sample(case.logits.to(DEVICE), batch).result()
    assert token_ids[2] == 11
    assert logprobs[2] == token_logprobs(row_as_float32(case.logits, int(case.rows[2])), 11, 2)


def test_penalties_follow_answers_that_grow_leave_and_come_back() -> None:
    """The counts are kept on the device; more answers than were ever there at once take the rows of others."""
    case = Case(3, 12, 400, torch.float32)
    case.params = [SamplingParams(repetition_penalty=1.4, frequency_penalty=0.8, presence_penalty=0.1)] * 12
    sampler, rng = BatchSampler(DEVICE, MEMORY), np.random.default_rng(0)
    owners = [object() for _ in range(12)]
    for _ in range(30):
        chosen = rng.permutation(12)[: rng.integers(1, 6)].tolist()
        batch = case.batch(chosen)
        for number, place in enumerate(chosen):
            counted = CountedTokens(owners[place], case.tokens[place], NUM_PROMPT)
            batch.adjustments[number] = Adjustment(case.params[place], case.masks[place], (), counted)
        token_ids, _ = sampler.sample(case.logits.to(DEVICE), batch).result()
        assert token_ids.tolist() == [case.expected(place)[0] for place in chosen]
        for place in chosen:
            case.tokens[place] = np.append(case.tokens[place], rng.integers(0, 400, 2, dtype=np.int32))


class CountingCopies(ToDevice):
    """num_bytes: of all that was brought to the device."""

    num_bytes = 0

    def copy(self, arrays: Sequence[npt.NDArray[Any]]) -> Copied:
        self.num_bytes += sum(array.nbytes for array in arrays)
        return super().copy(arrays)


def test_a_token_more_of_each_answer_is_all_that_a_step_counts_however_many_have_penalties() -> None:
    count = 2 * ROWS_AT_ONCE + 9
    case = Case(4, count, 64, torch.float32)
    case.params = [SamplingParams(repetition_penalty=1.4, frequency_penalty=0.8)] * count
    case.masks = [None] * count
    sampler, owners = BatchSampler(DEVICE, MEMORY), [object() for _ in range(count)]
    copies = sampler._to_device = CountingCopies(MEMORY)
    sizes: list[int] = []
    for _ in range(3):
        batch = case.batch(list(range(count)))
        for place in range(count):
            counted = CountedTokens(owners[place], case.tokens[place], NUM_PROMPT)
            batch.adjustments[place] = Adjustment(case.params[place], tokens=counted)
        before = copies.num_bytes
        assert sampler.sample(case.logits.to(DEVICE), batch).result()[0].tolist() == [
            case.expected(place)[0] for place in range(count)
        ]
        sizes.append(copies.num_bytes - before)
        case.tokens = [np.append(tokens, np.int32(5)) for tokens in case.tokens]
    assert sizes[1] == sizes[2] < sizes[0] - count * NUM_PROMPT * 8


def test_scores_of_many_rows_are_those_of_single_rows() -> None:
    logits = torch.randn(70, 500) * 3
    logits[3] = -0.0
    token_ids = np.arange(70)
    scores = BatchSampler(DEVICE, MEMORY).logprobs(logits.to(DEVICE), token_ids, 4)
    assert scores == [token_logprobs(row_as_float32(logits, row), row, 4) for row in range(70)]


@pytest.mark.parametrize("temperature", [GREEDY_BELOW, 0.4, 1.0, 30.0])
def test_weights_are_softmax_and_have_the_same_bits_from_numpy_torch_and_the_library(temperature: float) -> None:
    for size in (1, 13, 40_000):
        logits = (np.random.default_rng(size).standard_normal(size) * 5).astype(np.float32)
        logits[size // 2 + 1 :: 3] = -math.inf
        best, factor = logits.max(), depth_factor(temperature)
        weights = whole_weights_numpy(logits, best, factor)
        assert (weights == np.rint(weights)).all() and weights.max() == ONE and weights.min() >= 0
        exact = np.exp((logits.astype(np.float64) - float(best)) / temperature)
        assert np.abs(weights / ONE - exact).max() < 3e-7
        tensors = [torch.tensor([value], dtype=torch.float32, device=DEVICE) for value in (best, LOG2_E / temperature)]
        on_device = whole_weights_torch(torch.from_numpy(logits).to(DEVICE)[None], *tensors)
        assert (on_device[0].cpu().numpy() == weights).all()
        assert (whole_weights(logits, best, factor) == weights).all()


@pytest.mark.skipif(load_native() is None, reason="the native library is not built")
def test_the_library_makes_the_weights_where_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.runtime.sampling.whole_weights.whole_weights_numpy", None)
    assert whole_weights(np.zeros(9, dtype=np.float32), np.float32(0), 1.0).tolist() == [ONE] * 9


def test_best_tokens_are_those_of_the_host() -> None:
    rng = np.random.default_rng(0)
    for size, count in ((5, 5), (600, 7), (600, 599), (5000, 1)):
        rows = rng.integers(-3, 3, (4, size)).astype(np.float32)
        rows[1] *= -0.0
        on_device = best_tokens(torch.from_numpy(rows).to(DEVICE), count).cpu().numpy()
        assert (on_device == [top_tokens(row, count) for row in rows]).all()
