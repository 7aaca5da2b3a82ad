"""Attempts on their way into a worker: the engine gets counts and hashes, the executor tokens, each at its time."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.control.commands import Prefill, Reserve, Serve
from diptych.control.config import CacheConfig, EngineConfig
from diptych.control.engine.engine_core import EngineCore
from diptych.control.engine.kvcache.prefix_cache import hash_blocks
from diptych.control.engine.worker_core import TransferCommitted, WorkerCore
from diptych.control.errors import InvalidRequestError
from diptych.control.events import Event, HandoffDelivered, HandoffReserved, RequestFinished, RequestQueued
from diptych.control.request import FinishReason, RequestOptions, SamplingParams
from diptych.control.step import SchedulerOutput, StepResult
from diptych.serving.link.messages import AttemptTokens, pack_token_ids
from diptych.serving.worker.request_intake import RequestIntake

BLOCK_SIZE = 4
PROMPT = list(range(1, 11))


class NotedRunner:
    """An executor that only notes what it is told. refuses: prompts with this token."""

    on_layer: Callable[[int], None] | None = None

    def __init__(self, refuses: int = -1) -> None:
        self.known: dict[str, dict[str, Any]] = {}
        self.refuses = refuses

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams, **more: Any
    ) -> None:
        if self.refuses in prompt_token_ids:
            raise InvalidRequestError(f"token {self.refuses} cannot be computed", param="prompt")
        assert request_id not in self.known
        self.known[request_id] = {"prompt": list(prompt_token_ids), "sampling": sampling, **more}

    def forget(self, request_id: str) -> None:
        self.known.pop(request_id, None)

    def execute(self, output: SchedulerOutput) -> StepResult:
        return StepResult(output.step_id)


class Door:
    """A worker's core, its executor, and the intake between them."""

    def __init__(self, refuses: int = -1) -> None:
        config = EngineConfig(CacheConfig(32, BLOCK_SIZE), max_model_len=64)
        self.core = WorkerCore(EngineCore(config), reports_load=False)
        self.runner = NotedRunner(refuses)
        self.intake = RequestIntake(self.core, self.runner)

    def serve(self, attempt_id: str = "a", **wire: Any) -> list[Event]:
        self.intake.begin(Serve(0, attempt_id, attempt_id, 0), attempt(**wire), 0)
        return self.events()

    def reserve(self, attempt_id: str = "a", **wire: Any) -> list[Event]:
        self.intake.begin(Reserve(0, attempt_id, attempt_id, 0, 0, False), attempt(**wire), 0)
        self.core.begin_step(0)
        return self.events()

    def deliver(self, attempt_id: str = "a", first_token: int = 77) -> bool:
        return self.intake.deliver(TransferCommitted(attempt_id, 1, 2), first_token, 3)

    def is_empty(self) -> bool:
        """Whether nothing is left of any attempt once the executor was told who left."""
        while (output := self.core.begin_step(9)) is not None:
            assert not output.is_compute
            self.core.end_step(output, self.runner.execute(output), 9)
        return self.core.is_idle and not self.core.engine.kv.pool.num_used

    def events(self) -> list[Event]:
        """What is to be reported since the last call."""
        events = self.core.take_outbox().events
        self.intake.forget_ended(events)
        return events


def attempt(
    prompt: Sequence[int] = PROMPT,
    output: Sequence[int] = (),
    options: RequestOptions | None = None,
    **sampling: Any,
) -> AttemptTokens:
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    return AttemptTokens(pack_token_ids(prompt), params, pack_token_ids(output), options or RequestOptions())


