"""A file as an Observation: a recording of a worker, or saved records of a timeline.

A recording is decided again: its events are those of the worker, with times. Requests arrive when the worker got them:
what the front end did before is not in it.
"""

from pathlib import Path

import msgspec

from diptych.control.engine.recording import FORMAT
from diptych.control.errors import ConfigError
from diptych.control.events import Event
from diptych.control.fleet_settings import FleetSettings, WorkerSettings
from diptych.diagnosis.adapters.diptych_server import records_of_file
from diptych.diagnosis.adapters.event_records import records_of
from diptych.diagnosis.adapters.timeline_records import TimelineSource, observe
from diptych.diagnosis.observation import Missing, Observation
from diptych.simulation.recordings import recording_format
from diptych.simulation.replay import replay

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
