"""The faults that scripts/mutants puts into code: one line each, and only where a test of behaviour could notice."""

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"

SOURCE = '''
"""A docstring with 1 and 2 < 3."""
LIMIT: int = 5

class Box:
    """More than 1."""

    def __init__(self, size: int = 2) -> None:
        self.size = size

    def grow(self, by: int) -> list[int]:
        """Not 1."""
        assert by > 1, f"by is {by + 1}"
        if not by or by >= LIMIT:
            raise ValueError(f"{by + 1} > 3")
        self.size += by
        return [min(by, self.size), by - 1]

    def check(self) -> None:
        """Assert what holds (for tests)."""
        self.size = 1

    def __repr__(self) -> str:
        return str(self.size + 1)
'''


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    path = tmp_path / "box.py"
    path.write_text(SOURCE)
    return path


def test_every_kind_of_fault_is_found_and_nothing_that_no_test_could_notice(source: Path) -> None:
    from faults import Places

    found = {(fault.kind, fault.text.strip()) for place in Places(source).find() for fault in place}
    assert found == {
        ("constant", "LIMIT: int = 6"),
        ("constant", "LIMIT: int = 4"),
        ("constant", "def __init__(self, size: int = 3) -> None:"),
        ("constant", "def __init__(self, size: int = 1) -> None:"),
        ("statement", "pass"),
        ("not", "if by or by >= LIMIT:"),
        ("and/or", "if not by and by >= LIMIT:"),
        ("comparison", "if not by or by > LIMIT:"),
        ("+/-", "self.size -= by"),
        ("return", "return []"),
        ("min/max", "return [max(by, self.size), by - 1]"),
        ("+/-", "return [min(by, self.size), by + 1]"),
        ("constant", "return [min(by, self.size), by - 2]"),
        ("constant", "return [min(by, self.size), by - 0]"),
        ("guard", "if False:"),
        ("doubled", "LIMIT: int = (5) * 2"),
        ("condition", "if False or by >= LIMIT:"),
        ("condition", "if not by or False:"),
    }


@pytest.mark.parametrize(
    ("line", "kind", "expected"),
    [
        ("async def f(x):\n    await x.g()", "await", {"pass", "x.g()"}),
        ("x.close()", "release", {"pass"}),
        ("open(x, 0o600)", "mode", {"open(x, 0o644)"}),
        ("make(0o700)", "mode", {"make(0o755)"}),
        ("y = f(x, timeout=3)", "unlimited", {"y = f(x, timeout=None)"}),
        ("y = f(429)", "status", {"y = f(503)"}),
        ("y = (a, b) == (c, d)", "key", {"y = (b, ) == (d, )", "y = (a, ) == (c, )"}),
        ("y = a is not None", "comparison", {"y = a is None"}),
        ("y = a in b", "comparison", {"y = a not in b"}),
        ("y = f(x, last=True)", "flag", {"y = f(x, last=False)"}),
        ('y = f("WHERE id = ? AND tenant = ?")', "query",
         {'y = f("WHERE ? IS NOT NULL AND tenant = ?")', 'y = f("WHERE id = ? AND ? IS NOT NULL")'}),
        ('MAX_LINES = _limit("MAX_LINES", 1 << 4)', "doubled", {'MAX_LINES = _limit("MAX_LINES", (1 << 4) * 2)'}),
        ("y = zip(a, b, strict=True)", "flag", set()),
        ('logger.error("x", 3)', "constant", set()),
        ('logger.error("x", 3)', "statement", set()),
        ('self._log.error("x", 3)', "statement", set()),
        ('self._log.error("x", 3)', "constant", set()),
    ],
)  # fmt: skip
def test_a_check_a_limit_or_a_release_may_be_forgotten(line: str, kind: str, expected: set[str], source: Path) -> None:
    from faults import Places

    source.write_text(line)
    found = {fault.text.strip() for place in Places(source).find() for fault in place if fault.kind == kind}
    assert found == expected


