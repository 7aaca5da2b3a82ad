"""Replay of a planner: a fresh PlannerCore gets the events that a live one got, and must give the same commands."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from diptych.control.planner.planner_config import PlannerConfig
from diptych.control.planner.planner_core import PlannerCore
from diptych.control.planner.planner_events import PLANNER_EVENT_CLASSES, PlannerEvent
from diptych.control.planner.planner_recording import (
    PLANNER_FORMAT,
    PLANNER_VERSION,
    PlannerRowEncoder,
    planner_words,
)
from diptych.simulation.recordings import read_recording
from diptych.simulation.replay import Difference


@dataclass(slots=True)
class PlannerReplayReport:
    """What came out. num_events: of the recording; num_decisions: those that brought commands. is_complete: the
    recording has its closing line."""

    path: Path
    diptych: str
    config: PlannerConfig
    num_events: int = 0
    num_decisions: int = 0
    is_complete: bool = False
    difference: Difference | None = None


def replay_planner(path: str | Path) -> PlannerReplayReport:
    """Give a fresh PlannerCore the events of the recording, and compare all commands; ends at the first difference.
    Raises ConfigError when the file is no recording of a planner."""
    recording = read_recording(Path(path), {PLANNER_FORMAT: (PLANNER_VERSION,)})
    config = msgspec.convert(recording.header["config"], PlannerConfig)
    report = PlannerReplayReport(recording.path, recording.diptych, config)
    core, encoder = PlannerCore(config), PlannerRowEncoder()
    for line, row in enumerate(recording.rows(), 2):
        if row[0] == "closed":
            report.is_complete = True
            continue
        now, name, fields, *decision = row
        report.num_events += 1
        event: PlannerEvent = msgspec.convert(fields, PLANNER_EVENT_CLASSES[name])
        commands = core.on_event(event, now)
        report.num_decisions += bool(commands)
        actual = msgspec.to_builtins(encoder.add(commands)) if commands else None
        expected, words = decision or (None, ())
        if actual != expected:
            recorded, here = "; ".join(words) or "no commands", "; ".join(planner_words(commands)) or "no commands"
            text = "other commands" if recorded != here else "the same commands, with other details"
            report.difference = Difference(line, now, recorded, here, f"after {name}: {text}")
            break
    return report
