"""Configurations in reach, and how few workers change on the way to one."""

from collections import Counter

from diptych.control.planner.fleet_layout import NEW_WORKER, Layout, Reach, WorkerSetting, as_counts, assign, reachable

CHUNKED = ("chunked",)


def layout(*roles: str) -> Layout:
    return Layout(tuple(WorkerSetting(number, role, "chunked") for number, role in enumerate(roles)))  # type: ignore[arg-type]


def labels(present: Layout, reach: Reach) -> list[str]:
    return [assign(present, counts, (), reach.pinned).label for counts in reachable(present, reach)]


def test_the_present_configuration_comes_first_and_each_comes_once() -> None:
    found = labels(layout("prefill", "decode", "decode"), Reach(CHUNKED, 3, 3))
    assert found[0] == "2 decode + 1 prefill"
    assert len(found) == len(set(found))
    assert "1 decode + 2 prefill" in found
    assert "3 both" in found


def test_every_configuration_in_reach_can_do_both_phases() -> None:
    for label in labels(layout("prefill", "decode"), Reach(CHUNKED, 1, 3)):
        assert "both" in label or ("prefill" in label and "decode" in label)


def test_a_pinned_worker_keeps_its_role_in_all_of_them() -> None:
    present = layout("prefill", "decode", "both")
    pinned = frozenset((1,))
    for counts in reachable(present, Reach(CHUNKED, 1, 4, pinned)):
        assert WorkerSetting(1, "decode", "chunked") in assign(present, counts, (), pinned).settings


def test_as_few_workers_change_as_counts_differ_and_the_idlest_do() -> None:
    present = layout("prefill", "decode", "decode", "decode")
    wanted = as_counts(Counter({("prefill", "chunked"): 2, ("decode", "chunked"): 2}))
    chosen = assign(present, wanted, (2, 3, 1, 0), frozenset())
    assert chosen.counts == wanted
    assert set(chosen.settings) - set(present.settings) == {WorkerSetting(2, "prefill", "chunked")}


def test_a_worker_more_is_a_new_one_and_a_worker_fewer_is_the_idlest() -> None:
    present = layout("both", "both")
    three, one = (as_counts(Counter({("both", "chunked"): count})) for count in (3, 1))
    assert [setting.worker for setting in assign(present, three, (0, 1), frozenset()).settings] == [NEW_WORKER, 0, 1]
    assert [setting.worker for setting in assign(present, one, (0, 1), frozenset()).settings] == [1]
