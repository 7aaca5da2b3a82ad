"""Workers that once looked slow are tried again."""

from dataclasses import replace
from itertools import pairwise

from diptych.control.router.cost_router import CostRouter
from diptych.control.router.idle_trials import FIRST_TRIAL_NS, LAST_INTERVAL_NS
from diptych.control.router.topology import WorkerInfo
from diptych.control.slo import NS_PER_S
from tests.control.router.test_cost_router import REPORT, ask, route, router_of

SLOW = replace(REPORT, token_ns=5 * REPORT.token_ns, fixed_ns=5 * REPORT.fixed_ns)


def busy_and_idle() -> CostRouter:
    """Worker 0 computes a prompt; worker 1 has looked slow since its warm-up."""
    router = router_of("both", "both", reports={1: SLOW})
    assert route(router, ask("first", 1000)).decode == 0
    return router


def test_an_idle_worker_that_once_was_slow_is_tried_again() -> None:
    router = busy_and_idle()
    assert route(router, ask("second", 1000), FIRST_TRIAL_NS - 1).decode == 0
    assert route(router, ask("third", 1000), FIRST_TRIAL_NS).decode == 1


def test_a_worker_that_still_is_slow_is_tried_less_and_less_often() -> None:
    router, now, trials = busy_and_idle(), 0, []
    for second in range(1, 2000):
        now = second * NS_PER_S
        found = route(router, ask(f"r{second}", 1000), now)
        router.on_first_token(f"r{second}")
        router.on_ended(f"r{second}")
        if found.decode == 1:
            trials.append(second)
            router.on_load(1, replace(SLOW, time_ns=now))
        router.on_load(0, replace(REPORT, time_ns=now))
    gaps = [after - before for before, after in pairwise(trials)]
    assert gaps[0] <= 15 and gaps == sorted(gaps)
    assert gaps[-1] * NS_PER_S <= 1.1 * LAST_INTERVAL_NS
    assert len(trials) < 15


def test_a_worker_of_another_kind_is_not_expected_to_be_as_fast() -> None:
    small = WorkerInfo(1, "both", 1000, 16, memory_domain=0, model_copy=1)
    router = router_of("both", small, reports={1: SLOW})
    route(router, ask("first", 1000))
    assert route(router, ask("second", 1000), 2 * FIRST_TRIAL_NS).decode == 0


def test_a_busy_worker_is_not_tried() -> None:
    router = router_of("both", "both", reports={1: replace(SLOW, backlog_ns=10**9)})
    route(router, ask("first", 1000))
    assert route(router, ask("second", 1000), 2 * FIRST_TRIAL_NS).decode == 0
