"""The messages between the process that serves pages and the process that computes them: MessagePack over pipes.

Imports nothing that computes, because the serving process imports this file too.
"""

from typing import IO, Literal, TypeVar

import msgspec

from diptych.base.length_prefix import pack, read_message

MOST_CALLS = 16  # that wait behind the one that is being answered
MOST_STREAMS = 8  # that are being read; the oldest makes room
ANSWER_S = 120.0  # for one answer, or one event of a stream
MOST_QUERY_BYTES = 4096  # of an address of a panel
Message = TypeVar("Message", bound=msgspec.Struct)


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``page``: a page's HTML (``name``: its template and chapter). ``panel``: a panel's JSON. ``begin``: the first
    event of a panel that answers in events; ``next``: the one after it; ``drop``: no more of them are wanted.
    ``diagnosis``, ``engines``: of the server, or the engines, in ``body`` (timeline/watched_server.py). packs: the
    client can read gzip."""

    kind: Literal["page", "panel", "begin", "next", "drop", "diagnosis", "engines"]
    name: str = ""
    query: dict[str, str] = {}
    stream: int = 0
    packs: bool = False
    body: bytes = b""


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """status: of HTTP. body: HTML or JSON, gzip of it if ``is_packed``; of ``next``, empty when there are no more
    events."""

    status: int = 200
    body: bytes = b""
    stream: int = 0
    is_packed: bool = False


def refusal(status: int, message: str, param: str | None = None) -> Reply:
    """An error as the pages read it."""
    return Reply(status=status, body=msgspec.json.encode({"error": {"message": message, "param": param}}))


def send(pipe: IO[bytes], message: Call | Reply) -> None:
    """Write one message. Raises BrokenPipeError when the other side is gone."""
    pipe.write(pack(msgspec.msgpack.encode(message)))
    pipe.flush()


def receive(pipe: IO[bytes], kind: type[Message]) -> Message:
    """Read one message. Raises EOFError when the other side is gone."""
    return msgspec.msgpack.decode(read_message(pipe), type=kind)
