"""The modules of this folder are found by their names."""

import sys
from pathlib import Path

import pytest

from diptych.serving.api import responses

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front waits long for what an engine says first: on a busy machine a refusal may take more than a second, and
    would be one in a stream."""
    monkeypatch.setattr(responses, "OPEN_AFTER_S", 60.0)
