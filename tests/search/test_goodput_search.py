"""The search for goodput against servers whose attainment is known, and the intervals that it rests on."""

import random

import pytest

from diptych.bench.summary import block_bootstrap
from diptych.control.errors import ConfigError
from diptych.report.statistics import wilson
from diptych.search.goodput_search import GoodputSearch, SearchConfig


def attainment(rate: float, capacity: float) -> float:
    """All below 80 % of the capacity, none above 120 %, evenly in between: 90 % at 0.84 of it."""
    return min(1.0, max(0.0, (1.2 - rate / capacity) / 0.4))


def searched(capacity: float, start: float, seed: int, requests: int) -> GoodputSearch:
    """A search to its end."""
    rng = random.Random(seed)
    search = GoodputSearch(SearchConfig(), start)
    while (rate := search.next_rate()) is not None:
        share = attainment(rate, capacity)
        search.add(rate, sum(rng.random() < share for _ in range(requests)), requests)
    return search


@pytest.mark.parametrize("start", [0.3, 8.0, 90.0])
def test_it_finds_the_rate_from_above_and_from_below(start: float) -> None:
    for seed in range(20):
        found = searched(10.0, start, seed, 200).found
        assert found.is_bracketed and found.estimate is not None
        assert 7.6 < found.estimate < 9.2, seed


def test_its_interval_holds_the_truth_nearly_always() -> None:
    runs = [searched(10.0, 1.0, seed, 120).found for seed in range(100)]
    held = sum((run.low or 0) <= 8.4 <= (run.high or 1e9) for run in runs)
    assert held >= 90


def test_it_takes_few_runs() -> None:
    probes = [searched(10.0, 3.0, seed, 200).found.num_probes for seed in range(50)]
    assert sum(probes) / len(probes) < 14
    assert max(probes) <= 24


def test_a_rate_near_the_edge_is_measured_again() -> None:
    search = GoodputSearch(SearchConfig(), 4.0)
    search.add(4.0, 91, 100)
    assert search.next_rate() == 4.0
    assert search.add(4.0, 99, 100).runs == 2
    assert search.next_rate() == 8.0


def test_a_server_that_never_suffices_ends_the_search() -> None:
    search = searched(1e-6, 1.0, 1, 100)
    assert search.found.rate is None and search.found.num_probes < 12


def test_a_server_without_limit_gives_a_lower_bound() -> None:
    found = searched(1e12, 1.0, 1, 100).found
    assert not found.is_bracketed and found.rate is not None and found.high is None


def test_a_hopeless_run_can_be_cut_short() -> None:
    search = GoodputSearch(SearchConfig(), 1.0)
    assert not search.is_hopeless(10, 100)
    assert search.is_hopeless(20, 100)


@pytest.mark.parametrize("share", [0.0, 1.0, 1.5, 49.0, 100.0])
def test_an_attainment_that_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="attainment"):
        SearchConfig(attainment=share)


def test_wilsons_interval_is_that_of_the_paper() -> None:
    interval = wilson(81, 263)  # 0.2553 to 0.3662: Newcombe, Statistics in Medicine 17 (1998), table I
    assert (round(interval.low, 4), round(interval.high, 4)) == (0.2553, 0.3662)
    assert wilson(0, 10).low == 0.0 and wilson(10, 10).high == 1.0
    assert (wilson(0, 0).low, wilson(0, 0).high) == (0.0, 1.0)


def test_the_bootstrap_covers_the_rate_of_a_poisson_process() -> None:
    rng = random.Random(3)
    held = 0
    for _ in range(60):
        counts = [sum(rng.random() < 0.01 for _ in range(500)) for _ in range(60)]  # about 5 a bin
        interval = block_bootstrap(counts, 0.5)
        assert interval is not None
        held += interval.low <= 10.0 <= interval.high
    assert held >= 50
    assert block_bootstrap([1, 2, 3], 1.0) is None
