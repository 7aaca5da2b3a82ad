"""Laws: tests that hold for every seed. They take fresh seeds for as long as there is time, and those that once failed.

    @law(weight=2.0, seeds=(1709, 2999))
    def test_nothing_is_lost(seed: int) -> None: ...

is one test case per listed seed, and one, [fresh], that draws seeds until its share of the time is used, but at least
FEWEST. A weight is what a law gets where there is enough, in seconds of processor time; all laws of a run together get
BUDGET_S, or what --for says. Tests of hypothesis are laws, too: their seeds are batches of examples. A failure names
the seed and the command that repeats it alone (--law-seed). All seeds of a run follow from one number (--law-root).

A law may not assert that something happens within some seed, nor leave anything behind for the next one: all seeds of a
test case share its fixtures.
"""

import os
import random
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import pytest

BUDGET_S = 20.0
FEWEST = 1
FRESH = "fresh"
WALL = 10  # a law that waits ends after so many times its share
HYPOTHESIS_WEIGHT = 0.25  # of a test that names no other
HYPOTHESIS_EXAMPLES = 40  # of one seed
UNITS_S = {"s": 1, "m": 60, "h": 3600}
Body = TypeVar("Body", bound=Callable[..., Any])

hypothesis.settings.register_profile(
    "laws", max_examples=HYPOTHESIS_EXAMPLES, deadline=None, database=None, derandomize=False, print_blob=True
)


def law(*, weight: float, seeds: Iterable[int] = ()) -> Callable[[Body], Body]:
    """Mark a test as a law. Unless it is a test of hypothesis, it has a parameter ``seed``; ``seeds`` failed once."""

    def mark(body: Body) -> Body:
        marked = pytest.mark.law(weight)(body)
        if hypothesis.is_hypothesis_test(body):
            return marked
        return pytest.mark.parametrize("seed", [FRESH, *seeds])(marked)

    return mark


def duration_s(text: str) -> float:
    """Seconds of ``1h``, ``90m``, ``20s`` or ``20``. Raises ValueError."""
    number, unit_s = (text[:-1], UNITS_S[text[-1]]) if text[-1:] in UNITS_S else (text, 1)
    seconds = float(number) * unit_s
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{text} is no duration")
    return seconds


def shares_s(weights: dict[str, float], budget_s: float, *, is_by_hand: bool) -> dict[str, float]:
    """What each law gets. Of the time that was asked for by hand, all is used; of the usual one no law uses more than
    its weight, so that a single file is tested in the time that it takes."""
    scale = budget_s / sum(weights.values()) if weights else 0.0
    return {name: weight * (scale if is_by_hand else min(scale, 1.0)) for name, weight in weights.items()}


def fresh_seeds(root: int, name: str) -> Iterator[int]:
    """The seeds of one law, endless, the same in every process."""
    rng = random.Random(f"{root} {name}")
    while True:
        yield rng.getrandbits(32)


