"""Files and batches on disk: what the tables say is true of the files, whatever happened in between."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from batch_files import add_batch, add_file, check_each_once, jsonl, line, numbered, rows, started

from diptych.control.errors import BodyTooLargeError, ConfigError, ConflictError, InvalidRequestError, NotFoundError
from diptych.serving.batches.batch_records import (
    BatchLimits,
    BatchTerms,
    LinePlace,
    LineResult,
    StoredFile,
    window_seconds,
)
from diptych.serving.batches.batch_runner import LineIntake
from diptych.serving.batches.batch_store import BatchStore
from diptych.serving.batches.line_check import reply_row, request_body


def faults_of(folder: Path, content: bytes, limits: BatchLimits | None = None) -> list[tuple[str, int | None]]:
    store, batch = started(folder, content, limits)
    assert batch.status == "failed"
    assert len(store.tables.lines(batch.number, 0, 10_000)) == 0
    found = batch.json()["errors"]["data"]
    assert all(fault["message"] for fault in found)
    store.close()
    return [(fault["code"], fault["line"]) for fault in found]


def result(number: int, batch: int = 1, *, is_success: bool = True) -> LineResult:
    return LineResult(batch, number, reply_row(f"r{number}", f"id-{number - 1}", 200, "q", b"{}"), is_success)


def test_every_wrong_line_is_named_before_any_runs(tmp_path: Path) -> None:
    lines = [
        line("a"),
        b"not json\n",
        b"\n",
        line("b", method="GET"),
        line("a"),
        line("c", url="/v1/chat/completions"),
        line("d", body={"model": "other", "prompt": "x"}),
        line("e", body={"prompt": "x", "stream": True}),
        {"custom_id": "f", "method": "POST", "url": "/v1/completions"},
        line("g", body=[]),
        line("", body={}),
        b"[]\n",
    ]
    assert faults_of(tmp_path, jsonl(lines)) == [
        ("invalid_json_line", 2),
        ("invalid_method", 3),
        ("duplicate_custom_id", 4),
        ("mismatched_endpoint", 5),
        ("model_not_found", 6),
        ("invalid_body", 7),
        ("missing_required_parameter", 8),
        ("invalid_body", 9),
        ("invalid_custom_id", 10),
        ("invalid_json_line", 11),
    ]


def test_files_that_are_empty_or_too_long_are_refused(tmp_path: Path) -> None:
    assert faults_of(tmp_path / "a", b"\n\n") == [("empty_file", None)]
    assert faults_of(tmp_path / "b", numbered(4), BatchLimits(max_lines=3)) == [("too_many_lines", None)]
    long = jsonl([line("a"), line("b", body={"prompt": "x" * 5000}), line("c")])
    assert faults_of(tmp_path / "c", long, BatchLimits(max_line_bytes=500)) == [("line_too_long", 2)]
    many = faults_of(tmp_path / "d", b"x\n" * 3000)
    assert many == [("invalid_json_line", number) for number in range(1, 101)]


def test_lines_are_read_where_they_are_and_give_way_to_others(tmp_path: Path) -> None:
    content = (
        b"\n"
        + jsonl([line("a")])
        + b"\r\n\n"
        + jsonl([line("b", body={"prompt": "ü", "service_class": "interactive"})])
    )
    store, batch = started(tmp_path, content.rstrip(b"\n"))
    assert (batch.status, batch.total) == ("in_progress", 2)
    found = store.read_lines(batch, 0, 10, 10**6)
    assert [(place.number, place.custom_id) for place, _ in found] == [(1, "a"), (2, "b")]
    assert b'"service_class":"batch"' in request_body(found[1][1], "/v1/completions", 9.5)
    assert b"interactive" not in request_body(found[1][1], "/v1/completions", 9.5)
    assert len(store.read_lines(batch, 0, 10, 1)) == 1
    marks = b'"service_class":"batch","gives_way_ms":9500'
    assert request_body(b'{"body":{"deadline_ms":5}}', "/v1/completions", 9.5) == b"{%b}" % marks
    assert request_body(b'{"body":{}}', "/v1/responses", 9.5) == b'{%b,"store":false}' % marks
    assert request_body(b'{"body":{"store":true}}', "/v1/responses", 9.5) == b'{"store":true,%b}' % marks


def test_a_reply_of_several_lines_becomes_one_row() -> None:
    assert reply_row("r", "a\n", 200, "q", b'{\n "x": "a\\nb"\n}').count(b"\n") == 1
    ends = "a\x85\u2028\u2029b"
    row = reply_row("r", ends, 200, "q", f'{{"x": "{ends}"}}'.encode()).decode()
    assert (
        len(row.splitlines()) == 1 and json.loads(row)["custom_id"] == json.loads(row)["response"]["body"]["x"] == ends
    )
    assert reply_row("r", "a", 502, "q", b"<html>\n").endswith(b'"body":"<html>\\n"},"error":null}\n')


def test_rows_behind_the_marked_end_are_cut_off(tmp_path: Path) -> None:
    store, batch = started(tmp_path, numbered(3))
    store.commit([result(1), result(2, is_success=False)])
    store.close()
    for name in (batch.output_file, batch.error_file):
        with store.path(name).open("ab") as file:
            file.write(b'{"half a row')
    unknown = f"file-{'0' * 32}"
    for path in (store.path(unknown), store.path(f"{unknown}out"), store.incoming_path(unknown), store.path("mine")):
        path.write_bytes(b"x")
    store = BatchStore(tmp_path)
    assert not any(path.exists() for path in (store.path(unknown), store.incoming_path(unknown)))
    assert not store.path(f"{unknown}out").exists()
    assert store.path("mine").exists()  # a folder that is used for other things keeps them
    assert [place.number for place, _ in store.read_lines(batch, 0, 10, 10**6)] == [3]
    store.commit([result(3)])
    store.finish(store.conclude(batch, "completed", 200), "completed", 200)
    done = store.batch(batch.id, "")
    assert done.status == "completed"
    assert check_each_once(store, done, ["id-0", "id-1", "id-2"]) == ({"id-0", "id-2"}, {"id-1"})
    assert store.file(done.output_file, "").num_bytes == store.path(done.output_file).stat().st_size
    assert done.json()["output_file_id"] == done.output_file


def test_a_failed_commit_has_done_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, batch = started(tmp_path, numbered(3))
    store.commit([result(1)])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full)
        with pytest.raises(OSError):
            store.commit([result(2), result(3, is_success=False)])
    assert len(store.tables.lines(batch.number, 0, 10_000)) == 2
    for _ in range(2):  # the second time there is nothing left to do
        store.commit([result(2), result(3, is_success=False)])
    assert len(store.tables.lines(batch.number, 0, 10_000)) == 0
    check_each_once(store, store.batch(batch.id, ""), ["id-0", "id-1", "id-2"])


WRITER = """
import sys, random
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_batch_store import result
from diptych.serving.batches.batch_store import BatchStore
store, chance = BatchStore(Path(sys.argv[1])), random.Random(int(sys.argv[3]))
print("ready", flush=True)
[batch] = store.tables.open_batches()
while places := store.tables.lines(batch.number, 0, chance.randint(1, 9)):
    store.commit([result(place.number, is_success=place.number % 3 > 0) for place in places])
