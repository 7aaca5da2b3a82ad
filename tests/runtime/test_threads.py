"""CPUs and threads of a worker."""

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from diptych.base.processor import Processor, read_processor
from diptych.control.compute_share import ComputeShare
from diptych.control.errors import ConfigError
from diptych.control.step import SchedulerOutput, StepResult
from diptych.runtime.device.threads import TASKS, ThreadPool, configure_threads
from diptych.runtime.step.model_runner import ModelRunner
from tests.runtime.checkpoints import prompt_of, runner
from tests.runtime.driving import generate, greedy

USABLE = read_processor().usable
FIRST = USABLE[0]
SMT = Processor("a processor", ((FIRST, 1001), (1000, 1002)), (FIRST, 1000, 1001, 1002))  # the last two: siblings


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_one_thread_per_core_by_default_and_fewer_on_request() -> None:
    assert configure_threads().num_threads == read_processor().num_threads
    settings = configure_threads(1, USABLE)
    assert (settings.cores, settings.num_threads, torch.get_num_threads()) == (USABLE, 1, 1)


def test_siblings_get_no_thread_unless_they_are_named(caplog: pytest.LogCaptureFixture) -> None:
    settings = configure_threads(processor=SMT)
    assert settings.words == "a processor (2 of 2 cores, SMT), 2 threads"
    own = Processor("a processor", (USABLE,), USABLE)  # all CPUs of this machine as siblings of one core
    assert configure_threads(cores=USABLE, processor=own).num_threads == len(USABLE)
    assert not caplog.records


def test_threads_that_must_share_a_core_or_a_quota_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert configure_threads(3, processor=SMT).num_threads == 3
        assert "threads is 3 on 2 cores" in caplog.text
        limited = Processor("a processor", ((0,), (1,), (2,), (3,)), (0, 1, 2, 3), quota=1.5)
        assert configure_threads(3, processor=limited).num_threads == 3
        assert "threads is 3; the control group grants the time of 1.5 CPUs" in caplog.text
    assert configure_threads(processor=limited).num_threads == 1


def test_more_threads_than_cpus_or_foreign_cpus_are_refused() -> None:
    count = len(USABLE)
    with pytest.raises(ConfigError, match=f"threads is {count + 1}; between 1 and {count}"):
        configure_threads(count + 1)
    with pytest.raises(ConfigError, match="threads is 5; between 1 and 4, the number of CPUs"):
        configure_threads(5, processor=SMT)
    with pytest.raises(ConfigError, match="threads is 0"):
        configure_threads(0)
    with pytest.raises(ConfigError, match="cores is"):
        configure_threads(1, [100_000])


def affinities() -> list[set[int]]:
    """Affinities of the threads of this process, but for those that end meanwhile."""
    found = []
    for task in TASKS.iterdir():
        with contextlib.suppress(ProcessLookupError):
            found.append(os.sched_getaffinity(int(task.name)))
    return found


def test_a_pool_is_resized_live_and_every_thread_of_the_process_goes_with_it() -> None:
    if not TASKS.is_dir():
        pytest.skip("the system has no /proc")
    before = os.sched_getaffinity(0)
    waiting = threading.Event()
    other = threading.Thread(target=waiting.wait)
    other.start()
    try:
        pool = ThreadPool(configure_threads(len(USABLE), USABLE, bind=True))
        assert pool.num_units == len(read_processor().cores_of(USABLE))
        pool.resize(ComputeShare((FIRST,), 1))
        assert pool.share == ComputeShare((FIRST,), 1) and torch.get_num_threads() == 1 == pool.num_units
        assert all(affinity == {FIRST} for affinity in affinities())
        pool.resize(ComputeShare(USABLE, len(USABLE)))
        assert torch.get_num_threads() == len(USABLE)
        assert other.native_id and os.sched_getaffinity(other.native_id) == set(USABLE)
        with pytest.raises(ConfigError, match="cores is"):
            pool.resize(ComputeShare((100_000,), 1))
        assert pool.share == ComputeShare(USABLE, len(USABLE))
    finally:
        waiting.set()
        other.join()
        for task in TASKS.iterdir():
            with contextlib.suppress(ProcessLookupError):  # a thread of an earlier test that ends just now
                os.sched_setaffinity(int(task.name), before)


class ResizedRunner:
    """A runner whose number of threads changes from step to step."""

    def __init__(self, model: ModelRunner, counts: list[int]) -> None:
        self._model = model
        self._counts = itertools.cycle(counts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def execute(self, output: SchedulerOutput) -> StepResult:
        torch.set_num_threads(next(self._counts))
        return self._model.execute(output)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_answers_are_equal_bit_for_bit_with_any_number_of_threads_also_when_it_changes_midway(family: str) -> None:
    model = runner(family)
    prompt, sampling = prompt_of(150), greedy(24, logprobs=3)

    def answer(counts: list[int]) -> list[object]:
        """Tokens and log probabilities of each step."""
        _, results = generate(ResizedRunner(model, counts), prompt, [100, 50], sampling)
        return [(result.payload.token_ids, result.payload.logprobs) for result in results]

    alone = answer([1])
    assert answer([2]) == alone
    assert answer([4, 1, 3, 2]) == alone
