"""Attempts on their way into a worker: the engine gets their counts and hashes, the executor their tokens.

Owns the tokens of attempts that another worker prefills, until they are delivered.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from diptych.control.commands import Prefill, Reserve, Serve, wait_class_of
from diptych.control.constraint import TokenConstraint
from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.engine.worker_core import TransferCommitted, WorkerCore
from diptych.control.errors import ConstraintError, ErrorRecord, RequestError
from diptych.control.events import Event, HandoffExpired, HandoffReleased, RequestFinished
from diptych.control.request import FinishReason, Request, SamplingParams
from diptych.control.step import Executor
from diptych.runtime.sampling.answer_constraint import constraint_of
from diptych.serving.link.messages import AttemptTokens, unpack_token_ids

if TYPE_CHECKING:
    from diptych.runtime.sampling.grammar import Grammars

_ENDS = (RequestFinished, HandoffReleased, HandoffExpired)


class Runner(Executor, Protocol):
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
        constraint: TokenConstraint | None = None,
    ) -> None:
        """Learn the tokens of a request that plans will name. constraint: a new one, which is given the output tokens.
        Raises RequestError or ConstraintError when it cannot be computed."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop a request that no plan will name; unknown ids are ignored."""
        ...

    on_layer: Callable[[int], None] | None
    """Called in the middle of steps, before each layer, with the number of layers whose KV is written; what it raises
    (StepBrokenOff) ends the step."""


@dataclass(frozen=True, slots=True)
class _Unpacked:
    """The tokens of an attempt. ``hashes`` cover prompt and output."""

    wire: AttemptTokens
    prompt: list[int]
    output: list[int]
    hashes: tuple[bytes, ...]


class RequestIntake:
    """The intake of one worker. grammars: None where none can be followed."""

    def __init__(self, core: WorkerCore, runner: Runner, grammars: "Grammars | None" = None) -> None:
        self._core = core
        self._runner = runner
        self._grammars = grammars
        self._block_size = core.engine.config.cache.block_size
        self._reserved: dict[str, _Unpacked] = {}

    def begin(self, command: Serve | Reserve | Prefill, wire: AttemptTokens, now: int) -> None:
        """An attempt begins here. A reserved one is made known to the executor when its KV is delivered."""
        tokens = self._unpack(wire)
        attempt_id = command.attempt_id
        request = self._request(attempt_id, tokens)
        request.wait_class_at_arrival, request.peer_run = wait_class_of(command), command.peer_run
        if isinstance(command, Serve):
            self._core.serve(request, now)
        elif isinstance(command, Prefill):
            self._core.prefill(command, request, now)
        else:
            self._core.reserve(command, request, now)
        if attempt_id not in self._core.engine.requests:  # refused, or dropped before it came
            return
        if isinstance(command, Reserve):
            self._reserved[attempt_id] = tokens
        else:
            self._tell_runner(attempt_id, tokens, tokens.output, now)

    def deliver(self, event: TransferCommitted, first_token: int, now: int) -> bool:
        """The KV of a reserved attempt is here, with its first token. Returns whether this worker decodes it: an
        attempt that is not reserved any more is ignored."""
        tokens = self._reserved.pop(event.attempt_id, None)
        if tokens is None or not self._tell_runner(event.attempt_id, tokens, [*tokens.output, first_token], now):
            return False
        return self._core.on_transfer(event, now)

    def forget_ended(self, events: Iterable[Event]) -> None:
        """Attempts that ended before their delivery need no tokens any more."""
        if self._reserved:
            for event in events:
                if isinstance(event, _ENDS):
                    self._reserved.pop(event.request_id, None)

    def _unpack(self, wire: AttemptTokens) -> _Unpacked:
        prompt, output = unpack_token_ids(wire.prompt), unpack_token_ids(wire.output)
        return _Unpacked(wire, prompt, output, hash_blocks(prompt + output, self._block_size, wire.options.cache_salt))

    def _request(self, attempt_id: str, tokens: _Unpacked) -> Request:
        """The request as the control code sees it: what earlier attempts have sampled is part of the prompt."""
        return Request.for_sampling(
            attempt_id,
            len(tokens.prompt),
            tokens.wire.sampling,
            num_output_tokens=len(tokens.output),
            block_hashes=tokens.hashes,
            options=tokens.wire.options,
        )

    def _tell_runner(self, attempt_id: str, tokens: _Unpacked, output: Sequence[int], now: int) -> bool:
        try:
            self._runner.add_request(
                attempt_id,
                tokens.prompt,
                tokens.wire.sampling,
                salt=tokens.wire.options.cache_salt,
                block_hashes=tokens.hashes,
                output_token_ids=output,
                constraint=constraint_of(tokens.wire.sampling, self._grammars),
            )
        except (RequestError, ConstraintError) as error:
            record = ErrorRecord.of(error)
            self._core.note(self._core.engine.abort(attempt_id, now, FinishReason.ERROR, record))
            return False
        return True