def test_the_tests_of_a_fault_are_those_that_call_its_function_the_nearest_by_name_first(source: Path) -> None:
    from reaching_tests import Passed, function_at, reaching

    text = source.read_text()
    found_at = [function_at(text, line) for line in (1, 3, 6, 9, 13, 16)]
    assert found_at == ["", "", "Box.", "Box.__init__", "Box.grow", "Box.grow"]
    passed = [
        Passed("tests/a/test_other.py::one", 1.0, frozenset({"a/box.py:Box.grow"})),
        Passed("tests/a/test_box.py::two", 9.0, frozenset({"a/box.py:Box.grow"})),
        Passed("tests/a/test_box.py::three", 1.0, frozenset({"a/box.py:Box.check"})),
        Passed("tests/a/test_far.py::four", 1.0, frozenset()),
    ]
    distances = {"tests/a/test_other.py": 2, "tests/a/test_box.py": 1}
    found, others = reaching(Path("src/diptych/a/box.py"), text, 16, passed, distances)
    assert [test.name[-3:] for test in found] == ["two", "one"]
    assert [test.name[-5:] for test in others] == ["three"]


def test_a_fault_changes_one_line_and_leaves_a_program(source: Path) -> None:
    from faults import Places, is_program

    for place in Places(source).find():
        for fault in place:
            changed = fault.apply(SOURCE).splitlines()
            pairs = zip(SOURCE.splitlines(), changed, strict=True)
            assert [number for number, (old, new) in enumerate(pairs, 1) if old != new] == [fault.line]
            assert is_program(fault)


def test_a_seed_chooses_the_same_faults_again_and_another_seed_others(source: Path) -> None:
    from faults import choose

    assert choose([source], 6, 1) == choose([source], 6, 1)
    assert len({tuple(choose([source], 6, seed)) for seed in range(5)}) > 1
    lines = [fault.line for fault in choose([source], 6, 0)]
    assert lines == sorted(lines)
    with pytest.raises(ValueError, match="100 faults are asked for"):
        choose([source], 100, 0)


def test_each_mutant_that_is_listed_as_equivalent_can_still_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of the list that fails here is about code that has changed: say anew whether it is one, or take it out."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.chdir(SCRIPTS.parent)
    from equivalent_mutants import faults_of, read_list

    assert [mutant for mutant, fault in faults_of(read_list()) if fault is None] == []


@pytest.mark.parametrize(
    ("after", "why"),
    [("self.size = 1", ""), ("self.size  = by", "because")],
    ids=["no reason", "twice"],
)
def test_a_mutant_is_listed_once_and_with_a_reason(after: str, why: str, source: Path, tmp_path: Path) -> None:
    from equivalent_mutants import Mutant, read_list
    from faults import Places

    [fault] = [fault for place in Places(source).find() for fault in place if fault.text.strip() == "self.size -= by"]
    mutant = Mutant.of(fault, SOURCE)
    assert (mutant.function, mutant.before, mutant.after) == ("Box.grow", "self.size += by", "self.size -= by")
    entry = f'[[mutant]]\nfile="a.py"\nfunction="f"\nbefore="x"\nafter="{after}"\nreason="{why}"\n'
    listed = tmp_path / "list.toml"
    listed.write_text(entry * 2)
    with pytest.raises(ValueError, match="twice" if why else "without a reason"):
        read_list(listed)
    if why:
        listed.write_text(entry)
        assert read_list(listed) == {Mutant("a.py", "f", "x", after): why}


def test_a_record_is_kept_until_something_that_its_test_imports_has_changed(source: Path, tmp_path: Path) -> None:
    from reaching_tests import ImportGraph

    files = {
        "src/diptych/a.py": "import diptych.b",
        "src/diptych/b.py": "",
        "src/diptych/c.py": "import diptych.a",
        "tests/helper.py": "from diptych import c",
        "tests/test_x.py": "import diptych.a",
        "tests/test_y.py": "import helper",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    graph = ImportGraph(tmp_path)
    assert {str(path) for path in graph.behind(Path("tests/test_x.py"))} == {
        "tests/test_x.py", "src/diptych/a.py", "src/diptych/b.py",
    }  # fmt: skip
    assert {str(path) for path in graph.behind(Path("tests/test_y.py"))} == files.keys() - {"tests/test_x.py"}