def test_an_attempt_that_is_served_is_known_to_the_engine_and_to_the_executor() -> None:
    door = Door()
    [queued] = door.serve(options=RequestOptions(priority=3, cache_salt="pepper"))
    assert isinstance(queued, RequestQueued) and queued.num_prompt_tokens == 10
    request, known = door.core.engine.requests["a"], door.runner.known["a"]
    hashes = hash_blocks(PROMPT, BLOCK_SIZE, "pepper")
    assert (request.num_prompt_tokens, request.max_tokens, request.priority) == (10, 8, 3)
    assert (tuple(request.block_hashes), tuple(known["block_hashes"])) == (hashes, hashes)
    assert (known["prompt"], list(known["output_token_ids"]), known["salt"]) == (PROMPT, [], "pepper")


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30), st.lists(st.integers(0, 99), max_size=7))
def test_what_earlier_attempts_sampled_is_prompt_to_the_engine_and_output_to_the_executor(
    prompt: list[int], output: list[int]
) -> None:
    door = Door()
    door.serve(prompt=prompt, output=output)
    request, known = door.core.engine.requests["a"], door.runner.known["a"]
    assert request.num_prompt_tokens == len(prompt) + len(output)
    assert request.max_tokens == 8 - len(output)
    assert tuple(request.block_hashes) == hash_blocks(prompt + output, BLOCK_SIZE)
    assert (known["prompt"], list(known["output_token_ids"])) == (prompt, output)


def test_an_attempt_that_the_engine_refuses_is_never_shown_to_the_executor() -> None:
    door = Door()
    [end] = door.serve(prompt=[1] * 64)
    assert isinstance(end, RequestFinished) and end.reason is FinishReason.ERROR
    assert not door.runner.known and "a" not in door.core.engine.requests


@pytest.mark.parametrize("kind", ["serve", "prefill"])
def test_what_the_executor_refuses_ends_with_its_words_and_holds_nothing(kind: str) -> None:
    door = Door(refuses=5)
    if kind == "serve":
        events = door.serve()
    else:
        door.intake.begin(Prefill(0, "a", "a", 0, 1, 0, (), 0), attempt(), 0)
        events = door.events()
    [end] = [event for event in events if isinstance(event, RequestFinished)]
    assert (end.reason, end.message) == (FinishReason.ERROR, "token 5 cannot be computed")
    assert door.is_empty()


def test_the_executor_learns_of_a_reserved_attempt_with_its_delivery() -> None:
    door = Door()
    [reserved] = [event for event in door.reserve(output=[50, 51]) if isinstance(event, HandoffReserved)]
    assert len(reserved.block_tables[0]) == 3 and not door.runner.known
    assert door.deliver(first_token=77)
    assert list(door.runner.known["a"]["output_token_ids"]) == [50, 51, 77]
    assert any(isinstance(event, HandoffDelivered) for event in door.events())
    assert not door.deliver()  # once


def test_a_delivery_of_what_is_not_reserved_is_ignored() -> None:
    door = Door()
    assert not door.deliver("stranger")
    door.serve()
    assert not door.deliver("a")
    assert door.events() == []


def test_a_reserved_attempt_that_ends_before_its_delivery_is_forgotten() -> None:
    door = Door()
    door.reserve()
    door.core.note(door.core.engine.drop("a", 1))
    assert door.events()
    assert not door.deliver()
    assert not door.runner.known and door.is_empty()


def test_a_delivery_that_the_executor_refuses_ends_the_attempt() -> None:
    door = Door(refuses=5)
    door.reserve()
    assert not door.deliver()
    [end] = [event for event in door.events() if isinstance(event, RequestFinished)]
    assert end.message == "token 5 cannot be computed"
    assert door.is_empty()


def test_an_attempt_that_was_dropped_before_it_came_never_reaches_the_executor() -> None:
    door = Door()
    door.core.note(door.core.engine.drop("a", 0))
    door.events()
    door.serve()
    assert not door.runner.known and door.is_empty()
    assert not door.deliver()


def test_prompt_logprobs_switch_the_prefix_cache_off_for_the_attempt() -> None:
    door = Door()
    door.serve("a", prompt_logprobs=1)
    door.serve("b")
    requests = door.core.engine.requests
    assert (requests["a"].reads_prefix_cache, requests["b"].reads_prefix_cache) == (False, True)
