"""Every limit of the edge: what one client, or all of them together, may send, leave open, or leave unread.

Each limit is a constant here, declared with what it bounds and what is answered beyond it. ``scripts/docs tables``
writes the table of ``docs/security.md`` from these declarations, and a test sends each limit and one more. Code reads a
limit where it applies (``edge_limits.HEAD_BYTES``), so that a test can set a smaller one.
"""

from dataclasses import dataclass
from typing import TypeVar

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class EdgeLimit:
    """One limit. value: in units of unit; subject: what is bounded; beyond: what happens to what exceeds it (a status
    and its code, or the fate of a connection); option: the option that sets it, if any, and value is its default."""

    value: int | float
    unit: str
    subject: str
    beyond: str
    option: str = ""


LIMITS: dict[str, EdgeLimit] = {}  # by the name of the constant


def _limit(name: str, value: Number, unit: str, subject: str, *, beyond: str, option: str = "") -> Number:
    assert name not in LIMITS
    LIMITS[name] = EdgeLimit(value, unit, subject, beyond, option)
    return value


# Connections and heads of requests.

HEAD_BYTES = _limit(
    "HEAD_BYTES", 65_536, "bytes", "request line and headers of a request", beyond="431 `head_too_long`"
)

# Bodies that are being read.

# What a request may hold: fields, lists, texts, tokens.

# Grammars, schemas and choices.

# Requests in the queue, streams that are open, replies that nobody reads.

# What is stored: responses, files, batches, recorded streams.

# Pages and observers.

# The port of the workers.

# Keys.

KEY_CHARACTERS = _limit("KEY_CHARACTERS", 4096, "bytes", "an API key", beyond="401 `invalid_api_key`")
KEY_LEAST = _limit("KEY_LEAST", 16, "characters", "an API key in a file, at least", beyond="the file is not used")
KEY_FILE_BYTES = _limit("KEY_FILE_BYTES", 4 * 2**20, "bytes", "the file of `--api-keys`", beyond="it is not used")
KEY_ENTRIES = _limit("KEY_ENTRIES", 10_000, "entries", "the file of `--api-keys`", beyond="it is not used")
KEYS_OF_NAME = _limit("KEYS_OF_NAME", 8, "keys", "one entry of that file", beyond="it is not used")
MODELS_OF_NAME = _limit("MODELS_OF_NAME", 64, "models", "one entry of that file", beyond="it is not used")
KEY_NAMES = _limit("KEY_NAMES", 1000, "names", "names of keys in `/metrics`", beyond="counted as `other`")
SECRET_BYTES = _limit("SECRET_BYTES", 4096, "bytes", "a file with one key (`--admin-key-file`)", beyond="no start")
HELD_TOKENS = _limit(
    "HELD_TOKENS",
    1024,
    "tokens",
    "expected of an answer that runs, for the limits of a key",
    beyond="counted at its end",
)
