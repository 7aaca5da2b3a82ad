"""A way between two hosts is cut at a named point of the protocol: no token is lost or doubled, nothing stays behind.

The times of recovery are measured by benchmarks/transfer.py partitions, which repeats each point.
"""

import pytest
from partition_trials import LOSSES, POINTS, Trial, cut_fleet

SILENCE_S = 2.0
FEW = ("ready", "reserved", "first token", "KV later chunk", "KV last acknowledgement", "delivered", "cancel order")


async def see(*trials: Trial) -> None:
    async with cut_fleet(SILENCE_S) as fleet:
        for trial in trials:
            outcome = await fleet.run(trial)
            assert not outcome.problems, f"{trial}: {outcome.problems}"


def test_there_are_as_many_points_as_names() -> None:
    assert len({point.name for point in POINTS}) == len(POINTS) >= 20
    assert {point.name for point in POINTS} >= set(FEW)


@pytest.mark.system
@pytest.mark.asyncio
@pytest.mark.timeout(240)
async def test_a_partition_in_any_phase_of_a_request_loses_no_token() -> None:
    points = [point for point in POINTS if point.name in FEW]
    await see(*(Trial(point, LOSSES[number % 3], 0) for number, point in enumerate(points)))


@pytest.mark.system
@pytest.mark.asyncio
@pytest.mark.timeout(120)
async def test_a_worker_that_is_cut_off_as_soon_as_it_has_joined_is_given_up() -> None:
    """Before its first sign of life: its registration was one."""
    point = next(point for point in POINTS if point.name == "reserved")
    await see(*(Trial(point, (lost,), number) for number, lost in enumerate(("up", "up", "up"))))


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.asyncio
@pytest.mark.timeout(1800)
async def test_a_partition_at_any_point_in_any_direction_loses_no_token() -> None:
    await see(*(Trial(point, lost, 0, is_short) for point in POINTS for lost in LOSSES for is_short in (False, True)))
