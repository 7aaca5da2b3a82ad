"""The document that Perfetto and chrome://tracing open, around trace events that are drawn.

Owns the order of the events, the names of the tracks and the frame. One process per worker.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from diptych.timeline.lanes import FAULTS_LANE, STEPS_LANE, WHOLE, TraceEvent


def document(drawn: Iterable[TraceEvent], names: Mapping[int, str], about: Mapping[str, Any]) -> TraceEvent:
    """The whole trace as plain data. drawn: in order (see ``place_of``); names: of workers, by their numbers."""
    events = list(drawn)
    shown = {event["pid"] - 1 for event in events}
    with_faults = {event["pid"] - 1 for event in events if event.get("tid") == FAULTS_LANE}
    heads = titles({worker: names[worker] for worker in shown}, with_faults)
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
    """The names of the workers and of their tracks. with_faults: workers that have a track for faults."""
    faulty = set(with_faults)
    entries: list[TraceEvent] = []
    for worker, name in sorted(names.items()):
        entries += [
            _meta(worker, "process_name", {"name": name}),
            _meta(worker, "process_sort_index", {"sort_index": worker + 1}),
            _meta(worker, "thread_name", {"name": "steps"}, STEPS_LANE),
        ]
        if worker in faulty:
            entries.append(_meta(worker, "thread_name", {"name": "faults"}, FAULTS_LANE))
    return entries


def _meta(worker: int, kind: str, value: dict[str, Any], tid: int = 0) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": worker + 1, "tid": tid, "ts": 0, "args": value}
