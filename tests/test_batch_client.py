"""``diptych batch`` against servers of another kind: what they answer is said, and no traceback is printed."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diptych.cli import main as cli

FILE = {"id": "file-1", "filename": "lines.jsonl", "bytes": 1}
BATCH: dict[str, Any] = {
    "id": "batch_1", "status": "completed", "endpoint": "/v1/completions", "input_file_id": "file-1",
    "output_file_id": None, "error_file_id": None, "errors": None, "expires_at": 1,
    "request_counts": {"total": 2, "completed": 2, "failed": 0},
}  # fmt: skip


class Handler(http.server.BaseHTTPRequestHandler):
    replies: dict[str, Any]  # by path without its query; of others, an object without fields

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        reply = self.replies.get(self.path.split("?")[0], {})
        data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_DELETE = do_GET

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, Any]]]:
    """The address, and what it answers."""
    replies: dict[str, Any] = {"/v1/files": FILE, "/v1/batches": BATCH}
    handler = type("Handler", (Handler,), {"replies": replies})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}", replies
        found.shutdown()
        thread.join()


def run(words: str, url: str, tmp_path: Path) -> Any:
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}))
    return CliRunner().invoke(cli.app, [*words.replace("FILE", str(lines)).split(), "--url", url])


ODD: list[Any] = [
    *({}, [], None, 3, b"<html>", b""),
    *({**BATCH, name: {"a": 1}} for name in ("id", "status", "endpoint")),
]


@pytest.mark.parametrize("reply", ODD)
@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("batch ls", "/v1/batches"),
        ("batch cancel batch_1", "/v1/batches/batch_1/cancel"),
        ("batch run FILE", "/v1/files"),
        ("batch run FILE", "/v1/batches"),
    ],
)
def test_a_reply_of_another_shape_is_one_line(
    words: str, path: str, reply: Any, server: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    url, replies = server
    if path == "/v1/files" and isinstance(reply, dict):
        reply = {"id": reply.get("status")} if isinstance(reply.get("status"), dict) else {}
    replies[path] = {"data": [reply]} if words == "batch ls" and isinstance(reply, dict) else reply
    result = run(words, url, tmp_path)
    assert isinstance(result.exception, SystemExit) and result.exit_code == 1
    assert result.stderr.startswith(f"error: {url}{path}: ") and result.stderr.count("\n") == 1


def test_what_a_server_may_leave_out_is_not_needed(server: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    url, replies = server
    few = {name: BATCH[name] for name in ("id", "status", "endpoint", "input_file_id")}
    replies["/v1/batches"] = {"data": [few, BATCH]}
    listed = run("batch ls", url, tmp_path)
    assert listed.exit_code == 0 and "0 of 0" in listed.stdout and "2 of 2" in listed.stdout
    replies["/v1/batches"] = few
    assert run("batch run FILE", url, tmp_path).exit_code == 0
    replies["/v1/batches"] = {**few, "status": "failed"}
    failed = run("batch run FILE", url, tmp_path)
    assert failed.exit_code == 1 and "the file cannot be run" in failed.stderr
