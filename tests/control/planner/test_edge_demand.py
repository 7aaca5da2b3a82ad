"""Demand is counted when requests arrive, and forecast from there."""

import pytest

from diptych.control.planner.edge_demand import Demand, RateForecast
from diptych.control.planner.planner_events import AnswerBegun, AnswerEnded, Demanded, PromptBegun
from diptych.control.slo import NS_PER_S, Slo


def filled(rate: int, seconds: int) -> Demand:
    demand = Demand(60 * NS_PER_S, NS_PER_S)
    demand.on_tick(0)
    for second in range(seconds):
        for number in range(rate):
            now = second * NS_PER_S + number * NS_PER_S // rate
            demand.on_demanded(Demanded(f"{second}-{number}", 100, 10, Slo()), now)
        demand.on_tick((second + 1) * NS_PER_S)
    return demand


def test_a_steady_rate_is_forecast_as_it_is() -> None:
    assert filled(5, 30).summary(20 * NS_PER_S).forecast == pytest.approx(5)


def test_a_rising_rate_is_forecast_to_rise_and_not_without_limit() -> None:
    forecast = RateForecast()
    for rate in range(1, 30):
        forecast.observe(rate)
    assert forecast.level < forecast.ahead(5) <= 2 * forecast.level
    assert forecast.ahead(10_000) == pytest.approx(forecast.ahead(100)), "the trend is damped"


def test_an_overloaded_fleet_that_completes_nothing_still_shows_its_demand() -> None:
    demand = filled(8, 10)
    assert demand.summary(0).rate == pytest.approx(8), "no request has ended"


def test_the_replay_has_the_forecast_rate_and_the_recorded_lengths() -> None:
    arrivals, num_waiting, span_ns = filled(4, 20).replay(8.0, 1000, 0)
    assert (len(arrivals), num_waiting, span_ns) == (160, 80, 10 * NS_PER_S), "all of them wait"
    assert [arrival.at_ns for arrival in arrivals] == sorted(arrival.at_ns for arrival in arrivals)
    assert {arrival.num_prompt_tokens for arrival in arrivals} == {100}
    again, _, span_ns = filled(4, 20).replay(8.0, 1000, 25 * NS_PER_S)
    assert (len(again), span_ns) == (80 + 240, 30 * NS_PER_S), "a queue needs time to build up"
    assert len(filled(4, 20).replay(8.0, 100, 25 * NS_PER_S)[0]) == 80 + 80


def test_only_uncached_tokens_and_real_lengths_are_replayed_once_they_are_known() -> None:
    demand = Demand(60 * NS_PER_S, NS_PER_S)
    demand.on_demanded(Demanded("a", 100, 10, Slo()), 0)
    demand.on_prompt_begun(PromptBegun("a", 64))
    demand.on_answer_ended(AnswerEnded("a", 25))
    ((arrival,), _, _) = demand.replay(1.0, 10, 0)
    assert (arrival.num_prompt_tokens, arrival.num_output_tokens) == (36, 25)


def test_an_aborted_answer_teaches_no_length() -> None:
    demand = Demand(60 * NS_PER_S, NS_PER_S)
    demand.on_demanded(Demanded("a", 100, 10, Slo()), 0)
    demand.on_answer_ended(AnswerEnded("a", None))
    assert demand.replay(1.0, 10, 0)[0][0].num_output_tokens == 10


def test_a_request_older_than_the_window_counts_while_it_waits() -> None:
    demand = Demand(10 * NS_PER_S, NS_PER_S)
    demand.on_demanded(Demanded("old", 500, 10, Slo()), 0)
    demand.on_demanded(Demanded("new", 100, 10, Slo()), 15 * NS_PER_S)
    demand.on_tick(20 * NS_PER_S)
    arrivals, num_waiting, _ = demand.replay(1.0, 10, 0)
    assert ([arrival.num_prompt_tokens for arrival in arrivals], num_waiting) == ([500, 100, 100], 2)
    demand.on_answer_begun(AnswerBegun("old"), 20 * NS_PER_S)
    assert demand.replay(1.0, 10, 0)[1] == 1


def test_streams_that_run_are_replayed_with_their_context_and_what_is_left_of_their_answers() -> None:
    demand = Demand(10 * NS_PER_S, NS_PER_S)
    for name, begun in (("old", 1), ("young", 4)):
        demand.on_demanded(Demanded(name, 500, 100, Slo()), 0)
        demand.on_answer_begun(AnswerBegun(name), begun * NS_PER_S)
    old, young = demand.running(80, 5 * NS_PER_S)  # four seconds and one
    assert (old.num_prompt_tokens, old.num_output_tokens) == (565, 35)
    assert (young.num_prompt_tokens, young.num_output_tokens) == (517, 83)
    assert old.is_running
    assert demand.running(1000, 5 * NS_PER_S)[0].num_output_tokens == 10, "it is longer than expected already"


def test_a_request_is_late_while_it_waits_for_longer_than_its_objective() -> None:
    demand = Demand(10 * NS_PER_S, NS_PER_S)
    demand.on_demanded(Demanded("a", 500, 10, Slo(NS_PER_S)), 0)
    assert (demand.num_late(NS_PER_S), demand.num_late(2 * NS_PER_S)) == (0, 1)
    demand.on_answer_begun(AnswerBegun("a"), 2 * NS_PER_S)
    assert not demand.num_late(3 * NS_PER_S)
