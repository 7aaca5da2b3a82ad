"""Whether the client limited its own measurement."""

import asyncio
import time

from diptych.bench.health import Health, HealthWatch, worst_problems


def test_a_client_in_the_way_is_a_problem_in_words() -> None:
    health = Health(cpu_share=0.3, lag_p50_ms=0.1, lag_p99_ms=1.0, lag_max_ms=30.0, late_p99_ms=0.2, wait_share=0.001)
    assert health.excesses == {} and worst_problems([health.excesses]) == []
    ill = Health(cpu_share=0.95, lag_p50_ms=1.0, lag_p99_ms=9.0, lag_max_ms=30.0, late_p99_ms=8.0, wait_share=0.2)
    assert set(ill.excesses) == {"cpu", "wait", "lag", "late"} and len(worst_problems([ill.excesses])) == 4


def test_of_each_kind_of_trouble_with_the_client_the_worst_is_said_once() -> None:
    runs: list[dict[str, float]] = [{"late": 6.0}, {"late": 9.5, "lag": 7.0}, {}]
    lag, late = worst_problems(runs)
    assert "p99 7.0 ms) in 1 of 3 runs" in lag and "p99 9.5 ms) in 2 of 3 runs" in late
    assert worst_problems([{"cpu": 0.9}]) == ["the client used 90% of a core"]
    assert worst_problems([{}]) == []


def test_a_blocked_event_loop_and_late_requests_are_seen() -> None:
    async def run() -> Health:
        watch = HealthWatch()
        watch.start()
        await asyncio.sleep(0.05)
        time.sleep(0.1)
        await asyncio.sleep(0.05)
        return watch.stop(10, [1_000_000, 3_000_000])

    health = asyncio.run(run())
    assert health.lag_max_ms > 50 and health.late_max_ms == 3.0
    assert health.cpu_us_per_token is not None and health.cpu_us_per_token > 0


def test_without_tokens_or_requests_there_is_nothing_to_say_of_them() -> None:
    async def run() -> Health:
        watch = HealthWatch()
        watch.start()
        return watch.stop(0, [])

    health = asyncio.run(run())
    assert health.cpu_us_per_token is None and health.late_p99_ms == health.late_max_ms == health.lag_max_ms == 0.0
