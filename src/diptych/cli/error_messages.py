"""How every command reports the errors that Diptych raises on purpose.

Settings have one name inside and another on the command line (``kv_cache_bytes``, ``--kv-cache-memory``): a message
names the options of the command that runs. A setting is known by where it stands: ``rate`` is a word, too.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import typer

from diptych.control.errors import DiptychError

OPTION_NAMES: ContextVar[Mapping[str, str]] = ContextVar("OPTION_NAMES")  # of the command that runs, by setting
RENAMED = {"kv_cache_bytes": "kv_cache_memory", "heartbeat_timeout_s": "heartbeat_timeout"}
_SETTINGS = (  # where a word is a setting: behind group 1
    re.compile(r"^()(?:\w+: )?(\w+)(?= (?:is|are|has no effect|needs)\b)"),  # as in "workload: rate is 0"
    re.compile(r"((?:^|[;,] (?:and )?))(\w+_\w+)(?= (?:is|are|names|needs)\b)"),  # "...; ttft_slo_ms is given, too"
    re.compile(r"(has no effect with(?:out)? )(\w+)(?![\w.=-])"),
    re.compile(r"(\b(?:needs|needs a|and a) )(\w+_\w+)(?![\w.=-])"),
    re.compile(r"^()(\w+)(?= and \w+ are two )"),
    re.compile(r"( and )(\w+)(?= are two )"),
)
_QUOTED = re.compile(r"""((?<!\w)'[^']*'|"[^"]*")""")


@contextmanager
def errors_in_words() -> Iterator[None]:
    """A DiptychError becomes one line on standard error and status 1, not a traceback."""
    try:
        yield
    except DiptychError as error:
        print(f"error: {in_options(error.message, OPTION_NAMES.get({}))}", file=sys.stderr)
        raise typer.Exit(1) from None


def in_options(message: str, names: Mapping[str, str]) -> str:
    """The message with the options that may be typed in place of their settings; what is quoted stays."""

    def option(match: re.Match[str]) -> str:
        name = names.get(RENAMED.get(match[2], match[2]))
        return match[0] if name is None else match[1] + name

    parts = _QUOTED.split(message)
    for setting in _SETTINGS:
        parts[::2] = [setting.sub(option, part) for part in parts[::2]]
    return "".join(parts)
