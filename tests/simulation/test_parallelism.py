import pytest

from diptych.control.errors import ConfigError
from diptych.simulation.parallelism import Parallelism


def test_a_worker_has_the_devices_of_all_its_stages() -> None:
    assert Parallelism(tensor=4, pipeline=2, data=2).devices == 16
    assert Parallelism(tensor=4, pipeline=2, data=2).stage_devices == 8


@pytest.mark.parametrize("name", ["tensor", "pipeline", "expert", "data"])
def test_what_is_less_than_one_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}_parallel is 0; it must be at least 1"):
        Parallelism(**{name: 0})


def test_expert_groups_divide_the_devices_of_a_stage() -> None:
    assert Parallelism(tensor=2, data=4, expert=8).devices == 8
    with pytest.raises(ConfigError, match="expert_parallel is 3; it must divide the 8 devices of a stage"):
        Parallelism(tensor=2, data=4, expert=3)
