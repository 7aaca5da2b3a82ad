"""Whether the client limited its own measurement: lag of its event loop, its share of a core, requests sent late."""

import asyncio
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diptych.bench.clock import now_ns
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.report.statistics import percentile

PERIOD_S = 0.04  # between two samples of the event loop's lag: each wakes the process
SCHEDSTAT = Path("/proc/thread-self/schedstat")  # Linux: nanoseconds run, and waited for a core (proc(5))
# A share of a core (this process has a single thread that matters); the share of the time that it was ready to run
# while other processes had the core; p99 in ms of the event loop's lag and of sending late.
LIMITS = {"cpu": 0.85, "wait": 0.05, "lag": 5.0, "late": 5.0}
PROBLEMS = {
    "cpu": "the client used {:.0%} of a core",
    "wait": "the client waited {:.0%} of the time for a core that others had",
    "lag": "the client's event loop lagged (p99 {:.1f} ms)",
    "late": "requests were sent late (p99 {:.1f} ms)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """lag: how late the event loop's timers fired (they tick in ms); late: how late requests left; both in ms.
    cpu_share: of a core. wait_share: of the time, ready to run while other processes had the core (Linux; elsewhere 0).
    cpu_us_per_token: process time over received tokens."""

    cpu_share: float
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    late_p99_ms: float = 0.0
    late_max_ms: float = 0.0
    wait_share: float = 0.0
    cpu_us_per_token: float | None = None

    @property
    def excesses(self) -> dict[str, float]:
        """Values over their limits, by name; empty when the results are reliable."""
        values = {
            "cpu": self.cpu_share,
            "wait": self.wait_share,
            "lag": self.lag_p99_ms,
            "late": self.late_p99_ms,
        }
        return {name: value for name, value in values.items() if value > LIMITS[name]}


def worst_problems(runs: Sequence[Mapping[str, float]]) -> list[str]:
    """Why results are not reliable, from the excesses of each run: the worst of each kind, and in how many runs."""
    found = []
    for name, words in PROBLEMS.items():
        values = [run[name] for run in runs if name in run]
        if values:
            where = f" in {len(values)} of {len(runs)} runs" if len(runs) > 1 else ""
            found.append(words.format(max(values)) + where)
    return found


class HealthWatch:
    """Watches the client from ``start`` to ``stop``."""

    def __init__(self) -> None:
        self._lags = array("d")
        self._timer: asyncio.TimerHandle | None = None
        self._due_ns = self._start_ns = self._start_cpu_ns = self._start_wait_ns = 0

    def start(self) -> None:
        """Begin."""
        self._start_ns, self._start_cpu_ns = now_ns(), time.process_time_ns()
        self._start_wait_ns = _waited_ns()
        self._arm()

    def stop(self, num_tokens: int, late_ns: list[int]) -> Health:
        """The client's state since ``start``; late_ns: how late each request was sent."""
        if self._timer is not None:
            self._timer.cancel()
        elapsed = max(1, now_ns() - self._start_ns)
        cpu = time.process_time_ns() - self._start_cpu_ns
        lags, late = sorted(self._lags), sorted(late_ns)
        return Health(
            cpu_share=cpu / elapsed,
            lag_p50_ms=percentile(lags, 50),
            lag_p99_ms=percentile(lags, 99),
            lag_max_ms=lags[-1] if lags else 0.0,
            late_p99_ms=percentile(late, 99) / NS_PER_MS,
            late_max_ms=(late[-1] if late else 0) / NS_PER_MS,
            wait_share=(_waited_ns() - self._start_wait_ns) / elapsed,
            cpu_us_per_token=cpu / 1000 / num_tokens if num_tokens else None,
        )

    def _arm(self) -> None:
        self._due_ns = now_ns() + int(PERIOD_S * NS_PER_S)
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._tick)

    def _tick(self) -> None:
        self._lags.append(max(0, now_ns() - self._due_ns) / NS_PER_MS)
        self._arm()


def _waited_ns() -> int:
    """How long this thread has waited for a core so far."""
    return int(SCHEDSTAT.read_text().split()[1]) if SCHEDSTAT.exists() else 0
