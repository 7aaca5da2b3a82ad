"""Cores that keep their newest inputs, and the file that each leaves when it fails: the recordings of recorder.py, of
the last seconds.
"""

from collections.abc import Callable
from pathlib import Path

from diptych.control.cluster import cluster_recording
from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.cluster.cluster_events import Arrived, Reported
from diptych.control.config import EngineConfig
from diptych.control.events import KVEvents, KVSnapshot
from diptych.control.planner import planner_recording
from diptych.control.planner.planner_config import PlannerConfig
from diptych.control.recent_rows import ROW_WEIGHT, RecentRows, Row
from diptych.control.request import BlockTables
from diptych.serving.failures.failure_recording import write_failure
from diptych.serving.link.recorder import Recorder, engine_encoder, engine_header

TIMELESS = frozenset(("ahead", "configure", "rescale", "observe"))  # rows of an engine without a time


def time_of_event(row: Row) -> int | None:
    """Time of a row of a cluster or a planner, in nanoseconds; None if it has none."""
    return int(row[0])


def time_of_input(row: Row) -> int | None:
    """Time of a row of an engine, in nanoseconds; None if it has none."""
    return None if row[0] in TIMELESS else int(row[1])


def weigh_cluster_row(row: Row) -> int:
    """Weight of a row of a RecordingClusterCore."""
    event, commands = row[1], row[2]
    weight = ROW_WEIGHT * len(commands)
    if isinstance(event, Reported):
        weight += ROW_WEIGHT * len(event.events)
        for happened in event.events:
            if isinstance(happened, KVEvents):
                weight += len(happened.stored) + len(happened.evicted)
            elif isinstance(happened, KVSnapshot):
                weight += len(happened.hashes)
    elif isinstance(event, Arrived):
        weight += len(event.submission.hashes)
    return weight


def weigh_engine_row(row: Row) -> int:
    """Weight of a row of a RecordingEngineCore."""
    kind = row[0]
    if kind == "begin":
        output = row[2]
        if output is None:
            return 0
        weight = len(output.new_blocks) + len(output.finished) + len(output.paused) + len(output.verify_rows)
        if output.prefills:
            weight += sum(ROW_WEIGHT + _num_blocks(chunk.block_tables) for chunk in output.prefills)
            weight += len(output.block_copies)
        if output.resumed:
            weight += sum(ROW_WEIGHT + _num_blocks(member.block_tables) for member in output.resumed)
        if output.swap_out or output.swap_in:
            weight += len(output.swap_out) + len(output.swap_in)
        return weight
    if kind in ("add", "reserve"):
        return len(row[2][3])
    if kind == "end":
        return sum(len(part) for part in (*row[3:6], *row[7:]))
    if kind == "tier":
        return len(getattr(row[3], "added", ())) + len(getattr(row[3], "removed", ()))
    return 0


def _num_blocks(tables: BlockTables) -> int:
    return sum([len(block_ids) for block_ids in tables])


def weigh_planner_row(row: Row) -> int:
    """Weight of a row of a RecordingPlannerCore."""
    return ROW_WEIGHT * len(row[2])


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
