"""Percentiles and distributions: bounds and invariances that hold for all data."""

from random import Random
from statistics import quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as some

from diptych.report.statistics import (
    count_over_time,
    cumulative,
    distribution_ms,
    median_and_longest,
    percentile,
    weighted_cumulative,
)

durations = some.lists(some.integers(0, 10**12), min_size=1, max_size=200)


@given(durations)
def test_percentiles_lie_within_the_data_and_rise(values: list[int]) -> None:
    ordered = sorted(values)
    found = [percentile(ordered, percent) for percent in (0, 25, 50, 90, 100)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (ordered[0], ordered[-1])


@given(some.lists(some.integers(0, 10**6), min_size=2, max_size=50))
def test_quartiles_are_those_of_the_standard_library(values: list[int]) -> None:
    ordered = sorted(values)
    assert [percentile(ordered, percent) for percent in (25, 50, 75)] == pytest.approx(
        quantiles(values, n=4, method="inclusive")
    )


@given(durations, some.randoms())
def test_a_distribution_does_not_depend_on_the_order(values: list[int], random: Random) -> None:
    shuffled = list(values)
    random.shuffle(shuffled)
    assert distribution_ms(shuffled) == distribution_ms(values)


def test_nothing_measured_is_none_and_draws_nothing() -> None:
    assert distribution_ms([]) == dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"))
    assert (cumulative([]), weighted_cumulative({}, 1.0)) == ([], [])


@given(durations)
def test_cumulative_curves_rise_from_the_least_to_the_largest_value(values: list[int]) -> None:
    weights = {value: values.count(value) for value in values}
    for curve in (cumulative(values), weighted_cumulative(weights, 1.0)):
        assert curve == sorted(curve)
        assert curve[-1] == (max(values), 1.0)
    assert cumulative(values)[0] == (min(values), 0.0)


@given(durations)
def test_a_cumulative_curve_of_a_histogram_has_its_ninety_ninth_percentile(values: list[int]) -> None:
    curve = weighted_cumulative({value: values.count(value) for value in values}, 1.0)
    wanted = next(value for value in sorted(values) if sum(other <= value for other in values) >= 0.99 * len(values))
    assert next(value for value, share in curve if share >= 0.99) == wanted


@given(some.lists(some.tuples(some.integers(0, 100), some.integers(0, 50)), max_size=30))
def test_a_count_over_time_is_that_of_each_moment(spans: list[tuple[int, int]]) -> None:
    ends = [start + length for start, length in spans]
    points = count_over_time([start for start, _ in spans], ends, 100, num_points=100)
    for now, (seconds, count) in enumerate(points):
        assert seconds == now / 1e9
        assert count == sum(start <= now < start + length for start, length in spans)


@given(some.lists(some.tuples(some.integers(0, 999), some.integers(0, 10**9)), min_size=1, max_size=50))
def test_the_longest_of_all_bins_is_the_longest_of_all(values: list[tuple[int, int]]) -> None:
    middle, longest = median_and_longest(values, 1000, num_bins=7)
    assert max(height for _, height in longest) == max(value for _, value in values) / 1e6
    assert [at for at, _ in middle] == [at for at, _ in longest] == sorted({at for at, _ in middle})
    assert all(low <= high for (_, low), (_, high) in zip(middle, longest, strict=True))
    assert len(middle) == len({at // 143 for at, _ in values})
