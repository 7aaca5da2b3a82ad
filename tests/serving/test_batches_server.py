"""Servers that run batches: killed in the middle, and used by the command line."""

import fcntl
import json
import random
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from batch_files import jsonl, line
from servers import CLI, fake_server, running, wait_until

pytestmark = pytest.mark.system
OPEN = ("validating", "in_progress", "finalizing", "cancelling")


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none")


def is_past_validation(client: openai.OpenAI, batch_id: str) -> bool:
    return client.batches.retrieve(batch_id).status != "validating"


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(row) for row in text.splitlines()]


def test_a_server_that_is_killed_many_times_answers_every_line_once(tmp_path: Path) -> None:
    content = jsonl([line(f"id-{number}", body={"prompt": [5, 6], "max_tokens": 4}) for number in range(600)])
    chance, batch_id = random.Random(5), ""
    for _ in range(4):
        with fake_server(batch_dir=str(tmp_path), step_ms=2) as server:
            client = client_of(server.url)
            if not batch_id:
                file = client.files.create(file=("in.jsonl", content), purpose="batch")
                batch_id = client.batches.create(
                    input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
                ).id
            wait_until(partial(is_past_validation, client, batch_id))
            time.sleep(chance.random() * 0.3)
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
    with fake_server(batch_dir=str(tmp_path), step_ms=2) as server:
        client = client_of(server.url)
        wait_until(lambda: client.batches.retrieve(batch_id).status not in OPEN, 60)
        batch = client.batches.retrieve(batch_id)
        assert batch.status == "completed" and batch.output_file_id and batch.error_file_id is None
        found = rows(client.files.content(batch.output_file_id).text)
        assert Counter(row["custom_id"] for row in found) == Counter(f"id-{number}" for number in range(600))
        assert {row["response"]["body"]["usage"]["completion_tokens"] for row in found} == {4}
        assert server.terminate() == 0


def test_a_server_that_stops_ends_its_lines_at_once(tmp_path: Path) -> None:
    with fake_server(batch_dir=str(tmp_path), step_ms=20) as server:
        client = client_of(server.url)
        content = jsonl([line(str(number), body={"prompt": [5], "max_tokens": 3000}) for number in range(3)])
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        wait_until(lambda: server.metrics().get("diptych:batch_lines_running") == 3)
        assert server.terminate(10) == 0
    with fake_server(batch_dir=str(tmp_path), step_ms=20) as server:
        client = client_of(server.url)
        assert client.batches.cancel(batch.id).status == "cancelling"
        wait_until(lambda: client.batches.retrieve(batch.id).status == "cancelled")


def command(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*CLI, "batch", *map(str, words)], capture_output=True, text=True, timeout=200)


def test_the_command_runs_files_with_and_without_a_server(tmp_path: Path) -> None:
    body = {"prompt": "def f(", "max_tokens": 4}
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_bytes(jsonl([line("a", body=body), line("b", body={**body, "max_tokens": 0})]))
    bad.write_bytes(jsonl([line("a", body=body), line("a", body=body)]))
    with running([*CLI, "serve", "--port", "0", "--threads", "1", "--batch-dir", str(tmp_path / "kept")]) as server:
        done = command("run", good, "--url", server.url)
        assert (done.returncode, "1 of 2 lines answered" in done.stdout) == (1, True), done
        assert [row["custom_id"] for row in rows((tmp_path / "good.out.jsonl").read_text())] == ["a"]
        assert [row["custom_id"] for row in rows((tmp_path / "good.out.errors.jsonl").read_text())] == ["b"]
        done = command("run", bad, "--url", server.url)
        assert done.returncode == 1 and "line 2: custom_id 'a'" in done.stderr
        done = command("ls", "--url", server.url)
        assert "completed" in done.stdout and "failed" in done.stdout
        done = command("cancel", "batch_no", "--url", server.url)
        assert done.returncode == 1 and "there is no batch" in done.stderr
    done = command("run", good, "--url", server.url)
    assert done.returncode == 1 and "cannot reach" in done.stderr
    model = "src/diptych/bundled/stdlib-python"
    done = command("run", good, "--model", model, "-o", tmp_path / "own.jsonl", "--serve=--threads=1")
    assert done.returncode == 1 and "1 of 2 lines answered" in done.stdout, done
    assert [row["custom_id"] for row in rows((tmp_path / "own.jsonl").read_text())] == ["a"]
    assert not (tmp_path / "own.jsonl.batch").exists()
    done = command("run", good, "--url", "http://x", "--model", model)
    assert done.returncode == 1 and "--model has no effect with --url" in done.stderr


def is_free(lock: Path) -> bool:
    with lock.open() as opened, suppress(BlockingIOError):
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def test_a_batch_without_a_server_goes_on_after_it_was_killed(tmp_path: Path) -> None:
    """Its server ends with it, and gives up the lock of the folder."""
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "def f(", "max_tokens": 24, "ignore_eos": True}
    file.write_bytes(jsonl([line(str(number), body=body) for number in range(200)]))
    words = ("run", str(file), "--model", "src/diptych/bundled/stdlib-python", "-o", str(output), "--serve=--threads=1")
    process = subprocess.Popen([*CLI, "batch", *words], stdout=subprocess.DEVNULL, start_new_session=True)
    partial = tmp_path / "out.jsonl.batch" / "files"
    wait_until(lambda: any(path.name.endswith("out") and path.stat().st_size for path in partial.glob("file-*")), 60)
    process.kill()  # this process alone: its server must end, or it would keep the folder
    process.wait()
    wait_until(lambda: is_free(tmp_path / "out.jsonl.batch" / "lock"), 20)
    done = command(*words)
    assert done.returncode == 0, done
    assert Counter(row["custom_id"] for row in rows(output.read_text())) == Counter(
        str(number) for number in range(200)
    )
