"""No command obeys what a server or a file of others says: control characters are printed as escapes."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table as RichTable
from rich.text import Text
from typer.testing import CliRunner

from diptych.base import terminal_text
from diptych.base.terminal_text import console, guarded, own
from diptych.cli import main as cli
from diptych.cli.output import print_tables, progress_bar
from diptych.report.text import Table

ODD = "a\x07b\x08c\x7fd\x9be\u202ef[bold]g[/x]"  # a bell, a backspace, and what has no meaning by itself
CONTROLS = "\x07\x08\x7f\x9b\u202e\x1b"
COUNTS = {"completed": 1, "failed": 0, "total": 1}
BATCH = {
    "id": f"batch_{ODD}", "status": f"completed{ODD}", "endpoint": f"/v1/{ODD}", "request_counts": COUNTS,
    "expires_at": 1_800_000_000, "input_file_id": "file-1", "output_file_id": None, "error_file_id": None,
}  # fmt: skip


class OddServer(BaseHTTPRequestHandler):
    """Answers everything, with ODD wherever a text stands. Paths that begin with /refuse get an error of it."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        status, content = 200, self._content(path, self.command == "POST")
        if path.startswith("/refuse") or content is None:
            status, content = 400, {"error": {"message": f"refused {ODD}", "type": ODD, "param": ODD, "code": ODD}}
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    @staticmethod
    def _content(path: str, is_post: bool) -> Any:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": f"model {ODD}", "max_model_len": 100, "created": 1}]}
        if path == "/v1/batches" and not is_post:
            return {"data": [BATCH]}
        if path.startswith("/v1/batches"):
            return BATCH
        if path.startswith("/v1/files"):
            return {"id": f"file{ODD}", "filename": ODD, "bytes": 1}
        return None


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), OddServer) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{made.server_address[1]}"
        made.shutdown()
        thread.join()


def assert_tame(output: str) -> None:
    """Nothing in it controls a terminal."""
    found = [character for character in CONTROLS if character in output]
    assert not found, output


def invoked(words: list[str], tmp_path: Path, **options: Any) -> str:
    """What a command prints, on both streams."""
    result = CliRunner().invoke(cli.app, words, **options)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert_tame(result.stdout + result.stderr)
    return result.stdout + result.stderr


@pytest.mark.parametrize(
    "words",
    [
        "chat URL", "chat --complete URL", "chat URL/refuse", "batch ls --url URL", "batch ls --url URL/refuse",
        "batch cancel b --url URL", "batch run FILE --url URL", "diagnose URL", "diagnose --json URL",
        "bench URL --requests 2 --rate inf", "bench URL/refuse --requests 2", "keys usage URL",
        "cache warm FILE --url URL", "calibrate URL", "advise ODD", "replay ODD", "models ODD", "simulate --trace ODD",
        "plan --model ODD", "keys check ODD", "cache ls ODD", "cache verify ODD",
    ],
)  # fmt: skip
def test_what_a_server_or_a_file_says_is_shown(words: str, server: str, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "messages": []}}
    lines.write_text(json.dumps(line))
    odd = tmp_path / f"odd{ODD.replace('/', '')}.json"
    odd.write_text(json.dumps({ODD: ODD, "diptych": ODD, "format": ODD}) + "\n" + json.dumps([ODD]))
    given = [word.replace("URL", server).replace("FILE", str(lines)).replace("ODD", str(odd)) for word in words.split()]
    assert invoked(given, tmp_path, input=f"hello {ODD}\n")


def test_every_command_runs_with_guarded_streams() -> None:
    """What a command prints, it prints to a stream that escapes: no command has to think of it."""

    def commands(group: Any) -> Iterator[Any]:
        for command in group.commands.values():
            yield from commands(command) if hasattr(command, "commands") else [command]

    from typer.main import get_command

    from diptych.cli.command_line import Command

    found = list(commands(get_command(cli.app)))
    assert len(found) > 15
    assert all(isinstance(command, Command) for command in found)


def test_tables_notes_and_bars_show_what_is_in_them(capsys: pytest.CaptureFixture[str]) -> None:
    with guarded():
        table = Table(ODD, (ODD, "b"), ((ODD, ODD),))
        print_tables([table, table], [ODD], [ODD], lead=[ODD], failures=[ODD], num_narrow=1)
        with progress_bar(announcement=ODD) as show:
            show(ODD, 0.5)
        grid = RichTable()
        grid.add_column(Text(ODD))
        grid.add_row(Text(ODD))
        console(is_error=True, width=200).print(grid, Text(ODD))
    output = capsys.readouterr()
    assert_tame(output.out + output.err)
    escaped = terminal_text.shown(ODD)
    assert escaped in output.out and escaped in output.err  # and nothing in it was taken for a style


def test_styles_of_our_own_reach_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with guarded():
        file = own(sys.stdout)
        screen = terminal_text.ShownConsole(file=file, force_terminal=True, color_system="standard", highlight=False)
        screen.print(ODD, style="bold", markup=False)
        print("\x1b[1m")
    plain = capsys.readouterr().out
    assert plain.startswith("\x1b[1m") and plain.endswith("\\x1b[1m\n")
    assert terminal_text.shown(ODD) in plain.replace("\x1b[1m", "").replace("\x1b[0m", "")


def test_json_that_is_printed_stays_the_same_value(capsys: pytest.CaptureFixture[str]) -> None:
    with guarded():
        print(json.dumps({"a": ODD}, ensure_ascii=False))
    output = capsys.readouterr().out
    assert_tame(output)
    assert json.loads(output) == {"a": ODD}
