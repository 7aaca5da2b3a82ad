"""A file of unequal workers: what ``diptych serve`` makes of the pools that ``diptych simulate`` reads, too."""

from pathlib import Path
from typing import Any

import pytest

from diptych.cli.fleet_file import worker_groups
from diptych.control.config import scheduler_config
from diptych.control.errors import ConfigError
from diptych.serving.fleet.worker_groups import WorkerGroup
from diptych.simulation.settings import read_settings

FILE = """
model = "llama-3.1-8b"
hardware = "h100"

[workload]
rate = 2.0

[pools]
link = "ib400"

[pools.small]
replicas = 3
max_model_len = 10_000
cores = 1

[pools.large]
max_model_len = 131_072
kv_cache_bytes = 8_000_000_000
cores = "3-6"
quantize = "none"
shape = "unified"
scheduler.max_num_seqs = 8
"""
GIVEN: dict[str, Any] = {"shape": "chunked", "max_num_seqs": 32, "max_waiting": 77}


def test_one_file_serves_and_simulates(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(FILE)
    small, large = worker_groups(path, (), GIVEN)
    assert small == WorkerGroup(name="small", replicas=3, max_model_len=10_000, cores=1)
    assert large == WorkerGroup(
        name="large",
        max_model_len=131_072,
        kv_cache_bytes=8_000_000_000,
        cores="3-6",
        quantize="none",
        scheduler=scheduler_config("unified", max_num_seqs=8, max_waiting=77),
    )
    settings = read_settings(path)
    assert [settings.of_pool(pool).max_model_len for pool in settings.pools.in_use.values()] == [10_000, 131_072]


def test_pools_in_short_make_a_fleet_and_change_that_of_a_file(tmp_path: Path) -> None:
    text = ["small=2:max_model_len=512", "large=1:kv_cache_bytes=1GiB,cores=2-3"]
    small, large = worker_groups(None, text, GIVEN)
    assert small == WorkerGroup(name="small", replicas=2, max_model_len=512)
    assert large == WorkerGroup(name="large", kv_cache_bytes=2**30, cores="2-3")
    path = tmp_path / "fleet.toml"
    path.write_text(FILE)
    changed, _ = worker_groups(path, ["small=1:max_model_len=2000"], GIVEN)
    assert (changed.replicas, changed.max_model_len, changed.cores) == (1, 2000, 1)


def test_a_pools_role_is_what_its_name_begins_with() -> None:
    groups = worker_groups(None, ["decode-long=1", "prefill=2", "other=1"], GIVEN)
    assert [(group.name, group.role) for group in groups] == [
        ("prefill", "prefill"),
        ("decode-long", "decode"),
        ("other", "both"),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[pools.a]\ntensor_parallel = 2", "pools.a.tensor_parallel is 2; diptych serve has no"),
        ("[pools.a]\nmax_model_len = 1", "pools.a.max_model_len"),
        ("[pools.a]\ncolour = 1", "colour"),
        ("seed = 1", "has no pool with a worker"),
    ],
)
def test_a_file_that_cannot_be_served_is_refused_in_words(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        worker_groups(path, (), GIVEN)
