"""``diptych batch run | ls | cancel``: a file of requests, run by a server that is there or by one started for it."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from diptych.base.child_process import end_process
from diptych.cli.batch_client import BatchClient
from diptych.cli.command_line import Command
from diptych.cli.error_messages import errors_in_words
from diptych.cli.examples import examples
from diptych.cli.options import LOCAL_URL, Strings, Text, option
from diptych.cli.output import check_folders, print_tables, progress_bar
from diptych.control.errors import ConfigError, RequestError
from diptych.diagnosis.adapters.http_get import Site
from diptych.report.text import Table
from diptych.serving.batches.batch_records import OPEN

SERVER, ENGINE = "Server", "Without a server"
URL_HELP = f"Server that runs the lines. Default: {LOCAL_URL}."
KEY_HELP = "API key of the server. Default: none."
MODEL_HELP = "Start a server of this model for this batch alone; a stopped batch resumes. Default: the server of --url."
SERVE_HELP = "Option for the server of --model, such as --serve=--quantize=int8. Repeatable. Default: none."
POLL_S = 0.5
OFFLINE_WINDOW = "30d"
STOP_TIMEOUT_S = 60.0
ERRORS_SUFFIX = ".errors.jsonl"
_SERVED_AT = re.compile(r"served at (http://\S+)")

batch = typer.Typer(help="Run files of requests in the format of OpenAI's batches.", no_args_is_help=True)
Url = Annotated[Text, option(URL_HELP, SERVER)]
Key = Annotated[Text, option(KEY_HELP, SERVER, envvar="DIPTYCH_API_KEY")]


@batch.command(cls=Command, epilog=examples("batch run"))
def run(
    file: Annotated[Path, typer.Argument(help="JSON lines with custom_id, method, url and body.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the answers. Default: FILE.out.jsonl.")
    ] = None,
    errors: Annotated[
        Path | None, typer.Option(help="File for lines that failed. Default: OUTPUT.errors.jsonl.")
    ] = None,
    url: Url = None,
    api_key: Key = None,
    window: Annotated[str, option("Time limit of the batch; lines not done by then expire.", SERVER)] = "24h",
    model: Annotated[Text, option(MODEL_HELP, ENGINE)] = None,
    serve: Annotated[Strings, option(SERVE_HELP, ENGINE)] = None,
) -> None:
    """Run a file, wait for it, and write the answers; the server keeps no copy. The exit status is 1 if a line
    failed."""
    with errors_in_words():
        if model is not None and url is not None:
            raise ConfigError("model has no effect with url: the server has its own", param="model")
        if model is None and serve:
            raise ConfigError("serve has no effect without model", param="serve")
        found = output or file.with_name(f"{file.name.removesuffix('.jsonl')}.out.jsonl")
        failed = errors or found.with_name(found.name.removesuffix(".jsonl") + ERRORS_SUFFIX)
        check_folders({"output": found, "errors": failed})
        endpoint = _endpoint(file)
        folder = found.with_name(f"{found.name}.batch")
        server = nullcontext(url or LOCAL_URL) if model is None else _own_server(model, folder, serve or [])
        with server as address:
            client = BatchClient(Site.of(address, api_key))
            ended = _run(client, file, endpoint, OFFLINE_WINDOW if model is not None else window, model is not None)
            num_failed = _fetch(client, ended, found, failed)
            for name in ("input_file_id", "output_file_id", "error_file_id"):
                if ended[name] is not None:
                    client.delete_file(ended[name])
        if model is not None:
            shutil.rmtree(folder, ignore_errors=True)
    if num_failed:
        raise typer.Exit(1)


@batch.command("ls", cls=Command, epilog=examples("batch ls"))
def list_batches(
    url: Url = None,
    api_key: Key = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="Most batches to list, the newest first.")] = 20,
) -> None:
    """List the batches of a server."""
    with errors_in_words():
        found = BatchClient(Site.of(url or LOCAL_URL, api_key)).batches(limit)
        columns = ("batch", "status", "endpoint", "done", "failed", "expires")
        print_tables([Table("", columns, tuple(map(_row, found)))], () if found else ("there are none",))


@batch.command(cls=Command, epilog=examples("batch cancel"))
def cancel(
    batch_id: Annotated[str, typer.Argument(help="Id of the batch, as in diptych batch ls.")],
    url: Url = None,
    api_key: Key = None,
) -> None:
    """Give up the lines of a batch that are not done; those that are done stay."""
    with errors_in_words():
        found = BatchClient(Site.of(url or LOCAL_URL, api_key)).cancel(batch_id)
        print(f"{found['id']} is {found['status']}")


def _run(client: BatchClient, file: Path, endpoint: str, window: str, goes_on: bool) -> dict[str, Any]:
    """A batch of this file that has ended. goes_on: one of this file that is open already is waited for."""
    with progress_bar() as show:
        found = _earlier(client, file) if goes_on else None
        if found is None:
            show("uploading", 0.0)
            found = client.create(client.upload(file), endpoint, window)
        try:
            while found["status"] in OPEN:
                counts = found["request_counts"]
                done, total = counts["completed"] + counts["failed"], counts["total"]
                words = f"{found['status'].replace('_', ' ')} {done:,}/{total:,}" if total else "validating"
                show(words, done / total if total else 0.0)
                time.sleep(POLL_S)
                found = client.batch(found["id"])
        except KeyboardInterrupt:
            how = "run the same command again" if goes_on else f"diptych batch cancel {found['id']} gives it up"
            print(f"\n{found['id']} is not done; {how}", file=sys.stderr)
            raise typer.Exit(130) from None
    return found


def _earlier(client: BatchClient, file: Path) -> dict[str, Any] | None:
    """A batch of this file that an earlier command began. Raises ConfigError when it is another file."""
    for found in client.batches(1):
        known = client.file(found["input_file_id"])
        if (known["filename"], known["bytes"]) != (file.name, file.stat().st_size):
            raise ConfigError(f"an earlier batch of {known['filename']} is kept beside the output; delete its folder")
        if found["status"] != "failed":
            return found
    return None


def _fetch(client: BatchClient, ended: dict[str, Any], output: Path, errors: Path) -> int:
    """Write the files of a batch that has ended. Returns how many lines failed. Raises RequestError when no line could
    be run."""
    if ended["status"] == "failed":
        faults = [fault for fault in (ended["errors"] or {}).get("data") or () if isinstance(fault, dict)]
        shown = [
            f"line {fault['line']}: {fault.get('message')}" if fault.get("line") else str(fault.get("message"))
            for fault in faults
        ]
        raise RequestError("the file cannot be run:\n  " + "\n  ".join(shown[:20]))
    counts = ended["request_counts"]
    print(
        f"{ended['status']}: {counts['completed']:,} of {counts['total']:,} lines answered, {counts['failed']:,} failed"
    )
    for name, path in (("output_file_id", output), ("error_file_id", errors)):
        if ended[name] is not None:
            client.download(ended[name], path)
            print(f"wrote {path}")
    return int(counts["failed"])


def _endpoint(file: Path) -> str:
    """The url of the first line. Raises ConfigError."""
    try:
        with file.open("rb") as opened:
            first = next((text for text in opened if text.strip()), b"")
        url = json.loads(first)["url"]
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", param="file") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"the first line of {file} is no JSON object with a url", param="file") from None
    return str(url)


@contextmanager
def _own_server(model: str, folder: Path, options: list[str]) -> Iterator[str]:
    """The address of a server for this batch alone, which keeps what it has done in ``folder``. It ends with this
    process, however that ends."""
    program = "from diptych.cli.end_with_stdin import end_with_stdin; end_with_stdin()"
    program += "; from diptych.cli.entry_point import main; main()"
    settings = ("--port", "0", "--batch-dir", str(folder), "--drain-timeout", "1", *options)
    process = subprocess.Popen(
        (sys.executable, "-c", program, "serve", model, *settings),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        for text in process.stdout:
            if found := _SERVED_AT.search(text):
                yield found[1]
                return
        raise ConfigError(f"the server for {model} did not start", param="model")
    finally:
        end_process(process, STOP_TIMEOUT_S)
        process.stdout.close()
        process.stdin.close()


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    counts = found["request_counts"]
    done = f"{counts['completed'] + counts['failed']:,} of {counts['total']:,}"
    expires = datetime.fromtimestamp(found["expires_at"]).strftime("%m-%d %H:%M") if found["expires_at"] else ""
    return (found["id"], found["status"], found["endpoint"], done, f"{counts['failed']:,}", expires)
