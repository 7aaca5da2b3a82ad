"""A file as an Observation: a recording of a worker, or saved records of a timeline.

A recording is decided again: its events are those of the worker, with times. Requests arrive when the worker got them:
what the front end did before is not in it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from diptych.control.engine.recording import FORMAT
from diptych.control.errors import ConfigError
from diptych.control.events import Event, HandoffDelivered, StepFinished
from diptych.control.fleet_settings import FleetSettings, WorkerSettings
from diptych.diagnosis.adapters.diptych_server import records_of_file
from diptych.diagnosis.adapters.timeline_records import TimelineSource, observe
from diptych.diagnosis.observation import Missing, Observation
from diptych.simulation.recordings import recording_format
from diptych.simulation.replay import replay
from diptych.timeline.records import Record
from diptych.timeline.ring import Timeline, Transfer


def records_of(events: Iterable[tuple[int, Event]], roles: Mapping[int, str]) -> list[Record]:
    """(worker, event) in order of time become records. Events of the front end (worker -1) are left out."""
    kept = [(worker, single) for worker, event in events if worker >= 0 for single in _single(event)]
    chunks = sum(len(event.prefills) for _, event in kept if isinstance(event, StepFinished))
    timeline = Timeline(2 * len(kept) + chunks + len(roles) + 1)
    for worker, role in sorted(roles.items()):
        timeline.on_worker(worker, "ready", 0, role=role)
    for worker, event in kept:
        timeline.on_events(worker, [event])
        if isinstance(event, HandoffDelivered):
            start_ns, end_ns = event.time_ns - event.transfer_ns, event.time_ns
            timeline.on_transfer(
                Transfer(event.request_id, -1, worker, event.num_bytes, start_ns, end_ns, event.transfer_ns)
            )
    return timeline.since(0)


def _single(event: Event) -> Iterator[Event]:
    """A run of decode steps as steps of equal lengths."""
    if not isinstance(event, StepFinished) or event.num_steps == 1:
        yield event
        return
    duration, count = event.end_ns - event.start_ns, event.num_steps
    for index in range(count):
        yield replace(
            event,
            step_id=event.step_id + index,
            start_ns=event.start_ns + duration * index // count,
            end_ns=event.start_ns + duration * (index + 1) // count,
            decode_context=event.decode_context + index * event.num_decodes,
            num_steps=1,
        )


FRONT_END = Missing(("front_end", "healthy"), "what the front end did (a timeline has it)")


class RecordedFile:
    """A Reader of one recording."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def observe(self) -> Observation:
        """The observation of the whole file. Raises ConfigError for a file of another kind."""
        kind = recording_format(self._path)
        if kind == FORMAT:
            return self._recording()
        if kind:
            message = f"{self._path} is a {kind}; give the recording of a worker (it has the number of the worker)"
            raise ConfigError(message, param="sources")
        try:
            records = records_of_file(self._path.read_bytes())
        except (ValueError, AttributeError, TypeError, KeyError, msgspec.ValidationError) as error:
            message = f"{self._path} is neither a recording nor the records of a timeline: {error}"
            raise ConfigError(message, param="sources") from None
        return observe(records, TimelineSource(source=str(self._path)))

    def _recording(self) -> Observation:
        events: list[Event] = []
        report = replay(self._path, events.extend)
        if report.difference is not None:
            message = f"{self._path} cannot be decided again (line {report.difference.line}): diptych replay says why"
            raise ConfigError(message, param="sources")
        config = report.config
        settings = FleetSettings(report.diptych, str(self._path), (WorkerSettings(0, "both", config, report.terms_ns),))
        about = TimelineSource(
            source=str(self._path), version=report.diptych, settings=settings, slo=config.slo, missing=(FRONT_END,)
        )
        return observe(records_of(((0, event) for event in events), {0: "both"}), about)
