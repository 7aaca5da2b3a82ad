"""A front answers the same callers as a server of its own workers, whatever else is set."""

import pytest
from fake_engine import FakeEngine
from front_harness import fronted
from test_own_names import check, settings

from diptych.serving.api.front_app import build_front_app

pytestmark = pytest.mark.asyncio


async def test_no_option_of_a_front_switches_off_the_check_of_another() -> None:
    async with fronted(FakeEngine()) as client:
        for setting in settings():
            await check(setting, build_front_app(client.front, **setting.layers()))
