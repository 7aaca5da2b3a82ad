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
    }


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
