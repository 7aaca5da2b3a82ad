"""The log of a simulation: every event of every worker, in order, in one canonical form.

Decode steps in a row with the same batch and nothing between them on their worker are one record, whether they were
simulated one by one or all at once; so equal runs give equal bytes.
"""

from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b

import msgspec

from diptych.control.events import Event, KVEvents, StepFinished


class EventLog:
    """Events of many workers (-1: the front end), in order of time, then of worker, then of being reported."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, Event]] = []
        self._runs: dict[int, StepFinished] = {}  # worker -> its decode steps that may still go on
        self._is_sorted = True

    def __len__(self) -> int:
        return len(self._entries) + len(self._runs)

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        if self._runs or not self._is_sorted:
            for worker in sorted(self._runs):
                self._entries.append((worker, self._runs[worker]))
            self._runs.clear()
            self._entries.sort(key=_place)
            self._is_sorted = True
        return iter(self._entries)

    def extend(self, worker: int, events: list[Event]) -> None:
        """``worker`` reports these events."""
        for event in events:
            if type(event) is StepFinished:
                self._add_step(worker, event)
            else:
                self._entries.append((worker, event))
        self._is_sorted = False

    def _add_step(self, worker: int, step: StepFinished) -> None:
        """A run of decode steps is added to the log when another step follows it."""
        run = self._runs.pop(worker, None)
        is_decode = step.num_decodes > 0 and not step.prefills
        if run is not None:
            follows = run.end_ns == step.start_ns and run.step_id + run.num_steps == step.step_id
            is_plain = not (run.extra or step.extra)
            if is_decode and follows and is_plain and run.num_decodes == step.num_decodes:
                self._runs[worker] = replace(run, end_ns=step.end_ns, num_steps=run.num_steps + step.num_steps)
                return
            self._entries.append((worker, run))
        if is_decode:
            self._runs[worker] = step
        else:
            self._entries.append((worker, step))

    def lines(self) -> Iterator[bytes]:
        """One JSON array a line: [worker, kind of event, its fields]."""
        encoder = msgspec.json.Encoder()
        for worker, event in self:
            yield encoder.encode((worker, type(event).__name__, _plain(event))) + b"\n"

    def digest(self) -> str:
        """A fingerprint of the whole log (hexadecimal)."""
        digest = blake2b(digest_size=16)
        for line in self.lines():
            digest.update(line)
        return digest.hexdigest()


def _place(entry: tuple[int, Event]) -> tuple[int, int]:
    worker, event = entry
    return event.end_ns if isinstance(event, StepFinished) else event.time_ns, worker


def _plain(event: Event) -> object:
    if isinstance(event, KVEvents):
        hashes = {name: [block.hex() for block in getattr(event, name)] for name in ("stored", "evicted")}
        tier = {} if event.tier == "device" else {"tier": event.tier}
        return {"time_ns": event.time_ns, "sequence": event.sequence, **hashes, **tier}
    return event
