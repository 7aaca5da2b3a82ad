"""Tokens are the same whether a step computes one of a sequence or several, and however many guesses are wrong."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import numpy.typing as npt
import pytest

from diptych.control.config import BudgetConfig, CacheConfig, PreemptionConfig, PreemptionName, SchedulerConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.scheduler.step_time import StepTimeModel
from diptych.control.events import RequestPreempted, StepFinished
from diptych.control.request import FinishReason, Request, SamplingParams
from diptych.control.step import DraftProposal, StepFeatures
from diptych.runtime.kernels.instruction_set import TORCH
from diptych.runtime.local_engine import engine_config
from diptych.runtime.sampling.batch_sampler import BatchSampler
from diptych.runtime.step.draft_tokens import DraftTokens
from diptych.runtime.step.model_runner import ModelRunner
from diptych.runtime.step.request_state import RequestState
from tests.runtime.checkpoints import VOCAB_SIZE, prompt_of, runner
from tests.runtime.gathering_engine import GatheringEngine, GeneratedTokens
from tests.runtime.kernel_sets import NATIVE

FAMILY = "qwen2-window"
STEP_NS = 1_000_000
DTYPE_AND_SET = NATIVE[-1] if NATIVE else ("float32", TORCH)
# That a row has the same bits alone and beside others is held for each set by test_model_runner.py, and masks and
# counts are not the kernels': the first and the last set; the others are among the slow tests.
FEW_SETS = [pytest.param(*each, marks=() if each in (NATIVE[0], NATIVE[-1]) else pytest.mark.slow) for each in NATIVE]


class Guesses(DraftTokens):
    """Guesses answers that are known, with mistakes."""

    def __init__(self, answers: dict[str, list[int]], seed: int, rate: float = 0.7) -> None:
        super().__init__(drafts=True)
        self.answers = answers
        self._rng = random.Random(seed)
        self._rate = rate

    def after(
        self, state: RequestState, token_ids: npt.NDArray[np.int32], room: int, num_streams: int = 1
    ) -> DraftProposal | None:
        forced = super().after(state, token_ids, room, num_streams) if state.constraint is not None else None
        if state.num_forced:
            return forced
        rest = self.answers[state.request_id][len(token_ids) - state.num_prompt_tokens :]
        size = min(room, self._rng.choice((0, 1, 2, 5, 9)))
        draft = [
            token if self._rng.random() < self._rate else self._rng.randrange(VOCAB_SIZE)
            for token in [*rest[:size], *[7] * (size - len(rest))]
        ]
        if state.constraint is not None:
            draft = draft[: state.constraint.count_allowed(draft)]
        state.drafted = tuple(draft)
        return DraftProposal(state.request_id, (0.9,) * len(draft)) if draft else None


@dataclass
class Rhyme:
    """A constraint: of every seven tokens three are forced, and the others may come from a third of the vocabulary."""

    tokens: list[int] = field(default_factory=list)

    def _seed(self) -> int:
        return 31 * len(self.tokens) + (self.tokens[-1] if self.tokens else 0)

    def forced(self, limit: int) -> Sequence[int]:
        place = len(self.tokens) % 7
        block = len(self.tokens) // 7
        return [(block * 13 + at) % VOCAB_SIZE for at in range(place, 7) if place >= 2][: min(limit, max(0, 5 - place))]

    def _may(self, token: int) -> bool:
        if forced := self.forced(1):
            return token == forced[0]
        return (token * 7 + self._seed()) % 3 == 0

    def allowed(self) -> bytes | None:
        tokens = np.arange(VOCAB_SIZE)
        forced = self.forced(1)
        bits = tokens == forced[0] if forced else (tokens * 7 + self._seed()) % 3 == 0
        return np.packbits(bits, bitorder="little").tobytes()

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        other = Rhyme(list(self.tokens))
        for number, token in enumerate(token_ids):
            if not other._may(token):
                return number
            other.tokens.append(token)
        return len(token_ids)

    def accept(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if not self._may(token):
                raise ValueError(f"token {token} is not allowed")
            self.tokens.append(token)

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]


class Eager(GatheringEngine):
    """An engine on a machine where every step takes the same time: rows cost nothing, and all are taken."""

    def __init__(
        self, shared: ModelRunner, drafted: DraftTokens, sampler: BatchSampler | None = None, **changes: object
    ) -> None:
        own = ModelRunner(shared.loaded, shared.attention, shared.kv, 64, shared.max_model_len, drafted, sampler)
        config = engine_config(own, **changes)  # type: ignore[arg-type]
        super().__init__(own, config)
        model = StepTimeModel()
        for rows in range(1, 41):
            model.observe(StepFeatures(0, 0, rows, 40 * rows), STEP_NS)
            model.observe(StepFeatures(rows, rows, 0, 0), STEP_NS)
        self.core = EngineCore(config, model)
        ticks = count(0, STEP_NS)
        self._clock = lambda: next(ticks)

    def add_constrained(self, request_id: str, prompt: list[int], sampling: SamplingParams) -> None:
        self.runner.add_request(request_id, prompt, sampling, constraint=Rhyme())
        self._take(self.core.add_request(Request.for_sampling(request_id, len(prompt), sampling), self._clock()))
        self._open[request_id] = GeneratedTokens()


SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=1.2, seed=5),
    SamplingParams(temperature=0.9, top_p=0.8, seed=6, logprobs=0),
    SamplingParams(temperature=1.0, top_k=20, seed=7, repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(temperature=1.0, seed=8, stop_token_ids=tuple(range(0, VOCAB_SIZE, 9)), min_tokens=11),
)


def run(engine: Eager, *, max_tokens: int, constrained: bool = False, size: int = 12) -> dict[str, GeneratedTokens]:
    """The same requests, in phases that overlap."""
    for number in range(size):
        sampling = replace(SAMPLINGS[number % len(SAMPLINGS)], max_tokens=max_tokens - number)
        prompt = prompt_of(5 + 13 * number, seed=number)
        if constrained and number % 2:
            engine.add_constrained(f"r{number}", prompt, sampling)
        else:
            engine.add(f"r{number}", prompt, sampling)
        if number % 3 == 0:
            engine.step()
    return engine.run()


def extras(engine: Eager) -> tuple[int, int, int]:
    """Rows computed, accepted and forced."""
    extra = [extra for event in engine.events if isinstance(event, StepFinished) for extra in event.extra]
    return (
        sum(entry.num_tokens for entry in extra),
        sum(entry.num_accepted for entry in extra),
        sum(entry.num_forced for entry in extra),
    )


def check_same(plain: dict[str, GeneratedTokens], guessed: dict[str, GeneratedTokens]) -> None:
    assert plain.keys() == guessed.keys()
    for request_id, generation in plain.items():
        other = guessed[request_id]
        assert other.token_ids == generation.token_ids, request_id
        assert (other.finish_reason, other.message) == (generation.finish_reason, generation.message)
        assert other.logprobs == generation.logprobs


@pytest.mark.parametrize(("dtype", "instruction_set"), FEW_SETS)
def test_guesses_right_and_wrong_change_no_token_and_no_logprob(dtype: str, instruction_set: str) -> None:
    shared = runner(FAMILY, instruction_set, dtype)
    plain = run(Eager(shared, DraftTokens(drafts=False)), max_tokens=70)
    answers = {request_id: generation.token_ids for request_id, generation in plain.items()}
    for seed, scheduler in enumerate(
        (
            SchedulerConfig(max_num_seqs=64),
            SchedulerConfig(order="fcfs", budget=BudgetConfig("fixed", 40, min_chunk_tokens=1), max_num_seqs=20),
            SchedulerConfig(order="fcfs", budget=BudgetConfig("whole"), max_num_seqs=64),
        )
    ):
        engine = Eager(shared, Guesses(answers, seed), scheduler=scheduler)
        check_same(plain, run(engine, max_tokens=70))
        computed, accepted, _ = extras(engine)
        assert computed > accepted > 100
    assert {generation.finish_reason for generation in plain.values()} == {FinishReason.LENGTH, FinishReason.STOP}


@pytest.mark.parametrize("kind", ["recompute", "swap"])
def test_streams_that_lose_their_blocks_go_on_with_the_same_tokens(kind: PreemptionName) -> None:
    shared = runner(FAMILY, DTYPE_AND_SET[1], DTYPE_AND_SET[0])
    plain = run(Eager(shared, DraftTokens(drafts=False)), max_tokens=70)
    answers = {request_id: generation.token_ids for request_id, generation in plain.items()}
    cache = CacheConfig(14, 32, num_host_blocks=64 * (kind == "swap"), watermark_blocks=0, admission="greedy")
    scheduler = SchedulerConfig(preemption=PreemptionConfig(kind), max_num_seqs=64)
    engine = Eager(shared, Guesses(answers, 1), scheduler=scheduler, cache=cache)
    check_same(plain, run(engine, max_tokens=70))
    assert any(isinstance(event, RequestPreempted) for event in engine.events)
    assert extras(engine)[1] > 100


@pytest.mark.parametrize(("dtype", "instruction_set"), FEW_SETS)
def test_forced_tokens_are_not_sampled_and_the_others_obey_the_mask(dtype: str, instruction_set: str) -> None:
    shared = runner(FAMILY, instruction_set, dtype)

    class Silent(DraftTokens):
        def after(
            self, state: RequestState, token_ids: npt.NDArray[np.int32], room: int, num_streams: int = 1
        ) -> DraftProposal | None:
            return None

    plain = run(Eager(shared, Silent(drafts=False)), max_tokens=50, constrained=True)
    for number in range(1, 12, 2):
        Rhyme().accept(plain[f"r{number}"].token_ids)
    answers = {request_id: generation.token_ids for request_id, generation in plain.items()}
    for drafted in (DraftTokens(drafts=False), Guesses(answers, 3), DraftTokens(drafts=True)):
        engine = Eager(shared, drafted)
        check_same(plain, run(engine, max_tokens=50, constrained=True))
        assert extras(engine)[2] > 30


def test_what_repeats_itself_takes_fewer_steps() -> None:
    shared = runner(FAMILY, DTYPE_AND_SET[1], DTYPE_AND_SET[0])
    sampling = SamplingParams(temperature=0.0, max_tokens=60, logit_bias=dict.fromkeys((3, 9), 30.0))
    engines = [Eager(shared, DraftTokens(drafts=drafts)) for drafts in (False, True)]
    for engine in engines:
        engine.add("r", [3, 9, 3, 9] * 5, sampling)
    first, second = (engine.run() for engine in engines)
    check_same(first, second)
    steps = [sum(isinstance(event, StepFinished) for event in engine.events) for engine in engines]
    assert steps[1] < steps[0] / 2


def test_another_worker_goes_on_where_the_constraint_stood() -> None:
    shared = runner(FAMILY, DTYPE_AND_SET[1], DTYPE_AND_SET[0])
    constraint = Rhyme()
    sampling = SamplingParams(temperature=0.0, max_tokens=30)
    engine = Eager(shared, DraftTokens(drafts=False))
    engine.add_constrained("r", prompt_of(12), sampling)
    answer = engine.run()["r"].token_ids
    engine.runner.add_request("r", prompt_of(12), sampling, output_token_ids=answer[:9], constraint=constraint)
    assert constraint.tokens == answer[:9]
    engine.runner.forget("r")


@pytest.mark.slow
def test_ten_thousand_requests_have_the_same_tokens() -> None:
    """At every batch size up to 24; half of the guesses are wrong, or nearly none, or nearly all."""
    dtype, instruction_set = DTYPE_AND_SET
    shared = runner(FAMILY, instruction_set, dtype)
    plain: dict[int, dict[str, GeneratedTokens]] = {}
    for number in range(800):
        size = 1 + number % 24
        if size not in plain:
            plain[size] = run(Eager(shared, DraftTokens(drafts=False)), max_tokens=40, size=size)
        answers = {request_id: generation.token_ids for request_id, generation in plain[size].items()}
        guesses = Guesses(answers, number, rate=(0.1, 0.5, 0.95)[number % 3])
        check_same(plain[size], run(Eager(shared, guesses), max_tokens=40, size=size))
