"""How every command reports the errors that Diptych raises on purpose."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from diptych.control.errors import DiptychError


@contextmanager
def errors_in_words() -> Iterator[None]:
    """A DiptychError becomes one line on standard error and status 1, not a traceback."""
    try:
        yield
    except DiptychError as error:
        print(f"error: {error.message}", file=sys.stderr)
        raise typer.Exit(1) from None
