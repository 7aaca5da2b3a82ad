"""What the live timeline costs the front end: per step of a worker, per record read, and per trace drawn.

64 workers take 20 steps a second each, with 8 requests of 64 tokens in every decode batch; the ring is full. Times are
process CPU. ``python benchmarks/timeline.py [--json FILE]``.
"""

import argparse
import asyncio
import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from common import report

from diptych.control.events import Event, FirstToken, RequestAdmitted, RequestFinished, RequestQueued, StepFinished
from diptych.control.request import FinishReason
from diptych.control.slo import NS_PER_MS, LatencyBreakdown
from diptych.serving.link.messages import StepReport, decode_from_worker, encode, pack_events, unpack_events
from diptych.timeline.ring import CAPACITY, Timeline
from diptych.timeline.trace import hold, trace

NUM_WORKERS, STEP_NS, STEPS_PER_REPORT = 64, 50 * NS_PER_MS, 4
BATCH, LENGTH = 8, 64  # requests of a decode batch, tokens of each


def reports(num_reports: int, worker: int) -> Iterator[list[Event]]:
    """What one worker reports: every 8th step a request ends and the next one is prefilled."""
    number = 0
    for first in range(0, num_reports * STEPS_PER_REPORT, STEPS_PER_REPORT):
        events: list[Event] = []
        for step in range(first, first + STEPS_PER_REPORT):
            start, end = step * STEP_NS, (step + 1) * STEP_NS
            prefills: tuple[tuple[str, int, int], ...] = ()
            if step % (LENGTH // BATCH) == 0:
                name = f"cmpl-{worker:04d}{number:028d}"
                number += 1
                prefills = ((name, 0, 500),)
                events += [
                    RequestQueued(start, name, 500),
                    RequestAdmitted(start, name, 0, True),
                    FirstToken(end, name),
                ]
                if number > BATCH:
                    old = f"cmpl-{worker:04d}{number - BATCH:028d}"
                    latency = LatencyBreakdown(10, STEP_NS, LENGTH * STEP_NS, LENGTH)
                    events.append(RequestFinished(end, old, FinishReason.LENGTH, 500, 0, 0, latency, None))
            events.append(StepFinished(step, start, end, prefills, BATCH, BATCH * 532, STEP_NS))
        yield events


def cpu_us(call: Callable[[], Any], count: int) -> float:
    """Process CPU of a call in microseconds over ``count``."""
    begin = time.process_time()
    call()
    return (time.process_time() - begin) * 1e6 / count


def fill(timeline: Timeline, streams: list[list[list[Event]]]) -> None:
    """All reports, the workers in turns."""
    for turn in zip(*streams, strict=True):
        for worker, events in enumerate(turn):
            timeline.on_events(worker, events)


async def longest_stall_ms(timeline: Timeline) -> float:
    """How long the event loop stood still, at most, while a trace was drawn in a thread."""
    worst, before = 0.0, time.perf_counter()
    drawing = asyncio.create_task(asyncio.to_thread(draw, timeline))
    while not drawing.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        worst, before = max(worst, now - before), now
    return worst * 1e3


def draw(timeline: Timeline) -> int:
    """Make the trace of all that is held; how many bytes it has."""
    return sum(map(len, trace(hold(timeline, 10**18))))


def decoded(packed: bytes) -> list[Event]:
    """The events of an encoded report."""
    message = decode_from_worker(packed)
    assert isinstance(message, StepReport)
    return unpack_events(message.events)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the results here")
    arguments = parser.parse_args()
    num_reports = 500  # of 200 ms: 100 s, 128,000 steps
    streams = [list(reports(num_reports, worker)) for worker in range(NUM_WORKERS)]
    num_steps = num_reports * STEPS_PER_REPORT * NUM_WORKERS
    tracemalloc.start()
    small = Timeline(CAPACITY)
    for worker, stream in enumerate(streams):
        for events in stream:
            small.on_events(worker, decoded(encode(StepReport(pack_events(events)))))
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del small
    timeline = Timeline(CAPACITY)
    fill(timeline, streams)
    packed = [encode(StepReport(pack_events(events))) for events in streams[0]]

    rows = [
        {
            "what": "append, us a step (with its share of requests)",
            "value": cpu_us(lambda: fill(timeline, streams), num_steps),
        },
        {
            "what": "decode the events of a report, us a step",
            "value": cpu_us(lambda: [decoded(report) for report in packed], num_reports * STEPS_PER_REPORT),
        },
        {
            "what": "take and encode records, us a record",
            "value": cpu_us(lambda: msgspec.json.encode(timeline.since(0)), len(timeline.since(0))),
        },
        {"what": "units held", "value": sum(1 + len(getattr(record, "prefills", ())) for record in timeline.since(0))},
        {"what": "memory, MB", "value": held_bytes / 1e6},
        {"what": "copy the ring for a trace, ms", "value": cpu_us(lambda: hold(timeline, 0), 1000)},
        {"what": "draw and encode a trace of all, s", "value": cpu_us(lambda: draw(timeline), 1_000_000)},
        {"what": "size of that trace, MB", "value": draw(timeline) / 1e6},
    ]
    streams.clear()
    packed.clear()
    gc.collect()
    stalls = sorted(asyncio.run(longest_stall_ms(timeline)) for _ in range(5))
    rows.append({"what": "longest stall of the event loop meanwhile, ms (median of 5)", "value": stalls[2]})
    report("timeline", rows, arguments.json)


if __name__ == "__main__":
    main()
