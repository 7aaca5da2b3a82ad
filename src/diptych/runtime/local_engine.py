"""LocalEngine: one worker in this process, without sockets: an EngineCore decides, a ModelRunner computes.

    engine = LocalEngine(runner, engine_config(runner))
    engine.warm_up()                                         # optional: at most about 1.5 s
    engine.add("a", prompt_token_ids, SamplingParams(max_tokens=32, temperature=0))
    outputs = engine.run()                                   # {"a": Generation(token_ids, finish_reason, ...)}

For offline batches and tests. The live worker in serving has the same loop around sockets.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from diptych.control.config import CacheConfig, EngineConfig, SchedulerConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.events import Event, RequestFinished
from diptych.control.request import FinishReason, Request, RequestOptions, SamplingParams
from diptych.control.slo import Slo
from diptych.control.step import StepTokens, TokenLogprobs
from diptych.runtime.model_runner import ModelRunner
from diptych.runtime.warm_up import warm_up

Clock = Callable[[], int]  # nanoseconds


@dataclass(slots=True)
class Generation:
    """What one request got. ``logprobs`` and ``prompt_logprobs`` are empty unless asked for; prompt_logprobs has one
    entry per prompt position, None for the first."""

    num_prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    message: str = ""


def engine_config(
    runner: ModelRunner,
    scheduler: SchedulerConfig | None = None,
    *,
    enable_prefix_cache: bool = True,
    **changes: Any,
) -> EngineConfig:
    """Control's settings for a runner: its blocks, its block size, its context. ``changes``: of EngineConfig."""
    cache = CacheConfig(
        num_blocks=runner.num_blocks,
        first_block=runner.first_block,
        block_size=runner.block_size,
        num_host_blocks=runner.num_host_blocks,
        watermark_blocks=min(4, runner.num_blocks - 1),
        enable_prefix_cache=enable_prefix_cache,
    )
    scheduler = scheduler or SchedulerConfig(max_num_seqs=runner.max_num_seqs)
    return EngineConfig(cache=cache, scheduler=scheduler, max_model_len=runner.max_model_len).with_(**changes)


class LocalEngine:
    """Runs requests to their end. ``events`` holds everything that happened, in order."""

    def __init__(self, runner: ModelRunner, config: EngineConfig, clock: Clock = time.perf_counter_ns) -> None:
        self.runner = runner
        self.config = config
        self.core = EngineCore(config)
        self.events: list[Event] = []
        self._clock = clock
        self._open: dict[str, Generation] = {}
        self._done: dict[str, Generation] = {}

    def warm_up(self) -> None:
        """Run a few steps of different sizes and teach the step-time model with them."""
        for features, duration_ns in warm_up(self.runner, clock=self._clock):
            self.core.observe(features, duration_ns)

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        slo: Slo | None = None,
        salt: str | None = None,
    ) -> None:
        """Queue a request. Raises InvalidRequestError, ContextLengthError or OverloadedError when it is refused."""
        hashes = hash_blocks(prompt_token_ids, self.config.cache.block_size, salt)
        request = Request(
            request_id,
            len(prompt_token_ids),
            sampling.max_tokens,
            block_hashes=hashes,
            options=RequestOptions(priority=priority, slo=slo, cache_salt=salt),
            reads_prefix_cache=sampling.prompt_logprobs is None,
        )
        self.core.check_request(request)
        self.runner.add_request(request_id, prompt_token_ids, sampling, salt=salt, block_hashes=hashes)
        self._open[request_id] = Generation(len(prompt_token_ids))
        if sampling.prompt_logprobs is not None:
            self._open[request_id].prompt_logprobs.append(None)
        self._take(self.core.add_request(request, self._clock()))

    def abort(self, request_id: str) -> None:
        """End a request now; what it has got so far is its result."""
        self._take(self.core.abort(request_id, self._clock()))

    def step(self) -> bool:
        """Run one step. False when there is nothing left to do."""
        output = self.core.begin_step(self._clock())
        if output is None:
            self._take(self.core.take_events())
            return False
        result = self.runner.execute(output)
        if result.payload is not None:
            self._collect(result.payload)
        self._take(self.core.end_step(result, self._clock()))
        return True

    def run(self) -> dict[str, Generation]:
        """Run until every request has ended; gives what ended since the last call, by request id."""
        while self.step():
            pass
        assert not self._open, f"{len(self._open)} requests are left, and no step can be planned"
        done, self._done = self._done, {}
        return done

    def _collect(self, tokens: StepTokens) -> None:
        for request_id, token_id in zip(tokens.request_ids, tokens.token_ids, strict=True):
            if request_id in self._open:
                self._open[request_id].token_ids.append(token_id)
        for request_id, entry in tokens.logprobs.items():
            if request_id in self._open:
                self._open[request_id].logprobs.append(entry)
        for request_id, (_, entries) in tokens.prompt_logprobs.items():
            if request_id in self._open:
                self._open[request_id].prompt_logprobs.extend(entries)

    def _take(self, events: list[Event]) -> None:
        self.events += events
        for event in events:
            if isinstance(event, RequestFinished) and (generation := self._open.pop(event.request_id, None)):
                generation.finish_reason = event.reason
                generation.message = event.message
                self._done[event.request_id] = generation
