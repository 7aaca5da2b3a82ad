"""The plugin that reports vLLM's steps, on a scheduler that stands for vLLM's."""

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import zmq
from fake_vllm import FakeAsyncScheduler, FakePlan, FakeVLLMScheduler, fake_config

from diptych.base.engine_steps import EngineAbout, EngineStep, decode_line
from diptych.vllm_plugin import scheduler
from diptych.vllm_plugin.reporting import reporting
from diptych.vllm_plugin.step_observer import StepObserver, about_vllm, address_of
from diptych.vllm_plugin.step_publisher import MOST_UNREAD, StepPublisher

ABOUT = EngineAbout("vllm", "run")


class Clock:
    """Every reading is 10 later."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += 10
        return self.now


class Sink:
    """Keeps the steps."""

    def __init__(self) -> None:
        self.steps: list[EngineStep] = []
        self.is_closed = False

    def publish(self, step: EngineStep) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.is_closed = True


def made(*plans: Any, **prompts: int) -> tuple[Any, Sink]:
    sink = Sink()
    found = reporting(FakeVLLMScheduler, StepObserver(sink, Clock()))(fake_config())
    found.plans, found.prompts = list(plans), prompts
    return found, sink


def run(found: Any, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        plan = found.schedule()
        found.update_from_output(plan, None)


def test_a_mixed_step_names_its_prompts_and_counts_its_decodes() -> None:
    plan = FakePlan(
        {"new": 100, "half": 50, "old": 1, "older": 1},
        new=[("new", 32)],
        cached=[("half", 200), ("old", 40), ("older", 60)],
    )
    found, sink = made(plan, new=132, half=300, old=40, older=10)
    found.num_left = 4
    run(found)
    assert sink.steps == [EngineStep(1, 10, 20, (("new", 32, 100), ("half", 200, 50)), 2, 2, 41 + 61, 4)]


def test_vllm_gets_its_own_plans_and_outputs() -> None:
    plan, output = FakePlan({"a": 3}, new=[("a", 0)]), object()
    found, _ = made(plan, a=3)
    assert found.schedule(throttle_prefills=True) is plan
    assert found.update_from_output(plan, output)[0] is output
    found.shutdown()
    assert found.is_shut_down


def test_a_preempted_request_is_computed_again_as_a_prompt() -> None:
    found, sink = made(FakePlan({"a": 70}, cached=[("a", 0)]), FakePlan({"a": 30}, cached=[("a", 70)]), a=50)
    run(found, 2)
    assert [step.prefills for step in sink.steps] == [(("a", 0, 70),), (("a", 70, 30),)]


def test_drafts_are_rows_of_a_decode() -> None:
    plan = FakePlan({"a": 4}, cached=[("a", 100)], scheduled_spec_decode_tokens={"a": [1, 2, 3]})
    found, sink = made(plan, a=50)
    run(found)
    assert (sink.steps[0].num_decodes, sink.steps[0].decode_rows) == (1, 4)
    assert sink.steps[0].decode_context == 101 + 102 + 103 + 104


def test_plans_of_older_versions_are_read() -> None:
    found, sink = made(FakePlan({"a": 1, "b": 5}, new=[("b", 0)], cached=[("a", 9)], is_old=True), a=3, b=5)
    run(found)
    assert sink.steps[0].prefills == (("b", 0, 5),)
    assert sink.steps[0].decode_context == 10


def test_a_step_that_was_planned_ahead_begins_when_the_one_before_has_ended() -> None:
    plans = [FakePlan({"a": 1}, cached=[("a", number)]) for number in range(1, 4)]
    found, sink = made(*plans, a=0)
    first, second = found.schedule(), found.schedule()  # at 10 and 20
    found.update_from_output(first, None)  # at 30
    third = found.schedule()  # at 40
    found.update_from_output(second, None)  # at 50
    found.update_from_output(third, None)  # at 60
    assert [(step.start_ns, step.end_ns) for step in sink.steps] == [(10, 30), (30, 50), (50, 60)]
    assert [step.number for step in sink.steps] == [1, 2, 3]


def test_a_plan_without_tokens_is_no_step_and_one_that_never_ends_is_forgotten() -> None:
    empty, lost, last = FakePlan({}), FakePlan({"a": 1}, cached=[("a", 5)]), FakePlan({"a": 1}, cached=[("a", 6)])
    found, sink = made(empty, lost, last, a=2)
    found.update_from_output(found.schedule(), None)
    found.schedule()
    found.update_from_output(found.schedule(), None)
    assert [step.decode_context for step in sink.steps] == [7]
    assert sink.steps[0].number == 1


def test_a_plan_that_cannot_be_read_ends_the_reports_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    strange = FakePlan({"nobody": 1})
    found, sink = made(strange, FakePlan({"a": 1}, cached=[("a", 5)]), a=2)
    with caplog.at_level(logging.WARNING):
        run(found, 2)
    assert not sink.steps
    assert sink.is_closed
    assert [record.message for record in caplog.records] == [
        "diptych: steps are not reported any more: KeyError: 'nobody'"
    ]


def test_what_a_version_does_not_say_is_named() -> None:
    config = fake_config()
    del config.scheduler_config.policy
    config.cache_config.num_gpu_blocks = None
    about = about_vllm(config, "9.9")
    assert set(about.lacks) == {"policy", "num_blocks"}
    assert (about.model, about.max_batched_tokens, about.num_blocks, about.version) == ("m", 2048, 0, "9.9")


def test_each_rank_has_an_address_of_its_own() -> None:
    config = fake_config(diptych_steps="tcp://*:6000")
    assert address_of(fake_config()) == "tcp://127.0.0.1:5559"
    assert address_of(config) == "tcp://*:6000"
    config.parallel_config.data_parallel_rank = 2
    assert address_of(config) == "tcp://*:6002"
    config.parallel_config = SimpleNamespace(data_parallel_rank=0, data_parallel_index=2)  # no model with experts
    assert address_of(config) == "tcp://*:6002"
    config.additional_config = {"diptych_steps": "ipc:///run/steps"}
    assert address_of(config) == "ipc:///run/steps.2"
    with pytest.raises(ValueError, match="diptych_steps is 5559; it must be tcp://HOST:PORT or ipc://PATH"):
        address_of(fake_config(diptych_steps=5559))


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with vLLM's names."""
    for name, attribute, value in (
        ("vllm", "__version__", "0.32.0"),
        ("vllm.v1.core.sched.scheduler", "Scheduler", FakeVLLMScheduler),
        ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler", FakeAsyncScheduler),
    ):
        module = ModuleType(name)
        setattr(module, attribute, value)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("vllm")
