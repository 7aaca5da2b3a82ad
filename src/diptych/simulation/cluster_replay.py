"""Replay of a front end: a fresh ClusterCore gets the events that a live one got, and must give the same commands."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.cluster.cluster_core import ClusterCore
from diptych.control.cluster.cluster_events import CLUSTER_EVENT_CLASSES, ClusterEvent, Reported
from diptych.control.cluster.cluster_recording import CLUSTER_FORMAT, CLUSTER_VERSION, CommandChain, commands_summary
from diptych.control.engine.reports import LoadReport
from diptych.control.errors import ConfigError
from diptych.control.events import EVENT_CLASSES, HandoffReserved
from diptych.simulation.recordings import read_recording
from diptych.simulation.replay import Difference


@dataclass(slots=True)
class ClusterReplayReport:
    """What came out. num_events: of the recording; num_decisions: those that brought commands. is_complete: the
    recording has its closing line."""

    path: Path
    diptych: str
    config: ClusterConfig
    num_events: int = 0
    num_decisions: int = 0
    is_complete: bool = False
    difference: Difference | None = None

    @property
    def is_identical(self) -> bool:
        """Whether every decision was the same."""
        return self.difference is None


def replay_cluster(path: str | Path) -> ClusterReplayReport:
    """Give a fresh ClusterCore the events of the recording, and compare all commands; ends at the first difference.

    Raises ConfigError when the file is no recording, or of a fleet with settings that are no more (its routing).
    """
    recording = read_recording(Path(path), {CLUSTER_FORMAT: (1, CLUSTER_VERSION)})
    try:
        config = msgspec.convert(recording.header["config"], ClusterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} has settings that cannot be replayed: {error}", param="path") from None
    report = ClusterReplayReport(recording.path, recording.diptych, config)
    core, chain = ClusterCore(report.config), CommandChain()
    for line, row in enumerate(recording.rows(), 2):
        if row[0] == "closed":
            report.is_complete = True
            continue
        now, name, fields, *decision = row
        report.num_events += 1
        happened = _event(name, fields)
        try:
            commands = core.on_event(happened, now)
        except Exception as error:
            text = f"after {name}: the front end could not take it: {type(error).__name__}: {error}"
            report.difference = Difference(line, now, _words(decision[1] if decision else ()), text, text)
            break
        actual = msgspec.to_builtins(chain.add(commands)) if commands else None
        report.num_decisions += bool(commands)
        expected, summary = decision or (None, ())
        if actual != expected:
            words, here = _words(summary), _words(commands_summary(commands))
            if recording.failure and line == len(recording.lines) - 1:
                words = f"the failure: {recording.failure}"
            text = "other commands" if words != here else "the same commands, with other details"
            report.difference = Difference(line, now, words, here, f"after {name}: {text}")
            break
    return report


def _event(name: str, fields: Any) -> ClusterEvent:
    if name != Reported.__name__:
        event: ClusterEvent = msgspec.convert(fields, CLUSTER_EVENT_CLASSES[name], str_keys=True)
        return event
    worker, events, load = fields
    for kind, values in events:
        if kind == HandoffReserved.__name__ and "block_ids" in values:  # version 1
            values["block_tables"] = [values["block_ids"]] if values["block_ids"] else []
    happened = [msgspec.convert(values, EVENT_CLASSES[kind]) for kind, values in events]
    return Reported(worker, happened, None if load is None else msgspec.convert(load, LoadReport))


def _words(summary: Any) -> str:
    named = ", ".join(" ".join(str(part) for part in command if part not in (-1, "")) for command in summary)
    return named or "no commands"
