"""The live timeline: a bounded, numbered ring of what every worker did.

Owns the ring, the numbers and the readers. A reader cannot delay it: a reader is a number in the ring, and records that
were overwritten before it read them reach it as a gap. Holds no text (but requests' metadata), no tokens and no block
ids; costs an append per record. Times are the workers' own: CLOCK_MONOTONIC of this host, in nanoseconds.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from diptych.control.errors import ConfigError, OverloadedError
from diptych.control.events import Event, FirstToken, HandoffReserved, StepBegun, StepFinished
from diptych.timeline.records import (
    MAX_MESSAGE,
    AnswerRecord,
    Decoding,
    GapRecord,
    HeaderRecord,
    Milestone,
    Record,
    StepBegunRecord,
    StepRecord,
    TransferRecord,
    WorkerRecord,
    request_record,
    requests_of,
    split_attempt_id,
    step_begun_record,
    step_record,
)
from diptych.timeline.roster import Roster

VERSION = 1
CAPACITY = 100_000  # of the ring, in units: one a record, and one more for each chunk of a prompt in it
MAX_SUBSCRIBERS = 32
MAX_REMEMBERED = 4096  # handoffs that may be under way at once
RUNNING_STATES = ("ready", "draining")  # in any other state a worker holds no requests

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Transfer:
    """KV of one attempt travelled. start_ns: its first byte; exposed_ns: how much of the time was after the prefill."""

    attempt_id: str
    sender: int
    receiver: int
    num_bytes: int
    start_ns: int
    end_ns: int
    exposed_ns: int


class Timeline:
    """What the workers of one front end did. Fed by the fleet, read through ``subscribe`` and ``since``.

    At most ``capacity`` units (see CAPACITY) are held: 100,000 of them take about 40 MB with ids of 37 characters, half
    of them steps. Raises ConfigError for a capacity or a number of subscribers below 1.
    """

    def __init__(self, capacity: int = CAPACITY, max_subscribers: int = MAX_SUBSCRIBERS) -> None:
        for name, value in (("capacity", capacity), ("max_subscribers", max_subscribers)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1", param=name)
        self.capacity = capacity
        self.max_subscribers = max_subscribers
        self.run_id = f"{time.time_ns():x}"  # numbers of another run mean nothing here
        self.unix_ns_at_zero = time.time_ns() - time.monotonic_ns()
        self.first_sequence = 1  # of what is held
        self.next_sequence = 1
        self.is_closed = False
        self.workers: dict[int, WorkerRecord] = {}  # the newest of each
        self._slots: list[Record | None] = [None] * capacity  # record n in n % capacity
        self._weight = 0
        self._rosters: dict[int, Roster] = {}
        self._before: dict[int, dict[str, None]] = {}  # decode batches just before first_sequence
        self._receivers: dict[str, int] = {}  # attempt -> the worker that decodes it, of the newest handoffs
        self._first_tokens: dict[str, tuple[int, int]] = {}  # attempt -> where and when, of the newest
        self._subscriptions: set[Subscription] = set()

    def on_events(self, worker: int, events: Sequence[Event]) -> None:
        """What a worker's core reported, in its order, each event once; names in them are attempt ids. KV events are
        not kept."""
        roster = self._rosters.get(worker)
        if roster is None:
            roster = self._rosters[worker] = Roster()
        for event in events:
            if isinstance(event, StepFinished):
                self._append(step_record(self.next_sequence, worker, event, roster.step(event)))
            elif isinstance(event, StepBegun):
                self._append(step_begun_record(self.next_sequence, worker, event))
            elif isinstance(event, Milestone):
                self._follow(worker, event, roster)
                self._append(request_record(self.next_sequence, worker, event))

    def on_worker(
        self, worker: int, state: str, now: int, *, role: str = "", detail: str = "", computes_on: str = ""
    ) -> None:
        """A worker's state at ``now``: starting, ready, draining, lost, stopped. role: prefill, decode or both ("": as
        before). computes_on: see WorkerRecord."""
        known = self.workers.get(worker)
        role = role or (known.role if known else "")
        roster = self._rosters.setdefault(worker, Roster())
        left = () if state in RUNNING_STATES else requests_of(roster.clear())
        record = WorkerRecord(self.next_sequence, worker, now, state, role, detail[:MAX_MESSAGE], left, computes_on)
        self.workers[worker] = record
        self._append(record)

    def on_transfer(self, transfer: Transfer) -> None:
        """KV of an attempt has arrived."""
        request_id, epoch = split_attempt_id(transfer.attempt_id)
        self._append(
            TransferRecord(
                self.next_sequence,
                transfer.receiver,
                transfer.sender,
                request_id,
                transfer.num_bytes,
                transfer.start_ns,
                transfer.end_ns,
                transfer.exposed_ns,
                epoch,
            )
        )

    def on_answer(self, answer: AnswerRecord) -> None:
        """An answer has ended in the front end (its ``sequence`` is set here)."""
        self._append(msgspec.structs.replace(answer, sequence=self.next_sequence))

    def since(self, sequence: int, limit: int | None = None) -> list[Record]:
        """Records with larger numbers that are still held, oldest first."""
        first = max(sequence + 1, self.first_sequence)
        end = self.next_sequence if limit is None else min(self.next_sequence, first + limit)
        slots, capacity = self._slots, self.capacity
        return [record for at in range(first, end) if (record := slots[at % capacity]) is not None]

    def decoding_after(self, sequence: int) -> Decoding:
        """The decode batches after that record (or after those that were overwritten, whichever is later).

        Walks what is held up to it, but takes no time for the newest.
        """
        if sequence >= self.next_sequence - 1:
            return {
                worker: list(requests_of(tuple(roster.members))) for worker, roster in sorted(self._rosters.items())
            }
        batches = {worker: dict(members) for worker, members in self._before.items()}
        for record in self.since(0, max(0, sequence + 1 - self.first_sequence)):
            _apply(batches, record)
        return {worker: list(members) for worker, members in sorted(batches.items())}

    def header(self, sequence: int, now: int) -> HeaderRecord:
        """What a reader needs before the records that follow ``sequence``."""
        return HeaderRecord(
            VERSION,
            self.run_id,
            self.unix_ns_at_zero,
            now,
            self.first_sequence,
            self.next_sequence,
            {number: {"state": worker.state, "role": worker.role} for number, worker in sorted(self.workers.items())},
            self.decoding_after(sequence),
        )

    def subscribe(self, sequence: int | None = None) -> "Subscription":
        """A reader of all that comes after record ``sequence`` (None: after now). Close it.

        Raises OverloadedError when ``max_subscribers`` read already.
        """
        if len(self._subscriptions) >= self.max_subscribers:
            raise OverloadedError(
                f"{self.max_subscribers} clients read the timeline already (max_subscribers)", code="too_many_readers"
            )
        subscription = Subscription(self, self.next_sequence - 1 if sequence is None else sequence)
        self._subscriptions.add(subscription)
        return subscription

    def close(self) -> None:
        """Nothing more comes: readers end when they have read what there is."""
        self.is_closed = True

    def forget(self, subscription: "Subscription") -> None:
        """End a subscription: its place is free for another one."""
        self._subscriptions.discard(subscription)

    def _follow(self, worker: int, event: Milestone, roster: Roster) -> None:
        """Follow which requests decode where. The reports of a handoff's two workers may come in either order."""
        if isinstance(event, FirstToken):
            _remember(self._first_tokens, event.request_id, (worker, event.time_ns))
            if self._receivers.get(event.request_id, worker) == worker:
                roster.join(event.request_id, event.time_ns)
        elif isinstance(event, HandoffReserved):
            _remember(self._receivers, event.request_id, worker)
            sender, time_ns = self._first_tokens.get(event.request_id, (worker, 0))
            if sender != worker:
                self._rosters[sender].leave(event.request_id, time_ns)
        else:
            roster.note(event)

    def _append(self, record: Record) -> None:
        self._weight += _weight(record)
        while self._weight > self.capacity and self.first_sequence < record.sequence:  # the newest is always there
            self._drop_first()
        self._slots[record.sequence % self.capacity] = record
        self.next_sequence = record.sequence + 1

    def _drop_first(self) -> None:
        place = self.first_sequence % self.capacity
        record = self._slots[place]
        assert record is not None
        self._slots[place] = None
        self.first_sequence += 1
        self._weight -= _weight(record)
        _apply(self._before, record)


