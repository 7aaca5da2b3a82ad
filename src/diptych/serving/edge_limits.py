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

_FORGOTTEN = "the oldest of the tenant that has the most are forgotten: 404 `response_not_found`"
RESPONSES_MEMORY_BYTES = _limit(
    "RESPONSES_MEMORY_BYTES",
    256 * 2**20,
    "bytes",
    "responses of `/v1/responses` in memory",
    beyond=_FORGOTTEN,
    option="--max-responses",
)
RESPONSES_FILE_BYTES = _limit(
    "RESPONSES_FILE_BYTES",
    4 * 2**30,
    "bytes",
    "responses in the file of `--responses`",
    beyond=_FORGOTTEN,
    option="--max-responses",
)
RESPONSES = _limit("RESPONSES", 100_000, "responses", "that are stored", beyond=_FORGOTTEN)
RESPONSE_LIFE_S = _limit(
    "RESPONSE_LIFE_S", 30 * 24 * 3600.0, "seconds", "the life of a stored response", beyond="404 `response_not_found`"
)
RESPONSES_UNWRITTEN_BYTES = _limit(
    "RESPONSES_UNWRITTEN_BYTES",
    64 * 2**20,
    "bytes",
    "responses that wait to be written",
    beyond='the reply says `"store": false`',
)
RESPONSE_WRITE_S = _limit(
    "RESPONSE_WRITE_S",
    10.0,
    "seconds",
    "the end of a reply waits until its response is stored",
    beyond='the reply says `"store": false`',
)
CONVERSATION_BYTES = _limit(
    "CONVERSATION_BYTES",
    16 * 2**20,
    "bytes",
    "stored items that `previous_response_id`, or references to items, stand for",
    beyond="400 `conversation_too_long`",
)

# Pages and observers.

# The port of the workers.

# Keys.
