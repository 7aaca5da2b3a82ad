"""A front answers the same callers as a server of its own workers, whatever else is set."""

import pytest
from fake_engine import FakeEngine
from front_harness import fronted
from test_own_names import SOME, check, settings

from diptych.serving.api.front_app import build_front_app

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("step", [SOME, pytest.param(1, marks=pytest.mark.slow)], ids=["some calls", "all calls"])
async def test_no_option_of_a_front_switches_off_the_check_of_another(step: int) -> None:
    async with fronted(FakeEngine()) as client:
        for number, setting in enumerate(settings()):
            await check(setting, build_front_app(client.front, **setting.layers()), number, step)
