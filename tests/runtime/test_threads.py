"""Cores and threads of a worker."""

import pytest
import torch

from diptych.control.errors import ConfigError
from diptych.runtime.threads import available_cores, configure_threads


def test_one_thread_per_core_by_default_and_fewer_on_request() -> None:
    before, cores = torch.get_num_threads(), available_cores()
    try:
        assert configure_threads().num_threads == len(cores)
        settings = configure_threads(1, cores)
        assert (settings.cores, settings.num_threads, torch.get_num_threads()) == (cores, 1, 1)
    finally:
        torch.set_num_threads(before)


def test_more_threads_than_cores_or_foreign_cores_are_refused() -> None:
    count = len(available_cores())
    with pytest.raises(ConfigError, match=f"threads is {count + 1}; between 1 and {count}"):
        configure_threads(count + 1)
    with pytest.raises(ConfigError, match="threads is 0"):
        configure_threads(0)
    with pytest.raises(ConfigError, match="cores is"):
        configure_threads(1, [100_000])
