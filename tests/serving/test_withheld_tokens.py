"""First tokens wait for the place where the stream goes on."""

from tests.control.test_worker_core import request, step, worker_of

from diptych.control.commands import NOT_RESERVED, Prefill, Send
from diptych.control.step import StepTokens, TokenLogprobs
from diptych.serving.worker.worker_loop import HeldBackTokens


def test_a_token_waits_for_its_place_and_the_others_of_its_step_do_not() -> None:
    worker = worker_of(max_model_len=200)
    worker.prefill(Prefill(0, "a", "a", 0, 7, NOT_RESERVED, (), 0), request(), 0)
    for now in (0, 20, 40):
        step(worker, now)
    held_back = HeldBackTokens(worker)
    likely = TokenLogprobs(11, -0.5)
    tokens = StepTokens(["a", "b"], [11, 12], {0: likely})
    assert held_back.hold_back(tokens) == StepTokens(["b"], [12])
    assert held_back.release() is None
    worker.handle(Send(0, "a", 0), 60)
    assert held_back.release() == StepTokens(["a"], [11], {0: likely})
    assert held_back.release() is None


def test_what_became_of_a_dropped_attempt_is_never_given() -> None:
    worker = worker_of(max_model_len=200)
    worker.prefill(Prefill(0, "a", "a", 0, 7, NOT_RESERVED, (), 0), request(), 0)
    for now in (0, 20, 40):
        step(worker, now)
    held_back = HeldBackTokens(worker)
    assert held_back.hold_back(StepTokens(["a"], [11])) == StepTokens([], [])
    worker.engine.drop("a", 50)
    assert held_back.release() is None
