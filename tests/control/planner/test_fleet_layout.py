"""Configurations in reach, and how few workers change on the way to one."""

from collections import Counter

from diptych.control.cluster.core_split import CoreSplit
from diptych.control.planner.fleet_layout import (
    NEW_WORKER,
    Configuration,
    Kind,
    Layout,
    Reach,
    WorkerSetting,
    as_counts,
    assign,
    divided,
    reachable,
)

CHUNKED = ("chunked",)


def layout(*roles: str) -> Layout:
    return Layout(tuple(WorkerSetting(number, role, "chunked") for number, role in enumerate(roles)))  # type: ignore[arg-type]


def counted(counts: dict[Kind, int]) -> Configuration:
    return Configuration(as_counts(Counter(counts)))


def labels(present: Layout, reach: Reach) -> list[str]:
    num_cores = sum(setting.num_cores for setting in present.settings)
    return [assign(present, wanted, (), reach.pinned, num_cores).label for wanted in reachable(present, reach)]


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
    for wanted in reachable(present, Reach(CHUNKED, 1, 4, pinned)):
        assert WorkerSetting(1, "decode", "chunked") in assign(present, wanted, (), pinned).settings


def test_as_few_workers_change_as_counts_differ_and_the_idlest_do() -> None:
    present = layout("prefill", "decode", "decode", "decode")
    wanted = counted({("", "prefill", "chunked"): 2, ("", "decode", "chunked"): 2})
    chosen = assign(present, wanted, (2, 3, 1, 0), frozenset())
    assert chosen.configuration == wanted
    assert set(chosen.settings) - set(present.settings) == {WorkerSetting(2, "prefill", "chunked")}


def test_a_worker_more_is_a_new_one_and_a_worker_fewer_is_the_idlest() -> None:
    present = layout("both", "both")
    three, one = (counted({("", "both", "chunked"): count}) for count in (3, 1))
    assert [setting.worker for setting in assign(present, three, (0, 1), frozenset()).settings] == [NEW_WORKER, 0, 1]
    assert [setting.worker for setting in assign(present, one, (0, 1), frozenset()).settings] == [1]


def on_cores(present: Layout, num_cores: int, split: CoreSplit | None = None) -> Layout:
    split = split or CoreSplit()
    return Layout(tuple(divided(present.settings, split, num_cores)), split)


def test_cores_move_between_roles_by_one_or_more_and_each_worker_keeps_one() -> None:
    present = on_cores(layout("prefill", "decode"), 8)
    found = labels(present, Reach(CHUNKED, 2, 2, moves_cores=True))
    assert found[0] == "1 decode on 4 cores + 1 prefill on 4 cores"
    moved = [label for label in found[1:] if label.startswith("1 decode on") and "prefill on" in label]
    assert sorted(moved) == [f"1 decode on {8 - cores} cores + 1 prefill on {cores} cores" for cores in (6, 5, 3, 2)]
    few = on_cores(layout("prefill", "decode"), 2)
    assert labels(few, Reach(CHUNKED, 2, 2, moves_cores=True)) == labels(few, Reach(CHUNKED, 2, 2))


def test_workers_of_a_role_share_what_it_gains() -> None:
    present = on_cores(layout("prefill", "decode", "decode"), 8, CoreSplit(prefill=2))
    assert present.label == "2 decode on 4 cores + 1 prefill on 4 cores"
    found = labels(present, Reach(CHUNKED, 3, 3, moves_cores=True))
    assert {"2 decode on 3 cores + 1 prefill on 5 cores", "2 decode on 5 cores + 1 prefill on 3 cores"} <= set(found)


def test_other_roles_come_with_the_rule_of_now_and_with_equal_cores() -> None:
    present = on_cores(layout("prefill", "decode"), 8, CoreSplit(prefill=3))
    found = labels(present, Reach(CHUNKED, 2, 2, moves_cores=True))
    assert {"1 both on 2 cores + 1 prefill on 6 cores", "1 both on 4 cores + 1 prefill on 4 cores"} <= set(found)
    pinned = labels(present, Reach(CHUNKED, 2, 2))
    assert "1 both on 2 cores + 1 prefill on 6 cores" in pinned
    assert "1 both on 4 cores + 1 prefill on 4 cores" not in pinned


def unequal(*workers: tuple[str, str]) -> Layout:
    return Layout(
        tuple(WorkerSetting(number, role, "chunked", group) for number, (group, role) in enumerate(workers))  # type: ignore[arg-type]
    )


def test_workers_change_within_their_pool_and_pools_change_as_a_whole() -> None:
    present = unequal(("large", "both"), ("large", "both"), ("small", "both"), ("small", "both"))
    reach = Reach(CHUNKED, 4, 4)
    for wanted in reachable(present, reach):
        of_group = Counter[str]()
        for (group, _, _), count in wanted.counts:
            of_group[group] += count
        assert of_group == {"large": 2, "small": 2}
        chosen = assign(present, wanted, (), frozenset())
        assert chosen.configuration == wanted
        assert [setting.group for setting in chosen.settings] == ["large", "large", "small", "small"]
    assert "2 prefill of large + 2 decode of small" in labels(present, reach)


def test_a_pool_keeps_the_shape_that_it_was_given() -> None:
    present = unequal(("large", "both"), ("small", "both"))
    reach = Reach(("chunked", "unified"), 2, 2, group_shapes={"large": ("chunked",)})
    kinds = {kind for wanted in reachable(present, reach) for kind, _ in wanted.counts}
    assert ("small", "both", "unified") in kinds
    assert ("large", "both", "unified") not in kinds
    started = unequal(("large", "both"), ("small", "both"))
    more = [wanted for wanted in reachable(started, Reach(CHUNKED, 2, 3)) if wanted.num_workers == 3]
    assert {kind[0] for wanted in more for kind, _ in wanted.counts} == {"", "large", "small"}, "it is of no pool"
