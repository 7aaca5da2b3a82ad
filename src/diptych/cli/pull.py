"""``diptych pull``, and what ``diptych serve --download`` does of it: a model of the Hub comes into its cache here."""

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from diptych.base.byte_size import size_words
from diptych.base.terminal_text import console
from diptych.cli.command_line import own_command
from diptych.cli.error_messages import errors_in_words
from diptych.cli.options import Text
from diptych.control.errors import ConfigError
from diptych.runtime.models.hub_name import HubName, hint_for, hub_name
from diptych.runtime.models.model_place import cached_model, hub_cache
from diptych.serving.hub_download import HubCache

NAME_HELP = "Name of the Hub: ORGANISATION/NAME, of GGUF files with a tag (ORGANISATION/NAME:Q4_K_M), or its address."
REVISION_HELP = "Branch, tag or commit of the Hub. Default: main."


def pull(
    name: Annotated[str, typer.Argument(help=NAME_HELP)],
    revision: Annotated[Text, typer.Option(help=REVISION_HELP)] = None,
) -> None:
    """Download a model of the Hugging Face Hub into its cache, to be served by name; what was cut is gone on with."""
    with errors_in_words():
        wanted = wanted_name(name, revision)
        place = download(wanted)
        option = f" --revision {wanted.revision}" if wanted.revision else ""
        print(f"{wanted} is in {place}\nServe it with: {own_command()} serve {wanted}{option}")


def wanted_name(name: str, revision: str | None) -> HubName:
    """The model of the Hub that is meant. Raises ConfigError for what is no name of the Hub."""
    wanted = hub_name(name)
    if wanted is None:
        hint = hint_for(name, ())
        raise ConfigError(f"{name} is no name of the Hugging Face Hub{f': {hint}' if hint else ''}", param="model")
    return HubName(wanted.name, wanted.tag, revision or wanted.revision)


def download(wanted: HubName) -> Path:
    """Have a model of the Hub here: its directory or GGUF file. Raises ConfigError."""
    cache = hub_cache(os.environ)
    with DownloadScreen(str(wanted)) as screen:
        model = HubCache(cache, on_progress=screen.on_progress).pull(wanted)
    print(
        f"{wanted}: {size_words(model.num_bytes)} in {len(model.files)} files, each as the Hub has it", file=sys.stderr
    )
    return cached_model(wanted, cache)


def present_or_downloaded(name: str, revision: str | None) -> None:
    """Have a model here that is served by name; the Hub is not asked for one that is whole here, nor for a path."""
    wanted = hub_name(name)
    if wanted is None or Path(name).expanduser().exists():
        return
    wanted = HubName(wanted.name, wanted.tag, revision or wanted.revision)
    try:
        cached_model(wanted, hub_cache(os.environ))
    except ConfigError:
        download(wanted)


class DownloadScreen:
    """A line that shows how far a download is; without a terminal, one for each file. Use it as a context manager."""

    def __init__(self, name: str) -> None:
        self._console = console()
        self._stage = ""
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(f"looking up {name}", total=None)

    def __enter__(self) -> "DownloadScreen":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def on_progress(self, stage: str, done: int, total: int) -> None:
        """Bytes are there, or were checked."""
        self._progress.update(self._task, description=stage, completed=done, total=total)
        if stage != self._stage and not self._console.is_terminal:
            print(f"{stage} ({size_words(total)} in all)", file=sys.stderr, flush=True)
        self._stage = stage
