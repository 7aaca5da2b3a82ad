"""The results of every command: tables in the terminal, files that were asked for.

Owns the look of tables in a terminal and the message for a file that cannot be written. Computes no figure.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from diptych.base.terminal_text import console
from diptych.control.errors import ConfigError

LINE_S = 10.0  # between two lines of progress where there is no terminal

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from diptych.report.text import Table


def check_folders(paths: Mapping[str, Path | None]) -> None:
    """Raise ConfigError before the work when a file cannot be written after it, because its folder does not exist.
    Option -> file (None: no file)."""
    for name, path in paths.items():
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{name} is {path}; there is no folder {path.parent}", param=name)


def write_file(path: Path, chunks: Iterable[bytes]) -> str:
    """A sentence about the file that was written. Raises ConfigError."""
    try:
        with path.open("wb") as file:
            file.writelines(chunks)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    return f"wrote {path} ({path.stat().st_size / 1000:,.0f} kB)"


def drawn(table: "Table") -> "RichTable":
    """A table as terminals show it."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable

    grid = RichTable(title=table.title, title_justify="left", title_style="bold", header_style="dim", box=SIMPLE_HEAD)
    for index, name in enumerate(table.columns):
        is_name = index == 0  # which is broken before a figure is cut
        grid.add_column(name, justify="left" if is_name else "right", no_wrap=not is_name, overflow="fold")
    for row in table.rows:
        grid.add_row(*row)
    return grid


def print_tables(
    tables: "Sequence[Table]",
    notes: Iterable[str],
    warnings: Iterable[str] = (),
    *,
    lead: Iterable[str] = (),
    failures: Iterable[str] = (),
    num_narrow: int = 0,
) -> None:
    """Sentences and tables on standard output: first ``lead``, what was found; then what speaks against it. num_narrow:
    how many of the last tables stand side by side."""
    from rich.columns import Columns

    screen = console(width=None if sys.stdout.isatty() else 120)
    for line in lead:
        screen.print(line, style="bold", soft_wrap=True)
    for warning in warnings:
        screen.print(f"NOT RELIABLE: {warning}", style="bold red", soft_wrap=True)
    for line in failures:
        screen.print(line, style="red", soft_wrap=True)
    grids = [drawn(table) for table in tables]
    num_wide = len(grids) - num_narrow
    for grid in grids[:num_wide]:
        screen.print(grid)
    if num_narrow:
        screen.print(Columns(grids[num_wide:], padding=(0, 2)))
    for note in notes:
        screen.print(note, style="dim", soft_wrap=True)


class ShownProgress:
    """A bar, set by (what is being done, the share that is done), and lines above it."""

    def __init__(self, show: Callable[[str, float], None], say: Callable[[str], None]) -> None:
        self._show = show
        self.say = say

    def __call__(self, stage: str, share: float) -> None:
        self._show(stage, share)


@contextmanager
def progress_bar(*, quiet: bool = False, announcement: str = "") -> Iterator[ShownProgress]:
    """A bar on standard error; where that is no terminal, a line each LINE_S seconds. announcement: a line before the
    first."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    screen = console(is_error=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=screen,
        transient=True,
        disable=quiet or not screen.is_terminal,
    )
    with bar:
        task = bar.add_task("starting", total=1.0)
        said = time.monotonic()

        def show(stage: str, share: float) -> None:
            nonlocal said, announcement
            if announcement and not quiet:
                screen.print(announcement, soft_wrap=True)
            announcement = ""
            bar.update(task, description=stage, completed=share)
            if not quiet and not screen.is_terminal and (now := time.monotonic()) >= said + LINE_S:
                said = now
                print(f"{stage}: {share:.0%}", file=sys.stderr, flush=True)

        def say(line: str) -> None:
            if not quiet:
                screen.print(line, soft_wrap=True)

        yield ShownProgress(show, say)
