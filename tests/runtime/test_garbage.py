"""The garbage collector pauses while a process starts, and works when it serves."""

import gc

import pytest

from diptych.runtime.device.garbage import leave_alone_what_is_loaded, without_collections


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What concerns all objects of this process does not happen."""
    for name in ("collect", "freeze", "set_threshold"):
        monkeypatch.setattr(gc, name, lambda *_: None)


def test_a_pause_ends_with_its_block_whatever_happens_there() -> None:
    with pytest.raises(ValueError), without_collections():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()


def test_a_pause_ends_when_all_is_loaded() -> None:
    with without_collections():
        leave_alone_what_is_loaded()
        assert gc.isenabled()
    assert gc.isenabled()


def test_a_program_that_does_without_the_collector_is_left_without() -> None:
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
