"""Recordings and settings of before are read under the names of today."""

import pytest

from diptych.cli.main import app
from diptych.cli.other_names import translate
from diptych.control.cluster.cluster_recording import CommandChain, canonical_command
from diptych.control.commands import Evacuate
from diptych.simulation.old_names import with_row_names
from diptych.simulation.settings import read_settings


def test_a_row_has_the_names_of_today() -> None:
    row = b'[5,"WayGiven",{"worker":1,"request_id":"gives_way_ns","progress":{}}]'
    assert with_row_names(row) == b'[5,"EvacuationReady",{"worker":1,"request_id":"gives_way_ns","progress":{}}]'
    options = b'{"service_class":"batch","gives_way_ns":7}'
    assert with_row_names(options) == b'{"service_class":"batch","best_effort_ns":7}'
    header = b'{"config":{"routing":{"deflection":"short"},"max_untouched_per_worker":64}}'
    changed = b'{"config":{"routing":{"local_prefill":"short"},"max_prefills_in_flight_per_worker":64}}'
    assert with_row_names(header) == changed and with_row_names(changed) == changed


def test_the_digest_of_a_command_is_that_of_its_old_name() -> None:
    assert canonical_command(Evacuate(1, "a")) == "GiveWay(worker=1, request_id='a')"
    assert CommandChain().add([Evacuate(1, "a")])


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("deflection", "local_prefill", "objective"),
        ("max_untouched_per_worker", "max_prefills_in_flight_per_worker", 3),
    ],
)
def test_a_setting_of_before_is_read(old: str, new: str, value: object) -> None:
    assert getattr(read_settings(None, {old: value}), new) == value == getattr(read_settings(None, {new: value}), new)


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [
        ("serve", "--deflection", "--local-prefill"),
        ("serve", "--max-untouched-per-worker", "--max-prefills-in-flight-per-worker"),
        ("serve", "--edge-depth", "--max-prefills-in-flight-per-worker"),
        ("simulate", "--guess-coverage", "--draft-coverage"),
        ("simulate", "--guess-acceptance", "--draft-acceptance"),
    ],
)
def test_an_option_of_before_is_a_hidden_alias(command: str, old: str, new: str) -> None:
    from typer.main import get_command

    params = get_command(app).commands[command].params  # type: ignore[attr-defined]
    known = {name for param in params for name in param.opts}
    assert new in known and old not in known
    assert translate([f"{old}=1"], known) == [f"{new}=1"]
