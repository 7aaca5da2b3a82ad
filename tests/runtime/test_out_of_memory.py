"""A step that runs out of memory costs its own requests, and nothing else; the KV cache then leaves more free."""

import pytest
import torch

from diptych.control.config import BudgetConfig, SchedulerConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.recording import RecordingEngineCore
from diptych.control.events import RequestFinished
from diptych.control.request import FinishReason, Request
from diptych.control.step import StepResult
from diptych.runtime.kv_cache.kv_tensors import KVTensors
from diptych.runtime.local_engine import engine_config
from diptych.runtime.sampling.batch_sampler import BatchSampler, RowBatch
from diptych.runtime.step.kv_sizing import GRAPHS, MARGIN, PROMPTS, MemoryTrial, kv_bytes_beside
from diptych.runtime.step.model_runner import ModelRunner
from tests.runtime.checkpoints import prompt_of, reference, runner
from tests.runtime.driving import greedy
from tests.runtime.gathering_engine import GatheringEngine

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."


class ScarceMemory:
    """Raises in the middle of the forward passes that are counted."""

    def __init__(self, *failing: int) -> None:
        self._failing = set(failing)
        self.num_steps = 0

    def __call__(self, num_layers: int) -> None:
        if num_layers == 1:
            self.num_steps += 1
            if self.num_steps in self._failing:
                raise torch.OutOfMemoryError(MESSAGE)


def own_runner(num_blocks: int = 200, sampler: BatchSampler | None = None) -> ModelRunner:
    """A runner whose KV cache is its own: it gets smaller."""
    shared = runner("llama")
    kv = KVTensors(shared.attention, num_blocks)
    return ModelRunner(shared.loaded, shared.attention, kv, 16, shared.max_model_len, sampler=sampler)


def engine_of(own: ModelRunner, *failing: int, max_batched_tokens: int = 64) -> GatheringEngine:
    budget = BudgetConfig(kind="fixed", max_batched_tokens=max_batched_tokens, min_chunk_tokens=1)
    engine = GatheringEngine(own, engine_config(own, SchedulerConfig(order="fcfs", budget=budget, max_num_seqs=8)))
    own.on_layer = ScarceMemory(*failing)
    return engine


def check_all_is_given_back(engine: GatheringEngine) -> None:
    engine.core.kv.pool.check()
    assert engine.core.kv.pool.num_used == 0 and engine.runner.num_requests == 0
    assert not engine.core.requests


@pytest.mark.parametrize("failing", [1, 3, 4, 9])
def test_the_requests_of_the_step_end_with_the_reason_and_others_get_their_tokens(failing: int) -> None:
    engine = engine_of(own_runner(), failing)
    prompts = {f"r{number}": prompt_of(40 + 31 * number, seed=number) for number in range(7)}
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, greedy(12))
    results = engine.run()
    ended = {event.request_id: event for event in engine.events if isinstance(event, RequestFinished)}
    failed = [name for name, event in ended.items() if event.reason is FinishReason.ERROR]
    assert failed and len(failed) < len(prompts)
    for name in failed:
        error = ended[name].error
        assert error is not None
        assert (error.kind, error.exception().status, error.code) == ("StepMemoryError", 503, "out_of_memory")
        assert "ran out of memory on cpu" in error.message
    for name in set(prompts) - set(failed):
        assert len(results[name].token_ids) == 12
        reference("llama").check_greedy(prompts[name], results[name].token_ids)
    assert engine.runner.num_blocks == engine.core.kv.pool.num_blocks == 190
    check_all_is_given_back(engine)


def test_nothing_of_a_step_without_memory_is_found_in_the_prefix_cache() -> None:
    engine = engine_of(own_runner(), 2)
    prompt = prompt_of(150)
    engine.add("lost", prompt, greedy(3))  # its first chunk is computed, its second is not
    assert engine.run()["lost"].finish_reason is FinishReason.ERROR
    engine.add("again", prompt, greedy(8))
    result = engine.run()["again"]
    reference("llama").check_greedy(prompt, result.token_ids)
    finished = [event for event in engine.events if isinstance(event, RequestFinished)]
    assert finished[-1].num_cached_tokens == 64


def test_a_cache_is_cut_down_to_a_half_at_most() -> None:
    engine = engine_of(own_runner(40), *range(1, 31))
    for number in range(40):
        engine.add(f"r{number}", prompt_of(20, seed=number), greedy(2))
        engine.run()
    assert engine.core.kv.pool.num_blocks == engine.runner.num_blocks == 20
    check_all_is_given_back(engine)


def test_requests_that_no_longer_fit_end_and_say_so() -> None:
    own = own_runner(40)
    engine = engine_of(own, 1, 2, 3)
    longest = engine.core.kv.capacity_tokens
    for number in range(3):
        engine.add(f"lost{number}", prompt_of(8, seed=number), greedy(2))
        if not number:
            engine.add("long", prompt_of(longest - 10), greedy(10))
        while any(name.startswith("lost") for name in engine.core.requests):
            engine.step()
    results = engine.run()
    assert results["long"].finish_reason is FinishReason.ERROR
    assert "the KV cache holds" in results["long"].message or "ran out of memory" in results["long"].message
    check_all_is_given_back(engine)


def test_streams_that_rest_in_such_a_step_go_on() -> None:
    """Prompts come first and alone: decodes are not in the step that fails."""
    own = own_runner()
    scheduler = SchedulerConfig(order="fcfs", budget=BudgetConfig(kind="whole"), max_num_seqs=8)
    engine = GatheringEngine(own, engine_config(own, scheduler))
    engine.add("stream", prompt := prompt_of(50), greedy(20))
    for _ in range(5):
        engine.step()
    own.on_layer = ScarceMemory(1)
    engine.add("lost", prompt_of(70, seed=1), greedy(20))
    results = engine.run()
    assert results["lost"].finish_reason is FinishReason.ERROR
    assert len(results["stream"].token_ids) == 20
    reference("llama").check_greedy(prompt, results["stream"].token_ids)


