"""What is written of prompts, answers, tokens and KV is its owner's alone, however open the umask is,
and two servers do not share what only one may use."""

import io
import json
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import httpx
import pytest
from batch_files import numbered, started
from servers import CLI, running, wait_until

from diptych.cli.batch_client import BatchClient
from diptych.cli.batch_options import BatchTaking
from diptych.cli.front import FrontEngines, RoutingOptions
from diptych.cli.http_options import HttpOptions
from diptych.cli.serve_options import ModelOptions, ServeOptions
from diptych.control.cluster.cluster_config import ClusterConfig
from diptych.control.errors import ConfigError
from diptych.diagnosis.adapters.http_get import Site
from diptych.runtime.tiers.segment_folder import SegmentFolder
from diptych.serving.answers.stream_journal import StreamJournal
from diptych.serving.api import access_log
from diptych.serving.failures.failure_recording import write_failure
from diptych.serving.fleet.private_directory import locked_directory
from diptych.serving.link.heartbeat import Heartbeat
from diptych.serving.link.recorder import record_cluster

WRITTEN = {"record", "access_log", "batch_dir", "responses", "survive_restart", "kv_disk"}
READ = {"key_file", "api_keys", "admin_key_file", "fleet", "engines"}
LOCKED = ("batch_dir", "responses", "survive_restart")
OTHERS, GROUP = stat.S_IRWXO, stat.S_IRWXG


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """Nothing is taken away from the modes that are asked for."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_every_option_with_a_path_is_known_as_written_or_read() -> None:
    """A new one that is written belongs into the test below."""
    hints: dict[str, Any] = {}
    for options in (ModelOptions, HttpOptions, BatchTaking, ServeOptions, FrontEngines, RoutingOptions):
        hints |= get_type_hints(options)
    paths = {name for name, hint in hints.items() if Path in (hint, *get_args(hint))}
    assert paths | {"access_log"} == WRITTEN | READ


def places(folder: Path) -> tuple[str, ...]:
    """An option each, all in one folder."""
    names = [(f"--{name.replace('_', '-')}", str(folder / "new" / name)) for name in sorted(WRITTEN)]
    return ("--kv-disk-gb", "0.2", "--kv-host-gb", "0.02", *(word for pair in names for word in pair))


def modes(folder: Path) -> dict[str, int]:
    found = {}
    for path in folder.rglob("*"):
        try:
            found[str(path.relative_to(folder))] = stat.S_IMODE(path.stat().st_mode)
        except FileNotFoundError:
            continue  # SQLite removes what it put beside a database
    return found


def use_everything(url: str) -> None:
    """A response, a recorded stream with a prompt that goes to the disk, and a batch."""
    prompt = "def add(first, second):\n    return first + second\n" * 20
    asked = {"model": "stdlib-python", "max_tokens": 4}
    assert httpx.post(f"{url}/v1/responses", json={"input": "x", "max_output_tokens": 2}, timeout=60).status_code == 200
    stream = httpx.post(f"{url}/v1/completions", json={**asked, "prompt": prompt, "stream": True}, timeout=60)
    assert "\nid: " in stream.text
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {**asked, "prompt": "a"}}
    wrong = {**line, "custom_id": "2", "body": {**asked, "prompt": "a", "max_tokens": -1}}
    text = json.dumps(line) + "\n" + json.dumps(wrong) + "\n"
    file = httpx.post(
        f"{url}/v1/files", data={"purpose": "batch"}, files={"file": ("x.jsonl", text)}, timeout=60
    ).json()
    created = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = httpx.post(f"{url}/v1/batches", json=created, timeout=60).json()
    wait_until(lambda: httpx.get(f"{url}/v1/batches/{batch['id']}").json()["status"] == "completed")


@pytest.mark.system
def test_all_that_a_server_writes_is_its_owners_alone_and_is_not_shared(tmp_path: Path) -> None:
    command = (*CLI, "serve", "--port", "0", "--threads", "1", *places(tmp_path))
    (tmp_path / "new").mkdir(0o700)
    with running(command) as server:
        use_everything(server.url)
        wait_until(lambda: any(path.suffix == ".kv" for path in (tmp_path / "new" / "kv_disk").iterdir()))
        found = modes(tmp_path / "new")
        assert {name.split("/")[0] for name in found} >= WRITTEN
        assert {"responses-wal", "batch_dir/batches.sqlite-wal", "survive_restart/lock"} <= found.keys()
        assert len([name for name in found if name.startswith("batch_dir/files/")]) == 3
        assert len([name for name in found if name.startswith("survive_restart/")]) == 2
        folders = {name: mode for name, mode in found.items() if (tmp_path / "new" / name).is_dir()}
        assert set(folders.values()) == {0o700}
        others = {name: mode for name, mode in found.items() if name not in folders and name != "access_log"}
        assert set(others.values()) == {0o600}, others
        assert found["access_log"] == 0o640
        (tmp_path / "other").symlink_to(tmp_path / "new")
        for name in LOCKED:
            option = f"--{name.replace('_', '-')}"
            again = (*CLI, "serve", "--port", "0", option, str(tmp_path / "other" / name))
            refused = subprocess.run(again, capture_output=True, text=True, timeout=120)
            assert refused.returncode == 1
            said = f"error: {option} is {tmp_path / 'other' / name}, which another server uses"
            assert refused.stderr.startswith(said) and refused.stderr.count("\n") == 1
            assert refused.stderr[len(said) :] in (f" (process {server.process.pid})\n", "\n")
        server.process.kill()
        server.process.wait()
    with running(command) as server:
        assert server.terminate(60) == 0
    assert not {mode & 0o037 for mode in modes(tmp_path / "new").values()} - {0}


def test_answers_that_a_command_fetches_are_its_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchClient, "_open", lambda *_: io.BytesIO(b"an answer"))
    BatchClient(Site.of("http://127.0.0.1:1", None)).download("file-1", tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == b"an answer"
    assert modes(tmp_path) == {"out.jsonl": 0o600}


def heartbeat(folder: Path) -> None:
    Heartbeat(folder / "heartbeat").close()


def recording(folder: Path) -> None:
    record_cluster(folder / "recording.jsonl", ClusterConfig()).close()


def batches(folder: Path) -> None:
    store, _ = started(folder / "batches", numbered(3))
    store.close()


def journal(folder: Path) -> None:
    made = StreamJournal(folder / "streams")
    made._append(folder / "streams" / f"cmpl-{'0' * 32}", b"x")


def segments(folder: Path) -> None:
    made = SegmentFolder(folder / "tier", 1 << 24)
    path, file, lock = made.make("ab", 1 << 16)
    os.close(file)
    os.close(lock)
    path.with_suffix(".lock").unlink(missing_ok=True)
    made.delete(path)
    _, file, lock = made.make("ab", 1 << 16)
    os.close(file)
    os.close(lock)


def failure(folder: Path) -> None:
    assert write_failure(folder / "new" / "failures", "a core", ValueError(), None, {}, lambda row: row)


def reachable(folder: Path) -> Iterator[Path]:
    """Files and folders that others can get to: what lies in a folder that is closed to them cannot be."""
    for path in folder.iterdir():
        yield path
        if path.is_dir() and path.stat().st_mode & (OTHERS | GROUP):
            yield from reachable(path)


@pytest.mark.parametrize(
    "make", [heartbeat, recording, batches, journal, segments, failure], ids=lambda make: make.__name__
)
def test_others_can_neither_read_nor_enter_what_is_written(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path)
    found = list(reachable(tmp_path))
    assert found
    assert [path for path in found if path.stat().st_mode & (OTHERS | GROUP)] == []


@pytest.mark.parametrize("make", [batches, segments, journal], ids=lambda make: make.__name__)
def test_nor_would_they_if_the_folder_were_opened(make: Callable[[Path], None], tmp_path: Path) -> None:
    """Files that the process opens itself, not those of its database, have a mode of their own."""
    make(tmp_path)
    opened = [path for path in tmp_path.rglob("*") if path.is_file() and path.name.endswith(("lock", ".kv", "0" * 32))]
    assert opened
    assert [path for path in opened if path.stat().st_mode & (OTHERS | GROUP)] == []


def test_the_access_log_may_be_read_by_its_group_and_by_no_others(tmp_path: Path) -> None:
    os.close(access_log.open_log(str(tmp_path / "log")))
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o640


def test_a_directory_of_a_worker_is_closed_to_others() -> None:
    directory, lock = locked_directory()
    try:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    finally:
        os.close(lock)
        directory.rmdir()


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o770, 0o777, 0o755])
def test_streams_are_not_recorded_where_others_can_get_in(mode: int, tmp_path: Path) -> None:
    (tmp_path / "streams").mkdir()
    (tmp_path / "streams").chmod(mode)
    with pytest.raises(ConfigError):
        StreamJournal(tmp_path / "streams")
