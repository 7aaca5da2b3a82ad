"""What a live front end recorded replays to the same commands, and a recording that was changed does not."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleet_scripts import Script, play, random_script
from in_process_fleet import engine_options
from in_process_worker import Host
from tests.laws import law
from virtual_time import in_virtual_time, virtual_time

from diptych.control.cluster.cluster_recording import canonical_command
from diptych.control.commands import Prefill
from diptych.control.errors import ConfigError
from diptych.serving.fleet.fleet import Fleet
from diptych.simulation.cluster_replay import replay_cluster

RECORDINGS = Path(__file__).parents[1] / "simulation" / "recordings"
SEED = next(seed for seed in range(40) if len(random_script(seed).workers.roles) > 1)  # one worker is not recorded


def record(script: Script, path: Path) -> Path:
    """The recording of a live fleet to which the script happened."""

    @in_virtual_time
    async def run() -> None:
        host = Host(virtual_time())
        fleet = Fleet(engine_options(record=str(path / "run.jsonl")), script.workers, host, clock=host.time.clock)
        await fleet.start()
        await play(script, fleet, host)
        await fleet.stop()

    run()
    return path / "run-cluster.jsonl"


def rows_of(path: Path) -> list[Any]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return path


@law(weight=1.0)
def test_a_live_front_end_replays_to_the_same_commands(seed: int, tmp_path: Path) -> None:
    script = random_script(seed)
    if len(script.workers.roles) == 1:
        return  # one worker is not recorded
    folder = tmp_path / str(seed)
    folder.mkdir()
    report = replay_cluster(record(script, folder))
    assert report.is_identical, report.difference
    assert report.is_complete
    assert report.num_decisions > 5
    assert report.num_events > report.num_decisions


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("front-*.jsonl")), ids=lambda path: path.stem)
def test_recordings_of_older_versions_replay_to_the_same_commands(path: Path) -> None:
    """The files were written by the versions that their names say."""
    assert rows_of(path)[0]["version"] == int(path.stem.split("-")[1])
    report = replay_cluster(path)
    assert report.is_identical, report.difference
    assert report.is_complete and report.num_decisions


def test_a_command_with_one_block_table_reads_as_it_did_before_there_were_groups() -> None:
    def text(*block_tables: tuple[int, ...], request_id: str = "a") -> str:
        return canonical_command(Prefill(0, request_id, request_id, 0, 1, 16, block_tables, 7))

    begin = "Prefill(worker=0, request_id='a', attempt_id='a', num_output_tokens=0, target=1, num_cached_tokens=16, "
    assert text() == begin + "block_ids=(), lease_ns=7)"
    assert text((5,)) == begin + "block_ids=(5,), lease_ns=7)"
    assert text((5, 6)) == begin + "block_ids=(5, 6), lease_ns=7)"
    misleading = "block_tables=((5, 6),)"  # a client's own name for its request
    assert text((5, 6), request_id=misleading) == text((5, 6)).replace("'a'", repr(misleading))
    tables = [(), ((),), ((5, 6),), ((5,), (6,)), ((6,), (5,)), ((5, 6), ()), ((), (5, 6))]
    assert len({text(*some) for some in tables[1:]}) == len(tables) - 1


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The rows of one recording, the header first."""
    return rows_of(record(random_script(SEED), tmp_path_factory.mktemp("recording")))


def decisions(rows: list[Any]) -> list[int]:
    """The lines (from 1) of the rows that brought commands."""
    return [line for line, row in enumerate(rows[1:], 2) if len(row) == 5]


def test_another_decision_is_reported_at_its_row(recording: list[Any], tmp_path: Path) -> None:
    lines = decisions(recording)
    for line in (lines[0], lines[len(lines) // 2], lines[-1]):
        rows = [list(row) if isinstance(row, list) else row for row in recording]
        rows[line - 1][3] = "AAAAAAAAAAAAAAAA"
        report = replay_cluster(write(tmp_path / "changed.jsonl", rows))
        assert report.difference is not None
        assert (report.difference.line, report.difference.time_ns) == (line, rows[line - 1][0])
        assert "the same commands, with other details" in str(report.difference)


def test_another_input_is_reported_at_the_first_decision_that_it_changes(recording: list[Any], tmp_path: Path) -> None:
    rows = msgspec.json.decode(msgspec.json.encode(recording))
    line = next(line for line in decisions(rows) if rows[line - 1][1] == "Arrived")
    rows[line - 1][2]["submission"]["request_id"] = "another"
    report = replay_cluster(write(tmp_path / "changed.jsonl", rows))
    assert report.difference is not None and report.difference.line == line
    assert "another" in str(report.difference) and "other commands" in str(report.difference)


def test_a_decision_that_is_missing_from_the_recording_is_reported(recording: list[Any], tmp_path: Path) -> None:
    rows = list(recording)
    line = decisions(rows)[-1]
    rows[line - 1] = rows[line - 1][:3]
    report = replay_cluster(write(tmp_path / "changed.jsonl", rows))
    assert report.difference is not None and report.difference.line == line
    assert "no commands" in str(report.difference)


def test_a_recording_that_was_cut_off_is_replayed_as_far_as_it_goes(recording: list[Any], tmp_path: Path) -> None:
    path = write(tmp_path / "cut.jsonl", recording[: len(recording) // 2])
    path.write_bytes(path.read_bytes()[:-5])
    report = replay_cluster(path)
    assert report.is_identical and not report.is_complete
    assert report.num_events == len(recording) // 2 - 2


def test_a_file_of_another_kind_is_refused(recording: list[Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no recording"):
        replay_cluster(write(tmp_path / "other.jsonl", recording[1:]))
    header = recording[0] | {"version": 99}
    with pytest.raises(ConfigError, match="version 99"):
        replay_cluster(write(tmp_path / "newer.jsonl", [header, *recording[1:]]))


def test_a_recording_with_settings_that_are_no_more_is_refused_with_them(tmp_path: Path) -> None:
    old = next(RECORDINGS.glob("front-1-*.jsonl")).read_text()
    path = tmp_path / "old.jsonl"
    path.write_text(re.sub(r'"routing":"\w+"', '"routing":"least_loaded"', old, count=1))
    with pytest.raises(ConfigError, match=r"cannot be replayed: Invalid enum value 'least_loaded'.*routing"):
        replay_cluster(path)
