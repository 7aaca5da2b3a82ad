"""How laws get their seeds: fresh ones for a share of the time, those that failed always, and any of them again."""

import re
from itertools import islice

import pytest

from tests.laws import FEWEST, HYPOTHESIS_EXAMPLES, duration_s, fresh_seeds, shares_s

pytest_plugins = ["pytester"]
CONFTEST = "from tests.laws import pytest_addoption, pytest_configure\n"
LAWS = """
    import pytest
    from hypothesis import given, strategies
    from tests.laws import law

    def note(*words):
        with open("seen", "a") as seen:
            print(*words, file=seen)

    @law(weight=0.001, seeds=(7, 8))
    def test_short(seed, tmp_path):
        note("short", seed)

    @law(weight=0.001)
    @pytest.mark.parametrize("kind", ["a", "b"])
    def test_kinds(seed, kind):
        note(kind, seed)
        assert kind == "a" or BROKEN != seed % 2

    @given(strategies.integers())
    def test_drawn(number):
        note("drawn", number)

    def test_other():
        note("other 0")
"""


class Runs:
    """Runs of pytest on these laws. BROKEN: 0 or 1, the seeds that break one of them; 2: none."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self._pytester = pytester
        pytester.makeconftest(CONFTEST)
        pytester.makeini(
            "[pytest]\nasyncio_default_fixture_loop_scope = function\nmarkers =\n    law(seconds)\n    system\n"
        )

    def run(self, *options: str, broken: int = 2) -> tuple[pytest.RunResult, list[tuple[str, str]]]:
        """The result, and what was called with which seed, in this order."""
        seen = self._pytester.path / "seen"
        seen.unlink(missing_ok=True)
        self._pytester.makepyfile(test_laws_of_ours=f"BROKEN = {broken}\n" + _dedent(LAWS))
        result = self._pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)
        words = [line.split() for line in seen.read_text().splitlines()]
        return result, [(name, number) for name, number in words]


def _dedent(text: str) -> str:
    return re.sub("^    ", "", text, flags=re.MULTILINE)


@pytest.fixture
def runs(pytester: pytest.Pytester) -> Runs:
    return Runs(pytester)


def test_each_law_gets_listed_seeds_and_fresh_ones_and_the_same_again_from_their_root(runs: Runs) -> None:
    result, first = runs.run()
    result.assert_outcomes(passed=7)
    counts = {name: sum(each == name for each, _ in first) for name in ("short", "a", "b", "drawn", "other")}
    assert counts["short"] >= FEWEST + 2 and min(counts["a"], counts["b"]) >= FEWEST
    assert counts["drawn"] >= FEWEST * HYPOTHESIS_EXAMPLES and counts["other"] == 1
    assert {("short", "7"), ("short", "8")} <= set(first)
    found = re.search(r"laws: \d+ seeds of 4 laws in .* \(--law-root (\d+)\)", result.stdout.str())
    assert found
    again = runs.run("--law-root", found[1])[1]
    other = runs.run()[1]
    for name in ("short", "a", "b", "drawn"):
        begun = [[number for each, number in rows if each == name][:FEWEST] for rows in (first, again, other)]
        assert begun[0] == begun[1]
        assert begun[0] != begun[2] or name == "drawn"  # its first examples are simple ones


def test_a_broken_law_names_its_seed_and_the_command_that_repeats_it(runs: Runs) -> None:
    result, _ = runs.run(broken=1)
    result.assert_outcomes(passed=6, failed=1)
    found = re.search(
        r"broken with seed (\d+); to repeat it: scripts/test '(\S+)' --law-seed (\d+)", result.stdout.str()
    )
    assert found and found[1] == found[3] and int(found[1]) % 2 == 1
    assert found[2] == "test_laws_of_ours.py::test_kinds[b-fresh]"
    again, seen = runs.run(found[2], "--law-seed", found[3], broken=1)
    again.assert_outcomes(failed=1)
    assert seen == [("b", found[1])]


def test_a_run_by_hand_has_laws_alone_and_uses_the_time_that_it_is_given(runs: Runs) -> None:
    result, seen = runs.run("--for", "0.3s", "-k", "short or kinds or other")
    result.assert_outcomes(passed=3, deselected=4)
    assert {name for name, _ in seen} == {"short", "a", "b"}
    assert len(seen) > 3 * FEWEST


@pytest.mark.parametrize(("text", "seconds"), [("1h", 3600), ("90m", 5400), ("20s", 20), ("0.5", 0.5)])
def test_durations_have_units(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1s", "0", "1d", "inf", "nan"])
def test_what_is_no_duration_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        duration_s(text)


def test_time_is_shared_by_weight_and_only_by_hand_is_more_used_than_the_weights() -> None:
    weights = {"a": 3.0, "b": 1.0}
    assert shares_s(weights, 2.0, is_by_hand=False) == {"a": 1.5, "b": 0.5}
    assert shares_s(weights, 20.0, is_by_hand=False) == weights
    assert shares_s(weights, 20.0, is_by_hand=True) == {"a": 15.0, "b": 5.0}
    assert shares_s({}, 20.0, is_by_hand=True) == {}


def test_seeds_follow_from_the_root_and_the_name_of_the_law() -> None:
    drawn = [list(islice(fresh_seeds(root, name), 20)) for root, name in ((1, "a"), (1, "a"), (1, "b"), (2, "a"))]
    assert drawn[0] == drawn[1]
    assert len({number for numbers in drawn for number in numbers}) == 60
