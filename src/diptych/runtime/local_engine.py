"""LocalEngine: one worker in this process, without sockets: an EngineCore decides, a ModelRunner computes.

    engine = LocalEngine(EngineCore(engine_config(runner)), runner)
    engine.add("a", prompt_token_ids, SamplingParams(max_tokens=32, temperature=0))
    while outcome := engine.step():
        ...  # outcome.tokens: what requests got; outcome.events: what happened to them

The loop below LLM. The live worker in serving has the same one around sockets.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diptych.control.config import CacheConfig, EngineConfig, SchedulerConfig, watermark_of
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.events import Event
from diptych.control.request import FinishReason, Request, RequestOptions, SamplingParams
from diptych.control.step import SchedulerOutput, StepResult, StepTokens
from diptych.runtime.models.decoder import DecoderConfig
from diptych.runtime.sampling.answer_constraint import constraint_of
from diptych.runtime.step.model_runner import ModelRunner
from diptych.runtime.step.step_pipeline import StepPipeline
from diptych.runtime.tiers.tier_io import TierDriver

if TYPE_CHECKING:
    from diptych.runtime.sampling.grammar import Grammars

Clock = Callable[[], int]  # nanoseconds
LOOK_S = 0.01  # between looks at the deadline of a load


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step gave. events: in order, of what came before the step, too."""

    tokens: StepTokens
    events: list[Event]


def engine_config(
    runner: ModelRunner,
    scheduler: SchedulerConfig | None = None,
    *,
    enable_prefix_cache: bool = True,
    **changes: Any,
) -> EngineConfig:
    """Control's settings for a runner: its blocks, its block size, its groups of layers, its context. ``changes``: of
    EngineConfig."""
    cache = CacheConfig(
        num_blocks=runner.num_blocks,
        first_block=runner.first_block,
        block_size=runner.block_size,
        num_host_blocks=runner.num_host_blocks,
        watermark_blocks=watermark_of(runner.num_blocks, len(runner.groups)),
        enable_prefix_cache=enable_prefix_cache,
        groups=runner.groups,
    )
    scheduler = scheduler or SchedulerConfig(max_num_seqs=runner.max_num_seqs)
    experts = runner.model_config.experts if isinstance(runner.model_config, DecoderConfig) else None
    config = EngineConfig(
        cache, scheduler, max_model_len=runner.max_model_len, experts=experts.law if experts else None
    )
    return config.with_(**changes)


class LocalEngine:
    """Runs requests, one step at a time. pipeline: launches the step that follows before the result of this one is
    known, where runner and core allow it (None: never); the tokens are the same."""

    def __init__(
        self,
        core: EngineCore,
        runner: ModelRunner,
        clock: Clock = time.perf_counter_ns,
        grammars: "Grammars | None" = None,
        tiers: TierDriver | None = None,
        pipeline: StepPipeline | None = None,
    ) -> None:
        self._tiers = tiers
        self._pipeline = pipeline
        self.core = core
        self.runner = runner
        self._grammars = grammars
        self._clock = clock

    def add(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, salt: str | None = None
    ) -> list[Event]:
        """Queue a request. Requests share the prefix cache where their ``salt`` is equal. Raises InvalidRequestError,
        ContextLengthError, ConstraintError or OverloadedError when it is refused; then nothing has happened."""
        hashes = hash_blocks(prompt_token_ids, self.core.config.cache.block_size, salt)
        options = RequestOptions(cache_salt=salt)
        request = Request.for_sampling(
            request_id, len(prompt_token_ids), sampling, block_hashes=hashes, options=options
        )
        self._take_tier_events()
        self.core.check_request(request)
        constraint = constraint_of(sampling, self._grammars)
        self.runner.add_request(
            request_id, prompt_token_ids, sampling, salt=salt, block_hashes=hashes, constraint=constraint
        )
        return self.core.add_request(request, self._clock())

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> list[Event]:
        """End a request now. Unknown ids are ignored."""
        return self.core.abort(request_id, self._clock(), reason)

    def step(self) -> StepOutcome | None:
        """Run one step. None when there is nothing to do and nothing to report."""
        pipeline = self._pipeline
        output = pipeline.under_way if pipeline is not None else None
        if output is None:
            output = self._begin_step()
        if output is None:
            events = self.core.take_events()
            return StepOutcome(StepTokens([], []), events) if events else None
        try:
            if pipeline is None:
                result = self.runner.execute(output)
            else:
                result = pipeline.execute(output, lambda: self.core.begin_step(self._clock()))
        except KeyboardInterrupt:  # what was begun is over all the same: what it computed is not known, and not used
            if pipeline is not None:
                pipeline.give_up()
            while (begun := self.core.begun) is not None:
                self.core.end_step(StepResult(begun.step_id), self._clock(), num_steps=0)
            raise
        tokens = result.payload or StepTokens([], [])
        if pipeline is not None:
            tokens = tokens.of_open(self.core.requests)
        return StepOutcome(tokens, self.core.end_step(result, self._clock()))

    def close(self) -> None:
        """Finish what is being written to disk."""
        if self._tiers is not None:
            while self.core.kv.tiers.is_storing:
                output = self._begin_step()
                if output is None:
                    self._tiers.wait(LOOK_S)
                else:
                    self.core.end_step(self.runner.execute(output), self._clock())
            self._tiers.close()

    def _begin_step(self) -> SchedulerOutput | None:
        """The next plan; waits for the disk where a request does."""
        core, tiers = self.core, self._tiers
        if tiers is None:
            return core.begin_step(self._clock())
        while True:
            self._act(tiers)
            self._take_tier_events()
            now = self._clock()
            core.expire(now)
            output = core.begin_step(now)
            self._act(tiers)
            if output is not None or not core.kv.tiers.loads.num_waiting:
                return output
            tiers.wait(LOOK_S)

    def _take_tier_events(self) -> None:
        for event in self._tiers.poll() if self._tiers is not None else ():
            self.core.on_tier(event, self._clock())

    def _act(self, tiers: TierDriver) -> None:
        for action in self.core.kv.tiers.take_actions():
            tiers.act(action)
