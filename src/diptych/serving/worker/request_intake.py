"""Requests on their way into a worker: known to the executor and to the core, or refused with their terminal event.

Owns the errors behind refusals, and the tokens of attempts that another worker prefills until they are delivered. Must
never send anything.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.errors import RequestError
from diptych.control.events import Event, HandoffExpired, HandoffReleased, RequestFinished
from diptych.control.request import FinishReason, Request, SamplingParams
from diptych.control.slo import LatencyBreakdown
from diptych.control.step import SchedulerOutput, StepResult
from diptych.serving.link.messages import PrefillAttempt, ReserveAttempt, WireRequest, unpack_tokens

ATTEMPT_ENDS = (RequestFinished, HandoffReleased, HandoffExpired)


class Runner(Protocol):
    """The executor of a worker: ModelRunner, or a test double."""

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        salt: str | None = None,
        block_hashes: Sequence[bytes] | None = None,
        output_token_ids: Sequence[int] = (),
    ) -> None:
        """Learn the tokens of a request that plans will name. Raises RequestError when it cannot be computed."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop a request that no plan will name; unknown ids are ignored."""
        ...

    on_layer: Callable[[int], None] | None
    """Called in the middle of steps, before each layer, with the number of layers whose KV is written; what it raises
    (StepBrokenOff) ends the step."""

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Run one step (see diptych.control.step.Executor); the payload is a StepTokens."""
        ...


@dataclass(frozen=True, slots=True)
class _Tokens:
    """What the executor is told of a request. ``hashes`` cover prompt and output."""

    prompt: list[int]
    output: list[int]
    hashes: tuple[bytes, ...]


class RequestIntake:
    """The door of one worker."""

    def __init__(self, core: EngineCore, runner: Runner) -> None:
        self._core = core
        self._runner = runner
        self._block_size = core.config.cache.block_size
        self._reserved: dict[str, tuple[WireRequest, _Tokens]] = {}
        self._refusals: dict[str, RequestError] = {}

    def add(self, wire: WireRequest, now: int, attempt: PrefillAttempt | None = None) -> list[Event]:
        """Queue a request, to be served whole or (``attempt``) to be prefilled for another worker."""
        tokens = self._tokens(wire)
        try:
            request = self._request(wire, tokens)
            if attempt is not None:
                request.hands_off = True
                request.lease_ns = attempt.lease_ns
                request.borrowed_block_ids = tuple(attempt.block_ids)
                request.num_borrowed_tokens = attempt.num_cached_tokens if attempt.block_ids else 0
            self._core.check_request(request)
            self._tell_runner(wire, tokens, tokens.output)
        except RequestError as error:
            return self._refuse(wire, tokens, error, now)
        events = self._core.add_request(request, now)
        if wire.request_id not in self._core.requests:  # it had been dropped before it came
            self._runner.forget(wire.request_id)
        return events

    def reserve(self, message: ReserveAttempt, now: int) -> list[Event]:
        """Queue a reservation; the executor hears of it with its delivery."""
        wire = message.request
        tokens = self._tokens(wire)
        try:
            request = self._request(wire, tokens)
            self._core.check_request(request)
        except RequestError as error:
            return self._refuse(wire, tokens, error, now)
        events = self._core.reserve(request, now, message.lease_ns)
        if wire.request_id in self._core.requests:
            self._reserved[wire.request_id] = (wire, tokens)
        return events

    def deliver(
        self, attempt_id: str, first_token: int, now: int, *, first_step_ns: int, first_token_ns: int
    ) -> list[Event]:
        """The KV of a reserved attempt is here, with its first token. An attempt that is not reserved is ignored."""
        wire, tokens = self._reserved.pop(attempt_id, (None, None))
        if wire is None or tokens is None:
            return []
        try:
            self._tell_runner(wire, tokens, [*tokens.output, first_token])
        except RequestError as error:
            self._refusals[attempt_id] = error
            return self._core.abort(attempt_id, now, FinishReason.ERROR)
        return self._core.deliver(attempt_id, now, first_step_ns=first_step_ns, first_token_ns=first_token_ns)

    def forget_ended(self, events: Iterable[Event]) -> None:
        """AttemptTable that ended before their delivery need no tokens any more."""
        if self._reserved:
            for event in events:
                if isinstance(event, ATTEMPT_ENDS):
                    self._reserved.pop(event.request_id, None)

    def take_refusal(self, request_id: str) -> RequestError | None:
        """The error with which this request was refused, once."""
        return self._refusals.pop(request_id, None)

    def _tokens(self, wire: WireRequest) -> _Tokens:
        prompt, output = unpack_tokens(wire.prompt), unpack_tokens(wire.output)
        return _Tokens(prompt, output, hash_blocks(prompt + output, self._block_size, wire.cache_salt))

    def _request(self, wire: WireRequest, tokens: _Tokens) -> Request:
        """As the control code sees it: what was sampled elsewhere is part of its prompt."""
        return Request.for_sampling(
            wire.request_id,
            len(tokens.prompt),
            wire.sampling,
            num_output_tokens=len(tokens.output),
            block_hashes=tokens.hashes,
            priority=wire.priority,
            slo=wire.slo,
        )

    def _tell_runner(self, wire: WireRequest, tokens: _Tokens, output: Sequence[int]) -> None:
        self._runner.add_request(
            wire.request_id,
            tokens.prompt,
            wire.sampling,
            salt=wire.cache_salt,
            block_hashes=tokens.hashes,
            output_token_ids=output,
        )

    def _refuse(self, wire: WireRequest, tokens: _Tokens, error: RequestError, now: int) -> list[Event]:
        self._refusals[wire.request_id] = error
        num_tokens = len(tokens.prompt) + len(tokens.output)
        slo_met = False if wire.slo else None
        latency = LatencyBreakdown(0, 0, 0, 0)
        reason = FinishReason.ERROR
        return [RequestFinished(now, wire.request_id, reason, num_tokens, 0, 0, latency, slo_met, error.message)]
