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

REFUSAL_LINGER_S = _limit(
    "REFUSAL_LINGER_S", 1.0, "s", "time for a client to read a refusal", beyond="the connection ends"
)
LISTEN_BACKLOG = _limit(
    "LISTEN_BACKLOG",
    16_384,
    "connections",
    "connections that wait to be accepted (at most `net.core.somaxconn`)",
    beyond="the kernel lets the client try again",
)
REFUSED_CONNECTIONS = _limit(
    "REFUSED_CONNECTIONS",
    256,
    "connections",
    "connections open only to be refused for want of file descriptors with 503 `too_many_connections`",
    beyond="they wait to be accepted",
)

# Bodies that are being read.

# What a request may hold: fields, lists, texts, tokens.

# Grammars, schemas and choices.

# Requests in the queue, streams that are open, replies that nobody reads.

# What is stored: responses, files, batches, recorded streams.

# Pages and observers.

# The port of the workers.

# Keys.
