"""Events of workers as the records of a timeline: for recordings and simulations, which have no ring."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from diptych.control.events import Event, HandoffDelivered, StepFinished
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