class Subscription:
    """One reader's place in the ring. ``workers``: only records of these are given (None: of all)."""

    def __init__(self, timeline: Timeline, sequence: int) -> None:
        self._timeline = timeline
        self.sequence = max(0, min(sequence, timeline.next_sequence - 1))  # of the newest record that it has passed
        self.workers: frozenset[int] | None = None

    def take(self, limit: int) -> list[Record | GapRecord]:
        """The next records, of at most ``limit`` that are passed; first a gap when some were overwritten."""
        timeline = self._timeline
        taken: list[Record | GapRecord] = []
        lost = timeline.first_sequence - 1
        if self.sequence < lost:
            taken.append(GapRecord(self.sequence + 1, lost, timeline.decoding_after(lost)))
            self.sequence = lost
        records = timeline.since(self.sequence, limit)
        self.sequence += len(records)
        workers = self.workers
        taken += records if workers is None else [record for record in records if _concerns(record, workers)]
        return taken

    @property
    def is_behind(self) -> bool:
        """Whether there is more to take."""
        return self.num_unread > 0

    @property
    def num_unread(self) -> int:
        """Records that are left to take, those that were overwritten included."""
        return self._timeline.next_sequence - 1 - self.sequence

    def close(self) -> None:
        """Read no more."""
        self._timeline.forget(self)


def _concerns(record: Record, workers: frozenset[int]) -> bool:
    return record.worker in workers or (isinstance(record, TransferRecord) and record.sender in workers)


def _weight(record: Record) -> int:
    """Units of the ring's capacity that it takes."""
    return 1 + len(record.prefills) if isinstance(record, StepRecord | StepBegunRecord) else 1


def _remember(newest: dict[str, Value], attempt_id: str, value: Value) -> None:
    """Note it, and forget the oldest note when there are many."""
    newest[attempt_id] = value
    if len(newest) > MAX_REMEMBERED:
        del newest[next(iter(newest))]


def _apply(batches: dict[int, dict[str, None]], record: Record) -> None:
    if isinstance(record, StepRecord | WorkerRecord):
        batch = batches.setdefault(record.worker, {})
        for request_id in record.left:
            batch.pop(request_id, None)
        if isinstance(record, StepRecord) and record.joined:
            batch.update(dict.fromkeys(record.joined))
