"""A LocalEngine that runs requests to their end and keeps what each of them got."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych.control.config import EngineConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.events import Event, RequestFinished
from diptych.control.request import FinishReason, SamplingParams
from diptych.control.step import TokenLogprobs
from diptych.runtime.local_engine import LocalEngine, StepOutcome
from diptych.runtime.step.model_runner import ModelRunner


@dataclass(slots=True)
class GeneratedTokens:
    """What one request got. prompt_logprobs: one entry per prompt position, None for the first, if asked for."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
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
            for index, entry in tokens.logprobs.items():
                self._open[tokens.request_ids[index]].logprobs.append(entry)
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
