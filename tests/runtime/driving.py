"""Drives a ModelRunner: with plans made by hand (one request, any chunks, any blocks), or by a scheduler to the end."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych.control.config import EngineConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.events import Event, RequestFinished
from diptych.control.request import FinishReason, SamplingParams
from diptych.control.step import ScheduledPrefill, SchedulerOutput, StepResult
from diptych.runtime.local_engine import LocalEngine, StepOutcome
from diptych.runtime.model_runner import ModelRunner
from diptych.runtime.sampler import RowLogprobs


def greedy(max_tokens: int = 64, **changes: object) -> SamplingParams:
    """Greedy sampling."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **changes)


def chunks_of(length: int, size: int) -> list[int]:
    """A prompt's chunks of at most this size."""
    return [min(size, length - start) for start in range(0, length, size)]


def generate(
    runner: ModelRunner,
    prompt: Sequence[int],
    chunks: Sequence[int],
    sampling: SamplingParams,
    *,
    block_seed: int = 0,
    request_id: str = "r",
) -> tuple[list[int], list[StepResult]]:
    """Prefill in these chunks, then decode to max_tokens, in blocks scattered over the whole cache."""
    size = runner.block_size
    needed = -(-(len(prompt) + sampling.max_tokens) // size)
    blocks = random.Random(block_seed).sample(range(runner.first_block, runner.first_block + runner.num_blocks), needed)
    runner.add_request(request_id, prompt, sampling)
    held = -(-len(prompt) // size)
    results, tokens, start = [], [], 0
    for number in chunks:
        is_last = start + number == len(prompt)
        chunk = ScheduledPrefill(request_id, start, number, tuple(blocks[:held]), is_last)
        results.append(runner.execute(SchedulerOutput(len(results), prefills=(chunk,))))
        start += number
    tokens += results[-1].payload.token_ids
    while len(tokens) < sampling.max_tokens:
        new_blocks = []
        if len(prompt) + len(tokens) > held * size:
            new_blocks = [(request_id, blocks[held])]
            held += 1
        results.append(runner.execute(SchedulerOutput(len(results), num_decodes=1, new_blocks=tuple(new_blocks))))
        tokens += results[-1].payload.token_ids
    runner.execute(SchedulerOutput(len(results), finished=(request_id,)))
    assert runner.num_requests == 0
    return tokens, results


@dataclass(slots=True)
class GeneratedTokens:
    """What one request got. prompt_logprobs: one entry per prompt position, None for the first, if asked for."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)
    prompt_logprobs: list[RowLogprobs | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    message: str = ""


class GatheringEngine(LocalEngine):
    """A LocalEngine that keeps what every request got, and ``events``: everything that happened, in order."""

    def __init__(self, runner: ModelRunner, config: EngineConfig) -> None:
        super().__init__(EngineCore(config), runner)
        self.events: list[Event] = []
        self._open: dict[str, GeneratedTokens] = {}
        self._done: dict[str, GeneratedTokens] = {}

    def add(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, salt: str | None = None
    ) -> list[Event]:
        events = super().add(request_id, prompt_token_ids, sampling, salt=salt)
        self._open[request_id] = GeneratedTokens()
        return self._take(events)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> list[Event]:
        return self._take(super().abort(request_id, reason))

    def step(self) -> StepOutcome | None:
        outcome = super().step()
        if outcome is not None:
            tokens = outcome.tokens
            for request_id, token_id in zip(tokens.request_ids, tokens.token_ids, strict=True):
                self._open[request_id].token_ids.append(token_id)
            for request_id, entry in tokens.logprobs.items():
                self._open[request_id].logprobs.append(entry)
            for request_id, (first, entries) in tokens.prompt_logprobs.items():
                self._open[request_id].prompt_logprobs += [None] * (first == 1) + entries
            self._take(outcome.events)
        return outcome

    def run(self) -> dict[str, GeneratedTokens]:
        """Run until every request has ended; gives what ended since the last call, by request id."""
        while self.step() is not None:
            pass
        assert not self._open, f"{len(self._open)} requests are left, and no step can be planned"
        done, self._done = self._done, {}
        return done

    def _take(self, events: list[Event]) -> list[Event]:
        self.events += events
        for event in events:
            if isinstance(event, RequestFinished):
                generated = self._open.pop(event.request_id)
                generated.finish_reason, generated.message = event.reason, event.message
                self._done[event.request_id] = generated
        return events