def processor_s() -> float:
    """Processor seconds of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


class LawRunner:
    """A plugin of pytest that gives laws their seeds. ``only``: the seed that all get instead of fresh ones."""

    def __init__(self, root: int, budget_s: float | None, only: int | None) -> None:
        self.root = root
        self.only = only
        self._budget_s = budget_s
        self._shares_s: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._used_s = 0.0

    @pytest.hookimpl(trylast=True)  # behind -k and -m
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Share the time. With --for and --law-seed nothing else is run."""
        laws = {item.nodeid: item for item in items if isinstance(item, pytest.Function) and _draws_seeds(item)}
        siblings = Counter(_name(item) for item in laws.values())
        weights = {name: _weight(item) / siblings[_name(item)] for name, item in laws.items()}
        is_by_hand = self._budget_s is not None
        self._shares_s = shares_s(weights, self._budget_s or BUDGET_S, is_by_hand=is_by_hand)
        if not is_by_hand and self.only is None:
            return
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in laws])
        items[:] = laws.values()
        for name, item in laws.items():
            item.add_marker(pytest.mark.timeout(300 + WALL * self._shares_s[name]), append=False)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Iterator[None]:
        """Call a law once for each seed."""
        share_s = self._shares_s.get(pyfuncitem.nodeid)
        if share_s is None:
            return (yield)
        body = pyfuncitem.obj
        clock = time.monotonic if pyfuncitem.get_closest_marker("system") else processor_s  # servers are elsewhere

        def call_for_each_seed(**arguments: Any) -> None:
            begun_s, end_s, count = clock(), time.monotonic() + WALL * share_s, 0
            for seed in self._seeds(pyfuncitem.nodeid):
                _call(pyfuncitem, body, seed, arguments)
                count += 1
                is_over = clock() - begun_s >= share_s or time.monotonic() >= end_s
                if is_over and count >= FEWEST:
                    break
            pyfuncitem.user_properties.append(("law", [count, clock() - begun_s]))

        pyfuncitem.obj = call_for_each_seed
        try:
            return (yield)
        finally:
            pyfuncitem.obj = body

    def _seeds(self, name: str) -> Iterable[int]:
        return fresh_seeds(self.root, name) if self.only is None else [self.only]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a process of xdist where its seeds come from."""
        node.workerinput["law_root"] = self.root

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up what was run."""
        for name, value in report.user_properties if report.when == "call" else ():
            if name == "law":
                self._counts.update(laws=1, seeds=value[0])
                self._used_s += value[1]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say how much was run, and how to have the same seeds again."""
        if self._counts["laws"]:
            again = f"--law-root {self.root}" if self.only is None else f"--law-seed {self.only}"
            counts = f"{self._counts['seeds']} seeds of {self._counts['laws']} laws"
            terminalreporter.write_line(f"laws: {counts} in {self._used_s:.1f} s ({again})")


def _call(item: pytest.Function, body: Callable[..., Any], seed: int, arguments: dict[str, Any]) -> None:
    try:
        if hypothesis.is_hypothesis_test(body):
            hypothesis.seed(seed)(getattr(body, "__func__", body))
            body(**arguments)
        else:
            body(**arguments | {"seed": seed})
    except pytest.skip.Exception:
        raise
    except BaseException as error:
        text = f"broken with seed {seed}; to repeat it: scripts/test {shlex.quote(item.nodeid)} --law-seed {seed}"
        error.add_note(text)
        item.add_report_section("call", "law", f"{item.nodeid} is {text}")
        raise


def _name(item: pytest.Function) -> str:
    """The name of the function whose parameters make several laws of it."""
    return f"{item.parent.nodeid if item.parent else ''}::{item.originalname}"


def _draws_seeds(item: pytest.Function) -> bool:
    if hypothesis.is_hypothesis_test(item.obj):
        return True
    return hasattr(item, "callspec") and item.callspec.params.get("seed") == FRESH


def _weight(item: pytest.Function) -> float:
    marker = item.get_closest_marker("law")
    return HYPOTHESIS_WEIGHT if marker is None else float(marker.args[0])


def commit_root(folder: Path) -> int | None:
    """A number of the commit, so that each has seeds of its own and what was seen of one can be seen again."""
    try:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return int(asked.stdout[:8], 16)


# -- hooks that tests/conftest.py takes over --------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of a run by hand."""
    group = parser.getgroup("laws")
    text = "run laws alone, for so much processor time in all"
    group.addoption("--for", dest="law_s", type=duration_s, metavar="1h", help=text)
    group.addoption("--law-seed", type=int, metavar="N", help="run laws alone, with this seed")
    group.addoption("--law-root", type=int, metavar="N", help="draw the fresh seeds of laws from this number")


def pytest_configure(config: pytest.Config) -> None:
    """Begin with a root, or with that of the process that divides the work among others."""
    root = config.getoption("law_root")
    if root is None:
        root = getattr(config, "workerinput", {}).get("law_root")
    if root is None:
        is_by_hand = config.getoption("law_s") is not None
        root = (None if is_by_hand else commit_root(config.rootpath)) or random.SystemRandom().getrandbits(32)
    config.pluginmanager.register(LawRunner(root, config.getoption("law_s"), config.getoption("law_seed")), "laws")
    hypothesis.settings.load_profile("laws")
