"""Devices of one's own: files in the catalogue's format, entries like another one, fields set one by one."""

from pathlib import Path
from typing import Any

import pytest

from diptych.control.errors import ConfigError
from diptych.simulation.hardware import load_hardware
from diptych.simulation.prepare import prepare
from diptych.simulation.settings import read_settings
from diptych.simulation.sweep import assigned, grid, parse_sweep, setting_path

CATALOGUE = (Path(__file__).parents[2] / "src/diptych/simulation/catalogue/hardware.toml").read_text()
WHOLE = CATALOGUE[CATALOGUE.index("[h200]") : CATALOGUE.index("[b200]")].replace("[h200", "[mine")


def own(folder: Path, text: str) -> str:
    """A file with these devices."""
    path = folder / "own.toml"
    path.write_text(text)
    return str(path)


def test_a_whole_entry_in_a_file_is_a_device(tmp_path: Path) -> None:
    device = load_hardware(own(tmp_path, WHOLE.replace("price_per_hour = 3.60", "price_per_hour = 0.10")))
    assert (device.name, device.price_per_hour) == ("mine", 0.10)
    assert device.achieved == load_hardware("h200").achieved


def test_an_entry_takes_what_it_leaves_out_from_the_device_that_it_is_like(tmp_path: Path) -> None:
    text = '[a]\nlike = "h100"\nmemory_bandwidth = 2e12\n[a.achieved]\nstep_overhead_s = 0.002\n'
    path, h100 = own(tmp_path, text + '[b]\nlike = "a"\nprice_per_hour = 1'), load_hardware("h100")
    device = load_hardware(f"{path}:a")
    assert (device.name, device.memory_bandwidth, device.achieved.step_overhead_s) == ("a", 2e12, 0.002)
    assert (device.flops, device.achieved.gemm_compute) == (h100.flops, h100.achieved.gemm_compute)
    assert "memory_bandwidth, achieved.step_overhead_s as given, the rest as of h100-sxm" in device.sources["assumed"]
    assert (load_hardware(f"{path}:b").name, load_hardware(f"{path}:b").price_per_hour) == ("a", 1)
    with pytest.raises(ConfigError, match=r"several devices; one of .*own\.toml:a, .*own\.toml:b"):
        load_hardware(path)
    with pytest.raises(ConfigError, match="has a, b"):
        load_hardware(f"{path}:c")


def test_another_price_is_the_same_device_and_another_bandwidth_is_not() -> None:
    cheap = load_hardware({"like": "h100", "price_per_hour": 1.5})
    assert (cheap.name, cheap.price_per_hour) == ("h100-sxm", 1.5)
    fast = load_hardware({"like": "h100", "memory_bandwidth": 4e12})
    assert fast.name == "h100 with memory_bandwidth 4000000000000.0"
    assert load_hardware({"name": "next", "like": "h100", "memory_bandwidth": 4e12}).name == "next"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (WHOLE.replace("power_w = 700.0", "pwer_w = 700.0", 1), "mine: pwer_w is not a field; did you mean power_w"),
        (WHOLE.replace("price_per_hour = 3.60", ""), "mine lacks price_per_hour"),
        (WHOLE.replace("price_per_hour = 3.60", "price_per_hour = -1"), "price_per_hour is -1.*at least 0"),
        (WHOLE.replace("price_per_hour = 3.60", "price_per_hour = 'low'"), "price_per_hour is 'low'; it must be float"),
        (WHOLE.replace("gemm_memory = 0.828", "gemm_memory = 3"), r"gemm_memory is 3.*in \(0, 2\]"),
        (WHOLE.replace("gemm_memory = 0.828", "gemm_mem = 0.5"), "achieved.gemm_mem is not a field"),
        (WHOLE.replace("bf16 = 9.89e14, ", ""), "must be a table with bf16"),
        (WHOLE.replace("fp8 = 1.979e15", "fp4 = 1.979e15"), "'fp4'; it must be one of bf16, fp8, int8"),
        ('[mine]\nlike = "h900"', "like is 'h900'; one of .*h100-sxm"),
        ('[mine]\nlike = "mine"', "like is 'mine'"),
        ("mine = 3", "mine is 3; expected a table"),
        ("", "has no device"),
        ("[mine", "is not a TOML file"),
    ],
)
def test_a_wrong_entry_is_an_error_with_the_field_the_value_and_the_limit(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_hardware(own(tmp_path, text))
    assert error.value.param == "hardware"


def test_a_file_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot read absent\.toml"):
        load_hardware("absent.toml")


def choice(*assignments: str, **changes: Any) -> Any:
    """The cost model, with settings as they are typed."""
    base = {"model": "llama-3.1-70b", "hardware": "h100", "tensor_parallel": 4, "workload.num_requests": 1}
    return prepare(read_settings(None, {**base, **changes, **assigned(assignments)})).cost


def test_a_price_can_be_set_and_measurements_still_hold() -> None:
    plain, priced = choice(), choice("hardware.price_per_hour=2.1", "hardware.power_w=900")
    assert priced.words == plain.words and priced.words.startswith("measured layers")
    assert (priced.hardware.price_per_hour, priced.hardware.power_w) == (2.1, 900.0)


def test_a_device_with_other_figures_is_priced_by_the_roofline_which_says_what_was_given() -> None:
    found = choice("hardware.memory_bandwidth=6.7e12")
    assert found.words.startswith("roofline of llama-3.1-70b on 4 x h100 with memory_bandwidth 6700000000000.0")
    assert "memory_bandwidth as given" in found.assumptions[0]
    step = choice(cost="roofline").cost.decode_line(8, 8000).step_ns(8000)
    assert found.cost.decode_line(8, 8000).step_ns(8000) < step


def test_a_device_of_a_file_can_have_another_price_and_what_is_wrong_is_said_of_the_file(tmp_path: Path) -> None:
    path = own(tmp_path, '[box]\nlike = "h100"\nmemory_bandwidth = 2e12\nprice_per_hour = 1.0')
    assert read_settings(None, {"hardware": path}).hardware == path
    changed = read_settings(None, {"hardware": path, "hardware.price_per_hour": 3.0}).hardware
    assert changed == {"like": path, "price_per_hour": 3.0}
    device = load_hardware(changed)
    assert (device.name, device.price_per_hour) == ("box", 3.0)
    assert device.sources["assumed"].startswith("memory_bandwidth as given")
    own(tmp_path, '[box]\nlike = "h100"\nmemory_bandwith = 2e12')
    with pytest.raises(ConfigError, match=r"own\.toml: box: memory_bandwith is not a field"):
        load_hardware(changed)


def test_fields_of_the_device_can_be_swept_and_so_can_the_device_beside_a_price() -> None:
    settings = read_settings(None, {"model": "llama-3-8b", "hardware": "h100"})
    points = [changed.hardware for _, changed in grid(settings, [parse_sweep("hardware.price_per_hour=1,2")])]
    assert points == [{"like": "h100", "price_per_hour": 1}, {"like": "h100", "price_per_hour": 2}]
    own_price = read_settings(None, {"model": "llama-3-8b", "hardware": "h100", "hardware.price_per_hour": 3})
    swept = [changed.hardware for _, changed in grid(own_price, [parse_sweep("hardware=h200,b200")])]
    assert swept == [{"like": "h200", "price_per_hour": 3}, {"like": "b200", "price_per_hour": 3}]
    assert setting_path("price_per_hour") == "hardware.price_per_hour"
    with pytest.raises(ConfigError, match=r"did you mean hardware\.price_per_hour"):
        setting_path("hardware.price_per_hours")
