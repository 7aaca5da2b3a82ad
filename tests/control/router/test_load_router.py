"""Routing by load alone: who is picked, and prefill kept from decode where that is possible."""

import pytest

from diptych.control.errors import ConfigError
from diptych.control.request import Submission
from diptych.control.router.load_router import LOAD_ROUTINGS, LoadRouter, Picker
from diptych.control.router.routers import make_router
from diptych.control.router.routing import Route, RoutingConfig, RoutingName, RoutingRequest
from diptych.control.router.topology import Role, WorkerInfo


def router_of(*roles: Role, routing: RoutingName = "round_robin", seed: int = 5) -> LoadRouter:
    router = make_router(RoutingConfig(routing=routing, seed=seed))
    assert isinstance(router, LoadRouter)
    for number, role in enumerate(roles):
        router.set_up(WorkerInfo(number, role, 1000, 16))
    return router


def route(
    router: LoadRouter,
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


@pytest.mark.parametrize("routing", LOAD_ROUTINGS)
def test_a_picker_uses_all_that_are_up_and_none_that_is_not(routing: RoutingName) -> None:
    picker = Picker(routing, seed=3)
    for worker in range(4):
        picker.set_up(worker)
    picker.set_down(2)
    picks = [picker.pick() for _ in range(60)]
    assert set(picks) == {0, 1, 3}
    for pick in picks:
        assert pick is not None
        picker.ended(pick)
    picker.set_up(2)
    assert 2 in [picker.pick() for _ in range(20)]
    for worker in range(4):
        picker.set_down(worker)
    assert picker.pick() is None


@pytest.mark.parametrize("routing", LOAD_ROUTINGS)
@pytest.mark.parametrize("roles", [("both", "both", "both"), ("prefill", "decode", "decode")])
def test_a_stream_that_leaves_is_handed_to_another_worker_that_decodes(
    routing: RoutingName, roles: tuple[Role, ...]
) -> None:
    router = router_of(*roles, routing=routing)
    here = route(router, "a").decode
    leaving = RoutingRequest(Submission("a", 1000, 100), 40, leaves=here)
    moved = router.route(leaving, 0)
    assert moved is not None and moved.reason == "moved"
    assert moved.prefill == here != moved.decode and roles[moved.decode] != "prefill"
    others = [worker for worker, role in enumerate(roles) if worker != here and role != "prefill"]
    for worker in others:
        router.set_down(worker)
    assert router.route(leaving, 0) is None
    router.on_ended("a")
    assert not any(
        picker._outstanding.get(worker) for picker in (router._prefills, router._decodes) for worker in range(3)
    )


def test_an_unknown_way_of_picking_is_refused() -> None:
    with pytest.raises(ConfigError, match="round_robin"):
        Picker("nearest")  # type: ignore[arg-type]


@pytest.mark.parametrize("routing", LOAD_ROUTINGS)
def test_prefill_and_decode_are_separated_whenever_that_is_possible(routing: RoutingName) -> None:
    router = router_of("prefill", "decode", "prefill", "decode", routing=routing)
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


@pytest.mark.parametrize("roles", [("both", "both", "both"), ("prefill", "decode", "prefill", "decode")], ids=str)
def test_the_least_loaded_worker_is_the_one_with_the_fewest_requests_that_have_not_ended(
    roles: tuple[Role, ...],
) -> None:
    router = router_of(*roles, routing="least_loaded")
    count = roles.count("both") or roles.count("decode")
    first = [route(router, str(number)).decode for number in range(count)]
    assert len(set(first)) == count
    router.on_ended("1")
    assert route(router, "next").decode == first[1]


def test_a_request_that_one_worker_serves_whole_counts_where_answers_are_written() -> None:
    router = router_of("decode", "decode", "prefill", routing="least_loaded")
    assert [route(router, name, hands_off=False).decode for name in "abcd"] == [0, 1, 2, 0]
    assert route(router, "shared").decode == 1
    router.on_ended("b")
    router.on_ended("d")
    router.on_ended("a")
    assert [route(router, f"more{number}").decode for number in range(3)] == [0, 0, 1]


def test_a_prefill_worker_is_free_when_its_prompt_is_computed() -> None:
    router = router_of("prefill", "prefill", "decode", routing="least_loaded")
    assert [route(router, name).prefill for name in "ab"] == [0, 1]
    router.on_first_token("b")
    assert [route(router, name).prefill for name in "cd"] == [1, 0]
    router.on_ended("b")  # its prompt is not counted off twice
    assert [route(router, name).prefill for name in "ef"] == [1, 0]


def test_a_request_that_is_routed_again_is_counted_once() -> None:
    router = router_of("both", "both", routing="least_loaded")
    for _ in range(5):
        route(router, "again", avoid=frozenset({1}))
    assert route(router, "b").decode == 1
    router.on_ended("again")
    assert [route(router, name).decode for name in "cde"] == [0, 0, 1]


def test_a_worker_that_comes_back_has_no_more_to_do_than_before() -> None:
    router = router_of("both", "both", routing="least_loaded")
    for _ in range(3):
        router.set_down(1)
        router.set_up(WorkerInfo(1, "both", 1000, 16))
    assert [route(router, name).decode for name in "abcd"] == [0, 1, 0, 1]


def test_taking_turns_goes_by_number_and_skips_those_that_are_down() -> None:
    router = router_of("both", "both", "both", "both")
    assert [route(router, str(number)).decode for number in range(5)] == [0, 1, 2, 3, 0]
    router.set_down(2)
    assert [route(router, str(number)).decode for number in range(5, 9)] == [1, 3, 0, 1]
    router.set_up(WorkerInfo(2, "both", 1000, 16))
    assert route(router, "9").decode == 2
    assert route(router, "10", avoid=frozenset({3, 0})).decode == 1
    assert route(router, "11", avoid=frozenset(range(4))).decode == 2  # no other can


def test_two_draws_prefer_the_worker_with_less_to_do_and_are_repeated_by_their_seed() -> None:
    histories = []
    for seed in (1, 1, 2):
        router = router_of("both", "both", "both", routing="power_of_two", seed=seed)
        histories.append([route(router, str(number)).decode for number in range(300)])
        counts = [histories[-1].count(worker) for worker in range(3)]
        assert max(counts) - min(counts) <= 6
    assert histories[0] == histories[1] != histories[2]


def test_a_worker_whose_role_has_changed_gets_the_requests_of_its_new_role() -> None:
    router = router_of("prefill", "decode", "decode")
    assert {route(router, str(number)).prefill for number in range(4)} == {0}
    router.set_role(1, "prefill")
    assert {route(router, f"more{number}").prefill for number in range(4)} == {0, 1}
    assert {route(router, f"again{number}").decode for number in range(4)} == {2}


@pytest.mark.parametrize("routing", LOAD_ROUTINGS)
def test_a_request_never_gets_a_worker_that_cannot_hold_it(routing: RoutingName) -> None:
    router = LoadRouter(RoutingConfig(routing=routing))
    for number, length in enumerate((1000, 9000, 1000)):
        router.set_up(WorkerInfo(number, "both", 1000, 16, max_model_len=length))
    for number in range(12):
        is_long = number % 2 == 0
        found = router.route(RoutingRequest(Submission(str(number), 5000 if is_long else 50, 100)), 0)
        assert found is not None
        assert found.decode == 1 or not is_long
    router.set_down(1)
    assert router.route(RoutingRequest(Submission("long", 5000, 100)), 0) is None


@pytest.mark.parametrize("routing", LOAD_ROUTINGS)
def test_only_workers_of_one_copy_share_a_request(routing: RoutingName) -> None:
    router = LoadRouter(RoutingConfig(routing=routing))
    roles: tuple[Role, ...] = ("prefill", "decode", "prefill", "decode")
    for number, role in enumerate(roles):
        router.set_up(WorkerInfo(number, role, 1000, 16, model_copy=number // 2))
    for number in range(12):
        found = router.route(RoutingRequest(Submission(str(number), 50, 100)), 0)
        assert found is not None and found.reason == "remote"
        assert found.prefill // 2 == found.decode // 2
