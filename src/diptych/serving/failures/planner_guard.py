"""The planner's core as one that may fail: it is recorded, and replaced by a fresh one, which learns the load anew.

No request hangs on it: serving goes on meanwhile, with the fleet as it is.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diptych.control.planner.planner_core import PlannerCore
from diptych.control.planner.planner_observer import PlannerObserver
from diptych.control.recent_rows import RecentRows
from diptych.serving.failures.failure_board import FailureBoard
from diptych.serving.failures.failure_recording import error_words
from diptych.serving.failures.recorded_cores import planner_failure
from diptych.serving.failures.restart_pause import RestartPause

logger = logging.getLogger(__name__)

CORE = "the planner"


@dataclass(frozen=True, slots=True)
class PlannerParts:
    """A core, what tells it of the cluster, and its newest inputs (None: they are not kept)."""

    planner: PlannerCore
    watch: PlannerObserver
    recent: RecentRows | None = None


class PlannerGuard:
    """Makes the parts, the first ones and their replacements, and reports failures to the board."""

    def __init__(self, make: Callable[[], PlannerParts], board: FailureBoard, folder: Path) -> None:
        self.make = make
        self._board = board
        self._folder = folder
        self._pause = RestartPause()

    def on_failure(self, parts: PlannerParts, error: BaseException) -> float:
        """These have failed. Returns for how many seconds there are none."""
        logger.error("%s has failed", CORE, exc_info=error)
        recording = planner_failure(self._folder, CORE, error, parts.planner.config, parts.recent)
        self._board.report(CORE, error_words(error), recording)
        return self._pause.next_s()

    def replacement(self) -> PlannerParts:
        """New ones."""
        parts = self.make()
        self._pause.begun()
        self._board.replaced(CORE)
        return parts
