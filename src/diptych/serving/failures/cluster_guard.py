"""The ClusterCore of a server as one that may fail: its newest inputs are kept, and its failure is final.

Nothing can replace a ClusterCore within its process: what workers hold, what clients have and what the core believed
would have to be brought together again, by code that has just failed. The process ends, and is started anew.
"""

import logging
from pathlib import Path

from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.cluster.cluster_core import ClusterCore
from diptych.control.cluster.cluster_events import ClusterEvent
from diptych.control.cluster.cluster_recording import RecordingClusterCore
from diptych.control.errors import CoreFailedError
from diptych.serving.failures.failure_board import FailureBoard
from diptych.serving.failures.failure_recording import error_words
from diptych.serving.failures.recorded_cores import cluster_failure, recent_of_cluster, written_to
from diptych.serving.link.recorder import Recorder, record_cluster

logger = logging.getLogger(__name__)

CORE = "the cluster core"


class ClusterGuard:
    """Makes the core, and reports its failure to the board. folder: for what it leaves."""

    def __init__(self, board: FailureBoard, folder: Path) -> None:
        self._board = board
        self._folder = folder
        self._recent = recent_of_cluster()
        self._config = ClusterConfig()

    def make_core(self, config: ClusterConfig, path: Path | None) -> tuple[ClusterCore, Recorder | None]:
        """A core, and what it is recorded with in this file (None: only its last seconds are kept)."""
        self._config = config
        recorder = None if path is None else record_cluster(path, config)
        return RecordingClusterCore(config, *written_to(self._recent, recorder)), recorder

    def note_unfinished(self, event: ClusterEvent, now: int) -> None:
        """The core has failed over this event, and so has not recorded it."""
        self._recent.write((now, event, ()))

    def leave(self, core: str, error: BaseException) -> str:
        """Write down what the core was given last. core: what has failed. Returns the path, or ""."""
        return cluster_failure(self._folder, core, error, self._config, self._recent)

    def report(self, where: str, error: BaseException) -> CoreFailedError:
        """The core, or what drives it, has failed. Returns the error with which its requests end."""
        if self._board.final is not None:  # a consequence, maybe
            return self._board.final.exception()
        logger.error("%s has failed at %s", CORE, where, exc_info=error)
        recording = self.leave(CORE, error)
        return self._board.report(CORE, f"{error_words(error)} (at {where})", recording, is_final=True).exception()
