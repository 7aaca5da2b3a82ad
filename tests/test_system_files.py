"""Files that are not read for a selection by marks hold nothing that it asks for."""

from pathlib import Path

import pytest

from tests.system_files import can_hold, is_left_out

UNIT, SYSTEM = "not slow and not system", "not slow and system"
PLAIN = "def test_a(tmp_path): ...\n"
MARKED = "@pytest.mark.system\ndef test_a(): ...\n\ndef test_b(): ...\n"
STARTED = "def test_a(\n    name: str,\n    fake: RunningServer\n) -> None: ...\n"
WHOLE = "pytestmark = [pytest.mark.asyncio, pytest.mark.system]\ndef test_a(): ...\n"


@pytest.mark.parametrize(
    ("text", "asked", "is_out"),
    [
        (PLAIN, UNIT, False),
        (PLAIN, SYSTEM, True),
        (PLAIN, "slow", False),
        (PLAIN, "", False),
        (MARKED, UNIT, False),
        (MARKED, SYSTEM, False),
        (STARTED, UNIT, False),
        (STARTED, SYSTEM, False),
        (WHOLE, UNIT, True),
        (WHOLE, SYSTEM, False),
        (WHOLE, "slow", False),
    ],
)
def test_a_file_is_left_out_where_no_test_of_it_can_be_asked_for(
    text: str, asked: str, is_out: bool, tmp_path: Path
) -> None:
    path = tmp_path / "test_x.py"
    path.write_text(text)
    assert is_left_out(path, asked) is is_out


@pytest.mark.parametrize(
    ("expression", "of_system", "of_others"),
    [
        ("not slow and not system", False, True),
        ("system", True, False),
        ("slow or (cuda and system)", True, True),
        ("slow and (cuda and system)", True, False),
        ("law(weight=2.0)", True, True),
        ("not a sentence at all", True, True),
    ],
)
def test_an_expression_can_hold_for_some_tests_or_for_none(expression: str, of_system: bool, of_others: bool) -> None:
    assert can_hold(expression, is_system=True) is of_system
    assert can_hold(expression, is_system=False) is of_others