def test_vllm_is_given_its_own_scheduler_which_publishes_its_steps(tmp_path: Any) -> None:
    address = f"ipc://{tmp_path}/steps"
    found = scheduler(vllm_config=fake_config(diptych_steps=address), kv_cache_config="kept", block_size=16)
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.SUBSCRIBE, b"steps")
        socket.connect(address)
        assert isinstance(found, FakeVLLMScheduler)
        assert found.more == {"kv_cache_config": "kept", "block_size": 16}
        found.prompts = {"a": 4}
        while not socket.poll(20):  # a subscription takes a moment
            found.plans = [FakePlan({"a": 4}, new=[("a", 0)])]
            run(found)
        about = decode_line(socket.recv_multipart()[-1])
        step = decode_line(socket.recv_multipart()[-1])
        if isinstance(about, EngineStep):  # the first line went before the subscription
            step = about
        assert isinstance(step, EngineStep)
        assert step.prefills == (("a", 0, 4),)
    finally:
        socket.close(0)
        context.term()
        found.shutdown()


@pytest.mark.usefixtures("vllm")
def test_vllm_runs_all_the_same_where_the_address_is_taken(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    holder = StepPublisher("tcp://127.0.0.1:*", ABOUT)
    taken = holder._socket.getsockopt_string(zmq.LAST_ENDPOINT)
    config = fake_config(diptych_steps=taken)
    config.scheduler_config.async_scheduling = True
    found = scheduler(config)
    holder.close()
    assert isinstance(found, FakeAsyncScheduler)
    found.plans, found.prompts = [FakePlan({"a": 1}, cached=[("a", 5)])], {"a": 2}
    run(found)
    assert "steps are not reported: ZMQError: Address already in use" in caplog.text


def test_a_subscriber_that_does_not_read_delays_nothing(tmp_path: Any) -> None:
    publisher = StepPublisher(f"ipc://{tmp_path}/steps", ABOUT)
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    try:
        socket.set_hwm(1)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(f"ipc://{tmp_path}/steps")
        publisher.publish(EngineStep(1, 1, 2))
        socket.poll(200)
        for number in range(2, 3 * MOST_UNREAD):
            publisher.publish(EngineStep(number, number, number + 1))
    finally:
        socket.close(0)
        context.term()
        publisher.close()
