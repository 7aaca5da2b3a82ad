"""Routing in turn: who is picked, and prefill kept from decode where that is possible."""

import pytest

from diptych.control.request import Submission
from diptych.control.router.round_robin import RoundRobinRouter, Turns
from diptych.control.router.routers import make_router
from diptych.control.router.routing import Route, RoutingConfig, RoutingRequest
from diptych.control.router.topology import Role, WorkerInfo


def router_of(*roles: Role) -> RoundRobinRouter:
    router = make_router(RoutingConfig(routing="round_robin"))
    assert isinstance(router, RoundRobinRouter)
    for number, role in enumerate(roles):
        router.set_up(WorkerInfo(number, role, 1000, 16))
    return router


def route(
    router: RoundRobinRouter,
    request_id: str,
    answer: int = 100,
    *,
    avoid: frozenset[int] = frozenset(),
    hands_off: bool = True,
) -> Route:
    submission = Submission(request_id, 1000, answer, hands_off=hands_off)
    found = router.route(RoutingRequest(submission, avoid=avoid), 0)
    assert found is not None
    return found


def test_all_that_are_up_get_their_turn_and_none_that_is_not() -> None:
    turns = Turns()
    for worker in range(4):
        turns.set_up(worker)
    turns.set_down(2)
    assert [turns.pick() for _ in range(7)] == [0, 1, 3, 0, 1, 3, 0]
    turns.set_up(2)
    assert [turns.pick() for _ in range(4)] == [1, 2, 3, 0]
    for worker in range(4):
        turns.set_down(worker)
    assert turns.pick() is None


@pytest.mark.parametrize("roles", [("both", "both", "both"), ("prefill", "decode", "decode")])
def test_a_stream_that_leaves_is_handed_to_another_worker_that_decodes(roles: tuple[Role, ...]) -> None:
    router = router_of(*roles)
    here = route(router, "a").decode
    leaving = RoutingRequest(Submission("a", 1000, 100), 40, leaves=here)
    moved = router.route(leaving, 0)
    assert moved is not None and moved.reason == "moved"
    assert moved.prefill == here != moved.decode and roles[moved.decode] != "prefill"
    others = [worker for worker, role in enumerate(roles) if worker != here and role != "prefill"]
    for worker in others:
        router.set_down(worker)
    assert router.route(leaving, 0) is None


def test_prefill_and_decode_are_separated_whenever_that_is_possible() -> None:
    router = router_of("prefill", "decode", "prefill", "decode")
    routes = [route(router, str(number)) for number in range(40)]
    assert {found.reason for found in routes} == {"remote"}
    assert {found.prefill for found in routes} == {0, 2} and {found.decode for found in routes} == {1, 3}
    assert route(router, "one", 1).reason == "one_token"
    vectors = [route(router, f"vector{number}", 1, hands_off=False) for number in range(10)]
    assert {(found.prefill, found.reason) for found in vectors} == {(0, "one_token"), (2, "one_token")}
    assert route(router, "whole", hands_off=False).reason == "whole"
    assert route(router, "elsewhere", avoid=frozenset({0, 1})) == Route(2, 3, 0, 0, "remote")
    router.set_down(1)
    router.set_down(3)
    assert route(router, "alone").reason == "only_worker"
    router.set_up(WorkerInfo(1, "decode", 1000, 16))
    router.set_down(0)
    router.set_down(2)
    assert route(router, "vector", 1, hands_off=False).prefill == 1


def test_taking_turns_goes_by_number_and_skips_those_that_are_down() -> None:
    router = router_of("both", "both", "both", "both")
    assert [route(router, str(number)).decode for number in range(5)] == [0, 1, 2, 3, 0]
    router.set_down(2)
    assert [route(router, str(number)).decode for number in range(5, 9)] == [1, 3, 0, 1]
    router.set_up(WorkerInfo(2, "both", 1000, 16))
    assert route(router, "9").decode == 2
    assert route(router, "10", avoid=frozenset({3, 0})).decode == 1
    assert route(router, "11", avoid=frozenset(range(4))).decode == 2  # no other can


def test_a_worker_whose_role_has_changed_gets_the_requests_of_its_new_role() -> None:
    router = router_of("prefill", "decode", "decode")
    assert {route(router, str(number)).prefill for number in range(4)} == {0}
    router.set_role(1, "prefill")
    assert {route(router, f"more{number}").prefill for number in range(4)} == {0, 1}
    assert {route(router, f"again{number}").decode for number in range(4)} == {2}


def test_a_request_never_gets_a_worker_that_cannot_hold_it() -> None:
    router = RoundRobinRouter(RoutingConfig(routing="round_robin"))
    for number, length in enumerate((1000, 9000, 1000)):
        router.set_up(WorkerInfo(number, "both", 1000, 16, max_model_len=length))
    for number in range(12):
        is_long = number % 2 == 0
        found = router.route(RoutingRequest(Submission(str(number), 5000 if is_long else 50, 100)), 0)
        assert found is not None
        assert found.decode == 1 or not is_long
    router.set_down(1)
    assert router.route(RoutingRequest(Submission("long", 5000, 100)), 0) is None


def test_only_workers_of_one_copy_share_a_request() -> None:
    router = RoundRobinRouter(RoutingConfig(routing="round_robin"))
    roles: tuple[Role, ...] = ("prefill", "decode", "prefill", "decode")
    for number, role in enumerate(roles):
        router.set_up(WorkerInfo(number, role, 1000, 16, model_copy=number // 2))
    for number in range(12):
        found = router.route(RoutingRequest(Submission(str(number), 50, 100)), 0)
        assert found is not None and found.reason == "remote"
        assert found.prefill // 2 == found.decode // 2