"""


def test_each_line_is_there_once_after_many_kills(tmp_path: Path) -> None:
    store, batch = started(tmp_path, numbered(2000))
    store.close()
    chance = random.Random(7)
    for seed in range(6):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parent), str(seed)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline()
        try:
            process.wait(chance.random() * 0.05)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
    store = BatchStore(tmp_path)
    while places := store.tables.lines(batch.number, 0, 100):
        store.commit([result(place.number, is_success=place.number % 3 > 0) for place in places])
    good, bad = check_each_once(store, store.batch(batch.id, ""), [f"id-{number}" for number in range(2000)])
    assert (len(good), len(bad)) == (2000 - 666, 666)


def test_lines_of_a_batch_that_expires_or_is_cancelled_get_rows(tmp_path: Path) -> None:
    for number, (end, code) in enumerate((("expired", "batch_expired"), ("cancelled", "batch_cancelled"))):
        store, batch = started(tmp_path / end, numbered(1200))
        store.commit([result(1)])
        if end == "cancelled":
            assert store.cancel(batch.id, "", 150).status == "cancelling"
            assert store.cancel(batch.id, "", 150).status == "cancelling"
        found = store.conclude(batch, "completed" if number else "expired", 160)
        assert found.end == end
        assert store.end_lines(found, end)
        store.close()
        store = BatchStore(tmp_path / end)  # in the middle of it
        while store.end_lines(found, end):
            pass
        store.finish(found, end, 170)
        done = store.batch(batch.id, "")
        assert (done.status, done.times[f"{end}_at"]) == (end, 170)
        check_each_once(store, done, [f"id-{place}" for place in range(1200)])
        assert {row["error"]["code"] for row in rows(store.path(done.error_file))} == {code}
        with pytest.raises(ConflictError):
            store.cancel(batch.id, "", 180)


def test_a_batch_that_was_validated_in_part_is_validated_again(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    add_file(store, numbered(1200))
    batch = add_batch(store)
    assert LineIntake(store, batch, ("fake",)).read_part(101)
    store.close()
    store = BatchStore(tmp_path)
    intake = LineIntake(store, batch, ("fake",))
    while intake.read_part(102):
        pass
    assert (store.batch(batch.id, "").total, len(store.tables.lines(batch.number, 0, 10_000))) == (1200, 1200)


def test_one_server_uses_a_folder_at_a_time(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    with pytest.raises(ConfigError, match="another server"):
        BatchStore(tmp_path)
    store.close()
    BatchStore(tmp_path).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        BatchStore(tmp_path / "file")


def test_tenants_see_their_own_files_and_batches(tmp_path: Path) -> None:
    store, batch = started(tmp_path, numbered(1))
    add_file(store, b"x", "file-other", tenant="other")
    assert [file.id for file in store.tables.files("other", None, None, 10, newest=True)] == ["file-other"]
    assert store.tables.batches("other", None, 10) == []
    for look in (lambda: store.file("file-in", "other"), lambda: store.batch(batch.id, "other")):
        with pytest.raises(NotFoundError):
            look()


def test_limits_of_files_and_batches_hold(tmp_path: Path) -> None:
    store, batch = started(
        tmp_path, numbered(1), BatchLimits(max_files=2, max_total_bytes=1000, max_open=1, max_batches=2)
    )
    with pytest.raises(ConflictError, match="open"):
        add_batch(store, "batch_b")
    with pytest.raises(BodyTooLargeError, match="limit is 1000"):
        add_file(store, b"x" * 2000, "file-big")
    add_file(store, b"x", "file-2")
    with pytest.raises(BodyTooLargeError, match="2 files"):
        add_file(store, b"x", "file-3")
    with pytest.raises(ConflictError, match="read by a batch"):
        store.delete_file("file-in", "")
    store.commit([result(1)])
    store.finish(store.conclude(batch, "completed", 200), "completed", 200)
    store.delete_file("file-in", "")
    assert not store.path("file-in").exists()
    with pytest.raises(NotFoundError):
        add_batch(store, "batch_c")
    with pytest.raises(InvalidRequestError, match="purpose"):
        add_batch(store, "batch_c", file_id=batch.output_file)


def test_old_batches_and_expired_files_go(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, BatchLimits(max_batches=3))
    add_file(store, b"")
    for number in range(6):
        batch = add_batch(store, f"batch_{number}")
        store.tables.set_status(batch, "failed", 101)
    assert [batch.id for batch in store.tables.batches("", None, 10)] == ["batch_5", "batch_4", "batch_3"]
    assert [batch.id for batch in store.tables.batches("", 6, 1)] == ["batch_4"]
    store.incoming_path("file-x").write_bytes(b"x")
    file = store.file("file-in", "")
    store.keep(type(file)(0, "file-x", "", "batch", "x", 1, 100, expires_s=200))
    store.drop_expired(199)
    assert store.path("file-x").exists()
    store.drop_expired(200)
    assert not store.path("file-x").exists() and store.tables.file("file-x") is None


def test_no_work_for_a_file_or_a_line_grows_with_the_batches_that_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Terms of batches that are decoded are counted."""
    store = BatchStore(tmp_path)
    num_open, num_expired, num_decoded = 40, 30, 0
    for number in range(num_open):
        add_file(store, b"{}", f"file-{number}")
        add_batch(store, f"batch_{number}", file_id=f"file-{number}")
    for number in range(num_expired):
        store.incoming_path(f"file-old-{number}").write_bytes(b"{}")
        store.keep(StoredFile(0, f"file-old-{number}", "", "batch", "in.jsonl", 2, 100, 200))
    place = LinePlace(1, 0, 2, "id-0")
    store.tables.add_lines(7, [place])
    decode = msgspec.json.decode

    def counting(data: bytes, *, type: Any) -> Any:
        nonlocal num_decoded
        num_decoded += type is BatchTerms
        return decode(data, type=type)

    monkeypatch.setattr(msgspec.json, "decode", counting)
    assert len(store.tables.expired_files(300)) == num_expired and num_decoded == num_open
    assert store.tables.expired_files(100) == [] and num_decoded == num_open
    num_decoded = 0
    store.commit([result(1, 7)])
    assert num_decoded == 1
    add_batch(store, "batch_new", file_id="file-0")
    assert num_decoded == 1
    assert store.tables.numbered(7).completed == 1
    with pytest.raises(KeyError):
        store.tables.numbered(1000)
    store.close()


def test_windows_are_times() -> None:
    assert [window_seconds(text) for text in ("24h", "90m", "7d", "5s")] == [86400, 5400, 604800, 5]
    for text in ("", "24", "0h", "31d", "1w", "-1h", "24h "):
        with pytest.raises(InvalidRequestError, match="completion_window"):
            window_seconds(text)
