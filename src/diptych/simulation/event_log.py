"""The log of a simulation: every event of every replica, in order, in one canonical form.

Decode steps in a row with the same batch and nothing between them on their replica are one record, whether they were
simulated one by one or all at once; so equal runs give equal bytes.
"""

from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b

import msgspec

from diptych.control.events import BlocksEvicted, BlocksStored, Event, StepFinished


class EventLog:
    """Events of many replicas (-1: the front end), in order of time, then of replica, then of being reported."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, Event]] = []
        self._runs: dict[int, StepFinished] = {}  # replica -> its decode steps that may still go on
        self._is_sorted = True

    def __len__(self) -> int:
        return len(self._entries) + len(self._runs)

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        if self._runs or not self._is_sorted:
            for replica in sorted(self._runs):
                self._entries.append((replica, self._runs[replica]))
            self._runs.clear()
            self._entries.sort(key=_place)
            self._is_sorted = True
        return iter(self._entries)

    def extend(self, replica: int, events: list[Event]) -> None:
        """``replica`` reports these events."""
        for event in events:
            if type(event) is StepFinished:
                self._add_step(replica, event)
            else:
                self._entries.append((replica, event))
        self._is_sorted = False

    def _add_step(self, replica: int, step: StepFinished) -> None:
        """A run of decode steps is written down when another step follows it."""
        run = self._runs.pop(replica, None)
        is_decode = step.num_decodes > 0 and not step.prefills
        if run is not None:
            follows = run.end_ns == step.start_ns and run.step_id + run.num_steps == step.step_id
            if is_decode and follows and run.num_decodes == step.num_decodes:
                self._runs[replica] = replace(run, end_ns=step.end_ns, num_steps=run.num_steps + step.num_steps)
                return
            self._entries.append((replica, run))
        if is_decode:
            self._runs[replica] = step
        else:
            self._entries.append((replica, step))

    def lines(self) -> Iterator[bytes]:
        """One JSON array a line: [replica, kind of event, its fields]."""
        encoder = msgspec.json.Encoder()
        for replica, event in self:
            yield encoder.encode((replica, type(event).__name__, _plain(event))) + b"\n"

    def digest(self) -> str:
        """A fingerprint of the whole log (hexadecimal)."""
        digest = blake2b(digest_size=16)
        for line in self.lines():
            digest.update(line)
        return digest.hexdigest()


def _place(entry: tuple[int, Event]) -> tuple[int, int]:
    replica, event = entry
    return event.end_ns if isinstance(event, StepFinished) else event.time_ns, replica


def _plain(event: Event) -> object:
    if isinstance(event, BlocksStored | BlocksEvicted):
        return {"time_ns": event.time_ns, "hashes": [block.hex() for block in event.hashes]}
    return event
