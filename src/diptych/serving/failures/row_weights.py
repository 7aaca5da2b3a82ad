"""How much the rows of each core refer to, and when they were written: what RecentRows asks."""

from diptych.control.cluster.cluster_events import Arrived, Reported
from diptych.control.events import KVEvents, KVSnapshot
from diptych.control.recent_rows import ROW_WEIGHT, Row
from diptych.control.request import BlockTables

TIMELESS = frozenset(("ahead", "configure", "rescale", "observe"))  # rows of an engine without a time


def time_of_event(row: Row) -> int | None:
    """Of the row of a cluster or a planner."""
    return int(row[0])


def time_of_input(row: Row) -> int | None:
    """Of the row of an engine."""
    return None if row[0] in TIMELESS else int(row[1])


def weigh_cluster_row(row: Row) -> int:
    """Of a RecordingClusterCore."""
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
    """Of a RecordingEngineCore."""
    kind = row[0]
    if kind == "begin":
        output = row[2]
        if output is None:
            return 0
        weight = len(output.new_blocks) + len(output.finished) + len(output.paused) + len(output.extra_rows)
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
    """Of a RecordingPlannerCore."""
    return ROW_WEIGHT * len(row[2])