def test_what_is_recorded_of_it_decides_the_same() -> None:
    own = own_runner()
    rows: list[tuple[object, ...]] = []
    engine = engine_of(own, 2, 9)
    engine.core = RecordingEngineCore(engine.core.config, rows.append)
    for number in range(9):
        engine.add(f"r{number}", prompt_of(60 + number, seed=number), greedy(6))
    engine.run()
    kinds = [row[0] for row in rows]
    assert kinds.count("shrink") == 2
    assert [rows[place - 1][0] for place, kind in enumerate(kinds) if kind == "shrink"] == ["end", "end"]

    again = EngineCore(engine_config(own_runner(), engine.core.config.scheduler))
    plans = []
    for kind, *fields in rows:
        if kind == "add":
            _, request_id, num_prompt, max_tokens, hashes, *_ = fields[0], *fields[1]
            again.add_request(Request(request_id, num_prompt, max_tokens, block_hashes=list(hashes)), fields[0])
        elif kind == "begin":
            plans.append((again.begin_step(fields[0]), fields[1]))
        elif kind == "end":
            now, step_id, stopped, full_blocks, failed, repeats = fields[:6]
            num_steps, last_start_ns = repeats or (1, None)
            result = StepResult(step_id, stopped, full_blocks, tuple((name, message) for name, message in failed))
            again.end_step(result, now, num_steps=num_steps, last_start_ns=last_start_ns)
        elif kind == "shrink":
            again.shrink_cache(fields[1], fields[0])
    assert all(ours == theirs for ours, theirs in plans)
    assert [plan.num_blocks for plan, _ in plans if plan is not None and plan.num_blocks] == [190, 181]


class FakeUsage:
    """A GPU on which a step takes 10 MB, 2 KB more for each token of a prompt, and each sequence takes 1 MB."""

    def __init__(self, total: int, others: int) -> None:
        self.total, self.others, self.mine = total, others, 500 << 20
        self.peak = 0

    def total_bytes(self) -> int:
        return self.total

    def free_bytes(self) -> int:
        return self.total - self.others - self.mine

    def taken_bytes(self) -> int:
        return self.mine

    def peak_bytes(self, run: object) -> int:
        self.peak = 0
        run()  # type: ignore[operator]
        return self.peak


class FakeTrial:
    """A trial on that GPU."""

    prompts = PROMPTS

    def __init__(self, usage: FakeUsage, max_step_tokens: int) -> None:
        self.usage, self.max_step_tokens, self.is_over = usage, max_step_tokens, False

    def prompt(self, num_tokens: int) -> None:
        self.usage.peak = (10 << 20) + 2048 * num_tokens

    def decode(self) -> None:
        self.usage.peak = 256 << 20

    def capture(self) -> None:
        self.usage.mine += 30 << 20

    def close(self) -> None:
        self.usage.mine -= 30 << 20
        self.is_over = True


@pytest.mark.parametrize("max_step_tokens", [2048, 50_000])
@pytest.mark.parametrize(("share", "others"), [(1.0, 0), (1.0, 3 << 30), (0.5, 0), (0.5, 7 << 30)])
def test_the_cache_gets_what_is_free_beside_the_largest_step_and_graphs(
    share: float, others: int, max_step_tokens: int
) -> None:
    usage = FakeUsage(16 << 30, others)
    trial = FakeTrial(usage, max_step_tokens)
    step = (10 << 20) + 2048 * max_step_tokens + (256 << 20)
    room = min(usage.free_bytes(), int(share * usage.total) - usage.mine) - int(MARGIN * share * usage.total)
    found = kv_bytes_beside(usage, trial, share)  # type: ignore[arg-type]
    assert found == room - step - GRAPHS * (30 << 20)
    assert trial.is_over


def test_a_gpu_that_is_full_has_no_room_for_a_cache() -> None:
    usage = FakeUsage(16 << 30, 15 << 30)
    assert kv_bytes_beside(usage, FakeTrial(usage, 400_000), 1.0) == 0  # type: ignore[arg-type]


def test_the_steps_of_a_trial_run_and_leave_nothing_behind() -> None:
    made: list[ModelRunner] = []

    def make(num_blocks: int) -> ModelRunner:
        made.append(own_runner(num_blocks))
        return made[-1]

    trial = MemoryTrial(make, runner("llama").block_size, 300)
    assert trial.prompts == (150, 300)
    for tokens in (*PROMPTS, *trial.prompts):
        trial.prompt(tokens)
    trial.decode()
    trial.capture()
    assert made[0].num_requests == 0
    trial.close()


def test_the_decode_step_of_a_trial_samples_in_every_way_that_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[RowBatch] = []
    sample = BatchSampler.sample

    def noted(self: BatchSampler, logits: torch.Tensor, batch: RowBatch) -> object:
        batches.append(batch)
        return sample(self, logits, batch)

    monkeypatch.setattr(BatchSampler, "sample", noted)
    sampler, block_size = BatchSampler(torch.device("cpu"), None), runner("llama").block_size
    trial = MemoryTrial(lambda num_blocks: own_runner(num_blocks, sampler), block_size, 300)
    trial.decode()
    for batch in batches:
        assert len(batch.rows) == trial.runner.max_num_seqs
        assert (batch.temperatures > 0).all() and (batch.top_ps < 1).all() and (batch.top_ks == 0).all()
        assert sum(adjustment.tokens is not None for adjustment in batch.adjustments.values()) == len(batch.rows)
    assert batches
