"""Cores that keep their newest inputs, and the file that each leaves when it fails: the recordings of recorder.py, of
the last seconds.
"""

from collections.abc import Callable
from pathlib import Path

from diptych.control.cluster import cluster_recording
from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.config import EngineConfig
from diptych.control.planner import planner_recording
from diptych.control.planner.planner_config import PlannerConfig
from diptych.control.recent_rows import RecentRows, Row
from diptych.serving.failures.failure_recording import write_failure
from diptych.serving.failures.row_weights import (
    time_of_event,
    time_of_input,
    weigh_cluster_row,
    weigh_engine_row,
    weigh_planner_row,
)
from diptych.serving.link.recorder import Recorder, engine_encoder, engine_header

Write = Callable[[Row], None]


def written_to(recent: RecentRows, recorder: Recorder | None) -> tuple[Write, Write]:
    """Where the rows of a core go, and those that refer to nothing: into memory, and into its recording, if there is
    one."""
    if recorder is None:
        return recent.write, recent.write_light

    def both(keep: Write) -> Write:
        def write(row: Row) -> None:
            recorder.write(row)
            keep(row)

        return write

    return both(recent.write), both(recent.write_light)


def recent_of_cluster() -> RecentRows:
    """The recent rows of a RecordingClusterCore."""
    return RecentRows(weigh_cluster_row, time_of_event)


def recent_of_engine() -> RecentRows:
    """The recent rows of a RecordingEngineCore."""
    return RecentRows(weigh_engine_row, time_of_input)


def recent_of_planner() -> RecentRows:
    """The recent rows of a RecordingPlannerCore."""
    return RecentRows(weigh_planner_row, time_of_event)


def cluster_failure(
    folder: Path, core: str, error: BaseException, config: ClusterConfig, recent: RecentRows | None
) -> str:
    """Write what a ClusterCore leaves. Returns the path ("": it could not be written)."""
    encoder = cluster_recording.RowEncoder()
    return write_failure(folder, core, error, recent, cluster_recording.header(config), encoder.encode)


def engine_failure(
    folder: Path, core: str, error: BaseException, config: EngineConfig, recent: RecentRows | None
) -> str:
    """The same of an EngineCore."""
    return write_failure(folder, core, error, recent, engine_header(config), engine_encoder())


def planner_failure(
    folder: Path, core: str, error: BaseException, config: PlannerConfig, recent: RecentRows | None
) -> str:
    """The same of a PlannerCore."""
    encoder = planner_recording.PlannerRowEncoder()
    return write_failure(folder, core, error, recent, planner_recording.planner_header(config), encoder.encode)
