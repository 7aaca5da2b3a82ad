"""The planner's guards: each test is named after the failure that its guard prevents."""

from diptych.control.engine.reports import LoadReport
from diptych.control.planner import guards
from diptych.control.planner.fleet_layout import Layout, WorkerSetting
from diptych.control.planner.planner_events import ObservedWorker, Prediction, ReplayedArrival
from diptych.control.slo import NS_PER_MS, NS_PER_S, Slo


def observed(worker: int, time_ns: int | None) -> ObservedWorker:
    load = None if time_ns is None else LoadReport(time_ns, 0, 100, 0, 1e4, 1.0)
    return ObservedWorker(worker, "both", "chunked", 16, load)


def layout(*roles: str) -> Layout:
    return Layout(tuple(WorkerSetting(number, role, "chunked") for number, role in enumerate(roles)))  # type: ignore[arg-type]


def test_lost_metrics_do_not_look_like_an_idle_fleet() -> None:
    fresh, now = observed(0, 100 * NS_PER_S), 101 * NS_PER_S
    assert not guards.metrics_are_lost([fresh, observed(1, 100 * NS_PER_S)], now, 15 * NS_PER_S, True)
    assert guards.metrics_are_lost([], now, 15 * NS_PER_S, True)
    assert guards.metrics_are_lost([fresh, observed(1, None)], now, 15 * NS_PER_S, True)
    assert guards.metrics_are_lost([fresh], 116 * NS_PER_S, 15 * NS_PER_S, True)
    assert not guards.metrics_are_lost([fresh], 200 * NS_PER_S, 15 * NS_PER_S, False), "idle workers report nothing"


def test_a_few_cold_requests_do_not_change_a_fleet() -> None:
    assert guards.is_cold(19, 20)
    assert not guards.is_cold(20, 20)


def test_the_effect_of_a_change_is_awaited_before_the_next() -> None:
    assert not guards.is_cooling_down(0, None, 10)
    assert guards.is_cooling_down(19, 10, 10)
    assert not guards.is_cooling_down(20, 10, 10)


def test_a_benchmark_with_fixed_concurrency_is_not_extrapolated() -> None:
    assert guards.is_closed_loop([64] * 32)
    assert not guards.is_closed_loop([64] * 31), "too few arrivals to tell"
    assert not guards.is_closed_loop([1] * 64), "requests that never meet may come at any rate"
    assert not guards.is_closed_loop([40 + number % 9 for number in range(64)])


def test_a_fleet_of_which_no_configuration_is_enough_is_not_judged_by_a_lucky_moment() -> None:
    poor, good = Prediction(1.0, 0.49, 1.0), Prediction(2.0, 0.5, 2.0)
    assert guards.is_overloaded([poor, poor])
    assert not guards.is_overloaded([poor, good])


def test_two_busy_workers_are_not_made_one() -> None:
    assert guards.can_spare_a_worker(0.4, 2)
    assert not guards.can_spare_a_worker(0.6, 2), "1.2 of one worker"
    assert guards.can_spare_a_worker(0.6, 8)
    assert not guards.can_spare_a_worker(0.0, 1)


def test_no_more_workers_than_the_budget_has() -> None:
    assert guards.is_within_budget(4, 4)
    assert not guards.is_within_budget(5, 4)


def test_what_an_operator_has_set_is_not_changed_back() -> None:
    assert guards.respects_pins(layout("both", "decode"), layout("both", "both"), {0})
    assert not guards.respects_pins(layout("both", "decode"), layout("both", "both"), {1})


def test_a_phase_is_never_left_without_a_worker() -> None:
    assert guards.keeps_both_phases(layout("prefill", "decode"))
    assert guards.keeps_both_phases(layout("both"))
    assert not guards.keeps_both_phases(layout("prefill", "prefill"))


def of_groups(*workers: tuple[str, str]) -> Layout:
    return Layout(
        tuple(WorkerSetting(number, role, "chunked", group) for number, (group, role) in enumerate(workers))  # type: ignore[arg-type]
    )


def test_long_requests_are_not_left_without_a_worker_for_a_phase() -> None:
    limits = {"large": (0, 100_000), "small": (0, 10_000)}
    present = of_groups(("large", "both"), ("small", "both"), ("small", "both"))
    fits = of_groups(("large", "both"), ("small", "decode"), ("small", "prefill"))
    short = of_groups(("large", "prefill"), ("small", "decode"), ("small", "decode"))
    assert guards.keeps_what_it_serves(present, fits, limits)
    assert not guards.keeps_what_it_serves(present, short, limits)
    assert guards.keeps_what_it_serves(short, short, limits), "it is so already"
    assert not guards.keeps_what_it_serves(present, of_groups(("small", "both"), ("small", "both")), limits)


def test_workers_that_hand_nothing_to_each_other_are_not_given_one_phase_each() -> None:
    limits = {"exact": (0, 10_000), "rough": (1, 10_000)}
    present = of_groups(("exact", "both"), ("rough", "both"))
    assert not guards.keeps_what_it_serves(present, of_groups(("exact", "prefill"), ("rough", "decode")), limits)
    assert not guards.keeps_what_it_serves(present, of_groups(("exact", "both"), ("rough", "decode")), limits)
    assert guards.keeps_what_it_serves(present, of_groups(("exact", "both")), limits), "the others serve as much"


def test_an_objective_that_a_lone_request_misses_is_named_with_its_number() -> None:
    terms = (5e6, 1e5, 0.0, 0.0, 0.0)
    slow = ReplayedArrival(0, 10_000, 10, Slo(ttft_ns=500 * NS_PER_MS))
    fast = ReplayedArrival(0, 1_000, 10, Slo(ttft_ns=500 * NS_PER_MS))
    assert guards.infeasible_ttft_ns([slow, slow, fast], terms) == 1_005_000_000
    assert guards.infeasible_ttft_ns([slow, fast, fast], terms) is None
    assert guards.infeasible_ttft_ns([], terms) is None
