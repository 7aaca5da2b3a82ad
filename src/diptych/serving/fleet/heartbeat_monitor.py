"""Notices workers that hang: a process that is stopped or starved, or a loop whose step does not end.

Owns the rules; the caller kills. A stopped process stops stamping its file; an endless step takes many times what was
predicted.
"""

import asyncio
import time
from collections.abc import Sequence

from diptych.control.slo import NS_PER_S
from diptych.serving.fleet.worker_handle import WorkerHandle, WorkerState
from diptych.serving.link.heartbeat import Pulse

OVERDUE_FACTOR, OVERDUE_S = 10, 60.0
LOADING_S = 60.0  # the least silence that counts in a worker that loads: imports and copies may not let it stamp


def verdict(pulse: Pulse, now: int, timeout_s: float) -> str:
    """Why a worker with these signs of life should be killed; "" when it should not."""
    age_s = pulse.age_ns(now) / NS_PER_S
    if age_s > timeout_s:
        return f"no sign of life for {age_s:.1f} s"
    if pulse.predicted_ns and (overdue_ns := pulse.overdue_ns(now)):
        busy_s, predicted_s = (pulse.predicted_ns + overdue_ns) / NS_PER_S, pulse.predicted_ns / NS_PER_S
        if busy_s > max(OVERDUE_S, OVERDUE_FACTOR * predicted_s):
            return f"a step of about {predicted_s:.3f} s has taken {busy_s:.0f} s and does not end"
    return ""


async def watch_pulses(ports: Sequence[WorkerHandle], timeout_s: float) -> None:
    """Look at every worker a few times per timeout, for ever, and kill those that hang. After a pause of this process
    itself (it was stopped, too) the workers get one more round."""
    limits = {WorkerState.READY: timeout_s, WorkerState.STARTING: max(timeout_s, LOADING_S)}
    pause_s = timeout_s / 5
    last = time.monotonic()
    while True:
        await asyncio.sleep(pause_s)
        was_late, last = time.monotonic() - last > 2 * pause_s, time.monotonic()
        if was_late:
            continue
        for port in ports:
            pulse = port.pulse() if port.state in limits else None
            if pulse is not None and (why := verdict(pulse, time.monotonic_ns(), limits[port.state])):
                port.kill(why)
