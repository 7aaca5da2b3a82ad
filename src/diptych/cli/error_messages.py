"""How every command reports the errors that Diptych raises on purpose.

Settings have one name inside and another on the command line (``kv_cache_bytes``, ``--kv-cache-memory``): a message
that begins with a setting names the option of the command that runs.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import typer

from diptych.control.errors import DiptychError

OPTION_NAMES: ContextVar[Mapping[str, str]] = ContextVar("OPTION_NAMES")  # of the command that runs, by setting
RENAMED = {"kv_cache_bytes": "kv_cache_memory", "swap_bytes": "swap_memory", "heartbeat_timeout_s": "heartbeat_timeout"}
_SETTING = re.compile(r"^(?:\w+: )?(\w+)(?= (?:is|are|has no effect|needs)\b)")  # as in "workload: rate is 0"


@contextmanager
def errors_in_words() -> Iterator[None]:
    """A DiptychError becomes one line on standard error and status 1, not a traceback."""
    try:
        yield
    except DiptychError as error:
        print(f"error: {in_options(error.message, OPTION_NAMES.get({}))}", file=sys.stderr)
        raise typer.Exit(1) from None


def in_options(message: str, names: Mapping[str, str]) -> str:
    """The message with the option that was typed in place of the setting that it begins with."""

    def option(match: re.Match[str]) -> str:
        return names.get(RENAMED.get(match[1], match[1]), match[0])

    return _SETTING.sub(option, message)
