"""Whether the client itself was in the way: lag of its event loop, its share of a core, requests sent late.

Owns the watch and the verdict. A measurement by a client that had no time is not one of the server.
"""

import asyncio
import time
from array import array
from dataclasses import dataclass

from diptych.bench.http import now_ns
from diptych.control.slo import NS_PER_MS, NS_PER_S
from diptych.simulation.results import percentile

PERIOD_S = 0.01
LAG_LIMIT_MS = 5.0  # p99 of the event loop's lag
LATE_LIMIT_MS = 5.0  # p99 of sending late
CPU_LIMIT = 0.85  # of one core: this process has one thread that matters


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """cpu_share: of one core. lag: how late the event loop came to its timers (their grain is 1 ms), late: how late
    requests left, both in ms. cpu_us_per_token: process time over received tokens."""

    cpu_share: float
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    late_p99_ms: float = 0.0
    late_max_ms: float = 0.0
    cpu_us_per_token: float | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the results are not reliable; empty when they are."""
        found = []
        if self.cpu_share > CPU_LIMIT:
            found.append(f"the client used {100 * self.cpu_share:.0f} % of a core")
        if self.lag_p99_ms > LAG_LIMIT_MS:
            found.append(f"the client's event loop lagged (p99 {self.lag_p99_ms:.1f} ms)")
        if self.late_p99_ms > LATE_LIMIT_MS:
            found.append(f"requests were sent late (p99 {self.late_p99_ms:.1f} ms)")
        return tuple(found)


class HealthWatch:
    """Between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self._lags = array("d")
        self._timer: asyncio.TimerHandle | None = None
        self._due_ns = self._start_ns = self._start_cpu_ns = 0

    def start(self) -> None:
        """From now on."""
        self._start_ns, self._start_cpu_ns = now_ns(), time.process_time_ns()
        self._arm()

    def stop(self, num_tokens: int, late_ns: list[int]) -> Health:
        """What was seen."""
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
            cpu_us_per_token=cpu / 1000 / num_tokens if num_tokens else None,
        )

    def _arm(self) -> None:
        self._due_ns = now_ns() + int(PERIOD_S * NS_PER_S)
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._tick)

    def _tick(self) -> None:
        self._lags.append(max(0, now_ns() - self._due_ns) / NS_PER_MS)
        self._arm()
