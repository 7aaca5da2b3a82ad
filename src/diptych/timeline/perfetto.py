"""The document that Perfetto and chrome://tracing open, around trace events that are drawn.

Owns the order of the events, the names of the tracks and the frame. One process per replica.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from diptych.timeline.lanes import FAULTS_LANE, STEPS_LANE, WHOLE, TraceEvent


def document(drawn: Iterable[TraceEvent], names: Mapping[int, str], about: Mapping[str, Any]) -> TraceEvent:
    """The whole trace as plain data. drawn: in order (see ``place_of``); names: of replicas, by their numbers."""
    events = list(drawn)
    shown = {one["pid"] - 1 for one in events}
    with_faults = {one["pid"] - 1 for one in events if one.get("tid") == FAULTS_LANE}
    heads = titles({replica: names[replica] for replica in shown}, with_faults)
    return {"traceEvents": heads + events, **frame(about)}


def frame(about: Mapping[str, Any]) -> dict[str, Any]:
    """What stands beside the trace events."""
    return {"displayTimeUnit": "ms", "otherData": dict(about)}


def place_of(event: TraceEvent) -> tuple[float, int, int]:
    """The sort key: time; at one time inner slices end before outer ones, and outer ones begin before inner ones."""
    is_whole = event["name"] == WHOLE
    rank = {"e": 1 if is_whole else 0, "b": 2 if is_whole else 3}.get(event["ph"], 3)
    return event["ts"], event["pid"], rank


def titles(names: Mapping[int, str], with_faults: Iterable[int] = ()) -> list[TraceEvent]:
    """The names of the replicas and of their tracks. with_faults: replicas that have a track for faults."""
    faulty = set(with_faults)
    entries: list[TraceEvent] = []
    for replica, name in sorted(names.items()):
        entries += [
            _meta(replica, "process_name", {"name": name}),
            _meta(replica, "process_sort_index", {"sort_index": replica + 1}),
            _meta(replica, "thread_name", {"name": "steps"}, STEPS_LANE),
        ]
        if replica in faulty:
            entries.append(_meta(replica, "thread_name", {"name": "faults"}, FAULTS_LANE))
    return entries


def _meta(replica: int, kind: str, value: dict[str, Any], tid: int = 0) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": replica + 1, "tid": tid, "ts": 0, "args": value}
