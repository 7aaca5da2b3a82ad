"""A PlannerCore that records its inputs and its decisions, so that a later run can be compared with it.

    row = (now, event class, event)                     an event that brought no commands
    row = (now, event class, event, digest, words)      digest: of all commands so far; words: of these, for people

Rows hold counts, ids and times. They begin with the first request: nothing is decided before it.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from diptych.control.planner.planner_config import PlannerConfig
from diptych.control.planner.planner_core import PlannerCore
from diptych.control.planner.planner_events import AskTwin, Decided, PlannerCommand, PlannerEvent

Row = tuple[Any, ...]

PLANNER_FORMAT, PLANNER_VERSION = "diptych planner recording", 2
DIGEST_BYTES = 12


class RecordingPlannerCore(PlannerCore):
    """A PlannerCore that hands (now, event, its commands) to ``write``, which must return at once and must not raise.
    The objects are immutable and may be read later, on another thread."""

    def __init__(self, config: PlannerConfig, write: Callable[[Row], None]) -> None:
        super().__init__(config)
        self._write = write

    def on_event(self, event: PlannerEvent, now: int) -> list[PlannerCommand]:
        commands = super().on_event(event, now)
        self._write((now, event, tuple(commands)))
        return commands


class PlannerRowEncoder:
    """Rows as they are written, in the order of their events."""

    def __init__(self) -> None:
        self._digest = b""

    def encode(self, row: Row) -> Row:
        """What RecordingPlannerCore wrote, as data."""
        now, event, commands = row
        encoded = (now, type(event).__name__, event)
        return (*encoded, self.add(commands), planner_words(commands)) if commands else encoded

    def add(self, commands: Sequence[PlannerCommand]) -> bytes:
        """The digest of all commands after these."""
        text = self._digest + repr(list(commands)).encode()
        self._digest = blake2b(text, digest_size=DIGEST_BYTES).digest()
        return self._digest


def planner_words(commands: Sequence[PlannerCommand]) -> tuple[str, ...]:
    """Each command, shortened."""
    return tuple(_words(command) for command in commands)


def _words(command: PlannerCommand) -> str:
    if isinstance(command, AskTwin):
        question = command.question
        return f"asks question {question.number}: {', '.join(layout.label for layout in question.candidates)}"
    if isinstance(command, Decided):
        decision = command.decision
        return f"{decision.verdict}: {decision.present} to {decision.chosen}: {decision.reason}"
    return repr(command)


def planner_header(config: PlannerConfig) -> dict[str, Any]:
    """The first line of a recording."""
    return {"format": PLANNER_FORMAT, "version": PLANNER_VERSION, "config": config}
