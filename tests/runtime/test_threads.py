"""CPUs and threads of a worker."""

import logging
from collections.abc import Iterator

import pytest
import torch

from diptych.control.errors import ConfigError
from diptych.processor import Processor, read_processor
from diptych.runtime.threads import configure_threads

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
