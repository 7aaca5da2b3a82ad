"""Objectives, and where the time of a request went."""

import pytest

from diptych.control.errors import InvalidRequestError
from diptych.control.slo import LatencyBreakdown, Slo, breakdown_from_times


@pytest.mark.parametrize("name", ["ttft_ns", "tpot_ns"])
@pytest.mark.parametrize("value", [0, -1])
def test_an_objective_is_positive(name: str, value: int) -> None:
    Slo(**{name: 1})
    with pytest.raises(InvalidRequestError, match=f"{name} is {value}") as caught:
        Slo(**{name: value})
    assert caught.value.param == name


def test_what_a_request_does_not_ask_for_is_the_default() -> None:
    default = Slo(10, 20)
    assert Slo().or_else(default) == default
    assert Slo(1).or_else(default) == Slo(1, 20)
    assert Slo(tpot_ns=2).or_else(default) == Slo(10, 2)
    assert Slo(1, 2).or_else(default) == Slo(1, 2)


def test_an_objective_is_met_up_to_its_last_nanosecond() -> None:
    latency = LatencyBreakdown(queue_ns=30, prefill_ns=70, handoff_ns=20, decode_ns=180, num_output_tokens=5)
    assert (latency.ttft_ns, latency.tpot_ns, latency.total_ns) == (100, 50, 300)
    assert Slo(100, 50).is_met(latency)
    assert not Slo(99, 50).is_met(latency)
    assert not Slo(100, 49).is_met(latency)
    assert Slo(ttft_ns=100).is_met(latency) and Slo(tpot_ns=50).is_met(latency) and Slo().is_met(latency)


def test_an_answer_of_one_token_has_no_time_per_token_and_one_of_two_has() -> None:
    assert LatencyBreakdown(1, 1, 0, 1).tpot_ns is None
    assert LatencyBreakdown(1, 1, 0, 0).tpot_ns is None
    assert LatencyBreakdown(1, 1, 7, 2).tpot_ns == 7
    assert Slo(2, 1).is_met(LatencyBreakdown(1, 1, 0, 1))


def test_the_parts_of_a_request_end_where_the_next_begin_and_those_never_reached_take_no_time() -> None:
    assert breakdown_from_times(5, 7, 11, 30, 4, 15) == LatencyBreakdown(2, 4, 15, 4, handoff_ns=4)
    assert breakdown_from_times(5, 7, 11, 30, 4) == LatencyBreakdown(2, 4, 19, 4)
    assert breakdown_from_times(5, 7, None, 30, 0) == LatencyBreakdown(2, 23, 0, 0)
    assert breakdown_from_times(5, None, None, 30, 0) == LatencyBreakdown(25, 0, 0, 0)
