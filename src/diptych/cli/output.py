"""The results of every command: tables in the terminal, files that were asked for.

Owns the look of tables in a terminal and the message for a file that cannot be written. Computes no figure.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from diptych.control.errors import ConfigError

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
        grid.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in table.rows:
        grid.add_row(*row)
    return grid


def print_tables(
    tables: "Sequence[Table]", notes: Iterable[str], warnings: Iterable[str] = (), *, num_narrow: int = 0
) -> None:
    """Tables and sentences on standard output. num_narrow: how many of the last tables stand side by side."""
    from rich.columns import Columns
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    grids = [drawn(table) for table in tables]
    num_wide = len(grids) - num_narrow
    for grid in grids[:num_wide]:
        console.print(grid)
    if num_narrow:
        console.print(Columns(grids[num_wide:], padding=(0, 2)))
    for warning in warnings:
        console.print(f"NOT RELIABLE: {warning}", style="bold red", soft_wrap=True, markup=False)
    for note in notes:
        console.print(note, style="dim", soft_wrap=True, markup=False)


@contextmanager
def progress_bar(*, quiet: bool = False) -> Iterator[Callable[[str, float], None]]:
    """A bar on standard error, unless that is no terminal; set by (what is being done, the share that is done)."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )
    with bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda stage, share: bar.update(task, description=stage, completed=share)
