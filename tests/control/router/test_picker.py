"""Picking by load alone."""

import pytest

from diptych.control.errors import ConfigError
from diptych.control.router.picker import PICKERS, Picker, PickerName


@pytest.mark.parametrize("kind", PICKERS)
def test_a_picker_uses_all_that_are_up_and_none_that_is_not(kind: PickerName) -> None:
    picker = Picker(kind, 4, seed=3)
    picker.set_up(2, False)
    picks = [picker.pick() for _ in range(60)]
    assert set(picks) == {0, 1, 3}
    for pick in picks:
        assert pick is not None
        picker.ended(pick)
    picker.set_up(2, True)
    assert 2 in [picker.pick() for _ in range(20)]
    for worker in range(4):
        picker.set_up(worker, False)
    assert picker.pick() is None


def test_an_unknown_way_of_picking_is_refused() -> None:
    with pytest.raises(ConfigError, match="round_robin"):
        Picker("nearest", 2)  # type: ignore[arg-type]
