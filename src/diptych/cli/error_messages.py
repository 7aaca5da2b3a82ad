"""How every command says what went wrong on purpose."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from diptych.control.errors import DiptychError


@contextmanager
def errors_in_words() -> Iterator[None]:
    """What was raised on purpose is one line on standard error and status 1, not a traceback."""
    try:
        yield
    except DiptychError as error:
        print(f"error: {error.message}", file=sys.stderr)
        raise typer.Exit(1) from None
